"""Ways out of a bubblewrap sandbox, each tried for real: what it was after did not happen, and the attempt itself ran.

One provider for all, and one sandbox for those attempts that do not break it. `outside`: the same command does succeed
outside a sandbox, so that it is the sandbox that stopped it, not a typing error.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rl360.errors import Rl360Error
from rl360.harbor.evidence import files_text
from rl360.harbor.protocol import SandboxLimits
from rl360.harbor.task import tree_digest
from rl360.harbor.verifier import RewardError, read_reward
from rl360.sandboxes.bubblewrap import BubblewrapProvider
from rl360.sandboxes.provider import SandboxGone, SandboxSpec, Workspace
from tests.contract.test_sandboxes import HOG, REASON, needs_cgroups

pytestmark = [pytest.mark.contract, pytest.mark.skipif(REASON is not None, reason=REASON or "")]
ROOT = os.geteuid() == 0
UNPRIVILEGED = 61_234
SECRET = "the-secret-of-the-host"
# ends, as fast as it can, whatever is sent in to end it
KILLER = "python3 -c 'import os\nwhile True:\n  try: os.kill(-1, {})\n  except OSError: pass'"
LIMITS = SandboxLimits(memory_mb=96, pids=48, cpu_time_s=20, file_size_mb=8, output_bytes=16_384)


@dataclass
class Rig:
    """A sandbox to break out of, another attempt's beside it, and what there is to reach on the host."""

    folder: Path
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    provider: Any = None
    sandbox: Any = None
    other: Any = None
    number: int = 0
    names: dict[str, str] = field(default_factory=dict)

    def run(self, work: Awaitable[Any], timeout_s: float = 60) -> Any:
        async def wrapped() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(wrapped(), self.loop).result(timeout_s)

    async def _make(self, name: str, **more: Any) -> Any:
        workspace = more.pop("workspace", None) or await self.provider.new_workspace(name, None)
        return await self.provider.create(
            SandboxSpec(name, {"run": "r"}, more.pop("limits", LIMITS), workspace, **more)
        )

    def make(self, name: str, **more: Any) -> Any:
        return self.run(self._make(name, **more))

    @contextlib.contextmanager
    def fresh(self, **more: Any) -> Iterator[Any]:
        """A sandbox for an attempt that may break it."""
        self.number += 1
        sandbox = self.make(f"fresh-{self.number}", **more)
        try:
            yield sandbox
        finally:
            assert self.run(sandbox.stop()).confirmed
            assert self.run(self.provider.remove_workspace(sandbox.spec.workspace)) is None

    def say(self, command: str, timeout_s: float = 10, sandbox: Any = None) -> str:
        result = self.run((sandbox or self.sandbox).exec(command, timeout_s))
        return result.output.decode("utf-8", "replace")

    def all_well(self) -> None:
        """The other attempt and the host's own process are untouched."""
        assert self.say("cat mine; echo alive", sandbox=self.other) == f"{SECRET}\nalive\n"
        os.kill(int(self.names["pid"]), 0)


def accepting(listener: socket.socket) -> None:
    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    threading.Thread(target=serve, daemon=True).start()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("escapes"))
    threading.Thread(target=rig.loop.run_forever, daemon=True).start()
    secret = rig.folder / "secret"
    secret.write_text(SECRET)
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract, path = f"rl360-escape-{os.getpid()}", f"/tmp/rl360-escape-{os.getpid()}.sock"
        unix = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2)]
        unix[0].bind(f"\0{abstract}")
        unix[1].bind(path)
        stack.callback(Path(path).unlink)
        for listener in (tcp, *unix):
            listener.listen()
            accepting(listener)
        env = {**os.environ, "SECRET_OF_THE_HOST": SECRET}
        target = stack.enter_context(subprocess.Popen(["sleep", "86421"], env=env))
        stack.callback(target.kill)
        rig.provider = rig.run(_opened(rig.folder / "sandboxes"))
        rig.other = rig.make("other")
        (rig.other.spec.workspace.files / "mine").write_text(f"{SECRET}\n")
        rig.say("(setsid sleep 75318 >/dev/null 2>&1 &)", sandbox=rig.other)
        rig.sandbox = rig.make("attacker")
        rig.names = {
            "port": str(tcp.getsockname()[1]),
            "abstract": abstract,
            "socket": path,
            "secret": str(secret),
            "pid": str(target.pid),
            "folder": str(rig.folder),
            "other": str(rig.other.spec.workspace.files),
            "uid": str(rig.provider.uid),
        }
        yield rig
        rig.all_well()
        for sandbox in (rig.sandbox, rig.other):
            assert rig.run(sandbox.stop()).confirmed
            assert rig.run(rig.provider.remove_workspace(sandbox.spec.workspace)) is None
        rig.provider.close()
        rig.loop.call_soon_threadsafe(rig.loop.stop)


