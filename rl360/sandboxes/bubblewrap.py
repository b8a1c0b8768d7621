"""Sandboxes from bubblewrap, as root or not: no network, read-only system, private /tmp and home, limits, proof of end.

One `bwrap` per sandbox. Its PID 1 is a plain `sh` that reads commands from a pipe, so a command costs one fork and
one exec. Nothing inside can signal or trace PID 1 of its own namespace, and the kernel reports PID 1 as ended only
after every other process of the namespace is reaped: its pidfd turning readable is the proof that all are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from rl360.errors import BadInput
from rl360.sandboxes import cgroups, leases, seccomp
from rl360.sandboxes.bwrap_process import PROGRAMS, BwrapSandbox, launch
from rl360.sandboxes.provider import SandboxNeeds, SandboxSpec, SandboxStartError
from rl360.sandboxes.rooted import Rooted, copy_unreadable, make_etc, safe_name
from rl360.sandboxes.workspace import remove_tree

SANDBOX_UID = 65534
LOGS_DIR = "/logs/verifier"
ENV_NAME = "RL360_SANDBOX"
REAP_DEADLINE_S = 10.0
OPEN_FILES = 4096
TOOLS = ("bwrap", "nsenter", "bash", "tar")
# PID 1 of a sandbox needs these only to drop to SANDBOX_UID; setpriv then leaves none, not even in the bounding set
DROP_CAPS = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")
JOIN_AND_EXEC = 'while [ "$1" != -- ]; do echo 0 >"$1" || exit 97; shift; done; shift; exec "$@"'


class BubblewrapProvider(Rooted):
    """Sandboxes of this host. An attempt's folder holds one small record a sandbox, by which a reaper finds it."""

    def __init__(self, root: Path) -> None:
        for tool in TOOLS:
            if shutil.which(tool) is None:
                raise BadInput(f"`{tool}` is not installed; run `apt-get install bubblewrap util-linux bash tar`")
        self.as_root = os.geteuid() == 0
        self.uid = SANDBOX_UID if self.as_root else os.geteuid()
        self._seccomp = seccomp.program() or b""
        super().__init__(root, self.uid if self.as_root else None)
        make_etc(self.root / "shared" / "etc", self.uid)
        copy_unreadable(("sh", "head"), self.root / "shared" / "pid1")

    def refusal(self, needs: SandboxNeeds) -> str | None:
        if needs.network_mode != "no-network":
            return f"network_mode {needs.network_mode!r}: bubblewrap sandboxes have no network; use 'no-network'"
        if needs.docker_image:
            return f"docker_image {needs.docker_image!r}: bubblewrap sandboxes use the host's /usr; remove it"
        return None

    @cached_property
    def _system(self) -> tuple[str, ...]:
        """The part of the command line that every sandbox shares."""
        parts = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--hostname", "sandbox"]
        if not self.as_root:
            parts += ["--unshare-user", "--uid", str(self.uid), "--gid", str(self.uid)]
        parts += ["--ro-bind", "/usr", "/usr", "--ro-bind", str(self.root / "shared" / "etc"), "/etc"]
        for name in ("bin", "sbin", "lib", "lib32", "lib64"):
            path = Path("/", name)
            if path.is_symlink():
                parts += ["--symlink", os.readlink(path), str(path)]
            elif path.is_dir():
                parts += ["--ro-bind", str(path), str(path)]
        if self._python is not None:
            parts += ["--ro-bind", str(self._python), "/opt/python"]
        parts += ["--perms", "0755", "--dir", "/run", "--ro-bind", str(self.root / "shared" / "pid1"), PROGRAMS]
        return (*parts, "--proc", "/proc", "--dev", "/dev")

    @cached_property
    def _python(self) -> Path | None:
        """The interpreter's tree when the system has no python3 of its own: many tasks' tests need one."""
        return None if shutil.which("python3", path="/usr/bin:/bin") else Path(sys.base_prefix)

    def bare_argv(self, spec: SandboxSpec) -> list[str]:
        """The namespaces and mounts of a sandbox around a command that does nothing: what a benchmark compares with.

        `--as-pid-1`, or bwrap ends before the process it started and nobody ever sees what that has used.
        """
        return ["bwrap", *self._mounts(spec), "--as-pid-1", "true"]

    def _mounts(self, spec: SandboxSpec) -> list[str]:
        argv = [*self._system]
        # what is in a tmpfs counts as memory and no kill frees it: together they leave a quarter for processes
        for path, mode, share in (("/dev/shm", "1777", 8), ("/tmp", "1777", 2), ("/home/agent", "0777", 8)):
            size = (spec.limits.memory_mb << 20) // share
            argv += ["--size", str(size), "--perms", mode, "--tmpfs", path]
        binds = [("--bind", spec.workspace.files, spec.workdir)]
        binds += [("--ro-bind", host, inside) for inside, host in spec.read_only.items()]
        if spec.with_logs:
            binds.append(("--bind", spec.workspace.logs, LOGS_DIR))
        for option, host, inside in binds:
            for parent in reversed(Path(inside).parents[:-1]):  # bwrap would make them 0700
                argv += ["--perms", "0755", "--dir", str(parent)]
            argv += [option, str(host), inside]
        return [*argv, "--remount-ro", "/", "--chdir", spec.workdir, "--die-with-parent"]

    def _argv(self, spec: SandboxSpec, joins: tuple[str, ...], info_fd: int, filter_fd: int) -> list[str]:
        argv = [*(("sh", "-c", JOIN_AND_EXEC, "sh", *joins, "--") if joins else ()), "bwrap", *self._mounts(spec)]
        argv += ["--as-pid-1", "--info-fd", str(info_fd)]
        argv += ["--seccomp", str(filter_fd)] if self._seccomp else []
        if not self.as_root:
            return [*argv, *_first_program(spec)]
        for cap in DROP_CAPS:
            argv += ["--cap-add", cap]
        ids = ["--reuid", str(self.uid), "--regid", str(self.uid), "--clear-groups"]
        return [
            *argv,
            "setpriv",
            *ids,
            "--bounding-set=-all",
            "--inh-caps=-all",
            "--no-new-privs",
            *_first_program(spec),
        ]

    def _environment(self, spec: SandboxSpec) -> dict[str, str]:
        """What bwrap itself runs with, as a host process: nothing of the task's, see `_first_program`."""
        path = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        if self._python is not None:
            path = f"/opt/python/bin:{path}"
        marker = {ENV_NAME: str(spec.workspace.path)}
        return {"PATH": path, "HOME": "/home/agent", "LANG": "C.UTF-8", "TERM": "dumb", **marker}

    def _first_line(self, spec: SandboxSpec) -> str:
        """What PID 1 does first: rlimits (those a cgroup does not give), then says that it is ready."""
        limits = spec.limits
        have = cgroups.parents().controllers
        parts = ["ulimit -c 0", f"ulimit -f {limits.file_size_mb * 2048}"]
        parts.append(f"ulimit -n {OPEN_FILES}")  # what a server raised for itself is no sandbox's
        if "memory" not in have:
            parts.append(f"ulimit -v {limits.memory_mb * 1024}")
        if "pids" not in have and not self.as_root:  # counted per user: as root every sandbox is the same user
            parts.append(f"ulimit -u {limits.pids} 2>/dev/null || ulimit -p {limits.pids}")
        return "; ".join([*parts, "umask 022", f"unset {ENV_NAME}", "echo ready >&2"]) + "\n"

    async def create(self, spec: SandboxSpec) -> BwrapSandbox:
        name = cgroups.prefix(self.root) + safe_name(spec.name)
        record = spec.workspace.path / f"{name}.json"
        spec.workspace.files.chmod(0o755)  # whatever an agent left it as, a verifier starts in it
        try:
            # before what it records exists, and in one move: whenever this process is killed, the next one can read it
            _write_record(record, spec, cgroups.planned(name))
            group = cgroups.create(name, spec.limits)
        except OSError as error:
            record.unlink(missing_ok=True)  # groups of that name are another's: nobody may end them by this record
            taken = "; another sandbox of this name?" if isinstance(error, FileExistsError) else ""
            raise SandboxStartError(f"{error.filename or name}: {error.strerror}{taken}") from None
        try:
            return await launch(
                spec,
                group,
                lambda info_fd, filter_fd: self._argv(spec, group.joins, info_fd, filter_fd),
                self._environment(spec),
                self._first_line(spec),
                self._seccomp,
            )
        except (SandboxStartError, OSError, ValueError) as error:  # ValueError: what no command line can hold
            left = cgroups.remove(group)
            unclean = f"; cgroups left: {', '.join(map(str, left))}" if left else ""
            raise SandboxStartError(f"{error}{unclean}", getattr(error, "proof", None)) from None

    async def reap(self) -> list[str]:
        """End and remove what a dead server left under this root. A folder that cannot be cleaned is kept and named:
        one bad folder must not keep a server from starting. What it removes is deleted in the background (`reaped`)."""
        self._reap_trash()
        left = sorted((self.root / "live").iterdir())
        found = [await asyncio.to_thread(_reap_one, path, self._discard, self.reaped) for path in left]
        for path in (self.root / "shared").glob(".*"):
            await asyncio.to_thread(remove_tree, path)
        return found


