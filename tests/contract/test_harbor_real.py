"""Real Harbor's agents in Harbor's own process, against a scripted model over HTTP, in real sandboxes.

They run where `rl360 harbor setup` made its environment (HOME/harbor, or RL360_TEST_HARBOR names one)."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # helpers shared by the parts of the suite
from scripted_session import Bash, Fail, Hang, Say, ScriptedSessions

from rl360.harbor.protocol import RunReply, RunRequest
from rl360.harbor.real.agent import HarborAgent, Worker, harbor_agents
from rl360.harbor.real.place import default_folder, ready
from rl360.harbor.runner import Attempt, Runner, prepare
from rl360.sandboxes.bubblewrap import BubblewrapProvider, marked_pids

TRY = ["bwrap", "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
FOLDER = Path(os.environ.get("RL360_TEST_HARBOR") or default_folder())
REASON = None
if shutil.which("bwrap") is None or subprocess.run(TRY, capture_output=True, check=False).returncode != 0:
    REASON = "bwrap cannot run here"
elif not ready(FOLDER):
    REASON = f"no Harbor in {FOLDER}: rl360 harbor setup"
pytestmark = [pytest.mark.contract, pytest.mark.skipif(REASON is not None, reason=REASON or "")]


def keys(text: str, *, complete: bool = False, wait_s: float = 0.5) -> Say:
    """What terminus-2 wants of its model: keystrokes as JSON."""
    commands = [{"keystrokes": text, "duration": wait_s}] if text else []
    said = {"analysis": "a", "plan": "p", "commands": commands, "task_complete": complete}
    return Say(json.dumps(said))


class Sessions(ScriptedSessions):
    """Null content and none are one, as for our session servers: mini-swe-agent drops the null."""

    def answer(self, name: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        for message in body["messages"]:
            if message["role"] == "assistant":
                message.setdefault("content", None)
        return super().answer(name, body)


@pytest.fixture(scope="module")
def sessions() -> Iterator[ScriptedSessions]:
    server = Sessions()
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def agents() -> Iterator[dict[str, Any]]:
    made = harbor_agents(FOLDER)
    yield made
    worker: Worker = made["terminus-2"].worker  # type: ignore[attr-defined]
    worker.close()
    assert worker._process.poll() is not None


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """Passes when `answer` holds 42."""
    root = tmp_path / "task"
    (root / "tests").mkdir(parents=True)
    (root / "task.toml").write_text("[environment]\nmemory_mb = 2048\n")
    (root / "instruction.md").write_text("Write 42 to answer.")
    (root / "tests" / "test.sh").write_text(
        '[ "$(cat answer)" = 42 ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt'
    )
    return root


def play(tmp_path: Path, task: Path, agent: HarborAgent, url: str, **given: Any) -> RunReply:
    """One attempt; nothing of it may be left."""
    limits = {"memory_mb": 2048, "pids": 256, "cpu_time_s": 120}
    given = {"agent_timeout_s": 120.0, "deadline_s": 300.0, "limits": limits, **given}

    async def go() -> RunReply:
        provider = BubblewrapProvider(tmp_path / "sandboxes")
        try:
            async with httpx.AsyncClient(trust_env=False) as http:
                order = RunRequest(
                    instance_id="t", task_dir=str(task), attempt_id="a", run="r", agent_name="x", base_url=url, **given
                )
                prepared = prepare(order, provider, {"x": agent})
                return await Runner(provider, http, "t" * 16).run(prepared, Attempt(order))
        finally:
            assert list((tmp_path / "sandboxes" / "live").iterdir()) == []
            provider.close()

    reply = asyncio.run(go())
    assert reply.cleanup.confirmed, reply.cleanup
    return reply


def test_terminus_2_types_into_the_sandbox(tmp_path: Path, task: Path, sessions: ScriptedSessions, agents: Any) -> None:
    turns = [keys("echo 42 > answer\n"), keys("", complete=True), keys("", complete=True)]
    reply = play(tmp_path, task, agents["terminus-2"], sessions.add("t2", *turns))
    assert (reply.outcome, reply.exit_status, reply.reward) == ("passed", "Submitted", 1.0), reply
    assert reply.agent_metrics["turns"] == 3
    first, second = sessions.seen["t2"][0]["messages"], sessions.seen["t2"][1]["messages"]
    assert "Write 42 to answer." in first[0]["content"]
    assert "echo 42 > answer" in second[-1]["content"]  # what the terminal showed


@pytest.mark.parametrize(
    ("turns", "given", "status", "outcome"),
    [
        ([keys("echo 42 > answer\n"), *[keys("true\n")] * 9], {"max_turns": 2}, "TurnLimitExceeded", "passed"),
        ([keys("echo 42 > answer\n"), Fail(409, "length")], {}, "SequenceLengthLimitExceeded", "truncated"),
        ([keys("true\n"), *[Fail(404, "not_found", retry=False)] * 20], {}, "SessionLost", "session_lost"),
        (
            [keys("echo 42 > answer\n"), keys("sleep 60\n", wait_s=60)],
            {"agent_timeout_s": 25.0},
            "AgentTimeout",
            "passed",
        ),
        ([keys("true\n"), Hang(90)], {"agent_timeout_s": 45.0}, "GenerationError", "generation_error"),
        ([keys("tmux kill-server\n"), *[keys("true\n")] * 9], {}, "Submitted", "failed"),
    ],
)
def test_how_terminus_2_ends(
    tmp_path: Path,
    task: Path,
    sessions: ScriptedSessions,
    agents: Any,
    turns: list[Any],
    given: dict[str, Any],
    status: str,
    outcome: str,
) -> None:
    reply = play(tmp_path, task, agents["terminus-2"], sessions.add("end", *turns), **given)
    assert (reply.exit_status, reply.outcome) == (status, outcome), reply
    assert (reply.reward is None) == (outcome in ("session_lost", "generation_error"))


def test_a_sandbox_lost_under_harbor_is_no_reward(
    tmp_path: Path, task: Path, sessions: ScriptedSessions, agents: Any
) -> None:
    """Harbor would call it the agent's timeout and score it 0."""
    (task / "task.toml").write_text("[environment]\nmemory_mb = 2048\n[agent]\ntimeout_sec = 60\n")
    url = sessions.add("lost", keys("true\n"), Hang(5), keys("true\n"))

    def strike() -> None:
        live, deadline = tmp_path / "sandboxes" / "live", time.monotonic() + 60
        while len(sessions.seen["lost"]) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        for folder in live.iterdir():
            for pid in marked_pids(folder):
                os.kill(pid, 9)

    thread = threading.Thread(target=strike)
    thread.start()
    reply = play(tmp_path, task, agents["terminus-2"], url)
    thread.join(timeout=10)
    assert (reply.outcome, reply.reward) == ("sandbox_lost", None), reply


