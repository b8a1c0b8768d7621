"""Harbor task directories: what loads, and the one line for what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl360.errors import BadInput
from rl360.harbor.check import solution_dir
from rl360.harbor.task import JUDGE_FILE, PARTS, image_group, load_task, tree_digest

REPOSITORY = Path(__file__).resolve().parents[2]
EXERCISM = REPOSITORY.parent / "shared" / "tasks" / "exercism-python"


def make_task(path: Path, toml: str = "", dockerfile: str = "FROM debian\nWORKDIR /app\nCOPY . /app\n") -> Path:
    for name in ("environment", "tests"):
        (path / name).mkdir(parents=True)
    (path / "task.toml").write_text(toml or 'schema_version = "1.4"\n[task]\nname = "t/one"\n')
    (path / "instruction.md").write_text("Do it.\n")
    (path / "tests" / "test.sh").write_text("#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n")
    (path / "environment" / "Dockerfile").write_text(dockerfile)
    return path


def test_loads(tmp_path: Path) -> None:
    toml = '[task]\nname = "t/one"\n[metadata]\nanything = 3\n[environment]\nmemory_mb = 128\nworkdir = "/work"\n'
    task = load_task(make_task(tmp_path / "t", toml, "FROM debian\nCOPY . /work\n"))
    assert (task.id, task.instruction) == ("t/one", "Do it.")
    assert (task.config.environment.memory_mb, task.config.environment.workdir) == (128, "/work")
    assert solution_dir(task) is None
    assert task.verifier_digest == tree_digest(task.tests_dir)


WORKDIRS = (
    "/home",
    "/home/agent",
    "/home/agent/x",
    "/tmp",
    "/tmp/x",
    "/run/x",
    "/opt",
    "/opt/python/x",
    "/dev/shm",
    "/",
)


@pytest.mark.parametrize("workdir", WORKDIRS)
def test_no_working_directory_is_or_holds_what_must_be_new_for_the_verifier(tmp_path: Path, workdir: str) -> None:
    path = make_task(tmp_path / "t", f'[environment]\nworkdir = "{workdir}"\n')
    with pytest.raises(BadInput, match=rf"workdir = '{workdir}': is, is in or holds a system folder; choose"):
        load_task(path)


@pytest.mark.parametrize(
    "workdir", ["/app", "/workspace", "/root", "/home/user", "/home/agents", "/opt/x", "/applied/y"]
)
def test_a_working_directory_of_its_own(tmp_path: Path, workdir: str) -> None:
    toml = f'[task]\nname = "t/one"\n[environment]\nworkdir = "{workdir}"\n'
    assert load_task(make_task(tmp_path / "t", toml, "FROM debian\n")).config.environment.workdir == workdir


def test_tasks_of_one_image_are_one_group(tmp_path: Path) -> None:
    toml = '[task]\nname = "t/{}"\n[environment]\ndocker_image = "{}"\n'
    tasks = [load_task(make_task(tmp_path / f"{n}", toml.format(n, f"i:{n % 2}"))) for n in range(3)]
    assert [image_group(task) for task in tasks] == ["i:0", "i:1", "i:0"]
    assert image_group(tasks[0], "python:3") == "i:0", "its own image goes before the provider's"
    bare = load_task(make_task(tmp_path / "bare"))
    assert (image_group(bare), image_group(bare, "python:3")) == ("t/one", "python:3")


@pytest.mark.parametrize("name", ["task.toml", "tests/test.sh", "instruction.md"])
def test_missing_part(tmp_path: Path, name: str) -> None:
    path = make_task(tmp_path / "t")
    (path / name).unlink()
    with pytest.raises(BadInput, match=f"no {name}") as caught:
        load_task(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[agent]\ntimeout_sec = -1\n", "agent.timeout_sec = -1"),
        ("[agent]\ntimeout = 3\n", "agent.timeout = 3: unknown key"),
        ('schema_version = "9"\n', "schema_version = '9'"),
        ('[environment]\nnetwork_mode = "lan"\n', "environment.network_mode = 'lan'"),
        ('[environment]\nworkdir = "app"\n', "environment.workdir = 'app': must be an absolute"),
        ('[environment]\nenv = { "A=B" = "c" }\n', "cannot set 'A=B'"),
        ('[verifier]\nenv = { A = "\\u0000" }\n', "NUL byte"),
        ('[environment]\nworkdir = "/usr/x"\n', "system folder"),
        ('[environment]\nworkdir = "/a/../etc"\n', "normalised"),
        ("[environment]\nmemory_mb = nan\n", "environment.memory_mb = nan"),
        ("[agent\n", "not TOML"),
        ("x = " + "[" * 100_000, "not TOML"),
    ],
)
def test_bad_values(tmp_path: Path, toml: str, words: str) -> None:
    path = make_task(tmp_path / "t", toml)
    with pytest.raises(BadInput) as caught:
        load_task(path)
    message = str(caught.value)
    assert words in message and str(path / "task.toml") in message and "\n" not in message


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_is_a_link_is_refused(tmp_path: Path, name: str) -> None:
    """It would bring a file of this machine, a key say, into the prompt or the agent's folder."""
    path = make_task(tmp_path / "t")
    part, outside = path / name, tmp_path / "outside"
    if part.exists():  # all but solution
        part.rename(outside)
    else:
        outside.mkdir()
    part.symlink_to(outside)
    with pytest.raises(BadInput, match=f"{name}: a link"):
        load_task(path)


