"""Real bubblewrap sandboxes and the real /run server: isolation, limits, proof of end, rewards nobody can forge."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # helpers shared by the parts of the suite
from scripted_session import Bash, Hang, Say, ScriptedSessions

from rl360.errors import BadInput, Rl360Error
from rl360.harbor.check import check_tasks, task_dirs
from rl360.harbor.protocol import RunReply, SandboxLimits
from rl360.harbor.verdict import receipt_problem, run_key
from rl360.sandboxes import cgroups
from rl360.sandboxes.bubblewrap import BubblewrapProvider, marked_pids
from rl360.sandboxes.provider import SandboxGone, SandboxSpec, SandboxStartError

REPOSITORY = Path(__file__).resolve().parents[2]
EXERCISM = REPOSITORY.parent / "shared" / "tasks" / "exercism-python"
CHORES = REPOSITORY / "rl360" / "tasksets" / "chores_tasks"
TOKEN = "token-of-the-sandbox-tests"


def why_not() -> str | None:
    """Why bubblewrap cannot run here."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    argv = ["bwrap", "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    return None if done.returncode == 0 else f"bwrap cannot run here: {done.stderr.strip()[:200]}"


REASON = why_not()
pytestmark = [pytest.mark.contract, pytest.mark.skipif(REASON is not None, reason=REASON or "")]
needs_cgroups = pytest.mark.skipif(
    not {"memory", "pids"} <= cgroups.parents().controllers, reason="no memory and pids cgroups to write here"
)


def in_sandbox(
    tmp_path: Path, body: Callable[..., Awaitable[Any]], env: dict[str, str] | None = None, **limits: Any
) -> Any:
    """Run `body(sandbox)` in a fresh sandbox and check that nothing of it is left."""

    async def go() -> Any:
        provider = BubblewrapProvider(tmp_path / "sandboxes")
        workspace = await provider.new_workspace("one", None)
        spec = SandboxSpec("one", {"run": "r"}, SandboxLimits(**limits), workspace, env=env or {})
        sandbox = await provider.create(spec)
        try:
            return await body(sandbox)
        finally:
            groups = sandbox._group.paths
            proof = await sandbox.stop()
            assert proof.confirmed, proof
            assert marked_pids(workspace.path) == []
            assert not any(path.exists() for path in groups)
            assert await provider.remove_workspace(workspace) is None
            assert list((tmp_path / "sandboxes" / "live").iterdir()) == []
            provider.close()

    result = asyncio.run(go())
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
    return result


def output_of(tmp_path: Path, command: str, timeout_s: float = 10, **limits: Any) -> tuple[int, str]:
    async def body(sandbox: Any) -> tuple[int, str]:
        result = await sandbox.exec(command, timeout_s)
        return result.exit_code, result.output.decode()

    return in_sandbox(tmp_path, body, **limits)


# -- isolation --------------------------------------------------------------------------------------------------------


def test_identity_and_privileges(tmp_path: Path) -> None:
    code, text = output_of(
        tmp_path, "id -u; pwd; grep -E '^(Cap|NoNewPrivs)' /proc/self/status; ls /proc | grep -c '^[0-9]'"
    )
    assert code == 0
    lines = text.split("\n")
    assert lines[0] != "0" and lines[1] == "/app"
    assert "NoNewPrivs:\t1" in lines
    assert all(int(line.split()[1], 16) == 0 for line in lines if line.startswith("Cap"))
    assert int(lines[-2]) < 10  # its own processes, not the host's


