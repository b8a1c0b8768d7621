"""What this host can promise to sandboxes, and which of its servers promised what.

Each server writes its promise to a file of its own under the home and holds a lock on it for as long as it lives. A
new one is let in when the living ones leave it enough: together they never promise more than there is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

import orjson

from rl360.engines.processes import boot_id
from rl360.errors import BadInput
from rl360.sandboxes.admission import Room

_NONE = 1 << 62
FLOOR_BYTES, FLOOR_SHARE = 256 << 20, 50


def host_room(folder: Path, root: Path = Path("/")) -> Room:
    """Cores this process may use, memory and pids of the machine or of the groups it is in, disk at `folder` that is
    free before it counts as full.

    root: where the kernel's files are."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    memory = min(pages * page, _limit(root, "memory", "memory.max", "memory.limit_in_bytes"))
    pids = min(_number(root / "proc/sys/kernel/pid_max"), _limit(root, "pids", "pids.max"))
    disk = os.statvfs(folder)
    milli_cpus = min(1000 * len(os.sched_getaffinity(0)), _milli_cpus(root))
    return Room(milli_cpus, memory >> 20, pids, max(0, disk.f_bavail * disk.f_frsize - floor_bytes(disk)) >> 20)


def floor_bytes(disk: os.statvfs_result) -> int:
    """Less free, or less than a 50th, and the host is full: nobody is promised that."""
    return min(FLOOR_BYTES, disk.f_blocks * disk.f_frsize // FLOOR_SHARE)


def with_leftovers(host: Room, root: Path) -> Room:
    """`host` once the server at `root` has deleted what its last life left in workspaces. A file of many names counts
    once, and all of them as no more than is used at all."""
    left, linked = 0, set[tuple[int, int]]()
    for kept in ("live", "trash"):
        for folder, _, names in os.walk(root / kept):
            for name in names:
                with contextlib.suppress(OSError):
                    status = os.lstat(os.path.join(folder, name))
                    if (at := (status.st_dev, status.st_ino)) not in linked:
                        left += 512 * status.st_blocks
                    linked.update([at] if status.st_nlink > 1 else [])
    if left:
        disk = os.statvfs(root)
        left = min(left, (disk.f_blocks - disk.f_bfree) * disk.f_frsize)
    return host._replace(disk_mb=host.disk_mb + (left >> 20))


def promised(text: str, host: Room | None) -> Room:
    """What `--promise` says: a share of the host such as `50%`, or parts by name; those that are not named are all of
    the host's. host: None where nobody here knows what there is."""
    form = f"{text!r}: give cpus, memory_mb, pids, disk_mb as NAME=WHOLE NUMBER, or of this host a share, 1% to 100%"
    if text.endswith("%") and host is not None:
        share = int(text[:-1]) if text[:-1].isdecimal() else 0
        if not 0 < share <= 100:
            raise BadInput(form)
        return Room(*(share * part // 100 for part in host))
    found = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in ("cpus", *Room._fields[1:]) or not value.isdecimal():
            raise BadInput(form)
        found["milli_cpus" if name == "cpus" else name] = int(value) * (1000 if name == "cpus" else 1)
    if host is None and (unsaid := [name.removeprefix("milli_") for name in Room._fields if name not in found]):
        raise BadInput(
            f"--promise {text!r} does not say {', '.join(unsaid)}: sandboxes run elsewhere, and only you know what is "
            "there for this server's; give cpus=N,memory_mb=N,pids=N,disk_mb=N (docs/providers.md)"
        )
    return Room(**found) if host is None else host._replace(**found)


def take_share(home: Path, name: str, host: Room, text: str) -> Room:
    """What this process, the server `name`, promises from now on until it ends. `BadInput` when others of this home and
    host leave it too little."""
    # a host's other name is no other host; another namespace may be a container with limits of its own
    folder = home / "promises" / f"{boot_id()}-{os.stat('/proc/self/ns/pid').st_ino}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)) as ledger:
        fcntl.flock(ledger, fcntl.LOCK_EX)
        others = {path.name: orjson.loads(path.read_bytes()) for path in folder.glob("[!.]*") if _held(path)}
        # the disk that was free when they began: what they used since is part of their promises
        host = Room(*(max(part) for part in zip(host, *(other["host"] for other in others.values()), strict=True)))
        asked = promised(text, host)
        left = Room(*(part - sum(other["room"][n] for other in others.values()) for n, part in enumerate(host)))
        if lacks := [name for name, n, has in zip(Room._fields, asked, left, strict=True) if n > has]:
            told = "".join(f"; server {name} promises {Room(*other['room'])}" for name, other in sorted(others.items()))
            raise BadInput(
                f"this host has {host}{told}; left are {left}, and {asked} are asked for: give each server its part "
                f"of {', '.join(lacks)}, by --promise 50% or cpus=N,memory_mb=N,pids=N,disk_mb=N"
            )
        mine = folder / name
        mine.unlink(missing_ok=True)  # of a dead one
        held = os.open(mine, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)  # not closed: its lock says that we live
        fcntl.flock(held, fcntl.LOCK_EX)
        os.write(held, orjson.dumps({"room": [*asked], "host": [*host]}))
    return asked


def _held(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _milli_cpus(root: Path) -> int:
    """What the quotas of this process's groups let it use."""
    least = _NONE
    for group in _groups(root, "cpu"):
        try:
            quota, period = (group / "cpu.max").read_text().split()
        except (OSError, ValueError):
            quota, period = (str(_number(group / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
        if quota.isdecimal() and int(quota) < _NONE and period.isdecimal() and int(period) > 0:  # none: `max`, or -1
            least = min(least, int(quota) * 1000 // int(period))
    return least


def _limit(root: Path, controller: str, *files: str) -> int:
    return min(_number(group / file) for group in _groups(root, controller) for file in files)


def _groups(root: Path, controller: str) -> list[Path]:
    """Of this process, up to the root's: of v2, of a hybrid's v2 and of v1. Some are not there, or not for this."""
    mounts = root / "sys/fs/cgroup"
    found = [mounts, mounts / controller]
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            parts = Path(path).parts[1:]
            if ".." not in parts and controller in (names or controller).split(","):
                for mount in (mounts / controller,) if names else (mounts, mounts / "unified"):
                    found += [mount.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    return found


def _number(path: Path) -> int:
    """What a file of the kernel says; one that is not there, or says `max`, is no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return _NONE
