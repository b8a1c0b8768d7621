"""A step's records from the waves to the batch, over a store in memory: what is refused, what a killed wave keeps, and
that nothing in the flow ever reads a sample."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from rl360.agents.records import RecordLog, put_table, read_table, refuse_unplanned
from rl360.agents.rollout import AttemptSpec, Played
from rl360.config.run import RunConfig
from rl360.errors import CorruptObject
from rl360.harbor.verdict import run_key
from rl360.ledger.outcomes import Outcome
from rl360.ledger.step import build_step_ledger
from rl360.objective.filters import Decision
from rl360.sessions.sample import AttemptRecord
from rl360.step_work import Produced, collect, filter_groups, read_records
from rl360.store.codec import pack, unpack
from rl360.store.layout import attempts_key, step_key, wave_key
from rl360.store.manifest import Manifest, commit_manifest, get_object, put_object, read_manifest
from rl360.tasksets.plan import StepPlan
from rl360.training.results import parse_batch, read_samples
from tasks import roll_out as roll_out_task
from tasks.durable import Job
from tests.unit.memory_store import MemoryStore
from tests.unit.objective_data import OBJECTS, attempt
from tests.unit.verdict_data import TOKEN, renamed

GROUPS, SIZE = 3, 2
CONFIG = RunConfig.parse({"run": "demo"})
VERDICTS = run_key(TOKEN, "demo")
RECORDS = [
    attempt(group, index, float(index), wave=group, leaves=[{}, {}] if group == 1 else [{}])
    for group in range(GROUPS)
    for index in range(SIZE)
]
LOST = replace(RECORDS[0], attempt_id="s000000-g000-a00-t0", outcome="session_lost", verdict=None, stored=None)


def spec_of(record: AttemptRecord) -> AttemptSpec:
    slot = record.attempt_id.rsplit("-t", 1)[0]
    return AttemptSpec(slot, record.group_id, record.task_id, "/tasks/x", record.domain)


def job_of(store: MemoryStore, name: str) -> Job:
    return Job(CONFIG, 0, name, cast(Any, None), cast(Any, store), logging.getLogger("test"))


def commit(store: MemoryStore, task: str, produced: Produced) -> None:
    objects, counts = produced.objects, produced.counts
    commit_manifest(cast(Any, store), Manifest(run="demo", step=0, task=task, objects=objects, counts=counts))


def planned_store(records: list[AttemptRecord] = RECORDS) -> MemoryStore:
    """A step whose plan is committed: a wave a group. The session servers have stored their samples."""
    store = MemoryStore()
    waves = [[spec_of(record) for record in RECORDS if record.group_id == f"s000000-g{g:03}"] for g in range(GROUPS)]
    plan = StepPlan({spec.group_id: spec.task_id for wave in waves for spec in wave}, waves)
    ref = put_object(cast(Any, store), step_key("demo", 0, "groups.msgpack"), pack(plan.to_wire()))
    commit(store, "sample_groups", Produced(objects=[ref]))
    for record in records:
        if record.stored is not None:
            store.put(record.stored.key, OBJECTS[record.stored.sha256])
    return store


def rolled_out(records: list[AttemptRecord] = RECORDS) -> MemoryStore:
    """And whose waves are committed too."""
    store = planned_store(records)
    for wave in range(GROUPS):
        of_wave = [record for record in records if record.group_id == f"s000000-g{wave:03}"]
        table = put_table(cast(Any, store), wave_key("demo", 0, wave), of_wave)
        commit(store, f"roll_out-{wave:04}", Produced(objects=[table]))
    return store


def test_the_flow_reads_no_sample_and_the_trainer_reads_each_once() -> None:
    store = rolled_out()
    collected = collect(cast(Any, store), CONFIG, 0, VERDICTS)
    commit(store, "collect", collected)
    filtered = filter_groups(cast(Any, store), CONFIG, 0, "run:0")
    commit(store, "filter_groups", filtered)
    records = read_records(cast(Any, store), "demo", 0)
    assert records == RECORDS
    batch = get_object(cast(Any, store), filtered.objects[0])
    decisions = [Decision.from_wire(wire) for wire in unpack(batch, "k")["decisions"]]
    train = {"status": "trained", "version_after": 1, "loss": 0.1, "grad_norm": 1.0, "trained_samples": 8}
    train |= {"trained_tokens": 48, "loss_weight_sum": 1.0}
    ledger = build_step_ledger(
        run="demo", step=0, attempts=records, decisions=decisions, train=train, push=None, phases_s={}
    )
    assert len(ledger.attempts) == 6
    assert [key for key in store.read if "/merged/" in key or "/attempts/" in key] == []
    assert collected.counts["stored"] == collected.counts["attempts"] == 6
    assert collected.counts["sampled_tokens"] == 48
    assert filtered.counts == {"trained": 6, "kept": 8, "trained_tokens": 48}

    ref = filtered.objects[0]
    rows = parse_batch(batch, ref.key, ref.sha256, "demo", 0).rows
    assert len(read_samples(cast(Any, store), rows, 1024)) == 8
    read = [key for key in store.read if "/merged/" in key]
    assert sorted(read) == sorted({record.stored.key for record in RECORDS if record.stored is not None})


@pytest.mark.parametrize(("switch", "trained"), [("mask", 2), ("score_zero", 3)])
def test_the_runs_switch_decides_about_timeouts(switch: str, trained: int) -> None:
    config = RunConfig.parse({"run": "demo", "rollout": {"unverified_timeout": switch}})
    store = MemoryStore()
    table = put_table(cast(Any, store), step_key("demo", 0, "records.msgpack"), [*RECORDS[:SIZE], attempt(0, 2, None)])
    commit(store, "collect", Produced(objects=[table]))
    counts = filter_groups(cast(Any, store), config, 0, "run:0").counts
    assert counts["trained"] == trained and counts.get("infra", 0) == 3 - trained


def test_a_step_that_lost_every_session_is_collected_too() -> None:
    lost = [replace(LOST, attempt_id=r.attempt_id, group_id=r.group_id) for r in RECORDS]
    assert collect(cast(Any, rolled_out(lost)), CONFIG, 0, VERDICTS).counts == {
        "session_lost": 6,
        "attempts": 6,
        "stored": 0,
        "sampled_tokens": 0,
    }


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"reward": 1.0}, "is not signed by the verifier of run demo: changed since, or of another deployment's token"),
        ({"run": "other"}, "is of run 'other', not of 'demo'"),
    ],
)
def test_a_record_whose_verdict_is_no_receipt_is_refused(changes: dict[str, Any], why: str) -> None:
    """RECORDS[0] failed; somebody made a pass of it in the store, or brought another run's verdict."""
    verdict = RECORDS[0].verdict
    assert verdict is not None
    forged = replace(RECORDS[0], verdict=verdict.model_copy(update=changes))
    with pytest.raises(
        CorruptObject, match=re.escape(f"waves/0000.msgpack: verdict of attempt {forged.attempt_id} {why}")
    ):
        collect(cast(Any, rolled_out([forged, *RECORDS[1:]])), CONFIG, 0, VERDICTS)


