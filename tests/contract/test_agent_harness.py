"""Programs as agents: they run in a real sandbox, reach their own session and nothing else, and end by name."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
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

from rl360.agents import base, bash_agent
from rl360.agents.base import Agent
from rl360.agents.harness import PARALLEL, Harness, Terms, load_harness
from rl360.errors import BadInput
from rl360.harbor.protocol import RunReply, RunRequest
from rl360.harbor.runner import Attempt, Runner, prepare
from rl360.sandboxes.bubblewrap import BubblewrapProvider
from rl360.sessions.registry import Limits
from tests.unit.sessions_data import call_turn
from tests.unit.sessions_server import BEARER, Bench, engine_reply, session_bench

TRY = ["bwrap", "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
REASON = (
    None if shutil.which("bwrap") and subprocess.run(TRY, capture_output=True, check=False).returncode == 0 else "bwrap"
)
pytestmark = [pytest.mark.contract, pytest.mark.skipif(REASON is not None, reason="bwrap cannot run here")]

SCHEMA = '{"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}'
TOOL = '{"type": "function", "function": {"name": "bash", "parameters": ' + SCHEMA + "}}"
LOOP = """
import json, os, subprocess, sys, urllib.request, urllib.error
messages = [{"role": "user", "content": open(os.environ["RL360_INSTRUCTION"]).read()}]
while True:
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": [TOOL]}).encode()
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
""".replace("TOOL", TOOL)
# the stock clients, with streams and whatever retries they are made with
WITH_OPENAI = """
import json, openai, os, subprocess
client = openai.OpenAI()
tool = TOOL
messages = [{"role": "user", "content": open(os.environ["RL360_INSTRUCTION"]).read()}]
while True:
    asked = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": [tool]}
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as events:
        message = events.get_final_completion().choices[0].message
    messages.append({"role": "assistant", "content": message.content, "tool_calls": [
        {"id": call.id, "type": "function", "function": {"name": call.function.name,
         "arguments": call.function.arguments}} for call in message.tool_calls or []]})
    for call in message.tool_calls or []:
        command = json.loads(call.function.arguments)["command"]
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": done.stdout + done.stderr or "ok"})
    if not message.tool_calls:
        break
""".replace("TOOL", TOOL)
WITH_ANTHROPIC = """
import anthropic, os, subprocess
client = anthropic.Anthropic()
tool = {"name": "bash", "input_schema": SCHEMA}
messages = [{"role": "user", "content": open(os.environ["RL360_INSTRUCTION"]).read()}]
while True:
    with client.messages.stream(model=os.environ["ANTHROPIC_MODEL"], max_tokens=400, messages=messages,
                                tools=[tool]) as events:
        message = events.get_final_message()
    messages.append({"role": "assistant", "content": message.content})
    results = []
    for block in message.content:
        if block.type == "tool_use":
            done = subprocess.run(block.input["command"], shell=True, capture_output=True, text=True)
            results.append({"type": "tool_result", "tool_use_id": block.id, "content": done.stdout or "ok"})
    if message.stop_reason != "tool_use":
        break
    messages.append({"role": "user", "content": results})
""".replace("SCHEMA", SCHEMA)


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
    tmp_path: Path,
    task: Path,
    url: str,
    program: str = LOOP,
    env: dict[str, str] | None = None,
    agent: Agent | None = None,
    **given: Any,
) -> RunReply:
    """One attempt by a harness that runs `program`, or by `agent`; nothing of it may be left."""
    tool = tmp_path / "tool"
    tool.mkdir(exist_ok=True)
    (tool / "main.py").write_text(program)
    mounts = (str(tool), *(env or {}).values())
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
                prepared = prepare(order, provider, {"mine": agent or Harness("mine", terms)})
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


# -- with a real session server ------------------------------------------------------------------------------------

WRONG = "echo 41 > answer"
BREAK = r"printf '\377'"  # output that is no text: LOOP raises, exit 1
ASK = """python3 -I - <<'END'
import json, os, socket, threading, time, urllib.error, urllib.request
url = os.environ["OPENAI_BASE_URL"]
def post(path, body, timeout=60):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data), timeout=timeout) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
    except OSError as error:
        return 0, str(error)
