"""Proof that an engine's processes are gone, and the means to end them. Linux `/proc`; this host only.

An engine is a tree: the server that listens on the port, its scheduler and detokenizer. A process is identified by pid
*and* start time, so a reused pid is never mistaken for it; a zombie counts as gone, it holds no memory and no sockets.
On another host, or in another pid namespace, there is no proof: `proof_of_end` says so and nothing is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from rl360.store.data import Data

_GONE_STATES = frozenset("ZXx")


class ProcessId(Data):
    """A process that cannot be confused with a later one: `start_ticks` is field 22 of /proc/PID/stat."""

    pid: int
    start_ticks: int


class ProcessTree(Data):
    """An engine's processes as seen from `host`; `group` is its process group when the root leads it, else null."""

    host: str
    boot_id: str
    root: ProcessId
    members: tuple[ProcessId, ...]
    group: int | None

    @property
    def started_at(self) -> float | None:
        """When its root began (seconds since 1970); None for another boot than this host's."""
        if self.boot_id != boot_id():
            return None
        return psutil.boot_time() + self.root.start_ticks / os.sysconf("SC_CLK_TCK")


class EndProof(Data):
    """Whether the processes are gone, and what was looked at to say so."""

    gone: bool
    evidence: str


def host_id() -> str:
    """This host and pid namespace: a pid means something only inside one."""
    return f"{socket.gethostname()}/{os.readlink('/proc/self/ns/pid')}"


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start ticks of a pid, None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def identify(pid: int) -> ProcessId | None:
    """The living process under this pid."""
    stat = _stat(pid)
    return None if stat is None or stat[0] in _GONE_STATES else ProcessId(pid=pid, start_ticks=stat[1])


def alive(process: ProcessId) -> bool:
    """Whether exactly this process lives (a zombie doesn't)."""
    return identify(process.pid) == process


def _is_local(host: str) -> bool:
    if host in ("localhost", "127.0.0.1", "::1"):
        return True
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return False
    mine = {item.address for items in psutil.net_if_addrs().values() for item in items}
    return address in mine


def tree_of_url(url: str) -> ProcessTree | None:
    """The process tree that listens on this URL's port on this host; None when it isn't here or can't be seen."""
    parts = urlsplit(url)
    if parts.port is None or not _is_local(parts.hostname or ""):
        return None
    listeners = [
        identity
        for connection in psutil.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == parts.port and connection.pid
        for identity in [identify(connection.pid)]
        if identity is not None
    ]
    if not listeners:
        return None
    # a child may have inherited the socket: the oldest listener is the root
    return tree_of_pid(min(listeners, key=lambda process: process.start_ticks).pid)


def tree_of_pid(pid: int) -> ProcessTree | None:
    """A living process with all its descendants."""
    root = identify(pid)
    if root is None:
        return None
    members = [root]
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            identity = identify(child.pid)
            if identity is not None:
                members.append(identity)
    try:
        group = os.getpgid(pid)
    except ProcessLookupError:
        return None
    return ProcessTree(
        host=host_id(), boot_id=boot_id(), root=root, members=tuple(members), group=pid if group == pid else None
    )


def _group_members(tree: ProcessTree) -> list[int]:
    """Living pids of the tree's own process group. A group id is reused only once the group is empty."""
    group = tree.group
    leader = identify(tree.root.pid)
    if group is None or (leader is not None and leader != tree.root):
        return []
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == group and identify(pid) is not None:
                found.append(pid)
    return found


def proof_of_end(tree: ProcessTree | None) -> EndProof:
    """Whether every process of the tree, and its process group, is gone."""
    if tree is None:
        return EndProof(gone=False, evidence="its processes are not on this host, so nothing here can prove their end")
    if tree.host != host_id():
        return EndProof(gone=False, evidence=f"its processes run on {tree.host}, this is {host_id()}")
    if tree.boot_id != boot_id():
        return EndProof(gone=True, evidence=f"host rebooted since (boot {tree.boot_id[:8]}, now {boot_id()[:8]})")
    living = sorted({p.pid for p in tree.members if alive(p)} | set(_group_members(tree)))
    looked = f"pids {', '.join(str(p.pid) for p in tree.members)}, process group {tree.group or 'shared'}"
    if living:
        return EndProof(gone=False, evidence=f"still alive: {', '.join(map(str, living))} ({looked})")
    return EndProof(gone=True, evidence=f"none alive of {looked}")


async def end_tree(tree: ProcessTree | None, deadline_s: float) -> EndProof:
    """SIGKILL the tree (a stopped process dies of it too) and wait for the proof."""
    if tree is None or tree.host != host_id() or tree.boot_id != boot_id():
        return proof_of_end(tree)
    until = time.monotonic() + deadline_s
    while True:
        for pid in await asyncio.to_thread(_living, tree):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        proof = await asyncio.to_thread(proof_of_end, tree)
        if proof.gone or time.monotonic() > until:
            return proof
        await asyncio.sleep(0.05)


def _living(tree: ProcessTree) -> list[int]:
    """Pids to end, parents first so that none respawns a child: living members, their children, the group."""
    pids: dict[int, None] = {}
    for member in tree.members:
        if alive(member):
            pids[member.pid] = None
            with contextlib.suppress(psutil.NoSuchProcess):
                pids.update((child.pid, None) for child in psutil.Process(member.pid).children(recursive=True))
    pids.update((pid, None) for pid in _group_members(tree))
    pids.pop(os.getpid(), None)
    return list(pids)
