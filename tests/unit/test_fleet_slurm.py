"""Jobs over small programs named sbatch, squeue, scancel and sacct: what is asked, and what is taken as proof."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from fleet_fakes import until

from rl360.engines.launch import parse_options
from rl360.engines.launchers.base import Handle, Start
from rl360.engines.launchers.slurm import SCRIPT, SlurmLauncher
from rl360.errors import Rl360Error, ServiceError
from tests.unit.test_fleet_command import services_of

START = Start(name="slurm-0", number=1, model_dir="/model with space", port=13_000)

FAKE = """#!{python} -IS
import json, os, sys, time
home = os.environ["FAKE_SLURM"]
path = os.path.join(home, "state.json")
state = json.load(open(path))
name, args = os.path.basename(sys.argv[0]), sys.argv[1:]
state["calls"].append([name, *args])
json.dump(state, open(path, "w"))
told = state["faults"].get(name)
if told == "hang":
    time.sleep(60)
if told:
    print(told, file=sys.stderr)
    sys.exit(1)
option = {{a.partition("=")[0]: a.partition("=")[2] for a in args if a.startswith("--")}}
jobs = state["jobs"]
if name == "sbatch":
    job = str(100 + len(jobs))
    jobs[job] = {{"name": option["--job-name"], "state": "PENDING", "node": "", "end": "Unknown"}}
    print(job + ";cluster")
elif name == "squeue":
    if "--jobs" in option:
        job = jobs.get(option["--jobs"])
        if job is None or job["state"] in state["over"]:
            print("slurm_load_jobs error: Invalid job id specified", file=sys.stderr)
            sys.exit(1)
        print("|".join([job["state"], job["node"], job.get("reason", "None")][: option["--format"].count("%")]))
    else:
        for number, job in jobs.items():
            if job["state"] not in state["over"]:
                print(number + "|" + job["name"])
elif name == "scancel":
    job = jobs.get(args[0])
    if job is None:
        print("scancel: error: Kill job error on job id " + args[0] + ": Invalid job id specified", file=sys.stderr)
        sys.exit(1)
    if job["state"] in state["over"]:
        print("scancel: error: Kill job error: Job/step already completing or completed", file=sys.stderr)
        sys.exit(1)
    job.update(state=state["cancelled"], end="2026-01-01T00:00:00")
elif name == "sacct":
    for number, job in jobs.items():
        if "--name" in option and job["name"] == option["--name"]:
            print(number)
        if option.get("--jobs") == number:
            print(job["state"] + "|" + job["end"] + "|" + job["node"])
json.dump(state, open(path, "w"))
"""


class Slurm:
    """The fake's state: jobs by number, faults by program."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "state.json"
        over = ["CANCELLED by 1000", "COMPLETED", "FAILED", "NODE_FAIL", "TIMEOUT", "BOOT_FAIL", "PREEMPTED"]
        self.write({"jobs": {}, "calls": [], "faults": {}, "over": over, "cancelled": "CANCELLED by 1000"})
        for name in ("sbatch", "squeue", "scancel", "sacct"):
            (folder / name).write_text(FAKE.format(python=sys.executable))
            (folder / name).chmod(0o755)

    def read(self) -> dict[str, Any]:
        return json.loads(self.path.read_text())

    def write(self, state: dict[str, Any]) -> None:
        self.path.write_text(json.dumps(state))

    def set(self, **changes: Any) -> None:
        self.write(self.read() | changes)

    def job(self, number: str, **changes: Any) -> None:
        state = self.read()
        state["jobs"][number].update(changes)
        self.write(state)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(folder))
    return Slurm(folder)


@pytest.fixture
def launcher(tmp_path: Path) -> SlurmLauncher:
    return SlurmLauncher(services_of(str(tmp_path)))


