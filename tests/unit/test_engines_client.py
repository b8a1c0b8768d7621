"""Control calls: what is refused before it leaves, what an answer means, and proof of a process's end."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from fake_engines import TOKEN, FakeEngine, FakeGateway

from rl360.config.services import Services
from rl360.engines.client import (
    EngineClient,
    EngineRefused,
    EngineSilent,
    check_tensors,
    deployment_token,
    open_http,
)
from rl360.engines.fleet import EngineState, advance, incarnation_of, probe_engine
from rl360.engines.gateway import GatewayClient
from rl360.engines.health import headers_for
from rl360.engines.processes import ProcessId, alive, end_tree, identify, proof_of_end, tree_of_pid, tree_of_url
from rl360.errors import BadInput, Rl360Error, ServiceError
from rl360.weights.messages import TensorSpec

A = TensorSpec(name="a", shape=(2, 3))
B = TensorSpec(name="b", shape=(4,))


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    made = FakeEngine()
    yield made
    made.close()


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    made = FakeGateway()
    yield made
    made.stop()


def ask(url: str, call: Callable[[EngineClient], Awaitable[object]], deadline_s: float = 2.0) -> object:
    async def one() -> object:
        async with open_http() as http:
            return await call(EngineClient(url, http, deadline_s, token=TOKEN))

    return asyncio.run(one())


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ([TensorSpec(name="c", shape=(1,))], "would ignore it"),
        ([TensorSpec(name="a", shape=(3, 2))], "would die of it"),
        ([TensorSpec(name="a", shape=(2, 3), dtype="float32")], "would die of it"),
        ([A, A], "named twice"),
        ([], "at least one"),
    ],
)
def test_bad_tensors_never_leave(engine: FakeEngine, tensors: list[TensorSpec], complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        ask(engine.url, lambda c: c.update_from_distributed(tensors, {"a": A, "b": B}, "g", 1.0))
    assert engine.calls == []
    check_tensors([A, B], {"a": A, "b": B})


def test_update_never_sets_the_version(engine: FakeEngine) -> None:
    ask(engine.url, lambda c: c.update_from_distributed([A], {"a": A}, "g", 1.0))
    body = engine.calls[0][1]
    assert "weight_version" not in body
    assert body["flush_cache"] is False


def test_hang_refusal_and_absence_are_told_apart(engine: FakeEngine) -> None:
    engine.faults["/ping"] = "hang"
    with pytest.raises(EngineSilent, match=r"no answer within 0\.2 s") as silent:
        ask(engine.url, lambda c: c.ping(0.2))
    assert silent.value.connected
    engine.faults["/ping"] = "500"
    with pytest.raises(EngineRefused, match="answered 500"):
        ask(engine.url, lambda c: c.ping())
    with pytest.raises(EngineSilent, match="no connection") as absent:
        ask("http://127.0.0.1:9", lambda c: c.ping())
    assert not absent.value.connected
    assert pickle.loads(pickle.dumps(silent.value)).connected


def test_success_false_is_a_refusal(engine: FakeEngine) -> None:
    engine.faults["/end_weight_update"] = lambda body: (200, {"success": False, "message": "not now"})
    with pytest.raises(EngineRefused, match="not now"):
        ask(engine.url, lambda c: c.end_weight_update())


def test_leaving_a_group_one_is_not_in_is_fine(engine: FakeEngine) -> None:
    assert ask(engine.url, lambda c: c.destroy_group("none")) is False
    engine.groups.add("g")
    assert ask(engine.url, lambda c: c.destroy_group("g")) is True


def test_sharded_engine_is_refused(engine: FakeEngine) -> None:
    ranks = [{"checksums": {}}, {"checksums": {}}]
    engine.faults["/weights_checker"] = lambda body: (200, {"success": True, "ranks": ranks})
    with pytest.raises(EngineRefused, match="use --tp 1"):
        ask(engine.url, lambda c: c.checksums())


def test_incarnation_changes_with_a_restart(engine: FakeEngine) -> None:
    first = ask(engine.url, lambda c: probe_engine(c, 1.0))
    again = ask(engine.url, lambda c: probe_engine(c, 1.0))
    engine.startup = "another"
    second = ask(engine.url, lambda c: probe_engine(c, 1.0))
    marks = [probe.identity.incarnation for probe in (first, again, second)]  # type: ignore[attr-defined]
    assert marks[0] == marks[1] != marks[2]
    with pytest.raises(ServiceError, match="names no startup_time"):
        incarnation_of({})


def test_states_only_move_along_the_machine() -> None:
    assert advance(EngineState.JOINING, EngineState.LOADING) is EngineState.LOADING
    for state, to in (
        (EngineState.JOINING, EngineState.SERVING),
        (EngineState.LOADING, EngineState.SERVING),
        (EngineState.SUSPECT, EngineState.SERVING),
        (EngineState.FENCED, EngineState.LOADING),
        (EngineState.SUSPECT, EngineState.GONE),
        (EngineState.GONE, EngineState.JOINING),
    ):
        with pytest.raises(Rl360Error, match="cannot become"):
            advance(state, to)


def test_gateway_adds_removes_and_adds_a_draining_one_again(gateway: FakeGateway) -> None:
    async def go() -> None:
        async with open_http() as http:
            client = GatewayClient(gateway.url, http)
            url = "http://127.0.0.1:1234"
            gateway.drain_s = 1.0
            assert not await client.remove(url, 2.0)
            assert (await client.add(url, 2.0)).usable
            await client.add(url + "/", 2.0)
            assert gateway.added == [url]
            assert await client.remove(url, 2.0)
            assert (await client.find(url)).status == "draining"  # type: ignore[union-attr]
            await client.add(url, 10.0)
            assert gateway.urls() == [url]

    asyncio.run(go())


def spawn_family() -> subprocess.Popen[bytes]:
    """A parent with a child that ignores SIGTERM, as an engine with its scheduler."""
    code = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-S', '-c', 'import signal, time; signal.signal(15, 1); time.sleep(60)'])\n"
        "print('up', flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert parent.stdout is not None and parent.stdout.readline() == b"up\n"
    return parent


@pytest.mark.parametrize("stop_first", [False, True])
def test_end_of_a_tree_is_proved(stop_first: bool) -> None:
    parent = spawn_family()
    tree = tree_of_pid(parent.pid)
    assert tree is not None and len(tree.members) == 2 and tree.group == parent.pid
    if stop_first:
        for member in tree.members:
            os.kill(member.pid, signal.SIGSTOP)
    before = proof_of_end(tree)
    assert not before.gone and str(parent.pid) in before.evidence
    assert asyncio.run(end_tree(tree, 5.0)).gone
    assert parent.wait(5) == -signal.SIGKILL
    assert proof_of_end(tree).gone


def test_orphan_of_the_group_counts_as_alive() -> None:
    parent = spawn_family()
    tree = tree_of_pid(parent.pid)
    assert tree is not None
    alone = tree.model_copy(update={"members": (tree.root,)})
    parent.kill()
    parent.wait()
    assert "still alive" in proof_of_end(alone).evidence
    assert asyncio.run(end_tree(alone, 5.0)).gone


def test_reused_pid_is_another_process_and_elsewhere_is_no_proof() -> None:
    me = identify(os.getpid())
    assert me is not None and alive(me)
    assert not alive(ProcessId(pid=me.pid, start_ticks=me.start_ticks - 1))
    tree = tree_of_pid(os.getpid())
    assert tree is not None
    assert "run on elsewhere" in proof_of_end(tree.model_copy(update={"host": "elsewhere"})).evidence
    assert proof_of_end(tree.model_copy(update={"boot_id": "0" * 8})).gone
    assert not proof_of_end(None).gone
    assert not asyncio.run(end_tree(None, 1.0)).gone


def test_tree_of_url_finds_the_listener(gateway: FakeGateway) -> None:
    tree = tree_of_url(gateway.url)
    assert tree is not None and tree.root.pid == os.getpid()
    assert tree_of_url("http://192.0.2.1:80") is None


def _home(folder: Path, *engines: str) -> Path:
    services = dict.fromkeys(Services.model_fields, "-") | {"home": str(folder), "engine_urls": list(engines)}
    (folder / "services.json").write_text(json.dumps(services | {"session_urls": ["-"], "sandbox_urls": ["-"]}))
    return folder


def _secret(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)


def test_the_token_is_that_of_the_named_file_else_of_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RL360_TOKEN_FILE", raising=False)
    monkeypatch.setenv("RL360_HOME", str(_home(tmp_path, "http://e:1")))
    assert deployment_token() is None
    secrets = {"token": "of-the-secrets" + "s" * 9, "s3_access_key": "a", "s3_secret_key": "b"}
    _secret(tmp_path / "secrets.json", json.dumps(secrets))
    assert deployment_token() == secrets["token"]  # all that a cluster's operator writes
    _secret(tmp_path / "token", "t" * 20)
    assert deployment_token() == "t" * 20
    _secret(tmp_path / "named", "n" * 20)
    monkeypatch.setenv("RL360_TOKEN_FILE", str(tmp_path / "named"))
    assert deployment_token() == "n" * 20
    (tmp_path / "named").chmod(0o644)
    with pytest.raises(Rl360Error, match="readable by others"):
        deployment_token()


def test_an_address_that_a_person_typed_is_shown_the_token_only_when_it_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL360_HOME", str(tmp_path))
    assert headers_for("http://e:1") == {}  # no services known
    _home(tmp_path, "http://e:1", "http://e:2/")
    _secret(tmp_path / "token", "t" * 20)
    monkeypatch.setenv("RL360_TOKEN_FILE", str(tmp_path / "token"))
    ours = {"authorization": f"Bearer {'t' * 20}"}
    assert headers_for("http://e:1/") == headers_for("http://e:2") == ours
    assert headers_for("http://e:3") == headers_for("http://e") == {}


def test_a_client_of_somebody_elses_engine_has_no_token() -> None:
    client = EngineClient("http://e:1", open_http(), 1.0, 3, TOKEN, external=True)
    assert client.token is None and TOKEN not in str(vars(client))
