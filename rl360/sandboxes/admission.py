"""Admission: who may start next on one node. Pure; whoever uses it says what happened when.

`Reservations` never promises more of anything than the node has. `Gate` lets wait and start: in the order of asking,
but an ask whose group is full, or whose needs do not fit yet, may be passed. One that did not fit for `patience_s` is
not passed any more: what ends makes room for it alone, so a heavy one does not starve behind light ones. One that runs
and starts another sandbox keeps what it holds and goes before all that wait.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, OrderedDict
from dataclasses import dataclass
from itertools import islice
from operator import add, sub
from typing import NamedTuple

from rl360.errors import BadInput
from rl360.sandboxes.waves import Waves

LOOK_AHEAD = 64  # asks that wait for room and may be passed: what one call of `due` costs is bounded


class Room(NamedTuple):
    """Resources, in whole numbers: what was taken is given back to the last bit."""

    milli_cpus: int
    memory_mb: int
    pids: int
    disk_mb: int

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:,}" for name, value in self._asdict().items())


BOUNDLESS = Room(*[1 << 50] * 4)


class Reservations:
    """What one node has and has promised."""

    def __init__(self, room: Room) -> None:
        self.room = self.left = room
        self.held: dict[str, Room] = {}
        self.withheld_mb = 0

    def require(self, need: Room) -> None:
        """`BadInput` when the empty node would not do."""
        lacks = [name for name, n, has in zip(Room._fields, need, self.room, strict=True) if n > has]
        if lacks or min(need) < 0:
            raise BadInput(f"reservation ({need}) is more than this node has ({self.room}): lower {', '.join(lacks)}")

    def hold(self, key: str, need: Room) -> bool:
        """Promise it, if there is room."""
        if key in self.held:
            raise ValueError(f"{key} holds a reservation")
        if any(n > left for n, left in zip(need, self.left, strict=True)):
            return False
        self.left, self.held[key] = Room(*map(sub, self.left, need)), need
        return True

    def withhold(self, disk_mb: int) -> None:
        """Of nobody's any more, and not free yet; what is negative is free again."""
        self.withheld_mb += disk_mb
        self.left = self.left._replace(disk_mb=self.left.disk_mb - disk_mb)

    def release(self, key: str) -> None:
        """Take it back; a second time is a `KeyError`."""
        self.left = Room(*map(add, self.left, self.held.pop(key)))


@dataclass
class _Ask:
    group: str
    need: Room
    blocked_at: float = math.inf  # since when it would start if it fitted


class Gate:
    """The queue of one node. Several nodes may share their `waves`, never their `reservations`."""

    def __init__(self, waves: Waves, reservations: Reservations, patience_s: float = 30.0) -> None:
        self.waves, self.reservations, self.patience_s = waves, reservations, patience_s
        self._waiting: OrderedDict[str, _Ask] = OrderedDict()
        self._again: OrderedDict[str, None] = OrderedDict()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def asked(self) -> Counter[str]:
        """How many of each group wait, start or run."""
        return self.waves.groups + Counter(ask.group for ask in self._waiting.values())

    def ask(self, key: str, group: str, need: Room) -> None:
        """Wait for a start. `BadInput` when it could never fit."""
        self.reservations.require(need)
        if key in self._waiting or key in self.reservations.held:
            raise ValueError(f"{key} waits or runs already")
        self._waiting[key] = _Ask(group, need)

    def ask_again(self, key: str) -> None:
        """One that runs waits for the start of its next sandbox."""
        self._again[key] = None

    def begin_again(self, key: str, now: float) -> None:
        """It starts its next sandbox now, due or not."""
        self.withdraw(key)
        self.waves.begin_again(key, now)

    def withdraw(self, key: str) -> None:
        """It waits for no next sandbox any more."""
        self._again.pop(key, None)

    def due(self, now: float, most: int = sys.maxsize) -> list[str]:
        """Those that start now, at most so many: they hold their reservation and count as starting."""
        again = [*islice(self._again, min(most, self.waves.paced(now)))]
        for key in again:
            self.begin_again(key, now)
        started: list[str] = []
        free = min(most - len(again), self.waves.free(now))
        passed = 0
        for key, ask in self._waiting.items():
            if len(started) == free or passed == LOOK_AHEAD:
                break
            if not self.waves.open(ask.group):  # however many: behind them the node would stand idle
                continue
            if self.reservations.hold(key, ask.need):
                self.waves.begin(key, ask.group, now)
                started.append(key)
                continue
            ask.blocked_at = min(ask.blocked_at, now)
            if now - ask.blocked_at >= self.patience_s:
                break
            passed += 1
        for key in started:
            del self._waiting[key]
        return again + started

    def again_at(self, now: float) -> float | None:
        """When `due` may say more without anything having ended; None: not before something does."""
        later = self.waves.next_wave_at()
        return later if (self._waiting or self._again) and later > now else None

    def leave(self, key: str) -> None:
        """It waits, starts or runs no more; what it held is free. `KeyError` when it did none of these."""
        self.withdraw(key)
        if self._waiting.pop(key, None) is None:
            self.reservations.release(key)
            self.waves.end(key)
