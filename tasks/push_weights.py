"""Weights to the engines: before a step samples, and after it trained.

`ready_engines` is the first act of a step: nothing is sampled before every engine that gets traffic holds the step's
weight version, read back by name and checksum. `push_weights` brings the trained weights to the engines. A push that
cannot prove what became of its receivers raises `CleanupUnconfirmed`, which nothing retries.
"""

from __future__ import annotations

import asyncio

from prefect import task

from rl360.config.run import RunConfig
from rl360.errors import Rl360Error
from rl360.step_work import Produced
from rl360.store.layout import step_key
from rl360.store.manifest import Manifest, put_object, read_manifest
from rl360.store.progress import weight_version
from rl360.weights.messages import parse_version, version_name
from rl360.weights.push import ensure_weights, push
from tasks.durable import RULES, Job, once, open_job, trainer_client


@task(name="ready_engines", **RULES)
def ready_engines(config: RunConfig, step: int) -> str:
    """Bring every engine to the version `step` samples from; return that version.

    Never skipped for being done before: engines may have restarted since. Skipped only when the step's samples are
    already collected, since then nothing of it will sample again.
    """
    job = open_job(config, step, "ready_engines")
    version = weight_version(job.store, job.run, step)
    if read_manifest(job.store, job.run, step, "collect") is None:
        asyncio.run(bring_engines_to(job, version))
    return version


async def bring_engines_to(job: Job, version: str) -> None:
    """Every engine that answers holds `version`, read back, and gets traffic; sends nothing when that is so already."""
    async with trainer_client(job) as trainer:
        state = await trainer.open_run(job.run, job.config.deadlines.train_s)
        expected = parse_version(version)[1]
        if state["version"] != expected:
            raise Rl360Error(
                f"the trainer holds version {state['version']} of {job.run}, step {job.step} samples from {expected}; "
                "the store's manifests and the trainer disagree"
            )
        record = await ensure_weights(job.store, job.services, job.run, version, trainer, job.config.push)
    if record is None:
        job.log.info("every engine holds %s", version)
    else:
        job.log.info("pushed %s to %d engines by %s", version, len(record.serving), record.path)


@task(name="push_weights", **RULES)
def push_weights(config: RunConfig, step: int) -> Manifest:
    """Push the step's weights; the push record is in the manifest's `info` (and in `push.json`)."""
    return once(config, step, "push_weights", lambda job: asyncio.run(_push(job)))


async def _push(job: Job) -> Produced:
    version = version_name(job.run, job.manifest("train").info["version_after"])
    async with trainer_client(job) as trainer:
        # a trainer that restarted since the step was trained restores and replays it first
        await trainer.open_run(job.run, job.config.deadlines.train_s)
        record = await push(job.store, job.services, job.run, job.step, version, trainer, job.config.push)
    key = step_key(job.run, job.step, "push.json")
    ref = put_object(job.store, key, record.model_dump_json().encode())
    info = record.model_dump(mode="json", include={"path", "calls_per_engine", "bytes", "paused_s", "rounds", "epoch"})
    return Produced(objects=[ref], counts={"engines": len(record.serving)}, info=info)
