"""The keeper as a state machine: no engine loses its traffic and joins again more than so often without being ended,
and of several keepers that stop, sleep and wake up in any order never two act.

Clocks are moved by hand, requests are answered here; the log, the lease and the decisions are the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.config.services import Services
from rl360.engines import health, keeper_lease, members
from rl360.engines.fleet import EngineIdentity, EngineState
from rl360.engines.fleet_log import FleetLog, claim_is_over
from rl360.engines.keeper import Keeper
from rl360.engines.keeper_lease import Lease, LeaseLost
from rl360.engines.patience import KeepOptions
from rl360.engines.processes import EndProof
from rl360.errors import Rl360Error
from rl360.weights import fence
from rl360.weights.messages import EngineOutcome, PushRecord
from tests.unit.memory_store import MemoryStore

S = EngineState
URL = "http://h:1"
ENGINE = EngineIdentity(url=URL, incarnation="aa")
FLAPS, WITHIN_S = 3, 1000.0


class Clock:
    def __init__(self) -> None:
        self.now = 10_000.0

    def __call__(self) -> float:
        return self.now


class World:
    """One engine as the keeper sees it: whether it answers, whether it generates, what its door says."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.clock, self.store = Clock(), MemoryStore()
        self.answers = self.generates = self.admits = True
        fields = dict.fromkeys(("prefect_api_url", "prefect_ui_url", "s3_endpoint", "s3_bucket"), "-")
        more = dict.fromkeys(("home", "gateway_url", "trainer_url", "model_dir"), "-")
        self.services = Services(**fields, **more, engine_urls=[URL], session_urls=["-"], sandbox_urls=["-"])
        for module in ("rl360.engines.keeper", "rl360.engines.fleet_log", "rl360.engines.keeper_lease"):
            patch.setattr(f"{module}.time.time", self.clock)
        options = KeepOptions(
            suspect_after=2, fence_after=5, generate_every_s=0, flaps=FLAPS, flaps_s=WITHIN_S, lease_s=1e9
        )
        self.keeper = Keeper(self.store, self.services, options, httpx.AsyncClient(), lambda _: None)
        self.keeper.vocabulary = 8
        self.keeper.lease.begin()

        async def seen(*_: Any) -> health.Seen:
            return health.Seen(ENGINE) if self.answers else health.Seen(reason="no answer")

        async def sample(*_: Any) -> str:
            return "" if self.generates else "generated nothing"

        async def door(*_: Any) -> dict[str, Any]:
            return {"phase": "serving" if self.admits else "barred"}

        async def nothing(*_: Any) -> Any:
            return 0

        async def ended(*_: Any) -> EndProof:
            return EndProof(gone=True, evidence="ended")

        async def lives(*_: Any) -> EndProof:
            return EndProof(gone=False, evidence="lives")

        for name, put in {"look": seen, "sample": sample, "ended": ended, "proof": lives}.items():
            patch.setattr(self.keeper, name, put)
        patch.setattr(health, "in_flight", nothing)
        patch.setattr("rl360.engines.client.EngineClient.door", door)
        patch.setattr(self.keeper.gateway, "remove", nothing)
        patch.setattr(self.keeper.gateway, "workers", self.workers)

    async def workers(self) -> list[Any]:
        return []

    def push(self) -> None:
        """Confirms the engine, unless somebody has it or it doesn't answer."""
        log = FleetLog(self.store)
        names = members.members(log.refresh(), self.services.engine_urls)
        epoch = fence.next_epoch(self.store)
        intent = fence.Intent(
            epoch=epoch, run="r", step=0, version=f"r:{epoch}", engines=(ENGINE,) if self.answers else (),
            group_name="g", call_deadline_s=1, owner=fence.new_owner(), written_at=0,
        )  # fmt: skip
        fence.write_intent(self.store, intent)
        refused = members.claim(log, names, intent) if self.answers else {URL: "silent"}
        engines = () if refused else (EngineOutcome(identity=ENGINE, state=S.SERVING, calls=1),)
        record = PushRecord(
            run="r", step=0, version=intent.version, epoch=epoch, status="confirmed", path="broadcast", engines=engines
        )  # fmt: skip
        fence.write_end(self.store, record)
        members.settle(log, record)
        self.admits = self.admits or not refused


moves = st.lists(
    st.one_of(
        st.sampled_from(["push", "round", "round", "round", "answers", "generates", "admits"]),
        st.floats(1, 400).map(lambda seconds: ("wait", seconds)),
    ),
    min_size=20,
    max_size=60,
)


@settings(max_examples=50, deadline=None)
@given(moves)
def test_no_engine_flaps_without_end(steps: list[Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        world = World(patch)

        async def play() -> None:
            for step in steps:
                if isinstance(step, tuple):
                    world.clock.now += step[1]
                elif step == "push":
                    with contextlib.suppress(Rl360Error):
                        world.push()
                elif step == "round":
                    await world.keeper.round()
                else:
                    setattr(world, step, not getattr(world, step))
            await world.keeper.http.aclose()

        asyncio.run(play())
        history = defaultdict(list)
        for entry in FleetLog(world.store).recent(10_000):
            for event in entry.events:
                history[event.engine].append((entry.at, str(event.was), str(event.to), entry.owner))
        for told in history.values():
            lost: list[float] = []
            for at, was, to, owner in told:
                if to == "fenced":
                    lost = []
                elif (was, to) == ("serving", "suspect") and owner.startswith("keeper:"):
                    lost.append(at)
                elif (was, to) == ("suspect", "joining"):
                    assert len([each for each in lost if at - each < WITHIN_S]) < FLAPS, told
        unproven = [slot for slot in world.keeper.log.state.slots.values() if slot.state is S.SUSPECT]
        assert all(slot.owner == world.keeper.me for slot in unproven)


class Process:
    """A keeper's process: it waits for the others, then holds its lease. One that sleeps does neither."""

    def __init__(self, store: MemoryStore, number: int) -> None:
        self.lease = Lease(store, 30.0)
        self.lease.owner = self.lease.owner.model_copy(update={"host": f"n{number}/pid:[1]"})
        self.seen: dict[str, tuple[int, float]] = {}
        self.began = False

    def look(self) -> None:
        """One turn of a process that waits for the others, and begins when none is left."""
        if not self.began and not self.lease._still_there(self.seen, lambda _: None):
            self.began = True
            self.lease.begin()

    def renew(self) -> None:
        if self.began and not self.lease.taken_by:
            self.lease.renew({})


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["look", "renew"]), st.integers(0, 2)),
            st.tuples(st.just("wait"), st.floats(0.1, 25)),
        ),
        min_size=20,
        max_size=120,
    )
)
def test_of_several_keepers_that_sleep_and_wake_up_in_any_order_one_acts(steps: list[tuple[str, Any]]) -> None:
    clock, store = Clock(), MemoryStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper_lease.time, "monotonic", clock)
        processes = [Process(store, number) for number in range(3)]
        for what, value in steps:
            if what == "wait":
                clock.now += value
            else:
                with contextlib.suppress(LeaseLost, Rl360Error):
                    getattr(processes[value], what)()
            acting = [process.lease for process in processes if process.began and process.lease.held]
            assert len(acting) <= 1
            for lease in acting:  # and nobody has been told that it is over
                assert claim_is_over(store, lease.me) == ""