def test_the_script_is_shell_and_starts_one_engine_that_gets_its_arguments_whole(tmp_path: Path) -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True, timeout=10)
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    argv = START.argv("0.0.0.0")
    env = {
        **os.environ,
        "RL360_HOME": "/h",
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "RL360_PYTHON": "/py",
        "TMPDIR": "/node",
        "SLURM_JOB_ID": "77",
    }
    done = subprocess.run(["bash", str(SCRIPT), *argv], env=env, capture_output=True, text=True, timeout=10, check=True)
    lines = done.stdout.splitlines()
    assert lines[:4] == ["--kill-on-bad-exit=1", "/py", "-m", "rl360.engines.launch"]
    assert lines[4:] == ["--weights-dir", "/node/rl360-weights-77", *argv] and "/model with space" in lines


def test_the_arguments_of_the_job_are_options_of_the_launcher(tmp_path: Path, launcher: SlurmLauncher) -> None:
    (tmp_path / "config.json").write_text("{}")
    start = START.model_copy(update={"model_dir": str(tmp_path)})
    argv = launcher.submission(start)
    assert argv[0] == "sbatch" and f"--job-name=rl360-{launcher.fleet}-slurm-0-1" in argv
    options, rest = parse_options(argv[argv.index(str(SCRIPT)) + 1 :])
    assert (options.port, options.host, options.strict, rest) == (13_000, "0.0.0.0", True, [])


def test_a_life_of_a_job(launcher: SlurmLauncher, slurm: Slurm) -> None:
    handle = asyncio.run(launcher.start(START, 10))
    assert handle.ref == {"job": "100", "port": "13000"}
    slurm.job("100", reason="Resources")
    waits = asyncio.run(launcher.locate(handle, 10))
    assert (waits.url, waits.running, waits.state, waits.detail) == ("", False, "PENDING", "PENDING (Resources)")
    slurm.job("100", state="RUNNING", node="n7")
    (launcher.home / "logs").mkdir()
    (launcher.home / "logs" / "slurm-0-100.log").write_text("loading shard 3 of 8\n")
    runs = asyncio.run(launcher.locate(handle, 10))
    assert (runs.url, runs.running, runs.detail) == ("http://n7:13000", True, "loading shard 3 of 8")
    assert [found.mark for found in asyncio.run(launcher.find(10))] == ["slurm-0-1"]
    seen = asyncio.run(launcher.proof(handle, 10))
    assert not seen.gone and "squeue lists job 100: RUNNING on n7" in seen.evidence
    proof = asyncio.run(launcher.end(handle, 10))
    assert proof.gone and "CANCELLED by 1000 at 2026-01-01T00:00:00 on n7" in proof.evidence
    assert ["scancel", "100"] in slurm.read()["calls"]


def test_jobs_that_share_a_node_have_ports_of_their_own(launcher: SlurmLauncher) -> None:
    ports = [launcher.port_of(number) for number in range(1000)]
    assert len(set(ports)) == 1000 and max(ports) < 32_768


def test_a_job_that_left_the_queue_before_it_answered_has_failed(launcher: SlurmLauncher, slurm: Slurm) -> None:
    handle = asyncio.run(launcher.start(START, 10))
    slurm.job("100", state="BOOT_FAIL")
    assert asyncio.run(launcher.locate(handle, 10)).failed == "squeue lists job 100 no more"