def test_no_network_but_loopback(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as host:
        port = host.getsockname()[1]
        tries = f"(echo > /dev/tcp/127.0.0.1/{port}) 2>&1; (echo > /dev/tcp/1.1.1.1/80) 2>&1"
        code, text = output_of(tmp_path, f"{tries}; cat /proc/net/dev")
    assert "refused" in text and "unreachable" in text
    devices = [line.split(":")[0].strip() for line in text.splitlines() if ":" in line and "bytes" not in line]
    assert "lo" in devices and not any(name.startswith(("eth", "en", "wl")) for name in devices)
    assert code == 0


def test_system_is_read_only_and_hides_the_host(tmp_path: Path) -> None:
    places = "/x /usr/x /etc/x /opt/x /proc/sys/kernel/core_pattern /logs/verifier/reward.txt /tests/x"
    code, text = output_of(tmp_path, f"for p in {places}; do echo 1 > $p && echo WROTE $p; done 2>&1; true")
    assert code == 0 and "WROTE" not in text
    code, text = output_of(tmp_path, f"cat /etc/shadow; ls {tmp_path} {REPOSITORY} /root; ls /home")
    assert text.count("No such file") == 4 and text.endswith("agent\n")


def test_private_tmp_and_home_and_workdir_on_disk(tmp_path: Path) -> None:
    async def body(sandbox: Any) -> None:
        result = await sandbox.exec(
            'echo a > /tmp/f; echo b > "$HOME/f"; echo c > /dev/shm/f; echo d > f; cat /app/f', 5
        )
        assert (result.exit_code, result.output) == (0, b"d\n")
        assert (sandbox.spec.workspace.files / "f").read_bytes() == b"d\n"

    in_sandbox(tmp_path, body)


def test_environment_carries_nothing_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SERVER", "x")
    _, text = output_of(
        tmp_path, "env; cat /proc/1/environ | tr '\\0' '\\n' | grep -v ^RL360_SANDBOX=; ls -l /proc/self/fd"
    )
    assert "SECRET_OF_THE_SERVER" not in text and "RL360" not in text
    assert text.count("pipe:") == 2 and "socket:" not in text


def test_variables_of_a_task_reach_its_commands_and_no_process_of_the_host(tmp_path: Path) -> None:
    """A task that names LD_PRELOAD, or a PATH with an `sh` of its own, would else run code outside as the server."""
    proof = tmp_path / "ran-on-the-host"
    trap = tmp_path / "trap"
    trap.mkdir()
    for name in ("sh", "bwrap", "setpriv", "env"):
        (trap / name).write_text(f"#!/bin/sh\ntouch {proof}\n")
        (trap / name).chmod(0o755)
    hostile = {"PATH": f"{trap}:/usr/bin:/bin", "LD_PRELOAD": "/nowhere.so", "-u": "x", "RL360_SANDBOX": "/elsewhere"}
    hostile["PLAIN"] = "x"  # `-u` is no name to a shell, which drops it

    async def body(sandbox: Any) -> str:
        assert len(await asyncio.to_thread(marked_pids, sandbox.spec.workspace.path)) >= 1  # the marker is ours
        return (await sandbox.exec("env", 10)).output.decode()

    text = in_sandbox(tmp_path, body, env=hostile)
    assert f"PATH={trap}:/usr/bin:/bin\n" in text and "PLAIN=x\n" in text
    assert not proof.exists()


# -- limits -----------------------------------------------------------------------------------------------------------


def test_time_limit_ends_the_command_and_not_the_sandbox(tmp_path: Path) -> None:
    async def body(sandbox: Any) -> None:
        started = time.monotonic()
        slow = await sandbox.exec("trap '' TERM INT HUP; (setsid sleep 60 &); sleep 60", 0.3)
        assert slow.timed_out and slow.exit_code == 124 and time.monotonic() - started < 4
        after = await sandbox.exec("ls /proc | grep -c '^[0-9]'; echo alive", 5)
        assert after.output.endswith(b"alive\n") and int(after.output.split()[0]) <= 4

    in_sandbox(tmp_path, body)


@needs_cgroups
def test_fork_bomb(tmp_path: Path) -> None:
    async def body(sandbox: Any) -> None:
        bomb = await sandbox.exec(":(){ :|:& };:; sleep 30", 0.7)
        assert bomb.timed_out
        after = await sandbox.exec("echo alive", 5)
        assert after.output == b"alive\n"
        assert cgroups.limit_hits(sandbox._group).get("pids", 0) > 0

    in_sandbox(tmp_path, body, pids=32)


# takes every free slot and each one that becomes free later
HOG = """cat > hog.py <<'E'
import os, time
while True:
    try:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    except OSError:
        open("full", "w")
        time.sleep(0.001)
E
(setsid python3 hog.py >/dev/null 2>&1 &); while [ ! -e full ]; do :; done"""


@needs_cgroups
def test_exhausted_pids_are_the_policys_doing(tmp_path: Path) -> None:
    async def body(sandbox: Any) -> None:
        await sandbox.exec(HOG, 20)
        await asyncio.sleep(0.5)  # the slot of the command itself is taken next
        with pytest.raises(SandboxGone, match="limit hit: pids") as caught:
            await sandbox.exec("true", 5)
        assert caught.value.by_contents

    in_sandbox(tmp_path, body, pids=16)


@needs_cgroups
def test_memory_limit(tmp_path: Path) -> None:
    async def body(sandbox: Any) -> None:
        big = await sandbox.exec("python3 -c 'x = b\"a\" * (1 << 29)'", 20)
        assert big.exit_code in (1, 137)
        after = await sandbox.exec("head -c 200M /dev/zero > /tmp/f; echo alive", 20)
        assert b"alive" in after.output

    in_sandbox(tmp_path, body, memory_mb=64)


def test_file_size_and_cpu_limits(tmp_path: Path) -> None:
    async def body(sandbox: Any) -> None:
        await sandbox.exec("head -c 9M /dev/zero > f", 10)
        assert (sandbox.spec.workspace.files / "f").stat().st_size <= 2 << 20
        burnt = await sandbox.exec("while :; do :; done", 20)
        assert not burnt.timed_out and burnt.exit_code > 128

    in_sandbox(tmp_path, body, file_size_mb=2, cpu_time_s=1)


def test_output_is_capped_and_a_flood_ended(tmp_path: Path) -> None:
    async def body(sandbox: Any) -> None:
        some = await sandbox.exec("head -c 100000 /dev/zero | tr '\\0' x; echo end >&2", 5)
        assert (len(some.output), some.output_bytes, some.exit_code) == (2048, 100_004, 0)
        flood = await sandbox.exec("yes", 30)
        assert flood.exit_code == 137 and flood.seconds < 10 and len(flood.output) == 2048
        assert (await sandbox.exec("echo alive", 5)).output == b"alive\n"

    in_sandbox(tmp_path, body)


def test_odd_commands(tmp_path: Path) -> None:
    async def body(sandbox: Any) -> None:
        for command, code, output in [
            ("echo 'a\"b' \"c'd\" \\$x `echo y`", 0, b"a\"b c'd $x y\n"),
            ("exit 77", 77, b""),
            ("cat <<E\n'q'\nE\n", 0, b"'q'\n"),
            ("echo \u00e9\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"), 0, "é😀\n".encode()),
            ("read x; echo [$x]", 0, b"[]\n"),
            ("", 0, b""),
            ("kill -9 $$", 137, None),
            ("kill -9 1; kill -9 -1; echo here", 0, None),
            ("echo '99 0' >&3; echo x", 0, None),
        ]:
            result = await sandbox.exec(command, 5)
            assert result.exit_code == code, (command, result)
            assert output is None or result.output == output, (command, result)
        assert (await sandbox.exec("if", 5)).exit_code == 2
        assert (await sandbox.exec("a\0b", 5)).exit_code == 126
        assert (await sandbox.exec("x" * 100_000, 5)).exit_code == 126
        assert (await sandbox.exec("echo alive", 5)).output == b"alive\n"

    in_sandbox(tmp_path, body)


