"""The local supervisor: `python -m infra.local.supervisor HOME`, one detached process that keeps the services running.

Contract: starts each service in a process group of its own when what it needs is ready, probes it, writes what it sees
to `state.json`, and starts it again with backoff when it dies; after `MAX_FAST_DEATHS` early deaths in a row it is
`failed` and stays so. A dead engine is first taken out of the gateway, so that no request reaches it before a weight
push has confirmed it again. SIGTERM stops everything in reverse order. Nothing here outlives it on purpose; what does
after a SIGKILL is found by its marker (see cleanup).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from infra.local import cleanup, proc
from infra.local.plan import REPO_ROOT, Spec, UpOptions, addresses, build_specs
from infra.local.probes import Prober
from infra.local.state import ServiceState, Status, SupervisorState, write_state
from rl360.config.services import Services

OPTIONS_FILE = "up.json"
LOCK_FILE = "supervisor.lock"
MAX_FAST_DEATHS = 5
MAX_FIRST_DEATHS = 2  # of a service that was never ready: starting it again and again only takes the cores
FAST_DEATH_S = 20.0
REFUSED_EXIT = 2  # bad usage: starting again cannot help
BACKOFF_MAX_S = 15.0
PROBE_EVERY_S = 5.0
UNRESPONSIVE_AFTER = 4
RSS_EVERY_S = 30.0
FENCE_DEADLINE_S = 5.0
UVICORN_END = "Application startup failed"


def backoff_s(fast_deaths: int) -> float:
    """0.5, 1, 2, 4, ... seconds before the next start."""
    return min(BACKOFF_MAX_S, 0.5 * 2 ** max(0, fast_deaths - 1))


class Supervisor:
    """Owns the services' processes and is the only writer of `state.json`."""

    def __init__(self, options: UpOptions, services: Services, specs: list[Spec], instance: str) -> None:
        self.home = Path(options.home)
        self.services = services
        self.specs = specs
        self.stopping = asyncio.Event()
        self.ready = {spec.name: asyncio.Event() for spec in specs}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        # one heavy start a core: more of them only stretch each other
        self.slots = asyncio.Semaphore(max(2, os.cpu_count() or 2))
        own = proc.read(os.getpid())
        self.state = SupervisorState(
            instance=instance,
            home=str(self.home),
            pid=os.getpid(),
            start_ticks=own.start_ticks if own else 0,
            started_at=time.time(),
            ui_url=services.prefect_ui_url,
            ports=sorted({port for spec in specs for port in spec.ports}),
            services={spec.name: ServiceState(port=spec.port) for spec in specs},
        )
        self.prober = Prober(services)

    def note(self, name: str, **changes: object) -> None:
        """Change one service's row and write the file."""
        self.state.services[name] = self.state.services[name].model_copy(update=changes)
        write_state(self.home, self.state)

    async def run(self) -> None:
        """Until SIGTERM or SIGINT."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopping.set)
        write_state(self.home, self.state)
        async with self.prober:
            tasks = [asyncio.create_task(self.keep(spec), name=spec.name) for spec in self.specs]
            tasks.append(asyncio.create_task(self.weigh(), name="weigh"))
            for task in tasks:
                task.add_done_callback(self.stop_on_error)
            await self.stopping.wait()
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        self.state.stopping = True
        write_state(self.home, self.state)
        await asyncio.to_thread(self.stop_all)
        for result in results:
            if isinstance(result, Exception):
                raise result

    def stop_on_error(self, task: asyncio.Task[None]) -> None:
        """A defect in the supervisor itself stops everything: half-watched services are worse than none."""
        if not task.cancelled() and task.exception() is not None:
            self.stopping.set()

    async def keep(self, spec: Spec) -> None:
        """One service's life: wait for what it needs, start, probe, watch, start again."""
        fast_deaths, ever_ready = 0, False
        while True:
            for name in spec.after:
                await self.ready[name].wait()
            async with self.slots if spec.heavy else contextlib.nullcontext():
                started_s = time.monotonic()
                process = self.start(spec)
                problem = await self.until_ready(spec, process, started_s)
            ready_s, was_ready = time.monotonic(), problem is None
            if problem is None and spec.one_shot:
                self.note(spec.name, status=Status.DONE, pid=None)
                self.ready[spec.name].set()
                return
            if problem is None:
                ever_ready = True
                self.ready[spec.name].set()
                problem = await self.watch(spec, process)
            self.ready[spec.name].clear()
            await self.bury(spec, process)
            fast_deaths = fast_deaths + 1 if time.monotonic() - ready_s < FAST_DEATH_S else 0
            restarts = self.state.services[spec.name].restarts
            limit = MAX_FAST_DEATHS if ever_ready else MAX_FIRST_DEATHS
            if fast_deaths >= limit or (process.returncode == REFUSED_EXIT and not was_ready):
                times = f"{fast_deaths} deaths in a row" if fast_deaths > 1 else "it refuses its options"
                detail = f"{problem} ({times}, given up): {last_line(self.log_path(spec.name))}"
                self.note(spec.name, status=Status.FAILED, detail=detail, pid=None)
                return
            self.note(spec.name, status=Status.BACKOFF, detail=problem, restarts=restarts + 1, pid=None)
            await asyncio.sleep(backoff_s(fast_deaths))

    def log_path(self, name: str) -> Path:
        return self.home / "logs" / f"{name}.log"

    def start(self, spec: Spec) -> subprocess.Popen[bytes]:
        """A new incarnation, in its own session, with its output appended to its log."""
        incarnation = uuid.uuid4().hex
        with self.log_path(spec.name).open("ab") as log:
            log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} incarnation {incarnation}\n".encode())
            log.flush()
            process = subprocess.Popen(
                spec.argv,
                cwd=REPO_ROOT,
                env=spec.env | {"RL360_INCARNATION": incarnation},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes[spec.name] = process
        row = proc.read(process.pid)
        self.note(
            spec.name,
            status=Status.STARTING,
            pid=process.pid,
            start_ticks=row.start_ticks if row else 0,
            incarnation=incarnation,
            started_at=time.time(),
            ready_after_s=None,
        )
        return process

    async def until_ready(self, spec: Spec, process: subprocess.Popen[bytes], started_s: float) -> str | None:
        """None once the probe answers; else what went wrong."""
        pause_s = 0.1
        while True:
            code = process.poll()
            if code is not None and (code != 0 or not spec.one_shot):
                return f"ended with {_exit(code)} before it was ready"
            if await self.prober.ok(spec, self.state.services[spec.name].incarnation, code):
                seconds = round(time.monotonic() - started_s, 1)
                self.note(spec.name, status=Status.READY, ready_after_s=seconds, detail="")
                return None
            if time.monotonic() - started_s > spec.start_deadline_s:
                return f"not ready within {spec.start_deadline_s:.0f} s"
            await asyncio.sleep(pause_s)
            pause_s = min(1.0, pause_s * 1.5)

    async def watch(self, spec: Spec, process: subprocess.Popen[bytes]) -> str:
        """Until it dies. One that lives but does not answer is only reported: on a busy machine it may just be slow."""
        misses, next_probe_s = 0, time.monotonic() + PROBE_EVERY_S
        while True:
            code = process.poll()
            if code is not None:
                return f"ended with {_exit(code)}"
            if time.monotonic() >= next_probe_s:
                good = await self.prober.ok(spec, self.state.services[spec.name].incarnation, None)
                misses = 0 if good else misses + 1
                status = self.state.services[spec.name].status
                if misses >= UNRESPONSIVE_AFTER and status is Status.READY:
                    self.note(spec.name, status=Status.UNRESPONSIVE, detail=f"{misses} probes without an answer")
                elif good and status is Status.UNRESPONSIVE:
                    self.note(spec.name, status=Status.READY, detail="")
                next_probe_s = time.monotonic() + PROBE_EVERY_S
            await asyncio.sleep(0.2)

    async def bury(self, spec: Spec, process: subprocess.Popen[bytes]) -> None:
        """After a death: out of the gateway first, then nothing of the old incarnation may be left."""
        if spec.name.startswith("engine-") and spec.port is not None:
            await self.prober.remove_worker(f"http://127.0.0.1:{spec.port}", FENCE_DEADLINE_S)
        row = self.state.services[spec.name]
        if process.poll() is None or spec.sweep:
            await asyncio.to_thread(cleanup.end_incarnation, row, whole=spec.sweep)
        # in a thread: one process that cannot be killed must not stop the watch over the others
        await asyncio.to_thread(process.wait)

    async def weigh(self) -> None:
        """Keep the memory column fresh."""
        while True:
            await asyncio.sleep(RSS_EVERY_S)
            for name, row in list(self.state.services.items()):
                if row.pid is not None:
                    size = await asyncio.to_thread(proc.rss_bytes, row.pid)
                    self.state.services[name] = self.state.services[name].model_copy(update={"rss_bytes": size})
            write_state(self.home, self.state)

    def stop_all(self) -> None:
        """Flow runs first, so that they end as Crashed, not as Running for ever; then services, last one first."""
        cleanup.stop_flow_runs(self.state.instance)
        for spec in reversed(self.specs):
            process = self.processes.get(spec.name)
            row = self.state.services[spec.name]
            if process is not None and row.pid is not None:
                _terminate(process, spec.stop_grace_s)
                cleanup.end_incarnation(row, whole=True)
            self.note(spec.name, status=Status.STOPPED, pid=None, detail="")


def last_line(path: Path) -> str:
    """The last line of a log that says something: not empty, not our own mark, not uvicorn's end after a traceback."""
    with path.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - 4096))
        lines = [line.strip() for line in stream.read().decode(errors="replace").splitlines()]
    said = [line for line in lines if line and not line.startswith("--- ") and UVICORN_END not in line]
    return said[-1] if said else "its log is empty"


def _exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _terminate(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """SIGTERM to the leader, which ends its own children; its group is killed after this."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)


def main() -> int:
    home = Path(sys.argv[1])
    lock = (home / LOCK_FILE).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until this process ends, however it ends
    except BlockingIOError:
        print(f"another supervisor holds {home / LOCK_FILE}", file=sys.stderr)
        return 1
    options = UpOptions.model_validate_json((home / OPTIONS_FILE).read_text())
    services = addresses(options)
    instance = os.environ[proc.INSTANCE_ENV]
    specs = build_specs(options, services.secrets(), instance)

    async def run() -> None:
        await Supervisor(options, services, specs, instance).run()

    asyncio.run(run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