def test_a_keeper_that_stops_leaves_no_program_running(launcher: SlurmLauncher, slurm: Slurm) -> None:
    slurm.set(faults={"squeue": "hang"})

    async def run() -> None:
        looking = asyncio.create_task(launcher.find(10))
        await asyncio.to_thread(until, lambda: b"squeue" in slurm.path.read_bytes().partition(b"faults")[0])
        looking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking

    asyncio.run(run())

    def runs_it(child: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie too: it runs nothing
            return "squeue" in " ".join(child.cmdline())
        return False

    assert not [child for child in psutil.Process().children(recursive=True) if runs_it(child)]


def test_starting_twice_is_one_job(launcher: SlurmLauncher, slurm: Slurm) -> None:
    first = asyncio.run(launcher.start(START, 10))
    assert asyncio.run(launcher.start(START, 10)) == first
    assert len(slurm.read()["jobs"]) == 1


@pytest.mark.parametrize(
    ("state", "end", "gone"),
    [
        ("COMPLETED", "2026-01-01T00:00:00", True),
        ("FAILED", "2026-01-01T00:00:00", True),
        ("TIMEOUT", "2026-01-01T00:00:00", True),
        ("NODE_FAIL", "2026-01-01T00:00:00", False),
        ("BOOT_FAIL", "2026-01-01T00:00:00", False),
        ("PREEMPTED", "2026-01-01T00:00:00", False),
        ("COMPLETED", "Unknown", False),
        ("COMPLETING", "2026-01-01T00:00:00", False),
        ("RUNNING", "Unknown", False),
    ],
)
def test_what_counts_as_gone(launcher: SlurmLauncher, slurm: Slurm, state: str, end: str, gone: bool) -> None:
    handle = asyncio.run(launcher.start(START, 10))
    slurm.job("100", state=state, end=end, node="n7")
    proof = asyncio.run(launcher.proof(handle, 10))
    assert proof.gone is gone, proof.evidence


def test_a_node_that_slurm_lost_is_not_proven_gone_by_scancel(launcher: SlurmLauncher, slurm: Slurm) -> None:
    handle = asyncio.run(launcher.start(START, 10))
    slurm.set(cancelled="NODE_FAIL")
    proof = asyncio.run(launcher.end(handle, 1))
    assert not proof.gone and "sacct calls it NODE_FAIL" in proof.evidence


def test_a_job_whose_number_was_lost_is_found_by_its_name(launcher: SlurmLauncher, slurm: Slurm) -> None:
    asyncio.run(launcher.start(START, 10))
    slurm.job("100", state="COMPLETED", end="2026-01-01T00:00:00")
    proof = asyncio.run(launcher.end(Handle(mark=START.mark), 10))
    assert proof.gone and "sacct: COMPLETED" in proof.evidence


def test_a_job_that_nobody_knows_is_not_proven_gone(launcher: SlurmLauncher, slurm: Slurm) -> None:
    """sbatch's answer may have been lost, and the controller may list its job only later."""
    never = asyncio.run(launcher.proof(Handle(mark="slurm-9-1"), 10))
    assert not never.gone and "neither squeue nor sacct knows a job" in never.evidence


@pytest.mark.parametrize("program", ["squeue", "sacct"])
def test_a_controller_that_does_not_answer_proves_nothing(launcher: SlurmLauncher, slurm: Slurm, program: str) -> None:
    handle = asyncio.run(launcher.start(START, 10))
    slurm.job("100", state="COMPLETED", end="2026-01-01T00:00:00")
    slurm.set(faults={program: "hang"})
    with pytest.raises(ServiceError, match=f"{program} did not end within 1 s"):
        asyncio.run(launcher.proof(handle, 1))
    slurm.set(faults={program: "slurm_load_jobs error: Unable to contact slurm controller"})
    with pytest.raises(ServiceError, match=r"exit code 1: .*Unable to contact"):
        asyncio.run(launcher.proof(handle, 10))


def test_a_refused_submission_is_said_and_a_strange_answer_refused(
    launcher: SlurmLauncher, slurm: Slurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slurm.set(faults={"sbatch": "sbatch: error: invalid partition specified: gpu"})
    with pytest.raises(ServiceError, match="invalid partition"):
        asyncio.run(launcher.start(START, 10))
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/bash\necho Submitted batch job 1\n")
    with pytest.raises(ServiceError, match="expected the number of a job"):
        asyncio.run(launcher.start(START, 10))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Rl360Error, match="no program squeue on PATH"):
        asyncio.run(launcher.start(START, 10))
