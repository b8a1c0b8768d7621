"""One engine that is known twice, one URL that two engines have had, and a keeper that may not act any more: nothing
healthy is ended, and nobody gets traffic that the log calls fenced."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet_fakes import FleetWorld, KeptEngine

from rl360.commands import fleet as command
from rl360.engines.client import open_http
from rl360.engines.fleet import EngineIdentity, EngineState
from rl360.engines.fleet_log import Event, FleetLog, Slot, change, walk
from rl360.engines.gateway import GatewayClient
from rl360.engines.keeper import Keeper
from rl360.engines.keeper_lease import LeaseLost
from rl360.engines.launchers.base import Handle
from rl360.engines.members import EXTERNAL, holders, is_external, members
from rl360.engines.membership import add_external, start_more, take_back
from rl360.engines.processes import EndProof
from rl360.errors import BadInput, ServiceError

S = EngineState


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FleetWorld]:
    made = FleetWorld(tmp_path, monkeypatch)
    yield made
    made.close()


def respelled(engine: KeptEngine) -> EngineIdentity:
    return engine.identity.model_copy(update={"url": engine.url.replace("127.0.0.1", "localhost")})


def write(world: FleetWorld, *events: Event) -> FleetLog:
    log = FleetLog(world.store)
    log.append("person:ann", lambda _: list(events))
    return log


def twice(world: FleetWorld) -> FleetLog:
    """engine-0 under a second URL, as a log has it that an earlier version wrote."""
    world.serve()
    again = respelled(world.engines[0])
    world.gateway.engines[again.url] = world.engines[0]
    said = {"incarnation": again.incarnation, "process": again.process, "reason": "borrowed", "member": True}
    return write(world, Event(engine="external-0", url=again.url, launcher=EXTERNAL, to=S.JOINING, **said))


def states(world: FleetWorld) -> dict[str, EngineState]:
    return {name: slot.state for name, slot in FleetLog(world.store).refresh().slots.items()}


def test_an_engine_of_the_fleet_is_not_added_by_another_url(world: FleetWorld) -> None:
    world.serve()
    log = FleetLog(world.store)
    with pytest.raises(BadInput, match="is engine-0 by another URL"):
        add_external(log, respelled(world.engines[0]), "ann", "borrowed")
    assert states(world) == {"engine-0": S.SERVING, "engine-1": S.SERVING}


def test_nor_one_that_is_configured_and_not_in_the_log_yet(world: FleetWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_open", lambda: (world.services, world.store, FleetLog(world.store)))
    with pytest.raises(BadInput, match="is engine-1 by another URL"):
        command.add(respelled(world.engines[1]).url, 0, "", 1, "borrowed", 0.0)
    assert states(world) == {}


def test_nor_taken_back_while_another_slot_has_it(world: FleetWorld) -> None:
    log = twice(world)
    slot = log.refresh().slots["external-0"]
    write(world, change(slot, S.SUSPECT, "off", member=False))
    with pytest.raises(BadInput, match="is engine-0 by another URL"):
        take_back(log, "external-0", respelled(world.engines[0]), "ann", "back", 0)


def test_an_engine_that_the_log_has_twice_is_looked_after_once(world: FleetWorld) -> None:
    log = twice(world)
    world.rounds(7)
    assert states(world) == {"engine-0": S.SERVING, "engine-1": S.SERVING, "external-0": S.JOINING}
    assert all(engine.alive for engine in world.engines)
    assert sorted(world.gateway.urls()) == sorted(engine.url for engine in world.engines)
    assert sum("same engine as engine-0" in line for line in world.said) == 1
    assert list(members(log.refresh(), world.services.engine_urls)) == ["engine-0", "engine-1"]


def test_a_twin_that_a_person_removes_takes_nothing_with_it(world: FleetWorld) -> None:
    log = twice(world)
    write(world, change(log.refresh().slots["external-0"], S.SUSPECT, "is engine-0", member=False))
    world.rounds(5)
    assert states(world) == {"engine-0": S.SERVING, "engine-1": S.SERVING, "external-0": S.SUSPECT}
    assert all(engine.alive for engine in world.engines) and len(world.gateway.urls()) == 2


def test_an_added_engine_that_is_configured_later_keeps_its_traffic(world: FleetWorld) -> None:
    """The slot that holds it has it, until a push brings the configured one; then that has it."""
    first, second = world.engines
    both = world.services
    world.services = both.model_copy(update={"engine_urls": [second.url]})
    log = FleetLog(world.store)
    add_external(log, first.identity, "ann", "borrowed")
    slot = log.refresh().slots["external-0"]
    assert is_external(slot, world.services.engine_urls)
    world.services = both.model_copy(update={"engine_urls": [second.url, first.url + "/"]})
    assert not is_external(slot, world.services.engine_urls) and not is_external(None, [])
    world.rounds(2)
    assert states(world) == {"external-0": S.JOINING, "engine-0": S.JOINING}
    world.serve()
    assert holders(log.refresh(), world.services.engine_urls)[first.identity.incarnation] == "engine-1"
    world.rounds(6)
    assert states(world) == {"external-0": S.JOINING, "engine-0": S.SERVING, "engine-1": S.SERVING}
    assert first.alive and second.alive and len(world.gateway.urls()) == 2


def fenced(world: FleetWorld) -> Slot:
    """engine-0 answers, and is fenced without a proof."""
    slot = world.slot()
    write(world, *walk(slot, [S.SUSPECT, S.FENCED], "hung", evidence="gateway did not answer"))
    return world.slot()


def unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    async def proof(self: Keeper, slot: Slot) -> EndProof:
        return EndProof(gone=False, evidence="its node does not answer")

    monkeypatch.setattr(Keeper, "proof", proof)
    monkeypatch.setattr(Keeper, "ended", proof)


def test_a_fenced_engine_that_the_gateway_has_is_taken_out(world: FleetWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.serve()
    fenced(world)
    unproven(monkeypatch)
    world.rounds(1)
    assert world.state() is S.FENCED and world.gateway.urls() == [world.engines[1].url]
    assert any("got traffic while fenced" in line for line in world.said)
    world.gateway.answer("POST", "/workers", {"url": world.engines[0].url})  # somebody puts it back
    world.rounds(1)
    assert world.gateway.urls() == [world.engines[1].url]


@pytest.mark.parametrize("state", [S.SUSPECT, S.FENCED])
def test_a_url_that_another_engine_serves_at_by_now_stays_in(
    world: FleetWorld, monkeypatch: pytest.MonkeyPatch, state: EngineState
) -> None:
    """A pod's address is another pod's after it."""
    world.serve()
    unproven(monkeypatch)
    log = FleetLog(world.store)
    start_more(log, world.services, "kubernetes", 1, "ann", "more")
    slot = log.refresh().slots["kubernetes-0"]
    was = {"url": world.engines[0].url, "incarnation": "ee" * 8}
    write(world, change(slot, S.JOINING, "answers", **was))
    slot = log.refresh().slots["kubernetes-0"]
    path = [S.SUSPECT, S.FENCED] if state is S.FENCED else [S.SUSPECT]
    write(world, *walk(slot, path, "hung", evidence="hung"))

    async def use(keeper: Keeper) -> None:
        assert (
            await keeper.out_of_gateway(log.refresh().slots["kubernetes-0"])
            == "engine-0 has its URL in the gateway now"
        )
        await keeper.close()

    world.keep(use)
    assert world.state() is S.SERVING and world.gateway.removed == []
    assert len(world.gateway.urls()) == 2 and not any("while fenced" in line for line in world.said)


def test_a_keeper_that_lost_its_lease_goes_on_with_no_removal(world: FleetWorld) -> None:
    world.serve()
    answer, keepers = world.gateway.answer, list[Keeper]()

    def lose(method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """While the gateway lists its workers the lease runs out."""
        if keepers:
            keepers[0].lease._until = 0.0
        return answer(method, path, body)

    world.gateway.answer = lose  # type: ignore[method-assign]

    async def use(keeper: Keeper) -> None:
        keepers.append(keeper)
        with pytest.raises(LeaseLost, match="ran out"):
            await keeper.out_of_gateway(world.slot())
        await keeper.close()

    world.keep(use)
    assert world.gateway.removed == [] and len(world.gateway.urls()) == 2


def test_a_removal_asks_before_each_try(world: FleetWorld) -> None:
    world.serve()
    asked: list[int] = []

    async def run() -> bool:
        async with open_http() as http:
            gateway = GatewayClient(world.gateway.url, http)
            return await gateway.remove(world.engines[0].url, 5, lambda: asked.append(1))

    assert asyncio.run(run()) and len(asked) >= 1
    assert world.gateway.urls() == [world.engines[1].url]


def test_a_defect_in_renewing_ends_the_keeper(world: FleetWorld) -> None:
    async def use(keeper: Keeper) -> None:
        async def broken() -> None:
            raise ZeroDivisionError("renewing")

        assert keeper.renewing is not None
        keeper.renewing.cancel()
        keeper.renewing = asyncio.create_task(broken())
        await asyncio.wait({keeper.renewing})
        with pytest.raises(ZeroDivisionError, match="renewing"):
            await keeper.round()
        await keeper.close()

    world.keep(use)


class Found:
    """A launcher of which only its leftovers matter. Jobs 1 and 2 carry the same mark."""

    starts = True

    def __init__(self, kind: str, *handles: Handle) -> None:
        self.kind, self.handles, self.ended = kind, list(handles), list[Handle]()

    async def find(self, deadline_s: float) -> list[Handle]:
        if not self.handles:
            raise ServiceError(f"{self.kind} does not answer")
        return self.handles

    async def end(self, handle: Handle, deadline_s: float) -> EndProof:
        self.ended.append(handle)
        return EndProof(gone=True, evidence="ended")


def test_leftovers_of_one_launcher_do_not_wait_for_another_and_a_second_job_is_one(world: FleetWorld) -> None:
    log = FleetLog(world.store)
    start_more(log, world.services, "kubernetes", 1, "ann", "more")
    start_more(log, world.services, "slurm", 1, "ann", "more")
    slot = log.refresh().slots["slurm-0"]
    write(world, change(slot, S.JOINING, "slurm started it", ref={"job": "2", "port": "13000", "state": "PENDING"}))
    mark = f"slurm-0-{log.refresh().slots['slurm-0'].starts}"
    first, second = (Handle(mark=mark, ref={"job": number}) for number in "12")
    jobs = Found("slurm", first, second)

    async def use(keeper: Keeper) -> None:
        keeper.launchers = {"kubernetes": Found("kubernetes"), "slurm": jobs}  # type: ignore[dict-item]
        await keeper.end_strays(log.refresh())
        await keeper.close()

    world.keep(use)
    assert jobs.ended == [first]
    assert any("kubernetes does not answer" in line for line in world.said)
