"""Docker, Daytona and Kubernetes providers over local servers that speak their HTTP and really run the commands.

None of the real systems was there. What is held for all three: a life, the verifier's secrecy, clocks, refusals, lost
sandboxes, late creates, malformed replies, and that nothing is left or taken from the living.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # helpers shared by the parts of the suite
from sandbox_daemons import GARBAGE, HANG, LATE, Fake, FakeDaytona, FakeDocker, FakeKubernetes, Fault, until
from test_sandboxes import REASON

from rl360.errors import BadInput
from rl360.harbor.check import check_tasks
from rl360.harbor.dockerfile import tree_files
from rl360.harbor.protocol import SandboxLimits
from rl360.kube import Cluster
from rl360.sandboxes import leases
from rl360.sandboxes.provider import SandboxGone, SandboxNeeds, SandboxSpec, SandboxStartError, Workspace
from rl360.sandboxes.providers import daytona, docker, remote
from rl360.sandboxes.providers.daytona import Daytona
from rl360.sandboxes.providers.docker import Docker
from rl360.sandboxes.providers.kubernetes import Pods
from rl360.sandboxes.providers.remote import Daemon, RemoteProvider, reap

REPOSITORY = Path(__file__).resolve().parents[2]
TASK = REPOSITORY / "rl360" / "tasksets" / "chores_tasks"
KINDS: dict[str, type[Fake]] = {"docker": FakeDocker, "daytona": FakeDaytona, "kubernetes": FakeKubernetes}
CREATES = {"docker": "POST .*containers/create", "daytona": "POST /api/sandbox", "kubernetes": "POST .*/pods"}
RUNS = {"docker": "POST .*/exec$", "daytona": "POST .*process/execute", "kubernetes": "GET .*/exec"}
DEPLOYMENT = "tests"
pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
    pytest.mark.skipif(os.geteuid() != 0, reason="the fakes give files to a user of their own"),
]


@pytest.fixture(params=list(KINDS))
def fake(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fake]:
    (tmp_path / "token").write_text(FakeKubernetes.token)
    folder = tmp_path / "boxes"
    folder.mkdir()
    made = KINDS[request.param](folder)
    yield made
    made.close()


def kind_of(fake: Fake) -> str:
    return next(name for name, made in KINDS.items() if isinstance(fake, made))


def daemon_of(fake: Fake) -> Daemon:
    if isinstance(fake, FakeDocker):
        return Docker(docker.endpoint_at(fake.url))
    if isinstance(fake, FakeDaytona):
        return Daytona(daytona.endpoint_at(f"{fake.url}/api", fake.key))
    return Pods(Cluster(fake.url, "rl", fake.folder.parent / "token"))


def with_provider(fake: Fake, tmp_path: Path, body: Callable[[RemoteProvider], Awaitable[Any]]) -> Any:
    async def go() -> Any:
        provider = RemoteProvider(daemon_of(fake), tmp_path / "root", DEPLOYMENT)
        try:
            return await body(provider)
        finally:
            await provider.aclose()

    return asyncio.run(go())


async def spec_of(provider: RemoteProvider, name: str = "demo/one", **more: Any) -> SandboxSpec:
    workspace = more.pop("workspace", None) or await provider.new_workspace(name, more.pop("source", None))
    given = {"limits": SandboxLimits(), "start_timeout_s": 10.0, **more}
    return SandboxSpec(name, {"run": "demo", "step": "3", "attempt": "one"}, workspace=workspace, **given)


async def verifier_of(provider: RemoteProvider, workspace: Workspace, tests: Path) -> Any:
    spec = await spec_of(
        provider, "demo/one-verifier", workspace=workspace, read_only={"/tests": tests}, with_logs=True
    )
    return await provider.create(spec)


def test_a_life_and_what_the_verifier_sees(fake: Fake, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "f").write_text("given")
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test.sh").write_text("grep -q done /app/deep/f && echo 1 >/logs/verifier/reward.txt\n")

    async def body(provider: RemoteProvider) -> None:
        spec = await spec_of(provider, source=tree_files(source), env={"MINE": "a b'c"})
        agent = await provider.create(spec)
        done = await agent.exec('pwd; cat deep/f; ./run.sh; echo "$MINE"; id -u; echo err >&2; exit 3', 10)
        assert (done.exit_code, done.timed_out) == (3, False)
        lines = done.output.decode().splitlines()
        assert lines[:1] == ["/app"] and set(lines[1:]) >= {"givenran", "a b'c", "err"} and done.output_bytes > 20
        hidden = await agent.exec("ls -a /tests /logs/verifier; cat /tests/test.sh; true", 10)
        assert b"test.sh\n" not in hidden.output.replace(b"/tests/test.sh", b"")
        await agent.exec("echo done >deep/f; ln -s /etc/passwd link; ln deep/f hard; mkfifo pipe; rm run.sh", 10)
        await agent.exec("(sleep 100 &) ; echo late >deep/g", 10)
        await agent.carry(10)
        proof = await agent.stop()
        assert proof.confirmed and "no" in proof.evidence, proof
        files = spec.workspace.files
        assert (files / "deep" / "f").read_text() == "done\n" and not (files / "run.sh").exists()
        assert (files / "link").is_symlink() and (files / "hard").read_text() == "done\n"
        assert not (files / "pipe").exists() and (files / "deep" / "g").exists()

        verifier = await verifier_of(provider, spec.workspace, tests)
        result = await verifier.exec("bash /tests/test.sh; touch /tests/mine 2>/dev/null; ls -l /app/link", 10)
        assert result.exit_code == 0, result
        await verifier.carry(10)
        assert (await verifier.stop()).confirmed
        assert (spec.workspace.logs / "reward.txt").read_text() == "1\n"
        assert provider.held == set() and fake.boxes == {}
        assert await provider.remove_workspace(spec.workspace) is None

    with_provider(fake, tmp_path, body)


def test_labels_and_reservations_are_on_the_sandbox(fake: Fake, tmp_path: Path) -> None:
    async def body(provider: RemoteProvider) -> None:
        limits = SandboxLimits(memory_mb=2048, cpus=1.5, pids=77)
        sandbox = await provider.create(await spec_of(provider, limits=limits, disk_mb=3000, lifetime_s=90))
        (box,) = fake.boxes.values()
        (lease,) = await provider.daemon.listed({leases.DEPLOYMENT: DEPLOYMENT}, 5)
        told = lease.row(time.time())
        assert {"run": "demo", "step": 3, "attempt": "one", "state": "held"}.items() <= told.items()
        assert 0 < float(lease.labels[leases.EXPIRES]) - time.time() <= 91
        if isinstance(fake, FakeDocker):
            host = box.config["HostConfig"]
            assert (host["Memory"], host["NanoCpus"], host["PidsLimit"]) == (2 << 30, 1_500_000_000, 77)
            assert host["NetworkMode"] == "none" and host["CapDrop"] == ["ALL"]
        elif isinstance(fake, FakeDaytona):
            asked = {name: box.config[name] for name in ("cpu", "memory", "disk", "networkBlockAll", "ttlMinutes")}
            assert asked == {"cpu": 2, "memory": 2, "disk": 3, "networkBlockAll": True, "ttlMinutes": 2}
        else:
            pod = box.config["spec"]
            limits_of = pod["containers"][0]["resources"]["limits"]
            assert (limits_of["cpu"], limits_of["memory"], pod["activeDeadlineSeconds"]) == ("1500m", "2048Mi", 90)
            assert box.labels["rl360/network"] == "none" and pod["automountServiceAccountToken"] is False
        assert (await sandbox.stop()).confirmed

    with_provider(fake, tmp_path, body)


def test_a_command_over_its_time_is_ended_and_the_sandbox_lives(fake: Fake, tmp_path: Path) -> None:
    async def body(provider: RemoteProvider) -> None:
        sandbox = await provider.create(await spec_of(provider))
        (box,) = fake.boxes.values()
        started = time.monotonic()
        late = await sandbox.exec("echo first; trap '' TERM; sleep 600", 1.0)
        assert late.timed_out and late.exit_code == 124 and time.monotonic() - started < 6
        assert until(lambda: all(job.returncode is not None for job in box.jobs))
        assert (await sandbox.exec("echo alive", 5)).output == b"alive\n"
        flood = await sandbox.exec("head -c 40000000 /dev/zero", 20)
        assert flood.exit_code == 137 and len(flood.output) == sandbox.spec.limits.output_bytes
        assert (await sandbox.exec("a\0b", 5)).exit_code == 126
        assert (await sandbox.exec("x" * 100_000, 5)).exit_code == 126
        assert (await sandbox.stop()).confirmed

    with_provider(fake, tmp_path, body)


def test_what_a_command_leaves_behind_does_not_hold_it_up(fake: Fake, tmp_path: Path) -> None:
    async def body(provider: RemoteProvider) -> None:
        sandbox = await provider.create(await spec_of(provider))
        result = await sandbox.exec("echo out; exec 3>&1; echo three >&3", 5)
        assert (result.exit_code, result.output) == (0, b"out\nthree\n")
        assert (await sandbox.stop()).confirmed

    with_provider(fake, tmp_path, body)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ((403, {}), "answered 403: scripted 403"),
        ((429, {"retry-after": "60"}), "answered 429"),
        ((400, {}), "answered 400"),
    ],
    ids=["quota", "rate", "bad"],
)
def test_a_refused_create_is_a_start_that_failed_with_nothing_left(
    fake: Fake, tmp_path: Path, action: Any, words: str
) -> None:
    async def body(provider: RemoteProvider) -> None:
        fake.faults = [Fault(CREATES[kind_of(fake)], action, 99)]
        started = time.monotonic()
        with pytest.raises(SandboxStartError, match=words) as caught:
            await provider.create(await spec_of(provider, start_timeout_s=1.5))
        assert caught.value.proof is not None and caught.value.proof.confirmed
        assert time.monotonic() - started < 5 and fake.boxes == {} and provider.held == set()

    with_provider(fake, tmp_path, body)


def test_a_rate_limit_is_waited_for(fake: Fake, tmp_path: Path) -> None:
    async def body(provider: RemoteProvider) -> None:
        fake.faults = [Fault(CREATES[kind_of(fake)], (429, {"retry-after": "1"}))]
        started = time.monotonic()
        sandbox = await provider.create(await spec_of(provider))
        assert time.monotonic() - started >= 1.0
        assert (await sandbox.stop()).confirmed

    with_provider(fake, tmp_path, body)


def test_a_lost_sandbox_is_the_providers(fake: Fake, tmp_path: Path) -> None:
    async def body(provider: RemoteProvider) -> None:
        sandbox = await provider.create(await spec_of(provider))
        fake.forget(next(iter(fake.boxes)))
        for call in (sandbox.exec("true", 5), sandbox.carry(5)):
            with pytest.raises(SandboxGone) as caught:
                await call
            assert not caught.value.by_contents
        assert (await sandbox.stop()).confirmed

    with_provider(fake, tmp_path, body)


@pytest.mark.parametrize("action", [(500, {}), (403, {}), GARBAGE, HANG], ids=str)
def test_a_command_that_is_not_answered_is_never_run_twice(fake: Fake, tmp_path: Path, action: Any) -> None:
    if action == GARBAGE and isinstance(fake, FakeKubernetes):
        pytest.skip("a websocket has no such reply")

    async def body(provider: RemoteProvider) -> None:
        sandbox = await provider.create(await spec_of(provider))
        fake.faults = [Fault(RUNS[kind_of(fake)], action, 1)]
        before = len(fake.calls)
        if action == HANG:
            assert (await sandbox.exec("echo x >>count", 1.0)).timed_out
        else:
            with pytest.raises(SandboxGone) as caught:
                await sandbox.exec("echo x >>count", 5.0)
            assert not caught.value.by_contents
            assert len([call for call in fake.calls[before:] if RUNS[kind_of(fake)].split()[0] in call]) <= 2
        assert (await sandbox.exec("cat count 2>/dev/null | wc -l", 5)).output.strip() in (b"0", b"1")
        assert (await sandbox.stop()).confirmed

    with_provider(fake, tmp_path, body)


def test_a_create_without_an_answer_is_found_and_removed_when_it_comes(fake: Fake, tmp_path: Path) -> None:
    async def body(provider: RemoteProvider) -> None:
        fake.faults = [Fault(CREATES[kind_of(fake)], LATE)]
        fake.late_s = 1.0
        with pytest.raises(SandboxStartError, match="not ready within") as caught:
            await provider.create(await spec_of(provider, start_timeout_s=0.4))
        assert caught.value.proof is not None and not caught.value.proof.confirmed
        assert "may still be made" in caught.value.proof.evidence
        assert await asyncio.to_thread(until, lambda: len(fake.boxes) == 1)
        assert await asyncio.to_thread(until, lambda: fake.boxes == {} and provider.held == set())

    with_provider(fake, tmp_path, body)


def test_a_late_create_of_a_server_that_is_gone_is_reaped_by_label_and_the_living_are_not(
    fake: Fake, tmp_path: Path
) -> None:
    async def body(provider: RemoteProvider) -> None:
        living = await provider.create(await spec_of(provider))
        (mine,) = fake.boxes.values()
        with subprocess.Popen(["sleep", "60"]) as other:  # noqa: ASYNC220
            stranger = leases.labels("n", DEPLOYMENT, 60, {"run": "other"})
            host = stranger[leases.OWNER].partition("/")[0]
            stranger[leases.OWNER] = leases.owner(other.pid)
            elsewhere = {**stranger, leases.OWNER: "another-host:0:1/7/9"}
            expired = {**elsewhere, leases.EXPIRES: "1000"}
            reused = {**stranger, leases.OWNER: f"{host}/{other.pid}/1"}  # the pid is another process's by now
            foreign = {**reused, leases.DEPLOYMENT: "another"}
            named = {"held": stranger, "elsewhere": elsewhere, "expired": expired, "reused": reused, "foreign": foreign}
            for name, labels in named.items():
                await _plant(fake, name, labels)
            dry = await reap(provider.daemon, DEPLOYMENT, provider.held, dry=True)
            assert len(dry) == 2 and len(fake.boxes) == 6
            lines = await provider.reap()
            assert len(lines) == 2 and all(": gone: " in line for line in lines), lines
            left = {box.name for box in fake.boxes.values()}
            assert left == {mine.name, "held", "elsewhere", "foreign"}
            other.kill()
        assert len(await provider.reap()) == 1  # its owner has ended
        assert (await living.exec("echo alive", 5)).output == b"alive\n"
        assert (await living.stop()).confirmed

    with_provider(fake, tmp_path, body)


async def _plant(fake: Fake, name: str, labels: dict[str, str]) -> None:
    """A sandbox that somebody else made."""
    if isinstance(fake, FakeKubernetes):
        from rl360.sandboxes.providers.kubernetes import LABEL, _selectable

        metadata = {"name": name, "labels": {LABEL: "1", **_selectable(labels)}, "annotations": labels}
        fake.made(name, metadata["labels"], "/app", {}, {"metadata": metadata, "spec": {}})  # type: ignore[arg-type]
    else:
        fake.made(name, labels, "/app", {}, {})


@pytest.mark.parametrize("what", ["create", "list"])
def test_malformed_replies_are_the_providers(fake: Fake, tmp_path: Path, what: str) -> None:
    lists = {"docker": "GET .*containers/json", "daytona": r"GET /api/sandbox\?", "kubernetes": r"GET .*/pods\?"}

    async def body(provider: RemoteProvider) -> None:
        fake.faults = [Fault(CREATES[kind_of(fake)] if what == "create" else lists[kind_of(fake)], GARBAGE)]
        if what == "create":
            with pytest.raises(SandboxStartError, match="not a JSON object"):
                await provider.create(await spec_of(provider))
            assert await asyncio.to_thread(until, lambda: fake.boxes == {})
        else:
            assert "NOT asked" in (await provider.reap())[0]

    with_provider(fake, tmp_path, body)


@pytest.mark.parametrize("deed", ["dd if=/dev/zero of=big bs=1M count=30 2>/dev/null", "cd /; rm -rf /app 2>/dev/null"])
def test_what_is_over_its_limits_is_not_carried_over(fake: Fake, tmp_path: Path, deed: str) -> None:
    async def body(provider: RemoteProvider) -> None:
        spec = await spec_of(provider, disk_mb=2)
        (spec.workspace.files / "given").write_text("x")
        sandbox = await provider.create(spec)
        await sandbox.exec(deed, 10)
        (box,) = fake.boxes.values()
        if "rm" in deed:  # the mount point itself stays where it is one
            box.workdir = "/nowhere"
            (box.root / "app").rename(box.root / "moved")
        with pytest.raises(SandboxGone) as caught:
            await sandbox.carry(15)
        assert caught.value.by_contents and list(spec.workspace.files.iterdir()) == []
        assert (await sandbox.stop()).confirmed

    with_provider(fake, tmp_path, body)


@pytest.mark.parametrize("body", [{"error": "no route"}, {"message": "page missing"}, ["html"]], ids=str)
def test_a_404_of_something_else_proves_nothing(fake: Fake, tmp_path: Path, body: Any) -> None:
    looks = {
        "docker": "GET .*containers/\\w+/json",
        "daytona": r"GET /api/sandbox/\w+",
        "kubernetes": r"GET .*/pods/[\w-]+$",
    }

    async def go(provider: RemoteProvider) -> None:
        sandbox = await provider.create(await spec_of(provider))
        fake.faults = [Fault(looks[kind_of(fake)], (404, {}, body), 99)]
        assert not (await sandbox.stop(1.5)).confirmed
        fake.faults = []
        assert (await sandbox.stop()).confirmed and fake.boxes == {}

    with_provider(fake, tmp_path, go)


def test_leases_come_in_pages(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl360.kube.PAGE", 2)

    async def go(provider: RemoteProvider) -> None:
        for number in range(5):
            await _plant(fake, f"n{number}", leases.labels(f"n{number}", DEPLOYMENT, 60, {}))
        found = await provider.daemon.listed({leases.DEPLOYMENT: DEPLOYMENT}, 5)
        assert sorted(lease.labels[leases.NAME] for lease in found) == [f"n{number}" for number in range(5)]

    with_provider(fake, tmp_path, go)


def test_tasks_are_judged_as_anywhere(fake: Fake, tmp_path: Path) -> None:
    """The runner, the oracle and the verifier over this provider: the oracle passes, doing nothing does not."""
    tasks = sorted(path for path in TASK.iterdir() if path.is_dir())[:2]

    async def body(provider: RemoteProvider) -> None:
        results = await check_tasks(provider, tasks, 2)
        assert [(result.problem, result.oracle) for result in results] == [(None, 1.0)] * 2
        assert fake.boxes == {} and list((provider.root / "live").iterdir()) == []

    with_provider(fake, tmp_path, body)


def test_needs_that_no_provider_meets(fake: Fake, tmp_path: Path) -> None:
    async def body(provider: RemoteProvider) -> None:
        assert "allowlist" in (provider.refusal(SandboxNeeds("allowlist", None)) or "")
        assert provider.refusal(SandboxNeeds("public", "debian:12")) is None

    with_provider(fake, tmp_path, body)


# -- what only one of them has ----------------------------------------------------------------------------------------


def test_daytonas_own_clock_is_a_timeout_too(tmp_path: Path) -> None:
    fake = FakeDaytona(tmp_path)

    async def body(provider: RemoteProvider) -> None:
        sandbox = await provider.create(await spec_of(provider))
        fake.faults = [Fault("process/execute", (408, {}))]
        late = await sandbox.exec("true", 5)
        assert late.timed_out and late.exit_code == 124
        assert (await sandbox.stop()).confirmed

    try:
        with_provider(fake, tmp_path, body)
    finally:
        fake.close()


def test_docker_by_its_socket(tmp_path: Path) -> None:
    (tmp_path / "boxes").mkdir()
    fake = FakeDocker(tmp_path / "boxes")

    async def go() -> None:
        for host in (f"unix://{fake.socket}", fake.url.replace("http", "tcp")):
            provider = RemoteProvider(Docker.of({"DOCKER_HOST": host}), tmp_path / host[:3], DEPLOYMENT)
            sandbox = await provider.create(await spec_of(provider))
            assert (await sandbox.exec("echo here", 5)).output == b"here\n"
            assert (await sandbox.stop()).confirmed
            await provider.aclose()
        with pytest.raises(BadInput, match="use unix:"):
            Docker.of({"DOCKER_HOST": "ssh://host"})

    try:
        asyncio.run(go())
    finally:
        fake.close()


def test_docker_pulls_and_says_what_cannot_be_pulled(tmp_path: Path) -> None:
    (tmp_path / "boxes").mkdir()
    fake = FakeDocker(tmp_path / "boxes")

    async def body(provider: RemoteProvider) -> None:
        sandbox = await provider.create(await spec_of(provider, image="registry:5000/a/b:1"))
        assert (await sandbox.stop()).confirmed and "registry:5000/a/b:1" in fake.pulled
        tried = (("missing", "manifest unknown", False), ("busy", "toomanyrequests", True), ("denied", "denied", False))
        for image, words, refused in tried:
            with pytest.raises(SandboxStartError, match=words) as failed:
                await provider.create(await spec_of(provider, f"demo/{image}", image=image))
            proof = failed.value.proof
            assert failed.value.refused is refused and proof is not None and proof.confirmed
        sandbox = await provider.create(await spec_of(provider, "demo/three"))
        (box,) = fake.boxes.values()
        box.running, box.oom = False, True
        with pytest.raises(SandboxGone, match="limit hit: memory") as caught:
            await sandbox.exec("true", 5)
        assert caught.value.by_contents
        assert (await sandbox.stop()).confirmed

    try:
        with_provider(fake, tmp_path, body)
    finally:
        fake.close()


def test_kubernetes_needs_its_network_policy_and_waits_for_the_end_of_a_pod(tmp_path: Path) -> None:
    (tmp_path / "boxes").mkdir()
    (tmp_path / "token").write_text(FakeKubernetes.token)
    fake = FakeKubernetes(tmp_path / "boxes")

    async def body(provider: RemoteProvider) -> None:
        fake.has_policy = False
        with pytest.raises(SandboxStartError, match="has no NetworkPolicy"):
            await provider.create(await spec_of(provider))
        fake.has_policy, fake.pulls_fail = True, 2
        assert (await (await provider.create(await spec_of(provider, "demo/pulled"))).stop()).confirmed
        fake.pulls_fail = 99
        with pytest.raises(SandboxStartError, match="ErrImagePull: toomanyrequests") as failed:
            await provider.create(await spec_of(provider, "demo/not-pulled", start_timeout_s=1.0))
        assert failed.value.refused and failed.value.proof is not None and failed.value.proof.confirmed
        fake.pull_says = 'failed to resolve reference "docker.io/demo/none:1": docker.io/demo/none:1: not found'
        started = time.monotonic()
        with pytest.raises(SandboxStartError, match=r"ErrImagePull: .*not found") as failed:
            await provider.create(await spec_of(provider, "demo/none", image="demo/none:1", start_timeout_s=20.0))
        assert not failed.value.refused and failed.value.proof is not None and failed.value.proof.confirmed
        assert time.monotonic() - started < 10.0, "nobody waits for what there is not"
        fake.pulls_fail, fake.deletes_after_s = 0, 2.0
        sandbox = await provider.create(await spec_of(provider, "demo/two"))
        slow = await sandbox.stop(0.5)
        assert not slow.confirmed and "still there after 0.5 s" in slow.evidence
        assert (await sandbox.stop(10)).confirmed
        sandbox = await provider.create(await spec_of(provider, "demo/three"))
        (box,) = fake.boxes.values()
        box.oom = True
        fake.faults = [Fault("/exec", (500, {}))]
        with pytest.raises(SandboxGone, match="limit hit: memory") as caught:
            await sandbox.exec("true", 5)
        assert caught.value.by_contents
        assert (await sandbox.stop()).confirmed

    try:
        with_provider(fake, tmp_path, body)
    finally:
        fake.close()


def test_pid_1_outlives_what_runs_in_it_and_keeps_no_zombies(tmp_path: Path) -> None:
    """The command that Docker and Kubernetes are given as PID 1, in a real PID namespace."""
    read, write = os.pipe()
    argv = ["bwrap", "--unshare-pid", "--ro-bind", "/", "/", "--proc", "/proc", "--as-pid-1", "--info-fd", str(write)]
    keep_alive = remote.KEEP_ALIVE.format(seconds=60)
    with subprocess.Popen([*argv, "bash", "-c", keep_alive], pass_fds=(write,)) as outer, os.fdopen(read) as info:
        os.close(write)
        pid = json.loads(info.read())["child-pid"]

        def inside(command: str) -> str:
            enter = ["nsenter", "-t", str(pid), "-p", "-m", "--", "bash", "-c", command]
            return subprocess.run(enter, capture_output=True, text=True, timeout=20, check=False).stdout

        assert until(lambda: "sleep" in inside("cat /proc/1/comm"))
        quiet = ">/dev/null 2>&1"
        inside(
            f"for i in 1 2 3; do (setsid sleep 0.1 {quiet} &); done; sleep 0.3; (setsid sleep 50 {quiet} &); sleep 0.1"
        )
        inside(remote.KILL_ALL)
        states = inside("for f in /proc/[0-9]*/stat; do cut -d' ' -f2,3 $f; done").splitlines()
        assert "(sleep) S" in states and not [state for state in states if state.endswith("Z")]
        assert len([state for state in states if "sleep" in state]) == 1
        outer.kill()
    assert subprocess.run(["bash", "-c", remote.KEEP_ALIVE.format(seconds=0)], timeout=20, check=False).returncode == 0


# -- killed at any moment ---------------------------------------------------------------------------------------------

WITHOUT_END = """
import asyncio, itertools, sys
from pathlib import Path
from rl360.harbor.dockerfile import tree_files
from rl360.harbor.protocol import SandboxLimits
from rl360.sandboxes.provider import SandboxSpec
from rl360.sandboxes.providers.docker import Docker, endpoint_at
from rl360.sandboxes.providers.remote import RemoteProvider

