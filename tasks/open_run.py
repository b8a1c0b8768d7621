"""Open a run: refuse what cannot work, freeze its config, say which step is next."""

from __future__ import annotations

from prefect import task

from rl360.config.freeze import freeze_config, note_target
from rl360.config.run import RunConfig
from rl360.errors import BadInput
from rl360.preflight import check_start
from rl360.store.layout import run_config_key
from rl360.store.progress import next_step, refuse_nonfinite
from tasks.durable import RULES, open_job


@task(name="open_run", **RULES)
def open_run(config: RunConfig, step: int | None) -> tuple[RunConfig, int]:
    """The frozen config with this call's operational fields, and `step` or else the first one not finished."""
    job = open_job(config, step or 0, "open_run")
    if step is None or not job.store.exists(run_config_key(config.run)):
        # before anything is frozen: a name must not be spent on what cannot work
        check_start(job.store, job.services, config)
    frozen = freeze_config(job.store, config, default_model=job.services.model_dir)
    if step is None:
        note_target(job.store, frozen)
    following = next_step(job.store, config.run)
    if step is not None and not 0 <= step <= following:
        raise BadInput(
            f"step {step} of {config.run} cannot run: the next unfinished step is {following}; leave it empty"
        )
    if step in (None, following):
        refuse_nonfinite(job.store, config.run, following, frozen.trainer.max_nonfinite_steps)
    return frozen, following if step is None else step
