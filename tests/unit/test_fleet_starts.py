"""Starts: one that waits in a queue is waited for, one that runs has `start_s`, and what is seen of it is told."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fleet_fakes import OPTIONS, FleetWorld

from rl360.engines.fleet import EngineState
from rl360.engines.fleet_log import FleetLog, Slot
from rl360.engines.keeper import Keeper
from rl360.engines.keeper_lease import last_beat
from rl360.engines.launchers.base import Handle, Start, fleet_id, last_line
from rl360.engines.membership import start_more
from rl360.engines.patience import KeepOptions
from rl360.engines.processes import EndProof
from rl360.errors import BadInput

S = EngineState
NAME = "kubernetes-0"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FleetWorld]:
    made = FleetWorld(tmp_path, monkeypatch)
    yield made
    made.close()


@dataclass
class Queue:
    """A launcher whose starts are what `seen` says."""

    seen: dict[str, Any] = field(default_factory=lambda: {"state": "Pending (Unschedulable)"})
    ended: list[str] = field(default_factory=list)
    started: list[Start] = field(default_factory=list)
    kind: str = "kubernetes"
    starts: bool = True

    def port_of(self, number: int) -> int:
        return 13_000 + 10 * number

    async def start(self, start: Start, deadline_s: float) -> Handle:
        self.started.append(start)
        return Handle(mark=start.mark, ref={"pod": start.mark})

    async def locate(self, handle: Handle, deadline_s: float) -> Handle:
        return handle.model_copy(update=self.seen)

    async def find(self, deadline_s: float) -> list[Handle]:
        return []

    async def proof(self, handle: Handle, deadline_s: float) -> EndProof:
        gone = handle.mark in self.ended
        return EndProof(gone=gone, evidence="no such pod" if gone else "the pod is there")

    async def end(self, handle: Handle, deadline_s: float) -> EndProof:
        self.ended.append(handle.mark)
        return await self.proof(handle, deadline_s)


def keep(world: FleetWorld, queue: Queue, rounds: int, start_s: float, pause_s: float = 0.0) -> Slot:
    async def use(keeper: Keeper) -> None:
        keeper.launchers["kubernetes"] = queue
        for _ in range(rounds):
            await keeper.round()
            await asyncio.sleep(pause_s)
        keeper.lease.renew(keeper.notes)
        world.said.append(str((last_beat(world.store, keeper.lease.token)[1] or keeper).notes))
        await keeper.close()

    world.keep(use, dataclasses.replace(OPTIONS, start_s=start_s))
    return FleetLog(world.store).refresh().slots[NAME]


def test_one_that_waits_is_not_ended_and_one_that_runs_has_its_time_from_then_on(world: FleetWorld) -> None:
    start_more(FleetLog(world.store), world.services, "kubernetes", 1, "ann", "more")
    queue = Queue()
    slot = keep(world, queue, rounds=4, start_s=0.05, pause_s=0.03)
    assert (slot.state, queue.ended) == (S.JOINING, [])
    assert "waits to run: Pending (Unschedulable)" in slot.reason and slot.ref["state"] == "Pending (Unschedulable)"
    assert re.search(r"'kubernetes-0': 'waits to run for \d+ s; Pending \(Unschedulable\)'", world.said[-1])
    before = len(world.entries())
    keep(world, queue, rounds=3, start_s=0.05)
    assert len(world.entries()) == before, "nothing new is written while nothing changes"
    # it runs and loads: long, but with the option that says so
    queue.seen = {"running": True, "state": "Running", "detail": "loading shard 3 of 8"}
    slot = keep(world, queue, rounds=3, start_s=1800.0)
    assert slot.state is S.JOINING and "runs, not answering yet" in slot.reason and float(slot.ref["running_since"])
    assert re.search(r"runs for \d+ of 1800 s; loading shard 3 of 8", world.said[-1])
    # another keeper, less patient, counts from the same moment, which is written in tenths of a second
    time.sleep(0.2)
    slot = keep(world, queue, rounds=1, start_s=0.01)
    assert slot.state is S.GONE and queue.ended == ["kubernetes-0-1"]
    assert "did not answer within 0.01 s of running (--start-s): loading shard 3 of 8" in slot.reason


def test_one_that_will_never_run_is_made_again(world: FleetWorld) -> None:
    start_more(FleetLog(world.store), world.services, "kubernetes", 1, "ann", "more")
    queue = Queue(seen={"failed": "Failed (OutOfcpu): node has none left"})
    slot = keep(world, queue, rounds=3, start_s=600.0)
    assert slot.state is S.GONE and queue.ended == ["kubernetes-0-1"]
    assert slot.reason == "failed before it answered: Failed (OutOfcpu): node has none left"


def test_an_address_where_another_engine_of_the_fleet_answers_is_not_taken_for_it(world: FleetWorld) -> None:
    """Two jobs on one node with one port: the second must not be registered as the first."""
    world.serve()
    start_more(FleetLog(world.store), world.services, "kubernetes", 1, "ann", "more")
    queue = Queue(seen={"running": True, "state": "Running", "url": world.engines[0].url})
    slot = keep(world, queue, rounds=4, start_s=600.0)
    assert slot.incarnation == "" and slot.state is S.JOINING
    assert world.state() is S.SERVING


def test_the_end_of_a_log_for_people(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert last_line(path) == ""
    path.write_bytes(b"x" * 10_000 + b"\nshard 1\rshard 2\x1b[0m \xff\n\n")
    assert last_line(path) == "shard 2[0m \ufffd"
    path.write_bytes(b"\n")
    assert last_line(path) == ""


def test_two_fleets_with_a_store_on_loopback_are_two(world: FleetWorld) -> None:
    """One would end the other's jobs as leftovers."""
    cluster = world.services.model_copy(update={"s3_endpoint": "https://s3.example.org"})
    assert fleet_id(cluster) == fleet_id(cluster.model_copy(update={"home": "/other"}))
    local = world.services.model_copy(update={"s3_endpoint": "http://127.0.0.1:18333"})
    assert fleet_id(local) != fleet_id(local.model_copy(update={"home": "/other"}))


def test_options_that_cannot_be_are_refused() -> None:
    for bad in ({"start_s": 0.0}, {"flaps": 0}, {"flaps_s": -1.0}, {"lease_s": 0.0}):
        with pytest.raises(BadInput, match=next(iter(bad)).partition("_")[0]):
            KeepOptions(**bad)  # type: ignore[arg-type]
