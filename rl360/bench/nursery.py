"""Engines as forks of one process that has done their imports: a replaced engine is up in a third of the CPU time.

For benchmarks and tests that end engines again and again, without a GPU. What is forked is `rl360.engines.launch` as
the launcher itself runs it, each in a session of its own; nobody waits for it but the nursery, which reaps it.

`python -m rl360.bench.nursery` reads lines `{"argv": [...], "log": PATH}` and answers each with a pid.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

from rl360.engines.processes import ProcessId, identify
from rl360.errors import Rl360Error

ENGINE_ENV = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "RL360_TOKEN_FILE": "", "SGLANG_USE_CPU_ENGINE": "1"}


class Nursery:
    """The process that imports once. Engines outlive it; whoever started them ends them."""

    def __init__(self, log: Path) -> None:
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rl360.bench.nursery"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env={**os.environ, **ENGINE_ENV},
                text=True,
            )

    def start(self, argv: list[str], log: Path) -> ProcessId:
        """An engine of `rl360.engines.launch`'s arguments, about to start; it appends to `log`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"argv": argv, "log": str(log)}) + "\n")
            self._process.stdin.flush()
            pid = int(self._process.stdout.readline())
        except (OSError, ValueError):
            raise Rl360Error(f"the engines' nursery ended: {self.log.read_text()[-2000:]}") from None
        process = identify(pid)
        if process is None:
            raise Rl360Error(f"an engine ended at once: {log.read_text()[-2000:]}")
        return process

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=15)


def _become_engine(argv: list[str], log: str) -> None:
    """In the fork, for good."""
    from rl360.engines import launch

    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for own, target in ((os.open(os.devnull, os.O_RDONLY), 0), (written, 1), (written, 2)):
        os.dup2(own, target)
    random.seed()
    sys.argv = [launch.__file__, *argv]
    launch.serve(argv, cpu=True)


def main() -> None:
    from rl360.engines import launch
    from rl360.training.loopback import keep_stores_on_their_host

    keep_stores_on_their_host()
    launch.prepare_cpu()
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.scheduler  # noqa: F401 - what forks are to have

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps engines that end
    for line in sys.stdin:
        if threading.active_count() != 1:
            raise SystemExit("a fork would miss the other threads of this process")
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become_engine(**asked)
            os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
