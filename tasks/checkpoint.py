"""Checkpoint: every `trainer.checkpoint_every` steps, everything the trainer needs to go on; older ones are pruned."""

from __future__ import annotations

import asyncio

from prefect import task

from rl360.config.run import RunConfig
from rl360.step_work import Produced
from rl360.store.manifest import Manifest
from rl360.training.saved import prune
from tasks.durable import RULES, Job, once, trainer_client


@task(name="checkpoint", **RULES)
def checkpoint(config: RunConfig, step: int) -> Manifest:
    """Save the trainer's state after `step`, when this step is due for it."""
    return once(config, step, "checkpoint", lambda job: asyncio.run(_checkpoint(job)))


async def _checkpoint(job: Job) -> Produced:
    every = job.config.trainer.checkpoint_every
    if (job.step + 1) % every and job.step + 1 != job.config.steps:
        return Produced(info={"due": False, "every": every})
    async with trainer_client(job) as trainer:
        saved = await trainer.checkpoint(job.run, job.step, job.config.deadlines.train_s)
    # only now: the newer one is committed
    deleted = await asyncio.to_thread(prune, job.store, job.run, job.config.trainer.keep_checkpoints, every)
    return Produced(info={"due": True, **saved, "deleted": deleted})