# -- end and proof ----------------------------------------------------------------------------------------------------


def test_stubborn_processes_are_gone_after_stop(tmp_path: Path) -> None:
    seen: list[int] = []

    async def body(sandbox: Any) -> None:
        stubborn = "trap '' TERM HUP INT; while :; do sleep 0.1; done"
        await sandbox.exec(f'for i in 1 2 3; do setsid bash -c "{stubborn}" >/dev/null 2>&1 & done; sleep 0.2', 5)
        namespace = os.fstat(sandbox._namespaces[0]).st_ino
        for entry in os.listdir("/proc"):
            try:
                if entry.isdigit() and os.stat(f"/proc/{entry}/ns/pid").st_ino == namespace:
                    seen.append(int(entry))
            except OSError:
                continue

    in_sandbox(tmp_path, body)
    assert len(seen) >= 4
    assert not any(
        Path(f"/proc/{pid}/cmdline").exists() and b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in seen
    )


def test_killed_from_outside_is_infrastructure(tmp_path: Path) -> None:
    async def body(sandbox: Any) -> None:
        signal.pidfd_send_signal(sandbox._init, signal.SIGKILL)
        with pytest.raises(SandboxGone) as caught:
            await sandbox.exec("sleep 5", 10)
        assert not caught.value.by_contents

    in_sandbox(tmp_path, body)


def test_a_start_that_fails_leaves_nothing(tmp_path: Path) -> None:
    async def go() -> None:
        provider = BubblewrapProvider(tmp_path / "sandboxes")
        workspace = await provider.new_workspace("bad", None)
        spec = SandboxSpec("bad", {}, SandboxLimits(), workspace, read_only={"/tests": tmp_path / "missing"})
        with pytest.raises(SandboxStartError, match="missing"):
            await provider.create(spec)
        assert marked_pids(workspace.path) == []
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(SandboxStartError):
            await provider.create(spec)  # the cgroup of the first try is gone too
        assert len(os.listdir("/proc/self/fd")) == before
        with pytest.raises(BadInput, match="in use"):
            BubblewrapProvider(tmp_path / "sandboxes")
        provider.close()

    asyncio.run(go())


def test_what_no_command_line_holds_leaves_nothing(tmp_path: Path) -> None:
    async def go() -> None:
        provider = BubblewrapProvider(tmp_path / "sandboxes")
        workspace = await provider.new_workspace("nul", None)
        for _ in range(2):  # the second would meet the cgroup of the first
            with pytest.raises(SandboxStartError, match="null byte"):
                await provider.create(SandboxSpec("nul", {}, SandboxLimits(), workspace, env={"A": "\0"}))
        provider.close()

    asyncio.run(go())


