"""What every provider keeps on this host: one folder, locked by its server, with a workspace an attempt."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import logging
import os
import platform
import re
import shutil
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from uuid import uuid4

from rl360.errors import BadInput
from rl360.harbor.dockerfile import Files, tree_files
from rl360.harbor.task import tree_digest
from rl360.sandboxes.host import FLOOR_SHARE, floor_bytes
from rl360.sandboxes.provider import ExecResult, Sandbox, SandboxGone, SandboxStartError, StorageFull, Workspace
from rl360.sandboxes.workspace import FOLDER, MAX_FILES, MAX_LEVELS, remove_tree

log = logging.getLogger("rl360.sandbox")
LOCK_DEADLINE_S = 2.0
DELETERS, DELETE_S, CLOSE_S = 2, 3600.0, 5.0
WATCH_S, EVERY, MEASURERS = 1.0, 10, 4  # the disk is looked at; each so often everybody is measured
FLOOR_FILES = 10_000
MAX_COPY_BYTES = 1 << 30
LIBC, KCMP = ctypes.CDLL(None), {"x86_64": 312, "aarch64": 272}.get(platform.machine())


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
        self._published: dict[str, asyncio.Future[None]] = {}
        self._bin = Bin(self.root / "trash")
        self._disk = Watch(self.root)
        self.reaped: list[Future[str | None]] = []  # the end of each folder that `reap` took away

    def close(self) -> None:
        """Let another process use the root."""
        self._bin.close()
        os.close(self._lock)

    async def new_workspace(self, name: str, files: Files | None) -> Workspace:
        workspace = Workspace(self.root / "live" / safe_name(name))
        try:
            workspace.path.mkdir(mode=0o711)
        except FileExistsError:
            raise SandboxStartError(f"{workspace.path} exists: this attempt was started before and left it") from None
        job = asyncio.get_running_loop().run_in_executor(None, self._fill, workspace, files)
        try:
            await asyncio.shield(job)
        except BaseException:  # a cancellation too: nobody else knows yet that there is something to delete
            self._discard(workspace.path, workspace.deleting)
            job.add_done_callback(lambda done: done.exception())  # it fails by that, and nobody's clock waits for it
            raise
        return workspace

    def _fill(self, workspace: Workspace, files: Files | None) -> None:
        copy_files(files or {}, workspace.files, self._owner)
        copy_files({}, workspace.logs, self._owner)

    async def remove_workspace(self, workspace: Workspace) -> str | None:
        return await asyncio.to_thread(self._discard, workspace.path, workspace.deleting)

    def _reap_trash(self) -> None:
        """Go on with what an earlier process did not delete."""
        for path in list(self._bin.folder.iterdir()):
            self._discard(path, self.reaped)

    def _discard(self, path: Path, deleting: list[Future[str | None]]) -> str | None:
        """Take a folder from its place and delete it in the background; why that cannot be."""
        try:
            deleting.append(self._bin.put(path))
        except OSError as error:
            return None if isinstance(error, FileNotFoundError) else f"{path}: could not be deleted: {error.strerror}"
        return None

    def meter(self, workspace: Workspace, storage_mb: int) -> DiskMeter:
        return DiskMeter(self._disk, workspace, storage_mb << 20)

    async def publish(self, source: Path, digest: str) -> Path:
        target = self.root / "shared" / digest
        job = self._published.get(digest)
        if job is None or (job.done() and (job.exception() is not None or not target.exists())):
            job = asyncio.get_running_loop().run_in_executor(None, publish_tree, source, target)
            self._published[digest] = job
        await asyncio.shield(job)
        return target


class Bin:
    """What is deleted in the background, by few threads that no end of a process waits for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._asked: SimpleQueue[tuple[Path, Future[str | None]] | None] = SimpleQueue()
        folder.mkdir(exist_ok=True)
        self._threads = [threading.Thread(target=self._delete, name="deleting", daemon=True) for _ in range(DELETERS)]
        for thread in self._threads:
            thread.start()

    def put(self, path: Path) -> Future[str | None]:
        """Take it from its place at once; done when it is deleted."""
        end: Future[str | None] = Future()
        self._asked.put((path.rename(self.folder / uuid4().hex), end))
        return end

    def close(self) -> None:
        """Its threads end when all is deleted, which is waited for a moment."""
        for _ in self._threads:
            self._asked.put(None)
        for thread in self._threads:
            thread.join(CLOSE_S)

    def _delete(self) -> None:
        while (asked := self._asked.get()) is not None:
            path, end = asked
            if (reason := remove_tree(path, DELETE_S)) is not None:
                log.warning("%s", reason)
            end.set_result(reason)


