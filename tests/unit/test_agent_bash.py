"""The bash agent against a policy of fixed turns over real HTTP."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # helpers shared by the parts of the suite
from scripted_session import Bash, Call, Fail, Hang, Say, ScriptedSessions

from rl360.agents import bash_agent
from rl360.agents.base import AgentContext, AgentEnd, AgentFailure, AgentMetrics
from rl360.harbor.outcome import ExitStatus
from rl360.sandboxes.provider import ExecResult


@pytest.fixture(scope="module")
def sessions() -> Iterator[ScriptedSessions]:
    server = ScriptedSessions()
    server.start()
    yield server
    server.stop()


def play(
    sessions: ScriptedSessions, *turns: Any, max_turns: int = 4, seconds: float = 10, agent: Any = bash_agent.run
) -> tuple[Any, AgentMetrics]:
    """Run the agent on these turns; commands `echo X` print X, others exit 3."""
    url = sessions.add("s", *turns)
    metrics = AgentMetrics()

    async def execute(command: str, timeout_s: float) -> ExecResult:
        assert timeout_s > 0
        text = command.removeprefix("echo ").encode() + b"\n" if command.startswith("echo ") else b""
        return ExecResult(0 if text else 3, text, len(text), 0.0)

    async def go() -> AgentEnd:
        async with httpx.AsyncClient() as http:
            deadline = asyncio.get_running_loop().time() + seconds
            context = AgentContext("Do it.", url, "openai/policy", {}, max_turns, deadline, execute, http, metrics)
            return await agent(context)

    try:
        return asyncio.run(go()), metrics
    except AgentFailure as failure:
        return failure, metrics


def test_plays_to_the_end_with_verbatim_history(sessions: ScriptedSessions) -> None:
    end, metrics = play(sessions, Bash("echo hi"), Bash("false"), Say("done"))
    assert end.exit_status == ExitStatus.SUBMITTED
    assert (metrics.turns, metrics.tool_calls, metrics.format_errors) == (3, 2, 0)
    last = sessions.seen["s"][-1]
    assert [item["role"] for item in last["messages"]] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert last["messages"][0]["content"] == "Use bash." and last["messages"][1]["content"] == "Do it."
    assert [item["content"] for item in last["messages"] if item["role"] == "tool"] == ["hi", "(exit 3)"]
    assert last["messages"][3]["tool_call_id"] == "call_0"
    parameters = last["tools"][0]["function"]["parameters"]
    assert len(last["tools"]) == 1 and parameters["properties"] == {"command": {"type": "string"}}
    assert metrics.model_query_time_sum > 0


def test_a_turn_may_be_as_long_as_a_policy_can_say(sessions: ScriptedSessions) -> None:
    """Were it too long, a policy that says enough would have its attempt voided."""
    end, metrics = play(sessions, Say("x" * (6 << 20)))
    assert (end.exit_status, metrics.turns) == (ExitStatus.SUBMITTED, 1)


def test_length_ends_it(sessions: ScriptedSessions) -> None:
    end, metrics = play(sessions, Say("so long", "length"))
    assert end.exit_status == ExitStatus.LENGTH_LIMIT and metrics.turns == 1
    for fail in (Fail(409, "length"), Fail(409, "cut_turn"), Fail(413, "over_budget")):
        end, metrics = play(sessions, Bash("echo a"), fail)
        assert end.exit_status == ExitStatus.LENGTH_LIMIT and metrics.turns == 1


def test_a_prompt_that_fills_the_sequence_is_named(sessions: ScriptedSessions) -> None:
    failure, metrics = play(sessions, Fail(409, "length"))
    assert isinstance(failure, AgentFailure) and failure.exit_status == ExitStatus.GENERATION_ERROR
    assert "raise rollout.max_seq_len" in str(failure) and metrics.turns == 0


def test_turn_limit_runs_the_last_call(sessions: ScriptedSessions) -> None:
    end, metrics = play(sessions, *[Bash("echo x")] * 9, max_turns=2)
    assert end.exit_status == ExitStatus.TURN_LIMIT
    assert (metrics.turns, metrics.tool_calls) == (2, 2)


def test_malformed_calls_are_answered_not_repaired(sessions: ScriptedSessions) -> None:
    bad = [
        Call("bash", "{"),
        Call("sh", '{"command": "x"}'),
        Call("bash", '{"command": 3}'),
        Call("bash", '{"a": "b"}'),
    ]
    end, metrics = play(sessions, *bad, Say("text <tool_call>bash"), max_turns=9)
    assert end.exit_status == ExitStatus.SUBMITTED
    assert metrics.format_errors == 5
    told = [item["content"] for item in sessions.seen["s"][-1]["messages"] if item["role"] == "tool"]
    assert told == ["error: call bash with one string, command"] * 4


@pytest.mark.parametrize(
    ("fail", "status"),
    [
        (Fail(404, "not_found"), ExitStatus.SESSION_LOST),
        (Fail(409, "lost_race"), ExitStatus.SESSION_LOST),
        (Fail(502, "wrong_version"), ExitStatus.GENERATION_ERROR),
        (Fail(400, "bad_history"), ExitStatus.GENERATION_ERROR),
        (Fail(500, "bad_matcher", retry=False), ExitStatus.GENERATION_ERROR),
        (Fail(502, "bad_upstream", retry=False), ExitStatus.GENERATION_ERROR),
    ],
)
def test_infrastructure_is_named(sessions: ScriptedSessions, fail: Fail, status: ExitStatus) -> None:
    failure, metrics = play(sessions, fail)
    assert isinstance(failure, AgentFailure) and failure.exit_status == status
    assert not failure.retryable and metrics.retries == 0 and fail.code in str(failure)


def test_a_failed_upstream_is_asked_again(sessions: ScriptedSessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bash_agent, "RETRY_PAUSES_S", (0.01, 0.01))
    end, metrics = play(sessions, Fail(502, "bad_upstream"), Fail(502, "bad_upstream"), Say("done"))
    assert end.exit_status == ExitStatus.SUBMITTED and metrics.retries == 2
    lost = {(502, "no_engine"): ExitStatus.NO_ENGINE, (503, "no_engine"): ExitStatus.NO_ENGINE}
    lost |= {(503, code): ExitStatus.SESSION_LOST for code in ("server_full", "draining")}
    for (status, code), named in lost.items():
        failure, metrics = play(sessions, *[Fail(status, code)] * 9)
        assert failure.exit_status == named and metrics.retries == 2


def test_a_session_that_is_silent_until_the_deadline(sessions: ScriptedSessions) -> None:
    failure, _ = play(sessions, Hang(1.0), seconds=0.3)
    assert failure.exit_status == ExitStatus.AGENT_TIMEOUT


def test_observation() -> None:
    def seen(code: int, output: bytes, total: int | None = None) -> str:
        return bash_agent.observation(ExecResult(code, output, len(output) if total is None else total, 0.0))

    assert seen(0, b"") == "ok"
    assert seen(0, b"\n\n") == "ok"
    assert seen(2, b"") == "(exit 2)"
    assert seen(1, b"no\n") == "no\n(exit 1)"
    assert seen(0, b"ab", 10) == "ab\n(8 bytes cut)"
    assert seen(0, b"\xff\x00") == "\ufffd\ufffd"


def edit(path: str, old: str, new: str) -> Call:
    return Call("edit", json.dumps({"path": path, "old": old, "new": new}))


def test_edit_is_a_second_tool_for_who_asks_for_it(sessions: ScriptedSessions) -> None:
    bad = [Call("edit", '{"path": "x", "old": "", "new": 3}'), Call("edit", '{"path": "x"}'), edit("", "", "")]
    end, metrics = play(sessions, edit("x", "", "y"), *bad, Say("done"), max_turns=9, agent=bash_agent.run_with_edit)
    assert (end.exit_status, metrics.tool_calls, metrics.format_errors) == (ExitStatus.SUBMITTED, 4, 3)
    last = sessions.seen["s"][-1]
    assert [tool["function"]["name"] for tool in last["tools"]] == ["bash", "edit"]
    assert last["messages"][0]["content"] == "Use bash and edit."
    told = [item["content"] for item in last["messages"] if item["role"] == "tool"]
    assert told[1:] == ["error: call bash with one string, command, or edit with three: path, old, new"] * 3
    end, metrics = play(sessions, edit("x", "", "y"), Say("done"))
    assert metrics.format_errors == 1  # the plain bash agent has no such tool


def test_what_edit_does(tmp_path: Path) -> None:
    def run(path: str, old: str, new: str) -> str:
        command = bash_agent.edit_command({"function": {"name": "edit", "arguments": edit(path, old, new).arguments}})
        assert command is not None
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.stderr.strip()

    odd = "a 'b' \"c\" $d `e` \\f\r\n\tü"
    assert run("new/one.txt", "", odd) == "" and (tmp_path / "new" / "one.txt").read_bytes() == odd.encode()
    assert run("new/one.txt", "", "x") == "new/one.txt exists; give old, the text to replace"
    assert (
        run("new/one.txt", "$d `e`", "D") == "" and '"c" D \\f\r\n' in (tmp_path / "new/one.txt").read_bytes().decode()
    )
    assert run("new/one.txt", "missing", "x") == "old is in new/one.txt 0 times; it must be there once"
    (tmp_path / "two").write_text("aa")
    assert (
        run("two", "a", "b") == "old is in two 2 times; it must be there once"
        and (tmp_path / "two").read_text() == "aa"
    )
    assert "No such file" in run("none", "a", "b")
    (tmp_path / "bytes").write_bytes(b"\xff")
    assert "can't decode" in run("bytes", "a", "b")
