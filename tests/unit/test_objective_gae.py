"""Advantages of tokens by hand, what the filter keeps for a critic, and the fields that belong to one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rl360.config.run import ObjectiveConfig, RunConfig
from rl360.errors import BadInput
from rl360.ledger.outcomes import Bucket
from rl360.objective.filters import Decision, FilterResult, filter_groups
from rl360.objective.gae import masked_gae
from rl360.sessions.sample import AttemptRecord
from tests.unit.objective_data import attempt

GAE = ObjectiveConfig(estimator="gae")


def test_what_a_tool_said_is_no_step() -> None:
    """Two turns with an observation of two ids between them: the second turn's value follows the first's."""
    mask = np.array([[0, 1, 1, 0, 0, 1, 0]])
    values = np.array([[9.0, 0.2, 0.4, 9.0, 9.0, 0.5, 9.0]])
    advantages, returns = masked_gae(values, np.array([1.0]), mask, gamma=0.9, lam=0.5)
    last = 1.0 - 0.5
    middle = 0.9 * 0.5 - 0.4 + 0.45 * last
    first = 0.9 * 0.4 - 0.2 + 0.45 * middle
    np.testing.assert_allclose(advantages, [[0, first, middle, 0, 0, last, 0]], rtol=1e-15)
    np.testing.assert_allclose(returns, [[0, first + 0.2, middle + 0.4, 0, 0, 1.0, 0]], rtol=1e-15)
    together, _ = masked_gae(values[:, mask[0] > 0], np.array([1.0]), np.ones((1, 3)), gamma=0.9, lam=0.5)
    np.testing.assert_array_equal(advantages[mask > 0], together[0])


def test_without_discounts_an_advantage_is_the_reward_less_the_value() -> None:
    values, mask = np.array([[0.3, 0.1, 0.8]]), np.array([[1, 0, 1]])
    advantages, returns = masked_gae(values, np.array([1.0]), mask)
    np.testing.assert_allclose(advantages, [[0.7, 0.0, 0.2]], rtol=1e-15)
    np.testing.assert_allclose(returns, [[1.0, 0.0, 1.0]], rtol=1e-15)
    td, _ = masked_gae(values, np.array([1.0]), mask, lam=0.0)
    np.testing.assert_allclose(td, [[0.8 - 0.3, 0.0, 1.0 - 0.8]], rtol=1e-15)


def decided(attempts: list[AttemptRecord], config: ObjectiveConfig = GAE, **fields: Any) -> FilterResult:
    return filter_groups(attempts, config, expected_version="run:0", max_seq_len=384, **fields)


def test_every_attempt_with_a_score_trains() -> None:
    """A group that agrees, one with a single verdict, one that lost it: no baseline asks for company."""
    agree, alone = [attempt(0, 0, 1.0), attempt(0, 1, 1.0)], [attempt(1, 0, 0.0), attempt(1, 1, None)]
    result = decided([*agree, *alone])
    assert [decision.bucket for decision in result.decisions] == [Bucket.TRAINED] * 3 + [Bucket.INFRA]
    assert [decision.advantage for decision in result.decisions] == [None] * 4
    assert [decision.score for decision in result.decisions] == [1.0, 1.0, 0.0, None]
    assert [row.advantage for row in result.kept] == [1.0, 1.0, 0.0]
    assert sum(row.weight * row.trained for row in result.kept) == pytest.approx(1.0, rel=1e-12)
    assert result.tokens == {Bucket.TRAINED: 18, Bucket.INFRA: 6}
    assert [Decision.from_wire(each.to_wire()) for each in result.decisions] == list(result.decisions)
    plain = {decision.bucket for decision in decided([*agree, *alone], ObjectiveConfig()).decisions}
    assert plain == {Bucket.ZERO_DISAGREEMENT, Bucket.INSUFFICIENT_VALID, Bucket.INFRA}
    assert len(decided(alone, score_timeouts=True).kept) == 2


def test_the_other_rules_hold_and_each_leaf_carries_the_attempts_score() -> None:
    leaves = [{"trained": 4}, {"version": "run:9"}, {"trained": 2}]
    result = decided([attempt(0, 0, 0.5, leaves=leaves), attempt(0, 1, 1.0, sample=False, unmerged=7)])
    branched, broken = result.decisions
    assert branched.leaves == (Bucket.TRAINED, Bucket.STALE, Bucket.TRAINED) and broken.bucket is Bucket.PREFIX_BREAK
    assert [(row.leaf, row.advantage, row.weight) for row in result.kept] == [(0, 0.5, 1 / 6), (2, 0.5, 1 / 6)]


def test_a_penalised_pass_is_judged_by_its_score() -> None:
    record = attempt(0, 0, 1.0)
    record.agent_metrics["format_errors"] = 2
    result = decided([record], ObjectiveConfig(estimator="gae", format_error_penalty=0.25))
    assert (result.decisions[0].reward, [row.advantage for row in result.kept]) == (1.0, [0.75])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"estimator": "gae", "normalize_std": True}, "normalize_std belongs to estimator grpo; gae has its own"),
        ({"estimator": "gae", "disagreement_rtol": 0.1}, "disagreement_rtol says nothing with estimator gae: no group"),
        (
            {"estimator": "gae", "filter_on": "shaped", "format_error_penalty": 0.5},
            "filter_on says nothing with estimator gae: no group",
        ),
        ({"gamma": 0.9, "critic_lr": 1e-5}, "gamma, critic_lr says nothing with estimator grpo: only gae has a critic"),
        ({"preset": "ppo", "estimator": "rloo"}, "says nothing with estimator rloo: only gae has a critic"),
        ({"estimator": "gae", "value_clip": 0.2}, "value_clip needs critic_updates above 1: at the first one"),
        ({"estimator": "gae", "gamma": 0.0}, "objective.gamma: Input should be greater than 0"),
        ({"estimator": "gae", "gae_lambda": 1.5}, "objective.gae_lambda: Input should be less than or equal to 1"),
    ],
)
def test_fields_that_would_say_nothing_are_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInput) as error:
        RunConfig.parse({"objective": fields})
    assert why in str(error.value) and "\n" not in str(error.value)


def test_a_witness_and_a_critic_are_refused_together() -> None:
    with pytest.raises(BadInput, match=r"trainer\.witness with estimator gae would refuse steps that are right"):
        RunConfig.parse({"objective": {"preset": "ppo"}, "trainer": {"witness": True}})


def test_the_preset_is_a_critic_of_its_recipe() -> None:
    found = ObjectiveConfig(preset="ppo")
    assert (found.estimator, found.gamma, found.gae_lambda, found.whiten_advantages) == ("gae", 1.0, 0.95, True)
    assert (found.clip_low, found.clip_high, found.value_clip, found.critic_updates) == (0.2, 0.2, 0.2, 4)