def test_tar_in_and_out(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    payload = os.urandom(300_000)
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("d/f")
        info.size = len(payload)
        archive.addfile(info, io.BytesIO(payload))

    async def body(sandbox: Any) -> None:
        await sandbox.upload(buffer.getvalue(), "/app", 10)
        assert (sandbox.spec.workspace.files / "d" / "f").read_bytes() == payload
        await sandbox.exec("ln -s /etc/passwd d/link", 5)
        with tarfile.open(fileobj=io.BytesIO(await sandbox.download("/app/d", 10, 1 << 20))) as archive:
            files = {member.name: archive.extractfile(member) for member in archive if member.isreg()}
            assert {name: file.read() for name, file in files.items() if file} == {"./app/d/f": payload}
        with pytest.raises(Rl360Error, match="more than 1000 bytes"):
            await sandbox.download("/app/d", 10, 1000)
        with pytest.raises(Rl360Error, match="exist"):
            await sandbox.download("/app/none", 10, 100_000)
        with pytest.raises(Rl360Error, match="tar ended"):
            await sandbox.upload(buffer.getvalue(), "/etc", 10)
        assert (await sandbox.exec("echo alive", 5)).output == b"alive\n"

    in_sandbox(tmp_path, body)


@pytest.mark.skipif(os.geteuid() != 0, reason="every other test runs without root already")
def test_without_root(tmp_path: Path) -> None:
    """The same provider as an unprivileged user: user namespaces, rlimits instead of cgroups."""
    home = Path("/tmp") / f"rl360-nonroot-{os.getpid()}"
    home.mkdir()
    home.chmod(0o777)
    script = home / "probe.py"
    script.write_text(
        "import asyncio, os, sys\nfrom pathlib import Path\n"
        "from rl360.harbor.protocol import SandboxLimits\nfrom rl360.sandboxes.bubblewrap import BubblewrapProvider\n"
        "from rl360.sandboxes.provider import SandboxSpec\n"
        "async def go():\n"
        "    p = BubblewrapProvider(Path(sys.argv[1]) / 'sb')\n"
        "    w = await p.new_workspace('n', None)\n"
        "    s = await p.create(SandboxSpec('n', {}, SandboxLimits(pids=32, memory_mb=128), w))\n"
        "    a = await s.exec('id -u; echo x > f; cat f; grep CapEff /proc/self/status', 5)\n"
        "    b = await s.exec(':(){ :|:& };:; sleep 30', 1)\n"
        "    c = await s.exec('echo alive', 5)\n"
        "    q = await s.stop()\n"
        "    print(os.geteuid(), a.output, b.timed_out, c.output, q.confirmed, await p.remove_workspace(w))\n"
        "asyncio.run(go())\n"
    )
    python = (
        "/usr/bin/python3"
        if sys.executable.startswith("/root") or "/root" in os.path.realpath(sys.executable)
        else sys.executable
    )
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{REPOSITORY}:{packages}", "PYTHONDONTWRITEBYTECODE": "1"}
    argv = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", python, str(script), str(home)]
    try:
        probe = subprocess.run(
            [*argv[:-2], "-c", "import pydantic_core, rl360"], env=env, capture_output=True, timeout=60
        )
        if probe.returncode != 0:
            pytest.skip("no interpreter that another user can run with these packages")
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    finally:
        shutil.rmtree(home)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("65534 b'65534\\nx\\nCapEff:\\t0000000000000000\\n' True b'alive\\n' True None")


# -- the server -------------------------------------------------------------------------------------------------------


@dataclass
class Server:
    """A /run server of its own process."""

    home: Path
    port: int
    max_concurrent: int = 4
    queue_limit: int = 64
    options: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        token = self.home / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        argv = [sys.executable, "-m", "rl360.harbor.server", "--port", str(self.port), "--home", str(self.home)]
        argv += ["--max-concurrent", str(self.max_concurrent), "--queue-limit", str(self.queue_limit), *self.options]
        env = {**os.environ, "RL360_TOKEN_FILE": str(token), **self.env}
        log = (self.home / "log").open("ab")
        self.process = subprocess.Popen(argv, env=env, cwd=REPOSITORY, stdout=log, stderr=log)
        log.close()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log()
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.1)
        raise AssertionError(f"no health in 60 s: {self.log()}")

    def until(self, **counts: int) -> None:
        """Wait until its health tells these."""
        deadline = time.monotonic() + 20
        while counts != {name: httpx.get(f"{self.url}/health", timeout=5).json()[name] for name in counts}:
            assert time.monotonic() < deadline, f"no {counts} in 20 s"
            time.sleep(0.02)

    def log(self) -> str:
        return (self.home / "log").read_text()[-3000:]

    def stop(self, how: int = signal.SIGTERM) -> None:
        assert self.process is not None
        self.process.send_signal(how)
        self.process.wait(timeout=60)

    def live(self) -> list[Path]:
        return list((self.home / "sandboxes" / str(self.port) / "live").iterdir())

    def post(self, path: str, body: Any, token: str = TOKEN, timeout: float = 90) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=timeout)

    def run(self, body: dict[str, Any]) -> RunReply:
        response = self.post("/run", body)
        assert response.status_code == 200, response.text
        return RunReply.model_validate_json(response.content)


def free_port() -> int:
    """Two test processes at once begin at different places: a port is free until its server listens."""
    ports = range(22_100, 22_999)
    for port in (*ports[os.getpid() * 37 % len(ports) :], *ports):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
                return port
    raise AssertionError("no free port in 22100-22998")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("home"), free_port())
    running.start()
    yield running
    assert running.live() == [], "an attempt left its folder"
    running.stop()
    assert running.process is not None and running.process.returncode in (0, -signal.SIGTERM), running.log()


@pytest.fixture(scope="module")
def sessions() -> Iterator[ScriptedSessions]:
    scripted = ScriptedSessions()
    scripted.start()
    yield scripted
    scripted.stop()


TEST_SH = 'if [ "$(cat /app/answer 2>/dev/null)" = right ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n'


def make_task(path: Path, test_sh: str = TEST_SH, toml: str = "") -> Path:
    (path / "tests").mkdir(parents=True)
    (path / "environment").mkdir()
    (path / "environment" / "hint.txt").write_text("right\n")
    (path / "environment" / "Dockerfile").write_text("FROM debian\nWORKDIR /app\nCOPY . /app\n")
    (path / "task.toml").write_text(toml or '[task]\nname = "t/answer"\n[verifier]\ntimeout_sec = 20.0\n')
    (path / "instruction.md").write_text("Write the right answer.\n")
    (path / "tests" / "test.sh").write_text(test_sh)
    return path


def request_for(task: Path, name: str, base_url: str, **more: Any) -> dict[str, Any]:
    body = {"instance_id": "t/answer", "task_dir": str(task), "attempt_id": name, "run": "tests", "base_url": base_url}
    return {**body, "deadline_s": 200.0, "queue_timeout_s": 60.0, "verifier_timeout_s": 20.0, **more}


def play(server: Server, sessions: ScriptedSessions, task: Path, name: str, *turns: Any, **more: Any) -> RunReply:
    return server.run(request_for(task, name, sessions.add(name, *turns), **more))


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return make_task(tmp_path / "task")


