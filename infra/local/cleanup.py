"""Ending what an instance started, and proving that nothing is left: processes, sandboxes, control groups, mounts."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from infra.local import proc
from infra.local.state import ServiceState, SupervisorState
from rl360.sandboxes import cgroups

SUPERVISOR = "supervisor"
FLOW_RUN_GRACE_S = 10.0
CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Leftovers:
    """What is still there; all zero is what `down` promises."""

    processes: int
    sandboxes: int
    cgroups: int
    mounts: int

    @property
    def clean(self) -> bool:
        return not (self.processes or self.sandboxes or self.cgroups or self.mounts)

    def __str__(self) -> str:
        return (
            f"{self.processes} processes, {self.sandboxes} sandboxes, {self.cgroups} cgroups, {self.mounts} mounts left"
        )


def end_incarnation(row: ServiceState, *, whole: bool) -> None:
    """Kill what one incarnation left: its group and everything marked with it, or (`whole=False`) only its leader."""
    if row.pid is None:
        return
    pid, ticks = row.pid, row.start_ticks or 0

    def find() -> set[int]:
        rows = proc.table()
        if not whole:
            return {pid} if proc.is_alive(pid, ticks) else set()
        roots = proc.group_members(pid, ticks, rows) | proc.marked(f"RL360_INCARNATION={row.incarnation}", rows)
        return proc.descendants(roots, rows)

    proc.end(find, grace_s=0.0)


def stop_flow_runs(instance: str) -> None:
    """SIGTERM to the worker's children and to the orphans of earlier workers: they report how they ended."""

    def find() -> set[int]:
        rows = proc.table()
        ours = proc.marked(f"{proc.SERVICE_ENV}=worker", rows) & proc.marked(f"{proc.INSTANCE_ENV}={instance}", rows)
        return {pid for pid in ours if _is_flow_run(pid)}

    proc.end(find, FLOW_RUN_GRACE_S)


def _is_flow_run(pid: int) -> bool:
    return any(entry.startswith("PREFECT__FLOW_RUN_ID=") for entry in proc.environ(pid))


def instance_pids(state: SupervisorState, rows: dict[int, proc.Process]) -> set[int]:
    """Every living process of an instance but its supervisor and ourselves."""
    found = proc.marked(f"{proc.INSTANCE_ENV}={state.instance}", rows)
    for row in state.services.values():
        if row.pid is not None and row.start_ticks is not None:
            found |= proc.group_members(row.pid, row.start_ticks, rows)
    found = proc.descendants(found, rows)
    supervisor = {state.pid} if proc.is_alive(state.pid, state.start_ticks) else set()
    return found - supervisor - {os.getpid()}


def sweep(home: Path, state: SupervisorState | None) -> int:
    """End whatever of this home's instances still runs; returns how many processes that were."""
    count = 0
    if state is not None:
        instance = state
        stop_flow_runs(instance.instance)
        count, _ = proc.end(lambda: instance_pids(instance, proc.table()), grace_s=3.0)
    sandboxes, _ = proc.end(lambda: proc.descendants(proc.sandboxes_of(home, rows := proc.table()), rows), grace_s=0.0)
    _remove_cgroups(home)
    _unmount(home)
    for port in state.ports if state is not None else ():
        _remove_sockets(port)
    _remove_shared_memory()
    return count + sandboxes


def check(home: Path, state: SupervisorState | None) -> Leftovers:
    """Look again, independently of what the sweep believes."""
    rows = proc.table()
    sandboxes = proc.sandboxes_of(home, rows)
    processes = set() if state is None else instance_pids(state, rows) - sandboxes
    return Leftovers(
        processes=len(processes),
        sandboxes=len(sandboxes),
        cgroups=len(_cgroups(home)),
        mounts=len(_mounts(home)),
    )


def _cgroups(home: Path) -> list[Path]:
    """Groups that the sandboxes of this home recorded and that still exist; never anything outside the cgroup tree."""
    found = []
    for record in (home / "sandboxes").glob("*/live/*/rl360-*.json"):
        if record.is_symlink() or not record.is_file():
            continue
        try:
            paths, own = json.loads(record.read_text())["cgroups"], cgroups.prefix(record.parents[2])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged: the server names it at its next start
        for text in paths:
            path = Path(text)
            inside = path.is_relative_to(CGROUP_ROOT) and path.name.startswith(own) and ".." not in path.parts
            if inside and path.is_dir():
                found.append(path)
    return found


def _remove_cgroups(home: Path) -> None:
    for path in _cgroups(home):
        with contextlib.suppress(OSError):  # still holds a process: the check that follows counts it
            path.rmdir()


def _mounts(home: Path) -> list[str]:
    """Mount points under the home, deepest first."""
    prefix = f"{home}/"
    points = [line.split()[4].replace("\\040", " ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return sorted((point for point in points if point.startswith(prefix)), key=len, reverse=True)


def _unmount(home: Path) -> None:
    for point in _mounts(home):
        subprocess.run(["umount", "-l", point], stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False)


def _remove_shared_memory() -> None:
    """A killed engine leaves its load statistics in shared memory; what no process maps is nobody's."""
    stale = set()
    for path in Path("/dev/shm").glob("sglang_loads_*"):
        with contextlib.suppress(FileNotFoundError):  # another `down` may be at it
            if path.stat().st_uid == os.getuid():
                stale.add(path)
    for pid in proc.table() if stale else ():
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
            stale -= {path for path in stale if str(path) in maps}
    for path in stale:
        path.unlink(missing_ok=True)


def _remove_sockets(port: int) -> None:
    """The object store leaves one socket a port in the temporary folder."""
    for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
        path.unlink(missing_ok=True)
