"""Baselines, advantages, GAE and reductions, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rl360.errors import BadInput
from rl360.objective.advantages import ESTIMATORS, attempt_advantages
from rl360.objective.gae import masked_gae
from rl360.objective.reductions import token_weights


def test_mean_baseline_per_group() -> None:
    rewards = np.array([1.0, 0.0, 0.5, 0.5, 2.0, 0.0])
    groups = ["a", "b", "a", "b", "b", "a"]  # groups are found by id: neither together nor of equal size
    got = attempt_advantages(rewards, groups, list("uvwxyz"))
    np.testing.assert_allclose(got, [0.5, -5 / 6, 0.0, -1 / 3, 7 / 6, -0.5], rtol=1e-15)


def test_std_switch_divides_by_the_population_deviation() -> None:
    got = attempt_advantages(np.array([1.0, 0.0, 0.0, 0.0]), ["g"] * 4, list("abcd"), normalize_std=True)
    std = np.sqrt(3) / 4
    np.testing.assert_allclose(got, np.array([0.75, -0.25, -0.25, -0.25]) / (std + 1e-6), rtol=1e-12)


def test_leave_one_out_compares_with_the_others() -> None:
    rewards, groups = np.array([1.0, 0.5, 0.0, 0.0, 3.0]), ["a", "b", "a", "a", "b"]
    got = attempt_advantages(rewards, groups, list("vwxyz"), estimator="rloo")
    np.testing.assert_allclose(got, [1.0, 0.5 - 3.0, -0.5, -0.5, 3.0 - 0.5], rtol=1e-14)


def test_reinforce_pp_normalises_over_the_step() -> None:
    got = attempt_advantages(np.array([1.0, 0.0, 1.0, 1.0]), list("aabb"), list("wxyz"), estimator="reinforce_pp")
    std = math.sqrt(3) / 4  # of 1, 0, 1, 1 around 0.75
    np.testing.assert_allclose(got, np.array([0.25, -0.75, 0.25, 0.25]) / (std + 1e-6), rtol=1e-14)


def test_reinforce_pp_baseline_centres_by_group_and_scales_by_step() -> None:
    rewards = np.array([1.0, 0.0, 1.0, 1.0])
    got = attempt_advantages(rewards, list("aabb"), list("wxyz"), estimator="reinforce_pp_baseline")
    std = math.sqrt((0.25 + 0.25) / 4)  # of 0.5, -0.5, 0, 0
    np.testing.assert_allclose(got, np.array([0.5, -0.5, 0.0, 0.0]) / (std + 1e-6), rtol=1e-14)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_rewards_give_nothing_and_no_division_by_zero(estimator: str) -> None:
    for std in (False, True):
        got = attempt_advantages(np.ones(3), ["g", "g", "h"], list("abc"), estimator=estimator, normalize_std=std)
        assert got.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_pp_baseline"])
def test_a_group_of_one_has_nothing_to_compare_with(estimator: str) -> None:
    got = attempt_advantages(np.array([1.0, 0.0, 0.7]), ["g", "g", "alone"], list("abc"), estimator=estimator)
    assert got[2] == 0.0 and got[0] > 0 > got[1]


def test_empty() -> None:
    assert attempt_advantages(np.array([]), [], []).shape == (0,)


def test_refusals() -> None:
    with pytest.raises(BadInput, match="attempt b: reward is not finite"):
        attempt_advantages(np.array([1.0, np.nan]), ["g", "g"], ["a", "b"])
    with pytest.raises(BadInput, match="must match"):
        attempt_advantages(np.array([1.0]), ["g", "g"], ["a", "b"])
    with pytest.raises(BadInput, match="estimator 'gae' is none of grpo, rloo"):
        attempt_advantages(np.array([1.0]), ["g"], ["a"], estimator="gae")


# -- generalised advantage estimation ---------------------------------------------------------------------------------


def test_gae_by_hand_steps_from_trained_token_to_trained_token() -> None:
    mask = np.array([[0, 1, 0, 1, 1, 0]])
    values = np.array([[np.nan, 0.5, np.inf, 0.2, -0.1, np.nan]])
    advantages, returns = masked_gae(values, np.array([1.0]), mask, gamma=0.9, lam=0.8)
    last = 1.0 - (-0.1)  # the reward comes at the last trained token, with no value after it
    middle = (0.9 * -0.1 - 0.2) + 0.72 * last
    first = (0.9 * 0.2 - 0.5) + 0.72 * middle
    np.testing.assert_allclose(advantages, [[0, first, 0, middle, last, 0]], rtol=1e-14)
    np.testing.assert_allclose([first, middle, last], [0.04144, 0.502, 1.1], rtol=1e-12)
    np.testing.assert_allclose(returns, [[0, 0.54144, 0, 0.702, 1.0, 0]], rtol=1e-12)


def test_gae_undiscounted_is_the_reward_less_the_value() -> None:
    mask, values = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 1]]), np.arange(9.0).reshape(3, 3)
    advantages, returns = masked_gae(values, np.array([1.0, 7.0, -2.0]), mask)
    np.testing.assert_allclose(advantages, [[1, 0, -1], [0, 0, 0], [-8, -9, -10]], rtol=1e-15)
    np.testing.assert_allclose(returns, [[1, 0, 1], [0, 0, 0], [-2, -2, -2]], rtol=1e-15)


def test_gae_with_token_rewards_and_no_critic_is_the_reward_less_the_kl_to_go() -> None:
    """The token-level penalty of REINFORCE++: r - beta * sum over i >= t of KL(i)."""
    kl, mask = np.array([[0.5, 0.0, 0.2, 0.3]]), np.array([[1, 0, 1, 1]])
    advantages, _ = masked_gae(np.zeros((1, 4)), np.array([1.0]), mask, token_rewards=-0.1 * kl)
    np.testing.assert_allclose(advantages, [[0.9, 0, 0.95, 0.97]], rtol=1e-14)


def test_gae_keeps_what_is_not_finite_in_its_row() -> None:
    values = np.array([[0.1, np.nan, 0.2], [0.1, 0.3, 0.2]])
    advantages, _ = masked_gae(values, np.array([1.0, 1.0]), np.ones((2, 3)))
    assert np.isnan(advantages[0, :2]).all() and np.isfinite(advantages[1]).all()


# -- reductions -------------------------------------------------------------------------------------------------------


def test_weights_by_hand() -> None:
    tokens = [3, 1, 0]
    np.testing.assert_array_equal(token_weights("token_mean", tokens), [1 / 4, 1 / 4, 0])
    np.testing.assert_array_equal(token_weights("sample_mean", tokens), [1 / 6, 1 / 2, 0])
    np.testing.assert_array_equal(token_weights("constant", tokens, 10), [1 / 10, 1 / 10, 0])
    for reduction in ("token_mean", "sample_mean"):
        assert token_weights(reduction, [0, 0]).tolist() == [0, 0] and token_weights(reduction, []).shape == (0,)


def test_weights_are_refused_without_a_divisor_or_a_name() -> None:
    for constant in (None, 0, -1.0, math.inf, math.nan):
        with pytest.raises(BadInput, match="needs a divisor above 0"):
            token_weights("constant", [1], constant)
    with pytest.raises(BadInput, match="reduction 'mean' is none of token_mean"):
        token_weights("mean", [1])
