"""One bubblewrap sandbox as a process: start, commands over pipes, tar in and out, stop with proof.

Descriptors of PID 1 (`sh`): 0 commands from us, 1 what commands print, 2 its own answers (`ready`, `<n> <exit code>`).
A command gets /dev/null as input and descriptor 1 for both outputs. PID 1, and `head` that shares its descriptors, are
copies nobody may read: the kernel keeps them from being traced and opened through /proc, also by their own user.

Whose end it is: only what is seen to come from outside is the host's. All else is the contents' doing, and judged: a
way to void an attempt would be worth as much to a policy as a way to pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from rl360.errors import BadInput, Rl360Error
from rl360.sandboxes import cgroups
from rl360.sandboxes.provider import ExecResult, SandboxGone, SandboxSpec, SandboxStartError, StopProof

PIPE_BYTES = 65_536
MAX_LINE_BYTES = 60_000  # one write must fit the empty command pipe
MAX_UPLOAD_BYTES = 64 << 20
FLOOD_BYTES = 16 << 20  # a command that prints more is ended: reading it would cost the host
MAX_EARLY = 4
STALE_READS = 32  # a background flood is not read to its end here: it becomes the next command's
KILL_GRACE_S = 3.0
LATE_S = 1.0  # so late after a time it set, this server itself was kept from running
PROGRAMS = "/run/pid1"  # where a sandbox has those copies
NS_GET_USERNS = 0xB701
TIMED_OUT, KILLED = 124, 137


class _Flood(Exception):
    """The running command printed more than anyone will read."""


class BwrapSandbox:
    """A running sandbox. Owns its descriptors and its cgroups until `stop`."""

    def __init__(
        self, spec: SandboxSpec, group: cgroups.Group, process: subprocess.Popen[bytes], fds: tuple[int, int, int]
    ) -> None:
        self.spec = spec
        self._group = group
        self._process = process
        self._commands, self._output, self._answers = fds
        self._loop = asyncio.get_running_loop()
        self._outer = os.pidfd_open(process.pid)
        self._init: int | None = None
        self._namespaces: tuple[int, ...] = ()
        self._number = 0
        self._waiting: asyncio.Future[str] | None = None
        self._expects = "ready"
        self._answer_buffer = b""
        self._early: list[str] = []
        self._words = ""
        self._collected = bytearray()
        self._seen_bytes = 0
        self._cap_bytes = self._flood_bytes = 0
        self._proof: StopProof | None = None
        self._loop.add_reader(self._answers, self._on_answers)
        self._loop.add_reader(self._outer, self._on_outer_end)

    # -- what the descriptors say ------------------------------------------------------------------------------------

    def _on_answers(self) -> None:
        data = _read(self._answers)
        if data is None:
            return
        if not data:
            self._loop.remove_reader(self._answers)
            return
        *lines, rest = (self._answer_buffer + data).split(b"\n")
        self._answer_buffer = rest[-4096:]
        for raw in lines:
            line = raw.decode("utf-8", "replace")
            if self._waiting is not None and not self._waiting.done() and line.startswith(self._expects):
                self._waiting.set_result(line)
            elif line.startswith(f"{self._number} ") and len(self._early) < MAX_EARLY:
                self._early.append(line)  # the answer came before somebody waited for it
            else:
                self._words = f"{self._words} {line}"[-1000:]

    def _on_output(self) -> None:
        while data := _read(self._output):
            self._seen_bytes += len(data)
            room = self._cap_bytes - len(self._collected)
            if room > 0:
                self._collected += data[:room]
            if self._seen_bytes > self._flood_bytes:
                if self._waiting is not None and not self._waiting.done():
                    self._waiting.set_exception(_Flood())
                return
            if len(data) < PIPE_BYTES:
                return

    def _on_outer_end(self) -> None:
        self._loop.remove_reader(self._outer)
        gone = self._gone()  # it also reads the last answers: one may be what is waited for
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(gone)

    def _gone(self) -> SandboxGone:
        """Why the sandbox ended. Nothing inside can kill PID 1 by a signal but a limit, and nothing at all bwrap."""
        code = self._process.wait(timeout=5)
        hits = cgroups.limit_hits(self._group)
        reasons = [f"limit hit: {name} {count} times" for name, count in hits.items() if count]
        by_contents = bool(reasons) or (code >= 0 and code != KILLED)
        self._on_answers()
        detail = ", ".join([f"PID 1 ended with {code}", *reasons])
        said = f": {self._words.strip()}" if self._words.strip() else ""
        return SandboxGone(f"sandbox {self.spec.name}: {detail}{said}", by_contents=by_contents)

    # -- commands ----------------------------------------------------------------------------------------------------

    async def _answer(self, expects: str, timeout_s: float) -> str:
        self._expects = expects
        for line in self._early:
            if line.startswith(expects):
                self._early.remove(line)
                return line
        self._waiting = self._loop.create_future()
        try:
            if self._process.poll() is not None:
                raise self._gone()
            async with asyncio.timeout(timeout_s):
                return await self._waiting
        finally:
            self._waiting = None

    async def _run(
        self, shell: str, timeout_s: float, cap: int, flood: int, payload: bytes | None = None
    ) -> ExecResult:
        """Give PID 1 one line and wait for its exit code; on a timeout or a flood end everything but PID 1."""
        if self._proof is not None:
            raise Rl360Error(f"sandbox {self.spec.name} is stopped")
        self._number += 1
        self._early.clear()
        tag = f"{self._number} "
        line = f'{shell}; echo "{tag}$?" >&2\n'.encode()
        if len(line) > MAX_LINE_BYTES:
            return _refused(f"command too long: {len(line)} bytes quoted, limit {MAX_LINE_BYTES}")
        for _ in range(STALE_READS):  # what background processes printed since the last command
            if not _read(self._output):
                break
        self._collected.clear()
        self._seen_bytes, self._cap_bytes, self._flood_bytes = 0, cap, flood
        started, timed_out = time.monotonic(), False
        self._loop.add_reader(self._output, self._on_output)
        try:
            self._send(line)
            if payload is not None:
                await self._answer(f"{self._number} go", timeout_s)
                await asyncio.wait_for(self._send_all(payload), timeout_s)
            answer = await self._answer(tag, timeout_s)
        except (TimeoutError, _Flood) as error:
            timed_out = isinstance(error, TimeoutError)
            answer = await self._end_command(tag)
        finally:
            self._loop.remove_reader(self._output)
        self._flood_bytes = max(self._flood_bytes, FLOOD_BYTES)
        self._on_output()
        code = answer.removeprefix(tag)
        exit_code = TIMED_OUT if timed_out else int(code) if re.fullmatch(r"\d{1,3}", code, re.ASCII) else KILLED
        return ExecResult(exit_code, bytes(self._collected), self._seen_bytes, time.monotonic() - started, timed_out)

    def _send(self, line: bytes) -> None:
        try:
            written = os.write(self._commands, line)
        except BrokenPipeError:
            raise self._gone() from None
        except BlockingIOError:
            written = 0
        if written != len(line):
            raise SandboxGone(f"sandbox {self.spec.name}: its command pipe is full", by_contents=True)

    async def _send_all(self, payload: bytes) -> None:
        view = memoryview(payload)
        while view:
            try:
                view = view[os.write(self._commands, view) :]
            except BlockingIOError:
                await asyncio.sleep(0.005)
            except BrokenPipeError:
                raise self._gone() from None

    async def _end_command(self, tag: str) -> str:
        """SIGKILL everything in the sandbox but PID 1, in one system call that a fork bomb cannot outrun.

        What was printed meanwhile is read and dropped until PID 1 says that the command ended, so that none of it is
        taken for the next command's.
        """
        self._flood_bytes = sys.maxsize
        due = time.monotonic() + KILL_GRACE_S + LATE_S
        ended = asyncio.ensure_future(self._answer(tag, KILL_GRACE_S))
        await asyncio.sleep(0)  # listen before killing: the answer may come at once
        try:
            await self._kill_inside()
            return await ended
        except TimeoutError:
            hits = cgroups.limit_hits(self._group)
            late = time.monotonic() > due
            whose = "this server ran late" if late else f"limits hit: {hits or 'none'}"
            message = f"sandbox {self.spec.name}: no answer after its command was killed; {whose}"
            raise SandboxGone(message, by_contents=not late or any(hits.values())) from None
        finally:
            ended.cancel()

    async def _kill_inside(self) -> None:
        # by namespace descriptor, never by pid: a reused pid would aim this at the host
        names = ("--pid", "--user")[: len(self._namespaces)]
        entries = [f"{name}=/proc/self/fd/{fd}" for name, fd in zip(names, self._namespaces, strict=True)]
        keep = ["--preserve-credentials"] if len(entries) == 2 else []
        argv = ["nsenter", *entries, *keep, "--", "sh", "-c", "kill -9 -1"]
        null = subprocess.DEVNULL
        process = _spawn(argv, pass_fds=self._namespaces, stdin=null, stdout=null, stderr=null)
        try:
            ended = os.pidfd_open(process.pid)
            try:
                await _readable(ended, KILL_GRACE_S)
            finally:
                os.close(ended)
        finally:
            process.kill()  # does nothing to one that ended
            process.wait()

    async def exec(self, command: str, timeout_s: float, cap_bytes: int | None = None) -> ExecResult:
        if "\x00" in command or not _encodable(command):
            return _refused("command holds a NUL byte or is not UTF-8")
        cap = self.spec.limits.output_bytes if cap_bytes is None else cap_bytes
        # in a subshell: PID 1 says "Killed" of its own child on its own stderr, which would be redirected too
        # the limit is not PID 1's own, which reaps what is left to it for as long as the sandbox is there
        cpu_s = max(1, int(self.spec.limits.cpu_time_s))
        shell = f"( ulimit -t {cpu_s}; exec bash -c {shlex.quote(command)} </dev/null 2>&1 )"
        return await self._run(shell, timeout_s, cap, FLOOD_BYTES)

    async def upload(self, tar: bytes, into: str, timeout_s: float) -> None:
        if len(tar) > MAX_UPLOAD_BYTES:
            raise BadInput(f"upload of {len(tar)} bytes, limit {MAX_UPLOAD_BYTES}; split it")
        # PID 1's shell may read ahead on its input, so the bytes are sent only once `head` waits for them
        feed = f"{{ echo '{self._number + 1} go' >&2; {PROGRAMS}/head -c {len(tar)} 2>/dev/null; }}"
        unpack = f"tar -x --no-same-owner -C {shlex.quote(into)} -f - 2>&1"
        result = await self._run(f"{feed} | {unpack}", timeout_s, 2000, FLOOD_BYTES, payload=tar)
        if result.exit_code != 0:
            raise Rl360Error(f"upload into {into}: tar ended with {result.exit_code}: {_text(result.output)}")

    async def download(self, path: str, timeout_s: float, cap_bytes: int) -> bytes:
        inside = shlex.quote("./" + path.lstrip("/"))
        result = await self._run(f"tar -c -C / -f - {inside} </dev/null 2>/dev/null", timeout_s, cap_bytes, cap_bytes)
        if result.output_bytes > cap_bytes:
            raise Rl360Error(f"download of {path}: more than {cap_bytes} bytes; refused")
        if result.exit_code != 0:
            raise Rl360Error(f"download of {path}: tar ended with {result.exit_code}; does it exist?")
        return result.output

    async def carry(self, deadline_s: float) -> None:
        """The workspace is mounted: what the sandbox wrote is there."""

    def pids(self) -> list[int]:
        return cgroups.pids(self._group)

    # -- start and stop ----------------------------------------------------------------------------------------------

    async def start(self, info_fd: int, first_line: str) -> None:
        """Learn PID 1's host pid, take hold of it, and wait until it says that mounts and limits are in place."""
        deadline = time.monotonic() + self.spec.start_timeout_s
        self._send(first_line.encode())
        await self._answer("ready", self.spec.start_timeout_s)
        info = await _read_all(info_fd, max(0.1, deadline - time.monotonic()))
        pid = int(orjson.loads(info)["child-pid"])
        self._init = os.pidfd_open(pid)
        self._namespaces = (os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC),)
        if os.geteuid() != 0:  # the user namespace that owns it: bwrap may have put PID 1 in a nested one
            self._namespaces += (fcntl.ioctl(self._namespaces[0], NS_GET_USERNS),)
        if os.fstat(self._namespaces[0]).st_ino == os.stat("/proc/self/ns/pid").st_ino:
            raise SandboxStartError(f"sandbox {self.spec.name}: PID 1 is in the host's PID namespace")

    async def stop(self, deadline_s: float = 10.0) -> StopProof:
        if self._proof is not None and self._proof.confirmed:
            return self._proof
        started = time.monotonic()
        problems = await self._end(started + deadline_s)
        seconds = time.monotonic() - started
        if problems:
            self._proof = StopProof(False, f"sandbox {self.spec.name}: {'; '.join(problems)}", seconds)
        else:
            groups = f", {len(self._group.paths)} cgroups removed" if self._group.paths else ""
            self._proof = StopProof(True, f"PID namespace ended (code {self._process.returncode}){groups}", seconds)
        return self._proof

    async def _end(self, deadline: float) -> list[str]:
        problems = []
        for fd in (self._outer, self._answers, self._output):
            self._loop.remove_reader(fd)
        if self._init is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init, signal.SIGKILL)
            if not await _readable(self._init, deadline - time.monotonic()):
                problems.append(f"PID 1 (parent {self._process.pid}) still alive after SIGKILL")
        elif self._process.poll() is None:  # never got ready: bwrap's death takes PID 1 along (--die-with-parent)
            self._process.kill()
            cgroups.kill(self._group)
        if not await _readable(self._outer, deadline - time.monotonic()):
            self._process.kill()
            if not await _readable(self._outer, 1.0):
                problems.append(f"bwrap {self._process.pid} still alive after SIGKILL")
        self._process.poll()
        while left := cgroups.remove(self._group):
            if time.monotonic() > deadline:
                problems.append(f"cgroups not empty: {', '.join(map(str, left))}")
                break
            cgroups.kill(self._group)
            await asyncio.sleep(0.005)
        if not problems:
            self._close()
        return problems

    def _close(self) -> None:
        own = [self._commands, self._output, self._answers, self._outer, *self._namespaces]
        for fd in (*own, *(() if self._init is None else (self._init,))):
            os.close(fd)
        self._namespaces = ()


