"""Doors as other hosts meet them: real ones in a process of their own, called at an address that is not loopback.

Whoever shows the deployment's token gets in; nobody else does, by no call of a push and no transport; and an engine
that somebody else started is never shown it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from rl360.engines.client import EngineClient, EngineRefused, open_http
from rl360.engines.fleet import EngineIdentity
from rl360.engines.processes import tree_of_pid
from rl360.errors import ServiceError
from rl360.weights.checksum import tensor_specs
from rl360.weights.messages import EngineSet, PushPlan, TensorSpec, TransferReport, Transport
from rl360.weights.plan import plan_push
from rl360.weights.transports import Senders
from tests.contract.session_rig import far_address, free_port, process
from tests.unit.fake_engines import show_token
from tests.unit.gloo_engines import bytes_of, moe_tensors

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]

TOKEN = "token-of-the-far-doors"
A = TensorSpec(name="a", shape=(2, 3))
KNOWN = {"a": A}
JOIN = {"address": "127.0.0.1", "port": 9, "rank": 1, "world_size": 2, "backend": "gloo", "deadline_s": 5.0}
CALLS: dict[str, Callable[[EngineClient], Awaitable[Any]]] = {
    "set_weight_version": lambda c: c.set_weight_version("r1:1"),
    "pause": lambda c: c.pause("retract"),
    "resume": lambda c: c.resume(),
    "flush_cache": lambda c: c.flush_cache(),
    "abort_all": lambda c: c.abort_all(),
    "begin_weight_update": lambda c: c.begin_weight_update(),
    "end_weight_update": lambda c: c.end_weight_update(),
    "init_group": lambda c: c.init_group("g", **JOIN),
    "destroy_group": lambda c: c.destroy_group("g"),
    "update_from_distributed": lambda c: c.update_from_distributed([A], KNOWN, "g", 5.0),
    "update_from_tensor": lambda c: c.update_from_tensor([A], KNOWN, "handle", 5.0),
    "transfer_engine": lambda c: c.transfer_engine(0, 5.0),
    "update_from_disk": lambda c: c.update_from_disk("/nowhere"),
    "door": lambda c: c.door(),
    "admit": lambda c: c.admit("r1:1"),
    "bar": lambda c: c.bar("a test"),
    "pull": lambda c: c.pull("/nowhere", "r1:1", None, 5.0),
    "checksums": lambda c: c.checksums(),
}
ASK_NO_TOKEN = {"ping", "model_info", "server_info", "weight_version"}


class Doors:
    """Two of them, and epochs that only grow."""

    def __init__(self, folder: Path, urls: list[str], pid: int) -> None:
        self.folder, self.urls, self.pid, self.epoch = folder, urls, pid, 0

    def seen(self, index: int = 0) -> dict[str, Any]:
        return httpx.get(f"{self.urls[index]}/test/seen", timeout=10).json()

    def plan(self, transport: Transport, tensors: Any, *, external: bool = False, **more: Any) -> PushPlan:
        self.epoch += 1
        process = tree_of_pid(self.pid)
        engines = tuple(
            EngineIdentity(url=url, incarnation="a", process=process, external=external) for url in self.urls
        )
        fields = {"run": "r1", "version": f"r1:{self.epoch}", "bucket_bytes": 1 << 12, "call_deadline_s": 10.0}
        if transport.on_disk:
            fields["folder"] = str(self.folder / f"pushed-{self.epoch}")
        specs = tensor_specs(tensors)
        return plan_push(specs, EngineSet(epoch=self.epoch, engines=engines), transport=transport, **fields | more)


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    folder, ports = tmp_path_factory.mktemp("doors"), [free_port(), free_port()]
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    urls = [f"http://{far_address()}:{port}" for port in ports]
    argv = [sys.executable, "-m", "tests.contract.far_door", str(folder), *map(str, ports)]
    with pytest.MonkeyPatch.context() as patch:
        show_token(patch, folder, TOKEN)
        env = {"RL360_TOKEN_FILE": os.environ["RL360_TOKEN_FILE"]}
    with process(argv, f"{urls[1]}/ping", folder / "doors.log", env) as pid:
        yield Doors(folder, urls, pid)


@pytest.fixture
def ours(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process belongs to the doors' deployment."""
    show_token(monkeypatch, doors.folder, TOKEN)


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RL360_TOKEN_FILE", raising=False)
    monkeypatch.setenv("RL360_HOME", str(tmp_path))


@pytest.fixture
def senders() -> Iterator[Senders]:
    made = Senders()
    yield made
    made.close()


