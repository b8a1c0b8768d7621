"""Real services, brought up once per test session by `rl360 up` in a home of their own, and taken down at its end.

They use the demo's starting policy of seed 0, made once and cached in `.rl360/models`, on ports from 15000, so that
they stand beside services a person has up. RL360_TEST_HOME names a home whose services are up already (and stay up).
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from rl360.config.services import Services, load_services
from rl360.store.object_store import ObjectStore

ROOT = Path(__file__).resolve().parents[1]
PORT_BASE = 15_000
CLI_DEADLINE_S = 600
SHARE_SERVICES = {  # files whose tests use the fixture `services`
    "test_fleet_kill",
    "test_kill_flow",
    "test_kill_services",
    "test_push",
    "test_push_refusal",
    "test_replay_run",
    "test_run_life",
    "test_sessions_engine",
    "test_spine",
}

Cli = Callable[..., subprocess.CompletedProcess[str]]


if "PYTEST_XDIST_WORKER" in os.environ:  # a core each: two threads of torch in each would spin for one another
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure() -> None:
    """Until all is collected: importing makes millions of objects and hardly a cycle, and looking takes a third."""
    gc.disable()


class _FilesBesideTheServices(LoadFileScheduling):
    """`--dist loadgroup`: one worker has every file that shares the session's services, the other takes the rest."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "services" if Path(file).stem in SHARE_SERVICES else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return _FilesBesideTheServices(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that share the services come first: theirs is the longest way."""
    share = {item.path.stem for item in items if "services" in getattr(item, "fixturenames", ())}
    if share - SHARE_SERVICES:
        raise pytest.UsageError(f"SHARE_SERVICES of tests/conftest.py lacks {sorted(share - SHARE_SERVICES)}")
    items.sort(key=lambda item: "" if item.path.stem in SHARE_SERVICES else item.path.stem)


def pytest_collection_finish() -> None:
    """What was imported stays to the end: no collection of garbage needs to walk through it."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()
    gc.enable()
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        _take_down_what_workers_left(config)


def _take_down_what_workers_left(config: pytest.Config) -> None:
    """A worker has seconds to end when a person interrupts, and `rl360 down` may need more."""
    for state in config._tmp_path_factory.getbasetemp().glob("popen-*/home*/state.json"):  # type: ignore[attr-defined]
        print(f"{state.parent}: {run_cli(state.parent, 'down').stdout}", end="")


def run_cli(home: str | Path, *args: str, deadline_s: float = CLI_DEADLINE_S) -> subprocess.CompletedProcess[str]:
    """One `rl360` command against `home`, as a person would run it."""
    return subprocess.run(
        [sys.executable, "-m", "rl360.cli", *args],
        cwd=ROOT,
        env={**os.environ, "RL360_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )


@pytest.fixture(scope="session")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Everything `rl360 up` starts."""
    if given := os.environ.get("RL360_TEST_HOME"):
        yield load_services(Path(given))
        return
    from rl360.policy.warm_start import ensure_warm_start

    model = ensure_warm_start(0, ROOT / ".rl360")
    home = tmp_path_factory.mktemp("home")
    (home / "models").symlink_to(ROOT / ".rl360" / "models")
    started = run_cli(home, "up", "--model", str(model), "--port-base", str(PORT_BASE), "--sessions", "2")
    try:
        assert started.returncode == 0, f"rl360 up failed:\n{started.stdout}{started.stderr}"
        yield load_services(home)
    finally:
        stopped = run_cli(home, "down")
    assert stopped.returncode == 0, f"rl360 down left something behind:\n{stopped.stdout}{stopped.stderr}"


@pytest.fixture(scope="session")
def store(services: Services) -> ObjectStore:
    return ObjectStore.from_services(services)


@pytest.fixture(scope="session")
def cli(services: Services) -> Cli:
    """`cli("run", "list")`: one command against the session's services."""

    def call(*args: str, deadline_s: float = CLI_DEADLINE_S) -> subprocess.CompletedProcess[str]:
        return run_cli(services.home, *args, deadline_s=deadline_s)

    return call