def test_harbors_process_may_die(tmp_path: Path, task: Path, sessions: ScriptedSessions, agents: Any) -> None:
    worker = agents["terminus-2"].worker
    worker._process.kill()
    worker._process.wait(timeout=5)
    turns = [keys("echo 42 > answer\n"), keys("", complete=True), keys("", complete=True)]
    reply = play(tmp_path, task, agents["terminus-2"], sessions.add("again", *turns))
    assert reply.outcome == "passed", reply


def test_mini_swe_agent_runs_in_the_sandbox(
    tmp_path: Path, task: Path, sessions: ScriptedSessions, agents: Any
) -> None:
    done = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    url = sessions.add("mini", Bash("echo 42 > answer"), Bash(done), Bash(done))
    reply = play(tmp_path, task, agents["mini-swe-agent"], url)
    assert (reply.outcome, reply.exit_status, reply.reward) == ("passed", "Submitted", 1.0), reply
    assert reply.agent_metrics["turns"] == 2


def test_mini_swe_agent_that_its_own_model_ended_is_judged(
    tmp_path: Path, task: Path, sessions: ScriptedSessions, agents: Any
) -> None:
    url = sessions.add("ended", Bash("echo 41 > answer; kill -TERM $PPID; sleep 5"), Say("done"))
    reply = play(tmp_path, task, agents["mini-swe-agent"], url)
    assert (reply.outcome, reply.exit_status, reply.reward) == ("failed", "AgentExited", 0.0), reply
