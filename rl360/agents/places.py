"""Places: an attempt is asked of its sandbox server when that can begin it, and waits for it here, where no clock runs.

The server's queue has a clock (`deadlines.queue_s`) for a server that stands still: no attempt is to be lost to it
because a flow asked for more than its servers run. What `GET /health` says is asked at most once in `EVERY_S`, for all
waves of a flow (threads of one process), and whatever of them is on its way or there is counted in. Of a server that
does not answer, as while it restarts, one attempt finds out what is the matter; one that answers and does not say is
asked as before.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

EVERY_S = 0.5
AHEAD = 4  # windows of starts that may wait in a server for their turn: seconds, unless starts take long
UNKNOWN = 1 << 30


@dataclass
class Told:
    """What a server could begin as far as is known: `free` attempts, of each image `cap` together with the `others`
    that are not this flow's. `image`: of tasks that name none."""

    free: int = 0
    cap: int = UNKNOWN
    others: Mapping[str, int] = field(default_factory=dict)
    image: str | None = None


@dataclass
class _Server:
    here: Counter[str] = field(default_factory=Counter)  # attempts of this flow, by image
    told: Told = field(default_factory=Told)
    until: float = 0.0  # when that is old
    silent_at: float = math.inf  # since when it does not answer
    passed_at: float = 0.0  # when one was last let through


class Places:
    """What servers said, and what was let through since. `say` is told, once, of one that waits and a server that had
    no place for `queue_s`; all are let through to one that does not answer for so long."""

    def __init__(self) -> None:
        self.queue_s = math.inf
        self.say: Callable[[str], object] = lambda _: None
        self._lock = threading.Lock()
        self._servers: defaultdict[str, _Server] = defaultdict(_Server)

    async def take(
        self, server: str, image: str, task: str, need: Mapping[str, float], health: Callable[[str], Awaitable[Any]]
    ) -> str | None:
        """Return when one more may be sent to `server`, which has it until `leave`: what it counts as there. None when
        only its image is at its cap: others go first. `need`: what it reserves at most, in the names of a `Room`."""
        since = time.monotonic()
        while True:
            with self._lock:
                at = self._servers[server]
                group = image or at.told.image or task
                old = time.monotonic() >= at.until
                if old:
                    at.told.free, at.until = 0, math.inf  # one asks for all
                elif at.told.others.get(group, 0) + at.here[group] >= at.told.cap:
                    return None
                elif at.told.free > 0:
                    at.told.free, at.passed_at = at.told.free - 1, time.monotonic()
                    at.here[group] += 1
                    return group
            if not old:
                await asyncio.sleep(EVERY_S * random.uniform(0.1, 0.3))
                continue
            try:
                said = await health(server)
            finally:
                at.until = time.monotonic() + EVERY_S
            with self._lock:
                at.silent_at = min(at.silent_at, at.until) if said is None else math.inf
                dead = at.until - at.silent_at >= self.queue_s
                at.told = Told(UNKNOWN) if dead else told(said, at.here, need)
            if at.until - max(since, at.passed_at) > self.queue_s:
                at.passed_at = math.inf
                self.say(f"{server}: none had a place for {self.queue_s:g} s, others wait; it says {said or 'nothing'}")

    def leave(self, server: str, group: str) -> None:
        with self._lock:
            self._servers[server].here[group] -= 1


def told(health: Any, here: Mapping[str, int], need: Mapping[str, float]) -> Told:
    """How many more attempts a server would begin without any other ending, as far as its health and the mean of what
    runs there tell, when `here` are on their way to it or there; `UNKNOWN` where it says nothing of that. One at least
    where nothing is, and no more where it does not answer (None)."""
    sent = sum(here.values())
    if health is None:
        return Told(0 if sent else 1)
    try:
        left, room, hold = health["room_left"], health["room"], health["promised_to"]
        # tasks may ask for less than their run allows
        nobodys = {"disk_mb": health.get("withheld_disk_mb", 0)}  # of files that are being deleted
        mean = {name: (room[name] - left[name] - nobodys.get(name, 0)) / hold for name in room} if hold else need
        fits = min(int(left[name] // mean[name]) for name in mean if mean[name])
        cap, images = health.get("per_image", UNKNOWN), health.get("images", {})
        held_back = sum(max(0, asked - cap) for asked in images.values())  # they are in nobody's way
        used = max(hold + health["queued"], sent) - held_back
        free = min(health["max_concurrent"], hold + min(fits, AHEAD * health["window"])) - used
        others = {name: asked - here.get(name, 0) for name, asked in images.items()}
        return Told(max(free, 0 if used > 0 else 1), cap, others, health.get("image"))
    except (AttributeError, KeyError, TypeError):
        return Told(UNKNOWN)
