"""The lock fits together, every import is declared, and the commands of a fresh clone are there."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections import Counter
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.unit.product_sources import files, nodes_of

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("rl360", "flows", "tasks", "infra")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# installed apart, because their metadata pins a CUDA stack (see docs/dependencies.md), or stood in for
APART = {"sglang", "sgl-kernel", "torchvision"}
# imported on first use, each by one module that says which extra it needs
OPTIONAL = {
    "duckdb": ("duckdb", "parquet", "rl360/tasksets/made/rows.py"),
    "mooncake": ("mooncake-transfer-engine", "rdma", "rl360/weights/transports/rdma.py"),
}
ELSEWHERE = {"harbor": ("harbor.txt", "rl360/harbor/real/")}  # run by another Python, in an environment of its own


def lock(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(package): pin for package, pin in pins}


def declared() -> dict[str, Requirement]:
    found = [Requirement(text) for text in PROJECT["project"]["dependencies"]]
    return {canonicalize_name(item.name): item for item in found}


def test_every_line_of_the_locks_is_a_pin() -> None:
    for name in ("cpu.txt", "cpu-sglang.txt", "gpu.txt"):
        for line in (ROOT / "requirements" / name).read_text().splitlines():
            assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._+!-]+", line), (name, line)


@pytest.mark.parametrize("name", ["cpu.txt", "gpu.txt"])
def test_what_the_project_declares_is_locked_and_satisfied(name: str) -> None:
    pins = lock(name)
    for package, requirement in declared().items():
        assert package in pins, f"{package} is not in {name}"
        assert requirement.specifier.contains(pins[package], prereleases=True), (package, pins[package])


def test_the_environment_is_the_lock() -> None:
    for package, pin in {**lock("cpu.txt"), **lock("cpu-sglang.txt")}.items():
        assert version(package).partition("+")[0] == pin, f"{package}: run `make setup`"


def test_the_cpu_lock_is_closed() -> None:
    """What `pip check` says, for the lock and not for whatever else is installed; sglang is the known exception."""
    pins = lock("cpu.txt")
    problems = []
    for package in pins:
        for text in requires(package) or []:
            need = Requirement(text)
            if need.marker is not None and not need.marker.evaluate({"extra": ""}):
                continue
            pin = pins.get(canonicalize_name(need.name))
            if pin is None or not need.specifier.contains(pin, prereleases=True):
                problems.append(f"{package} needs {text}, the lock has {pin}")
    assert not problems, problems


def imported() -> dict[str, set[str]]:
    """Top-level name -> files of the product that import it."""
    found: dict[str, set[str]] = {}
    for folder in PRODUCT:
        for path in files(folder):
            for node in nodes_of(path):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names = [node.module]
                for name in names:
                    found.setdefault(name.partition(".")[0], set()).add(str(path.relative_to(ROOT)))
    return found


def test_every_import_of_the_product_is_declared() -> None:
    owners = packages_distributions()
    missing = {}
    for name, users in imported().items():
        if name in sys.stdlib_module_names or name in PRODUCT:
            continue
        if name in ELSEWHERE:
            pins, folder = ELSEWHERE[name]
            assert name in lock(pins) and all(user.startswith(folder) for user in users)
            continue
        if name in OPTIONAL:
            package, extra, module = OPTIONAL[name]
            assert users == {module} and f"rl360[{extra}]" in (ROOT / module).read_text()
            assert package in {Requirement(item).name for item in PROJECT["project"]["optional-dependencies"][extra]}
            continue
        packages = {canonicalize_name(item) for item in owners.get(name, [name])}
        if not packages & (declared().keys() | APART):
            missing[name] = sorted(users)
    assert not missing, missing


def test_every_declared_library_has_its_reason() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text()
    table = text[text.index("## Direct libraries") :]
    extras = [Requirement(item).name for item in PROJECT["project"]["optional-dependencies"]["dev"]]
    for package in [item.name for item in declared().values()] + extras:
        assert re.search(rf"\b{re.escape(package)}\b", table), f"docs/dependencies.md does not explain {package}"


def test_the_package_installs_its_command() -> None:
    assert PROJECT["project"]["scripts"] == {"rl360": "rl360.cli:main"}
    try:
        assert version("rl360") == PROJECT["project"]["version"]
    except PackageNotFoundError:
        pytest.fail("rl360 is not installed; run `make setup`")


def test_a_second_setup_does_nothing_and_a_wrong_python_is_one_line(tmp_path: Path) -> None:
    fake = tmp_path / "python9"
    fake.write_text("#!/bin/sh\necho 9.9\n")
    fake.chmod(0o755)
    for python, message in (("no-such-python", "is not there"), (str(fake), "is Python 9.9")):
        result = subprocess.run(
            ["bash", "scripts/setup.sh"],
            cwd=ROOT,
            env=os.environ | {"PYTHON": python, "VENV": str(tmp_path / "venv")},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert result.returncode == 1
        assert message in result.stderr
        assert result.stderr.count("\n") == 1
    assert not (tmp_path / "venv").exists()


FAKE_PYTHON = """#!/bin/bash
case "$*" in
    *version_info*) echo 3.11 ;;
    "-m venv "*) mkdir -p "$3/bin" "$3/lib/python3.11/site-packages/one-1.dist-info" && cp "$0" "$3/bin/python" ;;
    "-m pip"*)
        echo "WARNING: Location 'file:///i/x/' is ignored: it is neither a file nor a directory." >&2
        echo "WARNING: another" >&2
        sleep 1
        case "$*" in *FAIL*) exit 1 ;; esac ;;
esac
"""


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="set-up would install bubblewrap")
@pytest.mark.parametrize("torch_args", ["", "--FAIL"])
def test_a_long_setup_says_how_far_it_is_and_leaves_nothing_running(tmp_path: Path, torch_args: str) -> None:
    for name in ("scripts", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    python = tmp_path / "python3.11"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    env = {"PYTHON": str(python), "VENV": "env", "SETUP_TELL_S": "0.3", "TORCH_PIP_ARGS": torch_args}
    began = time.monotonic()
    done = subprocess.run(
        ["bash", "scripts/setup.sh"], cwd=tmp_path, env=os.environ | env, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert time.monotonic() - began < 30, "nothing that it began holds its output open"
    lines = done.stdout.splitlines()
    assert any(re.fullmatch(r"setup: \d+ s, 1 of 2\d\d packages are in", line) for line in lines), done
    assert "WARNING: another" in done.stderr and "is ignored" not in done.stderr
    if torch_args:
        assert done.returncode == 1 and "could not install torch" in done.stderr
    else:
        assert done.returncode == 0 and re.fullmatch(r"setup: done in \d+ s", lines[-1])


def test_ci_and_make_have_what_is_promised() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("setup", "demo", "test", "lint", "fmt", "down", "clean"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    ci = ROOT / ".ci" / "run"
    assert os.access(ci, os.X_OK)
    assert "set -euo pipefail" in ci.read_text()
    assert subprocess.run(["bash", "-n", str(ci)], timeout=10, check=False).returncode == 0


def test_no_two_test_files_have_one_name() -> None:
    """pytest collects all of tests/ in one process and takes a file for a module of its bare name."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, times in names.items() if times > 1] == []


def test_each_folder_of_tests_holds_its_own_kind() -> None:
    """`make test` runs the folders one by one: a mark elsewhere, or a test there without one, would run nowhere."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        marks = set(re.findall(r"pytest\.mark\.(contract|chaos)\b", path.read_text()))
        assert bool(marks) == (path.parent.name in ("contract", "chaos")), path
