"""SIGKILL sandbox servers over a real object store: finished replies survive, what ran is lost once, and no other
server runs an attempt again."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # helpers shared by the parts of the suite
from scripted_session import Bash, Say, ScriptedSessions

from rl360.harbor.protocol import RunReply
from rl360.store.layout import reply_key
from rl360.store.object_store import ObjectStore
from tests.contract.test_ledger_store import KEYS, store  # noqa: F401  a fixture: a SeaweedFS of this module's own
from tests.contract.test_sandboxes import REASON, TOKEN, Server, free_port, make_task, request_for

pytestmark = [pytest.mark.chaos, pytest.mark.skipif(REASON is not None, reason=REASON or "")]


@pytest.fixture(scope="module")
def sessions() -> Iterator[ScriptedSessions]:
    scripted = ScriptedSessions()
    scripted.start()
    yield scripted
    scripted.stop()


def deployment(home: Path, endpoint: str, bucket: str) -> None:
    """What a sandbox server reads of the services it stands among."""
    nowhere = "http://127.0.0.1:9"
    names = ("prefect_api_url", "prefect_ui_url", "gateway_url", "trainer_url")
    lists = {key: [nowhere] for key in ("engine_urls", "session_urls", "sandbox_urls")}
    services = {**dict.fromkeys(names, nowhere), **lists, "home": str(home), "model_dir": "m"}
    secrets = {"token": TOKEN, "s3_access_key": KEYS[0], "s3_secret_key": KEYS[1]}
    home.mkdir()
    (home / "services.json").write_bytes(orjson.dumps({**services, "s3_endpoint": endpoint, "s3_bucket": bucket}))
    (home / "secrets.json").write_bytes(orjson.dumps(secrets))
    (home / "secrets.json").chmod(0o600)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, store: ObjectStore) -> Iterator[list[Server]]:  # noqa: F811
    """Two sandbox servers of one deployment."""
    home = tmp_path_factory.mktemp("pair") / "home"
    deployment(home, store.endpoint_url, store.bucket)
    servers: list[Server] = []
    for _ in range(2):
        servers.append(Server(home, free_port(), options=("--store", "--promise", "50%")))
        servers[-1].start()
    yield servers
    for server in servers:
        server.stop()
        assert server.live() == []


def body_of(tmp_path: Path, name: str, url: str, run: str) -> dict[str, Any]:
    task = tmp_path / "task"
    return request_for(task if task.is_dir() else make_task(task), name, url, run=run)


def test_replies_survive_every_server(
    pair: list[Server],
    sessions: ScriptedSessions,
    tmp_path: Path,
    store: ObjectStore,  # noqa: F811
) -> None:
    first, second = pair
    assert httpx.get(f"{first.url}/health", timeout=5).json()["store"] == f"{store.endpoint_url}/{store.bucket}"
    body = body_of(tmp_path, "kept", sessions.add("kept", Bash("cp hint.txt answer"), Say("done")), "kept")
    reply = first.run(body)
    assert reply.outcome == "passed" and reply.verdict is not None
    assert store.exists(reply_key("kept", "kept"))
    assert second.run(body) == reply, "a repeat that lands elsewhere"
    for server in pair:
        server.stop(signal.SIGKILL)
        server.start()
        assert server.run(body) == reply
        other = server.post("/run", {**body, "base_url": body["base_url"] + "x"})
        assert other.status_code == 409 and "base_url" in other.text
    assert len(sessions.seen["kept"]) == 2, "its agent ran once"


def test_what_ran_when_its_server_died_is_lost_once_and_its_sandbox_gone(
    pair: list[Server], sessions: ScriptedSessions, tmp_path: Path
) -> None:
    first, second = pair
    body = body_of(tmp_path, "doomed", sessions.add("doomed", Bash("sleep 30")), "doomed")
    with ThreadPoolExecutor(2) as pool:
        cut = pool.submit(first.post, "/run", body)
        give_up_at = time.monotonic() + 20
        while not sessions.seen["doomed"] and time.monotonic() < give_up_at:
            time.sleep(0.05)
        elsewhere = pool.submit(second.run, body)
        first.stop(signal.SIGKILL)
        assert cut.exception() is not None
        first.start()
        lost = first.run({**body, "resent": True})
        assert (lost.outcome, lost.verdict, lost.retryable) == ("sandbox_lost", None, True)
        assert first.run(body) == lost == elsewhere.result(timeout=60), "told the same wherever it is asked"
    assert len(sessions.seen["doomed"]) == 1 and first.live() == [] == second.live()
    again = body_of(tmp_path, "doomed-t1", sessions.add("doomed-t1", Bash("cp hint.txt answer"), Say("ok")), "doomed")
    assert first.run(again).outcome == "passed"


def test_an_attempt_under_way_on_one_server_is_joined_from_another(
    pair: list[Server], sessions: ScriptedSessions, tmp_path: Path
) -> None:
    url = sessions.add("joined", Bash("sleep 1; cp hint.txt answer"), Say("done"))
    body = body_of(tmp_path, "joined", url, "joined")
    with ThreadPoolExecutor(4) as pool:
        replies: list[RunReply] = list(pool.map(lambda server: server.run(body), pair * 2))
    assert replies[0].outcome == "passed" and replies == [replies[0]] * 4
    assert len(sessions.seen["joined"]) == 2


def test_nothing_is_begun_or_told_while_the_store_is_away(sessions: ScriptedSessions, tmp_path: Path) -> None:
    home = tmp_path / "home"
    deployment(home, "http://127.0.0.1:9", "b")
    server = Server(home, free_port(), options=("--store",))
    server.start()
    try:
        body = body_of(tmp_path, "early", sessions.add("early", Say("done")), "early")
        refused = server.post("/run", body)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "store_unavailable", refused.text
        assert sessions.seen["early"] == [] and server.live() == []
    finally:
        server.stop()
