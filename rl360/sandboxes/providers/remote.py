"""Sandboxes that an outside system runs (`Daemon`): what is the same for all of them. One code path for each promise:

- every call has a deadline, a command too, where the system's API has none: what runs inside is then ended, not left;
- a create either gives a ready sandbox or is undone; one whose answer never came is looked for by its label until it
  shows up or its lease ends, because it may be carried out late;
- files go in before the agent's first command and come out after its last process is ended, as a capped tar; `/tests`
  and `/logs/verifier` are in the verifier's sandbox alone;
- stopped means that the system itself says that it has no such sandbox; a stop without that word is tried again;
- what goes wrong on the way is the provider's (`by_contents=False`), never the policy's, unless the system says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shlex
import tarfile
import tempfile
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Protocol
from uuid import uuid4

import httpx

from rl360.errors import Rl360Error, ServiceError
from rl360.harbor.protocol import SandboxLimits
from rl360.http_api import Api, Refused
from rl360.sandboxes.leases import DEPLOYMENT, NAME, OWNER, REAPABLE, Lease, labels, owner
from rl360.sandboxes.provider import (
    ExecResult,
    SandboxGone,
    SandboxNeeds,
    SandboxSpec,
    SandboxStartError,
    StopProof,
)
from rl360.sandboxes.providers.tars import Hostile, Part, unpack
from rl360.sandboxes.rooted import Rooted
from rl360.sandboxes.workspace import remove_tree

log = logging.getLogger("rl360.sandbox")
AGENT_UID = 65534
LOGS_DIR = "/logs/verifier"
FLOOD_BYTES = 16 << 20  # a command that prints more is ended: reading it would cost the host
MAX_COMMAND_BYTES = 60_000
KILL_S = 10.0  # to end what runs inside
KILL_ALL = "kill -9 -1"  # all but PID 1 and the shell itself, in one system call
UNDO_S = 15.0
CHUNK = 1 << 20
TAR_SLACK = 16 << 20  # headers and padding
NO_SUCH_PATH = 66
TOO_MUCH = (403, 429, 503)  # a quota, a rate
# an image that does not come: the registry is asked too much, or whoever pulls from it; or there is none for us
PULLS_REFUSED, NO_IMAGE = 429, 404
_TOO_MUCH = re.compile(r"too ?many ?requests|\b(rate|quota|limit|429)\b", re.IGNORECASE)
_NO_IMAGE = re.compile(
    r"not found|(manifest|name|repository) unknown|does not exist|no matching manifest|invalid reference"
    r"|unauthorized|authentication required|denied|forbidden|authorization failed",
    re.IGNORECASE,
)
LATE_S = 900.0  # how long a create without an answer is looked for
CARRY_S = 60.0
POLL_S = 0.2
WATCH_S = 0.5  # before what has no proven end is looked at again; doubled each time
TIMED_OUT, KILLED = 124, 137
# PID 1: forks nothing, so that a full process table does not end it; the kernel reaps what it inherits, as it ignores
# SIGCHLD (only bash passes that on), so that no zombies fill the table; ends with the lease
KEEP_ALIVE = "trap '' CHLD; exec sleep {seconds}"


class Lost(Rl360Error):
    """The system has no such sandbox, or it ended. `by_contents`: the system says that what ran inside ended it."""

    def __init__(self, message: str, by_contents: bool = False) -> None:
        super().__init__(message)
        self.by_contents = by_contents


class Flood(Exception):
    """The command printed more than anyone will read."""


@dataclass(frozen=True)
class Order:
    """A sandbox to make: `name` is new for each try and unique; all labels go on the sandbox."""

    name: str
    labels: Mapping[str, str]
    spec: SandboxSpec


@dataclass(frozen=True)
class Box:
    """A sandbox as its system knows it: `ident` is enough to end it; `ref` is what commands need beside it."""

    ident: str
    spec: SandboxSpec
    ref: Mapping[str, str] = field(default_factory=dict)


class Output:
    """The first `cap` bytes of what a command printed, and how many there were."""

    def __init__(self, cap: int) -> None:
        self.cap, self.seen, self.kept = cap, 0, bytearray()

    def feed(self, data: bytes) -> None:
        self.seen += len(data)
        room = self.cap - len(self.kept)
        if room > 0:
            self.kept += data[:room]
        if self.seen > FLOOD_BYTES:
            raise Flood


class Daemon(Protocol):
    """One outside system. Calls raise `Lost`, `Refused`, `NoAnswer` or another `Rl360Error`; none outlives its deadline
    by more than a moment. `image`: of tasks that name none."""

    kind: str
    image: str

    async def start(self, order: Order, deadline_s: float) -> Box:
        """Make it and wait until commands can run. On failure something may be left under the order's name."""

    async def fill(self, box: Box, parts: list[Part], scratch: IO[bytes], deadline_s: float) -> None:
        """Put trees inside."""

    async def run(self, box: Box, command: str, output: Output, deadline_s: float) -> int:
        """Run `bash -c command`; its exit code. A command that is cut off by the deadline may go on inside."""

    async def quiet(self, box: Box, deadline_s: float) -> None:
        """End what runs inside; files stay readable."""

    async def fetch(self, box: Box, path: str, into: IO[bytes], limit_bytes: int, deadline_s: float) -> None:
        """A tar of `path`, with the path's last name on top. `Hostile` when it is over the limit or there is none."""

    async def end(self, ident: str, deadline_s: float) -> None:
        """Ask for its removal; no such sandbox is fine."""

    async def missing(self, ident: str, deadline_s: float) -> str | None:
        """How the system said that it has no such sandbox; None while it has."""

    async def listed(self, wanted: Mapping[str, str], deadline_s: float) -> list[Lease]:
        """Those with all of these labels."""

    async def close(self) -> None:
        """Let go of connections."""


