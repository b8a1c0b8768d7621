"""Roll out one wave: every attempt of it to a stored record. One Prefect task per wave, never one per attempt.

A wave that runs again reads the records it already stored and launches only what is missing. Its last act is one table
of all its records, the only object its manifest names: later tasks read tables, never samples.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache, partial

from prefect import task
from prefect.runtime import flow_run

from rl360.agents.budgets import Budgets, StepBudget
from rl360.agents.places import Places
from rl360.agents.records import RecordLog, put_table
from rl360.agents.rollout import AttemptSpec, RolloutClient, all_at_once, roll_out_slot
from rl360.config.run import RunConfig
from rl360.errors import BadInput
from rl360.ledger.outcomes import Outcome
from rl360.plugins import load_function
from rl360.report.wave import tell
from rl360.sessions.sample import AttemptRecord
from rl360.step_work import Produced, load_plan, wave_task
from rl360.store.layout import wave_key
from rl360.store.manifest import Manifest
from tasks.durable import RULES, SAFE_TO_REPEAT, Job, once
from tasks.push_weights import bring_engines_to

MEND_DEADLINE_S = 120.0  # an engine that restarts needs about 30 s
MEND_PAUSE_S = 3.0
Waves = Sequence[Sequence[AttemptSpec]]  # all of the step's
_SHARES = threading.Lock()  # waves of a step begin at once, each in a thread: a cache alone would make one for each


@task(name="roll_out", task_run_name="roll_out wave {wave}", **RULES)
def roll_out(config: RunConfig, step: int, wave: int, weight_version: str) -> Manifest:
    """Run the wave's attempts against the engines at `weight_version`; store a record of each try, and their table."""
    return once(config, step, wave_task(wave), lambda job: _roll_out(job, wave, weight_version))


def _roll_out(job: Job, wave: int, weight_version: str) -> Produced:
    waves = load_plan(job.store, job.run, job.step).waves
    log = RecordLog(job.store, job.run, job.step, wave)
    records = log.stored
    if records:
        job.log.info("wave %d: %d records of an earlier try are kept", wave, len(records))
    started_at = time.monotonic()
    table = wave_key(job.run, job.step, wave)
    if not job.store.exists(table):  # a table closes its wave: a further try would be missing from it
        asyncio.run(_run_wave(job, wave, waves, weight_version, log))
    outcomes = Counter(str(record.outcome) for record in records.values())
    tell(job.log, f"wave {wave}", time.monotonic() - started_at, records.values(), job.run, job.step)
    return Produced(objects=[put_table(job.store, table, records.values())], counts=dict(outcomes))


def _elsewhere(job: Job, wave: int, waves: Waves) -> list[AttemptRecord]:
    """What other waves stored that a group of this one is in too: where it has more attempts than a wave."""
    groups = {spec.group_id for spec in waves[wave]}
    others = [n for n, specs in enumerate(waves) if n != wave and any(spec.group_id in groups for spec in specs)]
    return [record for n in others for record in RecordLog(job.store, job.run, job.step, n).stored.values()]


async def _run_wave(job: Job, wave: int, waves: Waves, weight_version: str, log: RecordLog) -> None:
    engines, specs = EngineWatch(job, weight_version), waves[wave]
    limit, attempts = job.config.rollout.max_infra_rate, sum(map(len, waves))
    share, places = _share(flow_run.id, job.run, job.step, limit, attempts)
    places.queue_s, places.say = job.config.deadlines.queue_s, job.log.warning
    earlier = [*log.stored.values(), *_elsewhere(job, wave, waves)]
    budgets = Budgets(job.store, job.config, job.step, share, earlier)
    room = asyncio.Semaphore(job.config.rollout.max_concurrent)  # a wave may be planned larger than this
    # what ended and is not stored yet fills the session servers: as much of it as plays, then the rest waits
    begun = asyncio.Semaphore(2 * job.config.rollout.max_concurrent)

    async def one(client: RolloutClient, spec: AttemptSpec) -> None:
        earlier: list[AttemptRecord] = []
        while (stored := log.stored.get(spec.attempt_id(len(earlier)))) is not None:
            earlier.append(stored)
        with log.writer():
            async with begun:
                await roll_out_slot(client, spec, earlier, room, log.keep, engines.mend, budgets)

    path = job.config.rollout.function
    function = load_function(path, "rollout.function") if path else all_at_once
    try:
        client = RolloutClient(job.services, job.config, job.step, wave, weight_version, specs)
        async with client:
            client.places = places
            await function(specs, partial(one, client))
    except ExceptionGroup as failed:
        raise gravest(failed) from None
    left = [spec.slot_id for spec in specs if spec.attempt_id(0) not in log.stored]
    if left:  # before the table closes the wave without them
        raise BadInput(f"rollout.function {path} left {len(left)} attempts unplayed, {left[0]} first: play each")


@lru_cache(maxsize=8)
def _shares(_flow_run: str | None, run: str, step: int, limit: float, attempts: int) -> tuple[StepBudget, Places]:
    return StepBudget(run, step, limit, attempts), Places()


def _share(flow_run_id: str | None, run: str, step: int, limit: float, attempts: int) -> tuple[StepBudget, Places]:
    """One of each for all waves that a flow run launches of a step."""
    with _SHARES:
        return _shares(flow_run_id, run, step, limit, attempts)


class EngineWatch:
    """Brings engines back into traffic when attempts find none: a restarted gateway knows no engine, a restarted engine
    has no confirmed weights. Done once for all attempts of the wave that were lost meanwhile."""

    def __init__(self, job: Job, weight_version: str) -> None:
        self._job = job
        self._version = weight_version
        self._lock = asyncio.Lock()
        self._mended_at = 0.0

    async def mend(self, lost: AttemptRecord) -> None:
        """Return when engines can be tried again, or when `MEND_DEADLINE_S` is over (the next try then says so)."""
        if lost.outcome is not Outcome.NO_ENGINE:
            return
        async with self._lock:
            if lost.finished_at < self._mended_at:
                return
            give_up_at = time.monotonic() + MEND_DEADLINE_S
            while time.monotonic() < give_up_at:
                try:
                    await bring_engines_to(self._job, self._version)
                    break
                except SAFE_TO_REPEAT as error:  # another wave is at it, or engines are still starting
                    self._job.log.info("no engine for %s yet: %s", lost.attempt_id, error)
                    await asyncio.sleep(MEND_PAUSE_S)
            self._mended_at = time.time()


def gravest(failed: ExceptionGroup) -> Exception:
    """The one error to report of a wave's: one that forbids a retry before one that allows it."""
    return min(failed.exceptions, key=lambda error: isinstance(error, SAFE_TO_REPEAT))
