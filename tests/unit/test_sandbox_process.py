"""A bubblewrap sandbox's failures without one: whose they are, and that nothing of a start that failed stays open."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl360.harbor.protocol import SandboxLimits
from rl360.sandboxes import bwrap_process, cgroups
from rl360.sandboxes.bwrap_process import BwrapSandbox, launch
from rl360.sandboxes.provider import SandboxGone, SandboxSpec, SandboxStartError, Workspace

SPEC = SandboxSpec("demo/one", {}, SandboxLimits(), Workspace(Path("/nowhere")))


@pytest.mark.parametrize(("hits", "by_contents"), [({}, False), ({"pids": 0}, False), ({"oom": 1}, True)])
def test_a_command_that_could_not_be_killed_in_time_is_the_hosts_unless_a_limit_was_hit(
    monkeypatch: pytest.MonkeyPatch, hits: dict[str, int], by_contents: bool
) -> None:
    async def late(*_: Any) -> str:
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