class RemoteSandbox:
    """A running sandbox elsewhere."""

    def __init__(self, provider: RemoteProvider, box: Box, name: str) -> None:
        self.spec = box.spec
        self._provider, self._daemon, self._box, self._name = provider, provider.daemon, box, name
        self._proof: StopProof | None = None

    async def exec(self, command: str, timeout_s: float, cap_bytes: int | None = None) -> ExecResult:
        problem = _unfit(command)
        if problem is not None:
            return ExecResult(126, problem.encode(), len(problem), 0.0)
        output = Output(self.spec.limits.output_bytes if cap_bytes is None else cap_bytes)
        started, timed_out = time.monotonic(), False
        try:
            async with asyncio.timeout(timeout_s):
                code = await self._told(self._daemon.run(self._box, command, output, timeout_s))
        except TimeoutError:
            code, timed_out = TIMED_OUT, True
            await self._end_commands()
        except Flood:
            code = KILLED
            await self._end_commands()
        return ExecResult(code, bytes(output.kept), output.seen, time.monotonic() - started, timed_out)

    async def _end_commands(self) -> None:
        try:
            async with asyncio.timeout(KILL_S):
                await self._told(self._daemon.run(self._box, KILL_ALL, Output(0), KILL_S))
        except TimeoutError:
            message = f"sandbox {self.spec.name}: what runs in it could not be ended within {KILL_S:g} s"
            raise SandboxGone(message, by_contents=False) from None

    async def _told(self, call: Awaitable[int]) -> int:
        """A call of the daemon's, its failures said as `SandboxGone`."""
        try:
            return await call
        except Lost as error:
            raise SandboxGone(f"sandbox {self.spec.name}: {error}", by_contents=error.by_contents) from None
        except Rl360Error as error:
            raise SandboxGone(f"sandbox {self.spec.name}: {error}", by_contents=False) from None

    async def upload(self, tar: bytes, into: str, timeout_s: float) -> None:
        with tempfile.TemporaryDirectory(dir=self.spec.workspace.path) as folder, tempfile.TemporaryFile() as scratch:
            scratch.write(tar)
            scratch.seek(0)
            await asyncio.to_thread(unpack, scratch, Path(folder, "t"), len(tar), 0)
            await self.fill([Part(Path(folder, "t"), into, AGENT_UID)], timeout_s)

    async def fill(self, parts: list[Part], deadline_s: float) -> None:
        """Put trees of this host inside."""
        with tempfile.TemporaryFile(dir=self.spec.workspace.path) as scratch:
            await self._daemon.fill(self._box, parts, scratch, deadline_s)

    async def download(self, path: str, timeout_s: float, cap_bytes: int) -> bytes:
        with tempfile.TemporaryFile(dir=self.spec.workspace.path) as into:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._daemon.fetch(self._box, path, into, cap_bytes, timeout_s)
            except (Hostile, TimeoutError) as error:
                raise Rl360Error(f"download of {path}: {error or f'not within {timeout_s:g} s'}; refused") from None
            into.seek(0)
            return into.read(cap_bytes)

    async def carry(self, deadline_s: float) -> None:
        workspace = self.spec.workspace
        path, target = (LOGS_DIR, workspace.logs) if self.spec.with_logs else (self.spec.workdir, workspace.files)
        limit = self.spec.disk_mb << 20
        fresh = target.with_name(f".{target.name}.{uuid4().hex}")
        until = time.monotonic() + deadline_s
        try:
            with tempfile.TemporaryFile(dir=workspace.path) as data:
                async with asyncio.timeout(deadline_s):
                    await self._daemon.quiet(self._box, deadline_s)
                    await self._daemon.fetch(self._box, path, data, limit, until - time.monotonic())
                data.seek(0)
                await asyncio.to_thread(unpack, data, fresh, limit)
            await asyncio.to_thread(_swap, fresh, target)
        except Hostile as error:
            await asyncio.to_thread(_swap, None, target)
            message = f"sandbox {self.spec.name}: what it left is not carried over: {error}"
            raise SandboxGone(message, by_contents=True) from None
        except Lost as error:
            raise SandboxGone(f"sandbox {self.spec.name}: {error}", by_contents=False) from None
        except (Rl360Error, tarfile.TarError, OSError, TimeoutError) as error:
            why = str(error) or f"not within {deadline_s:g} s"
            raise SandboxGone(f"sandbox {self.spec.name}: files not carried over: {why}", by_contents=False) from None
        finally:
            await asyncio.to_thread(remove_tree, fresh)

    def pids(self) -> None:
        return None

    async def stop(self, deadline_s: float = 10.0) -> StopProof:
        if self._proof is None or not self._proof.confirmed:
            self._proof = await end_surely(self._daemon, self._box.ident, self.spec.name, deadline_s)
            if self._proof.confirmed:
                self._provider.held.discard(self._name)
            else:
                self._provider.watch(self._name, self.spec, self._box.ident)
        return self._proof