async def _opened(root: Path) -> BubblewrapProvider:
    return BubblewrapProvider(root)


def python(code: str) -> str:
    """Says GOT when `code` gets to its end, else why not."""
    lines = "\n".join(f"    {line}" for line in code.strip().splitlines())
    return (
        "python3 - <<'END'\nimport ctypes, os, socket, stat, struct, sys, time\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "def must(result):\n    if result < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))\n"
        f"    return result\ntry:\n{lines}\n    print('GOT')\n"
        "except Exception as error:\n    print('held:', repr(error))\nEND"
    )


def write(path: str) -> str:
    return f"echo 1 2>/dev/null > {path} && echo GOT || echo held"


@dataclass(frozen=True)
class Probe:
    """One try. `never`: what it would say had it worked; `outside`: on the host it does say that."""

    command: str
    never: str = "GOT"
    outside: bool = False
    ran: str = "held|GOT"


def got(code: str, outside: bool = False) -> Probe:
    return Probe(python(code), outside=outside)


def namespaced(flags: str, then: str) -> str:
    """As root of namespaces of its own, where the kernel gives them."""
    return f"unshare {flags} bash -c '{then}' 2>&1; echo ran"


SYSCALLS = {  # x86_64 numbers; with arguments that change nothing were they allowed
    "bpf": "321, 0, (ctypes.c_char * 72)(*([1, 0, 0, 0] * 4)), 72",
    "perf_event_open": "298, (ctypes.c_char * 120)(1, 0, 0, 0, 120), -1, 0, -1, 0",
    "kexec_load": "246, 0, 0, None, 0",
    "init_module": "175, b'', 0, b''",
    "delete_module": "176, b'no_such_module', 0",
    "pivot_root": "155, b'/tmp', b'/tmp'",
    "swapon": "167, b'/app/none', 0",
    "acct": "163, None",
    "quotactl": "179, 0x800002 << 8, None, 0, None",
    "settimeofday": "164, (ctypes.c_long * 2)(0, 0), None",
    "sethostname": "170, b'host', 4",
    "iopl": "172, 3",
    "syslog": "103, 3, (ctypes.c_char * 64)(), 64",
    "setns": "308, os.open('/proc/1/ns/net', os.O_RDONLY), 0",
    "reboot": "169, 0xfee1dead, 672274793, 0, None",
    "open_by_handle_at": "304, os.open('/app', os.O_RDONLY), struct.pack('IiQ', 8, 1, 2), 0",
    "mount_tmpfs": "165, b'none', b'/tmp', b'tmpfs', 0, None",
    "remount_usr": "165, b'none', b'/usr', None, 0x1020, None",
    "umount_proc": "166, b'/proc', 2",
    "keyctl": "250, 0, -4, 1",
    "add_key": "248, b'user', b'rl360', b'x', 1, -4",
    "io_uring_setup": "425, 8, (ctypes.c_char * 120)()",
    "userfaultfd": "323, 0",
    "unshare_user": "272, 0x10000000",
    "clone_user": "56, 0x10000011, 0, 0, 0, 0",
}

