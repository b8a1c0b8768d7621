"""`rl360 tasks check` on task sources, in real sandboxes: good tasks, broken ones, and those that any work passes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # helpers shared by the parts of the suite
from sandbox_daemons import FakeDocker, Fault, until

from rl360.bench.oracle import left_of, sweep_row
from rl360.cli import main
from rl360.harbor.check import TaskCheck, check_tasks, task_dirs
from rl360.sandboxes.bubblewrap import BubblewrapProvider
from rl360.tasksets.made import human_eval, written
from rl360.tasksets.sources import BUILTIN_DIR

TRY = ["bwrap", "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
REASON = (
    None if shutil.which("bwrap") and subprocess.run(TRY, capture_output=True, check=False).returncode == 0 else "bwrap"
)
pytestmark = [pytest.mark.contract, pytest.mark.skipif(REASON is not None, reason="bwrap cannot run here")]
ASKS = '[ "$(cat answer)" = 42 ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt\n'


def row(name: str, test: str = ASKS, solution: str = "echo 42 > answer\n") -> str:
    return json.dumps({"id": name, "instruction": "Answer.", "tests": {"test.sh": test}, "solution": solution})


def test_a_file_of_rows_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL360_HOME", str(tmp_path / "home"))
    always = "echo 1 > /logs/verifier/reward.txt\n"
    lines = [row("good"), row("wrong", solution="echo 41 > answer\n"), row("always", always), row("silent", "true\n")]
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines, row("none", solution="")]))
    argv = [sys.executable, "-m", "rl360.cli", "tasks", "check", str(tmp_path / "rows.jsonl"), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert (report["checked"], report["good"]) == (5, 1)
    problems = {task["task"]: task["problem"] or "" for task in report["tasks"]}
    assert problems["good"] == ""
    assert problems["wrong"].startswith("broken: the oracle got 0")
    assert problems["always"].startswith("does not discriminate: doing nothing got 1")
    assert problems["silent"].startswith("broken: the oracle got no verdict (no_verdict")
    assert problems["none"].startswith("no solution/solve.sh")
    done = subprocess.run([*argv[:-2], str(tmp_path / "none.jsonl")], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "give builtin:chores, human-eval" in done.stderr


def checks(tmp_path: Path, folder: Path) -> dict[str, TaskCheck]:
    provider = BubblewrapProvider(tmp_path / "sandboxes")
    try:
        results = asyncio.run(check_tasks(provider, task_dirs(folder), 2))
        assert left_of(provider.root) == []
    finally:
        provider.close()
    return {result.task: result for result in results}


def test_the_packages_problems_discriminate_and_tricks_do_not_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 and 38 test with functions of the prompt's; the others are one problem with solutions that only pretend."""
    monkeypatch.setenv("RL360_HOME", str(tmp_path / "home"))
    source = human_eval.source()
    tasks = dict(source.tasks())
    some = {name: tasks[name] for name in ("HumanEval_0", "HumanEval_32", "HumanEval_38")}
    tricks = {
        "leaves": "import os\nos._exit(0)\n",
        "prints": "import os, sys\nprint('all checks passed', flush=True)\nos._exit(0)\n",
        "raises": "raise SystemExit(0)\n",
    }
    for name, text in tricks.items():
        files = dict(tasks["HumanEval_0"])
        files["task.toml"] = files["task.toml"].replace("HumanEval/0", name)
        some[name] = files | {"solution/solve.sh": f"cat > /app/solution.py <<'END'\n{text}END\n"}
    found = checks(tmp_path, written(dataclasses.replace(source, digest="some" * 16, tasks=lambda: iter(some.items()))))
    for name, result in found.items():
        if name in tricks:
            assert result.oracle == 0 and result.problem is not None, result
        else:
            assert result.problem is None, result


def test_the_sweeps_row_holds_only_when_all_is_good_and_nothing_is_left() -> None:
    good = TaskCheck("a", "/a", 1.0, 0.0, None, 1.0)
    assert sweep_row([good, good], [], 3.0).holds
    assert not sweep_row([good, dataclasses.replace(good, problem="broken")], [], 3.0).holds
    row = sweep_row([good], ["pid 7"], 3.0)
    assert not row.holds and "left behind: pid 7" in row.detail


