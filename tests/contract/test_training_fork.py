"""A fork goes on from its parent's weights and moments: under the parent's own config it takes the parent's steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from rl360.config.run import RunConfig
from rl360.store.layout import run_config_key
from rl360.tasksets.plan import plan_step
from rl360.tasksets.taskset import load_taskset
from rl360.training import saved
from rl360.training.director import Director, StepBody
from rl360.training.megatron import alone
from rl360.training.megatron.model import Layout
from rl360.training.replica import Replica
from tests.unit.memory_store import MemoryStore
from tests.unit.training_data import put_batch, samples_of, write_model

pytestmark = pytest.mark.contract  # the real Megatron-core


def new_trainer(store: MemoryStore) -> Director:
    replica = Replica(cast(Any, store), Layout(), "an incarnation")
    return Director(replica, cast(Any, None), replica.execute)


def start(store: MemoryStore, run: str, model: Path, **fields: Any) -> RunConfig:
    config = RunConfig.parse({"run": run, "model": {"path": str(model)}, **fields})
    store.put(run_config_key(run), config.to_json())
    return config


def step(trainer: Director, store: MemoryStore, run: str, number: int, data: int) -> Any:
    return trainer.put_step(number, StepBody(**put_batch(store, run, number, samples_of(data, 4))))


def test_a_fork_continues_weights_moments_and_adams_count(tmp_path: Path) -> None:
    model, store = write_model(tmp_path / "model"), MemoryStore()
    with alone.single_process():
        parent = start(store, "r1", model)
        trainer = new_trainer(store)
        for number in (0, 1):
            step(trainer, store, "r1", number, number)
        trainer.checkpoint("r1", 1)
        third = step(trainer, store, "r1", 2, 2)
        origin = saved.parent_at(cast(Any, store), parent, None).model_dump()
        start(store, "f1", model, parent=origin)
        opened = trainer.open_run("f1")
        assert (opened["version"], opened["next_step"]) == (0, 0)
        assert opened["weights_digest"] == origin["weights_digest"]
        first = step(trainer, store, "f1", 0, 2)
        assert (first.version_after, first.weights_digest) == (1, third.weights_digest)
        # memory lost: replayed from the parent's checkpoint; then from one of its own, where Adam still counts on
        assert new_trainer(store).open_run("f1")["weights_digest"] == third.weights_digest
        trainer.checkpoint("f1", 0)
        fourth, second = step(new_trainer(store), store, "r1", 3, 3), step(new_trainer(store), store, "f1", 1, 3)
        assert second.weights_digest == fourth.weights_digest
        start(store, "f2", model, parent=origin, trainer={"lr": 1e-2})
        changed = step(trainer, store, "f2", 0, 2)
        assert changed.weights_digest != third.weights_digest
        start(store, "f3", model, parent=origin | {"updates_before": 0})
        assert step(trainer, store, "f3", 0, 2).weights_digest != third.weights_digest  # so the count matters


def test_a_fork_draws_the_tasks_that_come_next_in_its_parent() -> None:
    taskset, parent = load_taskset("builtin:chores"), RunConfig(run="r1", seed=3)
    origin = {"run": "r1", "step": 4, "weights_digest": "0" * 64, "steps_before": 5, "updates_before": 5}
    fork = RunConfig.parse({"run": "f1", "seed": 3, "parent": origin})
    for number in (0, 1):
        drawn = list(plan_step(taskset, fork, number).groups.values())
        assert drawn == list(plan_step(taskset, parent, number + 5).groups.values())
    assert list(plan_step(taskset, fork, 0).groups) == list(plan_step(taskset, parent, 0).groups)


@pytest.mark.parametrize("field", ["run", "step", "weights_digest", "steps_before", "updates_before"])
def test_a_parent_is_named_whole(field: str) -> None:
    origin: dict[str, Any] = {
        "run": "r1",
        "step": 4,
        "weights_digest": "0" * 64,
        "steps_before": 5,
        "updates_before": 5,
    }
    del origin[field]
    with pytest.raises(Exception, match=field):
        RunConfig.parse({"run": "f1", "parent": origin})
