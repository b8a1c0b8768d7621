"""Having samples stored, those that finish within a moment by one request to their session server.

One request alone finds nothing of its code in the processor's caches; several together share that. A group goes at once
when the last one went `every_s` ago, when it is full, and when nobody plays any more: nothing waits while little
finishes, nor at the end. At most `AT_ONCE` groups of a server are on their way; what it has no time for yet waits here,
where no deadline runs. What is alone, and what a group could not have stored, is `None`: whoever asked then asks alone,
and learns why; so does all that waits for a server when a request to it failed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

STORE_EVERY_S = 3.0
GROUP = 8  # in one request, whose answer comes when the last of them is stored
AT_ONCE = 4

Item = dict[str, Any]
_Waiting = tuple[Item, asyncio.Future[Item | None]]
Ask = Callable[[str, list[Item]], Awaitable[list[Item | None] | None]]


@dataclass
class _Queue:
    """What waits for one server, in order; `go` when it need not wait for more."""

    waiting: list[_Waiting] = field(default_factory=list)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    next_at: float = 0.0
    served: bool = False
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))


class StoreGroups:
    """`ask` sends one group to one server: an answer an item, in order; None when the request failed. Of one event
    loop; closed by `aclose`."""

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
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        queue.waiting.append((item, answer))
        self._look()
        if not queue.served:
            queue.served = True
            self._start(self._serve(server, queue))
        return await answer

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _look(self) -> None:
        for queue in self._queues.values():
            if not self._playing or len(queue.waiting) >= GROUP:
                queue.go.set()
            else:
                queue.go.clear()

    async def _serve(self, server: str, queue: _Queue) -> None:
        while queue.waiting:
            with suppress(TimeoutError):
                await asyncio.wait_for(queue.go.wait(), queue.next_at - time.monotonic())
            await queue.room.acquire()
            queue.next_at = time.monotonic() + self._every_s
            group, queue.waiting = queue.waiting[:GROUP], queue.waiting[GROUP:]
            self._look()
            self._start(self._send(server, queue, group))
        queue.served = False

    async def _send(self, server: str, queue: _Queue, group: list[_Waiting]) -> None:
        answers: list[Item | None] | None = None
        try:
            live = [(item, answer) for item, answer in group if not answer.done()]
            if len(live) > 1:
                answers = await self._ask(server, [item for item, _ in live])
                if answers is None:
                    live, queue.waiting = live + queue.waiting, []
        finally:  # whatever happened: nobody waits for an answer that will not come
            queue.room.release()
            for (_, waiting), answer in zip(live, answers or [None] * len(live), strict=True):
                if not waiting.done():
                    waiting.set_result(answer)
