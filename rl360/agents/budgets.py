"""What infrastructure may cost a step before it stops trying: further tries by group, failed starts by task, the share
of lost attempts in all.

A task whose sandboxes never start while those of other tasks do is quarantined: an object in the run's store says so,
and its attempts end as `sandbox_start` without a try, in this step and later ones, until somebody releases it. The
plan stays as it was drawn. A step that loses too many attempts for good is stopped (`InfraLosses`): what it would train
on says more of the infrastructure than of the policy.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable

import orjson

from rl360.config.run import RunConfig
from rl360.errors import CorruptObject, InfraLosses
from rl360.harbor.outcome import RETRYABLE, Boundary, boundary_of
from rl360.ledger.outcomes import HAS_VERDICT, Outcome
from rl360.sessions.sample import AttemptRecord
from rl360.store.layout import quarantine_key, quarantine_prefix
from rl360.store.object_store import ObjectStore

ENOUGH = 32  # attempts that ended before their losses are judged
TOP = 3


class LossShare:
    """Attempts of one step that ended since its flow was started, over all of its waves (threads of one process). Those
    that an earlier flow run lost are not counted again: it was stopped by them, and somebody resumed it."""

    def __init__(self, run: str, step: int, limit: float) -> None:
        self._where, self._limit = f"step {step} of run {run}", limit
        self._lock = threading.Lock()
        self._ended = 0
        self._lost: Counter[Outcome] = Counter()
        self._said: dict[Outcome, str] = {}

    def ended(self, record: AttemptRecord, *, lost: bool) -> None:
        """An attempt ended for good. Raises `InfraLosses` when too many did without a verdict."""
        with self._lock:
            self._ended += 1
            if lost:
                self._lost[record.outcome] += 1
                self._said[record.outcome] = record.detail
            count = self._lost.total()
            if self._ended < ENOUGH or count <= self._limit * self._ended:
                return
            causes = [
                f"{outcome} {number} ({boundary_of(outcome)}: {self._said[outcome][:120] or 'no detail'})"
                for outcome, number in self._lost.most_common(TOP)
            ]
            share = f"{count} of {self._ended} attempts ({count / self._ended:.0%}) of {self._where}"
            raise InfraLosses(
                f"{share} were lost to infrastructure, limit rollout.max_infra_rate {self._limit:.0%}: "
                f"{'; '.join(causes)}. Mend it, then `rl360 run resume` goes on with the rest"
            )


class Budgets:
    """The budgets of one wave. Of one event loop; `quarantine` writes to the store and is called in a thread."""

    def __init__(
        self, store: ObjectStore, config: RunConfig, step: int, share: LossShare, earlier: Iterable[AttemptRecord] = ()
    ) -> None:
        self._store, self._config, self._step, self._share = store, config, step, share
        self._quarantined = quarantined(store, config.run)
        self._retries = Counter(record.group_id for record in earlier if record.try_index)
        self._started: Counter[str] = Counter()  # sandboxes by task
        self._failed: dict[str, list[AttemptRecord]] = {}  # starts in a row, by task
        self._others: dict[str, int] = {}  # sandboxes started before the first of these

    def refusal(self, task_id: str) -> str | None:
        """Why an attempt of this task is not tried; None when it is."""
        said = self._quarantined.get(task_id)
        if said is None:
            return None
        run = self._config.run
        return f"task {task_id} is in quarantine since step {said['step']}: `rl360 tasks release {run} {task_id}`"

    def another(self, outcome: Outcome, further: int, group_id: str, task_id: str) -> bool:
        """Whether an attempt that ended so after `further` tries gets another, which its group pays for too."""
        rollout = self._config.rollout
        if outcome not in RETRYABLE or further >= rollout.infra_retries or task_id in self._quarantined:
            return False
        if self._retries[group_id] >= rollout.group_retries:
            return False
        self._retries[group_id] += 1
        return True

    def note(self, record: AttemptRecord) -> list[str]:
        """A try ended. The tasks that are to be quarantined for it, to be told to `quarantine`."""
        task = record.task_id
        if record.outcome is Outcome.SANDBOX_START and task not in self._quarantined:
            if boundary_of(record.outcome, record.exit_status) is Boundary.PROVIDER and not record.phases_s.get(
                "agent"
            ):
                self._others.setdefault(task, self._started.total() - self._started[task])
                self._failed.setdefault(task, []).append(record)
        elif record.phases_s.get("agent"):
            self._started[task] += 1
            self._failed.pop(task, None)
            self._others.pop(task, None)
        limit = self._config.rollout.quarantine_after
        return [
            task
            for task, failed in self._failed.items()
            if len(failed) >= limit and self._started.total() - self._started[task] - self._others[task] >= limit
        ]

    def quarantine(self, task_id: str) -> None:
        """Take a task out of the run."""
        failed = self._failed.pop(task_id, [])
        said = {"task": task_id, "step": self._step, "starts": len(failed), "at": time.time()}
        said["detail"] = failed[-1].detail if failed else ""
        self._store.put_once(quarantine_key(self._config.run, task_id), orjson.dumps(said))
        self._quarantined[task_id] = said

    def ended(self, record: AttemptRecord) -> None:
        """An attempt ended for good in this flow run. Raises `InfraLosses`."""
        if record.task_id in self._quarantined and record.outcome is Outcome.SANDBOX_START:
            return  # named already
        scored = self._config.rollout.unverified_timeout == "score_zero" and record.outcome is Outcome.AGENT_TIMEOUT
        self._share.ended(record, lost=record.outcome not in HAS_VERDICT and not scored)


def quarantined(store: ObjectStore, run: str) -> dict[str, dict[str, object]]:
    """The run's quarantined tasks: `task`, `step`, `starts`, `at` (unix seconds), `detail`, by task id."""
    found = {}
    for key in store.list(quarantine_prefix(run)):
        try:
            said = orjson.loads(store.get_required(key))
            found[str(said["task"])] = said | {"step": int(said["step"])}
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise CorruptObject(key, f"is not a quarantine ({error!r})") from None
    return found