def test_run_passes_and_fails(server: Server, sessions: ScriptedSessions, task: Path) -> None:
    good = play(server, sessions, task, "good", Bash("cat hint.txt"), Bash("cp hint.txt answer"), Say("done"))
    assert (good.outcome, good.reward, good.exit_status) == ("passed", 1.0, "Submitted")
    assert good.verdict is not None and good.verdict.attempt_id == "good" and good.verdict.task_id == "t/answer"
    assert receipt_problem(good.verdict, run_key(TOKEN, "tests"), "tests") is None
    assert receipt_problem(good.verdict, run_key(TOKEN, "other"), "tests") is not None
    assert good.cleanup.confirmed and not good.retryable and good.failure_phase is None
    assert good.agent_metrics["turns"] == 3 and good.agent_metrics["tool_calls"] == 2
    assert all(seconds > 0 for name, seconds in good.phases.model_dump().items() if name != "judge")
    told = [item["content"] for item in sessions.seen["good"][-1]["messages"] if item["role"] == "tool"]
    assert told == ["right", "ok"]
    bad = play(server, sessions, task, "bad", Say("done"))
    assert (bad.outcome, bad.reward) == ("failed", 0.0)


def test_truncated_and_turn_limit_keep_their_verdict(server: Server, sessions: ScriptedSessions, task: Path) -> None:
    cut = play(server, sessions, task, "cut", Bash("cp hint.txt answer"), Say("and so", "length"))
    assert (cut.outcome, cut.reward, cut.exit_status) == ("truncated", 1.0, "SequenceLengthLimitExceeded")
    long = play(server, sessions, task, "long", Bash("cp hint.txt answer"), Bash("true"), max_turns=1)
    assert (long.outcome, long.exit_status) == ("passed", "TurnLimitExceeded")


def test_an_agent_timeout_keeps_its_reward(server: Server, sessions: ScriptedSessions, task: Path) -> None:
    late = play(server, sessions, task, "late", Bash("cp hint.txt answer"), Hang(4), agent_timeout_s=1.0)
    assert (late.outcome, late.reward, late.exit_status) == ("passed", 1.0, "AgentTimeout")
    assert 0.9 < late.phases.agent < 3
    slow = play(server, sessions, task, "slow", Bash("sleep 30"), agent_timeout_s=1.0)
    assert (slow.outcome, slow.reward, slow.exit_status) == ("failed", 0.0, "AgentTimeout")


FORGERIES = {
    "write": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; true",
    "link": "ln -s /logs/verifier/reward.txt answer; ln -s /app /logs; true",
    "background": "(setsid bash -c 'while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; done' "
    ">/dev/null 2>&1 &) ; true",
    "late": "(trap '' TERM HUP; setsid bash -c 'sleep 1; while :; do echo right > /app/answer; done' "
    ">/dev/null 2>&1 &); true",
    "tests": "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; mkdir tests; true",
    "fifo": "mkfifo reward.txt; ln -s reward.txt reward.json; true",
}


@pytest.mark.parametrize("name", sorted(FORGERIES))
def test_a_forged_reward_counts_for_nothing(
    server: Server, sessions: ScriptedSessions, tmp_path: Path, name: str
) -> None:
    slow = make_task(tmp_path / "slow", "sleep 1.2\n" + TEST_SH) if name == "late" else make_task(tmp_path / "task")
    reply = play(server, sessions, slow, f"forge-{name}", Bash(FORGERIES[name]), Say("done"))
    assert (reply.outcome, reply.reward) == ("failed", 0.0), reply
    assert reply.cleanup.confirmed


VERIFIERS = {
    "nan": ("echo nan > /logs/verifier/reward.txt", "verifier_error"),
    "scalar": ("echo 1 > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt", "verifier_error"),
    "bool": ("echo '{\"reward\": true}' > /logs/verifier/reward.json", "verifier_error"),
    "linked": ("echo 1 > /app/x; ln -s /app/x /logs/verifier/reward.txt", "verifier_error"),
    "killed": ("echo 1 > /logs/verifier/reward.txt; kill -9 $$", "verifier_error"),
    "missing": ("echo oh", "no_verdict"),
    "crash": ("exit 3", "no_verdict"),
    "timeout": ("echo 1 > /logs/verifier/reward.txt; sleep 60", "verifier_timeout"),
    # what the agent's code can do when tests run it
    "everything-killed": ("python3 -c 'import os; os.kill(-1, 9)'; sleep 60", "verifier_error"),
    "pid1-told-to-end": ("for n in 0 2; do echo 'exit 200' > /proc/1/fd/$n; done; sleep 60", "verifier_timeout"),
    "pid1-disarmed": ("prlimit --pid 1 --nofile=0:0; prlimit --pid 1 --as=1:1; sleep 60", "verifier_timeout"),
    "pid1-traced": ("python3 -c 'import ctypes; ctypes.CDLL(None).ptrace(16, 1, 0, 0)'; sleep 60", "verifier_timeout"),
    "answers-forged": ("for n in 1 2 3; do printf '%s \\302\\262\\n' $n > /proc/1/fd/2; done", "no_verdict"),
}


@pytest.mark.parametrize("name", sorted(VERIFIERS))
def test_a_bad_verifier_is_never_a_number(
    server: Server, sessions: ScriptedSessions, tmp_path: Path, name: str
) -> None:
    test_sh, outcome = VERIFIERS[name]
    task = make_task(tmp_path / "task", f"{test_sh}\n")
    reply = play(server, sessions, task, f"verifier-{name}", Say("done"), verifier_timeout_s=1.5)
    assert (reply.outcome, reply.reward, reply.verdict) == (outcome, None, None)
    assert reply.failure_phase == "verify" and reply.cleanup.confirmed and not reply.retryable


