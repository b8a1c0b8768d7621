"""What this host can promise to sandboxes."""

from __future__ import annotations

import os
from pathlib import Path

from rl360.sandboxes.admission import Room

_LIMITS = ("/sys/fs/cgroup/{0}.max", "/sys/fs/cgroup/{0}/{1}")  # v2 of a container, v1


def host_room(folder: Path) -> Room:
    """Cores this process may use, memory and pids of the machine or of its container, free disk at `folder`."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    memory = min(pages * page, _limit("memory", "memory.limit_in_bytes"))
    pids = min(_number("/proc/sys/kernel/pid_max"), _limit("pids", "pids.max"))
    disk = os.statvfs(folder)
    return Room(1000 * len(os.sched_getaffinity(0)), memory >> 20, pids, disk.f_bavail * disk.f_frsize >> 20)


def _limit(controller: str, file: str) -> int:
    return min(_number(pattern.format(controller, file)) for pattern in _LIMITS)


def _number(path: str) -> int:
    """What a file of the kernel says; one that is not there, or says `max`, is no limit."""
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return 1 << 62
