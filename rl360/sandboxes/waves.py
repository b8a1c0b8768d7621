"""Waves: how many sandboxes may start now. Knows no clock and starts nothing; whoever uses it says what happened when.

At most `size` starts begin in a wave, and waves begin at least `interval_s` apart; at most `window` starts are under
way at once. The window follows what starts take, between 1 and `max_concurrent`: it grows by a quarter a round while
they take less than half of `ready_goal_s`, stands up to the goal, shrinks by a fifth above it (not below a quarter of a
wave) and by half when a start is refused; one round shrinks it once. Registries and hosts slow down before they refuse:
under a goal that notices, nothing is refused. Where something was, the window comes back to that point slowly.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

GROWTH = 0.25  # what one start adds, while they are quick, to a window that was full
LATE, REFUSED = 0.8, 0.5  # what is left of the window
LEAST = 0.25  # of a wave: what late starts leave of the window; refused ones may leave one
SMOOTH = 0.125  # weight of one start in what starts take


@dataclass(frozen=True)
class Pace:
    """`per_group`: sandboxes of one image group that start or run at once; `max_concurrent`: of all."""

    size: int
    interval_s: float
    max_concurrent: int
    per_group: int
    ready_goal_s: float


class Waves:
    """A key is begun, then ready or failed, perhaps again, then ended; another order is an error of the caller's and
    raises."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.window = float(min(pace.size, pace.max_concurrent))
        self.begun = self.warm = 0  # starts, and those of a group that had been started before
        self._starting: dict[str, float] = {}  # key -> when it began
        self._live: dict[str, str] = {}  # key -> group
        self.groups: Counter[str] = Counter()  # live ones; 0 for a group that was
        self._wave_at, self._in_wave, self._cut_at = -math.inf, 0, -math.inf
        self._refused_at = math.inf  # the window with which something was refused
        self._took: float | None = None  # what starts take, smoothed: a large image is no sign of load

    @property
    def starting(self) -> int:
        return len(self._starting)

    @property
    def live(self) -> int:
        """That start or run."""
        return len(self._live)

    def paced(self, now: float) -> int:
        """How many starts wave and window let begin at `now`."""
        left = self.pace.size - (self._in_wave if now < self.next_wave_at() else 0)
        return max(0, min(left, int(self.window) - self.starting))

    def free(self, now: float) -> int:
        """How many may begin that do not live yet, if their groups are open."""
        return max(0, min(self.paced(now), self.pace.max_concurrent - self.live))

    def open(self, group: str) -> bool:
        return self.groups[group] < self.pace.per_group

    def next_wave_at(self) -> float:
        """When the present wave is over. Everything else that holds starts back ends with a start or a sandbox."""
        return self._wave_at + self.pace.interval_s

    def begin(self, key: str, group: str, now: float) -> None:
        if key in self._live or not self.free(now) or not self.open(group):
            raise ValueError(f"{key} of {group} may not start now")
        self._live[key] = group
        self.begin_again(key, now)
        self.begun += 1
        self.warm += group in self.groups
        self.groups[group] += 1

    def begin_again(self, key: str, now: float) -> None:
        """One that lives starts another sandbox in place of its first. Whoever does not wait until it is `paced` still
        counts."""
        if key not in self._live or key in self._starting:
            raise ValueError(f"{key} does not live, or starts already")
        if now >= self.next_wave_at():
            self._wave_at, self._in_wave = now, 0
        self._in_wave += 1
        self._starting[key] = now

    def settle(self, key: str, now: float, *, ok: bool, refused: bool = False) -> None:
        """The start is over: ready, or failed. refused: by one who is asked too much (a registry, a quota)."""
        full = self.starting >= int(self.window)
        began = self._starting.pop(key)
        if ok or now - began > self.pace.ready_goal_s:
            self._took = now - began if self._took is None else self._took + SMOOTH * (now - began - self._took)
        took = self._took or 0.0
        if refused or took > self.pace.ready_goal_s:
            if began > self._cut_at:  # the others of its round only say the same again
                self._refused_at = self.window if refused else self._refused_at
                # late: perhaps for other reasons, and then fewer at once are no quicker
                least = 1.0 if refused else min(self.window, max(1.0, LEAST * self.pace.size))
                self.window, self._cut_at = max(least, self.window * (REFUSED if refused else LATE)), now
        elif full and ok and took <= self.pace.ready_goal_s / 2:
            grown = self.window + (GROWTH if self.window < REFUSED * self._refused_at else GROWTH / self.window)
            self.window = min(float(self.pace.max_concurrent), grown)

    def give_up(self, key: str) -> None:
        """If it starts, nobody will ever say that it was ready."""
        self._starting.pop(key, None)

    def end(self, key: str) -> None:
        """It is gone."""
        self.give_up(key)
        self.groups[self._live.pop(key)] -= 1
