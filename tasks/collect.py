"""Collect: check the table of every wave against the plan and write all records of the step as one table.

Works on records, which are counts and references; the samples stay where the session servers wrote them.
"""

from __future__ import annotations

from collections import Counter

from prefect import task

from rl360.agents.records import put_table, read_table, refuse_unplanned
from rl360.config.run import RunConfig
from rl360.sessions.sample import AttemptRecord
from rl360.store.layout import step_key
from rl360.store.manifest import Manifest
from tasks.durable import RULES, Job, Produced, once
from tasks.roll_out import load_plan, wave_task


@task(name="collect", **RULES)
def collect(config: RunConfig, step: int) -> Manifest:
    """Write `records.msgpack` from the tables of all waves."""
    return once(config, step, "collect", _collect)


def read_records(job: Job) -> list[AttemptRecord]:
    """All attempt records of the step, in attempt order."""
    return read_table(job.store, job.manifest("collect").objects[0])


def _collect(job: Job) -> Produced:
    records: list[AttemptRecord] = []
    for wave, specs in enumerate(load_plan(job).waves):
        ref = job.manifest(wave_task(wave)).objects[0]
        found = read_table(job.store, ref)
        refuse_unplanned(found, specs, run=job.run, step=job.step, wave=wave, key=ref.key)
        records += found
    ref = put_table(job.store, step_key(job.run, job.step, "records.msgpack"), records)
    counts = Counter(str(record.outcome) for record in records)
    sampled = sum(record.sampled_tokens for record in records)
    stored = sum(record.stored is not None for record in records)
    return Produced(
        objects=[ref], counts={**counts, "attempts": len(records), "stored": stored, "sampled_tokens": sampled}
    )
