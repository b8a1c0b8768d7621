"""Processes as Linux's `/proc` shows them: who is alive, who belongs to an instance, and how to end them for good.

A process is named by pid and start time, so a reused pid is never mistaken for ours. What belongs to an instance is
found three ways, because each alone misses some: the marker in its first environment (a process that rewrites its
title overwrites that memory), the process group of a service, and being a descendant of such a process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

INSTANCE_ENV = "RL360_INSTANCE"
SERVICE_ENV = "RL360_SERVICE"
SANDBOX_ENV = "RL360_SANDBOX"
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Process:
    """One row of /proc: `start_ticks` is field 22 of stat, `group` its process group."""

    pid: int
    parent: int
    group: int
    state: str
    start_ticks: int

    @property
    def alive(self) -> bool:
        return self.state not in "ZXx"


def read(pid: int) -> Process | None:
    """The process under this pid, zombies included; None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return Process(pid, int(fields[1]), int(fields[2]), fields[0], int(fields[19]))


def is_alive(pid: int, start_ticks: int) -> bool:
    """Whether exactly this process lives."""
    process = read(pid)
    return process is not None and process.alive and process.start_ticks == start_ticks


def table() -> dict[int, Process]:
    """All living processes of this pid namespace."""
    rows = (read(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {row.pid: row for row in rows if row is not None and row.alive}


def environ(pid: int) -> frozenset[str]:
    """`NAME=value` entries of the environment the process started with; empty when it may not be read."""
    try:
        return frozenset(Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0"))
    except OSError:
        return frozenset()


def descendants(roots: Iterable[int], rows: dict[int, Process]) -> set[int]:
    """The given pids and everything started below them that lives."""
    children: dict[int, list[int]] = {}
    for row in rows.values():
        children.setdefault(row.parent, []).append(row.pid)
    found: set[int] = set()
    queue = [pid for pid in roots if pid in rows]
    while queue:
        pid = queue.pop()
        if pid not in found:
            found.add(pid)
            queue += children.get(pid, [])
    return found


def group_members(group: int, start_ticks: int, rows: dict[int, Process]) -> set[int]:
    """Members of a service's group, given its leader's start time. While the group has members, its number is not given
    to a new process: a leader with another start time means that ours is long empty."""
    leader = rows.get(group)
    if leader is not None and leader.start_ticks != start_ticks:
        return set()
    return {row.pid for row in rows.values() if row.group == group}


def marked(entry: str, rows: dict[int, Process]) -> set[int]:
    """Processes whose first environment holds this `NAME=value`."""
    return {pid for pid in rows if entry in environ(pid)}


def sandboxes_of(home: Path, rows: dict[int, Process]) -> set[int]:
    """First processes of sandboxes whose workspace is under `home`: they start with an environment of their own."""
    prefix = f"{SANDBOX_ENV}={home}/"
    return {pid for pid in rows if any(entry.startswith(prefix) for entry in environ(pid))}


def rss_bytes(group: int) -> int:
    """Memory of a service: its group and all descendants, shared pages counted once (Pss), or resident where that may
    not be read."""
    rows = table()
    members = {row.pid for row in rows.values() if row.group == group}
    return sum(_pss_bytes(pid) for pid in descendants(members, rows))


def _pss_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError):
        return 0


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal each; one that ended meanwhile is what we want."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def end(find: Callable[[], set[int]], grace_s: float, deadline_s: float = 10.0) -> tuple[int, set[int]]:
    """End what `find` returns, looking again until nothing is left: SIGTERM, then SIGKILL after `grace_s`.

    Returns how many were ended and who is still there `deadline_s` after the first SIGKILL. `grace_s=0` kills at once.
    """
    seen: set[int] = set()
    started_s = time.monotonic()
    termed: set[int] = set()
    while True:
        left = find() - {os.getpid()}
        seen |= left
        if not left:
            return len(seen), set()
        elapsed_s = time.monotonic() - started_s
        if elapsed_s > grace_s + deadline_s:
            return len(seen - left), left
        if elapsed_s < grace_s:
            send(left - termed, signal.SIGTERM)
            termed |= left
        else:
            send(left, signal.SIGKILL)
        time.sleep(0.05)
