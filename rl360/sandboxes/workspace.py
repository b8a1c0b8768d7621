"""Host directories that a sandbox wrote to, deleted as hostile.

Nothing here follows a link that a sandbox could have made.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

MAX_FILES, MAX_LEVELS = 20_000, 100
MAX_DEPTH = 32
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
            job = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                job.wait(deadline_s)
            finally:
                job.kill()
                job.wait(1.0)  # one that hangs in the kernel does not end by it
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
