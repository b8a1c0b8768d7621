"""What every provider keeps on this host: one folder, locked by its server, with a workspace an attempt."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import time
from hashlib import sha256
from pathlib import Path

from rl360.errors import BadInput
from rl360.sandboxes.provider import SandboxStartError, Workspace
from rl360.sandboxes.workspace import copy_tree, publish_tree, remove_tree

LOCK_DEADLINE_S = 2.0


def safe_name(text: str) -> str:
    """A file and cgroup name for any id: its readable part and enough of its digest to stay unique."""
    return f"{re.sub(r'[^a-zA-Z0-9_-]', '_', text)[:80]}-{sha256(text.encode()).hexdigest()[:10]}"


class Rooted:
    """`root` holds everything: `live/` one folder per attempt, `shared/` read-only trees. One process per root.
    `owner`: whose the files of workspaces become (uid and gid; None: this process's)."""

    def __init__(self, root: Path, owner: int | None) -> None:
        self.root = root.absolute()
        self._owner = owner
        (self.root / "live").mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _locked(self._lock):
            os.close(self._lock)
            raise BadInput(f"{self.root} is in use by another sandbox server; stop it or choose another home")

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
