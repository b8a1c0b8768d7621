"""Servers of one host and home never promise more than there is together, however one of them ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl360.engines.processes import boot_id
from rl360.errors import BadInput
from rl360.harbor.server import parse_args, promise_of
from rl360.sandboxes.admission import Room
from rl360.sandboxes.host import host_room, promised, with_leftovers
from rl360.sandboxes.providers import room_of

HOST = Room(4_000, 8_000, 1_000, 9_000)
PROGRAM = """
import sys
from pathlib import Path
from rl360.errors import BadInput
from rl360.sandboxes.admission import Room
from rl360.sandboxes.host import take_share
try:
    print(*take_share(Path(sys.argv[1]), sys.argv[2], Room(*map(int, sys.argv[4:])), sys.argv[3]), flush=True)
except BadInput as error:
    raise SystemExit(f"refused: {error}")
sys.stdin.read()
"""


class Servers:
    """Processes that promise, and nothing else."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.alive: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, text: str, host: Room = HOST) -> str:
        """What it promises, or why it does not."""
        argv = [sys.executable, "-c", PROGRAM, str(self.home), name, text, *map(str, host)]
        pipe = subprocess.PIPE
        self.alive[name] = process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert process.stdout is not None and process.stderr is not None
        return process.stdout.readline().strip() or process.stderr.read().strip()

    def kill(self, name: str) -> None:
        with self.alive.pop(name) as process:
            process.send_signal(signal.SIGKILL)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    made = Servers(tmp_path)
    yield made
    for name in list(made.alive):
        made.kill(name)


def test_one_alone_has_the_host_and_a_second_is_refused_by_name(servers: Servers) -> None:
    assert servers.start("13300", "") == "4000 8000 1000 9000"
    said = servers.start("13301", "")
    assert "; server 13300 promises milli_cpus 4,000, memory_mb 8,000, pids 1,000, disk_mb 9,000" in said
    assert "left are milli_cpus 0" in said and "of milli_cpus, memory_mb, pids, disk_mb, by --promise 50%" in said
    servers.kill("13300")
    assert servers.start("13302", "cpus=3") == "3000 8000 1000 9000", "a dead one promises nothing"


def test_shares_add_up_to_the_host_and_no_further(servers: Servers) -> None:
    assert servers.start("a", "50%") == servers.start("b", "50%") == "2000 4000 500 4500"
    assert "left are milli_cpus 0, memory_mb 0, pids 0, disk_mb 0" in servers.start("c", "1%")
    servers.kill("a")
    assert "of memory_mb, by" in servers.start("c", "cpus=1,memory_mb=4001,pids=1,disk_mb=1")
    assert servers.start("c", "cpus=1,memory_mb=4000,pids=1,disk_mb=1") == "1000 4000 1 1"
    assert "left are milli_cpus 1,000, memory_mb 0, pids 499, disk_mb 4,499" in servers.start("a", "50%")


def test_more_than_the_host_is_refused_of_one_too(servers: Servers) -> None:
    assert (
        "this host has milli_cpus 4,000" in (said := servers.start("a", "cpus=5")) and "part of milli_cpus, by" in said
    )


def test_disk_that_others_used_meanwhile_counts_once(servers: Servers) -> None:
    assert servers.start("a", "50%") == "2000 4000 500 4500"
    assert servers.start("b", "50%", HOST._replace(disk_mb=6_000)) == "2000 4000 500 4500"


def test_a_host_that_gets_another_name_is_no_other_host(servers: Servers) -> None:
    servers.start("a", "")
    (folder,) = (servers.home / "promises").iterdir()
    assert folder.name.startswith(boot_id()) and os.uname().nodename not in folder.name


def test_what_a_servers_last_life_left_is_disk_that_it_may_promise_again(tmp_path: Path) -> None:
    left = tmp_path / "sandboxes" / "13300" / "live" / "attempt" / "app"
    left.mkdir(parents=True)
    (left / "core").write_bytes(b"x" * (64 << 20))
    os.sync()
    free = host_room(tmp_path).disk_mb
    text = f"disk_mb={free + 40}"
    with pytest.raises(BadInput, match="part of disk_mb"):
        promise_of(parse_args(["--port", "13301", "--promise", text]), tmp_path)
    assert promise_of(parse_args(["--port", "13300", "--promise", text]), tmp_path).disk_mb == free + 40


