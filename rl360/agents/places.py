"""Places: an attempt is asked of its sandbox server when that can begin it, and waits for it here, where no clock runs.

The server's queue has a clock (`deadlines.queue_s`) for a server that stands still: no attempt is to be lost to it
because a flow asked for more than its servers run. What `GET /health` says is asked at most once in `EVERY_S`, for all
waves of a flow (threads of one process), and whatever of them is on its way or there is counted in. A server that does
not say is asked as before.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

EVERY_S = 0.5
AHEAD = 4  # windows of starts that may wait in a server for their turn: seconds, unless starts take long
UNKNOWN = 1 << 30


@dataclass
class _Server:
    here: int = 0  # attempts of this flow
    free: int = 0
    until: float = 0.0  # when that is old


class Places:
    """What servers said, and what was let through since."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: defaultdict[str, _Server] = defaultdict(_Server)

    async def take(self, server: str, need: Mapping[str, float], health: Callable[[str], Awaitable[Any]]) -> None:
        """Return when one more may be sent to `server`, which has it until `leave`. `need`: what it reserves at most,
        in the names of a `Room`."""
        while True:
            with self._lock:
                at = self._servers[server]
                old = time.monotonic() >= at.until
                if old:
                    at.free, at.until = 0, math.inf  # one asks for all
                elif at.free > 0:
                    at.free, at.here = at.free - 1, at.here + 1
                    return
            if old:
                try:
                    said = await health(server)
                    with self._lock:
                        at.free = free_places(said, at.here, need)
                finally:
                    at.until = time.monotonic() + EVERY_S
            else:
                await asyncio.sleep(EVERY_S * random.uniform(0.1, 0.3))

    def leave(self, server: str) -> None:
        with self._lock:
            self._servers[server].here -= 1


def free_places(health: Any, here: int, need: Mapping[str, float]) -> int:
    """How many more attempts a server would begin without any other ending, as far as its health and the mean of what
    runs there tell, when `here` are on their way to it or there; `UNKNOWN` where it says nothing of that. One at least
    where nothing is."""
    try:
        left, room, hold = health["room_left"], health["room"], health["promised_to"]
        # tasks may ask for less than their run allows
        mean = {name: (room[name] - left[name]) / hold for name in room} if hold else need
        fits = min(int(left[name] // mean[name]) for name in mean if mean[name])
        used = max(hold + health["queued"], here)
        return max(min(health["max_concurrent"], hold + min(fits, AHEAD * health["window"])) - used, 0 if used else 1)
    except (KeyError, TypeError):
        return UNKNOWN
