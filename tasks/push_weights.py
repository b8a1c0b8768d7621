"""Weights to the engines: before a step samples, and after it trained.

`ready_engines` is the first act of a step: nothing is sampled before every engine that gets traffic holds the step's
weight version, read back by name and checksum. `push_weights` brings the trained weights to the engines. A push that
cannot prove what became of its receivers raises `CleanupUnconfirmed`, which nothing retries, and leaves an artifact
that says what to check. A push that takes another path than the one before, or other calls, is an event and a warning.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.events import emit_event

from rl360.config.run import RunConfig
from rl360.errors import CleanupUnconfirmed, Rl360Error
from rl360.step_work import Produced
from rl360.store.layout import step_key
from rl360.store.manifest import Manifest, put_object, read_manifest
from rl360.store.progress import weight_version
from rl360.weights import fence
from rl360.weights.messages import PushRecord, parse_version, version_name
from rl360.weights.push import ensure_weights, push
from tasks.durable import RULES, Job, once, open_job, trainer_client

PATH_CHANGED = "rl360.push.path-changed"  # the event's name, for automations


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
    async with trainer_client(job) as trainer, _accounted(job):
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
        _tell(job, record)


@asynccontextmanager
async def _accounted(job: Job) -> AsyncIterator[None]:
    """A person has to find out what became of receivers: leave what they need, then fail."""
    try:
        yield
    except CleanupUnconfirmed as error:
        # whatever the report meets, what it is about is told, and is not retried
        (failed,) = await asyncio.gather(asyncio.to_thread(_leave_report, job), return_exceptions=True)
        if failed is not None:
            job.log.error("%s; the report of it was not left: %r", error, failed)
            error.add_note(f"the report of it was not left: {failed!r}")
        raise


def _leave_report(job: Job) -> None:
    intents = fence.open_intents(job.store)
    notes = [note for intent in intents for note in fence.read_unconfirmed(job.store, intent.epoch)]
    text = fence.unconfirmed_report([note for note in notes if not fence.is_gone_confirmed(job.store, note.identity)])
    job.log.error("%s", text)
    create_markdown_artifact(
        key=f"{job.run}-unconfirmed", markdown=text, description="Engines that are not proven gone, and what to do"
    )


def _tell(job: Job, record: PushRecord) -> None:
    job.log.info("pushed %s to %d engines by %s", record.version, len(record.serving), record.way)
    for engine in record.fenced:
        job.log.warning("lost engine %s: %s", engine.identity.url, engine.reason)
    for engine in record.serving:
        if engine.note:
            job.log.warning("%s: %s", engine.identity.url, engine.note)
    if record.changed:
        job.log.warning("weights take another way than in the push before: %s", record.changed)
        emit_event(
            event=PATH_CHANGED,
            resource={"prefect.resource.id": f"rl360.run.{record.run}", "prefect.resource.name": record.run},
            payload={"changed": record.changed, "version": record.version, "epoch": record.epoch},
        )


@task(name="push_weights", **RULES)
def push_weights(config: RunConfig, step: int) -> Manifest:
    """Push the step's weights; the push record is in the manifest's `info` (and in `push.json`)."""
    return once(config, step, "push_weights", lambda job: asyncio.run(_push(job)))


async def _push(job: Job) -> Produced:
    version = version_name(job.run, job.manifest("train").info["version_after"])
    async with trainer_client(job) as trainer, _accounted(job):
        # a trainer that restarted since the step was trained restores and replays it first
        await trainer.open_run(job.run, job.config.deadlines.train_s)
        record = await push(job.store, job.services, job.run, job.step, version, trainer, job.config.push)
    _tell(job, record)
    key = step_key(job.run, job.step, "push.json")
    ref = put_object(job.store, key, record.model_dump_json().encode())
    told = {"path", "calls_per_engine", "control_calls", "bytes", "paused_s", "phases_s", "rounds", "epoch", "changed"}
    info = record.model_dump(mode="json", include=told | {"plan_reused"})
    info["fenced"] = [engine.identity.url for engine in record.fenced]
    return Produced(objects=[ref], counts={"engines": len(record.serving)}, info=info)
