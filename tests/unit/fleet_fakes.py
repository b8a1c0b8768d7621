"""What the keeper's tests run against: engines that also generate and count requests, and a keeper over fakes.

The servers are those of fake_engines; a `sleep` child stands for each engine's process tree, so that ending and proving
are real.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rl360.config.services import Services
from rl360.engines import health
from rl360.engines.client import open_http
from rl360.engines.fleet import EngineIdentity, EngineState, incarnation_of
from rl360.engines.fleet_log import Entry, FleetLog, Slot
from rl360.engines.keeper import Keeper
from rl360.engines.keeper_lease import Lease
from rl360.engines.patience import KeepOptions
from rl360.engines.processes import ProcessTree, tree_of_pid
from rl360.weights import fence
from rl360.weights.messages import EngineOutcome, PushRecord
from tests.unit.fake_engines import FakeEngine, FakeGateway, show_token
from tests.unit.memory_store import MemoryStore

VOCABULARY = 64
OPTIONS = KeepOptions(
    every_s=5,
    ping_s=0.4,
    look_s=0.4,
    suspect_after=2,
    fence_after=4,
    generate_every_s=0,
    generate_s=0.4,
    end_s=5,
    drain_s=60,
)


@dataclass
class KeptEngine(FakeEngine):
    """Counts what it was asked to generate; `busy` requests are in flight."""

    busy: int = 0
    asked: list[list[int]] = field(default_factory=list)
    samples: int = 7
    removed_alive: list[bool] = field(default_factory=list)

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if not self.alive:
            raise ConnectionAbortedError("the kernel closes what a dead process had open")
        if path.startswith("/v1/loads") and "*" not in self.faults:
            return 200, {"loads": [{"num_running_reqs": self.busy, "num_waiting_reqs": 0}]}
        if path == "/generate" and not self.faults:
            self.asked.append(body["input_ids"])
            return 200, {"output_ids": [self.samples]}
        return super().answer(method, path, body)

    @property
    def identity(self) -> EngineIdentity:
        told = {"startup_time": {"load": self.startup}, "launch_command": "fake"}
        return EngineIdentity(url=self.url, incarnation=incarnation_of(told), process=tree_of_pid(self.process.pid))

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


@dataclass
class WatchedGateway(FakeGateway):
    """Notes for each removal whether the engine's process was alive then."""

    engines: dict[str, KeptEngine] = field(default_factory=dict)
    alive_at_removal: dict[str, bool] = field(default_factory=dict)

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if method == "DELETE" and (row := self.workers.get(path.rpartition("/")[2])):
            self.alive_at_removal.setdefault(row["url"], self.engines[row["url"]].alive)
        return super().answer(method, path, body)


class FleetWorld:
    """Two engines that a push has confirmed, a gateway that knows both, a store, and keepers on demand."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (home / "config.json").write_text(f'{{"vocab_size": {VOCABULARY}}}')
        self.engines = [KeptEngine(), KeptEngine()]
        self.gateway = WatchedGateway(engines={engine.url: engine for engine in self.engines})
        self.store = MemoryStore()
        self.said: list[str] = []
        self.services = Services(
            home=str(home), prefect_api_url="-", prefect_ui_url="-", s3_endpoint="-", s3_bucket="-",
            gateway_url=self.gateway.url, engine_urls=[engine.url for engine in self.engines], session_urls=["-"],
            sandbox_urls=["-"], trainer_url="-", model_dir=str(home),
        )  # fmt: skip
        show_token(monkeypatch, home)
        monkeypatch.setattr(health, "tree_of_url", self.tree)

    def tree(self, url: str) -> ProcessTree | None:
        engine = self.gateway.engines.get(url)
        return tree_of_pid(engine.process.pid) if engine else None

    def close(self) -> None:
        for engine in self.gateway.engines.values():
            engine.close()
        self.gateway.stop()

    def slot(self, number: int = 0) -> Slot:
        return FleetLog(self.store).refresh().slots[f"engine-{number}"]

    def state(self, number: int = 0) -> EngineState:
        return self.slot(number).state

    def entries(self) -> list[Entry]:
        return FleetLog(self.store).recent(1000)

    def path(self, name: str = "engine-0") -> list[str]:
        """The states one engine went through."""
        return [str(event.to) for entry in self.entries() for event in entry.events if event.engine == name]

    def intent(self, epoch: int, *engines: KeptEngine) -> fence.Intent:
        return fence.Intent(
            epoch=epoch, run="demo", step=0, version=f"demo:{epoch}", engines=tuple(e.identity for e in engines),
            group_name="g", call_deadline_s=1.0, owner=fence.new_owner(), written_at=0.0,
        )  # fmt: skip

    def record(self, epoch: int, *engines: KeptEngine) -> PushRecord:
        served = tuple(EngineOutcome(identity=e.identity, state=EngineState.SERVING, calls=3) for e in engines)
        return PushRecord(
            run="demo",
            step=0,
            version=f"demo:{epoch}",
            epoch=epoch,
            status="confirmed",
            path="broadcast",
            engines=served,
        )

    def serve(self) -> None:
        """What a push that confirmed both engines leaves."""
        from rl360.engines import members

        log = FleetLog(self.store)
        epoch = fence.next_epoch(self.store)
        names = members.members(log.refresh(), self.services.engine_urls)
        fence.write_intent(self.store, self.intent(epoch, *self.engines))
        assert members.claim(log, names, self.intent(epoch, *self.engines)) == {}
        fence.write_end(self.store, self.record(epoch, *self.engines))
        members.settle(log, self.record(epoch, *self.engines))
        for engine in self.engines:
            self.gateway.answer("POST", "/workers", {"url": engine.url})
        self.gateway.added.clear()

    def keep(self, use: Callable[[Keeper], Awaitable[None]], options: KeepOptions = OPTIONS) -> Keeper:
        """Run `use` with an opened keeper, which is not closed: a killed one isn't either."""

        async def run() -> Keeper:
            async with open_http() as http:
                keeper = Keeper(self.store, self.services, options, http, self.said.append)
                await keeper.open()
                await use(keeper)
                return keeper

        return asyncio.run(run())

    def rounds(self, count: int, options: KeepOptions = OPTIONS) -> None:
        """So many rounds of one keeper that is then stopped."""

        async def use(keeper: Keeper) -> None:
            for _ in range(count):
                await keeper.round()
            await keeper.close()

        self.keep(use, options)


def revive(world: FleetWorld, old: KeptEngine) -> None:
    """Another process answers at the same URL, as another incarnation."""
    if old.alive:
        old.process.kill()
        old.process.wait()
    old.process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    old.startup = uuid.uuid4().hex
    old.faults.clear()


def elsewhere(lease: Lease) -> Lease:
    """The lease of a process in another pid namespace: nothing here shows whether it lives."""
    lease.owner = lease.owner.model_copy(update={"host": "n7/pid:[1]"})
    return lease


def until(holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < give_up, "did not happen in time"
        time.sleep(0.02)