PROBES: dict[str, Probe] = {
    # the network
    "a service on the host's loopback": got("socket.create_connection(('127.0.0.1', {port}), 2)", True),
    "an address outside": got("socket.create_connection(('1.1.1.1', 53), 2)"),
    "the cloud's metadata": got("socket.create_connection(('169.254.169.254', 80), 2)"),
    "a name": got("socket.getaddrinfo('example.com', 80)"),
    "a datagram": got("socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('1.1.1.1', 53))"),
    "an abstract socket": got("socket.socket(socket.AF_UNIX).connect('\\0{abstract}')", True),
    "a socket in the host's /tmp": got("socket.socket(socket.AF_UNIX).connect('{socket}')", True),
    "a raw socket": got("socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)", ROOT),
    "a packet socket": got("socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3)", ROOT),
    "the hypervisor's socket": got("s = socket.socket(socket.AF_VSOCK); s.settimeout(1); s.connect((2, 1024))"),
    "forwarding": Probe(write("/proc/sys/net/ipv4/ip_forward")),
    "namespace: the host's loopback": Probe(
        namespaced("-Urn", "exec 3<>/dev/tcp/127.0.0.1/{port} && echo GOT"), ran="ran"
    ),
    # files
    "a file of the host": Probe("cat {secret} || echo held", SECRET, True, SECRET + "|held"),
    "through PID 1's root": Probe("cat /proc/1/root{secret} /proc/1/cwd/../../..{secret}; echo held", SECRET),
    "through every process's root": Probe("cat /proc/*/root{secret} /proc/*/cwd{secret}; echo held", SECRET),
    "another attempt's files": Probe(
        "cat {other}/mine 2>/dev/null; ls {folder} 2>/dev/null; echo held", f"{SECRET}|sandboxes"
    ),
    "homes": Probe("ls -A /root /home /home/agent 2>&1; echo held", r"\.ssh|\.rl360|\.cache"),
    "shadow": Probe("cat /etc/shadow /etc/ssh/* 2>&1; echo held", r"root:[^x]|KEY"),
    **{
        f"write to {path}": Probe(write(path)) for path in ("/x", "/usr/x", "/bin/x", "/etc/passwd", "/opt/x", "/srv/x")
    },
    **{
        f"write to {path}": Probe(write(path))
        for path in (
            "/proc/sys/kernel/core_pattern",
            "/proc/sys/vm/drop_caches",
            "/proc/sysrq-trigger",
            "/sys/kernel/x",
        )
    },
    "the kernel's memory": got("os.pread(os.open('/proc/kcore', os.O_RDONLY), 64, 0)", False),
    "devices": Probe("ls /dev; echo held", r"\b(sd[a-z]|nvme|vd[a-z]|kmsg|mem|kvm|fuse|loop|tun|net|dri|nvidia)\b"),
    "a disk of its own": got("os.mknod('/app/disk', stat.S_IFBLK | 0o600, os.makedev(8, 0))"),
    "a memory device of its own": got("os.mknod('/app/mem', stat.S_IFCHR | 0o600, os.makedev(1, 1))"),
    "chroot": got("os.chroot('/tmp')"),
    "a terminal to type into": got("os.open('/dev/tty', os.O_RDWR)"),
    "open files of the server": Probe(
        "ls -l /proc/*/fd/ 2>/dev/null | grep -v -e pipe: -e /dev/ -e /proc -e total | grep -e '->'; echo held", "->"
    ),
    # processes
    "the host's processes": Probe("cat /proc/*/cmdline | tr '\\0' ' '; echo held", "86421|75318", True, "held|86421"),
    "the host's environment": Probe("cat /proc/*/environ | tr '\\0' '\\n'; echo held", SECRET, True, SECRET + "|held"),
    "a signal to the host": Probe("kill -0 {pid} && echo GOT || echo held", outside=True),
    "a pidfd of the host": got("os.pidfd_open({pid})", True),
    "every process it can name": Probe("kill -9 -1; echo held"),
    "every number": Probe("for p in $(seq 2 3000) {pid}; do kill -9 $p 2>/dev/null; done; echo held", "GOT", ran=""),
    "tracing the host": got("must(libc.ptrace(16, {pid}, None, None))"),
    "memory of the host": got(
        "b = ctypes.create_string_buffer(8)\niov = (ctypes.c_size_t * 2)(ctypes.addressof(b), 8)\n"
        "must(libc.process_vm_readv({pid}, iov, 1, iov, 1, 0))"
    ),
    "a higher priority": got("os.nice(-1)", ROOT),
    "real time": got("os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))"),
    "safe from the OOM killer": Probe(
        write("/proc/self/oom_score_adj").replace("echo 1", "echo -1000"), ran="held|GOT"
    ),
    # PID 1, which serves the sandbox as the same user
    "PID 1 traced": got("must(libc.ptrace(16, 1, None, None))"),
    "PID 1's commands": got("open('/proc/1/fd/0', 'w')"),
    "PID 1's answers": got("open('/proc/1/fd/2', 'w')"),
    "PID 1's descriptors": got("must(libc.syscall(438, os.pidfd_open(1), 2, 0))"),
    "PID 1's memory": got("open('/proc/1/mem', 'r+b')"),
    "PID 1's memory, read": got(
        "b = ctypes.create_string_buffer(8)\niov = (ctypes.c_size_t * 2)(ctypes.addressof(b), 8)\n"
        "must(libc.process_vm_readv(1, iov, 1, iov, 1, 0) - (ctypes.get_errno() == 14) * -1)"
    ),
    "PID 1's limits": got("import resource\nresource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))"),
    "PID 1's environment": got("open('/proc/1/environ')"),
    "PID 1's place with the OOM killer": Probe(write("/proc/1/oom_score_adj").replace("echo 1", "echo 1000")),
    # privileges
    "a setuid copy": Probe("cp $(command -v id) ./id; chmod 4777 ./id; ./id -u; echo held", r"(?m)^0$"),
    "setuid programs": Probe("for p in su sudo pkexec newgrp; do echo | $p -c id; done 2>&1; echo held", r"uid=0"),
    "file capabilities": got(
        "os.setxattr('/app/id', 'security.capability', bytes.fromhex('0100000200200000' + '00' * 12))"
    ),
    "uid 0": got("os.setuid(0)", ROOT),
    "groups of the host": got("os.setgroups([0])", ROOT),
    **{f"syscall {name}": got(f"must(libc.syscall({arguments}))") for name, arguments in SYSCALLS.items()},
    "namespace: /usr made writable": Probe(
        namespaced("-Urm", "mount -o remount,bind,rw /usr && touch /usr/escaped && echo GOT"), ran="ran"
    ),
    "namespace: what lies below a mount": Probe(
        namespaced("-Urm", "umount /app && ls -A /app && echo GOT; umount -l /etc && cat /etc/shadow && echo GOT"),
        ran="ran",
    ),
    "namespace: a release agent": Probe(
        namespaced(
            "-UrmC",
            "mkdir -p /tmp/c; for k in memory cpu pids rdma; do mount -t cgroup -o $k c /tmp/c "
            "&& echo /app/x > /tmp/c/release_agent && echo GOT; done",
        ),
        ran="ran",
    ),
    "namespace: limits of its own group": Probe(
        namespaced(
            "-UrmC",
            "mkdir -p /tmp/c; mount -t cgroup2 c /tmp/c; for f in memory.max pids.max cgroup.procs; do "
            "echo max > /tmp/c/$f && echo GOT; done",
        ),
        ran="ran",
    ),
    "namespace: a disk": Probe(
        namespaced("-Urm", "mknod /tmp/d b 8 0 && head -c 1 /tmp/d && echo GOT; mount /dev/sda1 /tmp && echo GOT"),
        ran="ran",
    ),
    "groups to write to": Probe("find / -xdev -name cgroup.procs -writable 2>/dev/null; ls /sys; echo held", "procs"),
    # the verifier's
    "tests before they run": Probe(
        "ls /tests /logs /solution; find / -name test.sh 2>/dev/null; echo held", r"test\.sh"
    ),
    "a verifier of its own": Probe("mkdir -p /tests /logs/verifier 2>&1 && echo GOT || echo held"),
}


