"""The soak finds what it looks for: an outcome that nothing explains, memory that grows, what is left."""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest

from rl360.bench.soak import EXPECTED, Soak
from rl360.ledger.outcomes import Outcome
from rl360.sandboxes.bubblewrap import ENV_NAME


def soaked(tmp_path: Path, **attempts: str) -> Soak:
    work = Soak(tmp_path, cast(Any, None), 1, attempts)
    work.live.mkdir(parents=True)
    return work


@pytest.mark.parametrize(
    ("struck", "outcome", "restarts", "odd"),
    [
        ("not", "passed", 0, False),
        ("not", "sandbox_lost", 0, True),
        ("not", "sandbox_lost", 1, False),
        ("not", "failed", 1, True),
        ("kill", "sandbox_lost", 0, False),
        ("kill", "passed", 0, True),
        ("hang", "verifier_timeout", 0, False),
        ("raise", "unclassified", 0, False),
        ("raise", "no reply", 1, True),
    ],
)
def test_an_outcome_that_nothing_explains(tmp_path: Path, struck: str, outcome: str, restarts: int, odd: bool) -> None:
    work = soaked(tmp_path, a=struck)
    work.replies, work.restarts = {"a": {"outcome": outcome}}, restarts
    assert work.odd() == (["a"] if odd else [])
    assert set().union(*EXPECTED.values()) <= set(Outcome)


@pytest.mark.parametrize(("restarts", "odd"), [(0, 9), (1, 6), (2, 3), (3, 0)])
def test_a_kill_of_the_server_explains_no_more_than_was_in_flight(tmp_path: Path, restarts: int, odd: int) -> None:
    work = soaked(tmp_path, **{f"a{number}": "not" for number in range(9)})
    work.replies, work.restarts = {name: {"outcome": "sandbox_lost"} for name in work.attempts}, restarts
    assert len(work.odd()) == odd


@pytest.mark.parametrize(
    ("memory", "growth"),
    [
        ([], math.inf),
        ([(100, 90.0)], math.inf),
        ([(100, 90.0), (200, 99.0)], math.inf),
        ([(100, 90.0), (200, 100.0), (300, 100.0)], 0.0),
        ([(0, 0.0), (100, 100.0), (1100, 103.0)], 3.0),
    ],
)
def test_memory_that_grows(tmp_path: Path, memory: list[tuple[int, float]], growth: float) -> None:
    work = soaked(tmp_path)
    work.memory = memory
    assert work.growth_mib() == growth


def test_what_is_left_is_counted(tmp_path: Path) -> None:
    work = soaked(tmp_path)
    assert work.left() == {"processes": 0, "cgroups": 0, "workspaces": 0}
    (work.live / "one").mkdir()
    env = {**os.environ, ENV_NAME: str(work.live / "one")}
    with subprocess.Popen(["sleep", "20"], env=env) as process:
        assert work.left() == {"processes": 1, "cgroups": 0, "workspaces": 1}
        process.kill()