def _unfit(command: str) -> str | None:
    try:
        size = len(command.encode())
    except UnicodeEncodeError:
        return "command is not UTF-8"
    if "\x00" in command:
        return "command holds a NUL byte"
    return None if size <= MAX_COMMAND_BYTES else f"command too long: {size} bytes, limit {MAX_COMMAND_BYTES}"


def _swap(fresh: Path | None, target: Path) -> None:
    """Put `fresh`, or an empty folder, in the place of `target`."""
    problem = remove_tree(target)
    if problem is not None:
        raise OSError(problem)
    if fresh is None:
        target.mkdir()
    else:
        fresh.rename(target)
    target.chmod(0o755)


class RemoteProvider(Rooted):
    """Sandboxes of one daemon for one server. `held`: names that this process answers for."""

    def __init__(self, daemon: Daemon, root: Path, deployment: str) -> None:
        super().__init__(root, None)
        self.daemon, self.deployment, self.image = daemon, deployment, daemon.image
        self.held: set[str] = set()
        self._watches: dict[str, asyncio.Task[None]] = {}

    def refusal(self, needs: SandboxNeeds) -> str | None:
        if needs.network_mode == "allowlist":
            return "network_mode 'allowlist' names no addresses; use 'no-network' or 'public'"
        return None

    async def create(self, spec: SandboxSpec) -> RemoteSandbox:
        name = f"rl360-{sha256(spec.name.encode()).hexdigest()[:12]}-{uuid4().hex[:12]}"
        order = Order(name, labels(name, self.deployment, spec.lifetime_s, spec.labels), spec)
        self.held.add(name)
        box = None
        try:
            async with asyncio.timeout(spec.start_timeout_s):
                box = await self.daemon.start(order, spec.start_timeout_s)
                sandbox = RemoteSandbox(self, box, name)
                await sandbox.fill(_parts(spec), spec.start_timeout_s)
                return sandbox
        except BaseException as error:  # cancellation too: whatever ends a start, nothing of it may stay
            undo = asyncio.ensure_future(self._undo(name, spec, error, box))
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(undo)
            while not undo.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({undo})
            if not isinstance(error, TimeoutError | Rl360Error | OSError):
                spec.stops.append(undo.result())
                raise
            late = f"not ready within {spec.start_timeout_s:g} s"
            why = late if isinstance(error, TimeoutError) else str(error)
            proof = undo.result()
            unclean = "" if proof.confirmed else f"; {proof.evidence}"
            refused = isinstance(error, Refused) and error.status in TOO_MUCH
            raise SandboxStartError(f"sandbox {spec.name}: {why}{unclean}", proof, refused=refused) from None

    async def _undo(self, name: str, spec: SandboxSpec, error: BaseException, box: Box | None) -> StopProof:
        """Remove what a failed create made; a create without a last word is looked for as long as it may be done."""
        started = time.monotonic()
        try:
            proofs = [await end_surely(self.daemon, ident, spec.name, UNDO_S) for ident in await self._made(name, box)]
        except Rl360Error as problem:
            proofs, why = [], f"{problem}"
        else:
            if proofs and all(proof.confirmed for proof in proofs):
                self.held.discard(name)
                return proofs[0]
            why = "; ".join(proof.evidence for proof in proofs) or "not listed yet"
            if not proofs and isinstance(error, Refused) and error.status < 500:  # a proxy's 5xx refuses nothing
                self.held.discard(name)
                return StopProof(True, f"refused, and none is listed as {name}", time.monotonic() - started)
        self.watch(name, spec, None if box is None else box.ident)
        evidence = f"{name} may still be made: {why}; looked for until it is found, or by `rl360 sandboxes reap`"
        return StopProof(False, evidence, time.monotonic() - started)

    async def _made(self, name: str, box: Box | None) -> list[str]:
        """What there is of a create: the sandbox itself, or what is listed under its name."""
        return [box.ident] if box else [lease.ident for lease in await self.daemon.listed({NAME: name}, UNDO_S)]

    def watch(self, name: str, spec: SandboxSpec, ident: str | None) -> None:
        """Try again in the background to end one that has, or whose create may still give it, no proven end."""
        if name not in self._watches:
            watch = self._watches[name] = asyncio.create_task(self._watch(name, spec, ident))
            watch.add_done_callback(lambda _: self._watches.pop(name))

    async def _watch(self, name: str, spec: SandboxSpec, ident: str | None) -> None:
        until = time.monotonic() + (LATE_S if ident else min(LATE_S, spec.lifetime_s))
        pause_s = WATCH_S
        while time.monotonic() < until:
            await asyncio.sleep(pause_s)
            pause_s = min(30.0, 2 * pause_s)
            with contextlib.suppress(Rl360Error):
                found = [ident] if ident else await self._made(name, None)
                proofs = [await end_surely(self.daemon, one, spec.name, UNDO_S) for one in found]
                if proofs and all(proof.confirmed for proof in proofs):
                    log.warning("sandbox %s was ended late: %s", spec.name, proofs[0].evidence)
                    break
        self.held.discard(name)  # whatever is there now is nobody's, and the next reap's

    async def reap(self) -> list[str]:
        """What no living process owns, and what this one made and does not know; then folders of an earlier server."""
        lines = await reap(self.daemon, self.deployment, self.held)
        live = await asyncio.to_thread(lambda: sorted((self.root / "live").iterdir()))
        if not self.held:
            self._reap_trash()
            for path in live:
                problem = await asyncio.to_thread(self._discard, path, self.reaped)
                lines.append(f"{path.name}: {problem or 'removed to trash/'}")
        return lines

    async def aclose(self) -> None:
        for watch in list(self._watches.values()):
            watch.cancel()
        await self.daemon.close()
        self.close()


