"""The sandbox server's queue: what a flush leaves behind, and what is refused before it is queued."""

from __future__ import annotations

import asyncio
import json
import math
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from starlette.requests import Request
from starlette.testclient import TestClient

from rl360.agents import bash_agent
from rl360.errors import BadInput
from rl360.harbor import app as app_module
from rl360.harbor.app import Attempts, FlushRequest, TooSlow, body_of, make_app
from rl360.harbor.judge_options import judge_at
from rl360.harbor.protocol import JudgeOrder, RunRequest
from rl360.harbor.runner import Runner, prepare
from rl360.harbor.server import gate_of, parse_args
from rl360.harbor.turns import Turns
from rl360.sandboxes.admission import Room
from rl360.sandboxes.host import host_room
from rl360.sandboxes.provider import SandboxNeeds, SandboxProvider, SandboxStartError, Workspace
from rl360.tasksets.harbor_files import BUILTIN_DIR

AGENTS = {"bash": bash_agent.run}


class NeverStarts:
    """A provider that is asked nothing but whether it can: the attempt ends before its sandbox."""

    image: str | None = None

    def refusal(self, _: SandboxNeeds) -> str | None:
        return None


def test_an_attempt_flushed_before_it_began_frees_its_place(tmp_path: Path) -> None:
    task = next(path for path in sorted(BUILTIN_DIR.iterdir()) if path.is_dir())
    request = RunRequest(instance_id="t", task_dir=str(task), attempt_id="a", run="r", base_url="http://h")

    async def go() -> tuple[Any, int]:
        async with httpx.AsyncClient() as http:
            gate = gate_of(parse_args(["--max-concurrent", "1"]), host_room(tmp_path))
            attempts = Attempts(Runner(cast(SandboxProvider, NeverStarts()), http, "t" * 16), gate, 1)
            asked = asyncio.create_task(attempts.submit(request, "", {"bash": bash_agent.run}))
            while not attempts._open:  # noqa: ASYNC110  the moment between made and begun is what is tested
                await asyncio.sleep(0)
            assert attempts.flush(FlushRequest(run="r")) == 1
            ended = (await asyncio.gather(asked, return_exceptions=True))[0]
            return ended, len(attempts._open)

    ended, running = asyncio.run(go())
    assert (ended.outcome, ended.exit_status) == ("aborted", "Aborted")
    assert running == 0


class Full(NeverStarts):
    """A provider whose quota is spent."""

    async def reap(self) -> list[str]:
        return []

    async def new_workspace(self, name: str, _source: Path | None) -> Workspace:
        raise SandboxStartError(f"{name}: quota", refused=True)


def test_a_refused_start_narrows_the_window_and_gives_its_room_back(tmp_path: Path) -> None:
    task = next(path for path in sorted(BUILTIN_DIR.iterdir()) if path.is_dir())

    async def go() -> None:
        gate = gate_of(parse_args(["--wave-size", "8"]), host_room(tmp_path))
        async with httpx.AsyncClient() as http:
            attempts = Attempts(Runner(cast(SandboxProvider, Full()), http, "t" * 16), gate, 9)
            ids = {"instance_id": "t", "task_dir": str(task), "run": "r", "base_url": "http://h"}
            asked = [attempts.submit(RunRequest(attempt_id=f"a{n}", **ids), "", AGENTS) for n in range(3)]  # type: ignore[arg-type]
            replies = await asyncio.gather(*asked)
        assert {(reply.outcome, reply.exit_status) for reply in replies} == {("sandbox_start", "EnvStartFailed")}
        assert 1.0 <= gate.waves.window <= 4.0
        assert gate.reservations.left == gate.reservations.room and gate.waves.live == 0

    asyncio.run(go())


# of a client that knows the plain contract and none of our fields
PLAIN: dict[str, Any] = {"instance_id": "NAME", "agent_name": "bash", "split": "train", "model": "openai/policy"}
PLAIN |= {"base_url": "http://h:1/sessions/s-17/v1", "sampling_params": {"temperature": 1.0}, "max_seq_len": 4096}
PLAIN |= {"session_server_id": "h:1", "session_server_instance_id": "trainer", "api_key": "k"}


