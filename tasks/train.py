"""Train: one optimizer step over the kept samples, applied exactly once however often this task runs.

The trainer records the result itself (`train.json`) before it answers, so a lost answer costs nothing.
"""

from __future__ import annotations

import asyncio

from prefect import task

from rl360.config.run import RunConfig
from rl360.step_work import Produced
from rl360.store.layout import step_key
from rl360.store.manifest import Manifest, put_object
from tasks.durable import RULES, Job, once, trainer_client


@task(name="train", **RULES)
def train(config: RunConfig, step: int) -> Manifest:
    """Have the trainer take step `step`; its result is in the manifest's `info`."""
    return once(config, step, "train", lambda job: asyncio.run(_train(job)))


async def _train(job: Job) -> Produced:
    batch = job.manifest("filter_groups").objects[0]
    async with trainer_client(job) as trainer:
        result = await trainer.put_step(job.run, job.step, batch.key, batch.sha256, job.config.deadlines.train_s)
    key = step_key(job.run, job.step, "train.json")
    ref = put_object(job.store, key, job.store.get_required(key))
    return Produced(objects=[ref], info=result)
