"""What infrastructure may cost a step before it stops trying: further tries by group, failed starts by task, the share
of lost attempts in all.

A task whose sandboxes never start while those of other tasks do is quarantined: an object in the run's store says so,
its attempts end as `sandbox_start` without a try, and later steps do not draw it, until somebody releases it. The plan
of the step that runs stays as it was drawn. A step that loses too many attempts for good is stopped (`InfraLosses`):
what it would train on says more of the infrastructure than of the policy.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
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
PAID = 1 << 30
Quarantine = dict[str, object]  # task, step, starts, detail of the last one, at (unix seconds)


class StepBudget:
    """What the waves of one step (threads of one process) spend together. Of its `attempts`, `limit` may be lost. Those
    that an earlier flow run lost are not counted again: it was stopped by them, and somebody resumed it. Further tries
    are, for whoever made them a group pays once."""

    def __init__(self, run: str, step: int, limit: float, attempts: int) -> None:
        self._where, self._limit, self._attempts = f"step {step} of run {run}", limit, attempts
        self._lock = threading.Lock()
        self._tries: defaultdict[str, set[str]] = defaultdict(set)  # by group, further ones
        self._ended = 0
        self._lost: Counter[Outcome] = Counter()
        self._said: dict[Outcome, str] = {}

    def pays(self, group_id: str, attempt_id: str, most: int) -> bool:
        """Whether a group of which `most` further tries are paid pays for this one, or has."""
        with self._lock:
            paid = self._tries[group_id]
            if attempt_id not in paid and len(paid) >= most:
                return False
            paid.add(attempt_id)
            return True

    def ended(self, record: AttemptRecord, *, lost: bool | None) -> None:
        """An attempt ended for good; lost None: it counts for nothing, the step is judged by the others. Raises
        `InfraLosses` when too many did without a verdict: more than may of those that ended, once they are enough to go
        by, or of all that there are, however the rest ends."""
        with self._lock:
            if lost is None:
                self._attempts -= 1
            else:
                self._ended += 1
            if lost:
                self._lost[record.outcome] += 1
                self._said[record.outcome] = record.detail
            count, of = self._lost.total(), self._ended if self._ended >= ENOUGH else self._attempts
            if count <= self._limit * of:
                return
            causes = [
                f"{outcome} {number} ({boundary_of(outcome)}: {self._said[outcome][:120] or 'no detail'})"
                for outcome, number in self._lost.most_common(TOP)
            ]
            share = f"{count} of {of} attempts ({count / of:.0%}) of {self._where}"
            raise InfraLosses(
                f"{share} were lost to infrastructure, limit rollout.max_infra_rate {self._limit:.0%}: "
                f"{'; '.join(causes)}. Mend it, then `rl360 run resume` goes on with the rest"
            )


class Budgets:
    """The budgets of one wave. Of one event loop, but for `publish`. `earlier`: stored records of the wave, and of
    others that its groups are in too."""

    def __init__(
        self, store: ObjectStore, config: RunConfig, step: int, share: StepBudget, earlier: Iterable[AttemptRecord] = ()
    ) -> None:
        self._store, self._config, self._step, self._share = store, config, step, share
        self._quarantined = quarantined(store, config.run)
        for record in earlier:
            if record.try_index:
                share.pays(record.group_id, record.attempt_id, PAID)
        self._started: Counter[str] = Counter()  # sandboxes by task
        # by task: starts that failed in a row, and the sandboxes of other tasks that had started before the first
        self._failed: dict[str, tuple[list[AttemptRecord], int]] = {}

    def refusal(self, task_id: str) -> str | None:
        """Why an attempt of this task is not tried; None when it is."""
        said = self._quarantined.get(task_id)
        if said is None:
            return None
        run = self._config.run
        return f"task {task_id} is in quarantine since step {said['step']}: `rl360 tasks release {run} {task_id}`"

    def another(self, outcome: Outcome, further: int, group_id: str, task_id: str, attempt_id: str) -> bool:
        """Whether an attempt that ended so after `further` tries gets another, this one, for which its group pays."""
        rollout = self._config.rollout
        if outcome not in RETRYABLE or further >= rollout.infra_retries or task_id in self._quarantined:
            return False
        return self._share.pays(group_id, attempt_id, rollout.group_retries)

    def note(self, record: AttemptRecord) -> list[Quarantine]:
        """A try ended. Tasks that are not tried any more from now on, to be told to `publish`."""
        # a plug-in's reply may tell no phases
        task, began = record.task_id, record.outcome in HAS_VERDICT or bool(record.phases_s.get("agent"))
        if began:
            self._started[task] += 1
            self._failed.pop(task, None)
        unstarted = record.outcome is Outcome.SANDBOX_START and not began and task not in self._quarantined
        if unstarted and boundary_of(record.outcome, record.exit_status) is Boundary.PROVIDER:
            self._failed.setdefault(task, ([], self._others(task)))[0].append(record)
        limit, found = self._config.rollout.quarantine_after, self._failed.items()
        bad = [name for name, (failed, before) in found if min(len(failed), self._others(name) - before) >= limit]
        made = []
        for name in bad:
            failed, _ = self._failed.pop(name)
            said = {"task": name, "step": self._step, "starts": len(failed), "detail": failed[-1].detail}
            self._quarantined[name] = said | {"at": time.time()}
            made.append(self._quarantined[name])
        return made

    def _others(self, task: str) -> int:
        return self._started.total() - self._started[task]

    def publish(self, made: Quarantine) -> None:
        """Write a quarantine to the run. Blocking."""
        self._store.put_once(quarantine_key(self._config.run, str(made["task"])), orjson.dumps(made))

    def ended(self, record: AttemptRecord) -> None:
        """An attempt ended for good in this flow run. Raises `InfraLosses`."""
        named = record.task_id in self._quarantined and record.outcome is Outcome.SANDBOX_START  # already
        scored = self._config.rollout.unverified_timeout == "score_zero" and record.outcome is Outcome.AGENT_TIMEOUT
        self._share.ended(record, lost=None if named else record.outcome not in HAS_VERDICT and not scored)


def quarantined(store: ObjectStore, run: str) -> dict[str, Quarantine]:
    """The run's quarantines by task id."""
    found = {}
    for key in store.list(quarantine_prefix(run)):
        try:
            said = orjson.loads(store.get_required(key))
            found[str(said["task"])] = said | {"step": int(said["step"])}
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise CorruptObject(key, f"is not a quarantine ({error!r})") from None
    return found