def _first_program(spec: SandboxSpec) -> list[str]:
    """The command of PID 1, under the task's variables. Set last, inside and without privileges: in bwrap's own
    environment LD_PRELOAD or PATH of a task would run code of the task on the host. `env` in any case: setpriv may
    still read every file when it starts its program, and then PID 1 could be traced."""
    given = [f"{name}={value}" for name, value in spec.env.items() if name != ENV_NAME]
    return ["env", "--", *given, f"{PROGRAMS}/sh", "-s", f"{ENV_NAME}={spec.workspace.path}"]


def _write_record(path: Path, spec: SandboxSpec, group: cgroups.Group) -> None:
    lease = leases.labels(spec.name, "", spec.lifetime_s, spec.labels)
    named = [str(item) for item in group.paths]
    record = {"name": spec.name, "labels": dict(spec.labels), "lease": lease, "cgroups": named}
    scratch = path.with_suffix(".part")
    scratch.write_bytes(orjson.dumps(record))
    scratch.replace(path)


def _reap_one(path: Path, discard: Callable[[Path, list[Any]], str | None], reaped: list[Any]) -> str:
    try:
        groups, labels, odd = _records(path)
        pids, left = _end(path, groups)
    except OSError as error:
        return f"{path.name}: NOT confirmed gone: {error}"
    what = " ".join([path.name, *(f"{name} {value}" for name, value in labels.items())])
    if pids or left:
        return f"{what}: NOT confirmed gone: pids {pids}, cgroups {left}"
    proof = f"none of its processes is left, {sum(len(group.paths) for group in groups)} cgroups gone"
    problem = f"{', '.join(odd)}: look, then delete {path}" if odd else discard(path, reaped)
    return (
        f"{what}: {proof}, folder NOT removed: {problem}"
        if problem
        else f"{what}: gone: {proof}, folder removed to trash/"
    )


