"""The engine set changes under a push, in every order. Each ends with the fast path on the new set by the next push."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from rl360.engines.fleet import EngineState
from rl360.errors import CleanupUnconfirmed, ServiceError
from rl360.weights import fence
from rl360.weights.messages import PushRecord, PushStatus
from tests.unit.push_fakes import Fault
from tests.unit.push_schedules import write_model
from tests.unit.push_world import World, wired

GONE, SERVING = EngineState.GONE, EngineState.SERVING


@pytest.fixture
def model_dir(tmp_path: Path) -> Iterator[Path]:
    write_model(tmp_path)
    with wired():
        yield tmp_path


def story(model_dir: Path, act: Callable[[World], Awaitable[None]], **kinds: object) -> World:
    """A steady fleet of three, then `act`, then a push that must find the path of the start."""

    async def tell() -> World:
        world = World(model_dir, deadline_s=0.4, **kinds)  # type: ignore[arg-type]
        async with world.running():
            first = await world.push(0)
            assert isinstance(first, PushRecord), first
            await act(world)
            world.arm()
            for engine in world.engines:
                if not engine.alive:
                    await engine.start()
            last = await world.push_until_done(9, deadline_s=5.0)
            assert isinstance(last, PushRecord), last
            assert len(last.serving) == len(world.engines)
            assert (last.path, last.calls_per_engine) == (first.path, first.calls_per_engine)
        assert world.violations == [], "\n".join(world.log)
        return world

    return asyncio.run(tell())


def record_of(outcome: object) -> PushRecord:
    assert isinstance(outcome, PushRecord), outcome
    return outcome


def test_dead_before_the_push(model_dir: Path) -> None:
    async def act(world: World) -> None:
        world.engines[1].die()
        record = record_of(await world.push(1))
        assert world.states(record) == {"e0": SERVING, "e2": SERVING}
        assert record.absent == (world.engines[1].url,)
        assert record.rounds == 1

    story(model_dir, act)


@pytest.mark.parametrize(
    ("path", "rounds"),
    [
        ("/pause_generation", 1),
        ("/begin_weight_update", 2),
        ("/update_weights_from_distributed", 2),
        ("/weights_checker", 1),
        ("/update_weight_version", 1),  # the loading mark
        ("/rl360/admit", 1),  # between confirm and resume
        ("/continue_generation", 1),
    ],
)
def test_dies_during_the_push(model_dir: Path, path: str, rounds: int) -> None:
    async def act(world: World) -> None:
        world.arm(Fault("e1", path, "die"))
        record = record_of(await world.push(1))
        assert world.states(record) == {"e0": SERVING, "e1": GONE, "e2": SERVING}
        assert record.rounds == rounds
        assert record.calls_per_engine == world.trainer.plans[0].calls_per_engine

    story(model_dir, act)


def test_replacement_joins_before_the_next_push(model_dir: Path) -> None:
    async def act(world: World) -> None:
        world.engines[1].die()
        await world.engines[1].start()
        assert world.engines[1].url not in world.gateway.urls()
        record = record_of(await world.push(1))
        assert set(world.states(record).values()) == {SERVING}
        assert not record.group_reused
        assert record_of(await world.push(2)).group_reused

    story(model_dir, act)


def test_replacement_joins_during_the_push(model_dir: Path) -> None:
    """It isn't of the frozen set: no traffic and no weights before the next push."""

    async def act(world: World) -> None:
        world.engines[1].die()
        world.soon(25, world.engines[1].start)
        record = record_of(await world.push(1))
        assert world.engines[1].alive
        assert world.states(record) == {"e0": SERVING, "e2": SERVING}
        assert world.engines[1].content == "base"
        assert world.engines[1].url not in world.gateway.urls()

    story(model_dir, act)


def test_replacement_joins_twice(model_dir: Path) -> None:
    """Restarted twice, and named twice: one engine, the incarnation that answers."""

    async def act(world: World) -> None:
        engine = world.engines[1]
        for _ in range(2):
            engine.die()
            await engine.start()
        world.urls += [engine.url, engine.url + "/"]
        record = record_of(await world.push(1))
        assert [e.identity.url for e in record.engines].count(engine.url) == 1
        assert len(record.serving) == 3

    story(model_dir, act)


def test_restarts_in_the_middle_of_the_push(model_dir: Path) -> None:
    async def act(world: World) -> None:
        world.arm(Fault("e1", "/update_weights_from_distributed", "restart"))
        record = record_of(await world.push(1))
        assert world.states(record)["e1"] is GONE
        await asyncio.sleep(0.5)  # it is back by now
        assert world.engines[1].alive and world.engines[1].content == "base"
        assert world.engines[1].url not in world.gateway.urls()

    story(model_dir, act)