def test_empty_instruction_and_binary_text(tmp_path: Path) -> None:
    path = make_task(tmp_path / "t")
    (path / "instruction.md").write_text(" \n")
    with pytest.raises(BadInput, match="empty"):
        load_task(path)
    (path / "instruction.md").write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match="UTF-8"):
        load_task(path)


def test_a_line_that_needs_an_image_build_is_named(tmp_path: Path) -> None:
    dockerfile = "# c\nFROM x\nCOPY . /app/\nRUN apt-get install \\\n  jq\nENV A=1\n"
    with pytest.raises(BadInput, match=r"t/environment/Dockerfile: RUN apt-get install   jq: needs an image build"):
        load_task(make_task(tmp_path / "t", dockerfile=dockerfile))


def test_digest_covers_names_bytes_and_modes(tmp_path: Path) -> None:
    path = make_task(tmp_path / "t")
    seen = {tree_digest(path / "tests")}
    (path / "tests" / "test.sh").chmod(0o755)
    seen.add(tree_digest(path / "tests"))
    (path / "tests" / "more").write_text("x")
    seen.add(tree_digest(path / "tests"))
    (path / "tests" / "more").rename(path / "tests" / "less")
    seen.add(tree_digest(path / "tests"))
    assert len(seen) == 4
    (path / "tests" / "link").symlink_to("less")
    with pytest.raises(BadInput, match="regular file"):
        load_task(path)


def test_builtin_tasks_load() -> None:
    folders = [path for path in (REPOSITORY / "rl360/tasksets/chores_tasks").iterdir() if path.is_dir()]
    assert folders
    for folder in folders:
        task = load_task(folder)
        assert solution_dir(task) is not None


@pytest.mark.skipif(not EXERCISM.is_dir(), reason="the exercism tasks are not beside the repository")
def test_exercism_tasks_load() -> None:
    folders = [path for path in EXERCISM.iterdir() if path.is_dir()]
    assert len({load_task(folder).id for folder in folders}) == len(folders) == 102


JUDGE = 'rubric = "Is it clear?"\n'


def judged(path: Path, toml: str = JUDGE) -> Path:
    made = make_task(path)
    (made / JUDGE_FILE).write_text(toml)
    return made


def test_a_judged_task_may_lack_a_script(tmp_path: Path) -> None:
    path = judged(tmp_path / "t", JUDGE + 'score_max = 10\nthreshold = 7\nfiles = ["a.md", "src"]\n')
    (path / "tests" / "test.sh").unlink()
    terms = load_task(path).judge
    assert terms is not None and (terms.mode, terms.score_max, terms.files) == ("only", 10.0, ("a.md", "src"))
    (path / JUDGE_FILE).write_text(JUDGE + 'mode = "after_script"\n')
    with pytest.raises(BadInput, match=r"no tests/test\.sh"):
        load_task(path)


def test_what_a_task_is_judged_by_is_in_its_digest(tmp_path: Path) -> None:
    path = judged(tmp_path / "t")
    seen = {load_task(path).verifier_digest}
    for toml in (JUDGE + "score_max = 2\n", 'rubric = "Is it short?"\n'):
        (path / JUDGE_FILE).write_text(toml)
        seen.add(load_task(path).verifier_digest)
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("", "rubric = "),
        ('rubric = ""\n', "rubric = ''"),
        (JUDGE + 'model = "m"\n', "model = 'm': unknown key"),
        ('[judge]\njudge = "anthropic/x"\n', "judge = {'judge': 'anthropic/x'}"),
        (JUDGE + 'mode = "before"\n', "mode = 'before'"),
        (JUDGE + "score_min = 1\n", "score_min 1 must be below score_max 1"),
        (JUDGE + "score_max = inf\n", "score_max = inf"),
        (JUDGE + "threshold = 0\n", "threshold 0 must be above score_min"),
        (JUDGE + "threshold = 1.5\n", "threshold 1.5"),
        (JUDGE + "threshold = nan\n", "threshold nan"),
        (JUDGE + 'files = ["../x"]\n', "'../x' is not a plain path"),
        (JUDGE + 'files = ["/etc"]\n', "'/etc' is not a plain path"),
        (JUDGE + 'files = ["a//b"]\n', "'a//b' is not a plain path"),
        (JUDGE + "transcript = false\nfiles = []\n", "shows the judge nothing"),
        (JUDGE + "max_bytes = 10\n", "max_bytes = 10"),
        ("rubric\n", "not TOML"),
    ],
)
def test_bad_terms_of_a_judge(tmp_path: Path, toml: str, words: str) -> None:
    path = judged(tmp_path / "t", toml)
    with pytest.raises(BadInput) as caught:
        load_task(path)
    message = str(caught.value)
    assert words in message and str(path / JUDGE_FILE) in message and "\n" not in message