def _end(path: Path, groups: list[cgroups.Group]) -> tuple[list[int], list[str]]:
    """Kill what belongs to a workspace until nothing is left; what still is at the deadline: pids and groups."""
    deadline = time.monotonic() + REAP_DEADLINE_S
    while True:
        for group in groups:
            cgroups.kill(group)
        pids = marked_pids(path)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        left = [str(item) for group in groups for item in cgroups.remove(group)]
        if not (pids or left) or time.monotonic() > deadline:
            return pids, left
        time.sleep(0.02)


def _records(path: Path) -> tuple[list[cgroups.Group], Mapping[str, str], list[str]]:
    """Groups and labels of the sandboxes that a workspace had, and what to look at: records that say nothing (of those
    the groups that this server would make), and groups of another server, which are left alone."""
    own = cgroups.prefix(path.parents[1])
    groups, labels, odd = [], {}, []
    for file in path.glob("rl360-*.json"):
        try:
            record = orjson.loads(file.read_bytes())
            named, labels = tuple(Path(item) for item in record["cgroups"]), record["labels"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            named = cgroups.planned(file.stem).paths
            odd.append(f"unreadable {file.name}")
        groups.append(cgroups.Group(tuple(item for item in named if item.name.startswith(own))))
        odd += [f"another server's {item}" for item in named if not item.name.startswith(own) and item.exists()]
    return groups, labels, odd


def marked_pids(path: Path) -> list[int]:
    """Processes started for this workspace. The marker is in PID 1's arguments, which nothing inside can change for it,
    and whose environment its user may not read; ending PID 1 ends the rest."""
    marker = f"{ENV_NAME}={path}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                arguments = Path("/proc", entry, "cmdline").read_bytes()
            except OSError:  # ended meanwhile, or another user's: then it is not ours
                continue
            if marker in arguments.split(b"\0"):
                found.append(int(entry))
    return found


def listed(home: Path) -> list[leases.Lease]:
    """Sandboxes recorded under any server's folder in `home`. A record that says nothing is of unknown state."""
    found = []
    for file in sorted(home.glob("*/live/*/rl360-*.json")):
        try:
            lease = dict(orjson.loads(file.read_bytes())["lease"])
        except FileNotFoundError:  # ended meanwhile
            continue
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            lease = {}
        found.append(leases.Lease("bubblewrap", str(file.parent), lease))
    return found
