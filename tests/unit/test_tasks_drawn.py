"""`rl360 tasks drawn`: which tasks and domains a step drew, and what it knew of them."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
import typer
from typer.testing import CliRunner

from rl360 import step_work
from rl360.commands import tasks as tasks_command
from rl360.config.freeze import freeze_config
from rl360.config.run import RunConfig
from tests.unit import ledger_run
from tests.unit.memory_store import MemoryStore


def drawn(store: MemoryStore, monkeypatch: pytest.MonkeyPatch, *argv: str) -> str:
    monkeypatch.setattr(tasks_command, "_store", lambda: store)
    app = typer.Typer()
    app.callback()(lambda: None)
    tasks_command.register(app)
    result = CliRunner().invoke(app, ["tasks", "drawn", "demo", *argv])
    return result.output + str(result.exception or "")


@pytest.mark.parametrize("difficulty", ["history", "ignore"])
def test_drawn_tells_what_a_step_knew(monkeypatch: pytest.MonkeyPatch, difficulty: str) -> None:
    run = ledger_run.CONFIG.model_dump(mode="json")
    config = RunConfig.parse(run | {"taskset": run["taskset"] | {"difficulty": difficulty}})
    monkeypatch.setattr(ledger_run, "CONFIG", config)
    store = MemoryStore()
    freeze_config(cast(Any, store), config, default_model="/m")
    assert "demo has drawn no tasks for step 0; it has done 0 steps" in drawn(store, monkeypatch)
    ledger_run.add_step(store, 0)
    first = json.loads(drawn(store, monkeypatch, "--step", "0", "--json"))
    assert (first["step"], len(first["tasks"]), sum(first["domains"].values())) == (0, 4, 4)
    assert all(task["pass_rate"] is None and task["weight"] is None for task in first["tasks"]), "nothing was known"
    plan = step_work.sample_groups(cast(Any, store), config, 1)
    ledger_run.commit(store, 1, "sample_groups", plan)
    groups = step_work.load_plan(cast(Any, store), "demo", 1)
    told = json.loads(drawn(store, monkeypatch, "--json"))
    assert told["step"] == 1 and {task["task"] for task in told["tasks"]} == set(groups.groups.values())
    assert all((task["weight"] is not None) is (difficulty == "history") for task in told["tasks"])
    assert {task["task"]: task["pass_rate"] for task in told["tasks"]} == {
        name: known and known[0] / known[1] for name in groups.groups.values() for known in [groups.history.get(name)]
    }
    shown = drawn(store, monkeypatch)
    assert f"demo step 1: 4 groups of {len(told['tasks'])} tasks; difficulty {difficulty}" in shown
    assert "demo has drawn no tasks for step 7" in drawn(store, monkeypatch, "--step", "7")


def test_what_was_known_is_shown_as_a_rate_and_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ledger_run.CONFIG.model_dump(mode="json")
    config = RunConfig.parse(run | {"taskset": run["taskset"] | {"difficulty": "history", "groups_per_step": 32}})
    monkeypatch.setattr(ledger_run, "CONFIG", config)
    store = MemoryStore()
    freeze_config(cast(Any, store), config, default_model="/m")
    monkeypatch.setattr(ledger_run, "tries", lambda *_: [])
    first = step_work.sample_groups(cast(Any, store), config, 0)
    ledger_run.commit(store, 0, "sample_groups", first)
    plan = step_work.load_plan(cast(Any, store), "demo", 0)
    task = plan.groups["s000000-g000"]
    monkeypatch.setattr(step_work, "load_plan", lambda *_: type(plan)(plan.groups, plan.waves, {task: [1.0, 4.0]}))
    assert f"{task}  x1  passed 25%" in drawn(store, monkeypatch, "--step", "0")
