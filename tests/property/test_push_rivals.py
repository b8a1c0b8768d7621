"""Two pushes at once, from two hosts that know nothing of each other, interleaved at their points.

One stands still at a point (before or after one of its HTTP or store calls) while the other goes on to a point of its
own, or to its end; then the first goes on, then the second. Engines hang and die meanwhile, and a push before them may
have left no end. Whoever comes later ends no engine of the earlier one that it has not met, nobody serves what was not
confirmed, and the next push brings everybody along. `RL360_RIVAL_SEEDS=7` tells the story of one.
"""

from __future__ import annotations

import asyncio
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rl360.errors import CleanupUnconfirmed
from rl360.weights import push
from rl360.weights.messages import PushRecord
from tests.unit.push_fakes import RUN, Fault
from tests.unit.push_schedules import MEND_DEADLINE_S, write_model
from tests.unit.push_world import _PUSHER, BOUND_S, REPEATABLE, Pusher, World, _PushStore, wired

SEEDS = 96


async def one(world: World, pusher: Pusher) -> object:
    """A push of step 1 by this pusher: its record or its error."""

    async def work() -> PushRecord:
        _PUSHER.set(pusher)
        store, config = _PushStore(pusher), world.config
        return await push.push(store, world.services, RUN, 1, f"{RUN}:2", world.trainer, config)  # type: ignore[arg-type]

    (outcome,) = await asyncio.gather(asyncio.create_task(work()), return_exceptions=True)
    world.say(f"{pusher.host} ended: {outcome!r:.300}")
    return outcome


async def until_held(pusher: Pusher, task: asyncio.Task[object]) -> None:
    """Until it stands still, or is over."""
    held = asyncio.create_task(pusher.holding.wait())
    await asyncio.wait({held, task}, timeout=BOUND_S, return_when=asyncio.FIRST_COMPLETED)
    held.cancel()


async def trouble(world: World, rng: random.Random) -> None:
    """What makes one of them want to end an engine."""
    engine = rng.choice(world.engines)
    kind = rng.choice(("none", "silent once", "silent once", "killed before", "dies", "stops"))
    world.say(f"trouble: {kind}, {engine.name}")
    if kind == "silent once":
        world.arm(Fault(engine.name, "/server_info", "hang", rng.randint(1, 3)))
    elif kind == "killed before":
        world.trainer.version = f"{RUN}:2"
        await world.push(1, die_at=rng.randint(40, 90))
    elif kind == "dies":
        world.soon(rng.randint(1, 120), engine.die)
    elif kind == "stops":
        at = rng.randint(1, 80)
        world.soon(at, engine.stop)
        world.soon(at + rng.randint(1, 60), engine.wake)


async def rivals(seed: int, model_dir: Path) -> World:
    rng = random.Random(seed)
    world = World(model_dir, seed, engines=rng.choice((2, 3)), doors=rng.random() < 0.7)
    async with world.running():
        first = await world.push_until_done(0, deadline_s=MEND_DEADLINE_S)
        points = world.points
        assert isinstance(first, PushRecord), first
        await trouble(world, rng)
        world.rivals, world.trainer.version = True, f"{RUN}:2"
        # half of them right where the sets are frozen and intents are written
        holds = [rng.randint(1, points) if rng.random() < 0.5 else rng.randint(1, 30) for _ in range(2)]
        here, there = Pusher(world, hold_at=holds[0]), Pusher(world, hold_at=holds[1], host="far/away")
        world.say(f"{here.host} stands still at {holds[0]}, {there.host} at {holds[1]}")
        tasks = []
        for pusher in (here, there):
            tasks.append(asyncio.create_task(one(world, pusher)))
            await until_held(pusher, tasks[-1])
        for pusher, task in zip((here, there), tasks, strict=True):
            pusher.go.set()
            await asyncio.wait({task}, timeout=BOUND_S)
        for task in tasks:
            if not task.done():
                world.violate("a push did not end")
            elif not isinstance(task.result(), (PushRecord, CleanupUnconfirmed, *REPEATABLE)):
                world.violate(f"a push ended as {task.result()!r}")
        world.rivals = False
        await mended(world, first)
    return world


async def mended(world: World, first: PushRecord) -> None:
    """All is well again, and the next push has everybody, by the path of the first."""
    world.arm()
    world.at.clear()
    for engine in world.engines:
        engine.wake()
    await asyncio.sleep(0.05)
    for engine in world.engines:
        if not engine.alive or engine.listener is None:
            await engine.start()
    last = await world.push_until_done(9, deadline_s=MEND_DEADLINE_S)
    if not isinstance(last, PushRecord) or len(last.serving) != len(world.engines):
        world.violate(f"with everything mended the push ended as {last!r}")
    elif (last.path, last.calls_per_engine) != (first.path, first.calls_per_engine):
        world.violate(f"the path changed: {first.way}, {last.way}")


@pytest.mark.timeout(900)
def test_two_pushers_at_once(tmp_path: Path) -> None:
    write_model(tmp_path)
    given = os.environ.get("RL360_RIVAL_SEEDS")
    seeds = [int(seed) for seed in given.split(",")] if given else list(range(SEEDS))

    async def all_of_them() -> dict[int, World]:
        # one that stands still in a call of the store has a thread
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(64))
        limit = asyncio.Semaphore(8)

        async def tell(seed: int) -> World:
            async with limit:
                return await rivals(seed, tmp_path)

        return dict(zip(seeds, await asyncio.gather(*map(tell, seeds)), strict=True))

    with wired():
        worlds = asyncio.run(all_of_them())
    if given:
        print("\n".join(line for world in worlds.values() for line in world.log))
    assert {seed: world.violations for seed, world in worlds.items() if world.violations} == {}
    told = "\n".join(line for world in worlds.values() for line in world.log)
    for sign in ("taken", "PushRecord", "is dead"):  # they do meet
        assert sign in told or given
