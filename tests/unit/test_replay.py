"""A past step computed again over a store in memory: nothing is written, equal is equal to the bit, and an object that
was changed afterwards is found and named."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson
import pytest

from rl360 import step_work
from rl360.agents.records import put_table
from rl360.cli import main
from rl360.config import services as services_module
from rl360.config.run import RunConfig
from rl360.errors import BadInput, Rl360Error, StoreUnavailable
from rl360.harbor.verdict import run_key
from rl360.replay import steps as replay_steps
from rl360.replay import train as replay_train
from rl360.replay.compare import Compared, compared
from rl360.replay.steps import WORK, manifest_of, replay_task
from rl360.store.codec import pack, sha256_hex, unpack
from rl360.store.layout import manifest_key, quarantine_key, run_config_key, step_key, wave_key
from rl360.store.manifest import Manifest, commit_manifest, put_object
from rl360.store.object_store import ObjectStore
from rl360.tasksets.plan import StepPlan, plan_step
from rl360.tasksets.taskset import load_taskset
from tests.unit.ledger_data import PUSH
from tests.unit.memory_store import MemoryStore
from tests.unit.objective_data import attempt
from tests.unit.verdict_data import TOKEN, renamed

GROUPS, SIZE = 3, 2
CONFIG = RunConfig.parse(
    {
        "run": "demo",
        "taskset": {"groups_per_step": GROUPS, "attempts_per_group": SIZE},
        "rollout": {"wave_size": 4},
    }
)
KEY = run_key(TOKEN, "demo")
TRAIN = {"run": "demo", "step": 0, "status": "trained", "version_after": 1, "loss": 0.25, "grad_norm": 1.0}
TRAIN |= {"trained_samples": 6, "trained_tokens": 36, "loss_weight_sum": 1.0, "weights_digest": "ab" * 32}
TRAIN |= {"seconds": 3.5, "incarnation": "first", "layout": "dp2-tp1-pp1-ep1-threads1"}


def commit(store: MemoryStore, task: str, produced: step_work.Produced) -> None:
    manifest = Manifest(
        run="demo",
        step=0,
        task=task,
        objects=produced.objects,
        counts=produced.counts,
        info=produced.info,
        started_at=1.0,
        finished_at=2.5,
    )
    commit_manifest(cast(Any, store), manifest)


def finished_step() -> MemoryStore:
    """A step of three groups whose tasks have all committed."""
    store = MemoryStore()
    s3 = cast(ObjectStore, store)
    store.put(run_config_key("demo"), CONFIG.to_json())
    commit(store, "sample_groups", step_work.sample_groups(s3, CONFIG, 0))
    for wave, specs in enumerate(step_work.load_plan(s3, "demo", 0).waves):
        records = []
        for spec in specs:
            group, index = int(spec.group_id[-3:]), int(spec.slot_id[-2:])
            record = attempt(group, index, float(index), wave=wave)
            assert record.verdict is not None
            verdict = renamed(record.verdict, task_id=spec.task_id)
            records.append(replace(record, task_id=spec.task_id, verdict=verdict))
        table = put_table(s3, wave_key("demo", 0, wave), records)
        commit(store, step_work.wave_task(wave), step_work.Produced([table]))
    commit(store, "collect", step_work.collect(s3, CONFIG, 0, KEY))
    # the samples of `attempt` are of version run:0
    filtered = step_work.filter_groups(s3, CONFIG, 0, "run:0")
    commit(store, "filter_groups", filtered)
    TRAIN["batch_digest"] = filtered.objects[0].sha256  # the same each time
    trained = put_object(s3, step_key("demo", 0, "train.json"), orjson.dumps(TRAIN))
    commit(store, "train", step_work.Produced([trained], info=TRAIN))
    info = {name: value for name, value in PUSH.items() if name != "engines"}
    commit(store, "push_weights", step_work.Produced(counts={"engines": 2}, info=info))
    commit(store, "checkpoint", step_work.Produced())
    commit(store, "report", step_work.close_books(s3, CONFIG, 0)[0])
    return store


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    monkeypatch.setattr(replay_steps, "weight_version", lambda *_: "run:0")
    return finished_step()


def replayed(store: MemoryStore, task: str, config: RunConfig = CONFIG) -> list[Compared]:
    return replay_task(cast(Any, store), config, 0, task, KEY)


def change(store: MemoryStore, name: str, edit: Any, *, manifest: str = "") -> None:
    """Change a stored object, and on request what its task's manifest says of it."""
    key = step_key("demo", 0, name)
    wire = unpack(store.objects[key], key)
    edit(wire)
    data = pack(wire)
    if manifest:
        where = manifest_key("demo", 0, manifest)
        held = store.objects[where]
        store.objects[where] = held.replace(sha256_hex(store.objects[key]).encode(), sha256_hex(data).encode())
        assert store.objects[where] != held
    store.objects[key] = data