async def launch(
    spec: SandboxSpec,
    group: cgroups.Group,
    argv: Callable[[int, int], list[str]],
    environment: Mapping[str, str],
    first_line: str,
    seccomp: bytes,
) -> BwrapSandbox:
    """Start bwrap and wait for its PID 1; on any failure end and remove what was made and raise `SandboxStartError`."""
    (filter_r, filter_w), *pipes = _pipes(5)
    (command_r, command_w), (output_r, output_w), (answer_r, answer_w), (info_r, info_w) = pipes
    for fd in (command_w, output_r, answer_r, info_r):
        os.set_blocking(fd, False)
    try:
        os.write(filter_w, seccomp)  # far less than a pipe holds; it ends where the filter does
        os.close(filter_w)
        process = _spawn(
            argv(info_w, filter_r),
            stdin=command_r,
            stdout=output_w,
            stderr=answer_w,
            pass_fds=(info_w, filter_r),
            env=dict(environment),
            cwd="/",
            start_new_session=True,
        )
    except (OSError, ValueError) as error:  # ValueError: a NUL in what it is given
        for fd in (command_w, output_r, answer_r, info_r):
            os.close(fd)
        raise SandboxStartError(f"sandbox {spec.name}: bwrap did not start: {error}") from None
    finally:
        for fd in (command_r, output_w, answer_w, info_w, filter_r):
            os.close(fd)
    try:
        sandbox = BwrapSandbox(spec, group, process, (command_w, output_r, answer_r))
    except OSError as error:  # no descriptor left for a pidfd
        process.kill()
        process.wait()
        for fd in (command_w, output_r, answer_r, info_r):
            os.close(fd)
        raise SandboxStartError(f"sandbox {spec.name}: {error}") from None
    try:
        await sandbox.start(info_r, first_line)
    except BaseException as error:  # cancellation too: whatever ends a start, nothing of it may stay
        proof = await sandbox.stop()
        if not isinstance(error, TimeoutError | SandboxGone | SandboxStartError | OSError | ValueError | KeyError):
            spec.stops.append(proof)
            raise
        late = f"sandbox {spec.name}: not ready within {spec.start_timeout_s:g} s"
        unclean = "" if proof.confirmed else f"; {proof.evidence}"
        raise SandboxStartError(f"{late if isinstance(error, TimeoutError) else error}{unclean}", proof) from None
    finally:
        os.close(info_r)
    return sandbox


