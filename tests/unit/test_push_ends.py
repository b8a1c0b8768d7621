"""Who may be ended by a push and by what its end is proven: launchers, the fleet's log, other owners, other people."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_engines import TENSORS, FakeEngine
from safetensors.numpy import save_file
from test_weights_push import SHORT, World, assert_serving

from rl360.engines import fleet, launchers, membership
from rl360.engines.fleet import EngineIdentity, EngineState, incarnation_of
from rl360.engines.fleet_log import KEEPERS, Event, FleetLog, burial, change, walk
from rl360.engines.launchers.base import Handle
from rl360.engines.processes import EndProof
from rl360.errors import CleanupUnconfirmed, ServiceError
from rl360.weights import ends, fence
from rl360.weights.messages import PushStatus

S = EngineState
KEEPER = "keeper:k1"


class Orchestrator:
    """Stands for a launcher whose processes are elsewhere. `answer`: what it says when it is to end something."""

    def __init__(self) -> None:
        self.asked: list[Handle] = []
        self.answer: EndProof | Exception = EndProof(gone=True, evidence="pod p-1 (uid u-1) is no more")
        self.hold = threading.Event()
        self.hold.set()

    async def end(self, handle: Handle, deadline_s: float) -> EndProof:
        self.asked.append(handle)
        self.hold.wait(20)  # one that waits for files and programs, as no coroutine should
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    save_file({t.name: np.zeros(t.shape, np.float16) for t in TENSORS}, tmp_path / "model.safetensors")
    made = World(tmp_path, monkeypatch)
    yield made
    for engine in made.engines:
        engine.close()
    made.gateway.stop()


@pytest.fixture
def pods(monkeypatch: pytest.MonkeyPatch) -> Orchestrator:
    made, choose = Orchestrator(), launchers.open_launcher
    monkeypatch.setattr(
        launchers, "open_launcher", lambda kind, services: made if kind == "kubernetes" else choose(kind, services)
    )
    return made


def identity(world: World, engine: FakeEngine) -> EngineIdentity:
    told = {"startup_time": {"load": engine.startup}, "launch_command": "fake"}
    return EngineIdentity(url=engine.url, incarnation=incarnation_of(told), process=world.tree(engine.url))


def added(world: World, engine: FakeEngine, launcher: str) -> FleetLog:
    """The engine is not configured: the fleet's log has it, from this launcher."""
    world.services = world.services.model_copy(
        update={"engine_urls": [each.url for each in world.engines if each is not engine]}
    )
    if launcher == "external":
        engine.lets_in = lambda path, authorization: True  # type: ignore[method-assign]
    known = identity(world, engine)
    log = FleetLog(world.store)
    log.append(
        KEEPER,
        lambda state: [
            Event(
                engine=f"{launcher}-0",
                url=engine.url,
                incarnation=known.incarnation,
                process=known.process,
                launcher=launcher,
                ref={"pod": "p-1", "uid": "u-1"} if launcher == "kubernetes" else {},
                to=S.JOINING,
                reason="answers",
                member=True,
            )
        ],
    )
    return log


def test_a_pod_that_dies_in_a_push_is_proven_gone_by_its_launcher(world: World, pods: Orchestrator) -> None:
    bad, good = world.engines
    world.local = False
    added(world, bad, "kubernetes")
    bad.faults["/pause_generation"] = "500"
    record = world.push(0)
    lost = next(engine for engine in record.engines if engine.identity.url == bad.url)
    assert lost.state is S.GONE and "pod p-1 (uid u-1) is no more" in lost.reason
    assert [(handle.mark, handle.ref) for handle in pods.asked] == [("kubernetes-0-1", {"pod": "p-1", "uid": "u-1"})]
    assert_serving(world, good, "demo:1")
    assert FleetLog(world.store).refresh().slots["kubernetes-0"].state is S.GONE


@pytest.mark.parametrize(
    "answer",
    [EndProof(gone=False, evidence="pod p-1 is being deleted"), ServiceError("API server: no answer within 9 s")],
    ids=["not-yet", "fails"],
)
def test_without_its_launchers_proof_a_person_is_asked(
    world: World, pods: Orchestrator, answer: EndProof | Exception
) -> None:
    world.local = False
    added(world, world.engines[0], "kubernetes")
    world.engines[0].faults["/pause_generation"] = "500"
    pods.answer = answer
    with pytest.raises(CleanupUnconfirmed, match=r"being deleted|launcher kubernetes: API server"):
        world.push(0)


