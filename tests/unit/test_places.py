"""When an attempt is let through to its sandbox server: by what that says it could begin, for all waves at once."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.agents import places as module
from rl360.agents.places import AHEAD, EVERY_S, UNKNOWN, Places, told
from rl360.harbor.app import Attempts
from rl360.harbor.outcome import ExitStatus
from rl360.harbor.runner import Runner
from tests.unit.test_harbor_clocks import SlowProvider, Takes, agent_that_takes, request_of
from tests.unit.virtual_time import gate, run_virtual

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
        (None, 0, 1),  # one finds out
        (None, 1, 0),
        ({}, 3, UNKNOWN),
        ({"status": "ok"}, 3, UNKNOWN),
        ([], 0, UNKNOWN),
        (health(0, room_left=None), 0, UNKNOWN),
    ],
)
def test_what_a_server_could_begin(said: Any, here: int, free: int) -> None:
    assert max(told(said, {"image": here}, NEED).free, 0) == free


def test_disk_that_is_being_deleted_is_no_running_attempts() -> None:
    said = health(1, max_concurrent=256)
    gone = said["room"]["disk_mb"] // 2
    said["room_left"]["disk_mb"] -= gone
    assert told(said, {"image": 1}, NEED).free <= 1
    assert told(said | {"withheld_disk_mb": gone}, {"image": 1}, NEED).free == AHEAD * 32


async def take(shared: Places, ask: Any, image: str = "image", task: str = "task") -> str | None:
    return await shared.take("s", image, task, NEED, ask)


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
            await take(shared, machine.health)
        await asyncio.sleep(0.03)  # its session is opened: the server is asked again meanwhile
        machine.move(1)
        await asyncio.sleep(0.05)
        machine.move(-1)
        shared.leave("s", "image")

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
    answers: list[Any] = [asyncio.Event().wait, lambda: asyncio.sleep(0, health(8)), lambda: asyncio.sleep(0, {})]

    async def ask(_server: str) -> Any:
        return await answers.pop(0)()

    async def go() -> None:
        shared = Places()
        cut = asyncio.create_task(take(shared, ask))
        await asyncio.sleep(0.01)
        cut.cancel()
        await asyncio.wait({cut})
        async with asyncio.timeout(5):
            await take(shared, ask)
        assert not answers

    asyncio.run(go())


def test_a_server_is_asked_once_for_all_that_it_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY_S", 5.0)
    machine = Machine(8)

    async def go() -> None:
        shared = Places()
        for _ in range(8):
            await take(shared, machine.health)

    asyncio.run(go())
    assert machine.asked == 1


def test_an_image_at_its_cap_steps_aside_and_holds_nobody_up() -> None:
    full = health(3, queued=6, per_image=4, images={"full": 8, "other": 1}, image="default")

    async def go() -> None:
        shared = Places()
        assert await take(shared, lambda _: asyncio.sleep(0, full), "full") is None
        got = [await take(shared, lambda _: asyncio.sleep(0, full), "", f"task{n}") for n in range(3)]
        assert got == ["default"] * 3, "what waits behind its image's cap, four of them, is no queue"
        assert await take(shared, lambda _: asyncio.sleep(0, full), "full") is None
        assert await shared.take("alone", "", "task", NEED, lambda _: asyncio.sleep(0, health(0))) == "task"

    asyncio.run(go())


def test_of_an_image_no_more_are_sent_than_its_cap_with_what_others_have_there() -> None:
    said = health(2, per_image=4, images={"image": 2}, image=None)

    async def go() -> None:
        shared = Places()
        got = [await take(shared, lambda _: asyncio.sleep(0, said)) for _ in range(4)]
        assert got == ["image", "image", None, None]
        shared.leave("s", "image")
        assert await take(shared, lambda _: asyncio.sleep(0, said)) == "image"

    asyncio.run(go())


def in_the_flow(
    tmp_path: Path, patch: pytest.MonkeyPatch, attempts: Attempts, count: int, silent: tuple[float, float] = (0, 0)
) -> tuple[Counter[str], float]:
    """How so many attempts of 8 s end on a server that is not asked over a wire and does not answer for a while, and
    how long all of them take; in virtual time."""

    async def go() -> tuple[Counter[str], float]:
        loop, shared, line, ended = asyncio.get_running_loop(), Places(), asyncio.Lock(), Counter[str]()
        shared.queue_s = 5.0  # what waits longer opens no door
        patch.setattr(module, "time", SimpleNamespace(monotonic=loop.time))
        began = loop.time()

        async def ask(_server: str) -> Any:
            return None if silent[0] < loop.time() - began < silent[1] else attempts.counts()

        async def one(number: int) -> None:
            place = None
            while place is None:
                async with line:
                    place = await take(shared, ask, "python:3")
                await asyncio.sleep(EVERY_S)
            reply = await attempts.submit(request_of(f"a{number}"), "", {"bash": agent_that_takes(8.0)})
            shared.leave("s", place)
            ended[reply.exit_status] += 1

        await asyncio.gather(*(one(number) for number in range(count)))
        return ended, loop.time() - began

    return run_virtual(go())


def attempts_of(tmp_path: Path, places: int, per_image: int) -> Attempts:
    room = gate(places)
    room.waves.pace = replace(room.waves.pace, per_group=per_image)
    provider = cast(Any, SlowProvider(tmp_path, Takes(), image="python:3"))
    return Attempts(Runner(provider, cast(Any, None), "t" * 16), room, 4096)


def test_a_server_that_is_silent_for_a_second_loses_no_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, _ = in_the_flow(tmp_path, monkeypatch, attempts_of(tmp_path, 4, 4), 64, silent=(10, 11))
    assert ended == {ExitStatus.SUBMITTED: 64}


def test_no_attempt_is_lost_to_the_queue_behind_its_images_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, took_s = in_the_flow(tmp_path, monkeypatch, attempts_of(tmp_path, 8, 2), 32)
    assert ended == {ExitStatus.SUBMITTED: 32}
    assert took_s < 1.5 * 16 * 10, "both places of its cap are used"


def test_a_wait_without_a_place_is_told_once_with_what_the_server_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    async def go(answer: Any) -> None:
        shared = Places()
        shared.queue_s, shared.say = 10.0, said.append
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=asyncio.get_running_loop().time))
        async with asyncio.timeout(60):
            for _ in range(2):
                await take(shared, lambda _: asyncio.sleep(0, answer))

    with pytest.raises(TimeoutError):
        run_virtual(go(health(8)))
    (told_once,) = said
    assert told_once.startswith("s: none had a place for 10 s, others wait; it says {'running': 8,")
    run_virtual(go(None))
    assert said[1].endswith("it says nothing"), "and what never answers is asked, as it was"
