"""The keeper's lease: renewed, run out, taken over by conditional put; and keepers that begin, stop and wake up."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path

import pytest
from fleet_fakes import OPTIONS, FleetWorld, elsewhere

from rl360.engines.client import open_http
from rl360.engines.fleet import EngineState
from rl360.engines.fleet_log import KEEPERS, claim_is_over
from rl360.engines.keeper import Keeper
from rl360.engines.keeper_lease import BEATS_KEPT, Lease, LeaseLost, dismiss, last_beat, other_keepers
from rl360.errors import Rl360Error, StoreUnavailable
from tests.unit.memory_store import MemoryStore


def wait_for_others(lease: Lease, said: list[str] | None = None) -> None:
    asyncio.run(lease.wait_for_others((said if said is not None else []).append, lambda: None))


def test_a_lease_is_held_while_it_is_renewed_and_only_the_last_renewals_are_kept() -> None:
    store, lease = MemoryStore(), Lease(MemoryStore(), 1)
    assert not lease.held
    lease = Lease(store, 0.2)
    lease.begin()
    assert lease.held
    for number in range(2 * BEATS_KEPT):
        lease.renew({"local-0": f"runs for {number} s"})
    assert len(store.list(f"{KEEPERS}{lease.token}/beats/")) == BEATS_KEPT
    number, beat = last_beat(store, lease.token)
    assert number == 2 * BEATS_KEPT + 1 and beat is not None and beat.notes == {"local-0": f"runs for {number - 2} s"}
    time.sleep(0.25)
    assert not lease.held
    with pytest.raises(LeaseLost, match="ran out before it could be renewed"):
        lease.check()
    lease.renew({})  # nobody took over meanwhile
    assert lease.held
    lease.end()
    assert not lease.held and other_keepers(store, "") == []
    assert store.list(f"{KEEPERS}{lease.token}/beats/") == []


def test_one_that_ended_elsewhere_without_a_word_is_taken_over_when_its_lease_has_run_out() -> None:
    """A pod that restarts has another pid namespace: nothing there shows that the old process is gone."""
    store, said = MemoryStore(), list[str]()
    old = elsewhere(Lease(store, 0.3))
    old.begin()
    assert claim_is_over(store, old.me) == ""
    new = Lease(store, 0.3)
    began = time.monotonic()
    wait_for_others(new, said)
    assert 0.39 < time.monotonic() - began < 3
    assert "waits for keeper:" in said[0] and "took over from" in said[1]
    assert "did not renew its lease" in claim_is_over(store, old.me)
    # and should it live after all, its next renewal tells it
    with pytest.raises(LeaseLost, match=f"{new.me} took over"):
        old.renew({})
    assert not old.held


def test_one_that_renews_is_left_alone() -> None:
    store = MemoryStore()
    old = elsewhere(Lease(store, 0.6))
    old.begin()

    async def run() -> None:
        renewing = asyncio.create_task(old.keep(dict, lambda _: None))
        try:
            with pytest.raises(
                Rl360Error, match=r"another keeper runs: keeper:.* on n7.*, it renews its lease.*confirm"
            ):
                await Lease(store, 0.6).wait_for_others(lambda _: None, lambda: None)
        finally:
            renewing.cancel()

    asyncio.run(run())
    assert claim_is_over(store, old.me) == "" and old.held


def test_a_look_that_took_long_counts_from_its_end() -> None:
    """Its read may have seen a renewal of its last moment: counted from its begin, the old keeper would still hold."""

    class Slow(MemoryStore):
        late = True

        def list(self, prefix: str) -> list[str]:
            if self.late and prefix.endswith("beats/"):
                self.late = False
                time.sleep(0.15)
                old.renew({})
            return super().list(prefix)

    store = Slow()
    old, new = elsewhere(Lease(store, 0.2)), Lease(store, 0.2)
    old.begin()
    wait_for_others(new)
    assert not old.held


def test_of_a_renewal_and_a_taking_one_is_written() -> None:
    """The old keeper renews between the successor's last look and its put: then the successor has taken nothing."""
    store = MemoryStore()
    old, new = elsewhere(Lease(store, 0.1)), Lease(store, 0.1)
    old.begin()
    number, _ = last_beat(store, old.token)
    old.renew({})
    assert not new._take(old.token, number, 0.1, time.monotonic())
    old.renew({})
    assert old.held and claim_is_over(store, old.me) == ""
    # one that was too slow to know what it has taken says nothing yet; its next look finds it
    number, _ = last_beat(store, old.token)
    assert not new._take(old.token, number, 0.1, time.monotonic() - 1)
    assert claim_is_over(store, old.me) == ""
    wait_for_others(Lease(store, 0.1))
    assert claim_is_over(store, old.me)


def test_a_renewal_whose_reply_was_lost_is_ours() -> None:
    class Loses(MemoryStore):
        lose = False

        def put_once(self, key: str, data: bytes) -> bool:
            done = super().put_once(key, data)
            if self.lose:
                raise StoreUnavailable("the reply was lost")
            return done

    store = Loses()
    lease = Lease(store, 5)
    lease.begin()
    store.lose = True
    with pytest.raises(StoreUnavailable):
        lease.renew({})
    store.lose = False
    lease.renew({})
    assert lease.held and lease.number == 3


def test_a_person_who_is_wrong_about_a_keeper_stops_it() -> None:
    store = MemoryStore()
    lease = elsewhere(Lease(store, 5))
    lease.begin()
    dismiss(store, lease.token, "person:ann")
    dismiss(store, lease.token, "person:ann")
    with pytest.raises(LeaseLost, match="person:ann took over"):
        lease.renew({})


def test_one_whose_process_is_gone_from_this_host_is_not_waited_for() -> None:
    store = MemoryStore()
    old = Lease(store, 30)
    old.owner = old.owner.model_copy(
        update={"process": old.owner.process.model_copy(update={"start_ticks": 1, "pid": 2**22 - 1})}
    )
    old.begin()
    wait_for_others(Lease(store, 30))
    assert other_keepers(store, "") == [], "nor by others, on hosts that can't see it"


def test_a_single_round_waits_for_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rl360 fleet keep --once` once ended while it waited for another one's lease."""
    world = FleetWorld(tmp_path, monkeypatch)
    try:
        elsewhere(Lease(world.store, 0.3)).begin()

        async def run() -> None:
            async with open_http() as http:
                options = dataclasses.replace(OPTIONS, lease_s=0.3)
                keeper = Keeper(world.store, world.services, options, http, world.said.append)
                await keeper.run(asyncio.Event(), lambda: beats.append(1), once=True)

        beats: list[int] = []
        asyncio.run(run())
        assert len(beats) > 2 and world.state() is EngineState.JOINING
    finally:
        world.close()
