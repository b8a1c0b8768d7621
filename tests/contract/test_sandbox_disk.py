"""Real sandboxes on a disk of their own, which one of them fills: it is judged, and its neighbours are not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # helpers shared by the parts of the suite
from scripted_session import Bash, Say, ScriptedSessions

from rl360.agents import bash_agent
from rl360.harbor.protocol import RunReply, RunRequest
from rl360.harbor.runner import Attempt, Runner, prepare
from rl360.sandboxes.bubblewrap import BubblewrapProvider
from tests.contract.test_sandboxes import REASON, needs_cgroups

pytestmark = [pytest.mark.contract, pytest.mark.skipif(REASON is not None, reason=REASON or "")]
TEST_SH = 'if [ "$(cat answer)" = right ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt'
# a file that nobody can name, held by a process in the background
HIDE = """(setsid python3 -c '
import os, time
with open("f", "wb", 0) as file:
    os.unlink("f")
    try:
        while True: file.write(b"x" * (1 << 20))
    except OSError: pass
    time.sleep(100)
' >/dev/null 2>&1 &); sleep 1.5"""
# the same, of a thread that shares its descriptors with nobody
APART = """(setsid python3 -c '
import ctypes, os, threading, time
def hide():
    assert ctypes.CDLL(None).unshare(0x400) == 0
    with open("f", "wb", 0) as file:
        os.unlink("f")
        try:
            while True: file.write(b"x" * (1 << 20))
        except OSError: pass
        time.sleep(100)
threading.Thread(target=hide).start()
time.sleep(100)
' >/dev/null 2>&1 &); sleep 1.5"""
# no bytes at all, but a file each
EMPTY = """python3 -c '
import os, time
for _ in range(7):
    if os.fork() == 0:
        name = str(os.getpid())
        for n in range(4000):
            os.open(name, os.O_CREAT | os.O_RDWR)
            os.unlink(name)
        open("ready" + name, "w").close()
        time.sleep(100)
' >/dev/null 2>&1 & while [ "$(ls | grep -c ready)" -lt 7 ]; do sleep 0.1; done"""
MANY = """python3 -c '
import os
for n in range(10**6):
    if n % 500 == 0: os.mkdir(f"d{n // 500}")
    os.mknod(f"d{n // 500}/{n}")
'"""


@pytest.fixture(scope="module")
def sessions() -> Iterator[ScriptedSessions]:
    server = ScriptedSessions()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small one of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", folder], check=False).returncode
    if mounted:
        pytest.skip("needs root, to mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def task_of(folder: Path, storage_mb: int) -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text(f"[environment]\nstorage_mb = {storage_mb}\n")
    (folder / "instruction.md").write_text("Write the answer.")
    (folder / "tests" / "test.sh").write_text(TEST_SH)
    return folder


def play(home: Path, *attempts: tuple[Path, str]) -> list[RunReply]:
    """Attempts at once; nothing of them may be left."""

    async def go() -> list[RunReply]:
        provider = BubblewrapProvider(home / "sandboxes")
        try:
            async with httpx.AsyncClient(trust_env=False) as http:

                async def one(number: int, task: Path, url: str) -> RunReply:
                    given: dict[str, Any] = {"instance_id": "t", "task_dir": str(task), "base_url": url}
                    order = RunRequest(attempt_id=str(number), run="r", agent_name="bash", **given)
                    prepared = prepare(order, provider, {"bash": bash_agent.run})
                    return await Runner(provider, http, "t" * 16).run(prepared, Attempt(order))

                return await asyncio.gather(*(one(n, *given) for n, given in enumerate(attempts)))
        finally:
            assert list((home / "sandboxes" / "live").iterdir()) == []
            give_up_at = time.monotonic() + 20
            while any((home / "sandboxes" / "trash").iterdir()):
                assert time.monotonic() < give_up_at
                await asyncio.sleep(0.05)
            provider.close()

    return asyncio.run(go())


@needs_cgroups
@pytest.mark.parametrize("hide", [HIDE, APART], ids=["process", "thread"])
def test_who_fills_the_disk_is_judged_and_its_neighbour_is_not(
    hide: str, disk: Path, tmp_path: Path, sessions: ScriptedSessions
) -> None:
    hostile = sessions.add("hostile", Bash(hide), Say("done"))
    late = sessions.add("late", Bash("sleep 2; head -c 100000 /dev/zero > big && echo right > answer"), Say("done"))
    early = sessions.add("early", Bash("echo right > answer; sync; sleep 2"), Say("done"))
    replies = play(
        disk, (task_of(tmp_path / "a", 8), hostile), *((task_of(tmp_path / url[-4:], 8), url) for url in (late, early))
    )
    said = [(reply.outcome, reply.exit_status, reply.reward) for reply in replies]
    assert said[0] == ("failed", "SandboxLimitExceeded", 0.0)
    assert replies[1].outcome in ("sandbox_lost", "passed") and replies[2].outcome in ("sandbox_lost", "passed"), said


def test_on_a_full_disk_nobody_is_scored_a_failure(disk: Path, tmp_path: Path, sessions: ScriptedSessions) -> None:
    (disk / "others").write_bytes(b"x" * (38 << 20))
    url = sessions.add("honest", Bash("head -c 4M /dev/zero > big && echo right > answer"), Say("done"))
    (reply,) = play(disk, (task_of(tmp_path / "t", 8), url))
    assert (reply.outcome, reply.reward, reply.retryable) == ("sandbox_lost", None, True)
    assert reply.detail.startswith("the host's disk was full")
    (disk / "others").unlink()
    url = sessions.add("again", Bash("head -c 4M /dev/zero > big && echo right > answer"), Say("done"))
    assert play(disk, (tmp_path / "t", url))[0].outcome == "passed"


def test_who_makes_files_without_end_is_ended_while_it_does(tmp_path: Path, sessions: ScriptedSessions) -> None:
    (reply,) = play(tmp_path, (task_of(tmp_path / "t", 1000), sessions.add("many", Bash(MANY), Say("done"))))
    assert (reply.outcome, reply.exit_status) == ("failed", "SandboxLimitExceeded")
    assert reply.phases.agent < 45 and reply.cleanup.confirmed, "in the middle of its command"


@needs_cgroups
def test_open_files_count_though_they_are_empty_and_have_no_name(tmp_path: Path, sessions: ScriptedSessions) -> None:
    (reply,) = play(tmp_path, (task_of(tmp_path / "t", 1000), sessions.add("empty", Bash(EMPTY), Say("done"))))
    assert (reply.outcome, reply.exit_status, reply.reward) == ("failed", "SandboxLimitExceeded", 0.0)


def test_tests_that_fill_the_disk_are_ended(disk: Path, tmp_path: Path, sessions: ScriptedSessions) -> None:
    """What the agent left does not count: it is judged, however much it is."""
    task = task_of(tmp_path / "t", 8)
    (task / "tests" / "test.sh").write_text("sh ./answer; echo 0 > /logs/verifier/reward.txt")
    fill = "head -c 6M /dev/zero > big; echo 'head -c 24M /dev/zero > more; sleep 60' > answer"
    (reply,) = play(disk, (task, sessions.add("fill", Bash(fill), Say("done"))))
    assert (reply.outcome, reply.reward, reply.retryable) == ("verifier_error", None, False)
    assert "storage_mb" in reply.detail and reply.phases.verify < 15
    over = "head -c 12M /dev/zero > big; true > answer"
    (reply,) = play(disk, (task, sessions.add("over", Bash(over), Say("done"))))
    assert (reply.outcome, reply.exit_status, reply.reward) == ("failed", "SandboxLimitExceeded", 0.0)
