"""What a push that fails leaves and says: groups, a bound on the pause, the error that counts, the path it took."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fake_engines import TENSORS, FakeEngine
from safetensors.numpy import save_file
from test_weights_push import CONFIG, RUN, SHORT, World, assert_released, assert_serving

from rl360.config.run import RunConfig
from rl360.engines import members
from rl360.engines.fleet import EngineIdentity, EngineState
from rl360.errors import BadInput, CleanupUnconfirmed, CorruptObject, EngineChurn, ServiceError, StoreUnavailable
from rl360.weights import fence
from rl360.weights.messages import PushPlan, PushRecord, PushStatus, TransferReport
from rl360.weights.receivers import Receivers
from tasks import push_weights
from tests.unit.memory_store import MemoryStore


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    save_file({t.name: np.zeros(t.shape, np.float16) for t in TENSORS}, tmp_path / "model.safetensors")
    made = World(tmp_path, monkeypatch)
    yield made
    for engine in made.engines:
        engine.close()
    made.gateway.stop()


def third(world: World) -> FakeEngine:
    """One more engine of the fleet."""
    engine = FakeEngine()
    world.engines.append(engine)
    world.trainer.engines[engine.url] = engine
    world.services = world.services.model_copy(update={"engine_urls": [each.url for each in world.engines]})
    return engine


# -- groups ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["broadcast", "p2p"])
def test_a_failed_push_leaves_every_group_that_it_had_made(world: World, transport: str) -> None:
    """Also those of the smaller set that was left when an engine died, and those of two."""
    bad = world.engines[0]
    third(world)
    joined: set[str] = set()

    def meet(plan: PushPlan) -> None:
        for number, target in enumerate(plan.engine_set.engines):
            world.trainer.engines[target.url].groups |= plan.groups_of(number)
            joined.update(plan.groups_of(number))
        if len(world.trainer.plans) == 1:
            bad.process.kill()
            bad.process.wait()
        else:
            raise ServiceError("trainer: connection lost")

    world.trainer.before = meet
    with pytest.raises(ServiceError, match="connection lost"):
        world.push(0, SHORT.model_copy(update={"transport": transport}))
    assert len(joined) >= (2 if transport == "broadcast" else 3)
    assert [engine.groups for engine in world.engines[1:]] == [set(), set()]


# -- the pause ---------------------------------------------------------------------------------------------------------


def test_a_push_lets_its_engines_go_when_they_were_paused_for_long_enough(world: World) -> None:
    transfer = world.trainer.transfer

    async def slow(plan: PushPlan, deadline_s: float | None = None) -> TransferReport:
        await asyncio.sleep(30)
        return await transfer(plan)

    world.trainer.transfer = slow  # type: ignore[method-assign]
    began = time.monotonic()
    config = CONFIG.model_copy(update={"deadline_s": 0.3})
    with pytest.raises(
        ServiceError, match=r"in its phase transfer engines had been paused for 0\.3 s.*push\.deadline_s"
    ):
        world.push(0, config)
    assert time.monotonic() - began < 5
    assert_released(world)
    world.trainer.transfer = transfer  # type: ignore[method-assign]
    assert world.push(0).epoch == 2


def test_files_are_written_before_the_pause_and_its_bound(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    begin = asyncio.timeout

    async def prepare(plan: PushPlan, deadline_s: float | None = None) -> None:
        assert not any(engine.paused for engine in world.engines)
        order.append("prepare")

    def bounded(delay: float | None) -> asyncio.Timeout:
        order.append(f"{delay:g}")
        return begin(delay)

    monkeypatch.setattr(world.trainer, "prepare", prepare)
    monkeypatch.setattr(asyncio, "timeout", bounded)
    files = {"transport": "disk_full", "folder": "/w", "deadline_s": 77.0}
    assert world.push(0, CONFIG.model_copy(update=files)).path == "disk_full"
    assert 0 <= order.index("prepare") < order.index("77")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"call_deadline_s": 60, "deadline_s": 179}, "deadline_s 179 is less than 3 times call_deadline_s 60"),
        ({"transport": "p2p", "folder": "/w"}, "folder says nothing with transport p2p: leave it out, or use disk_"),
        ({"folder": "s3://b/w"}, "folder says nothing with transport broadcast"),
    ],
)
def test_a_push_config_that_cannot_be_meant_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        RunConfig.parse({"push": fields})


def test_the_pause_has_a_bound_by_default() -> None:
    assert RunConfig.parse({"push": {"call_deadline_s": 30}}).push.paused_at_most_s == 600
    assert RunConfig.parse({"push": {"deadline_s": 180}}).push.paused_at_most_s == 180


@pytest.mark.parametrize(("transport", "rounds"), [("p2p", 1), ("disk_full", 1), ("broadcast", 2)])
def test_suspects_are_asked_side_by_side_where_none_waits_for_another(
    world: World, transport: str, rounds: int
) -> None:
    """In a group of all the first silent one is ended before the next is judged."""
    third(world)
    first, second, good = world.engines
    asked: list[str] = []
    together = threading.Barrier(2)

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        asked.append("")
        if len(asked) <= 2:
            together.wait(0.9)  # both are asked before either has answered
        return 500, {}

    def stop(plan: PushPlan) -> None:
        if len(world.trainer.plans) == 1:
            world.trainer.refusing = {first.url, second.url}
            for engine in (first, second):
                engine.faults["/server_info"] = answer

    world.trainer.before = stop
    record = world.push(0, CONFIG.model_copy(update={"transport": transport}))
    assert [engine.state for engine in record.engines] == [EngineState.GONE, EngineState.GONE, EngineState.SERVING]
    assert_serving(world, good, "demo:1")
    assert len(asked) == 1 + rounds
    assert not together.broken


# -- the error that counts ---------------------------------------------------------------------------------------------


class Away:
    """Everything that a push may meet while it lets go, by name; armed at the moment its first error is made."""

    def __init__(self, world: World) -> None:
        self.world = world

    def store(self) -> None:
        self.world.store.down = True

    def store_lies(self) -> None:
        def corrupt(key: str) -> bool:
            raise CorruptObject(key, "damaged")

        self.world.store.exists = corrupt  # type: ignore[method-assign]

    def gateway(self) -> None:
        self.world.gateway.stop()

    def engines(self) -> None:
        for engine in self.world.engines:
            engine.faults["/abort_request"] = "500"

    def log(self) -> None:
        self.world.store.objects["_fleet/events/00000002.json"] = b"{"

    def bug(self) -> None:
        def broken(key: str) -> bool:
            raise ZeroDivisionError

        self.world.store.exists = broken  # type: ignore[method-assign]


WAYS = [name for name in vars(Away) if not name.startswith("_")]


@pytest.mark.parametrize("way", WAYS)
def test_nothing_replaces_an_unconfirmed_end(world: World, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """It would be retried: over a receiver that may live."""
    world.local = False
    away, note = Away(world), fence.note_unconfirmed

    def noted(*args: Any) -> fence.Unconfirmed:
        getattr(away, way)()
        return note(*args)

    monkeypatch.setattr(fence, "note_unconfirmed", noted)
    world.engines[0].faults["/pause_generation"] = "500"
    with pytest.raises(CleanupUnconfirmed, match="rl360 fleet confirm-gone"):
        world.push(0, SHORT)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_replaces_an_unconfirmed_end_of_an_earlier_push(
    world: World, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    world.local = False
    world.leave_intent()
    world.engines[0].startup = "another start"
    away, note = Away(world), fence.note_unconfirmed

    def noted(*args: Any) -> fence.Unconfirmed:
        getattr(away, way)()
        return note(*args)

    monkeypatch.setattr(fence, "note_unconfirmed", noted)
    with pytest.raises(CleanupUnconfirmed, match="rl360 fleet confirm-gone"):
        world.push(0)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_replaces_a_cancellation(world: World, way: str) -> None:
    async def cancel() -> None:
        task = asyncio.ensure_future(world.push_async(0, SHORT))

        def now(plan: PushPlan) -> None:
            getattr(Away(world), way)()
            task.cancel()

        world.trainer.before = now
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())


def _job(store: MemoryStore) -> Any:
    return SimpleNamespace(run=RUN, store=store, log=logging.getLogger("test"))


@pytest.mark.parametrize("call", ["list", "get", "exists", "artifact"])
@pytest.mark.parametrize(
    "error", [httpx.ConnectError("no"), RuntimeError("no"), StoreUnavailable("no")], ids=lambda e: type(e).__name__
)
def test_the_task_fails_by_what_is_unconfirmed_whatever_its_report_meets(
    monkeypatch: pytest.MonkeyPatch, call: str, error: Exception
) -> None:
    """At each of its calls, whatever that raises."""
    store, known = MemoryStore(), EngineIdentity(url="http://e0:1", incarnation="a" * 16)
    told = {"run": RUN, "step": 0, "version": f"{RUN}:1", "group_name": "g", "call_deadline_s": 1.0, "written_at": 0.0}
    intent = fence.Intent(epoch=1, engines=(known,), owner=fence.new_owner(), **told)
    fence.write_intent(store, intent)
    fence.note_unconfirmed(store, intent, known, "does not answer")

    def fails(*_: object, **__: object) -> Any:
        raise error

    artifact = fails if call == "artifact" else lambda **_: None
    monkeypatch.setattr(push_weights, "create_markdown_artifact", artifact)
    if call != "artifact":
        monkeypatch.setattr(store, call, fails)

    async def fail() -> None:
        async with push_weights._accounted(_job(store)):
            raise CleanupUnconfirmed("engine e0: not proven gone")

    with pytest.raises(CleanupUnconfirmed) as found:
        asyncio.run(fail())
    assert "the report of it was not left" in " ".join(found.value.__notes__)


# -- the path it took --------------------------------------------------------------------------------------------------

DELTA = CONFIG.model_copy(update={"transport": "disk_delta", "folder": "/w"})


def _files(world: World, whole: set[str]) -> None:
    """The trainer's report of files: these engines took every tensor."""
    transfer = type(world.trainer).transfer

    async def told(plan: PushPlan, deadline_s: float | None = None) -> TransferReport:
        report = await transfer(world.trainer, plan, deadline_s)
        engines = tuple(
            engine.model_copy(
                update={"whole": engine.url in whole, "note": "all tensors: no base" if engine.url in whole else ""}
            )
            for engine in report.engines
        )
        return report.model_copy(update={"engines": engines})

    world.trainer.transfer = told  # type: ignore[method-assign]


