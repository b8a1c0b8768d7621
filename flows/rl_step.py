"""One RL step.

Sample groups, ready the engines, launch sandbox waves that roll out agents, collect their records, filter,
train, push the new weights, checkpoint, report. Every task leaves its result in the object store and is safe to run
twice: a step that was killed anywhere is finished by starting it again.
"""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from rl360.config.run import RunConfig
from rl360.errors import Rl360Error
from tasks.checkpoint import checkpoint
from tasks.collect import collect
from tasks.durable import ended_by
from tasks.filter_groups import filter_groups
from tasks.launch_waves import launch_waves
from tasks.open_run import open_run
from tasks.push_weights import push_weights, ready_engines
from tasks.report import report
from tasks.sample_groups import sample_groups
from tasks.train import train


@flow(
    name="rl_step",
    flow_run_name="{config.run} step {step}",
    description="One RL step: sample, roll out, collect, filter, train, push. Resumes where its manifests end.",
    # a thread a wave in flight; the pace is launch_waves', so this only has to be more than any sensible one
    task_runner=ThreadPoolTaskRunner(max_workers=256),  # type: ignore[arg-type]
    retries=0,
    persist_result=False,
)
def rl_step(config: RunConfig, step: int | None = None) -> Any:
    """Run step `step` of the run, or its next unfinished one."""
    try:
        config, step = open_run(config, step)
        groups = sample_groups(config, step)
        version = ready_engines(config, step)
        launch_waves(config, step, groups, version)
        collect(config, step)
        filter_groups(config, step, version)
        train(config, step)
        push_weights(config, step)
        checkpoint(config, step)
        return report(config, step).info
    except Rl360Error as error:
        return ended_by(error)