class Watch:
    """The disk under `root`, looked at while there are attempts. When it is low, when many files were made, and every
    `EVERY` looks, all of them are measured."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.meters: set[DiskMeter] = set()
        self.pool = ThreadPoolExecutor(MEASURERS, "measuring")  # no setup waits behind what others made
        self._job: asyncio.Task[None] | None = None

    def add(self, meter: DiskMeter) -> None:
        self.meters.add(meter)
        if self._job is None or self._job.done():
            self._job = asyncio.create_task(self._look())

    def low(self) -> bool:
        """Whether the host has too little left for anyone's commands to be judged by their end."""
        disk = os.statvfs(self.root)
        few = disk.f_files > 0 and disk.f_favail < min(FLOOR_FILES, disk.f_files // FLOOR_SHARE)
        return few or disk.f_bavail * disk.f_frsize < floor_bytes(disk)

    async def _look(self) -> None:
        free = os.statvfs(self.root).f_ffree
        for look in count(1):
            await asyncio.sleep(WATCH_S)
            if not self.meters:
                return
            now = os.statvfs(self.root).f_ffree
            if look % EVERY == 0 or free - now > MAX_FILES // 2 or self.low():
                free = now
                for meter in list(self.meters):
                    await asyncio.get_running_loop().run_in_executor(self.pool, meter.measure)
                    if meter.above and meter.job is not None:
                        meter.job.cancel()


class DiskMeter:
    """See `Meter`. Sandboxes that are elsewhere use nothing here."""

    def __init__(self, watch: Watch, workspace: Workspace, limit_bytes: int) -> None:
        self.over = self.full = self.above = self._closed = False
        self._disk, self._workspace, self._limit = watch, workspace, limit_bytes
        self._sandbox: Sandbox | None = None
        self.job: asyncio.Future[ExecResult] | None = None  # to be ended when over

    async def exec(
        self, sandbox: Sandbox, command: str, timeout_s: float, cap_bytes: int | None = None, *, ends: bool = True
    ) -> ExecResult:
        if sandbox.pids() is None:
            return await sandbox.exec(command, timeout_s, cap_bytes)
        if self._closed:
            raise SandboxGone("the attempt is over", by_contents=False)
        self._sandbox = sandbox
        loop, pool = asyncio.get_running_loop(), self._disk.pool
        if not ends:  # what the agent left is judged, and not ended by
            self._limit, self.above = self._limit + await loop.run_in_executor(pool, self._left), False
        self._disk.add(self)
        job = asyncio.ensure_future(sandbox.exec(command, timeout_s, cap_bytes))
        self.job = job if self._limit < sys.maxsize else None  # too many files, or closed ones: no measure of it
        try:
            await asyncio.wait({job})
        finally:
            job.cancel()
        await loop.run_in_executor(pool, self.measure)
        if job.cancelled() or (self.over and ends):
            raise StorageFull("its workspace is full")
        return job.result()

    def _in_folders(self, limit_bytes: int = sys.maxsize, *, strict: bool = False) -> int:
        used = tree_bytes(self._workspace.files, limit_bytes, strict=strict)
        return used + tree_bytes(self._workspace.logs, limit_bytes)

    def _left(self) -> int:
        return self._in_folders(strict=True)

    def measure(self) -> None:
        """Blocking. A full disk counts only while this one is not over: whoever fills it is judged."""
        try:
            low = self._disk.low()
            pids = (self._sandbox and self._sandbox.pids()) or []
            held = held_bytes(pids, os.stat(self._workspace.files).st_dev, strict=low)
            self.above = self._in_folders(self._limit, strict=low) + held > self._limit
            self.over |= self.above
            self.full |= low and not self.over and self._disk.low()
        except OSError as error:  # gone meanwhile
            log.warning("%s: not measured: %s", self._workspace.path, error)

    def close(self) -> None:
        self._closed = True  # an agent that goes on would have it measured for ever
        self._disk.meters.discard(self)


def tree_bytes(path: Path, limit_bytes: int, *, strict: bool = False) -> int:
    """Bytes on disk under `path`, entered by descriptor: links are not followed, and no path is too long. Counts to the
    limit. Too many entries or levels are above it; `strict`: so is a folder that cannot be read."""
    total = 0
    for entries, size in enumerate(_sizes(os.open(path, FOLDER), MAX_LEVELS, sys.maxsize if strict else 0)):
        total += size
        if total > limit_bytes or entries >= MAX_FILES:
            return limit_bytes + 1
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
    """Bytes on disk of files without a name that these processes hold open; `strict`: or have mapped. Too many
    descriptors are above every limit: looking at all of them would keep others waiting. Mappings (`from-to`) are not
    counted: libraries of honest programs are many."""
    held: dict[int, int] = {}
    descriptors = 0
    for entry in _open_files(pids, strict):
        descriptors += entry.name.isdecimal()
        if descriptors > MAX_FILES:
            return sys.maxsize
        with contextlib.suppress(OSError):
            status = entry.stat()
            if status.st_nlink == 0 and status.st_dev == device:
                held[status.st_ino] = status.st_blocks * 512
    return sum(held.values())


def _open_files(pids: Iterable[int], mapped: bool) -> Iterator[os.DirEntry[str]]:
    """What processes hold open, and threads that have descriptors of their own."""
    for pid in pids:
        with contextlib.suppress(OSError):
            own = [f"{pid}/task/{thread}/fd" for thread in os.listdir(f"/proc/{pid}/task") if _apart(pid, int(thread))]
            for folder in [f"{pid}/fd", *own] + [f"{pid}/map_files"] * mapped:
                with contextlib.suppress(OSError), os.scandir(f"/proc/{folder}") as found:
                    yield from found


def _apart(pid: int, thread: int) -> bool:
    """Whether a thread shares not the descriptors of its process (kcmp(2)); False where that cannot be asked."""
    return thread != pid and KCMP is not None and LIBC.syscall(KCMP, pid, thread, 2, 0, 0) > 0


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


def copy_files(files: Files, target: Path, owner: int | None) -> None:
    """Copy trusted files, folders and links (as links) to their names under `target`; everything readable, scripts
    executable. `owner`: uid and gid of what is made (root only)."""
    total = 0
    target.mkdir()  # not its parents: a workspace may be discarded meanwhile, and does not come back
    target.chmod(0o755)
    _own(target, owner)
    for name, path in files.items():
        made = target / name
        if path is None:
            made.mkdir(exist_ok=True)
            made.chmod(0o755)  # mkdir's own mode is cut by the umask
        elif path.is_symlink():
            made.symlink_to(os.readlink(path))
        elif path.is_file():
            status = path.stat()
            total += status.st_size
            if total > MAX_COPY_BYTES:
                raise BadInput(f"{path}: more than {MAX_COPY_BYTES} bytes of files with it; make the task smaller")
            shutil.copyfile(path, made)
            made.chmod(0o755 if status.st_mode & 0o111 else 0o644)
        else:
            raise BadInput(f"{path}: neither a file, a folder nor a link; remove it from the task")
        _own(made, owner)


def _own(path: Path, owner: int | None) -> None:
    if owner is not None:
        os.chown(path, owner, owner, follow_symlinks=False)


def publish_tree(source: Path, target: Path) -> None:
    """A read-only copy at `target`, whose name is its digest, put there whole with one rename. A copy that is there
    stays, unless it has another digest."""
    if target.exists():
        if tree_digest(target) == target.name:
            return
        remove_tree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{uuid4().hex}")  # attempts of a group publish the same at once
    try:
        copy_files(tree_files(source), partial, None)
        if tree_digest(partial) != target.name:
            raise BadInput(f"{source}: changed since the attempt was asked for; leave it as it is, and ask again")
        partial.rename(target)
    except (OSError, BadInput):
        remove_tree(partial)
        if not target.exists():
            raise


def copy_unreadable(names: Iterable[str], target: Path) -> None:
    """Copies of the host's programs that may be started but not read: the kernel lets nobody trace a process of one, or
    open its files, without privileges. Anew in every process, as they belong to the host's libraries."""
    remove_tree(target)
    target.mkdir()
    target.chmod(0o755)
    for name in names:
        made = target / name
        shutil.copyfile(shutil.which(name) or name, made)
        os.chown(made, -1, os.getegid())  # known to the sandbox's user namespace, or the server could not look either
        made.chmod(0o111)


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