def test_a_verdict_that_another_run_signed_does_not_count() -> None:
    verdict = RECORDS[0].verdict
    assert verdict is not None
    taken = replace(RECORDS[0], verdict=renamed(verdict, run="other").model_copy(update={"run": "demo"}))
    with pytest.raises(CorruptObject, match="is not signed by the verifier of run demo"):
        collect(cast(Any, rolled_out([taken, *RECORDS[1:]])), CONFIG, 0, VERDICTS)


def foreign_key(record: AttemptRecord, key: str) -> AttemptRecord:
    assert record.stored is not None
    return replace(record, stored=replace(record.stored, key=key))


SECOND = replace(
    RECORDS[0], attempt_id="s000000-g000-a00-t1", try_index=1, verdict=None, outcome="aborted", stored=None
)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda r: r[:1], "planned attempt s000000-g000-a01 has the tries"),
        (lambda r: [*r, r[0]], "planned attempt s000000-g000-a00 has the tries .0, 0"),
        (lambda r: [SECOND, r[1]], "planned attempt s000000-g000-a00 has the tries .1"),
        (lambda r: [*r, replace(r[0], attempt_id="s000000-g000-a07-t0")], "a07-t0 .* is not in the plan of wave 0"),
        (lambda r: [replace(r[0], group_id="s000000-g001"), r[1]], "a00-t0 of s000000-g001 is not in the plan"),
        (lambda r: [replace(r[0], task_id="other"), r[1]], "a00-t0 .* is not in the plan"),
        (lambda r: [replace(r[0], try_index=1), r[1]], "a00-t0 .* is not in the plan"),
        (lambda r: [foreign_key(r[0], r[1].stored.key), r[1]], "a00-t0 refers to .*a01-t0.msgpack, which is not its"),
        (
            lambda r: [foreign_key(r[0], r[0].stored.key.replace("steps/000000", "steps/000001")), r[1]],
            "refers to demo/steps/000001/",
        ),
        (
            lambda r: [foreign_key(r[0], r[0].stored.key.replace("demo", "other")), r[1]],
            "refers to other/steps/000000/",
        ),
    ],
)
def test_a_table_that_is_not_the_plan_is_refused(
    change: Callable[[list[AttemptRecord]], list[AttemptRecord]], match: str
) -> None:
    wave = RECORDS[:SIZE]
    specs = [spec_of(record) for record in wave]
    refuse_unplanned([*wave, SECOND], specs, run="demo", step=0, wave=0, key="k")
    with pytest.raises(CorruptObject, match=match) as error:
        refuse_unplanned(change(wave), specs, run="demo", step=0, wave=0, key="k")
    assert str(error.value).startswith("object k: ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("wire", "match"),
    [
        ({"schema_version": 1, "attempts": []}, "table schema 1, this rl360 reads 3"),
        ({"schema_version": 3}, "has no list of attempts"),
        ([], "table schema 'list'"),
        ({"schema_version": 3, "attempts": [{"schema_version": 1}]}, "attempt schema version 1, this rl360 reads 3"),
    ],
)
def test_what_is_no_table_is_refused_by_name(wire: Any, match: str) -> None:
    store = MemoryStore()
    ref = put_object(cast(Any, store), "k", pack(wire))
    with pytest.raises(CorruptObject, match=f"object k: {match}"):
        read_table(cast(Any, store), ref)


