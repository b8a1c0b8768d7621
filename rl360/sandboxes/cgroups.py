"""Control groups of sandboxes: memory, pids and cpu limits on cgroup v1 or v2, whichever this host offers.

Groups are nested under this process's own path, named after the server's folder, and removed at stop. `rmdir` succeeds
only on a group without processes, so a removed group is evidence that its processes are gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl360.harbor.protocol import SandboxLimits

CONTROLLERS = ("memory", "pids", "cpu")
CPU_PERIOD_US = 100_000
USUAL_CPUS = 0.05  # a sandbox that reserves so much weighs as any process; others in proportion


@dataclass(frozen=True)
class Parents:
    """Writable parent groups: controller -> v1 directory, and the v2 directory with the controllers it can give."""

    v1: tuple[tuple[str, Path], ...]
    v2: Path | None
    v2_controllers: frozenset[str]

    @property
    def controllers(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.v1) | self.v2_controllers


@dataclass(frozen=True)
class Group:
    """The directories of one sandbox's groups (one on v2; one per controller on v1)."""

    paths: tuple[Path, ...]

    @property
    def joins(self) -> tuple[str, ...]:
        return tuple(str(path / "cgroup.procs") for path in self.paths)


def _mounts() -> dict[str, Path]:
    """v1 controller -> mount point; key '' is the v2 mount point."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup2":
            found.setdefault("", Path(where))
        elif kind == "cgroup":
            for name in set(options.split(",")) & set(CONTROLLERS):
                found.setdefault(name, Path(where))
    return found


def _own_paths() -> dict[str, str]:
    """controller -> this process's path in that hierarchy; key '' is v2."""
    found: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            found[name] = path.lstrip("/")
    return found


def _v2_controllers(base: Path, wanted: Iterable[str]) -> frozenset[str]:
    """Controllers that children of `base` get. A group with processes of its own cannot give any (but the root can)."""
    try:
        available = set((base / "cgroup.controllers").read_text().split()) & set(wanted)
        enabled = set((base / "cgroup.subtree_control").read_text().split()) & available
    except OSError:
        return frozenset()
    # not delegated to us, or the group holds processes: then what is enabled already is what there is
    with contextlib.suppress(OSError):
        for name in sorted(available - enabled):
            (base / "cgroup.subtree_control").write_text(f"+{name}")
            enabled.add(name)
    return frozenset(enabled)


@cache
def parents() -> Parents:
    """What this process may create groups under; nothing at all is a valid answer (limits fall back to rlimits)."""
    try:
        mounts, own = _mounts(), _own_paths()
    except OSError:
        return Parents((), None, frozenset())
    v1 = []
    for name in CONTROLLERS:
        if name in mounts and name in own:
            base = mounts[name] / own[name]
            if os.access(base, os.W_OK):
                v1.append((name, base))
    left = [name for name in CONTROLLERS if name not in dict(v1)]
    v2 = mounts[""] / own.get("", "") if "" in mounts else None
    if v2 is None or not left or not os.access(v2, os.W_OK):
        return Parents(tuple(v1), None, frozenset())
    given = _v2_controllers(v2, left)
    return Parents(tuple(v1), v2 if given else None, given)


def prefix(root: Path) -> str:
    """What names of groups of the sandbox server of folder `root` begin with, and of no other server of the host."""
    return f"rl360-{sha256(os.fsencode(root.resolve())).hexdigest()[:12]}-"


def planned(name: str) -> Group:
    """The directories that `create` makes for this name, whether they exist or not."""
    found = parents()
    return Group(tuple(base / name for base in (*(base for _, base in found.v1), found.v2) if base is not None))


def create(name: str, limits: SandboxLimits) -> Group:
    """Make the groups of one sandbox with its limits written; on failure nothing is left and OSError is raised."""
    found = parents()
    memory = str(limits.memory_mb << 20)
    quota = str(max(1000, int(limits.cpus * CPU_PERIOD_US)))
    weight = limits.reserved_cpus / USUAL_CPUS
    made: list[Path] = []
    try:
        for controller, base in found.v1:
            path = base / name
            path.mkdir()
            made.append(path)
            if controller == "memory":
                _write(path / "memory.limit_in_bytes", memory)
            elif controller == "pids":
                _write(path / "pids.max", str(limits.pids))
            else:
                _write(path / "cpu.cfs_quota_us", quota)
                _write(path / "cpu.shares", str(min(1 << 18, max(2, int(1024 * weight)))))
        if found.v2 is not None:
            path = found.v2 / name
            path.mkdir()
            made.append(path)
            if "memory" in found.v2_controllers:
                _write(path / "memory.max", memory)
                with contextlib.suppress(FileNotFoundError):  # a kernel that does not count swap
                    _write(path / "memory.swap.max", "0")
            if "pids" in found.v2_controllers:
                _write(path / "pids.max", str(limits.pids))
            if "cpu" in found.v2_controllers:
                _write(path / "cpu.max", f"{quota} {CPU_PERIOD_US}")
                _write(path / "cpu.weight", str(min(10_000, max(1, int(100 * weight)))))
    except OSError:
        remove(Group(tuple(made)))
        raise
    return Group(tuple(made))


def _write(path: Path, value: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, value.encode())
    finally:
        os.close(descriptor)


def pids(group: Group) -> list[int]:
    """What is in a sandbox; nothing where there are no groups, or not any more."""
    try:
        return [int(pid) for path in group.paths[:1] for pid in (path / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def kill(group: Group) -> None:
    """SIGKILL every process in the groups: `cgroup.kill` on v2, each listed pid on v1. Never raises on a gone group."""
    for path in group.paths:
        try:
            if (path / "cgroup.kill").exists():
                _write(path / "cgroup.kill", "1")
            else:
                for pid in (path / "cgroup.procs").read_text().split():
                    if pid != "0":  # of a namespace we do not see; to kill 0 is to kill ourselves
                        os.kill(int(pid), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            continue


def remove(group: Group) -> list[Path]:
    """Remove the groups; returns those that still hold something."""
    left = []
    for path in group.paths:
        try:
            path.rmdir()
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
                raise
            left.append(path)
    return left


def limit_hits(group: Group) -> dict[str, int]:
    """How often a limit was hit: `pids` refused forks, `oom` of its own memory (a host that is out of memory kills in
    it too). Absent counters are left out."""
    hits: dict[str, int] = {}
    for path in group.paths:
        for file, key, name in (
            ("pids.events", "max", "pids"),
            ("memory.events", "oom", "oom"),
            ("memory.oom_control", "oom_kill", "oom"),
        ):
            try:
                lines = (path / file).read_text().splitlines()
                if file == "memory.oom_control" and (path / "memory.failcnt").read_text().strip() == "0":
                    continue
            except OSError:
                continue
            for line in lines:
                word, _, count = line.partition(" ")
                if word == key and count.isdigit():
                    hits[name] = max(hits.get(name, 0), int(count))
    return hits