def test_a_launcher_that_blocks_neither_stops_the_push_nor_is_waited_for(
    world: World, pods: Orchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends, "END_DEADLINE_S", 0.1)
    monkeypatch.setattr(ends, "SLACK_S", 0.1)
    world.local = False
    added(world, world.engines[0], "kubernetes")
    world.engines[0].faults["/pause_generation"] = "500"
    pods.hold.clear()
    threading.Timer(1.0, pods.hold.set).start()
    began = time.monotonic()
    beats: list[float] = []

    async def beating() -> None:
        async def beat() -> None:
            while True:
                beats.append(time.monotonic())
                await asyncio.sleep(0.02)

        heart = asyncio.create_task(beat())
        try:
            await world.push_async(0)
        finally:
            heart.cancel()

    with pytest.raises(CleanupUnconfirmed, match="launcher kubernetes did not answer"):
        asyncio.run(beating())
    assert max(b - a for a, b in itertools.pairwise(beats)) < 0.4
    assert time.monotonic() - began < 10


def test_a_retry_proves_the_end_of_a_killed_pushs_pod(world: World, pods: Orchestrator) -> None:
    dead, alive = world.engines
    world.local = False
    log = added(world, dead, "kubernetes")
    intent = world.leave_intent()
    log.append(
        "push:1",
        lambda state: walk(state.slots["kubernetes-0"], [S.LOADING], "push", holds=True, epoch=1),
    )
    dead.faults["*"] = "500"
    record = world.push(0)
    assert [handle.ref["uid"] for handle in pods.asked] == ["u-1"]
    assert record.absent == (dead.url,) and intent.engines[0].incarnation not in str(record.engines)
    assert fence.read_end(world.store, 1).status is PushStatus.SUPERSEDED  # type: ignore[union-attr]
    assert_serving(world, alive, "demo:1")


@pytest.mark.parametrize("replaced", [False, True])
def test_what_the_log_calls_gone_needs_no_other_proof(world: World, pods: Orchestrator, replaced: bool) -> None:
    dead, alive = world.engines
    world.local = False
    log = added(world, dead, "kubernetes")
    world.leave_intent()
    proof = EndProof(gone=True, evidence="pod p-1 is no more")
    log.append(KEEPER, lambda state: burial(state.slots["kubernetes-0"], proof, "its container ended"))
    if replaced:  # the launcher of the new one would prove the end of the wrong pod
        log.append(
            KEEPER,
            lambda state: [
                change(
                    state.slots["kubernetes-0"],
                    S.JOINING,
                    "another",
                    incarnation="b" * 16,
                    ref={"pod": "p-2", "uid": "u-2"},
                    evidence="",
                )
            ],
        )
    dead.stop()
    world.push(0)
    assert pods.asked == []
    assert_serving(world, alive, "demo:1")
    dead.start()


def test_an_incarnation_whose_place_another_one_has_is_not_ended_by_the_new_ones_pod(
    world: World, pods: Orchestrator
) -> None:
    dead = world.engines[0]
    world.local = False
    added(world, dead, "kubernetes")
    intent = world.leave_intent()
    other = intent.engines[0].model_copy(update={"incarnation": "c" * 16})
    world.store.objects[fence.intent_key(1)] = (
        intent.model_copy(update={"engines": (other, intent.engines[1])}).model_dump_json().encode()
    )
    with pytest.raises(CleanupUnconfirmed, match="not on this host"):
        world.push(0)
    assert pods.asked == []


