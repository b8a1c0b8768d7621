"""Having samples stored, those that finish within a moment by one request to their session server.

One request alone finds nothing of its code in the processor's caches; several together share that. A server is sent one
group at a time, at once when the last one went `every_s` ago, when a group is full, and when nobody plays any more:
nothing waits while little finishes, nor at the end. What a server has no time for yet waits here, where no deadline
runs. What is alone, and what a group could not have stored, is `None`: whoever asked then asks alone, and learns why.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

STORE_EVERY_S = 3.0
GROUP = 8  # in one request, whose answer comes when the last of them is stored

Item = dict[str, Any]
Ask = Callable[[str, list[Item]], Awaitable[list[Item | None]]]


@dataclass
class _Queue:
    """What waits for one server, in order; `go` when it need not wait for more."""

    waiting: list[tuple[Item, asyncio.Future[Item | None]]] = field(default_factory=list)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    next_at: float = 0.0
    served: bool = False


class StoreGroups:
    """`ask` sends one group to one server: an answer an item, in order. Of one event loop; closed by `aclose`."""

    def __init__(self, ask: Ask, every_s: float = STORE_EVERY_S) -> None:
        self._ask, self._every_s = ask, every_s
        self._queues: dict[str, _Queue] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._playing = 0

    @contextmanager
    def player(self) -> Iterator[None]:
        """One who may soon have something to store."""
        self._playing += 1
        self._look()
        try:
            yield
        finally:
            self._playing -= 1
            self._look()

    async def store(self, server: str, item: Item) -> Item | None:
        """The server's answer for `item`, or None."""
        queue = self._queues.setdefault(server, _Queue())
        answer: asyncio.Future[Item | None] = asyncio.get_running_loop().create_future()
        queue.waiting.append((item, answer))
        self._look()
        if not queue.served:
            queue.served = True
            task = asyncio.create_task(self._serve(server, queue))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await answer

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _look(self) -> None:
        for queue in self._queues.values():
            if not self._playing or len(queue.waiting) >= GROUP:
                queue.go.set()
            else:
                queue.go.clear()

    async def _serve(self, server: str, queue: _Queue) -> None:
        try:
            while queue.waiting:
                with suppress(TimeoutError):
                    await asyncio.wait_for(queue.go.wait(), queue.next_at - time.monotonic())
                queue.next_at = time.monotonic() + self._every_s
                group, queue.waiting = queue.waiting[:GROUP], queue.waiting[GROUP:]
                self._look()
                await self._send(server, group)
        finally:
            queue.served = False
            _answer(queue.waiting, [None] * len(queue.waiting))

    async def _send(self, server: str, group: list[tuple[Item, asyncio.Future[Item | None]]]) -> None:
        answers: list[Item | None] = [None] * len(group)
        try:
            if len(group) > 1:
                answers = await self._ask(server, [item for item, _ in group])
        finally:  # whatever happened: nobody waits for an answer that will not come
            _answer(group, answers)


def _answer(group: list[tuple[Item, asyncio.Future[Item | None]]], answers: list[Item | None]) -> None:
    for (_, waiting), answer in zip(group, answers, strict=True):
        if not waiting.done():
            waiting.set_result(answer)
