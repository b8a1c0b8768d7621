"""Hundreds of pushes with seeded faults.

`RL360_PUSH_SEEDS=7,19` runs only those seeds; `python -m tests.unit.push_schedules --seed 7` tells the story of one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.push_schedules import run_many, write_model
from tests.unit.push_world import wired

SEEDS, BATCH = 300, 50


@pytest.fixture
def model_dir(tmp_path: Path) -> Iterator[Path]:
    write_model(tmp_path)
    with wired():
        yield tmp_path


def batches() -> list[list[int]]:
    given = os.environ.get("RL360_PUSH_SEEDS")
    if given:
        return [[int(seed) for seed in given.split(",")]]
    return [list(range(first, first + BATCH)) for first in range(0, SEEDS, BATCH)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seeds", batches(), ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_schedules_of_faults(model_dir: Path, seeds: list[int]) -> None:
    worlds = asyncio.run(run_many(seeds, model_dir))
    broken = {seed: world.violations for seed, world in worlds.items() if world.violations}
    assert broken == {}, f"tell one: python -m tests.unit.push_schedules --seed {min(broken)}"
    # the schedules do what they are for: some pushes fail, engines are lost, people are asked
    told = "\n".join(line for world in worlds.values() for line in world.log)
    for sign in ("ServiceError", "CleanupUnconfirmed", "Killed", "fault e", "is dead"):
        assert sign in told or len(seeds) < BATCH