@pytest.mark.parametrize("name", PROBES)
def test_there_is_no_way_out(rig: Rig, name: str) -> None:
    probe = PROBES[name]
    command = re.sub(r"\{(\w+)\}", lambda found: rig.names.get(found[1], found[0]), probe.command)
    # Searches of the whole disk take long where nothing of it has been read yet.
    said = rig.say(command, timeout_s=50)
    assert not re.search(probe.never, said), said
    assert re.search(probe.ran, said), f"it did not run: {said}"
    if probe.outside:
        env = {**os.environ, "SECRET_OF_THE_HOST": SECRET}
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=20, env=env, check=False)
        assert re.search(probe.never, done.stdout), f"the try itself is wrong: {done.stdout} {done.stderr}"
    assert rig.say("echo alive") == "alive\n"


def test_that_is_enough_of_them() -> None:
    assert len(PROBES) >= 80


def test_what_a_task_needs_is_there(rig: Rig) -> None:
    """Threads, child processes, pipes, signals and its own loopback: the filter of system calls takes none of them."""
    said = rig.say(
        "python3 - <<'END'\nimport socket, subprocess, threading\n"
        "t = threading.Thread(target=lambda: print('thread')); t.start(); t.join()\n"
        "print(subprocess.run(['sh', '-c', 'echo child; kill -9 $$'], capture_output=True, text=True))\n"
        "s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())\nprint('loopback')\nEND"
    )
    assert "thread\n" in said and "returncode=-9, stdout='child" in said and said.endswith("loopback\n")


