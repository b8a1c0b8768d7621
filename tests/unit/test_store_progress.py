"""How far a run is follows from its manifests alone."""

from __future__ import annotations

import pytest

from rl360.errors import BadInput
from rl360.replay.steps import finished_steps
from rl360.store.manifest import Manifest, commit_manifest
from rl360.store.progress import next_step, refuse_nonfinite, step_folders, weight_version
from tests.unit.memory_store import MemoryStore


def commit(store: MemoryStore, step: int, task: str, **info: object) -> None:
    commit_manifest(store, Manifest(run="r1", step=step, task=task, info=info))  # type: ignore[arg-type]


def test_a_new_run_starts_at_its_first_step() -> None:
    store = MemoryStore()
    assert next_step(store, "r1") == 0
    assert step_folders(store, "r1") == finished_steps(store, "r1") == []
    assert weight_version(store, "r1", 0) == "r1:0"


def test_a_step_is_finished_by_its_last_task_only() -> None:
    store = MemoryStore()
    for task in ("sample_groups", "collect", "train", "push_weights", "checkpoint"):
        commit(store, 0, task, version_after=1)
        assert next_step(store, "r1") == 0
    commit(store, 0, "report")
    assert next_step(store, "r1") == 1
    commit(store, 1, "sample_groups")
    assert next_step(store, "r1") == 1
    assert step_folders(store, "r1") == [0, 1]
    assert finished_steps(store, "r1") == [0]


def test_another_runs_steps_do_not_count() -> None:
    store = MemoryStore()
    commit(store, 0, "report")
    commit_manifest(store, Manifest(run="r1-b", step=7, task="report"))
    assert next_step(store, "r1") == 1


def test_numbers_not_names_order_the_steps() -> None:
    store = MemoryStore()
    for step in (9, 10, 99, 100):
        commit(store, step, "report")
    assert next_step(store, "r1") == 101


def test_the_version_counts_applied_steps_not_steps() -> None:
    store = MemoryStore()
    commit(store, 0, "train", version_after=1)
    commit(store, 1, "train", version_after=1)  # nothing to train: no optimizer step
    assert weight_version(store, "r1", 1) == "r1:1"
    assert weight_version(store, "r1", 2) == "r1:1"


def test_a_step_before_which_nothing_was_trained_is_refused() -> None:
    with pytest.raises(BadInput, match="step 5 of r1 cannot start: step 4 has not trained") as error:
        weight_version(MemoryStore(), "r1", 5)
    assert "\n" not in str(error.value)


def test_steps_that_are_not_finite_stop_the_run_once_they_are_in_a_row() -> None:
    store = MemoryStore()
    for step, status in enumerate(
        ("nonfinite", "nonfinite", "trained", "nonfinite", "empty", "nonfinite", "nonfinite")
    ):
        commit(store, step, "train", status=status, version_after=1)
        refuse_nonfinite(store, "r1", step + 1, 3)  # type: ignore[arg-type]
    commit(store, 7, "train", status="nonfinite", version_after=1)
    with pytest.raises(
        BadInput, match=r"steps 5 to 7 was not finite.* after 3 in a row \(trainer.max_nonfinite_steps\)"
    ):
        refuse_nonfinite(store, "r1", 8, 3)  # type: ignore[arg-type]
    refuse_nonfinite(store, "r1", 8, 4)  # type: ignore[arg-type]  # raised, the run goes on
    refuse_nonfinite(store, "r1", 7, 3)  # type: ignore[arg-type]  # a step that is not closed yet is closed
    with pytest.raises(BadInput, match="steps 7 to 7"):
        refuse_nonfinite(store, "r1", 8, 1)  # type: ignore[arg-type]
    refuse_nonfinite(MemoryStore(), "r1", 0, 1)  # type: ignore[arg-type]
