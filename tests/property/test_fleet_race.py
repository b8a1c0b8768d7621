"""Pushes and a keeper at once over engines that die, hang and come back: whatever the order, one owner an engine, no
traffic to weights that no push read back, and in the end everything serves again."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rl360.config.run import PushConfig
from rl360.engines import fleet
from rl360.engines.fleet import EngineState
from rl360.engines.fleet_log import FleetLog
from rl360.engines.keeper import Keeper
from rl360.errors import Rl360Error
from rl360.weights import fence, push
from tests.unit.fake_engines import TENSORS, FakeTrainer
from tests.unit.fleet_fakes import OPTIONS, FleetWorld, KeptEngine, revive

CONFIG = PushConfig(call_deadline_s=1.0, bucket_bytes=1024)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FleetWorld]:
    save_file({t.name: np.zeros(t.shape, np.float16) for t in TENSORS}, tmp_path / "model.safetensors")
    made = FleetWorld(tmp_path, monkeypatch)
    monkeypatch.setattr(fleet, "tree_of_url", made.tree)
    monkeypatch.setattr(push, "tree_of_url", made.tree)
    lock, put = threading.Lock(), made.store.put_once

    def put_once(key: str, data: bytes) -> bool:
        with lock:  # two threads use one store: a conditional put is one step, as the real one's is
            return put(key, data)

    made.store.put_once = put_once  # type: ignore[method-assign]
    yield made
    made.close()


class Watch:
    """Every registration at the gateway, held against what the engine holds at that moment."""

    def __init__(self, world: FleetWorld, trainer: FakeTrainer) -> None:
        self.wrong: list[str] = []
        answer = world.gateway.answer

        def watched(method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            if method == "POST" and path == "/workers":
                engine = world.gateway.engines[body["url"]]
                if engine.checksums != trainer.held() or engine.version != f"demo:{trainer.step}":
                    self.wrong.append(f"{body['url']} got traffic with {engine.version}")
            return answer(method, path, body)

        world.gateway.answer = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("seed", range(3))
def test_pushes_and_a_keeper_at_once(world: FleetWorld, seed: int) -> None:
    chance = random.Random(seed)
    trainer = FakeTrainer(list(world.engines))
    watch = Watch(world, trainer)
    stop = threading.Event()
    options = dataclasses.replace(OPTIONS, every_s=0.05, ping_s=1.0, look_s=1.0)

    async def use(keeper: Keeper) -> None:
        while not stop.is_set():
            try:
                await keeper.round()
            except Rl360Error as error:
                world.said.append(str(error))
            await asyncio.sleep(0.05)
        await keeper.close()

    keeping = threading.Thread(target=world.keep, args=(use, options))
    keeping.start()
    try:
        for step in range(4):
            trainer.step = step + 1
            trouble(chance, world)
            try_push(world, trainer, step)
        settle(world, trainer, 4)
    finally:
        stop.set()
        keeping.join(timeout=30)
    assert watch.wrong == []
    assert not any(engine.paused for engine in world.engines)
    assert [world.state(0), world.state(1)] == [EngineState.SERVING] * 2, world.said
    assert fence.open_intents(world.store) == []
    # nobody moved what somebody else had: the fold of every entry from the first on is lawful
    world.store.objects = {k: v for k, v in world.store.objects.items() if "/snapshots/" not in k}
    assert FleetLog(world.store).refresh().slots["engine-0"].owner is None


def trouble(chance: random.Random, world: FleetWorld) -> None:
    engine: KeptEngine = chance.choice(world.engines)
    kind = chance.choice(["none", "kill", "restart", "hang", "hang"])
    if kind == "kill" and engine.alive:
        os.kill(engine.process.pid, signal.SIGKILL)
        engine.process.wait()
    elif kind == "restart":
        revive(world, engine)
        engine.version, engine.paused, engine.session = "default", False, False
        engine.checksums = dict.fromkeys(engine.checksums, "0" * 16)
    elif kind == "hang":
        engine.faults["*"] = "hang"


def try_push(world: FleetWorld, trainer: FakeTrainer, step: int) -> bool:
    version = f"demo:{step + 1}"
    try:
        asyncio.run(push.push(world.store, world.services, "demo", step, version, trainer, CONFIG))
    except Rl360Error as error:
        world.said.append(f"push {version}: {error}")
        return False
    return True


def settle(world: FleetWorld, trainer: FakeTrainer, step: int) -> None:
    """What is dead is started again by its supervisor; what hung was ended. Then pushes until everything serves."""
    trainer.step = step + 1
    until = time.monotonic() + 60
    while time.monotonic() < until:
        for engine in world.engines:
            if not engine.alive:
                revive(world, engine)
                engine.version, engine.paused, engine.session = "default", False, False
                engine.checksums = dict.fromkeys(engine.checksums, "0" * 16)
                engine.groups.clear()
        done = try_push(world, trainer, step) and [world.state(0), world.state(1)] == [EngineState.SERVING] * 2
        if done and all(engine.version == f"demo:{step + 1}" for engine in world.engines):
            return
        time.sleep(0.3)
        step += 1
        trainer.step = step + 1
