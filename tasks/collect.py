"""Collect: check the table of every wave against the plan, and every verdict's signature; write all records of the step
as one table.

Works on records, which are counts and references; the samples stay where the session servers wrote them.
"""

from __future__ import annotations

from prefect import task

from rl360 import step_work
from rl360.config.run import RunConfig
from rl360.harbor.verdict import run_key
from rl360.store.manifest import Manifest
from tasks.durable import RULES, Job, once


@task(name="collect", **RULES)
def collect(config: RunConfig, step: int) -> Manifest:
    """Write `records.msgpack` from the tables of all waves."""
    return once(config, step, "collect", _collect)


def _collect(job: Job) -> step_work.Produced:
    key = run_key(job.services.secrets().token, job.run)
    return step_work.collect(job.store, job.config, job.step, key)
