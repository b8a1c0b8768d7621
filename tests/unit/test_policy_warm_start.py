"""The warm start's key, cache and checks, and the parity figures. The training itself runs in the contract tests."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rl360.commands.model import patient
from rl360.errors import BadInput, CorruptObject
from rl360.policy.parity import gap
from rl360.policy.warm_start import RECORD, WEIGHTS, Recipe, ensure_warm_start, warm_start_key


def _planted(home: Path, seed: int, recipe: Recipe, weights: bytes) -> Path:
    folder = home / "models" / f"warm-{seed}-{warm_start_key(seed, recipe)[:16]}"
    folder.mkdir(parents=True)
    (folder / WEIGHTS).write_bytes(weights)
    (folder / RECORD).write_text(json.dumps({"weights_sha256": hashlib.sha256(b"weights").hexdigest()}))
    return folder


def test_key_names_seed_and_recipe() -> None:
    keys = {warm_start_key(seed, recipe) for seed in (0, 1) for recipe in (Recipe(), Recipe(steps=3), Recipe(lr=7e-4))}
    assert len(keys) == 6
    assert warm_start_key(0, Recipe()) == warm_start_key(0, Recipe())


def test_a_whole_warm_start_is_used_again(tmp_path: Path) -> None:
    planted = _planted(tmp_path, 5, Recipe(), b"weights")
    assert ensure_warm_start(5, tmp_path) == planted


def test_changed_weights_are_refused(tmp_path: Path) -> None:
    _planted(tmp_path, 5, Recipe(), b"other weights")
    with pytest.raises(CorruptObject, match="delete the directory"):
        ensure_warm_start(5, tmp_path)


def test_half_a_directory_is_refused(tmp_path: Path) -> None:
    (_planted(tmp_path, 5, Recipe(), b"weights") / RECORD).unlink()
    with pytest.raises(CorruptObject, match="not a whole warm start"):
        ensure_warm_start(5, tmp_path)


def test_bad_values_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="steps 0"):
        Recipe(steps=0)
    with pytest.raises(BadInput, match="seed -1"):
        ensure_warm_start(-1, tmp_path)


def test_a_long_silence_is_broken_and_no_other() -> None:
    said: list[str] = []
    with patient(said.append, every_s=0.1) as say:
        say("one")
        time.sleep(0.25)
    assert said[0] == "one" and said[1].startswith("warm start: at it for 0 s") and len(said) <= 3
    with patient(said.append) as say:
        say("quick")
    assert said[-1] == "quick"


def test_threads_that_wait_sleep_and_progress_says_what_is_left(tmp_path: Path) -> None:
    """In a process of its own: the setting counts before torch is imported, and the commands do not import it."""
    code = f"""
import os, sys
sys.argv = ["rl360"]
import rl360.commands.demo, rl360.commands.model
from rl360.policy import warm_start
assert "torch" not in sys.modules
warm_start.SAY_S = 0.0
recipe = warm_start.Recipe(demonstrations=32, steps=3, batch_size=8)
warm_start.build_warm_start(0, recipe, __import__("pathlib").Path({str(tmp_path / "made")!r}), print)
print(os.environ["OMP_WAIT_POLICY"])
"""
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    drawing, first, second, last, policy = done.stdout.splitlines()
    assert policy == "PASSIVE" and drawing.startswith("warm start: drawing 32"), done.stderr
    assert re.fullmatch(r"warm start: step 1 of 3, loss [\d.]+, \d+ s", first), "one step is nothing to go by"
    assert re.fullmatch(r"warm start: step 2 of 3, loss [\d.]+, \d+ s, about \d+ s left", second)
    assert re.fullmatch(r"warm start: step 3 of 3, loss [\d.]+, \d+ s", last)


def test_gap() -> None:
    one = [np.array([0.0, -1.0], np.float32), np.array([-2.0], np.float32)]
    two = [np.array([0.0, -1.5], np.float32), np.array([-2.25], np.float32)]
    found = gap(one, two)
    assert (found.tokens, found.maximum, found.mean) == (3, 0.5, 0.25)
    masks = [np.array([1, 1, 0], np.uint8), np.array([0, 1], np.uint8)]
    assert gap(one, two, masks).mean == 0.125
