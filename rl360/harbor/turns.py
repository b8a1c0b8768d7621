"""Turns: attempts that wait at a `Gate` until they may start a sandbox.

One loop, one clock (the loop's).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from rl360.sandboxes.admission import Gate, Room

if TYPE_CHECKING:
    from rl360.harbor.runner import Prepared


class Turns:
    """Whoever returned from `wait` holds what was reserved until `leave`."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self._turns: dict[str, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, key: str, group: str, need: Room) -> None:
        """Return when `key` may start. `BadInput` when it never could; one that is cancelled has left."""
        self.gate.ask(key, group, need)
        turn = self._turns[key] = asyncio.get_running_loop().create_future()
        try:
            self._pass()
            await turn
        except asyncio.CancelledError:
            self.leave(key)
            raise
        finally:
            del self._turns[key]

    async def again(self, key: str, limit_s: float) -> None:
        """Return when `key`, which has a turn, may start another sandbox; at the limit in any case, so that it never
        starves."""
        self.gate.ask_again(key)
        turn = self._turns[key] = asyncio.get_running_loop().create_future()
        try:
            self._pass()
            await asyncio.wait({turn}, timeout=max(0.0, limit_s))
            if not turn.done():
                self.gate.begin_again(key, asyncio.get_running_loop().time())
        finally:
            del self._turns[key]
            self.gate.withdraw(key)

    def settle(self, key: str, ok: bool, refused: bool) -> None:
        """Its sandbox is ready, or did not start."""
        self.gate.waves.settle(key, asyncio.get_running_loop().time(), ok=ok, refused=refused)
        self._pass()

    def give_up(self, key: str) -> None:
        """It needs no sandbox any more, and one may still be there: it holds its place, and no other's start up."""
        self.gate.waves.give_up(key)
        self._pass()

    def leave(self, key: str, deleting: Sequence[Future[str | None]] = ()) -> None:
        """It needs no sandbox any more, and its sandboxes are gone. Its disk is free when its files are deleted."""
        reservations, loop = self.gate.reservations, asyncio.get_running_loop()
        disk_mb = reservations.held[key].disk_mb if deleting else 0
        self.gate.leave(key)

        def deleted() -> None:
            reservations.withhold(-disk_mb)
            self._pass()

        for end in deleting:
            reservations.withhold(disk_mb)
            # what could not be deleted stays withheld
            end.add_done_callback(lambda end: end.result() or loop.is_closed() or loop.call_soon_threadsafe(deleted))
        self._pass()

    def _pass(self) -> None:
        loop = asyncio.get_running_loop()
        for key in self.gate.due(loop.time()):
            turn = self._turns[key]
            if not turn.done():  # cancelled, and about to leave
                turn.set_result(None)
        again = self.gate.again_at(loop.time())
        if again is not None and self._timer is None:
            self._timer = loop.call_at(again, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self._pass()


def need_of(prepared: Prepared) -> Room:
    """What an attempt's sandboxes reserve; they are there one after the other."""
    limits, disk_mb = prepared.limits, prepared.task.config.environment.storage_mb
    return Room(math.ceil(1000 * limits.reserved_cpus), limits.memory_mb, limits.pids, disk_mb)
