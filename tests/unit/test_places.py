"""When an attempt is let through to its sandbox server: by what that says it could begin, for all waves at once."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.agents import places as module
from rl360.agents.places import AHEAD, UNKNOWN, Places, free_places

NEED = {"milli_cpus": 50.0, "memory_mb": 512.0, "pids": 64.0}


def health(hold: int = 0, queued: int = 0, held: int = 0, memory_mb: int = 1 << 20, **more: Any) -> dict[str, Any]:
    """Of a server that runs `hold` attempts of 400 MB."""
    room = {"milli_cpus": 64_000, "memory_mb": memory_mb, "pids": 32_768, "disk_mb": 1 << 20}
    used = {"milli_cpus": 50, "memory_mb": 400, "pids": 64, "disk_mb": 10}
    left = {name: room[name] - hold * used[name] for name in room}
    said = {"running": hold - held, "queued": queued, "held_unconfirmed": held, "max_concurrent": 8, "window": 32}
    return said | {"room": room, "room_left": left, "promised_to": hold} | more


@pytest.mark.parametrize(
    ("said", "here", "free"),
    [
        (health(), 0, 8),
        (health(5), 0, 3),
        (health(5, queued=2), 1, 1),
        (health(5, queued=2), 8, 0),  # one is on its way
        (health(5), 4, 3),  # another run's
        (health(8), 0, 0),
        (health(8, queued=5), 3, 0),
        (health(2, memory_mb=1000), 0, 0),
        (health(1, memory_mb=1000), 0, 1),
        (health(0, memory_mb=1000), 0, 1),
        (health(0, memory_mb=300), 0, 1),  # what a task really asks for may fit
        (health(0, memory_mb=300), 1, 0),
        (health(3, held=2), 0, 5),
        (health(0, max_concurrent=999, window=2), 0, 2 * AHEAD),
        (None, 0, UNKNOWN),
        ({"status": "ok"}, 3, UNKNOWN),
        ([], 0, UNKNOWN),
        (health(0, room_left=None), 0, UNKNOWN),
    ],
)
def test_what_a_server_could_begin(said: Any, here: int, free: int) -> None:
    assert max(free_places(said, here, NEED), 0) == free


class Machine:
    """A server of so many places, whose attempts are there a while after they were sent and end after another."""

    def __init__(self, size: int) -> None:
        self.size, self.there, self.most, self.asked = size, 0, 0, 0
        self._lock = threading.Lock()

    def move(self, by: int) -> None:
        with self._lock:
            self.there += by
            self.most = max(self.most, self.there)

    async def health(self, _server: str) -> Any:
        self.asked += 1
        hold = min(self.there, self.size)
        return health(hold, queued=self.there - hold, max_concurrent=self.size)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(1, 8), min_size=1, max_size=3))
def test_waves_in_their_threads_never_fill_a_servers_queue(size: int, waves: list[int]) -> None:
    machine, shared = Machine(size), Places()

    async def attempt(line: asyncio.Lock) -> None:
        async with line:
            await shared.take("s", NEED, machine.health)
        await asyncio.sleep(0.03)  # its session is opened: the server is asked again meanwhile
        machine.move(1)
        await asyncio.sleep(0.05)
        machine.move(-1)
        shared.leave("s")

    async def wave(count: int) -> None:
        line = asyncio.Lock()
        await asyncio.gather(*(attempt(line) for _ in range(count)))

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(waves)) as threads:
        patch.setattr(module, "EVERY_S", 0.01)
        for done in [threads.submit(asyncio.run, wave(count)) for count in waves]:
            done.result(timeout=60)
    assert machine.most <= size and machine.there == 0


def test_one_that_waits_goes_on_when_asking_was_cut_off_and_when_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.01)
    answers: list[Any] = [asyncio.Event().wait, lambda: asyncio.sleep(0, health(8)), lambda: asyncio.sleep(0, None)]

    async def ask(_server: str) -> Any:
        return await answers.pop(0)()

    async def go() -> None:
        shared = Places()
        cut = asyncio.create_task(shared.take("s", NEED, ask))
        await asyncio.sleep(0.01)
        cut.cancel()
        await asyncio.wait({cut})
        async with asyncio.timeout(5):
            await shared.take("s", NEED, ask)
        assert not answers

    asyncio.run(go())


def test_a_server_is_asked_once_for_all_that_it_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY_S", 5.0)
    machine = Machine(8)

    async def go() -> None:
        shared = Places()
        for _ in range(8):
            await shared.take("s", NEED, machine.health)

    asyncio.run(go())
    assert machine.asked == 1
