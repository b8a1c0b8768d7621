"""Run `rl_run` in this process and SIGKILL it at a chosen point. Used by test_kill_flow.py in a process of its own.

Usage: python tests/chaos/flow_driver.py CONFIG_JSON [KILL_POINT]

A kill point is `TASK:before` (work done, manifest not yet written), `TASK:after` (manifest written, nothing after it)
or one of the named points inside a task's work: `roll_out:attempts` (some records stored), `train:sent` (the trainer
has the request), `push_weights:sent` (a transfer is under way). The process kills itself at the first time the run
comes by that point, by a real SIGKILL: no `finally`, no hook, no atexit runs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _at_commit(task: str, when: str) -> None:
    import tasks.durable as durable

    original = durable.commit_manifest

    def commit(store: Any, manifest: Any) -> Any:
        if manifest.task.split("-")[0] != task:
            return original(store, manifest)
        if when == "before":
            _die()
        original(store, manifest)
        _die()
        return None

    durable.commit_manifest = commit


def _after_records(objects: int) -> None:
    from rl360.agents.records import RecordLog

    original, lock, seen = RecordLog._write, threading.Lock(), []

    def write(self: Any, batch: Any) -> None:
        original(self, batch)
        with lock:
            seen.append(len(batch))
            if len(seen) >= objects:
                _die()

    RecordLog._write = write  # type: ignore[method-assign]


def _while_sent(method: str, delay_s: float) -> None:
    from rl360.training.client import TrainerClient

    original = getattr(TrainerClient, method)

    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        threading.Thread(target=lambda: (time.sleep(delay_s), _die()), daemon=True).start()
        return await original(self, *args, **kwargs)

    setattr(TrainerClient, method, call)


def arm(point: str) -> None:
    """Arrange the SIGKILL."""
    task, when = point.split(":")
    if when in ("before", "after"):
        _at_commit(task, when)
    elif point == "roll_out:attempts":
        _after_records(2)
    elif point == "train:sent":
        _while_sent("put_step", 0.05)
    elif point == "push_weights:sent":
        _while_sent("transfer", 0.05)
    else:
        raise SystemExit(f"unknown kill point {point}")


def main() -> None:
    from flows.rl_run import rl_run
    from rl360.config.run import RunConfig

    if len(sys.argv) > 2:
        arm(sys.argv[2])
    state = rl_run(RunConfig.parse(sys.argv[1]), return_state=True)
    print(f"state {state.name}: {state.message}")
    raise SystemExit(0 if state.is_completed() else 1)


if __name__ == "__main__":
    main()