def test_a_debugger_and_limits_of_its_own(rig: Rig) -> None:
    """What keeps PID 1 from being touched keeps nobody from its own processes."""
    said = rig.say(
        python(
            "import resource, subprocess\nchild = subprocess.Popen(['sleep', '9'])\n"
            "must(libc.ptrace(16, child.pid, None, None))\nos.waitpid(child.pid, 0x40000000)\n"
            "open(f'/proc/{child.pid}/mem', 'r+b')\nmust(libc.ptrace(17, child.pid, None, None))\nchild.kill()\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (99, 99))\nresource.prlimit(0, resource.RLIMIT_CORE, (0, 0))"
        )
    )
    assert said == "GOT\n" and rig.say("ulimit -n 100; ulimit -n; prlimit --nofile=50 echo ok") == "100\nok\n"


def test_nothing_of_them_is_left_on_the_host(rig: Rig) -> None:
    assert not any(os.path.lexists(path) for path in ("/usr/escaped", "/usr/x", "/x", "/opt/x", "/srv/x"))
    assert re.search(r"(?m)^root:", Path("/etc/passwd").read_text())
    rig.all_well()


def test_no_channel_between_attempts_by_keyring(rig: Rig) -> None:
    """Sandboxes of a root server share one user id, and a user's keyring knows no namespaces of processes."""
    put = python("must(libc.syscall(248, b'user', b'rl360-key', b'hello', 5, -4))")
    look = python("must(libc.syscall(250, 10, -4, b'user', b'rl360-key', 0))")
    rig.say(put)
    said = rig.say(look, sandbox=rig.other)
    assert "held" in said and "GOT" not in said


# -- what takes everything there is -----------------------------------------------------------------------------------

BOMBS = {
    "processes": (":(){ :|:& };:; sleep 20", 0.7),
    "memory": ("python3 -c 'x = bytearray(1 << 30)'; python3 -c 'a = [b\"x\" * (1 << 20) for _ in range(1000)]'", 10),
    "memory in /tmp": ("head -c 2G /dev/zero > /tmp/f; head -c 2G /dev/zero > /dev/shm/f; du -sm /tmp /dev/shm", 10),
    "a file": ("head -c 2G /dev/zero > f; stat -c %s f", 10),
    "open files": ("python3 -c 'a = [open(\"/dev/null\") for _ in range(1 << 20)]' 2>&1 | tail -1", 10),
    "processor time": ("while :; do :; done & while :; do :; done & wait", 1.0),
    "output": ("yes", 10),
    "names": ('python3 -c \'import os\nfor _ in range(800): os.mkdir("d"); os.chdir("d")\'', 10),
}


@needs_cgroups
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_takes_its_own_sandbox_at_most(rig: Rig, name: str) -> None:
    command, timeout_s = BOMBS[name]
    limits = LIMITS.model_copy(update={"cpu_time_s": 10.0})
    with rig.fresh(limits=limits) as sandbox:
        started = time.monotonic()
        with contextlib.suppress(SandboxGone):
            said = rig.say(command, timeout_s, sandbox)
            if name == "open files":
                assert "Too many open files" in said, said
            if name == "memory in /tmp":
                assert sum(int(line.split()[0]) for line in said.splitlines()[-2:]) <= LIMITS.memory_mb
        assert time.monotonic() - started < timeout_s + 5
        file = sandbox.spec.workspace.files / "f"
        assert not file.exists() or file.stat().st_size <= LIMITS.file_size_mb << 20
        rig.all_well()


@needs_cgroups
def test_a_greedy_forker_ends_its_own_sandbox(rig: Rig) -> None:
    with rig.fresh(limits=LIMITS.model_copy(update={"pids": 16})) as sandbox:
        rig.say(HOG, 20, sandbox)
        time.sleep(0.3)
        with pytest.raises(SandboxGone):
            rig.say("true", 5, sandbox)
        rig.all_well()