def test_restarts_between_the_look_and_the_pause(model_dir: Path) -> None:
    """Whoever started at its URL meanwhile is not paused: nobody would let it go again."""

    async def act(world: World) -> None:
        world.soon_after("/push/checksums", 1, world.engines[1].start)
        record = record_of(await world.push(1))
        assert world.states(record) == {"e0": SERVING, "e1": GONE, "e2": SERVING}
        assert world.engines[1].content == "base" and not world.engines[1].paused

    story(model_dir, act)


def test_restarts_between_its_checksum_and_the_resume(model_dir: Path) -> None:
    """While a stuck one keeps the push waiting: whoever began at its URL gets neither the version's name nor a door."""

    async def act(world: World) -> None:
        engine = world.engines[1]

        async def restart() -> None:
            for _ in range(30):
                await asyncio.sleep(0 if engine.read_back else 0.01)
            await asyncio.sleep(0.03)  # its answer has arrived
            await engine.start()

        world.arm(Fault("e2", "/weights_checker", "hang"))
        world.soon_after("/weights_checker", 3, restart)
        record = record_of(await world.push(1))
        assert world.states(record) == {"e0": SERVING, "e1": GONE, "e2": GONE}
        assert engine.version == "default" and engine.door.facts()["admitted_version"] is None
        assert engine.url not in world.gateway.urls()

    story(model_dir, act)


def test_restarts_after_the_last_look(model_dir: Path) -> None:
    """No push can know: the record names the one that confirmed, and whoever is there now gets no traffic."""

    async def act(world: World) -> None:
        engine = world.engines[1]
        world.soon_after("put_once _fleet/push/00000002/end.json", 1, engine.start)
        record = record_of(await world.push(1))
        await asyncio.sleep(0.05)
        assert engine.alive and engine.content == "base" and world.states(record)["e1"] is SERVING
        assert world.violations == [] and engine.url not in world.gateway.urls()
        # and these are found: it was looked at, it gets traffic
        engine.looked_at = True
        world.gateway.workers["again"] = {"url": engine.url, "status": "ready"}
        world.check_record(record)
        assert len(world.violations) == 2 and all("e1 restarted" in found for found in world.violations)
        world.violations.clear()
        world.gateway.forget(engine.url)

    story(model_dir, act)


@pytest.mark.parametrize("doors", [True, False])
def test_restarts_before_the_transfer_and_is_told_to_begin(model_dir: Path, doors: bool) -> None:
    """It stays in the session that was meant for the one before it, without traffic, until the next push."""

    async def act(world: World) -> None:
        engine = world.engines[1]
        world.soon_after("/push/transfer", 1, engine.start)
        record = record_of(await world.push(1))
        assert world.states(record) == {"e0": SERVING, "e1": GONE, "e2": SERVING}
        assert engine.session and engine.url not in world.gateway.urls()
        assert engine.door.facts()["admitted_version"] is None

    story(model_dir, act, doors=doors)


def test_an_end_that_cannot_be_written_is_told(model_dir: Path) -> None:
    """The store fails while a failed push lets go: its error says so, and the next push closes the epoch."""

    async def act(world: World) -> None:
        world.arm(Fault("trainer", "/bucket", "die"), Fault("store", "put_once", "down", 3))
        failed = await world.push(1)
        assert isinstance(failed, ServiceError) and "StoreUnavailable" in "".join(failed.__notes__)
        assert [intent.epoch for intent in world.unended()] == [2]

    story(model_dir, act)


def test_second_engine_dies_while_the_retry_runs(model_dir: Path) -> None:
    async def act(world: World) -> None:
        world.arm(
            Fault("trainer", "/bucket", "mid", 1),
            Fault("e1", "/update_weights_from_distributed", "die", 1, attempt=2),
            Fault("e1", "/update_weights_from_distributed", "die", 2, attempt=2),
        )
        world.attempt_number = 0
        rejected = await world.push(1)
        assert isinstance(rejected, ServiceError)
        world.engines[0].die()
        record = record_of(await world.push(1))
        assert world.states(record) == {"e1": GONE, "e2": SERVING}
        assert record.epoch == 3

    story(model_dir, act)


def test_all_engines_gone(model_dir: Path) -> None:
    """A bounded failure that names them; nothing is left open."""

    async def act(world: World) -> None:
        world.soon(40, lambda: [engine.die() for engine in world.engines])
        failed = await world.push(1)
        assert isinstance(failed, ServiceError)
        assert world.unended() == []
        again = await world.push(1)
        assert isinstance(again, ServiceError) and "0 engines answer" in str(again)

    story(model_dir, act)