@pytest.mark.parametrize("task", WORK)
def test_a_step_computes_to_what_is_stored_and_writes_nothing(store: MemoryStore, task: str) -> None:
    before = dict(store.objects)
    rows = replayed(store, task)
    assert [row.line() for row in rows if not row.equal] == []
    assert [row.object for row in rows][-1] == f"manifests/{task}.json" and len(rows) == 2
    assert store.objects == before


def test_a_plan_of_an_earlier_schema_is_drawn_as_it_was(store: MemoryStore) -> None:
    def earlier(wire: Any) -> None:
        wire["schema_version"] = 1

    change(store, "groups.msgpack", earlier, manifest="sample_groups")
    manifest = orjson.loads(store.objects[manifest_key("demo", 0, "sample_groups")])
    assert manifest["objects"][0]["size_bytes"] == len(store.objects[manifest["objects"][0]["key"]])
    assert [row.line() for row in replayed(store, "sample_groups") if not row.equal] == []


def test_a_quarantined_task_is_not_drawn_and_the_plan_says_what_was_known() -> None:
    """A release, or another quarantine, changes neither a plan that is stored nor what a replay of it draws."""
    store = MemoryStore()
    s3 = cast(ObjectStore, store)
    drawn = list(plan_step(load_taskset(CONFIG.taskset.path), CONFIG, 0).groups.values())
    store.put(quarantine_key("demo", drawn[1]), orjson.dumps({"task": drawn[1], "step": 0}))
    produced = step_work.sample_groups(s3, CONFIG, 0)
    plan = StepPlan.from_wire(unpack(store.objects[produced.objects[0].key], "k"), "k")
    assert plan.quarantined == [drawn[1]] and drawn[1] not in plan.groups.values()
    assert [task for task in plan.groups.values() if task in drawn] == [drawn[0], drawn[2]]
    store.delete(quarantine_key("demo", drawn[1]))
    store.put(quarantine_key("demo", drawn[0]), orjson.dumps({"task": drawn[0], "step": 0}))
    assert step_work.sample_groups(s3, CONFIG, 0) == produced, "killed before its manifest, and tried again"
    commit(store, "sample_groups", produced)
    assert [row.line() for row in replayed(store, "sample_groups") if not row.equal] == []
    later = step_work.sample_groups(s3, CONFIG, 1)
    held = StepPlan.from_wire(unpack(store.objects[later.objects[0].key], "k"), "k")
    assert held.quarantined == [drawn[0]] and drawn[0] not in held.groups.values()


def test_a_plan_of_another_wave_size_is_drawn_as_it_was(store: MemoryStore) -> None:
    resumed = CONFIG.model_copy(update={"rollout": CONFIG.rollout.model_copy(update={"wave_size": 64})})
    assert all(row.equal for row in replayed(store, "sample_groups", resumed))


def test_a_changed_object_is_found_and_named(store: MemoryStore) -> None:
    def edit(wire: Any) -> None:
        wire["samples"][3]["advantage"] += 0.5

    change(store, "filter.msgpack", edit, manifest="filter_groups")
    changed, said = replayed(store, "filter_groups")
    assert (changed.object, changed.path) == ("filter.msgpack", "samples[3].advantage")
    assert (changed.stored, changed.recomputed) == ("1.0", "0.5")
    assert not said.equal and said.path == "objects[0].sha256"  # the manifest was changed to match


