"""Programs as agents: they run in a real sandbox, reach their own session and nothing else, and end by name."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # helpers shared by the parts of the suite
from scripted_session import Bash, Fail, Hang, Say, ScriptedSessions

from rl360.agents.harness import Harness, Terms, load_harness
from rl360.errors import BadInput
from rl360.harbor.protocol import RunReply, RunRequest
from rl360.harbor.runner import Attempt, Runner, prepare
from rl360.sandboxes.bubblewrap import BubblewrapProvider

TRY = ["bwrap", "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
REASON = (
    None if shutil.which("bwrap") and subprocess.run(TRY, capture_output=True, check=False).returncode == 0 else "bwrap"
)
pytestmark = [pytest.mark.contract, pytest.mark.skipif(REASON is not None, reason="bwrap cannot run here")]

LOOP = """
import json, os, subprocess, sys, urllib.request, urllib.error
messages = [{"role": "user", "content": open(os.environ["RL360_INSTRUCTION"]).read()}]
while True:
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    request.add_header("content-type", "application/json")
    try:
        choice = json.load(urllib.request.urlopen(request))["choices"][0]
    except urllib.error.HTTPError as error:
        sys.exit(f"refused: {error.code} {error.read().decode()}")
    messages.append(choice["message"])
    calls = choice["message"].get("tool_calls") or []
    if not calls:
        break
    for call in calls:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr or "ok"})
"""
WITH_OPENAI = """
import openai
client = openai.OpenAI()
said = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Do it."}])
open("answer", "w").write(said.choices[0].message.content)
"""


@pytest.fixture(scope="module")
def sessions() -> Iterator[ScriptedSessions]:
    server = ScriptedSessions()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """Passes when `answer` holds 42."""
    root = tmp_path / "task"
    (root / "tests").mkdir(parents=True)
    (root / "task.toml").write_text("[agent]\ntimeout_sec = 20\n")
    (root / "instruction.md").write_text("Write 42 to answer.")
    (root / "tests" / "test.sh").write_text(
        '[ "$(cat answer)" = 42 ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt'
    )
    return root


def play(
    tmp_path: Path, task: Path, url: str, program: str = LOOP, env: dict[str, str] | None = None, **given: Any
) -> RunReply:
    """One attempt by a harness that runs `program`; nothing of it may be left."""
    tool = tmp_path / "tool"
    tool.mkdir(exist_ok=True)
    (tool / "main.py").write_text(program)
    site = Path(importlib.util.find_spec("httpx").origin).parents[1]  # type: ignore[union-attr,arg-type]
    mounts = (str(tool), *([str(site)] if "openai" in program else ()))
    terms = Terms(command=("python3", f"{tool}/main.py", "{model_name}"), mounts=mounts, env=env or {})

    async def go() -> RunReply:
        provider = BubblewrapProvider(tmp_path / "sandboxes")
        try:
            async with httpx.AsyncClient(trust_env=False) as http:
                order = RunRequest(
                    instance_id="t",
                    task_dir=str(task),
                    attempt_id="a",
                    run="r",
                    agent_name="mine",
                    base_url=url,
                    **given,
                )
                prepared = prepare(order, provider, {"mine": Harness("mine", terms)})
                return await Runner(provider, http, "t" * 16).run(prepared, Attempt(order))
        finally:
            assert list((tmp_path / "sandboxes" / "live").iterdir()) == []
            provider.close()

    reply = asyncio.run(go())
    assert reply.cleanup.confirmed, reply.cleanup
    return reply


def test_a_program_acts_and_what_it_leaves_is_gone(tmp_path: Path, task: Path, sessions: ScriptedSessions) -> None:
    left = Bash("setsid sleep 86413 >/dev/null 2>&1 & (sleep 1; echo 41 > answer) >/dev/null 2>&1 &")
    reply = play(tmp_path, task, sessions.add("ok", Bash("echo 42 > answer"), left, Say("done")))
    assert (reply.outcome, reply.exit_status, reply.reward) == ("passed", "Submitted", 1.0), reply
    assert reply.agent_metrics["turns"] == 3
    assert sessions.seen["ok"][0]["model"] == "policy"
    assert b"86413" not in b"".join(path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())


@pytest.mark.parametrize(
    ("turns", "given", "status", "outcome"),
    [
        ([Bash("echo 42 > answer")] * 3, {"max_turns": 2}, "TurnLimitExceeded", "passed"),
        ([Bash("echo 42 > answer"), Fail(409, "length")], {}, "SequenceLengthLimitExceeded", "truncated"),
        ([Bash("echo 42 > answer"), Say("and", "length")], {}, "SequenceLengthLimitExceeded", "truncated"),
        ([Fail(409, "length")], {}, "GenerationError", "generation_error"),
        ([Bash("echo 42 > answer"), Bash("kill -9 -1")], {}, "SandboxLimitExceeded", "passed"),
        ([Bash("true"), Fail(404, "not_found")], {}, "SessionLost", "session_lost"),
        ([Fail(503, "no_engine")], {}, "NoEngine", "no_engine"),
        ([Bash("echo 42 > answer"), Hang(30)], {"agent_timeout_s": 2.0}, "AgentTimeout", "passed"),
    ],
)  # fmt: skip
def test_how_it_ends(
    tmp_path: Path,
    task: Path,
    sessions: ScriptedSessions,
    turns: list[Any],
    given: dict[str, Any],
    status: str,
    outcome: str,
) -> None:
    reply = play(tmp_path, task, sessions.add("end", *turns), **given)
    assert (reply.exit_status, reply.outcome) == (status, outcome), reply
    assert (reply.reward is not None) == (outcome in ("passed", "failed", "truncated"))


def test_a_program_that_asks_a_broken_model_to_the_end_was_not_late(
    tmp_path: Path, task: Path, sessions: ScriptedSessions
) -> None:
    """What infrastructure kept from going on is no failure of the policy, whatever the program made of it."""
    stubborn = LOOP.replace('sys.exit(f"refused: {error.code} {error.read().decode()}")', "continue")
    assert stubborn != LOOP
    url = sessions.add("broken", Bash("echo 42 > answer"), *[Fail(502, "bad_upstream")] * 100_000)
    reply = play(tmp_path, task, url, stubborn, agent_timeout_s=3.0)
    assert (reply.outcome, reply.exit_status, reply.reward) == ("generation_error", "GenerationError", None), reply


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import sys; print('x' * 100_000); sys.exit('cannot go on')", "exit 1; "),
        ("print('nothing to do')", "it ended without a turn of the model; nothing to do"),
    ],
)
def test_a_fault_of_the_program_is_no_verdict(tmp_path: Path, task: Path, program: str, words: str) -> None:
    reply = play(tmp_path, task, "http://127.0.0.1:9/sessions/none/v1", program)
    assert (reply.outcome, reply.exit_status, reply.reward) == ("unclassified", "AgentError", None)
    assert words in reply.detail


def test_it_reaches_its_session_and_nothing_else(
    tmp_path: Path, task: Path, sessions: ScriptedSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL360_SECRET_OF_THE_SERVER", "hidden")
    other = sessions.add("other", Say("not yours"))
    port = other.split(":")[2].split("/")[0]
    program = f"""
