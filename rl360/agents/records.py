"""Tables of attempt records: objects of those that finished together, one of a whole wave, one of the whole step.

A record is counts and a reference to its samples, about 1 KB; the samples themselves are never read here. A table that
contradicts the plan, whose records name other samples than their own or hold a verdict that the run's verifier did not
sign, is refused (`CorruptObject` naming it).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rl360.agents.rollout import AttemptSpec
from rl360.errors import CorruptObject
from rl360.harbor.verdict import receipt_problem
from rl360.sessions.sample import AttemptRecord
from rl360.store.codec import pack, unpack
from rl360.store.layout import attempts_key, attempts_prefix, merged_key
from rl360.store.manifest import ObjectRef, get_object, put_object
from rl360.store.object_store import ObjectStore

TABLE_SCHEMA = 3
WRITE_EVERY_S = 5.0  # a write costs 2 ms of CPU however many records are in it


class RecordLog:
    """The records of a wave, stored while it runs: one object of all that finished since the last one was written.

    `stored` holds what is in the store, by attempt id, what an earlier run of the wave left there included. A write
    begins at once when the last one began `every_s` ago, and when every `writer` of the wave waits for it: nothing
    waits while little finishes, nor at the end. A killed wave loses the records that were still waiting, and no
    attempt: their sessions are not closed yet, and both servers join a repeated attempt to the one they know.

    Objects are numbered without gaps, each written once; a number that is taken was taken by another run of the wave
    (its last write may arrive after it was killed), and the next one is used. So a try may be in two objects: the later
    one is what the later run went by, and it is the one that counts.
    """

    def __init__(self, store: ObjectStore, run: str, step: int, wave: int, *, every_s: float = WRITE_EVERY_S) -> None:
        self._store, self._place, self._every_s = store, (run, step, wave), every_s
        self._finished: list[AttemptRecord] = []
        self._turn = asyncio.Lock()
        self._next_at = 0.0
        self._writers = 0
        self._all_wait = asyncio.Event()
        keys = store.list(attempts_prefix(run, step, wave))
        self._number = len(keys)
        self.stored = {record.attempt_id: record for key in keys for record in _decode(store.get_required(key), key)}

    @contextmanager
    def writer(self) -> Iterator[None]:
        """One who may still call `keep`."""
        self._writers += 1
        try:
            yield
        finally:
            self._writers -= 1
            self._look()

    async def keep(self, record: AttemptRecord) -> None:
        """Return when the record is stored."""
        self._finished.append(record)
        self._look()
        async with self._turn:
            if record.attempt_id in self.stored:  # by the write of one that finished with it
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_wait.wait(), self._next_at - time.monotonic())
            self._next_at = time.monotonic() + self._every_s
            batch = list(self._finished)
            await asyncio.to_thread(self._write, batch)
            del self._finished[: len(batch)]
            self.stored.update((written.attempt_id, written) for written in batch)
            self._look()

    def _look(self) -> None:
        if self._finished and len(self._finished) >= self._writers:
            self._all_wait.set()
        else:
            self._all_wait.clear()

    def _write(self, batch: Sequence[AttemptRecord]) -> None:
        data = _encode(batch)
        while True:
            key = attempts_key(*self._place, self._number)
            # written before, by this very call: the answer to its first try was lost
            mine = self._store.put_once(key, data) or self._store.get_required(key) == data
            self._number += 1
            if mine:
                return


def put_table(store: ObjectStore, key: str, records: Iterable[AttemptRecord]) -> ObjectRef:
    """Write a table once, in attempt order; a table that is already there wins."""
    return put_object(store, key, _encode(sorted(records, key=lambda record: record.attempt_id)))


def read_table(store: ObjectStore, ref: ObjectRef) -> list[AttemptRecord]:
    """The records of a committed table, each checked."""
    return _decode(get_object(store, ref), ref.key)


def _encode(records: Sequence[AttemptRecord]) -> bytes:
    return pack({"schema_version": TABLE_SCHEMA, "attempts": [record.to_wire() for record in records]})


def _decode(data: bytes, key: str) -> list[AttemptRecord]:
    wire = unpack(data, key)
    if not isinstance(wire, dict) or wire.get("schema_version") != TABLE_SCHEMA:
        found = wire.get("schema_version") if isinstance(wire, dict) else type(wire).__name__
        raise CorruptObject(key, f"table schema {found!r}, this rl360 reads {TABLE_SCHEMA}")
    if not isinstance(wire.get("attempts"), list):
        raise CorruptObject(key, "has no list of attempts")
    return [AttemptRecord.from_wire(item, key) for item in wire["attempts"]]


def refuse_unplanned(
    records: Sequence[AttemptRecord], specs: Sequence[AttemptSpec], *, run: str, step: int, wave: int, key: str
) -> None:
    """Refuse the table `key` unless it holds exactly the wave's planned attempts, each with its tries 0, 1, ... and
    with samples under its own key: of this step, and of no other attempt."""
    planned = {spec.slot_id: spec for spec in specs}
    tries: dict[str, list[int]] = {spec.slot_id: [] for spec in specs}
    for record in records:
        name = record.attempt_id
        spec = planned.get(name.rsplit("-t", 1)[0])
        if spec is None or (name, record.group_id, record.task_id) != (
            spec.attempt_id(record.try_index),
            spec.group_id,
            spec.task_id,
        ):
            raise CorruptObject(key, f"attempt {name} of {record.group_id} is not in the plan of wave {wave}")
        tries[spec.slot_id].append(record.try_index)
        if record.stored is not None and record.stored.key != merged_key(run, step, wave, name):
            raise CorruptObject(key, f"attempt {name} refers to {record.stored.key}, which is not its own key")
    for slot, indices in tries.items():
        if not indices or sorted(indices) != list(range(len(indices))):
            raise CorruptObject(key, f"planned attempt {slot} has the tries {sorted(indices)}")


def refuse_unsigned(records: Sequence[AttemptRecord], *, run: str, verdict_key: bytes, key: str) -> None:
    """Refuse the table `key` unless every verdict in it is a receipt of the run's verifier."""
    for record in records:
        problem = None if record.verdict is None else receipt_problem(record.verdict, verdict_key, run)
        if problem is not None:
            raise CorruptObject(key, problem)
