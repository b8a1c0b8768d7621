"""Servers die between any two of their store calls: an attempt still runs at most once and has one reply. Parts of it
hang: the reply still comes in time, and with a verdict where each kept to its own time."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.harbor import replies as module
from rl360.harbor.outcome import ExitStatus
from rl360.harbor.protocol import RunReply
from tests.unit.memory_store import MemoryStore
from tests.unit.mortal_servers import Server, heard, request_of
from tests.unit.test_harbor_clocks import (
    AGENT_S,
    DEADLINE_S,
    LAST_STOP_S,
    SETUP_S,
    START_S,
    STOP_S,
    VERIFIER_S,
    SlowProvider,
    Takes,
    agent_that_takes,
    carried,
)
from tests.unit.virtual_time import run_virtual

pytestmark = pytest.mark.timeout(900)  # of seconds on a core of its own, minutes on a busy machine


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32), servers=st.integers(1, 3))
def test_killed_at_any_moment_an_attempt_runs_at_most_once_and_has_one_reply(seed: int, servers: int) -> None:
    """Clients ask anywhere and ask again until they are told, as ours do; servers die between any two store calls."""
    draw, ran, store = random.Random(seed), Counter[str](), MemoryStore()

    async def client(pool: list[Server], name: str, told: list[RunReply]) -> None:
        await asyncio.sleep(draw.uniform(0, 8))
        while True:
            said = await heard(draw.choice(pool), request_of(name))
            if isinstance(said, RunReply):
                told.append(said)
                return
            await asyncio.sleep(draw.uniform(0.1, 2))

    async def reaper(pool: list[Server]) -> None:
        for _ in range(draw.randint(1, 6)):
            await asyncio.sleep(draw.uniform(0, 6))
            victim = draw.choice(pool)
            if draw.random() < 0.5:
                victim.store.calls_left = draw.randint(1, 4)
                await asyncio.sleep(draw.uniform(0, 6))
            victim.kill()
            await asyncio.sleep(draw.uniform(0, 2))
            victim.start()

    async def go() -> dict[str, list[RunReply]]:
        patch.setattr(module, "time", SimpleNamespace(time=asyncio.get_running_loop().time))
        pool = [Server(store, f"s{number}", ran, slots=2) for number in range(servers)]
        told: dict[str, list[RunReply]] = {name: [] for name in "abc"}
        clients = [asyncio.create_task(client(pool, name, told[name])) for name in "aabbc"]
        await reaper(pool)
        await asyncio.wait_for(asyncio.gather(*clients), 2000)
        return told

    with pytest.MonkeyPatch.context() as patch:
        told = run_virtual(go())
    for name, replies in told.items():
        assert replies and all(reply == replies[0] for reply in replies), name
        assert ran[name] <= 1
        assert ran[name] == 1 or replies[0].outcome == "sandbox_lost"


seconds = st.floats(0, 70) | st.just(math.inf)


@settings(max_examples=500, deadline=None)
@given(takes=st.builds(Takes, *[seconds] * 6, remove=seconds))
def test_the_reply_comes_in_time_whatever_hangs(tmp_path_factory: pytest.TempPathFactory, takes: Takes) -> None:
    provider = SlowProvider(tmp_path_factory.mktemp("w"), takes)
    reply, seconds = run_virtual(carried(provider, agent_that_takes(takes.agent)))
    assert seconds <= DEADLINE_S + 1.0, "the last second is the least that deleting has"
    nested = (takes.setup < SETUP_S, takes.stop < STOP_S, takes.start < START_S, takes.verify < VERIFIER_S)
    if all(nested) and takes.last_stop < LAST_STOP_S:
        assert reply.reward == 1.0, reply
        assert reply.exit_status == (ExitStatus.SUBMITTED if takes.agent < AGENT_S else ExitStatus.AGENT_TIMEOUT)
    assert (reply.verdict is None) == (reply.reward is None)
