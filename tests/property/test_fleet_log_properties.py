"""The fleet's log under writers that race, crash and lose replies: linear, lawful, and the same for every reader.

What is lawful is written here a second time, as plain tables, and every stored entry is held against it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rl360.engines import fleet_log
from rl360.engines.fleet import EngineState
from rl360.engines.fleet_log import EVENTS, SNAPSHOTS, Event, FleetConflict, FleetLog, FleetState, claim_is_over
from rl360.errors import StoreUnavailable
from rl360.weights import fence
from tests.unit.memory_store import MemoryStore

ENGINES = ("engine-0", "local-0")
WRITERS = ("push:1", "push:2", "keeper:aa", "person:ann")
LAWFUL = {
    "joining": {"loading", "suspect", "draining"},
    "loading": {"confirmed", "suspect", "draining"},
    "confirmed": {"serving", "suspect", "draining"},
    "serving": {"loading", "draining", "suspect"},
    "draining": {"joining", "gone", "suspect"},
    "suspect": {"fenced", "loading", "joining"},
    "fenced": {"gone", "joining"},
    "gone": {"joining"},
}


class RacingStore(MemoryStore):
    """`before` runs once, just ahead of the next conditional put; `lost`: that put is done and its reply is lost."""

    before: Callable[[], None] | None = None
    lost = False

    def put_once(self, key: str, data: bytes) -> bool:
        if self.before is not None and key.startswith(EVENTS):
            run, self.before = self.before, None
            run()
        done = super().put_once(key, data)
        if self.lost and key.startswith(EVENTS):
            self.lost = False
            raise StoreUnavailable("the reply was lost")
        return done


event_of = st.fixed_dictionaries(
    {
        "engine": st.sampled_from(ENGINES),
        "to": st.sampled_from(list(EngineState)),
        "stay": st.booleans(),
        "holds": st.booleans(),
        "evidence": st.sampled_from(["", "seen"]),
        "another": st.sampled_from([False, False, False, True]),
        "takes": st.booleans(),
        "member": st.sampled_from([None, True, False]),
    }
)


class Log(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = RacingStore()
        self.logs = {name: FleetLog(self.store) for name in WRITERS}
        self.first_seen: dict[str, bytes] = {}

    def decide(self, wish: dict[str, Any]) -> Callable[[FleetState], list[Event]]:
        """What a writer makes of the newest state: usually one more move, sometimes nonsense."""

        def events(state: FleetState) -> list[Event]:
            slot = state.slots.get(wish["engine"])
            to = slot.state if slot is not None and wish["stay"] else wish["to"]
            mark = (
                f"{state.seq:x}"
                if slot is None or wish["another"] or slot.state in ("gone", "fenced")
                else slot.incarnation
            )
            owner = slot.owner if slot is not None and slot.owner is not None else ""
            over = claim_is_over(self.store, owner) if owner and wish["takes"] else ""
            return [
                Event(
                    engine=wish["engine"],
                    url="http://h:1",
                    incarnation=mark,
                    was=slot.state if slot else None,
                    to=to,
                    reason="tried",
                    launcher="local",
                    holds=wish["holds"],
                    evidence=over or wish["evidence"],
                    took_from=owner if over else "",
                    member=wish["member"],
                )
            ]

        return events

    def attempt(self, writer: str, wish: dict[str, Any]) -> None:
        with contextlib.suppress(FleetConflict, StoreUnavailable):
            self.logs[writer].append(writer, self.decide(wish))

    @rule(writer=st.sampled_from(WRITERS), wish=event_of)
    def write(self, writer: str, wish: dict[str, Any]) -> None:
        self.attempt(writer, wish)

    @rule(pair=st.lists(st.sampled_from(WRITERS), min_size=2, max_size=2, unique=True), first=event_of, second=event_of)
    def race(self, pair: list[str], first: dict[str, Any], second: dict[str, Any]) -> None:
        """`pair[1]` writes between the look and the put of `pair[0]`."""
        self.store.before = lambda: self.attempt(pair[1], second)
        self.attempt(pair[0], first)
        self.store.before = None

    @rule(writer=st.sampled_from(WRITERS), wish=event_of)
    def reply_lost(self, writer: str, wish: dict[str, Any]) -> None:
        self.store.lost = True
        self.attempt(writer, wish)
        self.store.lost = False

    @rule(writer=st.sampled_from(WRITERS))
    def crash(self, writer: str) -> None:
        """A new process of this writer knows what the log says, and nothing else."""
        before = self.logs[writer].refresh()
        self.logs[writer] = FleetLog(self.store)
        assert self.logs[writer].refresh() == before

    @rule(epoch=st.sampled_from([1, 2]))
    def push_ends(self, epoch: int) -> None:
        self.store.put_once(fence.end_key(epoch), b"{}")

    @invariant()
    def the_log_is_linear_and_never_rewritten(self) -> None:
        keys = self.store.list(EVENTS)
        assert keys == [fleet_log.event_key(number) for number in range(1, len(keys) + 1)]
        for key in keys:
            assert self.first_seen.setdefault(key, self.store.objects[key]) == self.store.objects[key]

    @invariant()
    def every_entry_is_lawful(self) -> None:
        state: dict[str, str] = {}
        owner: dict[str, str | None] = {}
        for key in self.store.list(EVENTS):
            entry = orjson.loads(self.store.objects[key])
            for event in entry["events"]:
                name, was, to = event["engine"], event.get("from"), event["to"]
                assert was == state.get(name)
                assert to == "joining" if was is None else to == was or to in LAWFUL[was], (was, to)
                if to in ("loading", "confirmed", "serving") and to != was:
                    assert entry["owner"].startswith("push:")
                if to == "gone" and was != "gone":
                    assert event["evidence"]
                if owner.get(name) not in (None, entry["owner"]):
                    assert event["took_from"] == owner[name] and event["evidence"]
                    kind, _, epoch = str(owner[name]).partition(":")
                    assert kind == "push" and self.store.exists(fence.end_key(int(epoch)))
                assert not (event.get("holds") and entry["owner"].startswith("person:"))
                state[name] = to
                owner[name] = entry["owner"] if event.get("holds") else None

    @invariant()
    def every_reader_folds_the_same(self) -> None:
        states = [log.refresh() for log in self.logs.values()]
        assert all(state == states[0] for state in states)
        fresh = FleetLog(self.store).refresh()
        without = MemoryStore()
        without.objects = {k: v for k, v in self.store.objects.items() if not k.startswith(SNAPSHOTS)}
        assert fresh == states[0] == FleetLog(without).refresh()


@pytest.fixture(autouse=True)
def _snapshots_are_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_log, "SNAPSHOT_EVERY", 4)


class TestLog(Log.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_writers_in_threads_lose_no_entry_and_take_no_number_twice() -> None:
    store = MemoryStore()
    lock = threading.Lock()
    put = store.put_once

    def put_once(key: str, data: bytes) -> bool:
        with lock:
            return put(key, data)

    store.put_once = put_once  # type: ignore[method-assign]

    def write(number: int) -> None:
        log = FleetLog(store)
        for turn in range(25):
            name = f"local-{number}-{turn}"
            log.append(
                f"keeper:{number}",
                lambda _, name=name: [
                    Event(engine=name, url="", to=EngineState.JOINING, reason="new", launcher="local")
                ],
            )

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    state = FleetLog(store).refresh()
    assert state.seq == 100
    assert set(state.slots) == {f"local-{number}-{turn}" for number in range(4) for turn in range(25)}
