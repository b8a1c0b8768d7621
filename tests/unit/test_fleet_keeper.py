"""The keeper against engines with faults: what it fences, what it leaves alone, and where its successor goes on."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet_fakes import OPTIONS, VOCABULARY, FleetWorld, KeptEngine, elsewhere, revive, until

from rl360.engines import health, members
from rl360.engines.client import EngineClient, open_http
from rl360.engines.fleet import EngineState
from rl360.engines.fleet_log import EVENTS, FleetLog, Slot
from rl360.engines.keeper import Keeper
from rl360.engines.keeper_lease import Lease, LeaseLost
from rl360.engines.membership import add_external, drain, is_gone, keeper_is_gone, remove, take_back
from rl360.engines.patience import KeepOptions
from rl360.engines.processes import EndProof, ProcessId, proof_of_end
from rl360.errors import BadInput, Rl360Error, ServiceError, StoreUnavailable
from rl360.weights import fence

S = EngineState


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FleetWorld]:
    made = FleetWorld(tmp_path, monkeypatch)
    yield made
    made.close()


def test_engines_that_answer_are_registered_and_get_no_traffic(world: FleetWorld) -> None:
    world.rounds(2)
    assert [world.state(0), world.state(1)] == [S.JOINING, S.JOINING]
    assert world.slot().incarnation == world.engines[0].identity.incarnation
    assert world.slot().process == world.engines[0].identity.process
    assert world.gateway.added == []


def test_a_serving_fleet_is_left_as_it_is(world: FleetWorld) -> None:
    world.serve()
    before = world.entries()
    world.rounds(3)
    assert world.entries() == before
    assert sorted(world.gateway.urls()) == sorted(engine.url for engine in world.engines)


def test_a_killed_engine_is_fenced_proven_and_only_a_push_brings_its_successor_back(world: FleetWorld) -> None:
    world.serve()
    old = world.engines[0]
    os.kill(old.process.pid, signal.SIGKILL)
    old.process.wait()
    world.rounds(1)
    assert world.path()[-3:] == ["suspect", "fenced", "gone"]
    assert world.gateway.urls() == [world.engines[1].url]
    slot = world.slot()
    assert f"none alive of pids {old.process.pid}" in slot.evidence and "out of the gateway" in slot.evidence
    assert slot.reason and slot.owner is None
    # its supervisor starts another at the same URL
    revive(world, old)
    world.rounds(2)
    assert (world.state(), world.slot().starts) == (S.JOINING, 2)
    assert world.gateway.added == [] and world.gateway.urls() == [world.engines[1].url]
    world.serve()
    assert world.state() is S.SERVING


def hang(engine: KeptEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing any more, and is not waited for as long as one that a busy machine keeps from answering."""
    engine.faults["*"] = "hang"
    ping = EngineClient.ping

    async def shorter(client: EngineClient, deadline_s: float | None = None) -> None:
        await ping(client, 0.05 if client.url == engine.url else deadline_s)

    monkeypatch.setattr(EngineClient, "ping", shorter)


