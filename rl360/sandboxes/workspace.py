"""Host directories that a sandbox wrote to: measured and deleted as hostile.

Nothing here follows a link that a sandbox could have made.
"""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

MAX_FILES = 20_000
MAX_DEPTH = 32
MAX_LEVELS = 100
MAX_HERE = 2_000  # files that are deleted without another process
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: Path, deadline_s: float = 30.0) -> str | None:
    """Delete a hostile tree; the reason when something of it is left.

    Folders are entered by descriptor, so no link is followed. Deep nesting, which would cost a descriptor a level, many
    files, which would cost this process's threads their turns, and folders without permissions go to `chmod` and `rm`.
    """
    if not os.path.lexists(path):
        return None
    with contextlib.suppress(OSError, RecursionError):
        folder = os.open(path, FOLDER)
        try:
            _empty(folder, MAX_DEPTH, iter(range(MAX_HERE)))
        finally:
            os.close(folder)
        path.rmdir()
        return None
    try:
        for argv in (["chmod", "-R", "u+rwX", str(path)], ["rm", "-rf", "--one-file-system", str(path)]):
            subprocess.run(argv, timeout=deadline_s, capture_output=True, check=False)
    except (subprocess.TimeoutExpired, OSError) as error:
        return f"{path}: not deleted: {error}"
    return f"{path}: could not be deleted" if os.path.lexists(path) else None


def _empty(folder: int, depth: int, left: Iterator[int]) -> None:
    if depth == 0:
        raise RecursionError
    with os.scandir(folder) as found:
        entries = list(found)
    for entry in entries:
        if next(left, None) is None:
            raise RecursionError
        if entry.is_dir(follow_symlinks=False):
            below = os.open(entry.name, FOLDER, dir_fd=folder)
            try:
                _empty(below, depth - 1, left)
            finally:
                os.close(below)
            os.rmdir(entry.name, dir_fd=folder)
        else:
            os.unlink(entry.name, dir_fd=folder)


def tree_bytes(path: Path, limit_bytes: int, *, strict: bool = False) -> int:
    """Bytes on disk under `path`, entered by descriptor: links are not followed, and no path is too long. Counts to the
    limit. Too many entries or levels are above it; `strict`: so is a folder that cannot be read."""
    total = 0
    try:
        for entries, size in enumerate(_sizes(os.open(path, FOLDER), MAX_LEVELS, sys.maxsize if strict else 0)):
            total += size
            if total > limit_bytes or entries >= MAX_FILES:
                return limit_bytes + 1
    except OSError as error:  # of `path` itself
        return limit_bytes + 1 if strict and isinstance(error, PermissionError) else total
    return total


def _sizes(folder: int, levels: int, unread: int) -> Iterator[int]:
    """Of each entry; closes the descriptor. What is gone before it is looked at has none."""
    try:
        with os.scandir(folder) as found:
            for entry in found:
                try:
                    status = entry.stat(follow_symlinks=False)
                    if not stat.S_ISDIR(status.st_mode) or levels == 0:
                        yield status.st_blocks * 512 if levels else sys.maxsize
                        continue
                    below = os.open(entry.name, FOLDER, dir_fd=folder)
                except OSError as error:
                    yield unread if isinstance(error, PermissionError) else 0
                    continue
                yield status.st_blocks * 512
                yield from _sizes(below, levels - 1, unread)
    finally:
        os.close(folder)


def held_bytes(pids: Iterable[int], device: int, *, strict: bool = False) -> int:
    """Bytes on disk of files without a name that these processes hold open; `strict`: or have mapped."""
    held: dict[int, int] = {}
    for pid in pids:
        for kind in ("fd", "map_files")[: 1 + strict]:
            with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/{kind}") as found:
                for entry in found:
                    with contextlib.suppress(OSError):
                        status = entry.stat()
                        if status.st_nlink == 0 and status.st_dev == device:
                            held[status.st_ino] = status.st_blocks * 512
    return sum(held.values())