def test_a_plain_client_is_served(tmp_path: Path) -> None:
    task = next(path for path in sorted(BUILTIN_DIR.iterdir()) if path.is_dir())
    token = {"authorization": "Bearer " + "t" * 16}
    gate = gate_of(parse_args([]), host_room(tmp_path))
    app = make_app(cast(SandboxProvider, Full()), AGENTS, gate, 9, "t" * 16, tasks=task.parent)
    with TestClient(app) as http:

        def post(path: str, body: Any, headers: Any = token) -> tuple[int, Any]:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            reply = http.post(path, content=data, headers=headers)
            return reply.status_code, reply.json()

        status, first = post("/run", PLAIN | {"instance_id": task.name})
        assert (status, first["exit_status"], first["reward"]) == (200, "EnvStartFailed", None)
        assert {"reward", "exit_status", "eval_report", "agent_metrics"} <= first.keys()
        assert post("/run", PLAIN | {"instance_id": task.name}) == (200, first), "its session is its name"
        other = {"instance_id": task.name, "base_url": "http://h:1/sessions/s-18/v1"}
        assert post("/run", PLAIN | other)[1]["trial_id"] != first["trial_id"]
        assert post("/flush", {"session_server_instance_id": "trainer"}) == (200, {"cancelled": 0, "elsewhere": []})
        assert post("/flush", {"attempt_ids": ["x"]}) == (200, {"cancelled": 0, "elsewhere": ["x"]})
        for path, body, code, words in (
            ("/run", PLAIN | {"instance_id": "../x"}, 400, "instance_id '../x' is not the name of a folder under"),
            ("/run", PLAIN | {"instance_id": "/etc"}, 400, "is not the name of a folder under --tasks"),
            ("/run", PLAIN | {"instance_id": "none", "base_url": "http://h/sessions/x"}, 400, "no such task directory"),
            ("/run", PLAIN | {"base_url": "http://h/v1"}, 400, "attempt_id: Field required"),
            ("/run", PLAIN | other | {"max_seq_len": 5}, 409, "ran with another max_seq_len"),
            ("/run", PLAIN | other | {"deadline_s": math.inf}, 400, "deadline_s: Input should be a finite number"),
            ("/run", PLAIN | other | {"agent_timeout_s": math.nan}, 400, "finite number"),
            ("/run", PLAIN | other | {"limits": {"file_size_mb": 1 << 62}}, 400, "less than or equal to 1048576"),
            ("/run", PLAIN | other | {"limits": {"cpu_time_s": 1e300}}, 400, "less than or equal to 10000000"),
            (
                "/run",
                PLAIN | other | {"sampling_params": {"seed": 1 << 64}},
                400,
                "sampling_params: cannot be sent on",
            ),
            ("/run", PLAIN | other | {"max_seq_len": 1 << 64}, 400, "max_seq_len: Input should be less than"),
            ("/run", PLAIN | {"base_url": "http://h/sessions/y", "task_dir": "/a" * 5000}, 400, "no path is so long"),
            (
                "/run",
                PLAIN | {"base_url": "http://h/sessions/y", "task_dir": "/" + "a" * 300},
                400,
                "no path is so long",
            ),
            ("/run", b"{", 400, "Invalid JSON"),
            ("/run", b"[]", 400, "Input should be an object"),
            ("/run", b" " * ((1 << 20) + 1), 413, "body over 1048576 bytes"),
            ("/flush", {}, 400, "nothing named"),
            ("/flush", {"session_server_instance_id": ""}, 400, "at least 1 character"),
            ("/flush", {"run": ""}, 400, "at least 1 character"),
        ):
            status, said = post(path, body)
            assert (status, said["error"]["code"]) == (code, code) and words in said["error"]["message"]
        assert post("/run", PLAIN, {})[0] == 401 and post("/flush", PLAIN, {})[0] == 401


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "BODY_S", 0.1)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.03)
        return {"type": "http.request", "body": b" ", "more_body": True}

    request = Request({"type": "http", "method": "POST", "headers": [(b"authorization", b"x")]}, receive)
    with pytest.raises(TooSlow, match=r"no whole body within 0.1 s"):
        asyncio.run(body_of(request, b"x", RunRequest))


def test_what_is_being_deleted_holds_its_disk_and_nothing_else(tmp_path: Path) -> None:
    async def go() -> None:
        gate, end = gate_of(parse_args([]), Room(4, 4, 4, 100)), Future[str | None]()
        turns, whole = Turns(gate), gate.reservations.left
        await turns.wait("a", "g", Room(1, 1, 1, 60))
        turns.leave("a", [end])
        waiting = asyncio.create_task(turns.wait("b", "g", Room(1, 1, 1, 60)))
        await asyncio.sleep(0.01)
        assert gate.reservations.left == whole._replace(disk_mb=40) and not waiting.done()
        end.set_result(None)
        await asyncio.wait_for(waiting, 5)
        turns.leave("b")
        assert gate.reservations.left == whole

    asyncio.run(go())


@pytest.mark.parametrize(
    ("asked", "url", "words"),
    [
        (False, "http://h/v1", "set judge.model and deadlines.judge_s in the run's config"),
        (True, "", "start this sandbox server with --judge-url"),
        (True, "http://h/v1", None),
    ],
)
def test_a_judged_task_is_refused_before_it_runs(tmp_path: Path, asked: bool, url: str, words: str | None) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "task.toml").write_text("")
    (tmp_path / "instruction.md").write_text("Do it.")
    (tmp_path / "tests" / "rl360_judge.toml").write_text('rubric = "r"')
    order = JudgeOrder(model="j", timeout_s=20.0, call_s=5.0, retries=1) if asked else None
    given = {"instance_id": "t", "task_dir": str(tmp_path), "attempt_id": "a", "base_url": "http://h", "judge": order}
    judge = judge_at(url, "", 1) if url else None
    provider = cast(SandboxProvider, NeverStarts())
    if words is None:
        assert prepare(RunRequest(deadline_s=195.0, **given), provider, AGENTS, judge).task.judge is not None
        with pytest.raises(BadInput, match=r"deadline_s 194 < .* \+ judge.timeout_s 20 \+ slack 15 = 195"):
            prepare(RunRequest(deadline_s=194.0, **given), provider, AGENTS, judge)
    else:
        with pytest.raises(BadInput) as refused:
            prepare(RunRequest(deadline_s=195.0, **given), provider, AGENTS, judge)
        assert words in str(refused.value)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--judge-key-env", "K"], "--judge-key-env says nothing without --judge-url"),
        (["--judge-url", "http://h/v1", "--judge-concurrency", "0"], "--judge-concurrency 0: must be at least 1"),
        (["--wave-size", "0"], "--wave-size 0: must be at least 1"),
        (["--per-image", "0"], "--per-image 0: must be at least 1"),
        (["--ready-goal-s", "-1"], "--ready-goal-s -1.0: must be at least 0.01"),
        (["--promise", "cpus=2,memory=5"], "memory=5': give cpus, memory_mb, pids, disk_mb as NAME=WHOLE NUMBER"),
        (
            ["--promise", "0%"],
            "'0%': give cpus, memory_mb, pids, disk_mb as NAME=WHOLE NUMBER, or of this host a share",
        ),
    ],
)
def test_a_servers_options(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(argv)
    assert words in capsys.readouterr().err