def test_a_delta_that_sent_every_tensor_is_recorded_as_what_it_was(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = {engine.url for engine in world.engines}
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(push_weights, "emit_event", lambda **event: told.append(event["payload"]))
    _files(world, urls)
    assert world.push(0, DELTA).path == "disk_full"  # nothing to differ from
    _files(world, set())
    second = world.push(1, DELTA)
    assert second.path == "disk_delta" and second.changed.startswith("disk_full")
    _files(world, urls)  # the trainer was restarted and holds no base
    third_push = world.push(2, DELTA)
    assert third_push.path == "disk_full" and third_push.changed == f"{second.way} -> {third_push.way}"
    assert {engine.note for engine in third_push.serving} == {"all tensors: no base"}
    with caplog.at_level(logging.WARNING):
        push_weights._tell(_job(world.store), third_push)
    assert "all tensors: no base" in caplog.text and "another way" in caplog.text
    assert [event["changed"] for event in told] == [third_push.changed]


def test_one_engine_that_took_every_tensor_is_named_and_the_path_stays(world: World) -> None:
    _files(world, set())
    world.push(0, DELTA)
    world.push(1, DELTA)
    _files(world, {world.engines[0].url})
    record = world.push(2, DELTA)
    assert (record.path, record.changed) == ("disk_delta", "")
    assert [engine.note for engine in record.serving] == ["all tensors: no base", ""]


# -- what it leaves when it does not come to its end -------------------------------------------------------------------


def test_a_refused_push_lets_the_living_go(world: World) -> None:
    """Of a killed push one receiver is dark, on a host nobody sees. The other may be half written: no traffic."""
    world.local = False
    dark, good = world.engines
    world.leave_intent()
    for engine in world.engines:
        world.gateway.answer("POST", "/workers", {"url": engine.url})
    dark.faults["*"] = "500"
    with pytest.raises(CleanupUnconfirmed, match="not on this host"):
        world.push(0)
    assert not good.paused and not good.session and good.groups == set()
    assert good.version == f"{RUN}:1#loading-1" and world.gateway.urls() == []
    assert [intent.epoch for intent in fence.open_intents(world.store)] == [1]


def test_the_trainer_meets_engines_anew_that_left_its_group_behind_a_good_transfer(world: World) -> None:
    first = world.push(0)
    for engine in world.engines:
        engine.faults["/weights_checker"] = "500"
    with pytest.raises(ServiceError, match="every engine refuses"):
        world.push(1)
    for engine in world.engines:
        engine.faults.clear()
    again, after = world.push(1), world.push(2)
    assert [plan.stale_groups for plan in world.trainer.plans[2:]] == [(world.trainer.plans[0].group_name,), ()]
    assert (again.rounds, again.way, after.way) == (1, first.way, first.way)


class Written(MemoryStore):
    """Calls `after` with the key of each object that was just put once, in the thread that put it."""

    after: Callable[[str], None] = staticmethod(lambda key: None)

    def put_once(self, key: str, data: bytes) -> bool:
        fresh = super().put_once(key, data)
        self.after(key)
        return fresh


@pytest.mark.parametrize("how", ["cancelled", "store"])
def test_an_intent_that_was_written_though_nobody_was_told_is_closed(world: World, how: str) -> None:
    world.store = store = Written()

    async def go() -> None:
        task = asyncio.ensure_future(world.push_async(0))
        loop = asyncio.get_running_loop()

        def strike(key: str) -> None:
            if key == fence.intent_key(1) and how == "cancelled":
                loop.call_soon_threadsafe(task.cancel)
            elif key == fence.intent_key(1):
                raise StoreUnavailable("no reply")

        store.after = strike
        await task

    with pytest.raises((asyncio.CancelledError, StoreUnavailable)):
        asyncio.run(go())
    assert fence.open_intents(store) == []
    assert fence.read_end(store, 1).status is PushStatus.FAILED  # type: ignore[union-attr]
    assert not [path for engine in world.engines for path, _ in engine.calls if path == "/pause_generation"]
    assert world.push(0).epoch == 2


def test_an_epoch_that_another_push_took_is_not_ended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "look", lambda store: (1, []))  # its listing was older than the other's intent
    world.leave_intent()
    with pytest.raises(ServiceError, match="epoch 1 was taken by another push"):
        world.push(0)
    assert fence.read_end(world.store, 1) is None and all(engine.paused for engine in world.engines)