def rl360(*argv: str) -> subprocess.CompletedProcess[str]:
    """In this process: what it would exit with and print."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as left:
        main(list(argv))
    return subprocess.CompletedProcess(argv, int(left.value.code or 0), out.getvalue(), err.getvalue())


def one_line(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done.stderr
    for word in words:
        assert word in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="the fake gives files to a user of its own")
def test_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL360_HOME", str(tmp_path / "home"))
    (tmp_path / "rows.jsonl").write_text("\n".join([row("good"), row("wrong", solution="echo 41 > answer\n")]))
    argv = ("tasks", "check", str(tmp_path / "rows.jsonl"), "--provider", "docker")
    one_line(rl360(*argv), 1, "no token")
    (tmp_path / "token").write_text("token-of-the-check-tests")
    (tmp_path / "token").chmod(0o600)
    monkeypatch.setenv("RL360_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    monkeypatch.setattr("rl360.sandboxes.providers.remote.UNDO_S", 0.5)
    one_line(rl360(*argv), 1, "--provider docker", "127.0.0.1:9")
    one_line(rl360(*argv[:-1], "podman"), 2, "sandbox provider 'podman': use one of bubblewrap, docker")
    monkeypatch.undo()
    monkeypatch.setenv("RL360_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RL360_TOKEN_FILE", str(tmp_path / "token"))
    (tmp_path / "boxes").mkdir()
    fake = FakeDocker(tmp_path / "boxes")
    monkeypatch.setenv("DOCKER_HOST", fake.url.replace("http", "tcp"))
    try:
        done = rl360(*argv, "--json")
        assert done.returncode == 1 and done.stderr == "", done.stderr
        report = json.loads(done.stdout)
        assert [task["oracle"] for task in report["tasks"]] == [1.0, 0.0] and report["good"] == 1
        assert fake.boxes == {} and list((tmp_path / "home" / "sandboxes" / "check-docker" / "live").iterdir()) == []
        fake.faults.append(Fault("POST .*containers/create", (500, {}), 100))
        done = rl360(*argv)
        assert done.returncode == 1 and done.stdout.count("not checked: oracle: sandbox_start") == 2, done.stdout
        assert "broken" not in done.stdout
    finally:
        fake.close()


def test_a_home_or_a_source_that_cannot_be_used_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text(row("good"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("RL360_HOME", str(tmp_path / "file"))
    for source in ("builtin:chores", str(tmp_path / "rows.jsonl")):
        one_line(rl360("tasks", "check", source), 2, str(tmp_path / "file"), "Not a directory", "RL360_HOME")
    one_line(rl360("tasks", "check", ""), 2, "the task source is empty")


def test_copy_lines_are_followed_and_a_task_is_named_by_one_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    toml = '[task]\nname = "{}"\n'
    seen = '[ "$(find . -type f)" = ./data/pond.txt ] && grep -q lake data/pond.txt && [ -e done ] && r=1 || r=0'
    for name, line in (("good", "COPY lake.txt /app/data/pond.txt"), ("bad", "COPY missing.txt /app/")):
        files = {
            "task.toml": toml.format(name),
            "instruction.md": "Make done.",
            "environment/lake.txt": "lake\n",
            "environment/unwanted.txt": "",
            "environment/Dockerfile": f"FROM debian\n{line}\n",
            "tests/test.sh": f"{seen}; echo $r > /logs/verifier/reward.txt\n",
            "solution/solve.sh": "mkdir done\n",
        }
        for relative, text in files.items():
            (tmp_path / "set" / name / relative).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "set" / name / relative).write_text(text)
    shutil.copytree(tmp_path / "set" / "good", tmp_path / "set" / "drill")
    (tmp_path / "set" / "drill" / "environment" / "Dockerfile").unlink()
    os.mkfifo(tmp_path / "set" / "drill" / "environment" / "pipe")
    (tmp_path / "set" / "drill" / "task.toml").write_text(toml.format("drill"))
    (tmp_path / "here").mkdir()
    found = checks(tmp_path, Path("here/../set"))
    assert (found["good"].problem, found["good"].oracle) == (None, 1.0)
    assert found["bad"].path == "set/bad"
    assert str(found["drill"].problem).startswith("not checked: oracle: sandbox_start: "), "the drill of docs/tasks.md"
    assert found["bad"].problem == "environment/Dockerfile: COPY missing.txt /app/: environment/ has no missing.txt"


def test_a_task_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL360_HOME", str(tmp_path / "home"))
    (tmp_path / "set" / "none").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    done = rl360("tasks", "check", "set")
    assert done.returncode == 1 and done.stdout.startswith("set/none: no task.toml; a Harbor task needs"), done.stdout


SLOW = "sleep 60\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_check_leaves_nothing_or_is_reaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Two at once, as one may be ended before the other; a person who presses Ctrl-C once more ends it no worse."""
    monkeypatch.setenv("RL360_HOME", str(tmp_path / "home"))
    root = tmp_path / "home" / "sandboxes" / "check"
    (tmp_path / "rows.jsonl").write_text("\n".join(row(name, solution=SLOW) for name in ("a", "b", "c")))
    argv = [sys.executable, "-m", "rl360.cli", "tasks", "check", str(tmp_path / "rows.jsonl"), "--concurrency", "2"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as check:
        assert until(lambda: root.is_dir() and len(list(root.glob("live/*/rl360-*.json"))) == 2, 30)
        time.sleep(1.0)
        for _ in range(1 if number == signal.SIGKILL else 3):
            check.send_signal(number)
            time.sleep(0.05)
        out, err = check.communicate(timeout=30)
    if number == signal.SIGKILL:
        assert rl360("sandboxes", "list", "--json").stdout.count('"state":"orphaned"') == 2
        done = rl360("sandboxes", "reap", "--yes")
        assert done.returncode == 0 and done.stdout.count(": gone: none of its processes is left, ") == 2, done.stdout
    else:
        assert (check.returncode, out) == (1, "") and err.startswith("error: interrupted: its sandboxes were ended")
        assert rl360("sandboxes", "reap").stdout == "nothing to reap\n"
    assert left_of(root) == []


def test_two_tasks_of_one_name_are_no_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL360_HOME", str(tmp_path / "home"))
    chore = next(path for path in sorted(BUILTIN_DIR.iterdir()) if path.is_dir())
    for name in ("a", "b"):
        shutil.copytree(chore, tmp_path / "set" / name)
    done = rl360("tasks", "check", str(tmp_path / "set"))
    assert done.returncode == 1 and "1 of 2 tasks discriminate" in done.stdout
    assert f"is also that of {tmp_path / 'set' / 'a'}; rename one" in done.stdout
