"""SIGKILL the flow's process in every task: starting the same run again finishes it, and nothing is done twice.

One run, one step per kill point: each step is killed at its point, then started again by an undisturbed process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from rl360.config.run import RunConfig
from rl360.config.services import Services
from rl360.ledger.read import read_run
from rl360.replay.steps import finished_steps
from rl360.store.layout import step_key
from rl360.store.object_store import ObjectStore
from rl360.store.progress import next_step
from tests.conftest import ROOT

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1500)]

DRIVER = Path(__file__).with_name("flow_driver.py")
POINTS = (
    "sample_groups:before",
    "sample_groups:after",
    "roll_out:attempts",
    "roll_out:before",
    "collect:before",
    "filter_groups:after",
    "train:sent",
    "train:before",
    "train:after",
    "push_weights:sent",
    "push_weights:before",
    "checkpoint:before",
    "report:before",
    "report:after",
)


def config_of(run: str, steps: int) -> RunConfig:
    return RunConfig.parse(
        {
            "run": run,
            "steps": steps,
            "taskset": {"groups_per_step": 4, "attempts_per_group": 4},
            "rollout": {"wave_size": 8},
            "trainer": {"checkpoint_every": 3},
        }
    )


class Driver:
    """Runs in processes of their own, which flow_driver.py forks one after another."""

    def __init__(self, services: Services, folder: Path) -> None:
        self.log = folder / "run.log"
        env = {
            **os.environ,
            "RL360_HOME": services.home,
            "PREFECT_API_URL": services.prefect_api_url,
            "PREFECT_HOME": f"{services.home}/prefect-tests",
            "PYTHONPATH": str(ROOT),
            "DO_NOT_TRACK": "1",
        }
        argv, pipe = [sys.executable, str(DRIVER)], subprocess.PIPE
        self.process = subprocess.Popen(
            argv, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )

    def run(self, config: RunConfig, kill_point: str | None = None) -> int:
        """`rl_run`, killed at `kill_point` when one is given; its exit code."""
        asked = {"config": config.to_json().decode(), "kill_point": kill_point, "log": str(self.log)}
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(asked), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())


@pytest.fixture
def driver(services: Services, tmp_path: Path) -> Iterator[Driver]:
    made = Driver(services, tmp_path)
    yield made
    os.killpg(made.process.pid, signal.SIGKILL)  # and the run, when the test ended before it
    made.process.wait(10)


def committed(store: ObjectStore, run: str, step: int) -> dict[str, bytes]:
    """Every manifest of the step."""
    return {key: store.get(key) for key in store.list(step_key(run, step, "manifests/"))}


def test_killed_in_each_task_and_started_again(driver: Driver, store: ObjectStore) -> None:
    run = f"kill-{uuid.uuid4().hex[:8]}"
    for step, point in enumerate(POINTS):
        config = config_of(run, step + 1)
        code = driver.run(config, point)
        assert code == -signal.SIGKILL, f"{point}: not killed but ended with {code}\n{driver.log.read_text()}"
        before = committed(store, run, step)
        attempts_before = {
            key: store.get(key)
            for folder in ("attempts/", "merged/", "waves/")
            for key in store.list(step_key(run, step, folder))
        }
        assert next_step(store, run) == (step + 1 if point == "report:after" else step)

        code = driver.run(config)
        assert code == 0, f"{point}: the second start ended with {code}\n{driver.log.read_text()}"
        assert finished_steps(store, run) == list(range(step + 1))
        after = committed(store, run, step)
        assert before.items() <= after.items(), f"{point}: a committed manifest changed"
        kept = {key: store.get(key) for key in attempts_before}
        assert kept == attempts_before, f"{point}: a stored attempt, sample or table changed"
    _check_books(store, run)


def _check_books(store: ObjectStore, run: str) -> None:
    """Each optimizer step once, in order, on the batch its step committed; no attempt trained twice or left out."""
    ledgers = read_run(store, run)
    trained: list[str] = []
    applied = 0
    for ledger in ledgers:
        result: dict[str, Any] = orjson.loads(store.get(step_key(run, ledger.step, "train.json")))
        applied += result["status"] == "trained"
        assert result["version_after"] == applied, f"step {ledger.step} was applied more than once, or not at all"
        assert len(ledger.attempts) >= 16
        trained += ledger.trained_ids
    assert len(trained) == len(set(trained))
    assert applied > 0, "no step of this run trained anything: the test shows nothing"
