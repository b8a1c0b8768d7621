"""What this host can promise to sandboxes."""

from __future__ import annotations

import os
from pathlib import Path

from rl360.sandboxes.admission import Room

_LIMITS = ("sys/fs/cgroup/{0}.max", "sys/fs/cgroup/{0}/{1}")  # v2 of a container, v1
_NONE = 1 << 62


def host_room(folder: Path, root: Path = Path("/")) -> Room:
    """Cores this process may use, memory and pids of the machine or of its container, free disk at `folder`.

    root: where the kernel's files are."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    memory = min(pages * page, _limit(root, "memory", "memory.limit_in_bytes"))
    pids = min(_number(root / "proc/sys/kernel/pid_max"), _limit(root, "pids", "pids.max"))
    disk = os.statvfs(folder)
    milli_cpus = min(1000 * len(os.sched_getaffinity(0)), _milli_cpus(root / "sys/fs/cgroup"))
    return Room(milli_cpus, memory >> 20, pids, disk.f_bavail * disk.f_frsize >> 20)


def _milli_cpus(groups: Path) -> int:
    """What a container's quota lets it use."""
    try:
        quota, period = (groups / "cpu.max").read_text().split()
    except (OSError, ValueError):
        quota, period = str(_number(groups / "cpu/cpu.cfs_quota_us")), str(_number(groups / "cpu/cpu.cfs_period_us"))
    limited = quota.isdecimal() and int(quota) < _NONE and period.isdecimal() and int(period) > 0
    return int(quota) * 1000 // int(period) if limited else _NONE


def _limit(root: Path, controller: str, file: str) -> int:
    return min(_number(root / pattern.format(controller, file)) for pattern in _LIMITS)


def _number(path: Path) -> int:
    """What a file of the kernel says; one that is not there, or says `max`, is no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return _NONE