def test_a_home_that_the_agent_wrote_to_is_not_the_verifiers(
    server: Server, sessions: ScriptedSessions, tmp_path: Path
) -> None:
    """As of an image whose HOME is the working directory. The path file would end Python with a reward."""
    forge = (
        "d=$(python3 -m site --user-site); mkdir -p $d; echo 'import os; os._exit(9)' > $d/x.pth; python3 -c 'print()'"
    )
    toml = '[task]\nname = "t/answer"\n[environment.env]\nHOME = "/app"\n'
    check = "python3 -I -c 1; python3 -c 1 && [ $HOME = /tmp ] && cat /app/forged > /logs/verifier/reward.txt\n"
    task = make_task(tmp_path / "task", check, toml)
    reply = play(server, sessions, task, "home", Bash(f"{forge}; [ $? = 9 ] && echo 1 > /app/forged"), Say("done"))
    assert reply.outcome == "passed", reply


FORGED_HOMES = [  # workdir, HOME, where below the workdir a path file of Python's would be found
    ("/root/.local", "/root", "."),
    ("/home/user/.local", "/home/user", "."),
    ("/home/user", "//home/user", ".local"),
    ("/home/user", "/home/./user", ".local"),
    ("/app", "/tmp/../app", ".local"),
    ("/opt/x", ".", ".local"),
    ("/opt/x", "-", "-/.local"),
    ("/opt/x", "", ".local"),
    ("/opt/x", "/nowhere", ".local"),
]


@pytest.mark.parametrize(("workdir", "home", "below"), FORGED_HOMES)
def test_nor_one_in_other_words(
    server: Server, sessions: ScriptedSessions, tmp_path: Path, workdir: str, home: str, below: str
) -> None:
    toml = f'[task]\nname = "t/answer"\n[environment]\nworkdir = "{workdir}"\n[environment.env]\nHOME = "{home}"\n'
    check = "echo 0 > /logs/verifier/reward.txt; python3 -c 1 || echo 1 > /logs/verifier/reward.txt\n"
    task = make_task(tmp_path / "task", check, toml)
    dockerfile = task / "environment" / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text().replace("/app", workdir))
    python = "lib/python$(python3 -I -c 'import sys; print(*sys.version_info[:2], sep=\".\")')/site-packages"
    forge = f"d={workdir}/{below}/{python}; mkdir -p $d; echo 'import os; os._exit(9)' > $d/x.pth; ls $d"
    reply = play(server, sessions, task, f"home{FORGED_HOMES.index((workdir, home, below))}", Bash(forge), Say("done"))
    assert (reply.outcome, reply.reward) == ("failed", 0.0), reply


def test_json_reward_wins_and_exit_code_is_ignored(server: Server, sessions: ScriptedSessions, tmp_path: Path) -> None:
    write = "echo '{\"reward\": 0.5}' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt; exit 9\n"
    reply = play(server, sessions, make_task(tmp_path / "task", write), "half", Say("done"))
    assert (reply.outcome, reply.reward) == ("failed", 0.5)


def test_verifier_files_are_read_only_and_fresh(server: Server, sessions: ScriptedSessions, tmp_path: Path) -> None:
    check = "echo x > /tests/x && exit; touch /tests/test.sh && exit; [ -e /tmp/mine ] && exit\n"
    check += "ls -A /logs/verifier | grep . && exit\n"
    task = make_task(tmp_path / "task", check + "echo 1 > /logs/verifier/reward.txt\n")
    assert play(server, sessions, task, "fresh", Bash("touch /tmp/mine"), Say("done")).outcome == "passed"


@needs_cgroups
def test_exhausting_the_sandbox_is_scored_not_masked(server: Server, sessions: ScriptedSessions, task: Path) -> None:
    turns = (Bash(HOG), *[Bash("read -t 0.3 < <(:); true")] * 4)
    reply = play(server, sessions, task, "hog", *turns, limits={"pids": 16})
    assert (reply.outcome, reply.reward, reply.exit_status) == ("failed", 0.0, "SandboxLimitExceeded")
    assert reply.cleanup.confirmed


def test_infrastructure_gets_no_reward(server: Server, sessions: ScriptedSessions, task: Path) -> None:
    gone = server.run(request_for(task, "gone", sessions.url("never-made")))
    assert (gone.outcome, gone.reward, gone.failure_phase) == ("session_lost", None, "agent")
    assert gone.retryable and gone.cleanup.confirmed


def test_idempotent(server: Server, sessions: ScriptedSessions, task: Path) -> None:
    body = request_for(task, "twice", sessions.add("twice", Bash("sleep 0.5; cp hint.txt answer"), Say("done")))
    with ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(server.run, [body] * 3))
    assert len({reply.trial_id for reply in replies}) == 1 and replies[0].outcome == "passed"
    assert server.run({**body, "deadline_s": 190.0}) == replies[0]
    assert len(sessions.seen["twice"]) == 2
    other = server.post("/run", {**body, "base_url": body["base_url"] + "x"})
    assert other.status_code == 409 and "base_url" in other.text
    elsewhere = server.run({**body, "run": "other", "base_url": sessions.add("again", Say("done"))})
    assert elsewhere.outcome == "failed"


def test_a_client_that_hangs_up_can_join_later(server: Server, sessions: ScriptedSessions, task: Path) -> None:
    body = request_for(task, "hangup", sessions.add("hangup", Bash("sleep 1; cp hint.txt answer"), Say("done")))
    with pytest.raises(httpx.ReadTimeout):
        server.post("/run", body, timeout=0.4)
    assert server.run(body).outcome == "passed"
    assert len(sessions.seen["hangup"]) == 2


