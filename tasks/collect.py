"""Collect: read every record of the step's waves, check each against its digest, write merged shards."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from prefect import task

from rl360.config.run import RunConfig
from rl360.errors import CorruptObject
from rl360.sessions.sample import AttemptRecord
from rl360.store.codec import pack, unpack
from rl360.store.layout import merged_key
from rl360.store.manifest import Manifest, ObjectRef, get_object, put_object
from tasks.durable import RULES, Job, Produced, once
from tasks.roll_out import load_plan, wave_task

SHARD_RECORDS = 256
_READERS = 8


@task(name="collect", **RULES)
def collect(config: RunConfig, step: int) -> Manifest:
    """Write `merged/{shard}.msgpack` from the records of all waves."""
    return once(config, step, "collect", _collect)


def read_records(job: Job) -> list[AttemptRecord]:
    """All attempt records of the step from its merged shards, in attempt order."""
    records: list[AttemptRecord] = []
    for ref in job.manifest("collect").objects:
        wire = unpack(get_object(job.store, ref), ref.key)
        if not isinstance(wire, dict) or wire.get("schema_version") != 1:
            raise CorruptObject(ref.key, "is not a merged shard of schema 1")
        records.extend(AttemptRecord.from_wire(item, ref.key) for item in wire["attempts"])
    return records


def _collect(job: Job) -> Produced:
    plan = load_plan(job)
    refs = [ref for wave in range(len(plan.waves)) for ref in job.manifest(wave_task(wave)).objects]

    def read(ref: ObjectRef) -> AttemptRecord:
        return AttemptRecord.from_wire(unpack(get_object(job.store, ref), ref.key), ref.key)

    with ThreadPoolExecutor(_READERS, thread_name_prefix="collect") as readers:
        records = sorted(readers.map(read, refs), key=lambda record: record.attempt_id)
    planned = {spec.slot_id for wave in plan.waves for spec in wave}
    tried = {record.attempt_id.rsplit("-t", 1)[0] for record in records}
    if planned != tried:
        odd = sorted(planned ^ tried)[:3]
        raise CorruptObject(f"{job.run} step {job.step}", f"attempts differ from the plan, e.g. {odd}")
    shards = []
    for start in range(0, len(records), SHARD_RECORDS):
        part = [record.to_wire() for record in records[start : start + SHARD_RECORDS]]
        key = merged_key(job.run, job.step, start // SHARD_RECORDS)
        shards.append(put_object(job.store, key, pack({"schema_version": 1, "attempts": part})))
    counts = Counter(str(record.outcome) for record in records)
    sampled = sum(record.sampled_tokens for record in records)
    return Produced(objects=shards, counts={**counts, "attempts": len(records), "sampled_tokens": sampled})
