"""Baselines and advantages, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rl360.errors import BadInput
from rl360.objective.advantages import group_advantages


def test_mean_baseline_per_group() -> None:
    rewards = np.array([1.0, 0.0, 0.5, 0.5, 2.0, 0.0])
    groups = ["a", "b", "a", "b", "b", "a"]
    got = group_advantages(rewards, groups, list("uvwxyz"))
    np.testing.assert_allclose(got, [0.5, -5 / 6, 0.0, -1 / 3, 7 / 6, -0.5], rtol=1e-15)


def test_std_switch_divides_by_the_population_deviation() -> None:
    got = group_advantages(np.array([1.0, 0.0, 0.0, 0.0]), ["g"] * 4, list("abcd"), normalize_std=True)
    std = np.sqrt(3) / 4
    np.testing.assert_allclose(got, np.array([0.75, -0.25, -0.25, -0.25]) / (std + 1e-6), rtol=1e-12)


def test_std_of_equal_rewards_is_no_division_by_zero() -> None:
    assert group_advantages(np.array([1.0, 1.0]), ["g", "g"], ["a", "b"], normalize_std=True).tolist() == [0.0, 0.0]


def test_empty() -> None:
    assert group_advantages(np.array([]), [], []).shape == (0,)


def test_refusals() -> None:
    with pytest.raises(BadInput, match="attempt b: reward is not finite"):
        group_advantages(np.array([1.0, np.nan]), ["g", "g"], ["a", "b"])
    with pytest.raises(BadInput, match="must match"):
        group_advantages(np.array([1.0]), ["g", "g"], ["a", "b"])
