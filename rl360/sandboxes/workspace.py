"""Host directories of attempts: copied in from trusted task files, read back and deleted as hostile.

Nothing here follows a link that a sandbox could have made.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
from pathlib import Path
from uuid import uuid4

from rl360.errors import BadInput

MAX_FILES = 20_000
MAX_DEPTH = 32
MAX_COPY_BYTES = 1 << 30


def copy_tree(source: Path, target: Path, owner: int | None, skip: frozenset[str] = frozenset()) -> None:
    """Copy regular files, folders and links (as links) of a trusted tree; everything readable, scripts executable.

    `owner`: uid and gid of what is made (root only); `skip`: names left out at the top.
    """
    total = 0
    target.mkdir(parents=True, exist_ok=True)
    target.chmod(0o755)
    _own(target, owner)
    for folder, names, files in os.walk(source):
        here = target / os.path.relpath(folder, source)
        for name in list(names):
            path = Path(folder, name)
            if path.is_symlink():
                names.remove(name)
                files.append(name)
                continue
            (here / name).mkdir(exist_ok=True)
            (here / name).chmod(0o755)  # mkdir's own mode is cut by the umask
            _own(here / name, owner)
        for name in files:
            if folder == str(source) and name in skip:
                continue
            path, made = Path(folder, name), here / name
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode):
                made.symlink_to(os.readlink(path))
            elif stat.S_ISREG(status.st_mode):
                total += status.st_size
                if total > MAX_COPY_BYTES:
                    raise BadInput(f"{source}: more than {MAX_COPY_BYTES} bytes of files; make the task smaller")
                shutil.copyfile(path, made)
                made.chmod(0o755 if status.st_mode & 0o111 else 0o644)
            else:
                raise BadInput(f"{path}: neither a file, a folder nor a link; remove it from the task")
            _own(made, owner)


def _own(path: Path, owner: int | None) -> None:
    if owner is not None:
        os.chown(path, owner, owner, follow_symlinks=False)


def publish_tree(source: Path, target: Path) -> None:
    """A read-only copy at `target`, put there whole with one rename; a copy already there stays."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{uuid4().hex}")  # attempts of a group publish the same at once
    copy_tree(source, partial, None)
    try:
        partial.rename(target)
    except OSError:
        remove_tree(partial)
        if not target.exists():
            raise


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


def make_etc(target: Path, uid: int) -> None:
    """A small /etc for sandboxes: no host secrets, the user's name, and what dynamic linking and tools need."""
    if target.exists():
        return
    partial = target.with_name(f".{target.name}.{uuid4().hex}")
    partial.mkdir(parents=True)
    (partial / "passwd").write_text(f"root:x:0:0:root:/root:/bin/sh\nagent:x:{uid}:{uid}:agent:/home/agent:/bin/bash\n")
    (partial / "group").write_text(f"root:x:0:\nagent:x:{uid}:\n")
    (partial / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
    (partial / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
    for name in ("ld.so.cache", "mime.types", "os-release", "debian_version"):
        with contextlib.suppress(OSError):
            shutil.copyfile(f"/etc/{name}", partial / name)
    with contextlib.suppress(OSError):
        shutil.copytree("/etc/alternatives", partial / "alternatives", symlinks=True)
    for folder, _, files in os.walk(partial):
        Path(folder).chmod(0o755)
        for name in files:
            made = Path(folder, name)
            if not made.is_symlink():
                made.chmod(0o644)
    try:
        partial.rename(target)
    except OSError:
        remove_tree(partial)