def test_a_damaged_input_is_refused_by_its_name(store: MemoryStore) -> None:
    change(store, "records.msgpack", lambda wire: wire["attempts"].pop())
    collected, said = replayed(store, "collect")
    assert collected.path == "attempts[5]" and collected.stored == "(absent)" and said.equal
    (refused,) = replayed(store, "filter_groups")
    assert not refused.equal and "records.msgpack: is not what its manifest committed" in refused.recomputed


def test_a_changed_ledger_and_a_missing_one(store: MemoryStore) -> None:
    change(store, "ledger.msgpack", lambda wire: wire["attempts"][0]["tokens"].update(trained=7))
    assert replayed(store, "report")[0].path == "attempts[0].tokens.trained"
    del store.objects[step_key("demo", 0, "ledger.msgpack")]
    assert replayed(store, "report")[0].stored == "(absent)"
    store.objects[step_key("demo", 0, "ledger.msgpack")] = b"\xc1"
    assert "undecodable" in replayed(store, "report")[0].stored


def test_what_has_not_committed_and_a_store_that_is_away(store: MemoryStore) -> None:
    del store.objects[manifest_key("demo", 0, "report")]
    have = "committed are sample_groups, collect, filter_groups, train$"
    with pytest.raises(BadInput, match=rf"task report of demo step 0 has not committed.*; {have}"):
        replayed(store, "report")
    with pytest.raises(BadInput, match=r"task collect of demo step 7 has not .*; no step of the run has committed$"):
        manifest_of(cast(Any, store), "demo", 7, "collect")
    store.down = True
    with pytest.raises(StoreUnavailable):
        replayed(store, "collect")


def test_where_two_values_first_differ() -> None:
    left = {"a": [1, 2.0, math.nan], "b": np.zeros(2, np.float32), "c": {"d": "x"}}
    assert compared("t", "o", left, {**left, "b": left["b"].copy()}).equal
    for right, path in (
        ({**left, "a": [1, 2, math.nan]}, "a[1]"),
        ({**left, "a": [1, 2.0]}, "a[2]"),
        ({**left, "a": [1, 2.0, 3.0]}, "a[2]"),
        ({**left, "b": np.zeros(2, np.float64)}, "b"),
        ({**left, "c": {"d": "y"}}, "c.d"),
        ({**left, "c": {"d": "x", "e": 1}}, "c.e"),
        ({"a": left["a"], "b": left["b"]}, "c"),
        ([], "(whole)"),
    ):
        assert compared("t", "o", left, right).path == path
    assert replay_steps.compare_bytes("t", "x.json", b'{"a":1,"b":2}', b'{"b":2,"a":1}').path == "(bytes)"


# -- train ------------------------------------------------------------------------------------------------------------


def take(monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], store: MemoryStore) -> list[Compared]:
    monkeypatch.setattr(replay_train, "take_step", lambda *_: answer)
    return replay_train.replay_train(cast(Any, store), cast(Any, None), "demo", 0, 60.0)


def test_a_train_step_is_compared_but_for_when_and_by_whom(monkeypatch: pytest.MonkeyPatch, store: MemoryStore) -> None:
    again = {**TRAIN, "seconds": 9.9, "incarnation": "replay"}
    assert all(row.equal for row in take(monkeypatch, {"result": again}, store))
    for name, value in (("loss", 0.25000000000000006), ("weights_digest", "cd" * 32), ("trained_tokens", 35)):
        row = take(monkeypatch, {"result": {**again, name: value}}, store)[0]
        assert (row.object, row.path, row.recomputed) == ("train.json", name, repr(value))
    (row,) = take(monkeypatch, {"refused": "replay of step 0 of demo: weights differ"}, store)
    assert not row.equal and "weights differ" in row.recomputed