def test_flush_cancels(server: Server, sessions: ScriptedSessions, task: Path) -> None:
    owner = {"session_server_instance_id": "owner-1"}
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(
                server.run, {**request_for(task, f"flush{i}", sessions.add(f"f{i}", Bash("sleep 30"))), **owner}
            )
            for i in range(2)
        ]
        server.until(running=2)
        assert server.post("/flush", owner).json() == {"cancelled": 2, "elsewhere": []}
        for future in running:
            reply = future.result(timeout=20)
            assert (reply.outcome, reply.reward, reply.cleanup.confirmed) == ("aborted", None, True)
    assert server.post("/flush", {}).status_code == 400


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"deadline_s": 60.0}, "deadline_s 60 < queue_timeout_s 60 + setup_timeout_s 20 + agent_timeout_s 60"),
        ({"task_dir": "/nowhere"}, "/nowhere: no such task directory"),
        ({"task_dir": None}, "task_dir is missing"),
        ({"agent_name": "os:system"}, "agent_name 'os:system' is not one of bash"),
        ({"max_turns": 0}, "max_turns: Input should be greater than or equal to 1 (got '0')"),
        ({"limits": {"memory_mb": 1}}, "limits.memory_mb: Input should be greater than or equal to 16 (got '1')"),
    ],
)
def test_bad_requests(server: Server, task: Path, change: dict[str, Any], words: str) -> None:
    response = server.post("/run", {**request_for(task, "bad-request", "http://127.0.0.1:9/x"), **change})
    assert response.status_code == 400 and words in response.json()["error"]["message"], response.text


@pytest.mark.parametrize(
    ("toml", "words"),
    [('[environment]\nnetwork_mode = "public"\n', "network"), ('[environment]\ndocker_image = "x"\n', "docker_image")],
)
def test_tasks_it_cannot_carry(server: Server, tmp_path: Path, toml: str, words: str) -> None:
    response = server.post("/run", request_for(make_task(tmp_path / "t", toml=toml), "no", "http://127.0.0.1:9/x"))
    assert response.status_code == 400 and words in response.text


def test_token_and_health(server: Server, task: Path) -> None:
    for token in ("none", TOKEN + "x"):
        assert server.post("/run", request_for(task, "token", "http://x"), token=token).status_code == 401
        assert server.post("/flush", {"run": "x"}, token=token).status_code == 401
    health = httpx.get(f"{server.url}/health", timeout=10).json()
    assert health["status"] == "ok" and health["service"] == "sandbox" and health["max_concurrent"] == 4
    assert len(health["incarnation"]) == 32 and health["cleanup_unconfirmed"] == 0


def test_queue_has_its_own_clock_and_limit(tmp_path: Path, sessions: ScriptedSessions, task: Path) -> None:
    small = Server(tmp_path / "home", free_port(), max_concurrent=1, queue_limit=2)
    small.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            first = pool.submit(play, small, sessions, task, "q0", Bash("sleep 6"), Say("done"))
            small.until(running=1)
            second = pool.submit(play, small, sessions, task, "q1", Say("done"), agent_timeout_s=1.0)
            third = pool.submit(play, small, sessions, task, "q2", Say("done"), queue_timeout_s=4.0)
            small.until(running=1, queued=2)
            full = small.post("/run", request_for(task, "q3", "http://127.0.0.1:9/x"))
            assert full.status_code == 503 and "limit 2" in full.text
            assert first.result().phases.queue < 1
            waited = second.result()
            assert waited.outcome == "failed" and waited.exit_status == "Submitted"
            assert waited.phases.queue > 1 > waited.phases.agent
            dropped = third.result()
            assert (dropped.outcome, dropped.exit_status, dropped.failure_phase) == (
                "sandbox_start",
                "QueueTimeout",
                "queue",
            )
        assert small.live() == []
    finally:
        small.stop()


