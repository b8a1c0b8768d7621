"""Tables of attempt records: one object for all records of a wave, one for all of the step.

A record is counts and a reference to its samples, about 1 KB; the samples themselves are never read here. A table that
contradicts the plan, or whose records name other samples than their own, is refused (`CorruptObject` naming it).
"""

from __future__ import annotations

from collections.abc import Sequence

from rl360.agents.rollout import AttemptSpec
from rl360.errors import CorruptObject
from rl360.sessions.sample import AttemptRecord
from rl360.store.codec import pack, unpack
from rl360.store.layout import merged_key
from rl360.store.manifest import ObjectRef, get_object, put_object
from rl360.store.object_store import ObjectStore

TABLE_SCHEMA = 2


def put_table(store: ObjectStore, key: str, records: Sequence[AttemptRecord]) -> ObjectRef:
    """Write a table once, in attempt order; a table that is already there wins."""
    ordered = sorted(records, key=lambda record: record.attempt_id)
    return put_object(
        store, key, pack({"schema_version": TABLE_SCHEMA, "attempts": [record.to_wire() for record in ordered]})
    )


def read_table(store: ObjectStore, ref: ObjectRef) -> list[AttemptRecord]:
    """The records of a committed table, each checked."""
    wire = unpack(get_object(store, ref), ref.key)
    if not isinstance(wire, dict) or wire.get("schema_version") != TABLE_SCHEMA:
        found = wire.get("schema_version") if isinstance(wire, dict) else type(wire).__name__
        raise CorruptObject(ref.key, f"table schema {found!r}, this rl360 reads {TABLE_SCHEMA}")
    if not isinstance(wire.get("attempts"), list):
        raise CorruptObject(ref.key, "has no list of attempts")
    return [AttemptRecord.from_wire(item, ref.key) for item in wire["attempts"]]


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