async def end_surely(daemon: Daemon, ident: str, what: str, deadline_s: float) -> StopProof:
    """Remove a sandbox and have its system say that it is gone."""
    started = time.monotonic()
    until = started + deadline_s
    try:
        async with asyncio.timeout(deadline_s):
            await daemon.end(ident, deadline_s)
            while True:
                evidence = await daemon.missing(ident, until - time.monotonic())
                if evidence is not None:
                    return StopProof(True, evidence, time.monotonic() - started)
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        problem = f"still there after {deadline_s:g} s"
    except Rl360Error as error:
        problem = str(error)
    return StopProof(False, f"sandbox {what} ({ident}): {problem}", time.monotonic() - started)


async def reap(daemon: Daemon, deployment: str, held: set[str] | None = None, dry: bool = False) -> list[str]:
    """End and remove what nobody holds; one line for each, and one when the system cannot be asked. `held`: names of
    this process (None: it makes no sandboxes)."""
    try:
        leases = await daemon.listed({DEPLOYMENT: deployment}, UNDO_S)
    except Rl360Error as error:
        return [f"NOT asked for what an earlier server left: {error}"]
    lines = []
    for lease in leases:
        own = held is not None and lease.labels.get(OWNER) == owner()
        nobodys = lease.state(time.time()) in REAPABLE or (own and lease.labels.get(NAME) not in (held or ()))
        if not nobodys:
            continue
        what = f"{lease.provider} {lease.ident} ({lease.labels.get(NAME, 'no name')})"
        if dry:
            lines.append(f"{what}: would be removed")
            continue
        proof = await end_surely(daemon, lease.ident, what, UNDO_S)
        lines.append(f"{what}: {'gone: ' if proof.confirmed else 'NOT confirmed gone: '}{proof.evidence}")
    return lines