def test_a_killed_server_leaves_nothing_after_its_restart(
    tmp_path: Path, sessions: ScriptedSessions, task: Path
) -> None:
    doomed = Server(tmp_path / "home", free_port())
    doomed.start()
    stubborn = "trap '' TERM HUP; (setsid sleep 97531 &); sleep 97531"
    body = request_for(task, "doomed", sessions.add("doomed", Bash(stubborn)))
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(doomed.post, "/run", body)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and not sleepers():
            time.sleep(0.05)
        assert sleepers()
        records = [json.loads(path.read_text()) for folder in doomed.live() for path in folder.glob("*.json")]
        doomed.stop(signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            lost.result()
    assert records[0]["labels"] == {"run": "tests", "step": "0", "attempt": "doomed"}
    doomed.start()
    try:
        assert sleepers() == [] and doomed.live() == []
        assert not any(Path(path).exists() for record in records for path in record["cgroups"])
        assert "left by an earlier server" in doomed.log() and "gone" in doomed.log()
        body["base_url"] = sessions.add("doomed-again", Bash("cp hint.txt answer"), Say("done"))
        assert doomed.run(body).outcome == "passed"
        body = request_for(task, "stopped", sessions.add("stopped", Bash(stubborn)))
        with ThreadPoolExecutor(1) as pool:
            lost = pool.submit(doomed.post, "/run", body)
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline and not sleepers():
                time.sleep(0.05)
            assert sleepers()
            doomed.stop()
            assert lost.exception() is not None or lost.result().status_code >= 500
        assert sleepers() == [] and doomed.live() == []
    finally:
        doomed.stop()


SANDBOXES_WITHOUT_END = """
import asyncio, contextlib, itertools, sys
from pathlib import Path
from rl360.harbor.protocol import SandboxLimits
from rl360.sandboxes.bubblewrap import BubblewrapProvider
from rl360.sandboxes.provider import SandboxSpec, SandboxStartError

async def churn(provider, lane):
    for number in itertools.count():
        name = f"{lane}-{number}"
        workspace = await provider.new_workspace(name, None)
        spec = SandboxSpec(name, {"run": "r"}, SandboxLimits(), workspace, start_timeout_s=float(sys.argv[2]))
        with contextlib.suppress(SandboxStartError):  # late: what it had begun is undone, or cut short by the kill
            await provider.create(spec)

async def main():
    provider = BubblewrapProvider(Path(sys.argv[1]))
    print("started", flush=True)
    await asyncio.gather(*(churn(provider, lane) for lane in range(8)))

asyncio.run(main())
"""


@pytest.mark.parametrize("start_timeout_s", [20.0, 0.03], ids=["in-time", "late"])
def test_killed_at_any_moment_a_server_can_be_cleaned_up_after(tmp_path: Path, start_timeout_s: float) -> None:
    """Whatever a SIGKILL cut short: the next server starts, and nothing of the old one is left."""
    root, seen = tmp_path / "sandboxes", 0
    for wait_s in (0.02, 0.06, 0.1, 0.15, 0.2, 0.3):
        argv = [sys.executable, "-c", SANDBOXES_WITHOUT_END, str(root), str(start_timeout_s)]
        with subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE) as doomed:
            assert doomed.stdout is not None and doomed.stdout.readline() == b"started\n"
            time.sleep(wait_s)
            doomed.kill()
        folders = list((root / "live").iterdir())
        groups = [path for folder in folders for path in cgroups.planned(cgroups.prefix(root) + folder.name).paths]
        provider = BubblewrapProvider(root)
        found = asyncio.run(provider.reap())
        provider.close()
        seen += len(found)
        assert [line for line in found if ": gone: none of its processes is left, " not in line] == []
        assert list((root / "live").iterdir()) == []
        assert not any(path.exists() for path in groups)
        assert not any(marked_pids(folder) for folder in folders)
    assert seen > 8


@pytest.mark.parametrize("content", [b"", b'{"name": "one", "cgro', b"[]", b'{"labels": {}}', b'{"cgroups": 3}'])
def test_a_damaged_record_stops_no_server(tmp_path: Path, content: bytes) -> None:
    async def go() -> None:
        provider = BubblewrapProvider(tmp_path / "sandboxes")
        for name in ("one", "two"):
            workspace = await provider.new_workspace(name, None)
            await provider.create(SandboxSpec(name, {"run": "r"}, SandboxLimits(), workspace))
        one, two = sorted((tmp_path / "sandboxes" / "live").iterdir())
        assert marked_pids(one) and marked_pids(two)
        names = [cgroups.prefix(provider.root) + folder.name for folder in (one, two)]
        (one / f"{names[0]}.json").write_bytes(content)
        damaged, gone = await provider.reap()
        assert damaged.startswith(one.name) and "unreadable" in damaged and str(one) in damaged
        assert gone.startswith(two.name) and gone.endswith("folder removed to trash/") and " run r: gone: " in gone
        assert not marked_pids(one) and not marked_pids(two) and not two.exists()
        assert not any(path.exists() for name in names for path in cgroups.planned(name).paths)
        provider.close()

    asyncio.run(go())


def sleepers() -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and Path("/proc", entry, "cmdline").read_bytes() == b"sleep\x0097531\0":
                found.append(int(entry))
        except OSError:
            continue
    return found


# -- task sets --------------------------------------------------------------------------------------------------------


def sweep(tmp_path: Path, folders: list[Path]) -> list[Any]:
    async def go() -> list[Any]:
        provider = BubblewrapProvider(tmp_path / "check")
        try:
            return await check_tasks(provider, folders, 2)
        finally:
            provider.close()

    return asyncio.run(go())


@pytest.mark.parametrize("root", [CHORES, EXERCISM], ids=["chores", "exercism"])
def test_oracle_passes_and_nop_fails(tmp_path: Path, root: Path) -> None:
    if not root.is_dir():
        pytest.skip(f"{root.name} is not here")
    for result in sweep(tmp_path, task_dirs(root)):
        assert (result.problem, result.oracle, result.nop) == (None, 1.0, 0.0), result


def test_check_names_broken_tasks(tmp_path: Path) -> None:
    broken = {
        "always": ("echo 1 > /logs/verifier/reward.txt", "does not discriminate"),
        "never": ("echo 0 > /logs/verifier/reward.txt", "the oracle got 0"),
        "silent": ("true", "no verdict"),
    }
    for name, (test_sh, _) in broken.items():
        folder = make_task(tmp_path / name, f"{test_sh}\n")
        (folder / "solution").mkdir()
        (folder / "solution" / "solve.sh").write_text("cp /app/hint.txt /app/answer\n")
    make_task(tmp_path / "unsolved")
    (tmp_path / "nothing").mkdir()
    results = {Path(item.path).name: item.problem for item in sweep(tmp_path, task_dirs(tmp_path))}
    for name, (_, words) in broken.items():
        assert words in results[name]
    assert "no solution/solve.sh" in results["unsolved"] and "no task.toml" in results["nothing"]
    env = {**os.environ, "RL360_HOME": str(tmp_path / "home")}
    argv = [sys.executable, "-m", "rl360.cli", "tasks", "check", str(tmp_path / "always"), "--json"]
    done = subprocess.run(argv, env=env, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["good"] == 0