def test_a_hung_engine_loses_traffic_first_and_its_process_later(
    world: FleetWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.serve()
    stuck = world.engines[0]
    hang(stuck, monkeypatch)
    world.rounds(1)
    assert world.state() is S.SERVING, "one miss is nothing"

    async def use(keeper: Keeper) -> None:
        for _ in range(2):
            await keeper.round()
        assert world.state() is S.SUSPECT and world.slot().owner == keeper.me
        assert world.gateway.urls() == [world.engines[1].url]
        assert stuck.alive
        for _ in range(3):
            await keeper.round()
        assert world.state() is S.GONE
        await keeper.close()

    world.keep(use)
    assert not stuck.alive
    assert world.gateway.alive_at_removal[stuck.url], "out of the gateway first, then ended"
    assert "misses in a row" in world.slot().reason
    assert world.state(1) is S.SERVING


def test_a_suspect_that_answers_again_joins_and_does_not_serve(world: FleetWorld) -> None:
    world.serve()
    world.engines[0].faults["/ping"] = "500"

    async def use(keeper: Keeper) -> None:
        for _ in range(2):
            await keeper.round()
        assert world.state() is S.SUSPECT
        world.engines[0].faults.clear()
        for _ in range(3):
            await keeper.round()
        await keeper.close()

    world.keep(use)
    assert world.state() is S.JOINING and world.engines[0].alive
    assert world.gateway.urls() == [world.engines[1].url] and world.gateway.added == []
    assert "answers again" in world.slot().reason


def test_an_engine_that_restarted_between_two_rounds_is_another_one(world: FleetWorld) -> None:
    world.serve()
    revive(world, world.engines[0])
    world.rounds(1)
    assert world.path()[-4:] == ["suspect", "fenced", "gone", "joining"]
    assert world.gateway.urls() == [world.engines[1].url]


def test_while_a_push_is_open_the_keeper_only_watches(world: FleetWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.serve()
    before = world.entries()
    fence.write_intent(world.store, world.intent(2, *world.engines))
    hang(world.engines[0], monkeypatch)
    os.kill(world.engines[1].process.pid, signal.SIGKILL)
    world.rounds(4)
    assert world.entries() == before
    assert world.engines[0].alive and world.gateway.removed == []


def test_what_a_push_owns_is_not_touched_and_the_other_way_round(world: FleetWorld) -> None:
    """The push has claimed; its intent is seen late. Then the keeper has claimed; the push leaves that engine alone."""
    world.serve()
    log = FleetLog(world.store)
    names = members.members(log.refresh(), world.services.engine_urls)
    assert members.claim(log, names, world.intent(2, *world.engines)) == {}
    world.engines[0].faults["/ping"] = "500"
    world.rounds(5)
    assert world.slot().owner == "push:2" and world.state() is S.LOADING and world.engines[0].alive
    fence.write_end(world.store, world.record(2, *world.engines))
    members.settle(log, world.record(2, *world.engines))

    async def use(keeper: Keeper) -> None:
        for _ in range(2):
            await keeper.round()
        refused = members.claim(log, names, world.intent(3, *world.engines))
        assert list(refused) == [world.engines[0].url] and "keeper:" in refused[world.engines[0].url]
        assert world.slot(1).owner == "push:3" and world.slot(0).owner == keeper.me
        await keeper.close()

    world.keep(use)


def test_what_a_push_could_not_write_any_more_is_written_from_its_record(world: FleetWorld) -> None:
    world.serve()
    log = FleetLog(world.store)
    names = members.members(log.refresh(), world.services.engine_urls)
    members.claim(log, names, world.intent(2, *world.engines))
    fence.write_end(world.store, world.record(2, *world.engines))  # and then it was killed
    world.rounds(2)
    assert [world.state(0), world.state(1)] == [S.SERVING, S.SERVING]
    assert world.slot().owner is None and world.slot().version == "demo:2"


class _Killed(BaseException):
    """Not an error that anything handles: the process is no more."""


@pytest.mark.parametrize("survives", range(7))
def test_a_keeper_killed_anywhere_in_a_fence_is_followed_by_one_that_finishes_it(
    world: FleetWorld, survives: int
) -> None:
    """Killed before write `survives` of the log, or not at all; the successor ends where an unkilled one ends."""
    world.serve()
    world.engines[0].faults["/ping"] = "500"
    put, left = world.store.put_once, [survives]

    def put_once(key: str, data: bytes) -> bool:
        if key.startswith(EVENTS):
            if left[0] == 0:
                raise _Killed
            left[0] -= 1
        return put(key, data)

    async def use(keeper: Keeper) -> None:
        world.store.put_once = put_once  # type: ignore[method-assign]
        try:
            for _ in range(6):
                await keeper.round()
        except _Killed:
            pass
        # the dead neither write nor count as running
        fence.mark_running(keeper.lease.owner, False)

    world.keep(use)
    world.store.put_once = put  # type: ignore[method-assign]
    FleetLog(world.store).refresh()
    world.rounds(6)
    assert world.path()[-3:] == ["suspect", "fenced", "gone"] or world.path()[-2:] == ["fenced", "gone"]
    assert world.slot().owner is None
    assert not world.engines[0].alive and proof_of_end(world.slot().process).gone
    assert world.gateway.urls() == [world.engines[1].url]
    assert world.gateway.alive_at_removal[world.engines[0].url]


def test_draining_waits_for_what_is_in_flight(world: FleetWorld) -> None:
    world.serve()
    log = FleetLog(world.store)
    world.engines[0].busy = 2
    drain(log, world.services, "engine-0", world.engines[0].url, "ann", "node maintenance", 0)
    world.rounds(3)
    assert world.state() is S.DRAINING and world.engines[0].alive
    assert world.gateway.urls() == [world.engines[1].url]
    assert members.members(log.refresh(), world.services.engine_urls) == {"engine-1": world.engines[1].url}
    world.engines[0].busy = 0
    world.rounds(1)
    assert world.state() is S.GONE and not world.engines[0].alive
    assert "nothing was in flight" in world.slot().evidence and world.slot().reason == "node maintenance"
    # whatever starts there again is not the fleet's, until a person says so
    revive(world, world.engines[0])
    world.rounds(2)
    assert world.state() is S.GONE
    take_back(log, "engine-0", world.engines[0].identity, "ann", "back", 0)
    world.rounds(1)
    assert world.state() is S.JOINING
    assert "engine-0" in members.members(log.refresh(), world.services.engine_urls)


def test_an_engine_that_a_person_takes_back_in_the_last_moment_is_not_ended(
    world: FleetWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the keeper's look at what is in flight and the end that it would make."""
    world.serve()
    log, engine = FleetLog(world.store), world.engines[0]
    drain(log, world.services, "engine-0", engine.url, "ann", "node maintenance", 0)

    async def taken_back(*_: Any) -> int:
        take_back(log, "engine-0", engine.identity, "ann", "not needed", 0)
        return 0

    monkeypatch.setattr(health, "in_flight", taken_back)
    world.rounds(1)
    assert world.state() is S.JOINING and engine.alive


def test_what_is_being_ended_cannot_be_taken_back(world: FleetWorld) -> None:
    world.serve()
    log, engine = FleetLog(world.store), world.engines[0]
    drain(log, world.services, "engine-0", engine.url, "ann", "node maintenance", 0)

    async def use(keeper: Keeper) -> None:
        end = keeper.ended

        async def ended(slot: Slot) -> EndProof:
            with pytest.raises(ServiceError, match=f"{keeper.me} has it"):
                await asyncio.to_thread(take_back, log, "engine-0", engine.identity, "ann", "not needed", 0)
            return await end(slot)

        keeper.ended = ended  # type: ignore[method-assign]
        await keeper.round()
        await keeper.close()

    world.keep(use)
    assert world.state() is S.GONE


def test_draining_has_a_deadline(world: FleetWorld) -> None:
    world.serve()
    world.engines[0].busy = 2
    drain(FleetLog(world.store), world.services, "engine-0", world.engines[0].url, "ann", "off", 0)
    world.rounds(1, dataclasses.replace(OPTIONS, drain_s=0.0))
    assert world.state() is S.GONE and not world.engines[0].alive
    assert "2 requests were cut off after 0 s" in world.slot().evidence


def test_removing_does_not_wait(world: FleetWorld) -> None:
    world.serve()
    log = FleetLog(world.store)
    world.engines[0].busy = 2
    remove(log, world.services, "engine-0", world.engines[0].url, "ann", "ECC errors", 0)
    with pytest.raises(BadInput, match="last engine"):
        remove(log, world.services, "engine-1", world.engines[1].url, "ann", "too", 0)
    world.rounds(1)
    assert world.path()[-3:] == ["suspect", "fenced", "gone"] and not world.engines[0].alive
    assert world.slot().reason == "ECC errors" and world.slot().member is False


def test_a_person_waits_for_the_owner(world: FleetWorld) -> None:
    world.serve()
    log = FleetLog(world.store)
    names = members.members(log.refresh(), world.services.engine_urls)
    members.claim(log, names, world.intent(2, *world.engines))
    with pytest.raises(ServiceError, match=r"push:2 has it .*--wait"):
        drain(log, world.services, "engine-0", world.engines[0].url, "ann", "off", 0)


def test_someone_elses_engine_stays_fenced_until_a_person_confirms(world: FleetWorld) -> None:
    world.serve()
    other = KeptEngine()
    world.gateway.engines[other.url] = other
    log = FleetLog(world.store)
    assert add_external(log, other.identity, "ann", "borrowed") == "external-0"
    assert members.members(log.refresh(), world.services.engine_urls)["external-0"] == other.url
    other.faults["/ping"] = "500"
    world.rounds(5)
    slot = FleetLog(world.store).refresh().slots["external-0"]
    assert slot.state is S.FENCED and slot.owner is None and other.alive
    assert "can't be proven here" in slot.evidence and "confirm-gone external-0" in slot.evidence
    with pytest.raises(BadInput, match="it is not gone"):
        is_gone(world.store, log, "external-0", other.url, other.identity, "off", "ann")
    (line,) = is_gone(world.store, log, "external-0", other.url, None, "their node is off", "ann")
    assert slot.incarnation in line
    assert log.refresh().slots["external-0"].state is S.GONE
    assert fence.is_gone_confirmed(world.store, other.identity)


def test_a_replaced_incarnation_that_is_not_proven_gone_is_kept_in_mind(world: FleetWorld) -> None:
    other = KeptEngine()
    world.gateway.engines[other.url] = other
    log = FleetLog(world.store)
    add_external(log, other.identity.model_copy(update={"process": None}), "ann", "borrowed")
    first = other.identity.incarnation
    revive(world, other)
    world.rounds(1)
    slot = log.refresh().slots["external-0"]
    assert slot.state is S.JOINING and [item.incarnation for item in slot.unproven] == [first]
    is_gone(world.store, log, "external-0", other.url, other.identity, "I restarted it", "ann")
    after = log.refresh().slots["external-0"]
    assert after.unproven == () and after.incarnation == slot.incarnation and after.state is S.JOINING


def test_an_idle_serving_engine_samples_a_token_from_ids_it_knows(world: FleetWorld) -> None:
    world.rounds(2)
    assert world.engines[0].asked == [], "joining: nothing is to be generated"
    world.serve()
    world.engines[1].busy = 1
    world.rounds(2)
    assert world.engines[0].asked and world.engines[1].asked == []
    assert all(0 <= item < VOCABULARY for ids in world.engines[0].asked for item in ids)


@pytest.mark.parametrize("token", [VOCABULARY, -1])
def test_an_engine_that_answers_but_cannot_generate_loses_its_traffic_and_joins_when_it_can(
    world: FleetWorld, token: int
) -> None:
    world.serve()
    world.engines[0].samples = token

    async def use(keeper: Keeper) -> None:
        for _ in range(3):
            await keeper.round()
        assert world.state() is S.SUSPECT, "it answers, and that is not enough"
        assert "outside the vocabulary" in " ".join(world.said)
        assert world.gateway.urls() == [world.engines[1].url]
        world.engines[0].samples = 7
        await keeper.round()
        await keeper.close()

    world.keep(use)
    assert world.state() is S.JOINING and world.path()[-2:] == ["suspect", "joining"]


def test_an_engine_that_never_generates_again_is_ended(world: FleetWorld) -> None:
    world.serve()
    world.engines[0].samples = -1
    world.rounds(6)
    assert world.state() is S.GONE and not world.engines[0].alive
    assert "misses in a row: generated id -1" in world.slot().reason


def test_what_a_barred_door_does_not_let_a_suspect_show_is_not_asked(world: FleetWorld) -> None:
    world.serve()
    engine = world.engines[0]
    engine.faults["/ping"] = "500"

    async def use(keeper: Keeper) -> None:
        for _ in range(2):
            await keeper.round()
        assert world.state() is S.SUSPECT
        engine.faults = {"/rl360/door": lambda _: (200, {"phase": "barred"}), "/generate": "500"}
        asked = len(engine.asked)
        await keeper.round()
        assert world.state() is S.JOINING and len(engine.asked) == asked
        await keeper.close()

    world.keep(use)


def test_an_engine_that_loses_its_traffic_again_and_again_is_ended(world: FleetWorld) -> None:
    options = dataclasses.replace(OPTIONS, flaps=3)
    for turn in range(3):
        world.serve()
        world.engines[0].samples = -1
        world.rounds(2, options)
        assert world.state() is S.SUSPECT, turn
        world.engines[0].samples = 7
        world.rounds(1, options)
        if turn < 2:
            assert world.state() is S.JOINING
    assert world.state() is S.GONE and not world.engines[0].alive
    assert "lost its traffic 3 times in" in world.slot().reason and "generated id -1" in world.slot().reason


def test_losing_its_traffic_long_ago_is_forgiven(world: FleetWorld) -> None:
    options = dataclasses.replace(OPTIONS, flaps=2, flaps_s=1e-6)
    for _ in range(2):
        world.serve()
        world.engines[0].samples = -1
        world.rounds(2, options)
        world.engines[0].samples = 7
        world.rounds(1, options)
        assert world.state() is S.JOINING


def test_a_door_that_lets_the_keeper_not_in_says_nothing_about_the_engine(world: FleetWorld) -> None:
    world.serve()
    world.engines[0].faults["/generate"] = lambda body: (401, {"error": "send Authorization"})
    world.rounds(4)
    assert world.state() is S.SERVING
    assert "set RL360_TOKEN_FILE" in " ".join(world.said)


def test_the_keeper_shows_the_deployments_token_at_the_door(world: FleetWorld) -> None:
    seen: list[httpx.Headers] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers)
        return httpx.Response(200, json={"output_ids": [3]})

    async def ask() -> str:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            return await health.generate("http://h:1", http, (1,), VOCABULARY, 1, "t" * 20)

    assert asyncio.run(ask()) == ""
    assert seen[0]["authorization"] == f"Bearer {'t' * 20}"


def test_a_gateway_that_is_down_keeps_nobody_from_fencing(world: FleetWorld) -> None:
    world.serve()
    world.gateway.stop()
    os.kill(world.engines[0].process.pid, signal.SIGKILL)
    world.engines[0].process.wait()
    world.rounds(1)
    assert world.state() is S.GONE and "gateway did not answer" in world.slot().evidence


def test_a_store_that_is_away_costs_a_round(world: FleetWorld) -> None:
    world.serve()

    async def use(keeper: Keeper) -> None:
        world.store.down = True
        with pytest.raises(StoreUnavailable):
            await keeper.round()
        world.store.down = False
        await keeper.round()
        await keeper.close()

    world.keep(use)


def test_run_goes_on_after_a_bad_round_and_stops_when_told(world: FleetWorld) -> None:
    beats: list[int] = []

    async def run() -> None:
        async with open_http() as http:
            keeper = Keeper(
                world.store, world.services, dataclasses.replace(OPTIONS, every_s=0.05), http, world.said.append
            )
            stop = asyncio.Event()

            def beat() -> None:
                beats.append(1)
                world.store.down = len(beats) < 3
                if len(beats) == 5:
                    stop.set()

            await keeper.run(stop, beat)

    asyncio.run(run())
    assert len(beats) == 5 and any("round failed" in line for line in world.said)
    assert any(key.endswith("/end.json") for key in world.store.objects)


def test_there_is_one_keeper(world: FleetWorld) -> None:
    async def nothing(keeper: Keeper) -> None:
        """It is killed right after it opened."""

    first = world.keep(nothing)
    with pytest.raises(Rl360Error, match=f"another keeper runs: {first.me} .* its process runs here"):
        world.keep(nothing)
    with pytest.raises(BadInput, match="runs here as pid"):
        keeper_is_gone(world.store, first.me, "dead", "ann")
    fence.mark_running(first.lease.owner, False)
    world.rounds(1)


def test_of_two_that_begin_at_once_one_stays(world: FleetWorld) -> None:
    async def run() -> None:
        async with open_http() as http:
            options = dataclasses.replace(OPTIONS, lease_s=3.0)
            both = [Keeper(world.store, world.services, options, http, world.said.append) for _ in range(2)]
            seen = asyncio.Event()
            # neither is there when either looks: both begin
            for keeper in both:
                keeper.lease.wait_for_others = lambda *_: seen.wait()  # type: ignore[assignment, misc]
            opening = [asyncio.create_task(keeper.open()) for keeper in both]
            seen.set()
            ended = await asyncio.gather(*opening, return_exceptions=True)
            kept = [keeper for keeper, error in zip(both, ended, strict=True) if error is None]
            assert [keeper.me for keeper in kept] == [min(keeper.me for keeper in both)]
            assert "began at the same time" in str(next(error for error in ended if error is not None))
            await kept[0].close()

    asyncio.run(run())


def test_a_keeper_whose_lease_was_taken_does_nothing_more_and_ends(world: FleetWorld) -> None:
    """It slept, another one took over, and it wakes up in front of an engine that hangs."""
    world.serve()
    world.engines[0].faults["*"] = "hang"
    before = world.entries()

    async def run() -> None:
        async with open_http() as http:
            options = dataclasses.replace(OPTIONS, every_s=0.05, lease_s=0.3)
            keeper = Keeper(world.store, world.services, options, http, world.said.append)
            elsewhere(keeper.lease)
            await keeper.open()
            assert keeper.renewing is not None
            keeper.renewing.cancel()  # it sleeps
            await Lease(world.store, 0.3).wait_for_others(world.said.append, lambda: None)
            with pytest.raises(LeaseLost, match="ran out before it could be renewed"):
                await keeper.round()
            with pytest.raises(LeaseLost):
                await keeper.out_of_gateway(world.slot())
            assert await keeper.suspect(world.slot(), "late") is None
            with pytest.raises(LeaseLost, match=r"keeper:\w+ took over"):
                keeper.lease.renew({})
            with pytest.raises(LeaseLost, match="took over"):
                await keeper.run(asyncio.Event(), lambda: None)

    asyncio.run(run())
    assert world.entries() == before and world.gateway.removed == [] and world.engines[0].alive


def test_what_a_keeper_that_vanished_elsewhere_was_fencing_its_successor_finishes(world: FleetWorld) -> None:
    world.serve()
    world.engines[0].faults["/ping"] = "500"
    options = dataclasses.replace(OPTIONS, lease_s=0.3)

    async def vanish(keeper: Keeper) -> None:
        for _ in range(3):
            await keeper.round()
        assert world.state() is S.SUSPECT and world.slot().owner == keeper.me

    async def run() -> None:
        async with open_http() as http:
            keeper = Keeper(world.store, world.services, options, http, world.said.append)
            elsewhere(keeper.lease)
            await keeper.open()
            await vanish(keeper)

    asyncio.run(run())
    world.rounds(4, options)
    assert world.state() is S.GONE and not world.engines[0].alive
    taken = [event.evidence for entry in world.entries() for event in entry.events if event.took_from]
    assert "did not renew its lease and another one took over" in taken[0]


def test_sigterm_ends_a_round_that_is_under_way(world: FleetWorld) -> None:
    world.serve()
    world.engines[0].faults["*"] = "hang"
    options = dataclasses.replace(OPTIONS, ping_s=60.0, look_s=60.0)

    async def run() -> float:
        async with open_http() as http:
            keeper = Keeper(world.store, world.services, options, http, world.said.append)
            stop = asyncio.Event()
            running = asyncio.create_task(keeper.run(stop, lambda: None))
            await asyncio.to_thread(until, lambda: any(path == "/ping" for path, _ in world.engines[0].calls))
            began = time.monotonic()
            stop.set()
            await running
            return time.monotonic() - began

    assert asyncio.run(run()) < 2
    assert any(key.endswith("/end.json") for key in world.store.objects)


def test_a_keeper_on_another_host_is_gone_when_a_person_says_so(world: FleetWorld) -> None:
    lease = fence.new_owner().model_copy(update={"host": "n7/pid:[1]", "process": ProcessId(pid=1, start_ticks=1)})
    world.store.put(f"_fleet/keepers/{lease.token}/lease.json", lease.model_dump_json().encode())
    with pytest.raises(BadInput, match="needs a reason"):
        keeper_is_gone(world.store, f"keeper:{lease.token}", " ", "ann")
    keeper_is_gone(world.store, f"keeper:{lease.token}", "node n7 is off", "ann")
    world.rounds(1)


def test_impatience_is_refused() -> None:
    kept: dict[str, Any] = {"suspect_after": 5, "fence_after": 4}
    with pytest.raises(BadInput, match="suspect after 5 misses and fenced after 4"):
        KeepOptions(**kept)
