"""Seeded schedules of faults for the push. `python -m tests.unit.push_schedules --seed N` runs one and tells its story.

A schedule is a fleet, then a few pushes with one to three things that go wrong before or during each, tried again as
the task does; then everything that is broken is mended, and the next push must bring all engines along by the same path
with as many calls as at the start. `run` returns the world with what was found wrong in `violations`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from rl360.errors import CleanupUnconfirmed
from rl360.weights import fence
from rl360.weights.messages import PushRecord
from tests.unit.push_fakes import TENSORS, Engine, Fault
from tests.unit.push_world import REPEATABLE, Killed, World, wired

_ANY = ("hang", "hang_done", "stop", "slow", "late", "500", "500_done", "die", "die_done", "restart", "cut", "trickle")
_TALK = ("html", "list")
KINDS: dict[str, tuple[str, ...]] = {
    "/server_info": (*_ANY, *_TALK, "lie"),
    "/model_info": (*_ANY, *_TALK, "lie"),
    "/weights_checker": (*_ANY, *_TALK, "lie", "fewer", "no"),
    "/pause_generation": (*_ANY, *_TALK, "lie", "no"),
    "/continue_generation": (*_ANY, *_TALK, "no"),
    "/update_weight_version": (*_ANY, *_TALK, "lie", "no"),
    "/flush_cache": _ANY,
    "/init_weights_update_group": (*_ANY, "lie", "no"),
    "/destroy_weights_update_group": (*_ANY, "no"),
    "/begin_weight_update": (*_ANY, "lie", "no"),
    "/end_weight_update": (*_ANY, "no"),
    "/update_weights_from_distributed": (*_ANY, "lie", "no"),
    "/rl360/admit": _ANY,
}
GATEWAY = ("die", "500", "html", "list", "hang", "forget")
MEND_DEADLINE_S = 20.0  # nothing hangs in the last push, and all are to come along, on a busy machine too


def write_model(folder: Path) -> None:
    """What the engines were started with, as far as the push reads it."""
    save_file({t.name: np.zeros(t.shape, np.float16) for t in TENSORS}, folder / "model.safetensors")


class Schedule:
    """One seed's story."""

    def __init__(self, seed: int, model_dir: Path) -> None:
        self.rng = rng = random.Random(seed)
        engines = rng.choice((2, 3, 3, 4))
        remote = (f"e{rng.randrange(engines)}",) if rng.random() < 0.25 else ()
        mode = rng.choices(("retract", "in_place", "abort"), (6, 2, 2))[0]
        late = (f"e{engines - 1}",) if engines > 2 and rng.random() < 0.2 else ()
        doors = rng.random() < 0.7
        self.world = World(model_dir, seed, engines, remote, late, doors=doors, pause_mode=mode)
        self.world.say(f"seed {seed}: {engines} engines, remote {remote}, late {late}, {mode}, doors {doors}")

    async def run(self) -> World:
        world, rng = self.world, self.rng
        async with world.running():
            first = await world.push_until_done(0, deadline_s=MEND_DEADLINE_S)
            if not isinstance(first, PushRecord):
                world.violate(f"the first push failed: {first!r}")
                return world
            for step in range(1, 1 + rng.randint(1, 2)):
                world.arm()
                more: dict[str, int] = {}
                for _ in range(rng.randint(1, 3)):
                    more |= await self.trouble()
                outcome = await world.push_until_done(step, ensure=rng.random() < 0.2, **more)
                await self.aftermath(step, outcome)
                await asyncio.sleep(rng.choice((0, 0, 0.05)))
            await self.mend()
            last = await world.push_until_done(9, deadline_s=MEND_DEADLINE_S)
            for _ in range(3):  # what was stuck in the dark comes out one after the other
                if isinstance(last, CleanupUnconfirmed):
                    self.bury()
                    await self.mend()
                    last = await world.push_until_done(9, deadline_s=MEND_DEADLINE_S)
            await self.check_mended(first, last)
        return world

    async def trouble(self) -> dict[str, int]:
        """Arrange one thing that goes wrong; what concerns the pusher itself is returned."""
        world, rng = self.world, self.rng
        engine = rng.choice(world.engines)
        acts: list[tuple[int, Callable[[], Awaitable[None] | None]]] = [
            (30, self.engine_fault),
            (6, self.trainer_fault),
            (8, self.gateway_fault),
            (5, self.store_fault),
            (4, engine.die),
            (6, lambda: world.soon(rng.randint(1, 90), engine.die)),
            (5, lambda: world.soon(rng.randint(1, 90), engine.stop)),
            (3, lambda: self.stop_and_wake(engine)),
            (4, lambda: world.soon(rng.randint(1, 90), lambda: self.restart(engine))),
            (3, lambda: self.restart_twice(engine)),
            (4, lambda: world.soon(rng.randint(1, 90), self.join)),
            (2, self.join),
            (2, lambda: world.urls.append(engine.url + rng.choice(("", "/")))),
            (3, lambda: world.soon(rng.randint(1, 90), self.all_die)),
        ]
        if rng.random() < 0.15:
            return {rng.choice(("die_at", "cancel_at")): rng.randint(1, 170)}
        act = rng.choices([act for _, act in acts], [weight for weight, _ in acts])[0]()
        if act is not None:
            await act
        return {}

    def engine_fault(self) -> None:
        rng = self.rng
        path = rng.choice(list(KINDS))
        kind, target = rng.choice(KINDS[path]), rng.choice(self.world.engines).name
        attempt = rng.choice((0, 0, 1, 2))
        self.world.faults.append(Fault(target, path, kind, rng.choice((1, 1, 1, 2, 3)), attempt))

    def trainer_fault(self) -> None:
        path, kind = self.rng.choice(
            (("/push/checksums", "away"), ("/bucket", "die"), ("/bucket", "mid"), ("/bucket", "skip"))
        )
        self.world.faults.append(Fault("trainer", path, kind, self.rng.choice((1, 1, 2))))

    def gateway_fault(self) -> None:
        kind = self.rng.choice(GATEWAY)
        first = self.rng.randint(1, 14)
        for nth in range(first, first + self.rng.choice((1, 1, 2, 6))):
            self.world.faults.append(Fault("gateway", "/workers", kind, nth))

    def store_fault(self) -> None:
        name = self.rng.choice(("get", "put_once", "list", "exists", "put"))
        first = self.rng.randint(1, 6)
        for nth in range(first, first + self.rng.choice((1, 1, 3))):
            self.world.faults.append(Fault("store", name, "down", nth))

    def stop_and_wake(self, engine: Engine) -> None:
        at = self.rng.randint(1, 80)
        self.world.soon(at, engine.stop)
        self.world.soon(at + self.rng.randint(1, 40), engine.wake)

    async def restart(self, engine: Engine) -> None:
        await engine.restart()

    def restart_twice(self, engine: Engine) -> None:
        at = self.rng.randint(1, 80)
        for later in (at, at + self.rng.randint(1, 20)):
            self.world.soon(later, lambda: self.restart(engine))

    async def join(self) -> None:
        await self.world.join(f"j{len(self.world.engines)}")

    def all_die(self) -> None:
        for engine in self.world.engines:
            engine.die()

    def unconfirmed(self) -> list[Engine]:
        """Engines that a person is asked about."""
        return [
            self.world.engine(note.identity.url)
            for intent in self.world.unended()
            for note in fence.read_unconfirmed(self.world.store, intent.epoch)
            if not fence.is_gone_confirmed(self.world.store, note.identity)
        ]

    async def aftermath(self, step: int, outcome: object) -> None:
        """A refusal stays one until a person helps; anything else must be a record or an error with a reason."""
        world, rng = self.world, self.rng
        if isinstance(outcome, CleanupUnconfirmed):
            await self.check_refused(step)
            if rng.random() < 0.7:
                self.bury(wrongly=rng.random() < 0.2)
                await world.push_until_done(step)
        elif not (outcome is None or isinstance(outcome, (PushRecord, *REPEATABLE, Killed, asyncio.CancelledError))):
            world.violate(f"the push of step {step} ended by {outcome!r}")

    async def check_refused(self, step: int) -> None:
        """A retry meets the fence before it writes anything, unless the engine came back by itself. It lets the living
        go."""
        world = self.world
        dark = [engine for engine in self.unconfirmed() if not engine.well]
        changed = world.changed
        world.reached.clear()
        again = await world.push(step)
        if (
            dark
            and all(not engine.well for engine in dark)
            and not isinstance(again, (CleanupUnconfirmed, *REPEATABLE))
        ):
            world.violate(f"a retry over {[engine.name for engine in dark]} ended as {again!r}")
        if dark and all(not engine.well for engine in dark) and world.changed > changed:
            world.violate(f"a retry over {[engine.name for engine in dark]} changed engines")
        if reached := world.reached & {engine.name for engine in dark if not engine.well}:
            world.violate(f"a retry reached {sorted(reached)}, whose end nobody had proven")

    def bury(self, wrongly: bool = False) -> None:
        """A person ends what is not proven gone and says so; or only says so."""
        for engine in {engine.name: engine for engine in self.unconfirmed()}.values():
            if not wrongly or engine.well:  # the command refuses to call an engine gone that answers
                engine.die()
            self.world.confirm_gone(engine)

    async def mend(self) -> None:
        world = self.world
        world.arm()
        world.at.clear()
        for engine in world.engines:
            engine.wake()
        if world.gateway.listener is None:
            await asyncio.sleep(2 * world.deadline_s)
        await asyncio.sleep(0.05)
        for engine in world.engines:
            if not engine.alive or engine.listener is None:
                await engine.start()

    async def check_mended(self, first: PushRecord, last: object) -> None:
        world = self.world
        if not isinstance(last, PushRecord):
            world.violate(f"with everything mended the push ended as {last!r}")
            return
        barred = {
            engine.url
            for engine in world.engines
            for key in [fence.gone_key(engine.url, engine.incarnation)]
            if world.store.exists(key)
        }
        serving = {engine.identity.url for engine in last.serving}
        expected = {engine.url for engine in world.engines} - barred
        if serving != expected:
            world.violate(f"with everything mended {sorted(expected - serving)} do not serve")
        if (last.path, last.calls_per_engine) != (first.path, first.calls_per_engine):
            world.violate(
                f"the path changed: {first.path} {first.calls_per_engine}, {last.path} {last.calls_per_engine}"
            )
        if (again := await world.push(9, ensure=True, deadline_s=MEND_DEADLINE_S)) is not None:
            world.violate(f"nothing to do, and the push ended as {again!r}")


async def run_many(seeds: list[int], model_dir: Path, at_once: int = 8) -> dict[int, World]:
    """Worlds by seed; several at a time, for most of it is waiting for deadlines."""
    limit = asyncio.Semaphore(at_once)

    async def one(seed: int) -> tuple[int, World]:
        async with limit:
            return seed, await Schedule(seed, model_dir).run()

    return dict(await asyncio.gather(*map(one, seeds)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    seed = parser.parse_args().seed
    with tempfile.TemporaryDirectory() as folder, wired():
        write_model(Path(folder))
        world = asyncio.run(run_many([seed], Path(folder)))[seed]
    print("\n".join(world.log))
    print(f"{len(world.violations)} violations", *world.violations, sep="\n")
    raise SystemExit(bool(world.violations))


if __name__ == "__main__":
    main()
