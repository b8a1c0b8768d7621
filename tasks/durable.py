"""How every task is made safe to run twice.

A task's commit is its manifest in the store, keyed by run, step and task. `once` returns the manifest when it exists
and otherwise does the work and commits, so a retried or restarted flow repeats nothing that was committed. Prefect's
own result cache stays off: two records of what is done could disagree, and a failed persist there is only logged.

Retries are by type, never by message: only what is known to be safe to repeat is repeated.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from prefect import get_run_logger
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Failed
from prefect.tasks import exponential_backoff

from rl360.config.run import RunConfig
from rl360.config.services import Services, load_services
from rl360.errors import EngineChurn, Rl360Error, ServiceError, StoreUnavailable
from rl360.step_work import Produced, committed
from rl360.store.manifest import Manifest, commit_manifest, read_manifest
from rl360.store.object_store import ObjectStore
from rl360.training.client import TrainerClient

SAFE_TO_REPEAT = (StoreUnavailable, ServiceError, EngineChurn)


def may_retry(_task: Any, _task_run: Any, state: Any) -> bool:
    """The allow-list: a failure is retried only when its exception says it is safe."""
    return isinstance(state.data, SAFE_TO_REPEAT)


RULES: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "persist_result": False,
    "retries": 5,  # about a minute: a trainer that restarts is back by then
    "retry_delay_seconds": exponential_backoff(2),
    "retry_jitter_factor": 0.3,
    "retry_condition_fn": may_retry,
}


def ended_by(error: Rl360Error) -> State:
    """The state of a flow that an error ended, named by the error's type: what a person and `rl360 run list` go by.

    Returned, not raised: a flow's own retries would repeat an exception, and some must never be repeated.
    """
    return Failed(name=type(error).__name__, message=str(error))


@dataclass(frozen=True)
class Job:
    """What a task works with."""

    config: RunConfig
    step: int
    name: str
    services: Services
    store: ObjectStore
    log: logging.Logger | logging.LoggerAdapter

    @property
    def run(self) -> str:
        return self.config.run

    def manifest(self, task: str) -> Manifest:
        """The manifest of an earlier task of this step; it must be there."""
        return committed(self.store, self.run, self.step, task)


def open_job(config: RunConfig, step: int, name: str) -> Job:
    """Connect a task to the services."""
    services = load_services()
    return Job(config, step, name, services, ObjectStore.from_services(services), get_run_logger())


def once(config: RunConfig, step: int, name: str, work: Callable[[Job], Produced]) -> Manifest:
    """Do `work` unless it is already committed; commit; return the manifest."""
    job = open_job(config, step, name)
    done = read_manifest(job.store, job.run, step, name)
    if done is not None:
        job.log.info("%s of step %d was committed at %s; nothing to do", name, step, time.ctime(done.finished_at))
        return done
    started_at = time.time()
    produced = work(job)
    return commit_manifest(
        job.store,
        Manifest(
            run=job.run,
            step=step,
            task=name,
            objects=produced.objects,
            counts=produced.counts,
            info=produced.info,
            started_at=started_at,
        ),
    )


@asynccontextmanager
async def trainer_client(job: Job) -> AsyncIterator[TrainerClient]:
    """A client of the trainer for the duration of one task."""
    async with httpx.AsyncClient() as http:
        yield TrainerClient(job.services.trainer_url, http, job.services.auth_headers())