STUBBORN = {
    "traps": "trap '' TERM INT HUP QUIT; sleep 60",
    "a session of its own": "setsid sleep 60 & sleep 60",
    "forked twice": "( ( trap '' TERM HUP; sleep 60 ) & ) ; sleep 60",
    "stopped": "bash -c 'kill -STOP $$' & sleep 60",
    "traced": "python3 -c 'import ctypes, time; ctypes.CDLL(None).ptrace(0, 0, 0, 0); time.sleep(60)' & sleep 60",
    "in namespaces of its own": "unshare -Urpf --mount-proc sleep 60 & sleep 60",
    "forking on": "while :; do sleep 0.01 & done",
}


@pytest.mark.parametrize("name", STUBBORN)
def test_nothing_outlives_its_timeout(rig: Rig, name: str) -> None:
    with rig.fresh() as sandbox:
        result = rig.run(sandbox.exec(STUBBORN[name], 0.4))
        assert result.timed_out
        left = rig.say("ls /proc | grep -c '^[0-9]'", sandbox=sandbox)
        assert int(left) <= 4, "PID 1, its shell, bash and ls"


# -- ways to be left unjudged -----------------------------------------------------------------------------------------

VOIDS = {
    "told to end": "echo 'exit 200' > /proc/1/fd/0",
    "told to loop": "echo 'while :; do :; done' > /proc/1/fd/0",
    "told to be silent": "echo 'exec 2>/dev/null' > /proc/1/fd/0",
    "an answer that is no number": "for n in 1 2 3 4; do printf '%s \\302\\262\\n' $n > /proc/1/fd/2; done",
    "its commands stolen": "(setsid cat /proc/1/fd/0 >/dev/null 2>&1 &); sleep 0.2",
    "no files for it": "prlimit --pid 1 --nofile=0:0",
    "no processes for it": "prlimit --pid 1 --nproc=0:0",
    "no memory for it": "prlimit --pid 1 --as=1:1",
    "a stopped child that is traced": "exec python3 -c "
    "'import ctypes, os; ctypes.CDLL(None).ptrace(0, 0, 0, 0); os.kill(os.getpid(), 19); print(1)'",
    "a child of its own": python("must(libc.syscall(56, 0x8000 | 17, 0, 0, 0, 0)) or os._exit(200)\ntime.sleep(0.2)"),
    "who would end it, killed": f"exec {KILLER.format('9')}",
    "who would end it, stopped": f"exec {KILLER.format('19')}",
    "no way into its files": "chmod 000 .",
    "no way out": "mkdir a && chmod 000 a . && exec sleep 9",
}


@pytest.mark.parametrize("name", VOIDS)
def test_an_attempt_is_judged_whatever_it_does_to_its_sandbox(rig: Rig, name: str) -> None:
    """It goes on, or its end is its own doing, and the verifier starts over what it left."""
    with rig.fresh() as sandbox:
        ends = []
        try:
            rig.run(sandbox.exec(f"echo wrong > answer; {VOIDS[name]}", 1.5))
            assert rig.say("echo next", sandbox=sandbox) == "next\n"
        except SandboxGone as gone:
            ends.append(gone)
        assert all(gone.by_contents for gone in ends), ends
        assert rig.run(sandbox.stop()).confirmed
        workspace = sandbox.spec.workspace
        judge = rig.make(f"fresh-{rig.number}-verifier", workspace=workspace, with_logs=True)
        try:
            assert rig.say("cat answer; echo 0 > /logs/verifier/reward.txt", sandbox=judge) == "wrong\n"
        finally:
            assert rig.run(judge.stop()).confirmed
        assert read_reward(workspace.logs) == 0.0


def test_a_sandbox_that_the_host_ended_is_the_hosts(rig: Rig) -> None:
    for which in ("_init", "_outer"):
        with rig.fresh() as sandbox:
            signal.pidfd_send_signal(getattr(sandbox, which), signal.SIGKILL)
            time.sleep(0.2)
            with pytest.raises(SandboxGone) as caught:
                rig.say("echo next", sandbox=sandbox)
            assert not caught.value.by_contents, caught.value


def test_a_log_folder_without_permissions_is_no_reward(rig: Rig) -> None:
    with rig.fresh(with_logs=True) as sandbox:
        rig.say("echo 1 > /logs/verifier/reward.txt; chmod 000 /logs/verifier", sandbox=sandbox)
        assert rig.run(sandbox.stop()).confirmed
        if ROOT:
            assert read_reward(sandbox.spec.workspace.logs) == 1.0
        else:
            with pytest.raises(RewardError, match="permissions"):
                read_reward(sandbox.spec.workspace.logs)


