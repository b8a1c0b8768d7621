"""What every provider keeps on this host: one folder, locked by its server, with a workspace an attempt."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
import stat
import time
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

from rl360.errors import BadInput
from rl360.sandboxes.provider import SandboxStartError, Workspace
from rl360.sandboxes.workspace import remove_tree

LOCK_DEADLINE_S = 2.0
MAX_COPY_BYTES = 1 << 30


def safe_name(text: str) -> str:
    """A file and cgroup name for any id: its readable part and enough of its digest to stay unique."""
    return f"{re.sub(r'[^a-zA-Z0-9_-]', '_', text)[:80]}-{sha256(text.encode()).hexdigest()[:10]}"


class Rooted:
    """`root` holds everything: `live/` one folder per attempt, `shared/` read-only trees. One process per root.
    `owner`: whose the files of workspaces become (uid and gid; None: this process's)."""

    image: str | None = None

    def __init__(self, root: Path, owner: int | None) -> None:
        self.root = root.absolute()
        self._owner = owner
        (self.root / "live").mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _locked(self._lock):
            os.close(self._lock)
            raise BadInput(f"{self.root} is in use by another process; stop it, or set RL360_HOME to another home")

    def close(self) -> None:
        """Let another process use the root."""
        os.close(self._lock)

    async def new_workspace(self, name: str, source: Path | None) -> Workspace:
        workspace = Workspace(self.root / "live" / safe_name(name))
        try:
            workspace.path.mkdir(mode=0o711)
        except FileExistsError:
            raise SandboxStartError(f"{workspace.path} exists: this attempt was started before and left it") from None
        job = asyncio.ensure_future(asyncio.to_thread(self._fill, workspace, source))
        try:
            await asyncio.shield(job)
        except BaseException:  # a cancellation too: nobody else knows yet that there is something to delete
            await asyncio.wait({job})
            await self.remove_workspace(workspace)
            raise
        return workspace

    def _fill(self, workspace: Workspace, source: Path | None) -> None:
        workspace.files.mkdir()
        workspace.logs.mkdir()
        if source is not None:
            copy_tree(source, workspace.files, self._owner, skip=frozenset({"Dockerfile"}))
        for path in (workspace.files, workspace.logs):
            path.chmod(0o755)
            if self._owner is not None:
                os.chown(path, self._owner, self._owner)

    async def remove_workspace(self, workspace: Workspace) -> str | None:
        return await asyncio.to_thread(remove_tree, workspace.path)

    async def publish(self, source: Path, digest: str) -> Path:
        target = self.root / "shared" / digest
        if not target.exists():
            await asyncio.to_thread(publish_tree, source, target)
        return target


def _locked(descriptor: int) -> bool:
    """Take the lock of a root. Children that a killed server had just forked hold it until they start their program."""
    deadline = time.monotonic() + LOCK_DEADLINE_S
    while True:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)


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
