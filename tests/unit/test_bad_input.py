"""What people and machines get wrong: each case is one clear line that names the value, and nothing is lost by it.

The details of each part are tested beside it; here is the whole list, through the door a user comes in by.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from botocore.retries.standard import ExponentialBackoff
from fake_engines import TENSORS, FakeEngine, FakeGateway, FakeTrainer, show_token
from fastapi import FastAPI
from safetensors.numpy import save_file

from rl360.agents.records import RecordLog, put_table
from rl360.agents.rollout import AttemptSpec, RolloutClient
from rl360.commands.run import read_config
from rl360.config.freeze import freeze_config, load_frozen
from rl360.config.run import PushConfig, RunConfig
from rl360.config.services import Services
from rl360.errors import BadInput, CorruptObject, Rl360Error, ServiceError, StoreUnavailable
from rl360.ledger.outcomes import Outcome
from rl360.objective.advantages import attempt_advantages
from rl360.sessions.sample import AttemptRecord
from rl360.store.codec import pack
from rl360.store.layout import attempts_key
from rl360.store.manifest import Manifest, commit_manifest, get_object, put_object, read_manifest
from rl360.store.object_store import ObjectStore
from rl360.tasksets.chores import draw_chore
from rl360.tasksets.harbor_files import write_task
from rl360.tasksets.taskset import load_taskset
from rl360.weights import push
from tests.unit.memory_store import MemoryStore
from tests.unit.objective_data import attempt, sample_of, store_samples
from tests.unit.sessions_server import session_bench
from tests.unit.verdict_data import TOKEN, verdict

SYSTEM_USER = [{"role": "system", "content": "Use bash."}, {"role": "user", "content": "Create hello.txt"}]


def one_line(error: pytest.ExceptionInfo[Any], *parts: str) -> None:
    text = str(error.value)
    assert "\n" not in text and "Traceback" not in text
    for part in parts:
        assert part in text, (part, text)


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def services_at(tmp_path: Path, **urls: Any) -> Services:
    """Addresses with secrets beside them; whatever is not given leads nowhere."""
    secrets = tmp_path / "secrets.json"
    secrets.write_text(json.dumps({"token": TOKEN, "s3_access_key": "a", "s3_secret_key": "b"}))
    secrets.chmod(0o600)
    nowhere = f"http://127.0.0.1:{free_port()}"
    fields: dict[str, Any] = dict.fromkeys(Services.model_fields, nowhere)
    fields |= {name: [nowhere] for name in ("engine_urls", "session_urls", "sandbox_urls")}
    fields |= {"home": str(tmp_path), "s3_bucket": "rl360", "model_dir": str(tmp_path)}
    return Services.model_validate(fields | urls)


# -- 1: unknown config key -------------------------------------------------------------------------------------------


def test_unknown_config_key(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("run: r1\nrollout:\n  wave_sise: 8\n")
    with pytest.raises(BadInput) as error:
        read_config(path, None)
    one_line(error, str(path), "unknown key rollout.wave_sise")


def test_an_unknown_key_in_a_frozen_config_is_named_and_the_object_is_left_alone() -> None:
    store = MemoryStore()
    freeze_config(store, RunConfig(run="r1"), default_model="/m")
    stored = json.loads(store.objects["r1/config.json"]) | {"fleet": 3}
    store.objects["r1/config.json"] = json.dumps(stored).encode()
    before = dict(store.objects)
    for use in (
        lambda: load_frozen(store, "r1"),
        lambda: freeze_config(store, RunConfig(run="r1"), default_model="/m"),
    ):
        with pytest.raises(BadInput) as error:
            use()
        one_line(error, "r1/config.json", "unknown key fleet")
    assert store.objects == before


# -- 2: a task directory without a test ------------------------------------------------------------------------------


def test_task_directory_without_a_test(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_task(tmp_path, name, draw_chore(random.Random(name), "append"))
    (tmp_path / "b" / "tests" / "test.sh").unlink()
    with pytest.raises(BadInput) as error:
        load_taskset(str(tmp_path))
    one_line(error, str(tmp_path / "b"), "test.sh")


# -- 3: a wrong engine address ---------------------------------------------------------------------------------------


def test_wrong_engine_address(tmp_path: Path) -> None:
    """No intent is written and no version is noted: the next push starts as if this one had never been asked for."""
    save_file({t.name: np.zeros(t.shape, np.float16) for t in TENSORS}, tmp_path / "model.safetensors")
    gateway, store = FakeGateway(), MemoryStore()
    url = f"http://127.0.0.1:{free_port()}"
    services = services_at(tmp_path, engine_urls=[url], gateway_url=gateway.url)
    config = PushConfig(call_deadline_s=0.5)
    try:
        with pytest.raises(ServiceError) as error:
            asyncio.run(push.push(store, services, "demo", 0, "demo:1", FakeTrainer([]), config))
    finally:
        gateway.stop()
    one_line(error, url, "no connection", "0 engines answer, min_engines is 1")
    assert store.objects == {}


def test_one_wrong_engine_address_among_good_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others get the weights, and the record names the one that did not answer."""
    show_token(monkeypatch, tmp_path)
    save_file({t.name: np.zeros(t.shape, np.float16) for t in TENSORS}, tmp_path / "model.safetensors")
    gateway, store, engine = FakeGateway(), MemoryStore(), FakeEngine()
    trainer = FakeTrainer([engine])
    trainer.step = 1
    url = f"http://127.0.0.1:{free_port()}"
    services = services_at(tmp_path, engine_urls=[url, engine.url], gateway_url=gateway.url)
    try:
        record = asyncio.run(push.push(store, services, "demo", 0, "demo:1", trainer, PushConfig(call_deadline_s=1.0)))
        assert list(gateway.urls()) == [engine.url]
    finally:
        engine.close()
        gateway.stop()
    assert record.absent == (url,)
    assert [outcome.identity.url for outcome in record.serving] == [engine.url]


