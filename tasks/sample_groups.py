"""Draw the step's tasks and plan its attempts and waves. Pure in (seed, step, task set, quarantine), and the plan holds
what was in quarantine: a resume and a replay draw the same."""

from __future__ import annotations

from prefect import task

from rl360 import step_work
from rl360.config.run import RunConfig
from rl360.store.manifest import Manifest
from tasks.durable import RULES, once


@task(name="sample_groups", **RULES)
def sample_groups(config: RunConfig, step: int) -> Manifest:
    """Write `groups.msgpack`: groups, and their attempts laid out in waves."""
    return once(config, step, "sample_groups", lambda job: step_work.sample_groups(job.store, job.config, job.step))
