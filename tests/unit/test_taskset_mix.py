"""Shares of domains and difficulty from history: pure, seeded, and the same wherever a run was interrupted."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360 import step_work
from rl360.config.run import RunConfig
from rl360.errors import BadInput, CorruptObject
from rl360.ledger.outcomes import HAS_VERDICT, Outcome
from rl360.store.codec import pack, unpack
from rl360.tasksets.mix import domains_at, learned, undecided
from rl360.tasksets.plan import StepPlan, plan_step
from rl360.tasksets.taskset import TaskEntry, TaskSet, draw, instead
from tests.unit import ledger_run
from tests.unit.memory_store import MemoryStore

WEIGHTS = st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0.01, 100), min_size=1, max_size=8)


def mixed(**domains: int) -> TaskSet:
    """So many tasks of each domain."""
    ids = [(f"{domain}{i:02}", domain) for domain, count in domains.items() for i in range(count)]
    return TaskSet("mixed", {name: TaskEntry(name, Path("/t"), domain) for name, domain in sorted(ids)}, "d")


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.integers(0, 600), st.integers(1, 60))
def test_positions_are_the_same_wherever_they_are_asked_from(weights: dict[str, float], start: int, n: int) -> None:
    whole = domains_at(weights, 0, start + n)
    assert domains_at(weights, start, n) == whole[start:]
    seen: Counter[str] = Counter()
    for domain, before in whole:
        assert before == seen[domain]
        seen[domain] += 1


@settings(max_examples=40, deadline=None)
@given(WEIGHTS, st.integers(1, 300))
def test_each_domain_has_its_share_at_every_position(weights: dict[str, float], n: int) -> None:
    total = sum(weights.values())
    seen: Counter[str] = Counter()
    for position, (domain, _) in enumerate(domains_at(weights, 0, n), 1):
        seen[domain] += 1
        slack = 1 + len(weights) / 2 * max(weights.values()) / total
        assert all(abs(seen[name] - position * weight / total) <= slack for name, weight in weights.items())


def test_a_far_position_costs_no_walk() -> None:
    assert len(domains_at({"a": 0.1, "b": 0.2, "c": 0.7}, 10**12, 5)) == 5


def test_weights_are_kept_and_each_domain_passes_over_its_tasks() -> None:
    taskset = mixed(a=3, b=30, c=7)
    weights = {"a": 5, "b": 5, "c": 0}
    drawn = [name for step in range(30) for name in draw(taskset, 1, step, 8, weights)]
    assert Counter(name[0] for name in drawn) == {"a": 120, "b": 120}
    of_b = [name for name in drawn if name[0] == "b"]
    assert [len(set(of_b[i : i + 30])) for i in range(0, 120, 30)] == [30] * 4
    assert draw(taskset, 1, 7, 8, weights) == drawn[56:64]
    assert draw(taskset, 2, 7, 8, weights) != drawn[56:64]


def test_without_weights_the_cursor_is_what_it_was() -> None:
    """A run that began before there were weights goes on with the same tasks."""
    taskset = mixed(a=3, b=4)
    order = list(range(7))
    random.Random("cursor:5:0").shuffle(order)
    assert draw(taskset, 5, 0, 7) == [taskset.task_ids[i] for i in order]
    assert draw(taskset, 5, 0, 7, {}) == draw(taskset, 5, 0, 7)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"a": 1}, "taskset.weights: b is missing; weigh each domain (a, b)"),
        ({"a": 1, "b": 1, "z": 1}, "taskset.weights: z is unknown; weigh each domain (a, b)"),
        ({"y": 1, "z": 1, "a": 1}, "taskset.weights: b is missing, y is unknown, z is unknown; weigh"),
    ],
)
def test_weights_of_other_domains_are_refused(weights: dict[str, float], words: str) -> None:
    with pytest.raises(BadInput) as refused:
        draw(mixed(a=2, b=2), 0, 0, 1, weights)
    assert words in str(refused.value)


@pytest.mark.parametrize("weights", [{"a": 0}, {"a": -1}, {"a": float("nan")}, {"a": "x"}])
def test_weights_that_weigh_nothing_are_refused(weights: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="weights"):
        RunConfig.parse({"taskset": {"weights": weights}})


def record(task: str, outcome: Outcome) -> Any:
    return SimpleNamespace(task_id=task, outcome=outcome)


def test_what_infrastructure_lost_teaches_nothing() -> None:
    lost = [record("a", outcome) for outcome in Outcome if outcome not in HAS_VERDICT]
    assert learned({}, lost) == {}
    assert learned({"a": [1.0, 2.0]}, lost) == {"a": [1.0, 2.0]}
    tried = [*lost, record("a", Outcome.PASSED), record("a", Outcome.FAILED), record("b", Outcome.TRUNCATED)]
    assert learned({"a": [4.0, 8.0], "c": [1.0, 1.0]}, tried) == {"a": [3.0, 6.0], "b": [0.0, 1.0], "c": [1.0, 1.0]}


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.integers(1, 70), st.integers(0, 9))
def test_no_task_comes_again_before_all_came(size: int, n: int, seed: int) -> None:
    ids = [f"t{i:02}" for i in range(size)]
    drawn = undecided(ids, {"t00": (8, 8)}, n, f"key{seed}")
    assert len(drawn) == n and drawn == undecided(ids, {"t00": (8, 8)}, n, f"key{seed}")
    for start in range(0, n, size):
        part = drawn[start : start + size]
        assert len(set(part)) == len(part)


def test_tasks_whose_attempts_disagree_come_more_often() -> None:
    ids = [f"t{i}" for i in range(30)]
    history = dict.fromkeys(ids[:10], (0.0, 32.0)) | dict.fromkeys(ids[10:20], (32.0, 32.0))
    history |= dict.fromkeys(ids[20:], (16.0, 32.0))
    drawn = Counter(int(name[1:]) // 10 for seed in range(100) for name in undecided(ids, history, 5, str(seed)))
    assert drawn[2] > 6 * drawn[0] > 0 and drawn[2] > 6 * drawn[1] > 0


def test_difficulty_keeps_the_shares_of_domains() -> None:
    taskset = mixed(a=10, b=10)
    history = {name: (0.0, 100.0) for name in taskset.task_ids if name[0] == "a"}
    drawn = draw(taskset, 0, 3, 12, {"a": 2, "b": 1}, history)
    assert Counter(name[0] for name in drawn) == {"a": 8, "b": 4}
    assert drawn == draw(taskset, 0, 3, 12, {"a": 2, "b": 1}, history)
    assert drawn != draw(taskset, 0, 4, 12, {"a": 2, "b": 1}, history)


def test_a_plan_carries_what_was_known_and_the_next_learns_from_it() -> None:
    taskset = mixed(a=6)
    config = RunConfig.parse({"taskset": {"groups_per_step": 2, "attempts_per_group": 2, "difficulty": "history"}})
    first = plan_step(taskset, config, 0)
    assert first == plan_step(taskset, RunConfig.parse({"taskset": {"groups_per_step": 2, "attempts_per_group": 2}}), 0)
    assert "history" not in first.to_wire()
    task = next(iter(first.groups.values()))
    records = [record(task, Outcome.PASSED), record(task, Outcome.FAILED)]
    second = plan_step(taskset, config, 1, (first, records))
    assert second.history == {task: [1.0, 2.0]}
    assert StepPlan.from_wire(unpack(pack(second.to_wire()), "k"), "k") == second
    assert plan_step(taskset, config, 2, (second, records)).history == {task: [1.5, 3.0]}
    with pytest.raises(CorruptObject):
        StepPlan.from_wire(second.to_wire() | {"history": 7}, "k")


def test_a_resumed_run_draws_by_difficulty_what_it_would_have_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """From what is stored of the step before, and nothing else: no counter lives in a process."""
    run = ledger_run.CONFIG.model_dump(mode="json")
    config = RunConfig.parse(run | {"taskset": run["taskset"] | {"difficulty": "history"}})
    monkeypatch.setattr(ledger_run, "CONFIG", config)
    store = MemoryStore()
    ledger_run.add_step(store, 0, until="collect")
    elsewhere = MemoryStore()
    elsewhere.objects.update(store.objects)
    first, second = (step_work.sample_groups(cast(Any, each), config, 1) for each in (store, elsewhere))
    assert first.objects[0].sha256 == second.objects[0].sha256
    ledger_run.commit(store, 1, "sample_groups", first)
    plan = step_work.load_plan(cast(Any, store), "demo", 1)
    drawn = step_work.load_plan(cast(Any, store), "demo", 0).groups
    assert plan.history.keys() == set(drawn.values())
    assert sum(count for _, count in plan.history.values()) == 15  # of 16 attempts one stayed lost


# -- tasks in quarantine ----------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_another_of_its_domain_is_drawn_for_a_task_in_quarantine(data: st.DataObject) -> None:
    taskset = mixed(**data.draw(st.dictionaries(st.sampled_from("abc"), st.integers(1, 6), min_size=1)))
    domains = list(taskset.by("domain"))
    asked: list[Any] = [data.draw(st.integers(0, 5)), data.draw(st.integers(0, 9)), data.draw(st.integers(1, 20))]
    asked.append(data.draw(st.none() | st.just({name: 1.0 + index for index, name in enumerate(domains)})))
    asked.append(data.draw(st.sampled_from([None, {}, {taskset.task_ids[0]: [1.0, 2.0]}])))
    banned = data.draw(st.sets(st.sampled_from(taskset.task_ids)))
    plain = draw(taskset, *asked)
    if len(banned) == len(taskset):
        with pytest.raises(BadInput, match="all tasks of mixed are in quarantine: `rl360 tasks release`"):
            instead(taskset, plain, banned, asked[3] or {})
        return
    drawn = instead(taskset, plain, banned, asked[3] or {})
    assert drawn == instead(taskset, plain, sorted(banned), asked[3] or {}) and not banned & set(drawn)
    left = {name for name in domains if not set(taskset.by("domain")[name]) <= banned}
    for here, was in zip(drawn, plain, strict=True):
        assert here[0] == was[0] or was[0] not in left, "its domain keeps its share while it has a task left"
        assert here == was or was in banned, "all others keep their places"


def test_who_is_drawn_for_others_comes_no_more_often_than_it_must() -> None:
    taskset = mixed(a=12, b=1)
    for step in range(20):
        plain = draw(taskset, 0, step, 13)
        banned = plain[:6]
        drawn = Counter(instead(taskset, plain, banned, {}))
        most = 2 if "b00" not in banned else 3
        assert max(drawn.values()) <= most and len(drawn) == 13 - len(banned)


def test_tasks_of_a_domain_without_weight_are_never_drawn_for_others() -> None:
    taskset = mixed(a=2, b=2)
    for step in range(9):
        plain = draw(taskset, 0, step, 4, {"a": 1, "b": 0})
        assert instead(taskset, plain, ["a00"], {"a": 1, "b": 0}) == ["a01"] * 4
        with pytest.raises(BadInput, match="in quarantine"):
            instead(taskset, plain, ["a00", "a01"], {"a": 1, "b": 0})