@pytest.mark.skipif(not ROOT, reason="runs as another user already")
def test_the_same_where_the_server_is_not_root() -> None:
    with tempfile.TemporaryDirectory(prefix="rl360-escapes-") as folder:
        os.chown(folder, UNPRIVILEGED, UNPRIVILEGED)
        user = ["setpriv", f"--reuid={UNPRIVILEGED}", f"--regid={UNPRIVILEGED}", "--clear-groups"]
        which = "PID or judged or permissions or debugger or is_the_hosts or reaches"
        options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", f"--basetemp={folder}/t", "-k", which]
        env = {**os.environ, "HOME": folder, "RL360_HOME": f"{folder}/home", "PYTHONDONTWRITEBYTECODE": "1"}
        if subprocess.run([*user, sys.executable, "-c", "import rl360"], env=env, check=False).returncode:
            pytest.skip(f"user {UNPRIVILEGED} may not read this environment")
        argv = [*user, sys.executable, "-m", "pytest", *options, __file__]
        done = subprocess.run(argv, env=env, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0 and re.search(r"[3-9]\d passed", done.stdout), done.stdout[-3000:] + done.stderr


# -- tars and files that come out or go in ----------------------------------------------------------------------------


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info


HOSTILE_TARS: dict[str, Callable[[Rig], list[tarfile.TarInfo]]] = {
    "absolute": lambda rig: [member(f"{rig.folder}/planted")],
    "dots": lambda _: [member("../../../../../../tmp/rl360-planted"), member("../usr/planted")],
    "through a link": lambda rig: [member("out", tarfile.SYMTYPE, str(rig.folder)), member("out/planted")],
    "a hard link": lambda rig: [member("hard", tarfile.LNKTYPE, rig.names["secret"])],
    "a device": lambda _: [member("disk", tarfile.BLKTYPE), member("pipe", tarfile.FIFOTYPE)],
    "setuid": lambda _: [member("suid", mode=0o6777)],
}


@pytest.mark.parametrize("name", HOSTILE_TARS)
def test_a_hostile_tar_stays_inside(rig: Rig, name: str) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for info in HOSTILE_TARS[name](rig):
            archive.addfile(info, io.BytesIO(b""))
    with rig.fresh() as sandbox:
        with contextlib.suppress(Rl360Error):  # refused by the tar inside, or unpacked there
            rig.run(sandbox.upload(buffer.getvalue(), "/app", 10))
        assert not (rig.folder / "planted").exists() and not Path("/tmp/rl360-planted").exists()
        assert not Path("/usr/planted").exists()
        for path in sandbox.spec.workspace.files.rglob("*"):
            status = path.lstat()
            assert not (status.st_mode & 0o6000 and status.st_uid == 0), path
            assert status.st_rdev == 0
        assert rig.say("echo alive", sandbox=sandbox) == "alive\n"


def test_what_an_agent_leaves_is_read_and_deleted_without_following_it(rig: Rig) -> None:
    """A judge's evidence and the deleting of a workspace, over links to the host, pipes, and a maze."""
    with rig.fresh() as sandbox:
        rig.say(
            f"ln -s {rig.names['secret']} link; ln -s {rig.folder} folder; mkfifo pipe; ln -s / root", sandbox=sandbox
        )
        rig.say(
            "mkdir a; chmod 000 a; for i in $(seq 60); do mkdir -p deep; cd deep; done; ln -s . self", sandbox=sandbox
        )
        text = files_text(sandbox.spec.workspace.files, {}, None, 100_000)
        assert SECRET not in text and text.count("not followed") >= 3
    assert Path(rig.names["secret"]).read_text() == SECRET


# -- from the agent to the verifier -----------------------------------------------------------------------------------

PLANT = r"""
echo 'export PATH=/app:$PATH; echo HIJACK-bashrc' | tee ~/.bashrc ~/.profile ~/.bash_profile > /tmp/env.sh
for name in cat python3 bash ls; do printf '#!/bin/sh\necho HIJACK-%s\n' $name > $name; chmod 755 $name; done
echo 'print("HIJACK-site")' | tee sitecustomize.py > usercustomize.py
mkdir -p ~/.local/lib/python3.1{0,1,2,3}/site-packages && for d in ~/.local/lib/python3*; do
  cp sitecustomize.py $d/site-packages/usercustomize.py; done
echo 'print("HIJACK-stdlib")' > colorsys.py
echo '/app' > app.pth; touch /tmp/preload.so; export LD_PRELOAD=/tmp/preload.so BASH_ENV=/tmp/env.sh PYTHONPATH=/app
(setsid bash -c 'trap "" TERM HUP; : agents-loop; while :; do
mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt
echo right > /app/answer; done' >/dev/null 2>&1 &)
ln -s /logs/verifier/reward.txt reward.txt; ln -s /tests tests; echo wrong > answer; echo planted
"""
VERIFY = r"""
echo "path $PATH"; echo "env [$LD_PRELOAD$BASH_ENV$PYTHONPATH$PYTHONSTARTUP]"
echo "home $(ls -A ~ | wc -l) tmp $(ls -A /tmp | wc -l)"
echo "logs $(ls -A /logs/verifier | wc -l)"; cat /tests/mark; bash -lc 'echo login'; bash -c 'echo plain'
python3 -c 'print("python")'; python3 -I -c 'import colorsys; print("isolated")'
echo "others $(cat /proc/*/cmdline | tr '\0' ' ' | grep -c '[a]gents-loop')"
a=$(cat /app/answer); sleep 0.3; echo "answer $a $(cat /app/answer)"
(echo x > /tests/mark) 2>/dev/null && echo HIJACK-tests; python3 -c 'import colorsys' | sed 's/^/trusted: /'
echo 0 > /logs/verifier/reward.txt
"""


@pytest.fixture(scope="module")
def verified(rig: Rig) -> Iterator[tuple[str, Workspace]]:
    """What a verifier's sandbox saw after an agent that had planted whatever it could."""
    tests = rig.folder / "tests"
    tests.mkdir()
    (tests / "mark").write_text("the tests' own\n")
    published = rig.run(rig.provider.publish(tests, tree_digest(tests)))
    agent = rig.make("planter")
    workspace = agent.spec.workspace
    assert "planted" in rig.say(PLANT, sandbox=agent)
    give_up_at = time.monotonic() + 10
    while (workspace.files / "answer").read_text() != "right\n":  # its background process is at work
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    assert rig.run(agent.stop()).confirmed
    (workspace.files / "answer").write_text("wrong\n")
    judge = rig.make("planter-verifier", workspace=workspace, read_only={"/tests": published}, with_logs=True)
    said = rig.run(judge.exec(VERIFY, 20)).output.decode()
    assert rig.run(judge.stop()).confirmed
    yield said, workspace
    assert rig.run(rig.provider.remove_workspace(workspace)) is None


@pytest.mark.parametrize(
    ("what", "shown"),
    [
        ("programs of the workspace are not on the path", r"(?m)^path (?!.*/app)"),
        ("no variable of the agent's is left", r"(?m)^env \[\]$"),
        ("home and /tmp are new", r"(?m)^home 0 tmp 0$"),
        ("its log folder is new and only its own", r"(?m)^logs 0$"),
        ("the tests are the task's", r"(?m)^the tests' own$"),
        ("shells start clean", r"(?m)^login\nplain$"),
        ("Python starts clean", r"(?m)^python\nisolated$"),
        ("no process of the agent is left", r"(?m)^others 0$"),
        ("no file changes under its eyes", r"(?m)^answer wrong wrong$"),
    ],
)
def test_an_agent_reaches_no_verifier(verified: tuple[str, Workspace], what: str, shown: str) -> None:
    said, _ = verified
    assert re.search(shown, said), f"{what}: {said}"


def test_what_tests_import_from_the_workspace_they_trust(verified: tuple[str, Workspace]) -> None:
    """docs/sandboxes.md says so: Python of `-c` looks in the working directory first. Nothing else was hijacked."""
    said, workspace = verified
    assert re.findall(r"(?:trusted: )?HIJACK-\w+", said) == ["trusted: HIJACK-stdlib"]
    assert read_reward(workspace.logs) == 0.0


def test_a_python_of_its_own_is_what_tests_run_in(rig: Rig) -> None:
    """The control of these tests: inside there is a Python, and it is not this one's environment."""
    said = rig.say("python3 -c 'import sys; print(sys.prefix)'")
    assert said.strip() and sys.prefix not in said