def _parts(spec: SandboxSpec) -> list[Part]:
    parts = [Part(spec.workspace.files, spec.workdir, AGENT_UID)]
    parts += [Part(host, inside, 0, writable=False) for inside, host in spec.read_only.items()]
    return [*parts, Part(spec.workspace.logs, LOGS_DIR, AGENT_UID)] if spec.with_logs else parts


def deployment_of(token: str) -> str:
    """The label of a deployment: from its token, so that all its servers have it and nobody learns the token by it."""
    return sha256(f"rl360 sandboxes {token}".encode()).hexdigest()[:16]


def pull_status(said: str, image: str) -> int:
    """What a failed pull counts as, by the words of whoever failed: no two systems have a code for it."""
    said = said.replace(image, "").replace(re.sub(r"[:@][^/]*$", "", image), "")
    return NO_IMAGE if _NO_IMAGE.search(said) and not _TOO_MUCH.search(said) else PULLS_REFUSED


async def known(
    api: Api, method: str, path: str, deadline_s: float, body: Any = None, **options: Any
) -> httpx.Response:
    """`Api.call` about a sandbox; `Lost` when there is none."""
    try:
        return await api.call(method, path, max(0.1, deadline_s), body, **options)
    except Refused as error:
        raise Lost(str(error)) if error.status == 404 else error from None


async def download(api: Api, path: str, into: IO[bytes], limit_bytes: int, deadline_s: float) -> None:
    """A tar that the system sends; `Hostile` when it is over the limit."""
    size = 0
    async with api.stream("GET", path, deadline_s) as reply:
        async for chunk in reply.aiter_bytes(CHUNK):
            size += len(chunk)
            if size > limit_bytes + TAR_SLACK:
                raise Hostile(f"more than {limit_bytes >> 20} MB")
            into.write(chunk)


def text_of(body: Any, key: str, system: str) -> str:
    """A text that a system's reply must have."""
    value = body.get(key) if isinstance(body, dict) else None
    if not isinstance(value, str) or not value:
        raise ServiceError(f"{system}: a reply without {key}: {str(body)[:80]}")
    return value


def packing(path: str) -> str:
    """A script that prints a tar of a folder, with the path's last name on top; it exits with `NO_SUCH_PATH` when there
    is no such folder."""
    above, _, name = path.rstrip("/").rpartition("/")
    top = shlex.quote(name)
    return f"cd {shlex.quote(above or '/')} && [ -d {top} ] || exit {NO_SUCH_PATH}; exec tar -c -f - {top} 2>/dev/null"


def limited(limits: SandboxLimits, command: str) -> list[str]:
    """The command under the limits that no container gives: CPU seconds, the size of a file, no core files."""
    ulimits = f"ulimit -c 0; ulimit -f {limits.file_size_mb * 1024}; ulimit -t {max(1, int(limits.cpu_time_s))}"
    return ["bash", "-c", f'{ulimits}; exec bash -c "$0" </dev/null', command]
