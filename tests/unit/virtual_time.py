"""An event loop whose clock jumps to the next timer instead of waiting for it: hours of deadlines in milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from rl360.harbor import app as app_module
from rl360.harbor import runner as runner_module
from rl360.sandboxes.admission import Gate, Reservations, Room
from rl360.sandboxes.waves import Pace, Waves

_Result = TypeVar("_Result")


class _Jumping(selectors.SelectSelector):
    """Never waits: where the loop would, its clock moves on."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout:
            self.loop.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual. Work of threads is done at once, in this thread: no time passes meanwhile."""

    def __init__(self) -> None:
        self.now = 1000.0
        selector = _Jumping()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def run_in_executor(self, _executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # as a thread would
            future.set_exception(error)
        return future


def run_virtual(work: Coroutine[Any, Any, _Result]) -> _Result:
    """`asyncio.run` in virtual time, which is also the time of the phases of attempts."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner, pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(monotonic=runner.get_loop().time)
        for module in (runner_module, app_module):
            patch.setattr(module, "time", clock)
        return runner.run(work)


def gate(slots: int) -> Gate:
    """So many attempts at once, and nothing else to wait for."""
    plenty = 10**6
    return Gate(Waves(Pace(plenty, 0.0, slots, slots, float(plenty))), Reservations(Room(*[plenty] * 4)))