@pytest.mark.parametrize("when", ["in the push", "before it"])
def test_an_engine_of_somebody_else_on_this_host_is_never_ended(
    world: World, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of the gateway, and a person is asked; then the push goes on without it."""
    monkeypatch.setattr(ends, "DOOR_S", 0.2)
    theirs, ours = world.engines
    added(world, theirs, "external")
    if when == "in the push":
        world.gateway.answer("POST", "/workers", {"url": theirs.url})
        theirs.faults["/pause_generation"] = "500"
    else:
        world.leave_intent()
        theirs.faults["*"] = "500"
    for _ in range(2):
        with pytest.raises(CleanupUnconfirmed, match="started by some"):
            world.push(0)
        theirs.faults["*"] = "500"
    assert theirs.process.poll() is None
    assert theirs.url not in world.gateway.urls()
    membership.confirm_gone(world.store, theirs.url, "its owner stopped it", "someone")
    record = world.push(0)
    assert record.absent == (theirs.url,) and theirs.process.poll() is None
    assert_serving(world, ours, "demo:1")


def test_a_stuck_engine_of_somebody_else_is_left_to_them(world: World) -> None:
    """It was no receiver: no person is asked either."""
    theirs, ours = world.engines
    added(world, theirs, "external")
    theirs.faults["*"] = "hang"
    record = world.push(0, SHORT)
    assert record.absent == (theirs.url,) and theirs.process.poll() is None
    assert_serving(world, ours, "demo:1")


def keeper_lives(world: World) -> None:
    lease = fence.new_owner().model_copy(update={"host": "another-host"})
    world.store.put(f"{KEEPERS}k1/lease.json", lease.model_dump_json().encode())


@pytest.mark.parametrize("stuck", [False, True])
@pytest.mark.parametrize("state", [S.SUSPECT, S.FENCED])
def test_an_intent_names_no_engine_that_a_keeper_has(world: World, state: EngineState, stuck: bool) -> None:
    theirs, ours = world.engines
    log = added(world, theirs, "supervised")
    keeper_lives(world)
    states = [S.SUSPECT, S.FENCED] if state is S.FENCED else [S.SUSPECT]
    log.append(
        KEEPER,
        lambda found: walk(found.slots["supervised-0"], states, "it missed rounds", holds=True),
    )
    if stuck:
        theirs.faults["*"] = "hang"
    record = world.push(0, SHORT)
    intent = fence.Intent.model_validate_json(world.store.get(fence.intent_key(1)))
    assert [engine.url for engine in intent.engines] == [ours.url]
    assert record.absent == (theirs.url,)
    assert theirs.process.poll() is None and not theirs.paused
    assert theirs.url not in world.gateway.urls()
    slot = FleetLog(world.store).refresh().slots["supervised-0"]
    assert (slot.state, slot.owner) == (state, KEEPER)


def test_a_fenced_engine_that_answers_again_is_not_in_the_set(world: World) -> None:
    """Its end is not proven and nobody holds it: a person, or its keeper, says what becomes of it."""
    theirs, ours = world.engines
    log = added(world, theirs, "supervised")
    log.append(KEEPER, lambda found: walk(found.slots["supervised-0"], [S.SUSPECT, S.FENCED], "lost"))
    record = world.push(0)
    intent = fence.Intent.model_validate_json(world.store.get(fence.intent_key(1)))
    assert [engine.url for engine in intent.engines] == [ours.url]
    assert record.absent == (theirs.url,) and theirs.process.poll() is None


@pytest.mark.parametrize("lives", [False, True])
def test_a_fenced_engine_that_holds_the_version_gets_no_traffic_but_by_who_has_it(world: World, lives: bool) -> None:
    theirs, ours = world.engines
    world.push(0)
    if lives:
        keeper_lives(world)
    FleetLog(world.store).append(
        KEEPER,
        lambda state: walk(state.slots["engine-0"], [S.SUSPECT] if lives else [S.SUSPECT, S.FENCED], "?", holds=lives),
    )
    assert world.ensure(1) is None
    assert set(world.gateway.urls()) == ({theirs.url, ours.url} if lives else {ours.url})


def test_a_door_that_is_closed_to_us_stops_no_push_that_has_no_business_there(world: World) -> None:
    theirs, ours = world.engines
    log = added(world, theirs, "supervised")
    log.append(KEEPER, lambda found: walk(found.slots["supervised-0"], [S.SUSPECT, S.FENCED], "lost"))
    theirs.door_token = "of-another-deployment"
    assert world.push(0).absent == (theirs.url,)
    assert_serving(world, ours, "demo:1")


def test_an_engine_that_is_named_by_two_urls_is_a_receiver_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second update would begin inside its first one, which costs an engine its life."""
    first, second = world.engines
    again = first.url.replace("127.0.0.1", "localhost")
    monkeypatch.setattr(fleet, "tree_of_url", lambda url: world.tree(url.replace("localhost", "127.0.0.1")))
    world.services = world.services.model_copy(update={"engine_urls": [first.url, second.url, again]})
    record = world.push(0)
    assert {engine.identity.url for engine in record.engines} == {first.url, second.url} and len(record.engines) == 2
    for engine in world.engines:
        assert_serving(world, engine, "demo:1")
    assert again not in world.gateway.urls()