def test_every_call_of_a_push_is_refused_without_the_token(doors: Doors) -> None:
    asked = {name for name, member in inspect.getmembers(EngineClient, inspect.iscoroutinefunction) if name[0] != "_"}
    assert asked == set(CALLS) | ASK_NO_TOKEN, "a call that is new belongs into one of the two"
    before = doors.seen()["calls"]

    async def go(token: str | None) -> None:
        async with open_http() as http:
            client = EngineClient(doors.urls[0], http, 10, epoch=10_000, token=token)
            for name in CALLS:
                with pytest.raises(EngineRefused, match=r"answered 401: .*send Authorization: Bearer <token>"):
                    await CALLS[name](client)
            for path in ("/generate", "/v1/chat/completions", "/tokenize", "/a_route_of_a_later_sglang"):
                headers = {} if token is None else {"authorization": f"Bearer {token}"}
                assert (await http.post(doors.urls[0] + path, json={}, headers=headers)).status_code == 401

    for token in (None, TOKEN[:-1], f"{TOKEN}x"):
        asyncio.run(go(token))
    assert doors.seen()["calls"] == before, "nothing reached the engine"


def test_what_needs_no_token_is_only_read(doors: Doors) -> None:
    async def go() -> None:
        async with open_http() as http:
            client = EngineClient(doors.urls[0], http, 10)
            await client.ping()
            assert "startup_time" in await client.server_info()
            assert await client.weight_version() == (await client.model_info())["weight_version"]

    asyncio.run(go())


def carry(senders: Senders, plan: PushPlan, tensors: Any) -> TransferReport:
    senders.prepare(plan, tensors)
    return senders.transfer(plan, tensors)


def held(tensors: Any) -> dict[str, str]:
    return {name: sha256(data).hexdigest() for name, data in sorted(bytes_of(tensors).items())}


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("transport", [each for each in Transport if each is not Transport.DISK_DELTA])
def test_every_transport_gets_in_with_the_token(doors: Doors, senders: Senders, transport: Transport) -> None:
    tensors = moe_tensors(seed=doors.epoch)
    plan = doors.plan(transport, tensors)
    report = carry(senders, plan, tensors)
    assert report.ok, report
    assert [engine.calls for engine in report.engines] == [plan.calls_per_engine] * 2
    assert [doors.seen(n)["held"] for n in (0, 1)] == [held(tensors)] * 2


@pytest.mark.usefixtures("ours")
def test_a_delta_gets_in_with_the_token(doors: Doors, senders: Senders) -> None:
    base, tensors = moe_tensors(seed=100), moe_tensors(seed=100)
    first = doors.plan(Transport.DISK_FULL, base)
    assert carry(senders, first, base).ok
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    report = carry(senders, doors.plan(Transport.DISK_DELTA, tensors, base_version=first.version), tensors)
    assert report.ok and [engine.note for engine in report.engines] == ["", ""]
    assert [doors.seen(n)["held"] for n in (0, 1)] == [held(tensors)] * 2


def refused(doors: Doors, senders: Senders, transport: Transport, *, external: bool) -> None:
    before = [doors.seen(n)["calls"] for n in (0, 1)]
    tensors = moe_tensors(seed=1000 + doors.epoch)
    more = {"base_version": "r1:0"} if transport is Transport.DISK_DELTA else {}
    plan = doors.plan(transport, tensors, external=external, **more)
    if transport.on_disk:  # nothing is paused yet
        with pytest.raises(ServiceError, match=r"no engine can fetch its files: .*answered 401"):
            senders.prepare(plan, tensors)
    else:
        report = carry(senders, plan, tensors)
        assert not report.ok
        for engine in report.engines:
            assert "answered 401" in engine.error and engine.answered
    assert [doors.seen(n)["calls"] for n in (0, 1)] == before, "nothing reached the engines"


@pytest.mark.usefixtures("stranger")
@pytest.mark.parametrize("transport", list(Transport))
def test_no_transport_gets_in_without_the_token(doors: Doors, senders: Senders, transport: Transport) -> None:
    refused(doors, senders, transport, external=False)


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("transport", list(Transport))
def test_no_transport_shows_the_token_to_somebody_elses_engine(
    doors: Doors, senders: Senders, transport: Transport
) -> None:
    refused(doors, senders, transport, external=True)


def test_the_token_stands_in_no_log_and_no_command_line(doors: Doors) -> None:
    assert TOKEN not in (doors.folder / "doors.log").read_text()
    assert all(TOKEN not in part for part in psutil.Process(doors.pid).cmdline())