def test_the_process_has_the_layout_the_step_was_recorded_on(tmp_path: Any) -> None:
    argv, env = replay_train.launch("dp2-tp1-pp2-ep2-threads3", "demo", 7, tmp_path / "out", 4711)
    assert argv[argv.index("--nproc-per-node") + 1] == "4" and argv[argv.index("--master-port") + 1] == "4711"
    assert argv[-5:] == ["demo", "7", str(tmp_path / "out"), "2", "2"]
    assert env["OMP_NUM_THREADS"] == "3"
    split = "step 7 of demo was trained with tensor parallel 4 .* with tensor parallel 1 only, .* sequences were split"
    for layout, why in (("dp1-tp4-pp1-ep1-threads1", split), ("odd", "layout 'odd', which this rl360 does not know")):
        with pytest.raises(BadInput, match=why):
            replay_train.launch(layout, "demo", 7, tmp_path / "out", 4711)


@pytest.mark.parametrize(
    ("code", "why"),
    [("import time; time.sleep(60)", "took more than 0.3 s"), ("raise SystemExit('no such thing')", "no such thing")],
)
def test_a_process_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, code: str, why: str) -> None:
    monkeypatch.setattr(replay_train, "launch", lambda *_: ([sys.executable, "-c", code], {}))
    services = cast(Any, SimpleNamespace(home=str(tmp_path)))
    with pytest.raises(Rl360Error, match=why):
        replay_train.take_step(services, "demo", 0, "any", 0.3 if "sleep" in code else 60.0)


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command(store: MemoryStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    services = SimpleNamespace(secrets=lambda: SimpleNamespace(token=TOKEN))
    monkeypatch.setattr(services_module, "load_services", lambda: services)
    monkeypatch.setattr(ObjectStore, "from_services", lambda _services: store)
    answers = {"result": dict(TRAIN)}
    monkeypatch.setattr(replay_train, "take_step", lambda *_: answers)

    def command(*args: str) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as left:
            main(["replay", "demo", *args])
        said = capsys.readouterr()
        return left.value.code, said.out, said.err

    code, out, _ = command("0", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and len(rows) == 10 and all(row["equal"] and row["difference"] is None for row in rows)
    assert [row["task"] for row in rows[::2]] == ["sample_groups", "collect", "filter_groups", "train", "report"]

    answers["result"]["loss"] = 0.5
    code, out, _ = command("0", "--task", "train", "--task", "collect")
    assert code == 1 and "loss: stored 0.25, recomputed 0.5" in out and out.index("collect") < out.index("train")

    for args, said in (
        (("0", "--task", "push_weights"), "--task push_weights: cannot be replayed; choose among sample_groups"),
        (("4",), "demo step 4 has not committed: there is nothing to compare with; the last committed step is 0\n"),
        (("-1",), "--help"),
    ):
        code, _, err = command(*args)
        assert code == 2 and said in err


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_what_cannot_be_replayed_is_said_in_one_line_before_anything_is_computed(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tp: int
) -> None:
    key = manifest_key("demo", 0, "train")
    store.objects[key] = store.objects[key].replace(b"dp2-tp1-", f"dp1-tp{tp}-".encode())
    services = SimpleNamespace(secrets=lambda: SimpleNamespace(token=TOKEN))
    monkeypatch.setattr(services_module, "load_services", lambda: services)
    monkeypatch.setattr(ObjectStore, "from_services", lambda _services: store)
    others = [word for name in WORK for word in ("--task", name)]
    for arguments, code in (([], 2), (["--task", "train"], 2), (others, 0)):
        with pytest.raises(SystemExit) as left:
            main(["replay", "demo", "0", *arguments])
        told = capsys.readouterr()
        assert left.value.code == code
        if code:
            assert told.out == "" and told.err.count("\n") == 1
            assert f"trained with tensor parallel {tp} (dp1-tp{tp}-pp1-ep1-threads1)" in told.err
            assert "replayed with tensor parallel 1 only" in told.err and "(--task)" in told.err
        else:
            assert told.out.count("equal") == told.out.count("\n") > 0
