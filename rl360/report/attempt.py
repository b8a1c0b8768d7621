"""The whole life of one planned attempt, every try of it: plan, sandbox, session, tokens, verdict, group, step, push.

Read from what its step has committed so far: the plan is needed, the rest is there or is said to be missing, so an
attempt of a step whose books were refused can be looked at too. Numbers of a closed step are its ledger's.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rl360 import step_work
from rl360.agents.records import RecordLog
from rl360.agents.rollout import AttemptSpec, spread
from rl360.config.freeze import load_frozen
from rl360.errors import BadInput
from rl360.harbor.verdict import receipt_problem
from rl360.ledger.metrics import group_fates, mean
from rl360.ledger.outcomes import Bucket
from rl360.ledger.read import read_step
from rl360.ledger.step import LEDGER_NAME
from rl360.objective.filters import Decision, read_decisions
from rl360.store.codec import unpack
from rl360.store.layout import step_key
from rl360.store.manifest import get_object, read_manifest
from rl360.store.progress import step_folders

if TYPE_CHECKING:
    from rl360.config.run import ObjectiveConfig
    from rl360.ledger.step import AttemptRow, StepLedger
    from rl360.sessions.sample import AttemptRecord
    from rl360.store.object_store import ObjectStore

_ID = re.compile(r"(s(\d{6,})-g\d+-a\d+)(?:-t(\d+))?", re.IGNORECASE)
_NEAREST = 3


@dataclass(frozen=True)
class Told:
    """What the caller knows beside the store: the run's verdict key (None: not at hand) and the session servers."""

    verdict_key: bytes | None
    session_urls: Sequence[str] = ()


def attempt_life(store: ObjectStore, run: str, attempt_id: str, told: Told) -> dict[str, Any]:
    """A JSON-ready map. `attempt_id`: of one try, or without its `-tN` for all of them; `BadInput` naming the nearest
    ids when there is no such attempt."""
    objective = load_frozen(store, run, extra="ignore").objective
    step, slot, chosen = _place(store, run, attempt_id)
    plan = step_work.load_plan(store, run, step)
    spec, wave = _planned(plan.waves, slot, attempt_id)
    records = _records(store, run, step, wave)
    ledger = read_step(store, run, step) if store.exists(step_key(run, step, LEDGER_NAME)) else None
    books = _books(store, run, step, ledger)
    recorded = [record for record in records if record.attempt_id.rpartition("-t")[0] == slot]
    tries = [record for record in recorded if chosen in (None, record.try_index)]
    if chosen is not None and not tries:
        known = ", ".join(record.attempt_id for record in recorded) or "none yet"
        raise BadInput(f"attempt {slot} of run {run} has no try {chosen}; recorded tries: {known}")
    members = [record for record in records if record.group_id == spec.group_id]
    return {
        "run": run,
        "step": step,
        "attempt": slot,
        "group_id": spec.group_id,
        "task_id": spec.task_id,
        "domain": spec.domain,
        "wave": wave,
        "waves": len(plan.waves),
        "recorded": [{"attempt_id": record.attempt_id, "outcome": record.outcome.value} for record in recorded],
        "tries": [_try(record, books.get(record.attempt_id), objective, run, told) for record in tries],
        "group": _group(spec.group_id, members, books, objective, ledger),
        "trained": _step(ledger),
    }


def _place(store: ObjectStore, run: str, attempt_id: str) -> tuple[int, str, int | None]:
    """(step, slot, try or None) of an id; `BadInput` when it is no id or its step has no plan."""
    found = _ID.fullmatch(attempt_id.strip())
    if found is not None and read_manifest(store, run, int(found[2]), "sample_groups") is not None:
        return int(found[2]), found[1].lower(), int(found[3]) if found[3] else None
    steps = [s for s in step_folders(store, run) if read_manifest(store, run, s, "sample_groups") is not None]
    if not steps:
        raise BadInput(f"run {run} has planned no attempt yet; watch it with `rl360 run watch {run}`")
    if found is None:
        example = step_work.load_plan(store, run, steps[-1]).waves[0][0].slot_id
        near = _nearest(store, run, steps[-1], attempt_id)
        raise BadInput(
            f"{attempt_id!r} is no attempt id: they look like {example} or {example}-t0 (one try of it); nearest in "
            f"step {steps[-1]}: {near}"
        )
    raise BadInput(
        f"run {run} has no attempt {attempt_id}: step {int(found[2])} is not planned, steps {steps[0]} to {steps[-1]} "
        f"are; nearest in step {steps[-1]}: {_nearest(store, run, steps[-1], attempt_id)}"
    )


def _planned(waves: Sequence[Sequence[AttemptSpec]], slot: str, attempt_id: str) -> tuple[AttemptSpec, int]:
    for wave, specs in enumerate(waves):
        for spec in specs:
            if spec.slot_id == slot:
                return spec, wave
    near = _nearest_of([spec.slot_id for specs in waves for spec in specs], slot)
    raise BadInput(f"no attempt {attempt_id}; nearest: {near}")


def _nearest(store: ObjectStore, run: str, step: int, text: str) -> str:
    waves = step_work.load_plan(store, run, step).waves
    return _nearest_of([spec.slot_id for specs in waves for spec in specs], text)


def _nearest_of(names: Sequence[str], text: str) -> str:
    return ", ".join(difflib.get_close_matches(text.lower(), names, _NEAREST, 0.0))


def _records(store: ObjectStore, run: str, step: int, wave: int) -> list[AttemptRecord]:
    """The step's records when they are collected, else those of the wave that are stored so far."""
    if read_manifest(store, run, step, "collect") is not None:
        return step_work.read_records(store, run, step)
    return sorted(RecordLog(store, run, step, wave).stored.values(), key=lambda record: record.attempt_id)