%s
END
"""
FIRST = """
first = {"model": "policy", "messages": [{"role": "user", "content": "Write 42 to answer."}], "tools": [TOOL]}
""".replace("TOOL", TOOL)
# what a policy that did badly may try, all after its answer is wrong: (command, the statuses that it is verified after)
STEERING: dict[str, tuple[str, set[str]]] = {
    "exit": (BREAK, {"AgentExited"}),
    "kill": ("kill -9 $PPID", {"SandboxLimitExceeded"}),
    "relay": ("pkill -9 -f [e]ntry.py", {"SandboxLimitExceeded"}),
    "everything": ("kill -9 -1", {"SandboxLimitExceeded"}),
    "junk": (ASK % 'assert post("/chat/completions", b"{")[0] == 400' + BREAK, {"AgentExited"}),
    "path": (ASK % 'assert post("/chat/nowhere", {})[0] == post("/../x", {})[0] == 404' + BREAK, {"AgentExited"}),
    "large": (
        ASK % 'print(post("/chat/completions", b" " * (2 << 20))[0])' + BREAK,
        {"SequenceLengthLimitExceeded"},
    ),
    "history": (ASK % (FIRST + 'print(post("/chat/completions", first)[0])'), {"AgentExited"}),
    "race": (
        ASK % (FIRST + 'for _ in range(4): threading.Thread(target=post, args=("/chat/completions", first)).start()'),
        {"AgentExited"},
    ),
    "turns": (ASK % (FIRST + 'for _ in range(20): post("/chat/completions", first)'), {"TurnLimitExceeded"}),
    "disk": ("head -c 30000000 /dev/zero > fill; " + BREAK, {"SandboxLimitExceeded"}),
    "memory": ("python3 -c 'x = bytearray(2 << 30)'", {"Submitted", "AgentExited", "SandboxLimitExceeded"}),
    "pids": ("for i in $(seq 300); do sleep 60 & done", {"AgentExited", "AgentTimeout", "SandboxLimitExceeded"}),
    "hang": ("sleep 60", {"AgentTimeout"}),
    "flood": (
        ASK
        % """
address, links = url.split("/")[2].split(":"), []
for _ in range(400):
    try:
        links.append(socket.create_connection((address[0], int(address[1])), 0.2))
        links[-1].send(b"POST /v1/chat/completions HTTP/1.1\\r\\nhost: x\\r\\ncontent-length: 99\\r\\n\\r\\n{")
    except OSError:
        pass
time.sleep(60)""",
        {"AgentTimeout"},
    ),
}


@pytest.fixture(scope="module")
def _bench() -> Iterator[Bench]:
    with session_bench(Limits(body_bytes=1 << 20)) as bench:
        yield bench


@pytest.fixture
def bench(_bench: Bench) -> Iterator[Bench]:
    yield _bench
    _bench.engine.gate.set()


def scripted(bench: Bench, *texts: str, **changes: Any) -> tuple[str, str]:
    """A session whose engine samples these, then `done` for ever: its id and base URL."""
    left = itertools.chain(texts, itertools.repeat("done<|im_end|>"))
    bench.engine.script = lambda body: engine_reply(body, next(left))
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 4000}
    return bench.create(**{"sampling": sampling, "max_seq_len": 16_000, **changes})


@pytest.mark.parametrize("name", sorted(STEERING))
def test_no_program_in_a_sandbox_voids_its_own_bad_attempt(
    tmp_path: Path, task: Path, bench: Bench, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a policy could have what it did badly left out of the gradient."""
    (task / "task.toml").write_text("[environment]\nstorage_mb = 16\n")
    command, statuses = STEERING[name]
    _, url = scripted(bench, call_turn(f"{WRONG}; {command}"))
    slow = 4.0 if statuses >= {"AgentTimeout"} else 30.0
    limits = {"pids": 40, "memory_mb": 512}
    reply = play(tmp_path, task, url, agent_timeout_s=slow, max_turns=8, limits=limits)
    assert reply.exit_status in statuses, reply
    assert (reply.outcome, reply.reward) == ("truncated" if name == "large" else "failed", 0.0), reply
    # nor does it fill our log: aiohttp tells of the requests that are under way when their socket closes
    assert sum(row.levelname == "ERROR" for row in caplog.records) <= PARALLEL


def test_a_cut_turn_that_a_command_extends_voids_nothing(tmp_path: Path, task: Path, bench: Bench) -> None:
    """In a tree a command may have a conversation of its own."""
    own = """
said = post("/chat/completions", {"model": "policy", "messages": [{"role": "user", "content": "x"}]})[1]
asked = [{"role": "user", "content": "x"}, said["choices"][0]["message"], {"role": "user", "content": "go on"}]
status, told = post("/chat/completions", {"model": "policy", "messages": asked})
assert (status, told["error"]["code"]) == (409, "cut_turn"), told"""
    session, url = scripted(bench, call_turn(WRONG), call_turn(ASK % own + BREAK), mode="tree")
    whole = bench.engine.script
    bench.engine.script = lambda body: (
        whole(body) if len(bench.engine.bodies) < 3 else engine_reply(body, "a", "length")
    )
    bench.engine.bodies.clear()
    reply = play(tmp_path, task, url)
    assert (reply.outcome, reply.reward, reply.exit_status) == ("truncated", 0.0, "SequenceLengthLimitExceeded"), reply
    assert bench.get(f"/sessions/{session}").json()["requests_after_cut"] == 1


