"""A push cancelled, and killed, at each of its points: before and after every HTTP call and every call of the store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rl360.weights.messages import PushRecord
from tests.unit.push_schedules import MEND_DEADLINE_S, write_model
from tests.unit.push_world import REPEATABLE, Killed, World, wired


async def _once(model_dir: Path, **how: int) -> World:
    """A push that is cancelled or killed, then the task's retry, which must bring everybody along."""
    # an engine that answers later than that is fenced, and the retry cannot bring it along
    world = World(model_dir, engines=2, deadline_s=MEND_DEADLINE_S)
    async with world.running():
        outcome = await world.push(0, **how)
        world.points_of_a_push = world.points
        if isinstance(outcome, PushRecord):
            return world  # it was over before that point
        if not isinstance(outcome, (Killed, asyncio.CancelledError, *REPEATABLE)):  # a busy machine fails some before
            world.violate(f"{how}: the push ended as {outcome!r}")
        again = await world.push_until_done(0, deadline_s=MEND_DEADLINE_S)
        if not isinstance(again, PushRecord) or len(again.serving) != 2:
            world.violate(f"{how}: the retry ended as {again!r}")
    return world


@pytest.mark.timeout(900)
@pytest.mark.parametrize("end", ["cancel_at", "die_at"])
def test_a_push_that_ends_at_any_of_its_points(tmp_path: Path, end: str) -> None:
    """Cancelled there it leaves nothing paused and nothing open; killed there the next one takes its engines over."""
    write_model(tmp_path)

    async def all_points() -> list[World]:
        points = (await _once(tmp_path)).points_of_a_push
        limit = asyncio.Semaphore(8)

        async def one(number: int) -> World:
            async with limit:
                return await _once(tmp_path, **{end: number})

        return list(await asyncio.gather(*map(one, range(1, points + 1))))

    with wired():
        worlds = asyncio.run(all_points())
    assert len(worlds) > 60
    assert [world.violations for world in worlds if world.violations] == []