def test_a_pusher_whose_epoch_was_closed_writes_no_record(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Receivers.serve

    async def overtaken(receivers: Receivers, version: str, flush: bool) -> None:
        await serve(receivers, version, flush)
        world.store.put(fence.end_key(1), b"{}")

    monkeypatch.setattr(Receivers, "serve", overtaken)
    with pytest.raises(EngineChurn, match="taken over by a later push"):
        world.push(0)
    assert not [key for key in world.store.objects if key.endswith("push.json") or "_fleet/versions/" in key]


def test_a_push_that_was_taken_over_while_it_paused_renames_nothing(world: World) -> None:
    """Its engines have no doors, and serve what the later push confirmed."""

    def overtaken(body: object) -> tuple[int, dict[str, object]]:
        world.store.put(fence.end_key(1), b"{}")
        return 200, {"success": True}

    world.engines[1].faults["/pause_generation"] = overtaken
    with pytest.raises(EngineChurn, match="taken over by a later push"):
        world.push(0)
    assert [engine.version for engine in world.engines] == ["default", "default"] and not world.trainer.plans


def test_a_push_that_is_killed_once_its_epoch_has_ended_is_its_steps_record(world: World) -> None:
    world.store = store = Written()

    def die(key: str) -> None:
        if key == fence.end_key(1):
            store.after = lambda key: None
            raise KeyboardInterrupt

    store.after = die
    with pytest.raises(KeyboardInterrupt):
        world.push(0)
    record = world.push(0)
    assert (record.epoch, record.step, record.rounds, record.reason) == (1, 0, 1, "") and record.bytes > 0
    assert PushRecord.model_validate_json(store.get(f"{RUN}/steps/000000/push.json")) == record
    assert f"_fleet/versions/{RUN}/00000001" in store.objects and len(world.trainer.plans) == 1


def test_who_gets_traffic_is_left_to_a_push_that_began_meanwhile(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.push(0)
    world.gateway.answer("POST", "/workers", {"url": "http://127.0.0.1:9"})
    before, look_again = world.gateway.urls(), members.serves_again

    def begins(*told: Any) -> bool:
        if not fence.open_intents(world.store):
            intent = world.leave_intent(2)
            running = intent.owner.model_copy(update={"process": fence.new_owner().process})
            told_so = intent.model_copy(update={"owner": running}).model_dump_json().encode()
            world.store.objects[fence.intent_key(2)] = told_so
            fence.mark_running(running, True)
        return look_again(*told)

    monkeypatch.setattr(members, "serves_again", begins)
    with pytest.raises(ServiceError, match="still runs in pid"):
        world.ensure(1)
    assert world.gateway.urls() == before
