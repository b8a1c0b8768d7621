"""A run in a store in memory, made by the real tasks' work from made-up attempts: every object that a step commits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import orjson

from rl360 import step_work
from rl360.agents.records import put_table
from rl360.agents.rollout import AttemptSpec
from rl360.config.run import RunConfig
from rl360.harbor.verdict import run_key
from rl360.ledger.outcomes import Outcome
from rl360.objective.filters import FilterResult
from rl360.sessions.sample import AttemptRecord
from rl360.store.codec import unpack
from rl360.store.layout import merged_key, run_config_key, step_key, wave_key
from rl360.store.manifest import Manifest, commit_manifest, put_object
from rl360.store.object_store import ObjectStore
from tests.unit.ledger_data import PUSH, train_result
from tests.unit.memory_store import MemoryStore
from tests.unit.objective_data import attempt
from tests.unit.verdict_data import TOKEN, renamed

GROUPS, SIZE = 4, 4
CONFIG = RunConfig.parse(
    {
        "run": "demo",
        "steps": 2,
        "taskset": {"groups_per_step": GROUPS, "attempts_per_group": SIZE},
        "rollout": {"wave_size": 8},
    }
)
KEY = run_key(TOKEN, "demo")
TASKS = ("sample_groups", "roll_out", "collect", "filter_groups", "train", "push_weights", "checkpoint", "report")


def commit(store: MemoryStore, step: int, task: str, produced: step_work.Produced) -> None:
    manifest = Manifest(
        run="demo",
        step=step,
        task=task,
        objects=produced.objects,
        counts=produced.counts,
        info=produced.info,
        started_at=100.0,
        finished_at=102.5,
    )
    commit_manifest(cast(Any, store), manifest)


def tries(step: int, wave: int, spec: AttemptSpec) -> list[AttemptRecord]:
    """What becomes of a planned attempt. Groups 0 and 3 disagree, 1 all pass, 2 all fail. In group 0 the first attempt
    is lost to its sandbox once, the second samples two leaves, the third is cut; in group 3 the last stays lost."""
    group, index = int(spec.group_id[-3:]), int(spec.slot_id[-2:])
    reward = {0: float(index % 2 == 0), 1: 1.0, 2: 0.0, 3: float(index == 0)}[group]
    common: dict[str, Any] = {"step": step, "wave": wave, "version": f"demo:{step}", "seed": 10 * group + index}
    if (group, index) == (3, 3):
        made = [attempt(group, index, None, outcome=Outcome.NO_ENGINE, sample=False, unmerged=5, **common)]
    elif (group, index) == (0, 1):
        made = [attempt(group, index, reward, leaves=[{}, {"trained": 4}], **common)]
    elif (group, index) == (0, 2):
        cut = {"truncated": True, "dropped": {"after_truncation": 3}}
        made = [attempt(group, index, reward, outcome=Outcome.TRUNCATED, **common, **cut)]
    else:
        made = [attempt(group, index, reward, **common)]
    if (group, index) == (0, 0):
        lost = attempt(group, index, None, outcome=Outcome.SANDBOX_LOST, sample=False, **common)
        made = [replace(lost, cleanup_confirmed=False, detail="sandbox server: connection reset"), again(made[0], wave)]
    return [named(record, spec, 1000.0 * (step + 1) + 10 * group + number) for number, record in enumerate(made)]


def again(record: AttemptRecord, wave: int) -> AttemptRecord:
    """The same as a second try."""
    name = record.attempt_id.rpartition("-t")[0] + "-t1"
    assert record.stored is not None and record.verdict is not None
    stored = replace(record.stored, key=merged_key("demo", int(name[1:7]), wave, name))
    verdict = renamed(record.verdict, attempt_id=name)
    return replace(record, attempt_id=name, try_index=1, stored=stored, verdict=verdict)


def named(record: AttemptRecord, spec: AttemptSpec, started_at: float) -> AttemptRecord:
    verdict = None if record.verdict is None else renamed(record.verdict, task_id=spec.task_id)
    cleanup = {"cleanup_confirmed": True, "cleanup_evidence": "cgroup removed"} if not record.detail else {}
    times = {"started_at": started_at, "finished_at": started_at + 3.5}
    return replace(record, task_id=spec.task_id, domain=spec.domain, verdict=verdict, **cleanup, **times)


Edit = Callable[[dict[str, Any]], None]


def add_step(
    store: MemoryStore, step: int, *, until: str = "report", train: Edit | None = None, decisions: Edit | None = None
) -> None:
    """Commit the step's tasks up to `until`. `train` and `decisions` change what the trainer and the filter leave."""
    s3, todo = cast(ObjectStore, store), TASKS[: TASKS.index(until) + 1]
    store.objects.setdefault(run_config_key("demo"), CONFIG.to_json())
    commit(store, step, "sample_groups", step_work.sample_groups(s3, CONFIG, step))
    if "roll_out" in todo:
        for wave, specs in enumerate(step_work.load_plan(s3, "demo", step).waves):
            records = [record for spec in specs for record in tries(step, wave, spec)]
            table = put_table(s3, wave_key("demo", step, wave), records)
            commit(store, step, step_work.wave_task(wave), step_work.Produced([table]))
    if "collect" in todo:
        commit(store, step, "collect", step_work.collect(s3, CONFIG, step, KEY))
    if "filter_groups" in todo:
        filtered = step_work.filter_groups(s3, CONFIG, step, f"demo:{step}")
        if decisions is not None:
            filtered = edited(store, filtered, decisions)
        commit(store, step, "filter_groups", filtered)
    if "train" in todo:
        batch = unpack(store.objects[filtered.objects[0].key], "batch")
        counts = {"trained": filtered.counts["trained_tokens"]}
        result = train_result(FilterResult((), tuple(batch["samples"]), cast(Any, counts)), step)
        result |= {"batch_digest": filtered.objects[0].sha256, "batch_key": filtered.objects[0].key}
        if train is not None:
            train(result)
        ref = put_object(s3, step_key("demo", step, "train.json"), orjson.dumps(result))
        commit(store, step, "train", step_work.Produced([ref], info=result))
    if "push_weights" in todo:
        info = {name: value for name, value in PUSH.items() if name != "engines"}
        commit(store, step, "push_weights", step_work.Produced(counts={"engines": 2}, info=info))
        commit(store, step, "checkpoint", step_work.Produced())
    if "report" in todo:
        commit(store, step, "report", step_work.close_books(s3, CONFIG, step)[0])


def edited(store: MemoryStore, produced: step_work.Produced, edit: Edit) -> step_work.Produced:
    """The batch with its wire changed, committed as if the filter had written it so."""
    from rl360.store.codec import pack

    key = produced.objects[0].key
    wire = unpack(store.objects.pop(key), key)
    edit(wire)
    return replace(produced, objects=[put_object(cast(Any, store), key, pack(wire))])


def finished_run(steps: int = 2) -> MemoryStore:
    store = MemoryStore()
    for step in range(steps):
        add_step(store, step)
    return store
