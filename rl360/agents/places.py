"""Places: an attempt is asked of its sandbox server when that can begin it, and waits for it here, where no clock runs.

The server's queue has a clock (`deadlines.queue_s`) for a server that stands still: no attempt is to be lost to it
because a flow asked for more than its servers run. What `GET /health` says is asked at most once in `EVERY_S`, for all
waves of a flow (threads of one process), and what was let through and is not there yet is counted in. A server that
does not say is asked as before.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

EVERY_S = 0.5
SEEN_S = 0.5  # after it was sent a server's health counts an attempt
AHEAD = 4  # windows of starts that may wait in a server for their turn: seconds, unless starts take long
UNKNOWN = 1 << 30
Ask = Callable[[str], Awaitable[Any]]


@dataclass
class _Server:
    free: int = 0
    until: float = 0.0  # when what it said is old
    asked: bool = False  # and has not answered yet
    let: int = 0  # through, and not there yet
    sent: deque[float] = field(default_factory=deque)


class Places:
    """What servers said, and what was let through since."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._lock = threading.Lock()
        self._servers: defaultdict[str, _Server] = defaultdict(_Server)

    async def take(self, server: str, need: Mapping[str, float], health: Ask) -> None:
        """Return when one more may be sent to `server`, and count it in until `sent` is told. `need`: what it reserves
        at most, in the names of a `Room`."""
        while True:
            with self._lock:
                at, now = self._servers[server], time.monotonic()
                if now < at.until and at.free > 0:
                    at.free, at.let = at.free - 1, at.let + 1
                    return
                mine = now >= at.until and not at.asked
                at.asked |= mine
            if not mine:
                await asyncio.sleep(self._every_s * random.uniform(0.1, 0.3))
                continue
            try:
                said = await health(server)
            finally:
                at.asked = False
            with self._lock:
                now = time.monotonic()
                while at.sent and at.sent[0] < now - SEEN_S:
                    at.sent.popleft()
                    at.let -= 1
                at.free, at.until = free_places(said, at.let, need), now + self._every_s

    def sent(self, server: str) -> None:
        """One that was let through is there in a moment, or will not come."""
        with self._lock:
            self._servers[server].sent.append(time.monotonic())


def free_places(health: Any, coming: int, need: Mapping[str, float]) -> int:
    """How many more attempts a server would begin without any other ending, as far as its health and the mean of what
    runs there tell; `UNKNOWN` where it says nothing of that. One at least where nothing is."""
    try:
        left, room, hold = health["room_left"], health["room"], health["promised_to"]
        # between its request and the queue, or its end and the answer
        odd = health["running"] + health["held_unconfirmed"] - hold
        before = health["queued"] + max(0, odd) + coming
        # the mean, for tasks may ask for less than their run allows
        mean = {name: (room[name] - left[name]) / hold for name in room} if hold else need
        fits = min(int(left[name] // mean[name]) for name in mean if mean[name])
        free = min(health["max_concurrent"] - hold, fits, AHEAD * health["window"]) - before
        return max(free, 0 if hold + before else 1)
    except (KeyError, TypeError):
        return UNKNOWN