# -- 4: the object store is down -------------------------------------------------------------------------------------


def test_store_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not "there is no such object": a task that took it for that would start its work again."""
    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda *_: 0.01)  # between the client's own tries
    endpoint = f"http://127.0.0.1:{free_port()}"
    store = ObjectStore(endpoint, "rl360", "a", "b", timeout_s=1.0)
    uses: list[Callable[[], Any]] = [
        lambda: read_manifest(store, "r1", 0, "train"),
        lambda: commit_manifest(store, Manifest(run="r1", step=0, task="train")),
    ]
    with ThreadPoolExecutor(len(uses)) as pool:  # each waits between its own tries
        calls = [pool.submit(use) for use in uses]
    for call in calls:
        with pytest.raises(StoreUnavailable) as error:
            call.result()
        one_line(error, endpoint, "is it up? try `rl360 status`")


# -- 5: a corrupt object ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other"])
def test_corrupt_object(damage: str) -> None:
    store = MemoryStore()
    key = attempts_key("r1", 0, 0, 0)
    ref = put_table(store, key, [attempt(0, 0, 1.0)])
    good = store.objects[key]
    flipped = good[:100] + bytes([good[100] ^ 1]) + good[101:]
    store.objects[key] = {"cut": good[:-1], "flipped": flipped, "empty": b"", "other": pack({"a": 1})}[damage]
    with pytest.raises(CorruptObject) as error:
        get_object(store, ref)
    one_line(error, key, "is not what its manifest committed")
    if damage != "flipped":  # a flipped bit inside a digest or a number decodes: only the object's digest sees it
        with pytest.raises(CorruptObject) as error:
            RecordLog(store, "r1", 0, 0)
        one_line(error, key)
    assert put_object(store, key, good).sha256 != ref.sha256  # never repaired in silence


# -- 6: a reward that is not a number --------------------------------------------------------------------------------


class _Replies(BaseHTTPRequestHandler):
    """Session and sandbox server in one; `server.run_reply` is what /run answers."""

    def _do(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or "{}")
        status, body = 200, b"{}"
        if self.path == "/run":
            body = self.server.run_reply  # type: ignore[attr-defined]
        elif self.path == "/sessions":
            body = b'{"session_id": "s1", "base_url": "http://127.0.0.1:1/sessions/s1/v1"}'
        elif self.path.endswith("/store"):
            ref = store_samples([sample_of("s000000-g000-a00-t0", "s000000-g000")], asked["key"])
            body = json.dumps(ref.to_wire()).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_DELETE = _do

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def replies() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Replies)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def _run_reply(reward: str) -> bytes:
    said = verdict("s000000-g000-a00-t0", 1.0, run="r1", token=TOKEN).model_dump_json()
    said = said.replace('"reward":1.0', f'"reward":{reward}')
    text = f'{{"trial_id": "x", "outcome": "passed", "exit_status": "ok", "reward": null, "verdict": {said}, '
    return (text + '"cleanup": {"confirmed": true, "evidence": "gone"}}').encode()


@pytest.mark.parametrize("reward", ["NaN", "Infinity", "1e999", "null", '"1"', "true", "1.0"])
def test_nan_reward(tmp_path: Path, replies: ThreadingHTTPServer, reward: str) -> None:
    """An attempt whose reward is no number has none; its tokens are kept and counted, the others go on."""
    url = f"http://127.0.0.1:{replies.server_port}"
    replies.run_reply = _run_reply(reward)  # type: ignore[attr-defined]
    services = services_at(tmp_path, session_urls=[url], sandbox_urls=[url])
    spec = AttemptSpec("s000000-g000-a00", "s000000-g000", "chores-rename", "/tasks/x", "files")

    async def roll() -> AttemptRecord:
        async with RolloutClient(services, RunConfig(run="r1"), 0, 0, "run:0") as client:
            return await client.attempt(spec, 0)

    record = asyncio.run(roll())
    assert record.sampled_tokens == 6
    if reward == "1.0":  # the same reply with a number is a verdict: it is the reward that is refused above
        assert record.verdict is not None and record.verdict.reward == 1.0
        return
    assert record.verdict is None
    assert record.outcome is Outcome.UNCLASSIFIED
    assert "malformed" in record.detail


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_nan_reward_reaches_no_advantage(reward: float) -> None:
    with pytest.raises(ValueError, match="a reward is a finite number"):
        verdict("a", reward)
    with pytest.raises(BadInput) as error:
        attempt_advantages(np.array([1.0, reward]), ["g", "g"], ["a0", "a1"])
    one_line(error, "attempt a1: reward is not finite")


# -- 7: a message history that does not extend the session -----------------------------------------------------------


def test_history_that_does_not_extend_the_session() -> None:
    """400 with the place; the engine is not asked, and the session goes on from where it was."""
    with session_bench() as bench:
        session_id, _ = bench.create()
        said = bench.chat(session_id, {"messages": SYSTEM_USER}).json()["choices"][0]["message"]
        before = bench.get(f"/sessions/{session_id}/merged").content
        asked = len(bench.engine.bodies)
        rewritten = [
            SYSTEM_USER[0],
            {"role": "user", "content": "Create bye.txt"},
            said,
            {"role": "user", "content": "go"},
        ]
        reply = bench.chat(session_id, {"messages": rewritten})
        assert reply.status_code == 400
        assert "messages[1].content" in reply.text and "\\n" not in reply.json()["error"]["message"]
        assert len(bench.engine.bodies) == asked
        assert bench.get(f"/sessions/{session_id}/merged").content == before
        good = [*SYSTEM_USER, said, {"role": "user", "content": "go"}]
        assert bench.chat(session_id, {"messages": good}).status_code == 200


# -- 8: a taken port -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # uvicorn ends its thread
def test_port_taken() -> None:
    """`rl360 up` looks before it starts anything (test_infra_cli); a trainer started by hand says so too."""
    from rl360.training.service import _listen

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Rl360Error) as error:
            _listen(FastAPI(), "127.0.0.1", port)
        one_line(error, f"cannot listen on 127.0.0.1:{port}", "is the port taken?")
