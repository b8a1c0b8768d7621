"""The plan of a step: every attempt once, groups whole, the same for the same seed, and refused when it is damaged."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.config.run import RunConfig
from rl360.errors import CorruptObject
from rl360.store.codec import pack, unpack
from rl360.tasksets.chores import draw_chore
from rl360.tasksets.harbor_files import write_task
from rl360.tasksets.plan import StepPlan, plan_step
from rl360.tasksets.taskset import TaskSet, load_taskset

CHORES = load_taskset("builtin:chores")


def config(groups: int = 4, attempts: int = 8, wave: int = 64, seed: int = 0) -> RunConfig:
    return RunConfig.parse(
        {
            "seed": seed,
            "taskset": {"groups_per_step": groups, "attempts_per_group": attempts},
            "rollout": {"wave_size": wave},
        }
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(2, 12), st.integers(1, 100), st.integers(0, 50))
def test_every_attempt_is_in_exactly_one_wave(groups: int, attempts: int, wave: int, step: int) -> None:
    plan = plan_step(CHORES, config(groups, attempts, wave), step)
    specs = [spec for part in plan.waves for spec in part]
    assert len(specs) == plan.attempts == groups * attempts
    assert len({spec.slot_id for spec in specs}) == len(specs)
    assert all(0 < len(part) <= wave for part in plan.waves)
    assert {spec.group_id: spec.task_id for spec in specs} == plan.groups
    for group in plan.groups:
        assert sum(spec.group_id == group for spec in specs) == attempts
    if wave >= attempts:  # a group shares its prompt in one engine's cache: it is never cut where it fits
        for part in plan.waves:
            assert all(sum(spec.group_id == group for spec in part) in (0, attempts) for group in plan.groups)


def test_ids_name_step_group_slot_and_try() -> None:
    spec = plan_step(CHORES, config(), 12).waves[0][9]
    assert spec.slot_id == "s000012-g001-a01"
    assert spec.attempt_id(3) == "s000012-g001-a01-t3"
    assert spec.task_id == CHORES[spec.task_id].task_id
    assert spec.task_dir == str(CHORES[spec.task_id].path)


def test_a_plan_follows_from_its_seed_and_step_alone() -> None:
    assert plan_step(CHORES, config(), 3) == plan_step(CHORES, config(), 3)
    assert plan_step(CHORES, config(), 3).groups != plan_step(CHORES, config(), 4).groups
    assert list(plan_step(CHORES, config(), 3).groups.values()) != list(
        plan_step(CHORES, config(seed=1), 3).groups.values()
    )


def test_the_pace_does_not_change_what_is_drawn() -> None:
    """`wave_size` is operational: a resume may change it, and the attempts stay the same."""
    one, other = plan_step(CHORES, config(wave=64), 3), plan_step(CHORES, config(wave=8), 3)
    assert one.groups == other.groups
    assert [s for part in one.waves for s in part] == [s for part in other.waves for s in part]


def test_a_task_drawn_twice_is_two_groups() -> None:
    plan = plan_step(CHORES, config(groups=2 * len(CHORES)), 0)
    assert len(plan.groups) == 2 * len(CHORES)
    assert sorted(plan.groups.values()) == sorted([*CHORES.task_ids, *CHORES.task_ids])


def test_a_plan_comes_back() -> None:
    plan = plan_step(CHORES, config(), 0)
    assert StepPlan.from_wire(unpack(pack(plan.to_wire()), "key"), "key") == plan


def two_of_an_image(root: Path, tag: str = "3.12") -> TaskSet:
    for name, image in (("a", f"python:{tag}"), ("b", f"python:{tag}"), ("c", "")):
        write_task(root, name, draw_chore(random.Random(name), "append"))
        toml = root / name / "task.toml"
        toml.write_text(toml.read_text().replace("[environment]\n", f'[environment]\ndocker_image = "{image}"\n'))
    return load_taskset(str(root))


def test_a_plan_carries_the_images_that_tasks_share(tmp_path: Path) -> None:
    taskset = two_of_an_image(tmp_path)
    plan = plan_step(taskset, config(groups=3), 0)
    images = {spec.task_id: spec.image for spec in plan.waves[0]}
    assert images == {"rl360/a": "python:3.12", "rl360/b": "python:3.12", "rl360/c": ""}
    wire = unpack(pack(plan.to_wire()), "key")
    assert StepPlan.from_wire(wire, "key") == plan and wire["schema_version"] == 2
    assert all("image" not in spec for spec in wire["waves"][0] if spec["task_id"] == "rl360/c")


def test_a_plan_is_planned_again_with_the_images_it_had(tmp_path: Path) -> None:
    first, mended = two_of_an_image(tmp_path / "a"), two_of_an_image(tmp_path / "b", "3.13")
    assert first.digest == mended.digest, "so the run goes on"
    old = plan_step(first, config(groups=3), 0)
    again = plan_step(mended, config(groups=3), 0, like=old)
    assert [spec.image for spec in again.waves[0]] == [spec.image for spec in old.waves[0]]
    assert {spec.image for spec in plan_step(mended, config(groups=3), 1).waves[0]} == {"python:3.13", ""}


def test_a_plan_of_before_there_were_images_is_read_and_planned_again_as_it_was(tmp_path: Path) -> None:
    taskset = two_of_an_image(tmp_path)
    old = plan_step(taskset, config(groups=3), 0, like=StepPlan({}, [], schema=1))
    wire = old.to_wire()
    assert wire["schema_version"] == 1 and not [spec for spec in wire["waves"][0] if "image" in spec]
    assert StepPlan.from_wire(unpack(pack(wire), "key"), "key") == old
    assert old.groups == plan_step(taskset, config(groups=3), 0).groups


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 3},
        {"groups": None},
        {"groups": 7},
        {"waves": None},
        {"waves": [7]},
        {"waves": [[{"slot_id": "a"}]]},
        {"waves": [[{"surprise": 1}]]},
        {"quarantined": 7},
    ],
)
def test_a_damaged_plan_names_its_object(change: dict[str, Any]) -> None:
    wire = plan_step(CHORES, config(groups=1), 0).to_wire() | change
    with pytest.raises(CorruptObject, match="object r1/groups"):
        StepPlan.from_wire(wire, "r1/groups.msgpack")


@pytest.mark.parametrize("wire", [None, [], {}, "x"])
def test_what_is_no_plan_is_refused(wire: Any) -> None:
    with pytest.raises(CorruptObject, match="is not a step plan of schema 1 or 2"):
        StepPlan.from_wire(wire, "key")
