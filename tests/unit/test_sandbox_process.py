"""A bubblewrap sandbox's failures without one: whose they are, and that nothing of a start that failed stays open."""

from __future__ import annotations

import asyncio
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl360.harbor.protocol import SandboxLimits
from rl360.sandboxes import bwrap_process, cgroups
from rl360.sandboxes.bwrap_process import BwrapSandbox, launch
from rl360.sandboxes.provider import SandboxGone, SandboxSpec, SandboxStartError, Workspace

SPEC = SandboxSpec("demo/one", {}, SandboxLimits(), Workspace(Path("/nowhere")))


@pytest.mark.parametrize(
    ("hits", "late_s", "by_contents"), [({}, 0, True), ({}, 9, False), ({"pids": 0}, 9, False), ({"oom": 1}, 9, True)]
)
def test_a_command_that_could_not_be_killed_in_time_is_the_hosts_only_where_this_server_was_kept_from_running(
    monkeypatch: pytest.MonkeyPatch, hits: dict[str, int], late_s: float, by_contents: bool
) -> None:
    clock = [100.0]
    monkeypatch.setattr(bwrap_process.time, "monotonic", lambda: clock[0])

    async def late(*_: Any) -> str:
        clock[0] += late_s
        raise TimeoutError

    async def killed() -> None:
        await asyncio.sleep(0)

    sandbox = BwrapSandbox.__new__(BwrapSandbox)
    sandbox.spec, sandbox._group = SPEC, cgroups.Group(())
    monkeypatch.setattr(sandbox, "_answer", late)
    monkeypatch.setattr(sandbox, "_kill_inside", killed)
    monkeypatch.setattr(bwrap_process.cgroups, "limit_hits", lambda _: hits)
    with pytest.raises(SandboxGone, match="no answer after its command was killed") as caught:
        asyncio.run(sandbox._end_command("1 "))
    assert caught.value.by_contents is by_contents


@pytest.mark.parametrize(
    ("code", "hits", "by_contents"),
    [
        (200, {}, True),
        (0, {}, True),
        (139, {}, True),
        (137, {"oom": 1}, True),
        (137, {"oom": 0}, False),
        (-9, {}, False),
    ],
)
def test_only_what_nothing_inside_can_do_to_pid_1_is_the_hosts(
    monkeypatch: pytest.MonkeyPatch, code: int, hits: dict[str, int], by_contents: bool
) -> None:
    sandbox = BwrapSandbox.__new__(BwrapSandbox)
    sandbox.spec, sandbox._group, sandbox._words = SPEC, cgroups.Group(()), ""
    sandbox._process = subprocess.Popen(["sh", "-c", f"exit {code}" if code >= 0 else f"kill {code} $$"])
    monkeypatch.setattr(sandbox, "_on_answers", lambda: None)
    monkeypatch.setattr(bwrap_process.cgroups, "limit_hits", lambda _: hits)
    assert sandbox._gone().by_contents is by_contents


@pytest.mark.parametrize("pressed", [False, True], ids=["the host's memory", "its own memory"])
def test_a_kill_for_memory_is_the_sandboxes_where_its_own_limit_was_met(tmp_path: Path, pressed: bool) -> None:
    one, two = tmp_path / "v1", tmp_path / "v2"
    for path in (one, two):
        path.mkdir()
    (one / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    (one / "memory.failcnt").write_text(f"{7 * pressed}\n")
    (two / "memory.events").write_text(f"low 0\nhigh 0\nmax 3\noom {int(pressed)}\noom_kill 1\n")
    for path in (one, two):
        assert bool(cgroups.limit_hits(cgroups.Group((path,))).get("oom")) is pressed, path


@pytest.mark.parametrize("argv", [["bwrap", "a\0b"], ["/no/such/program"]], ids=["nul", "absent"])
def test_a_start_that_fails_leaves_no_descriptor(argv: list[str]) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(SandboxStartError, match="bwrap did not start"):
        asyncio.run(launch(SPEC, cgroups.Group(()), lambda *_: argv, {}, "", b""))
    assert os.listdir("/proc/self/fd") == before


def test_a_start_that_is_cancelled_leaves_its_proof() -> None:
    spec = replace(SPEC, stops=[])

    async def go() -> None:
        job = asyncio.ensure_future(launch(spec, cgroups.Group(()), lambda *_: ["sleep", "60"], {}, "", b""))
        await asyncio.sleep(0.02)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job

    asyncio.run(go())
    assert [proof.confirmed for proof in spec.stops] == [True]
