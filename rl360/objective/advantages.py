"""Group-relative advantages: reward minus the mean reward of the group's valid attempts.

Source: GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2), without its division by the group's standard deviation,
which weighs groups by how lopsided they are (Dr. GRPO, arXiv 2503.20783, section 3.1). The division is a switch.

Only attempts with a verdict may be passed in: an attempt without one has no reward, so it has no place in a mean.
Sums run in the order of (group, attempt id), so the result is bitwise the same whatever order attempts arrived in.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl360.errors import BadInput

STD_EPS = 1e-6


def group_index(group_ids: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Sorted distinct group ids, and for each attempt the index of its group, int64 `[attempts]`."""
    names, index = np.unique(np.asarray(group_ids, dtype=object).astype(str), return_inverse=True)
    return [str(name) for name in names], index.astype(np.int64)


def group_advantages(
    rewards: np.ndarray, group_ids: Sequence[str], attempt_ids: Sequence[str], *, normalize_std: bool = False
) -> np.ndarray:
    """Advantage of each valid attempt, float64 `[attempts]`, in the order given.

    rewards: float64 `[attempts]`, finite, one per valid attempt. With `normalize_std` the difference is divided by the
    group's population standard deviation + 1e-6 (GRPO's own form).
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if not len(rewards) == len(group_ids) == len(attempt_ids):
        raise BadInput(
            f"{len(rewards)} rewards, {len(group_ids)} group ids, {len(attempt_ids)} attempt ids: must match"
        )
    if len(rewards) == 0:
        return rewards
    if not np.isfinite(rewards).all():
        bad = attempt_ids[int(np.flatnonzero(~np.isfinite(rewards))[0])]
        raise BadInput(f"attempt {bad}: reward is not finite; a verdict must hold a finite number")
    _, index = group_index(group_ids)
    order = np.lexsort((np.asarray(attempt_ids, dtype=object).astype(str), index))
    ordered, ordered_index = rewards[order], index[order]
    count = np.bincount(ordered_index)
    # bincount adds one after the other, so a group's sum depends on that group alone (no pairwise blocking).
    mean = np.bincount(ordered_index, weights=ordered) / count
    centred = ordered - mean[ordered_index]
    if normalize_std:
        variance = np.bincount(ordered_index, weights=centred * centred) / count
        centred = centred / (np.sqrt(variance)[ordered_index] + STD_EPS)
    advantages = np.empty_like(centred)
    advantages[order] = centred
    return advantages
