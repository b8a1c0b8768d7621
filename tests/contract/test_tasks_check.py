"""`rl360 tasks check` on task sources, in real sandboxes: good tasks, broken ones, and those that any work passes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rl360.bench.oracle import left_of, sweep_row
from rl360.harbor.check import TaskCheck, check_tasks, task_dirs
from rl360.sandboxes.bubblewrap import BubblewrapProvider
from rl360.tasksets.made import human_eval, written

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