@pytest.mark.parametrize("kind", ["die", "mid", "skip"])
def test_trainer_rank_dies_in_the_middle(model_dir: Path, kind: str) -> None:
    async def act(world: World) -> None:
        world.arm(Fault("trainer", "/bucket", kind))
        outcome = await world.push(1)
        if kind == "skip":  # it says all is well: the checksum says otherwise
            assert GONE in world.states(record_of(outcome)).values()
            return
        assert isinstance(outcome, ServiceError)
        assert world.ends[max(world.ends)].status is PushStatus.FAILED
        assert all(engine.alive for engine in world.engines)
        assert len(record_of(await world.push(1)).serving) == 3

    story(model_dir, act)


@pytest.mark.parametrize("doors", [True, False])
def test_gateway_goes_away_in_the_middle(model_dir: Path, doors: bool) -> None:
    """A failed push that can't tell the gateway leaves engines with a door running; those without are ended."""

    async def act(world: World) -> None:
        world.arm(Fault("trainer", "/bucket", "die"))
        world.trainer.on_transfer = world.gateway.hang_up
        assert isinstance(await world.push(1), ServiceError)
        assert [engine.alive for engine in world.engines] == [doors] * 3
        world.trainer.on_transfer = lambda: None
        await world.gateway.listen()

    story(model_dir, act, doors=doors)


def test_paused_and_killed_before_the_mark_is_not_taken_for_well(model_dir: Path) -> None:
    """Engines that a killed push only paused still call their weights by the old name, and hold them."""

    async def act(world: World) -> None:
        world.soon_after("/pause_generation", 3, lambda: world.kill_pusher())
        await world.push(1)
        await asyncio.sleep(0.05)
        assert all(engine.paused and engine.version == "demo:1" for engine in world.engines)
        record_of(await world.push(0, ensure=True))
        assert not any(engine.paused for engine in world.engines)

    story(model_dir, act)


def test_old_epoch_is_refused_by_the_door(model_dir: Path) -> None:
    """A pusher that was taken over and goes on changes nothing and ends nothing."""

    async def act(world: World) -> None:
        async def take_over() -> None:
            for engine in world.engines:
                engine.door.enter("/begin_weight_update", 7)

        world.soon_after("/weights_checker", 1, take_over)
        outcome = await world.push(1)
        assert "taken over" in str(outcome)
        assert all(engine.alive for engine in world.engines)
        assert {engine.version for engine in world.engines} == {"demo:2#loading-2"}
        for engine in world.engines:  # what the later epoch would do
            engine.die()
        fence_epochs = world.intents
        assert max(fence_epochs) == 2

    async def ignore(world: World) -> None:
        await act(world)
        world.violations.clear()  # it left them paused: the later epoch's business

    story(model_dir, ignore)


def test_unproven_end_stays_a_refusal_until_a_person_helps(model_dir: Path) -> None:
    """An engine elsewhere stops in mid-transfer, wakes up after it was called gone, and gets nothing ever again."""

    async def act(world: World) -> None:
        dark = world.engines[2]
        world.arm(Fault("e2", "/update_weights_from_distributed", "stop"))
        assert isinstance(await world.push(1), CleanupUnconfirmed)
        changed = world.changed
        for _ in range(2):
            again = await world.push(1)
            assert isinstance(again, CleanupUnconfirmed)
            assert f"rl360 fleet confirm-gone {dark.url}" in str(again)
        assert world.changed == changed
        (intent,) = world.unended()
        (note,) = fence.read_unconfirmed(world.store, intent.epoch)
        report = fence.unconfirmed_report([note])
        assert dark.url in report and note.command in report and intent.group_name in report
        assert f"epoch {intent.epoch}" in report and "last answer" in report
        world.confirm_gone(dark)
        assert world.states(record_of(await world.push(1))) == {"e0": SERVING, "e1": SERVING}
        dark.wake()
        await asyncio.sleep(0.1)
        assert world.states(record_of(await world.push(2))) == {"e0": SERVING, "e1": SERVING}
        assert dark.url not in world.gateway.urls()
        assert dark.content != "demo:3"
        dark.die()  # for the last push: replaced

    story(model_dir, act, remote=("e2",))


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_kv_of_old_weights_serves_no_new_request(model_dir: Path, mode: str) -> None:
    """By a flush, or where requests go on with their KV, by a cache that is salted with the version."""

    async def act(world: World) -> None:
        for step in range(1, 5):
            for _ in range(30):
                world.event()
            record = record_of(await world.push(step))
            assert record.flushed is (mode != "in_place")

    story(model_dir, act, pause_mode=mode)


def test_in_place_without_salt_would_serve_old_kv(model_dir: Path) -> None:
    """What the salt is for: the check above can fail."""

    async def tell() -> World:
        world = World(model_dir, seed=3, deadline_s=0.4, pause_mode="in_place")
        world.salted = False
        async with world.running():
            for step in range(4):
                await world.push(step)
                for _ in range(40):
                    world.event()
        return world

    assert any("used KV" in found for found in asyncio.run(tell()).violations)
