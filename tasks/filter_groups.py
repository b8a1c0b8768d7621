"""Filter: decide about every attempt and write the batch the trainer reads."""

from __future__ import annotations

from prefect import task

from rl360 import step_work
from rl360.config.run import RunConfig
from rl360.store.manifest import Manifest
from tasks.durable import RULES, once


@task(name="filter_groups", **RULES)
def filter_groups(config: RunConfig, step: int, weight_version: str) -> Manifest:
    """Write `filter.msgpack`: references to kept samples with advantages, and every attempt's reason."""
    return once(
        config,
        step,
        "filter_groups",
        lambda job: step_work.filter_groups(job.store, job.config, job.step, weight_version),
    )
