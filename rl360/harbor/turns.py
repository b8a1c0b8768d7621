"""Turns: attempts that wait at a `Gate` until they may start a sandbox, and the options of that gate.

One loop, one clock (the loop's).
"""

from __future__ import annotations

import argparse
import asyncio
import math
from typing import TYPE_CHECKING

from rl360.sandboxes.admission import Gate, Reservations, Room
from rl360.sandboxes.waves import Pace, Waves

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

    def settle(self, key: str, ok: bool, refused: bool) -> None:
        """Its sandbox is ready, or did not start."""
        self.gate.waves.settle(key, asyncio.get_running_loop().time(), ok=ok, refused=refused)
        self._pass()

    def leave(self, key: str) -> None:
        """It needs no sandbox any more, and its sandboxes are gone."""
        self.gate.leave(key)
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


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-concurrent", type=int, default=32, help="attempts that run at once")
    parser.add_argument("--per-task", type=int, default=None, help="of them of one task (default: all)")
    parser.add_argument("--wave-size", type=int, default=32, help="sandboxes that begin to start in a wave")
    parser.add_argument("--wave-interval-s", type=float, default=0.25, help="seconds from wave to wave")
    parser.add_argument("--ready-goal-s", type=float, default=1.0, help="starts that take longer slow down the next")
    form = "cpus=N,memory_mb=N,pids=N,disk_mb=N"
    parser.add_argument(
        "--promise", type=_promise, default={}, metavar=form, help="what may be reserved (default: all)"
    )


def gate_of(args: argparse.Namespace, room: Room) -> Gate:
    """As the options say; `room`: what there is, where they say nothing."""
    everything = args.max_concurrent
    pace = Pace(args.wave_size, args.wave_interval_s, everything, args.per_task or everything, args.ready_goal_s)
    return Gate(Waves(pace), Reservations(room._replace(**args.promise)))


def _promise(text: str) -> dict[str, int]:
    """Fields of a `Room`."""
    found = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in ("cpus", *Room._fields[1:]) or not value.isdecimal():
            raise argparse.ArgumentTypeError(f"{part!r}: give cpus, memory_mb, pids, disk_mb as NAME=WHOLE NUMBER")
        found["milli_cpus" if name == "cpus" else name] = int(value) * (1000 if name == "cpus" else 1)
    return found
