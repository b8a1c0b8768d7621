"""A wave's records on their way into the store: what is written together, what a kill and a lost answer leave."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.agents import records
from rl360.agents.records import RecordLog
from rl360.errors import StoreUnavailable
from rl360.sessions.sample import AttemptRecord
from tests.unit.memory_store import MemoryStore
from tests.unit.objective_data import attempt

RECORDS = [attempt(0, index, 1.0) for index in range(8)]
NAMES = [record.attempt_id for record in RECORDS]
PREFIX = "demo/steps/000000/attempts/0002/"


def log_of(store: MemoryStore, every_s: float = 0.0) -> RecordLog:
    return RecordLog(cast(Any, store), "demo", 0, 2, every_s=every_s)


def keep(log: RecordLog, *kept: AttemptRecord) -> list[Any]:
    """Keep them all at once; what each of them got."""

    async def go() -> list[Any]:
        return await asyncio.gather(*(log.keep(record) for record in kept), return_exceptions=True)

    return asyncio.run(go())


def held(store: MemoryStore) -> dict[str, list[str]]:
    """Attempt ids by object."""
    found = {key: records._decode(data, key) for key, data in store.objects.items()}
    return {key.removeprefix(PREFIX): [record.attempt_id for record in inside] for key, inside in found.items()}


class SlowStore(MemoryStore):
    """A write lasts until `let` is set, in its thread."""

    def __init__(self) -> None:
        super().__init__()
        self.let = threading.Event()

    def put_once(self, key: str, data: bytes) -> bool:
        assert self.let.wait(10)
        return super().put_once(key, data)


def test_what_finishes_during_a_write_is_written_together() -> None:
    store = SlowStore()
    log = log_of(store)

    async def go() -> None:
        first = asyncio.create_task(log.keep(RECORDS[0]))
        await asyncio.sleep(0.02)
        others = [asyncio.create_task(log.keep(record)) for record in RECORDS[1:]]
        await asyncio.sleep(0.02)
        assert not first.done() and not log.stored
        store.let.set()
        await first
        assert list(log.stored) == NAMES[:1] and not any(other.done() for other in others)
        await asyncio.gather(*others)

    asyncio.run(go())
    assert held(store) == {"000000.msgpack": NAMES[:1], "000001.msgpack": NAMES[1:]}
    assert log.stored == log_of(store).stored == dict(zip(NAMES, RECORDS, strict=True))


def test_a_write_begins_at_once_and_not_again_for_a_while() -> None:
    store = MemoryStore()
    log = log_of(store, every_s=60.0)

    async def go() -> None:
        with log.writer(), log.writer(), log.writer():
            await asyncio.wait_for(log.keep(RECORDS[0]), 5)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(log.keep(RECORDS[1]), 0.05)

    asyncio.run(go())
    assert held(store) == {"000000.msgpack": NAMES[:1]}


def test_the_last_of_a_wave_wait_for_nothing() -> None:
    """Once all that are left wait, they are written, though the pause is not over; also when the last has no record."""
    store = MemoryStore()
    log = log_of(store, every_s=3600.0)
    first_is_written, others_wait = asyncio.Event(), asyncio.Event()

    async def attempt(number: int, after: asyncio.Event | None) -> None:
        with log.writer():
            if after is not None:
                await after.wait()
            await log.keep(RECORDS[number])
            first_is_written.set()

    async def fails() -> None:
        with log.writer():
            await others_wait.wait()

    async def go() -> None:
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(attempt(number, first_is_written if number else None))
            group.create_task(fails())
            await first_is_written.wait()
            await asyncio.sleep(0.05)
            assert list(log.stored) == NAMES[:1], "the pause is not over, and one is still at work"
            others_wait.set()

    asyncio.run(go())
    assert held(store) == {"000000.msgpack": NAMES[:1], "000001.msgpack": NAMES[1:4]}


def test_nobody_is_told_of_a_write_that_failed() -> None:
    store = MemoryStore()
    log = log_of(store)
    store.down = True
    assert [type(told) for told in keep(log, *RECORDS[:3])] == [StoreUnavailable] * 3
    assert not log.stored and not store.objects
    store.down = False
    assert keep(log, RECORDS[3]) == [None]
    assert held(store) == {"000000.msgpack": NAMES[:4]}, "what waited is written with the next"


def test_a_restarted_wave_adds_objects_and_changes_none() -> None:
    store = MemoryStore()
    keep(log_of(store), *RECORDS[:3])
    before = dict(store.objects)
    log = log_of(store)
    assert list(log.stored) == NAMES[:3]
    keep(log, RECORDS[3])
    assert held(store) == {"000000.msgpack": NAMES[:3], "000001.msgpack": [NAMES[3]]}
    assert before.items() <= store.objects.items()


def test_of_two_records_of_one_try_the_later_one_counts() -> None:
    """The last write of a killed wave arrives after the next run has looked: that one goes by what it sees itself."""
    store = MemoryStore()
    killed, log = log_of(store), log_of(store)
    lost = replace(RECORDS[0], outcome="sandbox_lost", verdict=None)
    keep(killed, RECORDS[0], RECORDS[1])
    assert keep(log, cast(AttemptRecord, lost)) == [None]
    assert held(store) == {"000000.msgpack": NAMES[:2], "000001.msgpack": NAMES[:1]}
    found = log_of(store).stored
    assert list(found) == NAMES[:2] and found[NAMES[0]] == lost


def test_a_write_whose_answer_was_lost_is_not_repeated() -> None:
    class Forgetful(MemoryStore):
        def put_once(self, key: str, data: bytes) -> bool:
            return super().put_once(key, data) and False  # the client asked twice; the second time it is there

    store = Forgetful()
    log = log_of(store)
    keep(log, RECORDS[0])
    keep(log, RECORDS[1])
    assert held(store) == {"000000.msgpack": NAMES[:1], "000001.msgpack": NAMES[1:2]}


PLANS = st.tuples(
    st.integers(0, 12), st.sampled_from(["keep", "keep", "keep", "no record"]), st.none() | st.integers(1, 30)
)


@settings(max_examples=30, deadline=None)
@given(st.lists(PLANS, min_size=1, max_size=len(RECORDS)), st.lists(st.booleans(), max_size=4))
def test_whatever_order_attempts_end_in_no_record_is_lost_and_nobody_waits(
    plans: list[tuple[int, str, int | None]], fails: list[bool]
) -> None:
    """Attempts end early and late, without a record or cancelled; writes fail. The pause alone would take an hour."""
    store, failing = MemoryStore(), list(fails)
    told: set[str] = set()

    class Failing(MemoryStore):
        def put_once(self, key: str, data: bytes) -> bool:
            if failing and failing.pop():
                raise StoreUnavailable("away")
            return store.put_once(key, data)

    async def ticks(count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    async def attempt(log: RecordLog, number: int, late: int, kind: str) -> None:
        with log.writer():
            await ticks(late)
            if kind == "keep":
                with contextlib.suppress(StoreUnavailable):
                    await log.keep(RECORDS[number])
                    told.add(NAMES[number])

    async def go() -> None:
        log = log_of(Failing(), every_s=3600.0)
        tasks = [asyncio.create_task(attempt(log, number, *plan[:2])) for number, plan in enumerate(plans)]
        for tick in range(31):
            for task, (_late, _kind, cancel_at) in zip(tasks, plans, strict=True):
                if cancel_at == tick:
                    task.cancel()
            await ticks(1)
        ended, waiting = await asyncio.wait(tasks, timeout=5)
        assert not waiting and not [task for task in ended if not task.cancelled() and task.exception()]
        assert told <= set(log.stored)

    asyncio.run(go())
    assert told <= set(log_of(store).stored)