def _pipes(count: int) -> list[tuple[int, int]]:
    made: list[tuple[int, int]] = []
    try:
        made.extend(os.pipe() for _ in range(count))
    except OSError:
        for ends in made:
            for fd in ends:
                os.close(fd)
        raise
    return made


def _spawn(argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process from this thread on purpose: --die-with-parent follows the thread that started bwrap, and a
    vfork costs the loop less than a thread hop or asyncio's child watcher would."""
    return subprocess.Popen(argv, **options)


def _refused(reason: str) -> ExecResult:
    return ExecResult(126, reason.encode(), len(reason), 0.0)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(data: bytes) -> str:
    return " ".join(data.decode("utf-8", "replace").split())[:300]


def _read(fd: int) -> bytes | None:
    """What is there now: None when nothing is, b"" at the end."""
    try:
        return os.read(fd, PIPE_BYTES)
    except BlockingIOError:
        return None


async def _readable(fd: int, timeout_s: float) -> bool:
    """Whether `fd` becomes readable in time (a pidfd: whether its process ends)."""
    loop = asyncio.get_running_loop()
    seen = asyncio.Event()
    loop.add_reader(fd, seen.set)
    try:
        async with asyncio.timeout(max(0.01, timeout_s)):
            await seen.wait()
        return True
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)


async def _read_all(fd: int, timeout_s: float) -> bytes:
    """Everything up to the end of a small pipe."""
    data = b""
    deadline = time.monotonic() + timeout_s
    while True:
        chunk = _read(fd)
        if chunk == b"":
            return data
        if chunk is None:
            if not await _readable(fd, deadline - time.monotonic()):
                raise TimeoutError
            continue
        data += chunk
