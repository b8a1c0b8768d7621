"""Open a run: freeze its config, or refuse a different one; say which step is next."""

from __future__ import annotations

from prefect import task

from rl360.config.freeze import freeze_config, note_target
from rl360.config.run import RunConfig
from rl360.errors import BadInput
from rl360.policy.compatible import refuse_other_tokenizer
from rl360.store.progress import next_step
from rl360.tasksets.taskset import load_taskset
from tasks.durable import RULES, open_job


@task(name="open_run", **RULES)
def open_run(config: RunConfig, step: int | None) -> tuple[RunConfig, int]:
    """The frozen config with this call's operational fields, and `step` or else the first one not finished."""
    job = open_job(config, step or 0, "open_run")
    # before anything is frozen: a name must not be spent on a task set that is not there
    load_taskset(config.taskset.path)
    frozen = freeze_config(job.store, config, default_model=job.services.model_dir)
    if step is None:
        note_target(job.store, frozen)
    refuse_other_tokenizer(frozen.model.path, job.services.model_dir)
    following = next_step(job.store, config.run)
    if step is not None and not 0 <= step <= following:
        raise BadInput(
            f"step {step} of {config.run} cannot run: the next unfinished step is {following}; leave it empty"
        )
    return frozen, following if step is None else step
