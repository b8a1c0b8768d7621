"""The warm start's key, cache and checks, and the parity figures. The training itself runs in the contract tests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

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


def test_gap() -> None:
    one = [np.array([0.0, -1.0], np.float32), np.array([-2.0], np.float32)]
    two = [np.array([0.0, -1.5], np.float32), np.array([-2.25], np.float32)]
    found = gap(one, two)
    assert (found.tokens, found.maximum, found.mean) == (3, 0.5, 0.25)
    masks = [np.array([1, 1, 0], np.uint8), np.array([0, 1], np.uint8)]
    assert gap(one, two, masks).mean == 0.125