@pytest.mark.parametrize("swallows", [False, True])
@pytest.mark.parametrize("lost", ["session", "engine"])
def test_what_infrastructure_took_is_no_failure_of_the_policy(
    tmp_path: Path, task: Path, bench: Bench, lost: str, swallows: bool
) -> None:
    """Whether the program ends with an error or, having swallowed it, as if all were well."""
    session, url = scripted(bench, call_turn(f"{WRONG}; sleep 1"))
    first = bench.engine.script

    def script(body: dict[str, Any]) -> Any:
        if lost == "session":
            threading.Timer(0.3, httpx.delete, [f"{bench.url}/sessions/{session}"], {"headers": BEARER}).start()
        bench.engine.script = lambda _: (500, b"an engine that broke")
        return first(body)

    bench.engine.script = script
    program = LOOP.replace('sys.exit(f"refused: {error.code} {error.read().decode()}")', "break") if swallows else LOOP
    reply = play(tmp_path, task, url, program)
    named = "session_lost" if lost == "session" else "generation_error"
    assert (reply.outcome, reply.reward) == (named, None), reply


SHORT_OF_PATIENCE = LOOP.replace("urlopen(request)", "urlopen(request, timeout=60 if len(messages) == 1 else 0.5)")


@pytest.mark.parametrize("who", ["program", "bash", "gave up"])
def test_a_model_that_is_silent_for_most_of_the_time_is_infrastructure(
    tmp_path: Path, task: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """An engine that hangs refuses nothing: the agent's time goes by, or its client's patience."""
    monkeypatch.setattr(base, "SILENT_S", 0.5)
    _, url = scripted(bench, call_turn(WRONG))
    whole = bench.engine.script

    def script(body: dict[str, Any]) -> Any:
        bench.engine.gate.clear()  # this one is answered, and no other
        return whole(body)

    bench.engine.script = script
    agent = bash_agent.run if who == "bash" else None
    reply = play(tmp_path, task, url, SHORT_OF_PATIENCE if who == "gave up" else LOOP, agent=agent, agent_timeout_s=4.0)
    assert (reply.outcome, reply.exit_status, reply.reward) == ("generation_error", "GenerationError", None), reply
    assert "its model was silent for the last" in reply.detail and reply.retryable


@pytest.mark.parametrize("who", ["program", "bash", "ends while it is asked"])
def test_a_request_at_the_end_of_the_time_is_no_excuse(
    tmp_path: Path, task: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    monkeypatch.setattr(base, "SILENT_S", 0.5)
    last = f"{WRONG}; sleep 3"
    if who == "ends while it is asked":
        last = ASK % (FIRST + 'post("/chat/completions", first, 0.3)') + BREAK
    _, url = scripted(bench, call_turn(WRONG), call_turn(last))
    whole = bench.engine.script

    def script(body: dict[str, Any]) -> Any:
        if "sleep 3" in (text := next(texts)):
            bench.engine.gate.clear()
        if not text:
            time.sleep(0.7)
        return whole(body)

    texts = iter(["first", last, *[""] * 9])
    bench.engine.script = script
    agent = bash_agent.run if who == "bash" else None
    reply = play(tmp_path, task, url, agent=agent, agent_timeout_s=4.5)
    assert reply.exit_status == ("AgentExited" if who.startswith("ends") else "AgentTimeout"), reply
    assert (reply.outcome, reply.reward) == ("failed", 0.0), reply


@pytest.mark.parametrize("program", [WITH_OPENAI, WITH_ANTHROPIC], ids=["openai", "anthropic"])
def test_stock_clients_in_a_sandbox(tmp_path: Path, task: Path, bench: Bench, program: str) -> None:
    """A loop with a tool and streams by the SDK itself, installed outside and mounted."""
    (task / "task.toml").write_text("[agent]\ntimeout_sec = 90\n")  # what it imports takes seconds of CPU
    site = Path(importlib.util.find_spec("anthropic").origin).parents[1]  # type: ignore[union-attr,arg-type]
    session, url = scripted(bench, "Now: " + call_turn("echo 42 > answer"), call_turn("cat answer"))
    reply = play(tmp_path, task, url, program, {"PYTHONPATH": str(site)}, limits={"memory_mb": 1024, "pids": 128})
    assert (reply.outcome, reply.exit_status, reply.agent_metrics["turns"]) == ("passed", "Submitted", 3), reply
    told = bench.get(f"/sessions/{session}").json()
    assert len(told["turns"]) == 3
    assert reply.agent_metrics["completion_tokens"] == told["sampled_tokens"]


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
