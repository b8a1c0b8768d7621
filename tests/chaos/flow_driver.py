"""Run `rl_run` in processes of their own and SIGKILL them at a chosen point. Used by test_kill_flow.py.

Each line on stdin asks for a run: `{"config": ..., "kill_point": ... or null, "log": path}`; its exit code is answered
on stdout (-9: killed). The processes are forks of this one, which has imported the flow and has run nothing of it: each
begins where a new interpreter would, but for the seconds that importing takes.

A kill point is `TASK:before` (work done, manifest not yet written), `TASK:after` (manifest written, nothing after it)
or one of the named points inside a task's work: `roll_out:attempts` (some records stored), `train:sent` (the trainer
has the request), `push_weights:sent` (a transfer is under way). The process kills itself at the first time the run
comes by that point, by a real SIGKILL: no `finally`, no hook, no atexit runs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

from flows.rl_run import rl_run
from rl360.config.run import RunConfig

DEADLINE_S = 300


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


def run(config: str, kill_point: str | None, log: str) -> None:
    """In the fork: the run, what it writes in `log`."""
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for own, target in ((os.open(os.devnull, os.O_RDONLY), 0), (written, 1), (written, 2)):
        os.dup2(own, target)
    signal.alarm(DEADLINE_S)
    if kill_point is not None:
        arm(kill_point)
    state = rl_run(RunConfig.parse(config), return_state=True)
    print(f"state {state.name}: {state.message}")
    raise SystemExit(0 if state.is_completed() else 1)


def main() -> None:
    for line in sys.stdin:
        assert threading.active_count() == 1, "a fork would miss the other threads of this process"
        pid = os.fork()
        if pid == 0:
            run(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
