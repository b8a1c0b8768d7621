"""Attempts that end together are stored by one request; nobody waits for long, and nobody for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.agents.stores import AT_ONCE, GROUP, Item, StoreGroups

SLOW_S = 60.0  # nothing in these tests waits for it


class Server:
    """Stores every item but those named; remembers the groups."""

    def __init__(self, missing: frozenset[int] = frozenset(), pause_s: float = 0.0) -> None:
        self.groups: list[list[int]] = []
        self.at_once = self.most_at_once = 0
        self.missing, self.pause_s = missing, pause_s

    async def ask(self, server: str, items: list[Item]) -> list[Item | None] | None:
        assert server == "http://a"
        self.groups.append([item["n"] for item in items])
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(self.pause_s)
        self.at_once -= 1
        return [None if item["n"] in self.missing else {"stored": item["n"]} for item in items]


def run(work: Callable[[StoreGroups], Awaitable[Any]], server: Server, every_s: float = SLOW_S) -> Any:
    async def go() -> Any:
        groups = StoreGroups(server.ask, every_s)
        try:
            return await asyncio.wait_for(work(groups), 10)
        finally:
            await groups.aclose()

    return asyncio.run(go())


async def store(groups: StoreGroups, *numbers: int) -> list[Item | None]:
    return await asyncio.gather(*(groups.store("http://a", {"n": n}) for n in numbers))


def test_what_ends_together_is_one_request_and_each_gets_its_own_answer() -> None:
    server = Server(missing=frozenset({2}))
    answers = run(lambda groups: store(groups, 1, 2, 3), server)
    assert server.groups == [[1, 2, 3]]
    assert answers == [{"stored": 1}, None, {"stored": 3}]


def test_one_alone_is_left_to_be_asked_for_alone() -> None:
    server = Server()
    assert run(lambda groups: store(groups, 1), server) == [None]
    assert server.groups == []


def test_a_full_group_does_not_wait_and_the_rest_follows_when_nobody_plays() -> None:
    server = Server(pause_s=0.01)

    async def work(groups: StoreGroups) -> list[Item | None]:
        with groups.player():
            await store(groups, 0)  # the first goes at once; from now on the others wait for each other
            rest = asyncio.create_task(store(groups, *range(1, 2 * GROUP + 3)))
            await asyncio.sleep(0.2)
            assert [len(group) for group in server.groups] == [GROUP, GROUP] and not rest.done()
        return await rest

    began = time.monotonic()
    answers = run(work, server)
    assert time.monotonic() - began < 5
    assert answers == [{"stored": n} for n in range(1, 2 * GROUP + 3)]


def test_a_slow_group_holds_up_no_other_and_a_server_gets_few_at_once() -> None:
    server = Server(pause_s=0.05)
    answers = run(lambda groups: store(groups, *range(10 * GROUP)), server)
    assert answers == [{"stored": n} for n in range(10 * GROUP)]
    assert server.most_at_once == AT_ONCE


def test_after_a_request_that_failed_all_that_waits_is_asked_for_alone() -> None:
    class Hung(Server):
        async def ask(self, server: str, items: list[Item]) -> list[Item | None] | None:
            await super().ask(server, items)
            return None

    server = Hung(pause_s=0.05)
    began = time.monotonic()
    assert run(lambda groups: store(groups, *range(50 * GROUP)), server) == [None] * 50 * GROUP
    assert time.monotonic() - began < 2, "not one deadline after the other"
    assert len(server.groups) <= 2 * AT_ONCE


def test_what_waits_goes_after_a_while_though_others_play_on() -> None:
    async def work(groups: StoreGroups) -> list[Item | None]:
        with groups.player():
            await store(groups, 0)
            return await store(groups, 1, 2)

    assert run(work, Server(), every_s=0.05) == [{"stored": 1}, {"stored": 2}]


@pytest.mark.parametrize("error", [RuntimeError("bug"), OSError("gone")])
def test_whatever_becomes_of_a_request_nobody_waits_for_ever(error: Exception) -> None:
    class Broken(Server):
        async def ask(self, server: str, items: list[Item]) -> list[Item | None] | None:
            await super().ask(server, items)
            raise error

    server = Broken()

    async def work(groups: StoreGroups) -> list[Item | None]:
        first = await store(groups, *range(GROUP + 2))
        return first + await store(groups, 100, 101)

    assert run(work, server) == [None] * (GROUP + 4)
    assert server.groups[-1] == [100, 101], "nothing is sent twice"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=40),
    st.sets(st.integers(0, 39)),
)
def test_in_whatever_order_attempts_end_each_gets_its_answer(ends: list[tuple[int, bool]], missing: set[int]) -> None:
    server = Server(frozenset(missing))

    async def one(groups: StoreGroups, n: int, pause: int, cancelled: bool) -> None:
        with groups.player():
            await asyncio.sleep(pause / 1000)
        waiting = asyncio.create_task(groups.store("http://a", {"n": n}))
        if cancelled:
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            return
        answer = await waiting
        asked = [group for group in server.groups if n in group]
        assert answer == ({"stored": n} if asked and n not in missing else None)
        assert len(asked) <= 1

    async def work(groups: StoreGroups) -> None:
        await asyncio.gather(*(one(groups, n, *end) for n, end in enumerate(ends)))

    run(work, server, every_s=0.002)
    assert server.most_at_once <= AT_ONCE