def test_a_file_of_many_names_was_left_once(tmp_path: Path) -> None:
    for folder in ("live", "trash"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "core").write_bytes(b"x" * (8 << 20))
    for number in range(50):
        os.link(tmp_path / "live" / "core", tmp_path / "live" / str(number))
    os.sync()
    assert 16 <= with_leftovers(HOST, tmp_path).disk_mb - HOST.disk_mb <= 17


def test_a_promise_is_its_owners_alone_to_read(servers: Servers) -> None:
    servers.start("a", "")
    (folder,) = (servers.home / "promises").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("given", ["", "cpus=8,memory_mb=1000", "50%"])
@pytest.mark.parametrize(("kind", "docker"), [("daytona", ""), ("kubernetes", ""), ("docker", "tcp://10.0.0.1:2375")])
def test_elsewhere_all_must_be_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, docker: str, given: str
) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker or "unix:///var/run/docker.sock")
    with pytest.raises(BadInput, match=r"memory_mb|pids, disk_mb|as NAME=WHOLE NUMBER"):
        promise_of(parse_args(["--provider", kind, "--promise", given]), tmp_path)
    whole = "cpus=8,memory_mb=1000,pids=100,disk_mb=10"
    assert promise_of(parse_args(["--provider", kind, "--promise", whole]), tmp_path) == Room(8_000, 1_000, 100, 10)
    assert not (tmp_path / "promises").exists(), "it is not this host's"


def test_what_is_missing_is_named_with_the_fix() -> None:
    with pytest.raises(BadInput, match=r"'' does not say cpus, memory_mb, pids, disk_mb: "):
        promised("", None)
    with pytest.raises(BadInput, match=r"does not say pids, disk_mb: .*give cpus=N,memory_mb=N,pids=N,disk_mb=N"):
        promised("cpus=8,memory_mb=1000", None)


GROUPS = {
    "v1": ["5:memory:/jobs/one", "3:cpu,cpuacct:/jobs/one", "2:pids:/jobs/one", "0::/"],
    "v2": ["0::/jobs/one"],
    "hybrid": ["5:memory:/jobs/one", "2:pids:/jobs/one", "3:cpu:/jobs/one", "0::/jobs/one"],
    "another's view": ["0::/../../jobs"],
}


@pytest.mark.parametrize("where", ["", "jobs", "jobs/one"])
@pytest.mark.parametrize("kind", GROUPS)
def test_no_more_than_the_groups_that_it_is_in(tmp_path: Path, kind: str, where: str) -> None:
    root, mounts = tmp_path / "root", tmp_path / "root" / "sys" / "fs" / "cgroup"
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "cgroup").write_text("\n".join(GROUPS[kind]) + "\n")
    everything = host_room(tmp_path, root)
    for controller in ("memory", "pids", "cpu"):
        folder = mounts / where if kind in ("v2", "another's view") else mounts / controller / where
        folder.mkdir(parents=True, exist_ok=True)
        (folder.parent / "cpu.max").write_text("max 100000")
        for file, text in (("memory.max", 64 << 20), ("pids.max", 40), ("cpu.max", "50000 100000")):
            if controller == file[: len(controller)] and kind in ("v2", "another's view"):
                (folder / file).write_text(f"{text}\n")
        for file, text in (("memory.limit_in_bytes", 64 << 20), ("pids.max", 40), ("cpu.cfs_quota_us", 50_000)):
            if controller == file[: len(controller)] and kind not in ("v2", "another's view"):
                (folder / file).write_text(f"{text}\n")
                (folder / "cpu.cfs_period_us").write_text("100000\n")
    found = host_room(tmp_path, root)
    limited = everything._replace(milli_cpus=500, memory_mb=64, pids=40, disk_mb=found.disk_mb)
    assert found == (limited if kind != "another's view" or not where else everything._replace(disk_mb=found.disk_mb))


def test_what_runs_here(tmp_path: Path) -> None:
    here = host_room(tmp_path)
    assert room_of("bubblewrap", tmp_path, {}) == room_of("docker", tmp_path, {}) == here
    assert room_of("docker", tmp_path, {"DOCKER_HOST": "unix:///run/docker.sock"}) == here
