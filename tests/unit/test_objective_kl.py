"""A KL in the reward, under every estimator that compares attempts, against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rl360.config.run import ObjectiveConfig
from rl360.errors import BadInput
from rl360.objective.advantages import STD_EPS
from rl360.objective.filters import filter_groups
from rl360.objective.kl import RowKl, reward_advantages
from tests.unit.objective_data import attempt

# One step. Group g: a scores 1, b 0, c 0.5, all train; c has two samples. Group h: d scores 1 and e 0, and f scores 1
# but does not train. Group i agrees. With a coefficient of 0.1:
#   KL of a 2, b -1, c 1 + 3, d 5, e 1, so R is a 0.8, b 0.1, c 0.1, d 0.5, e -0.1
ROWS = [("a", "g", 2.0), ("b", "g", -1.0), ("c", "g", 1.0), ("c", "g", 3.0), ("d", "h", 5.0), ("e", "h", 1.0)]
SCORED = {"a": ("g", 1.0), "b": ("g", 0.0), "c": ("g", 0.5), "d": ("h", 1.0), "e": ("h", 0.0), "f": ("h", 1.0)}
SCORED |= {"k": ("i", 1.0), "l": ("i", 1.0)}
# g: R less its mean of 1/3. h: scores less their mean of 2/3, KL less the mean over d and e of -0.3, f's not moved
CENTRED = {"a": 0.8 - 1 / 3, "b": 0.1 - 1 / 3, "c": 0.1 - 1 / 3, "d": 1 / 3 - 0.2, "e": -2 / 3 + 0.2, "f": 1 / 3}
# of all eight scored attempts, the two of group i at 0
STEP_STD = (sum(value**2 for value in CENTRED.values()) / 8) ** 0.5
GROUP_STD = {
    "g": ((0.8 - 1 / 3) ** 2 / 3 + 2 * (0.1 - 1 / 3) ** 2 / 3) ** 0.5,
    "h": ((1 / 3 - 0.2) ** 2 / 3 + (0.2 - 2 / 3) ** 2 / 3 + (1 / 3) ** 2 / 3) ** 0.5,
}
BY_HAND: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "grpo": ({"estimator": "grpo"}, CENTRED),
    "grpo by std": (
        {"estimator": "grpo", "normalize_std": True},
        {name: value / (GROUP_STD[SCORED[name][0]] + STD_EPS) for name, value in CENTRED.items()},
    ),
    "reinforce_pp_baseline": (
        {"estimator": "reinforce_pp_baseline"},
        {name: value / (STEP_STD + STD_EPS) for name, value in CENTRED.items()},
    ),
    # the others of a: b and c; of d: of scores e and f, of the KL e alone
    "rloo": (
        {"estimator": "rloo"},
        {"a": 0.8 - 0.1, "b": 0.1 - 0.45, "c": 0.1 - 0.45, "d": 1 - 0.5 - 0.4, "e": 0 - 1.0 + 0.4},
    ),
}


def without_kl(estimator: str, normalize_std: bool = False) -> dict[str, float]:
    """What the filter gives attempts of these scores, all of which train but for group i's."""
    order = sorted(SCORED)
    groups = {"g": 0, "h": 1, "i": 2}
    made = []
    for number, name in enumerate(order):
        group, score = SCORED[name]
        made.append(attempt(groups[group], number, score))
    config = ObjectiveConfig(estimator=estimator, normalize_std=normalize_std)  # type: ignore[arg-type]
    found = filter_groups(made, config, expected_version="run:0", max_seq_len=384)
    return {order[int(d.attempt_id[-5:-3])]: d.advantage for d in found.decisions if d.advantage is not None}


def moved(coefficient: float, estimator: str, **changes: Any) -> dict[str, float]:
    """By attempt; every sample of one has the same, at every token."""
    given = without_kl(estimator, changes.get("normalize_std", False))
    base, slope = reward_advantages(
        estimator,
        coefficient,
        [RowKl(kl, 1, kl, kl * kl) for _, _, kl in ROWS],
        attempt_ids=[name for name, _, _ in ROWS],
        group_ids=[group for _, group, _ in ROWS],
        advantages=[given[name] for name, _, _ in ROWS],
        **{"scored": SCORED, **changes},
    )
    assert not slope.any()
    found = dict(zip([name for name, _, _ in ROWS], base.tolist(), strict=True))
    assert all(found[name] == value for (name, _, _), value in zip(ROWS, base, strict=True))
    return found


@pytest.mark.parametrize("name", BY_HAND)
def test_the_kl_is_taken_off_the_reward_before_the_baseline(name: str) -> None:
    fields, expected = BY_HAND[name]
    found = moved(0.1, **fields)
    assert found == pytest.approx({each: expected[each] for each in found}, abs=1e-12)


@pytest.mark.parametrize("name", BY_HAND)
def test_without_a_kl_the_advantages_are_the_filters(name: str) -> None:
    fields, _ = BY_HAND[name]
    given = without_kl(**fields)
    assert moved(0.0, **fields) == pytest.approx({each: given[each] for each, _, _ in ROWS}, abs=1e-12)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae"])
def test_the_config_allows_it_with_every_estimator(estimator: str) -> None:
    config = ObjectiveConfig(estimator=estimator, kl_coef=0.1, kl_in="reward", kl_estimator="k1")  # type: ignore[arg-type]
    assert config.kl_in == "reward"


@pytest.mark.parametrize(
    "fields", [{"estimator": "grpo", "normalize_std": True}, {"estimator": "reinforce_pp_baseline"}]
)
def test_a_deviation_needs_the_scores(fields: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"the batch gives no score of attempt a, which .* needs"):
        moved(0.1, scored={}, **fields)


@pytest.mark.parametrize("name", BY_HAND)
def test_a_kl_that_is_not_finite_is_for_the_trainer_to_refuse(name: str) -> None:
    fields, _ = BY_HAND[name]
    base, slope = reward_advantages(
        fields["estimator"],
        0.1,
        [RowKl(np.inf, 1, np.inf, np.inf)],
        attempt_ids=["a"],
        group_ids=["g"],
        scored=SCORED,
        advantages=[1.0],
        normalize_std=fields.get("normalize_std", False),
    )
    assert np.isnan(base).all() and not slope.any()
