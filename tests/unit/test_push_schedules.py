"""Hundreds of pushes with seeded faults, and one with its pusher cancelled and killed at each of its points.

`RL360_PUSH_SEEDS=7,19` runs only those seeds; `python -m tests.unit.push_schedules --seed 7` tells the story of one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl360.weights.messages import PushRecord
from tests.unit.push_schedules import MEND_DEADLINE_S, run_many, write_model
from tests.unit.push_world import Killed, World, wired

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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seeds", batches(), ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_schedules_of_faults(model_dir: Path, seeds: list[int]) -> None:
    worlds = asyncio.run(run_many(seeds, model_dir))
    broken = {seed: world.violations for seed, world in worlds.items() if world.violations}
    assert broken == {}, f"tell one: python -m tests.unit.push_schedules --seed {min(broken)}"
    # the schedules do what they are for: some pushes fail, engines are lost, people are asked
    told = "\n".join(line for world in worlds.values() for line in world.log)
    for sign in ("ServiceError", "Killed", "fault e", "GONE" if len(seeds) == 1 else "PushRecord"):
        assert sign in told or len(seeds) < BATCH


async def _once(model_dir: Path, **how: int) -> World:
    """A push that is cancelled or killed, then the task's retry, which must bring everybody along."""
    world = World(model_dir, engines=2, deadline_s=MEND_DEADLINE_S)
    async with world.running():
        await world.push_until_done(0)
        outcome = await world.push(1, **how)
        if not how:
            world.points_of_a_push = world.points
            return world
        if isinstance(outcome, PushRecord):
            return world  # it was over before that point
        if not isinstance(outcome, (Killed, asyncio.CancelledError)):
            world.violate(f"{how}: the push ended as {outcome!r}")
        again = await world.push_until_done(1)
        if not isinstance(again, PushRecord) or len(again.serving) != 2:
            world.violate(f"{how}: the retry ended as {again!r}")
    return world


@pytest.mark.timeout(300)
@pytest.mark.parametrize("end", ["cancel_at", "die_at"])
def test_a_push_that_ends_at_any_of_its_points(model_dir: Path, end: str) -> None:
    """Cancelled there it leaves nothing paused and nothing open; killed there the next one takes its engines over."""

    async def all_points() -> list[World]:
        clean = await _once(model_dir)
        limit = asyncio.Semaphore(8)

        async def one(number: int) -> World:
            async with limit:
                return await _once(model_dir, **{end: number})

        return list(await asyncio.gather(*map(one, range(1, clean.points_of_a_push + 1))))

    worlds = asyncio.run(all_points())
    assert len(worlds) > 60
    assert [world.violations for world in worlds if world.violations] == []
