"""Advantages of attempts from their rewards: one number an attempt, whatever became of its tokens.

Groups are told apart by id, never by position, and an attempt counts once, however many samples it became. Only
attempts with a verdict may be passed in: one without has no reward, so it has no place in a mean.
Sums run in the order of attempt ids, so the result is bitwise the same whatever order attempts arrived in.

Formulas (r reward, k attempts of a group, means and population deviations over the scope named):

    grpo                   r - mean(group)                     DeepSeekMath, arXiv 2402.03300, section 4.1.2,
                                                               without its division by the deviation of the group, which
                                                               weighs groups by how lopsided they are: Dr. GRPO,
                                                               arXiv 2503.20783, sections 3.1 and 3.2
      with normalize_std   (r - mean(group)) / std(group)      DeepSeekMath, same section
    rloo                   r - mean(the group's others)        RLOO, arXiv 2402.14740; Kool et al., "Buy 4 REINFORCE
                                                               Samples, Get a Baseline for Free!", 2019
    reinforce_pp           (r - mean(step)) / std(step)        REINFORCE++, arXiv 2501.03262, global normalisation
    reinforce_pp_baseline  c / std(step) of c,                 same paper, "w/ baseline"; the mean of c over the step,
                           c = r - mean(group)                 which the paper subtracts too, is 0

Deviations are divided by after adding 1e-6. A group of one has nothing to compare with: its advantage is 0 in all but
`reinforce_pp`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl360.errors import BadInput

STD_EPS = 1e-6
CRITIC = "gae"  # the estimator that is none of attempts: advantages of tokens, by the trainer (rl360.objective.gae)
ESTIMATORS = ("grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
_STEP = "step"


def scopes(estimator: str, group_ids: Sequence[str]) -> list[str]:
    """For each attempt the id shared by those its baseline is the mean of: its group's, or one for the whole step."""
    return [_STEP] * len(group_ids) if estimator == "reinforce_pp" else list(group_ids)


def group_index(group_ids: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Sorted distinct group ids, and for each attempt the index of its group, int64 `[attempts]`."""
    names = sorted(set(group_ids))
    number = dict(zip(names, range(len(names)), strict=True))
    return names, np.fromiter(map(number.__getitem__, group_ids), np.int64, len(group_ids))


def attempt_advantages(
    rewards: np.ndarray,
    group_ids: Sequence[str],
    attempt_ids: Sequence[str],
    *,
    estimator: str = "grpo",
    normalize_std: bool = False,
) -> np.ndarray:
    """Advantage of each valid attempt, float64 `[attempts]`, in the order given.

    rewards: float64 `[attempts]`, finite, one per valid attempt. `normalize_std` concerns `grpo` alone.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if estimator not in ESTIMATORS:
        raise BadInput(f"estimator {estimator!r} is none of {', '.join(ESTIMATORS)}")
    if not len(rewards) == len(group_ids) == len(attempt_ids):
        raise BadInput(
            f"{len(rewards)} rewards, {len(group_ids)} group ids, {len(attempt_ids)} attempt ids: must match"
        )
    if len(rewards) == 0:
        return rewards
    if not np.isfinite(rewards).all():
        bad = attempt_ids[int(np.flatnonzero(~np.isfinite(rewards))[0])]
        raise BadInput(f"attempt {bad}: reward is not finite; a verdict must hold a finite number")
    order = np.array(sorted(range(len(rewards)), key=attempt_ids.__getitem__))
    _, index = group_index(scopes(estimator, group_ids))
    advantages = np.empty_like(rewards)
    advantages[order] = scope_advantages(rewards[order], index[order], estimator, normalize_std)
    return advantages


def scope_advantages(rewards: np.ndarray, scope: np.ndarray, estimator: str, normalize_std: bool) -> np.ndarray:
    """The formulas on arrays: rewards float64 and the index of each one's scope (every index up to the largest occurs),
    both `[attempts]`. Sums run in the order given."""
    count = np.bincount(scope)
    centred = rewards - (np.bincount(scope, weights=rewards) / count)[scope]
    if estimator == "rloo":
        centred *= (count / np.maximum(count - 1, 1))[scope]
    elif estimator != "grpo":
        centred /= _deviations(centred, np.zeros_like(scope)) + STD_EPS
    elif normalize_std:
        centred /= _deviations(centred, scope) + STD_EPS
    return centred


def _deviations(centred: np.ndarray, scope: np.ndarray) -> np.ndarray:
    """The population deviation of each value's scope. bincount adds one after the other, so a scope's sum depends on it
    alone."""
    return np.sqrt(np.bincount(scope, weights=centred * centred) / np.bincount(scope))[scope]