async def churn(provider, lane):
    for number in itertools.count():
        name = f"{lane}-{number}"
        workspace = await provider.new_workspace(name, None)
        await provider.create(SandboxSpec(name, {"run": "r"}, SandboxLimits(), workspace))

async def main():
    provider = RemoteProvider(Docker(endpoint_at(sys.argv[2])), Path(sys.argv[1]), "tests")
    print("started", flush=True)
    await asyncio.gather(*(churn(provider, lane) for lane in range(4)))

asyncio.run(main())
"""


def test_killed_at_any_moment_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / "boxes").mkdir()
    fake = FakeDocker(tmp_path / "boxes")
    seen = 0
    try:
        for begun in (1, 3, 7):  # as many creates, then a kill in the middle of others
            fake.faults = [Fault("containers/create", LATE, 2)]  # asked for by the killed, carried out after its death
            argv = [sys.executable, "-c", WITHOUT_END, str(tmp_path / "root"), fake.url]
            with subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE) as doomed:
                assert doomed.stdout is not None and doomed.stdout.readline() == b"started\n"
                assert until(lambda: len(fake.boxes) >= begun, 30)  # noqa: B023
                doomed.send_signal(signal.SIGKILL)
            time.sleep(fake.late_s + 0.4)
            seen += len(fake.boxes)
            lines = with_provider(fake, tmp_path, lambda provider: provider.reap())
            assert [line for line in lines if "NOT" in line] == []
            assert fake.boxes == {} and list((tmp_path / "root" / "live").iterdir()) == []
        assert seen >= 6
    finally:
        fake.close()