class Client:
    """Stands in for a rollout client: every attempt ends as it does in `RECORDS`."""

    asked: list[str]

    def __init__(self, _services: Any, config: RunConfig, *_: Any) -> None:
        self.config = config

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def play(self, spec: AttemptSpec, try_index: int) -> Played:
        name = spec.attempt_id(try_index)
        Client.asked.append(name)
        record = next(record for record in RECORDS if record.attempt_id == name)
        return Played(
            spec, try_index, record.started_at, record.finished_at, record.session_id, None, record.outcome, ""
        )

    async def finish(self, played: Played) -> AttemptRecord:
        return next(record for record in RECORDS if record.attempt_id == played.attempt_id)

    async def close_session(self, *_: str) -> None:
        return


def test_a_killed_wave_keeps_what_it_stored_and_ends_with_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_out_task, "RolloutClient", Client)
    Client.asked = []
    store = planned_store()
    done = RECORDS[0]
    put_table(cast(Any, store), attempts_key("demo", 0, 0, 0), [done])
    job = job_of(store, "roll_out-0000")
    produced = roll_out_task._roll_out(job, 0, "run:0")
    assert Client.asked == [RECORDS[1].attempt_id]
    assert [ref.key for ref in produced.objects] == ["demo/steps/000000/waves/0000.msgpack"]
    assert read_table(cast(Any, store), produced.objects[0]) == RECORDS[:SIZE]
    assert len(store.list("demo/steps/000000/attempts/0000/")) == SIZE
    again = roll_out_task._roll_out(job, 0, "run:0")  # killed before its manifest was written
    assert (again.objects, again.counts, Client.asked) == (produced.objects, produced.counts, [RECORDS[1].attempt_id])
    assert read_manifest(cast(Any, store), "demo", 0, "roll_out-0000") is None


def test_a_wave_whose_samples_are_stored_slowly_does_not_play_on_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ended and is not stored fills the session servers."""
    begun: list[str] = []
    store_now = asyncio.Event()

    class Slow(Client):
        async def play(self, spec: AttemptSpec, try_index: int) -> Played:
            begun.append(spec.slot_id)
            return Played(spec, try_index, 0.0, 1.0, "s", None, Outcome.VERIFIER_ERROR, "")

        async def finish(self, played: Played) -> AttemptRecord:
            await store_now.wait()
            record = RECORDS[0]
            return replace(record, attempt_id=played.attempt_id, outcome=played.outcome, verdict=None, stored=None)

    async def wave() -> None:
        running = asyncio.create_task(roll_out_task._run_wave(job, 0, [specs], "run:0", log))
        await asyncio.sleep(0.05)
        assert len(begun) == 4
        store_now.set()
        await running

    monkeypatch.setattr(roll_out_task, "RolloutClient", Slow)
    job = job_of(planned_store(), "roll_out-0000")
    job = replace(
        job, config=RunConfig.parse({"rollout": {"max_concurrent": 2, "wave_size": 2, "max_infra_rate": 1.0}})
    )
    specs = [replace(spec_of(RECORDS[0]), slot_id=f"s000000-g000-a{number:02}") for number in range(9)]
    log = RecordLog(job.store, "demo", 0, 7, every_s=0.0)
    asyncio.run(wave())
    assert len(begun) == len(log.stored) == 9