def _books(store: ObjectStore, run: str, step: int, ledger: StepLedger | None) -> Mapping[str, AttemptRow | Decision]:
    """By attempt: its row in the ledger, else the filter's decision, else nothing."""
    if ledger is not None:
        return {row.attempt_id: row for row in ledger.attempts}
    filtered = read_manifest(store, run, step, "filter_groups")
    if filtered is None:
        return {}
    ref = filtered.objects[0]
    batch = unpack(get_object(store, ref), ref.key)
    return {decision.attempt_id: decision for decision in read_decisions(batch, ref.key)}


def _try(
    record: AttemptRecord, book: AttemptRow | Decision | None, objective: ObjectiveConfig, run: str, told: Told
) -> dict[str, Any]:
    leaves = record.stored.leaves if record.stored is not None else ()
    reached = record.session_id != ""
    return {
        "attempt_id": record.attempt_id,
        "try": record.try_index,
        "outcome": record.outcome.value,
        "exit_status": record.exit_status,
        "detail": record.detail,
        "started_at": record.started_at,
        "finished_at": record.finished_at,
        "seconds": max(record.finished_at - record.started_at, sum(record.phases_s.values())),
        "sandbox": {
            "phases_s": record.phases_s,
            "cleanup_confirmed": record.cleanup_confirmed,
            "cleanup_evidence": record.cleanup_evidence,
        },
        "session": {
            # by the attempt's id, among the servers of now: the record does not say which it was
            "server": spread(list(told.session_urls), record.attempt_id) if reached and told.session_urls else None,
            "opened": reached,
            "sample": None
            if record.stored is None
            else {"key": record.stored.key, "sha256": record.stored.sha256, "bytes": record.stored.size_bytes},
        },
        "turns": sum(leaf.turns for leaf in leaves),
        "agent_metrics": record.agent_metrics,
        "sampled_tokens": record.sampled_tokens,
        "unmerged_tokens": record.unmerged_tokens,
        "tokens": None if book is None else {str(bucket): count for bucket, count in book.tokens.items()},
        "context": {name: sum(getattr(leaf, name) for leaf in leaves) for name in ("prompt", "observation")},
        "versions": list(dict.fromkeys(version for leaf in leaves for version in leaf.versions)),
        "leaves": [
            {
                "bucket": None if book is None else book.leaves[index].value,
                "tokens": leaf.tokens,
                "trainable": leaf.trainable,
                "turns": leaf.turns,
                "versions": list(leaf.versions),
                "truncated": leaf.truncated,
                "dropped": leaf.dropped,
            }
            for index, leaf in enumerate(leaves)
        ],
        "verdict": _verdict(record, run, told.verdict_key),
        "books": _booked(book, objective),
    }


def _verdict(record: AttemptRecord, run: str, key: bytes | None) -> dict[str, Any] | None:
    if record.verdict is None:
        return None
    problem = None if key is None else receipt_problem(record.verdict, key, run)
    verifies = None if key is None else problem is None
    return {**record.verdict.model_dump(mode="json"), "verifies": verifies, "problem": problem}


def _booked(book: AttemptRow | Decision | None, objective: ObjectiveConfig) -> dict[str, Any] | None:
    """Score, reason, advantage and weights; None before the filter has decided."""
    if book is None:
        return None
    trained = book.tokens.get(Bucket.TRAINED, 0)
    return {
        "from": "filter" if isinstance(book, Decision) else "ledger",
        "bucket": book.bucket.value,
        "reward": book.reward,
        "score": book.score,
        "baseline": _baseline(book, objective),
        "advantage": book.advantage,
        "estimator": objective.estimator,
        "trained_tokens": trained,
        "token_weight": book.token_weight,
        "loss_weight": trained * (book.token_weight or 0.0),
    }


def _baseline(book: AttemptRow | Decision, objective: ObjectiveConfig) -> float | None:
    """score - advantage, where the advantage is a plain difference; None where it is divided by a deviation."""
    plain = objective.estimator in ("grpo", "rloo") and not objective.normalize_std
    return book.score - book.advantage if plain and book.score is not None and book.advantage is not None else None


def _group(
    group_id: str,
    members: Sequence[AttemptRecord],
    books: Mapping[str, AttemptRow | Decision],
    objective: ObjectiveConfig,
    ledger: StepLedger | None,
) -> dict[str, Any]:
    rows = []
    for record in members:
        book = books.get(record.attempt_id)
        rows.append(
            {
                "attempt_id": record.attempt_id,
                "outcome": record.outcome.value,
                "bucket": None if book is None else book.bucket.value,
                "reward": None if record.verdict is None else record.verdict.reward,
                "score": None if book is None else book.score,
                "baseline": None if book is None else _baseline(book, objective),
                "advantage": None if book is None else book.advantage,
                "trained_tokens": None if book is None else book.tokens.get(Bucket.TRAINED, 0),
            }
        )
    known = [books[record.attempt_id].score for record in members if record.attempt_id in books]
    scores = [score for score in known if score is not None]
    fate = None if ledger is None else group_fates(ledger).get(group_id)
    return {"group_id": group_id, "fate": fate, "mean_score": mean(scores), "members": rows}


def _step(ledger: StepLedger | None) -> dict[str, Any] | None:
    """What the trainer did with the step and what reached the engines; None before the step's books are closed."""
    if ledger is None:
        return None
    push = None if ledger.push is None else {**asdict(ledger.push), "version": ledger.train.version_after}
    return {"version_before": ledger.version_before, **asdict(ledger.train), "push": push}
