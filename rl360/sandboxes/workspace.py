"""Host directories that a sandbox wrote to: measured and deleted as hostile.

Nothing here follows a link that a sandbox could have made.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

MAX_FILES = 20_000
MAX_DEPTH = 32


def remove_tree(path: Path, deadline_s: float = 30.0) -> str | None:
    """Delete a hostile tree; the reason when something of it is left.

    Folders are entered by descriptor, so no link is followed. Deep nesting, which would cost a descriptor a level,
    and folders without permissions go to `chmod` and `rm`, which need few.
    """
    if not os.path.lexists(path):
        return None
    with contextlib.suppress(OSError, RecursionError):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _empty(folder, MAX_DEPTH)
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


def _empty(folder: int, depth: int) -> None:
    if depth == 0:
        raise RecursionError
    with os.scandir(folder) as found:
        entries = list(found)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            below = os.open(entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                _empty(below, depth - 1)
            finally:
                os.close(below)
            os.rmdir(entry.name, dir_fd=folder)
        else:
            os.unlink(entry.name, dir_fd=folder)


def tree_bytes(path: Path, limit_bytes: int) -> int:
    """Bytes on disk under `path`, links not followed; stops counting above the limit or after too many entries."""
    total = entries = 0
    folders = [str(path)]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as found:
            for entry in found:
                entries += 1
                if entries > MAX_FILES:
                    return limit_bytes + 1
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
        if total > limit_bytes:
            break
    return total
