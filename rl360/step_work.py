"""The work of the tasks that compute from what is stored: plan, collect, filter, close the books.

Each function reads what earlier tasks of the step committed, writes its object and returns what its task's manifest
will say. The same inputs give the same bytes: `rl360 replay` runs these functions again and compares.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import orjson

from rl360.agents.budgets import quarantined
from rl360.agents.records import put_table, read_table, refuse_unplanned, refuse_unsigned
from rl360.config.run import RunConfig
from rl360.errors import BadInput, ServiceError
from rl360.ledger.checks import version_number
from rl360.ledger.metrics import step_json
from rl360.ledger.step import StepLedger, build_step_ledger, write_ledger
from rl360.objective.filters import filter_groups as decide
from rl360.objective.filters import read_decisions
from rl360.sessions.sample import AttemptRecord
from rl360.store.codec import pack, unpack
from rl360.store.layout import step_key
from rl360.store.manifest import Manifest, ObjectRef, get_object, put_object, read_manifest
from rl360.store.object_store import ObjectStore
from rl360.store.progress import weight_version
from rl360.tasksets.plan import StepPlan, plan_step
from rl360.tasksets.taskset import load_taskset

PHASES = ("sample_groups", "roll_out", "collect", "filter_groups", "train", "push_weights", "checkpoint")


@dataclass(frozen=True)
class Produced:
    """What a task's work hands to its manifest."""

    objects: list[ObjectRef] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)


def wave_task(wave: int) -> str:
    """The manifest name of one wave."""
    return f"roll_out-{wave:04}"


def committed(store: ObjectStore, run: str, step: int, task: str) -> Manifest:
    """The manifest of a task of this step; it must be there."""
    found = read_manifest(store, run, step, task)
    if found is None:
        raise ServiceError(f"task {task} of {run} step {step} has not committed; run the step from its start")
    return found


def load_plan(store: ObjectStore, run: str, step: int) -> StepPlan:
    """The committed plan of the step."""
    ref = committed(store, run, step, "sample_groups").objects[0]
    return StepPlan.from_wire(unpack(get_object(store, ref), ref.key), ref.key)


def read_records(store: ObjectStore, run: str, step: int) -> list[AttemptRecord]:
    """All attempt records of the step, in attempt order."""
    return read_table(store, committed(store, run, step, "collect").objects[0])


def sample_groups(store: ObjectStore, config: RunConfig, step: int) -> Produced:
    """Draw the step's tasks, none that is in quarantine, and plan its attempts and waves: `groups.msgpack`."""
    taskset = load_taskset(config.taskset.path)
    first = read_manifest(store, config.run, 0, "sample_groups")
    if first is not None and first.info["taskset_digest"] != taskset.digest:
        raise BadInput(
            f"task set {taskset.spec} is not what run {config.run} started with (digest {taskset.digest[:12]}, was "
            f"{first.info['taskset_digest'][:12]}): restore it, or the rl360 it began with (CHANGELOG), "
            "or start a run under another name"
        )
    last = None
    if config.taskset.difficulty == "history" and step > 0:
        last = load_plan(store, config.run, step - 1), read_records(store, config.run, step - 1)
    key = step_key(config.run, step, "groups.msgpack")
    try:  # of a past run of this task: it is planned again as it was then, whoever was released since
        like = StepPlan.from_wire(unpack(store.get(key), key), key)
    except KeyError:
        like = StepPlan({}, [], quarantined=sorted(quarantined(store, config.run)))
    plan = plan_step(taskset, config, step, last, like)
    ref = put_object(store, key, pack(plan.to_wire()))
    counts = {"groups": len(plan.groups), "attempts": plan.attempts, "waves": len(plan.waves)}
    counts["wave_size"] = max(len(wave) for wave in plan.waves)
    return Produced([ref], counts, {"taskset_digest": taskset.digest})


def collect(store: ObjectStore, config: RunConfig, step: int, verdict_key: bytes) -> Produced:
    """Check the table of every wave against the plan, and every verdict's signature; write all records as one table,
    `records.msgpack`. Works on records, which are counts and references; the samples stay where the session servers
    wrote them."""
    run = config.run
    records: list[AttemptRecord] = []
    for wave, specs in enumerate(load_plan(store, run, step).waves):
        ref = committed(store, run, step, wave_task(wave)).objects[0]
        found = read_table(store, ref)
        refuse_unplanned(found, specs, run=run, step=step, wave=wave, key=ref.key)
        refuse_unsigned(found, run=run, verdict_key=verdict_key, key=ref.key)
        records += found
    ref = put_table(store, step_key(run, step, "records.msgpack"), records)
    counts = Counter(str(record.outcome) for record in records)
    sampled = sum(record.sampled_tokens for record in records)
    stored = sum(record.stored is not None for record in records)
    return Produced([ref], {**counts, "attempts": len(records), "stored": stored, "sampled_tokens": sampled})


def filter_groups(store: ObjectStore, config: RunConfig, step: int, weight_version: str) -> Produced:
    """Decide about every attempt and write the batch the trainer reads: `filter.msgpack`."""
    result = decide(
        read_records(store, config.run, step),
        config.objective,
        expected_version=weight_version,
        max_seq_len=config.rollout.max_seq_len,
        loss_constant=config.loss_constant,
        routing_replay=config.trainer.routing_replay,
        kept_versions=config.trainer.kept_versions,
        score_timeouts=config.rollout.unverified_timeout == "score_zero",
    )
    ref = put_object(store, step_key(config.run, step, "filter.msgpack"), pack(result.to_wire(config.run, step)))
    reasons = Counter(str(decision.bucket) for decision in result.decisions)
    return Produced([ref], {**reasons, "kept": len(result.kept), "trained_tokens": result.trained_tokens})


def close_books(store: ObjectStore, config: RunConfig, step: int) -> tuple[Produced, StepLedger]:
    """Build the step's ledger, check that it balances and write it: `ledger.msgpack`."""
    run = config.run
    filtered = committed(store, run, step, "filter_groups").objects[0]
    batch = unpack(get_object(store, filtered), filtered.key)
    pushed = committed(store, run, step, "push_weights")
    ledger = build_step_ledger(
        run=run,
        step=step,
        attempts=read_records(store, run, step),
        decisions=read_decisions(batch, filtered.key),
        train=orjson.loads(get_object(store, committed(store, run, step, "train").objects[0])),
        push={**pushed.info, "engines": pushed.counts["engines"]},
        phases_s=_phases(store, run, step),
        version_before=version_number(weight_version(store, run, step)),
        batch_digest=filtered.sha256,
    )
    return Produced([write_ledger(store, ledger)], info=step_json(ledger)), ledger


def _phases(store: ObjectStore, run: str, step: int) -> dict[str, float]:
    """Wall seconds of each task of the step, from their manifests; the waves overlap and count once."""
    waves = [committed(store, run, step, wave_task(wave)) for wave in range(len(load_plan(store, run, step).waves))]
    spans: dict[str, float] = {}
    for name in PHASES:
        parts = waves if name == "roll_out" else [committed(store, run, step, name)]
        spans[name] = max(part.finished_at for part in parts) - min(part.started_at for part in parts)
    return spans