import http.client, os, socket
where = os.environ["OPENAI_BASE_URL"].split("/")[2].split(":")
for path in ("/v1/../../other/v1/chat/completions", "/v1/%2e%2e/other", "/sessions/other/v1/messages", "/v1//x"):
    link = http.client.HTTPConnection(where[0], int(where[1]), timeout=5)
    link.request("POST", path, '{{"messages": []}}', {{"content-type": "application/json"}})
    print(path, link.getresponse().status)
try:
    socket.create_connection(("127.0.0.1", {port}), 2)
    print("REACHED")
except OSError:
    print("closed")
print("env", "hidden" in str(os.environ), sorted(os.listdir("/run/rl360")))
try:
    open("/run/rl360/instruction.md", "w")
    print("WROTE")
except OSError:
    print("read-only")
"""
    reply = play(tmp_path, task, sessions.add("own"), program)
    said = reply.detail
    assert sessions.seen["other"] == [] and sessions.seen["own"] == []
    assert " 200" not in said and "REACHED" not in said and "WROTE" not in said, said
    assert "closed env False ['entry.py', 'instruction.md', 'session.sock'] read-only" in said, said


def test_openais_own_client(tmp_path: Path, task: Path, sessions: ScriptedSessions) -> None:
    pytest.importorskip("openai")
    site = Path(importlib.util.find_spec("httpx").origin).parents[1]  # type: ignore[union-attr,arg-type]
    url = sessions.add("openai", Say("42"))
    reply = play(tmp_path, task, url, WITH_OPENAI, {"PYTHONPATH": str(site)}, limits={"memory_mb": 1024, "pids": 128})
    assert (reply.outcome, reply.exit_status) == ("passed", "Submitted"), reply


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "command: Field required"),
        ("command = []", "command: "),
        ("command = ['x']\nmount = []", "mount: Extra inputs"),
        ("command = ['x']\nmounts = ['relative']", "'relative' is not the absolute, plain path of a folder"),
        ("command = ['x']\nmounts = ['/usr/bin']", "'/usr/bin' is a system folder"),
        ("command = ['x']\nmounts = ['/']", "'/' is a system folder"),
        ("command = ['x']\nmounts = ['HOME']", "holds the deployment's secrets"),
        ("command = 'x", "harness "),
    ],
)
def test_files_that_are_no_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str) -> None:
    monkeypatch.setenv("RL360_HOME", str(tmp_path / "home"))
    (tmp_path / "h.toml").write_text(text.replace("HOME", str(tmp_path)))
    with pytest.raises(BadInput) as refused:
        load_harness(str(tmp_path / "h.toml"))
    assert words in str(refused.value)
