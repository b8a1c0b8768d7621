"""Generalised advantage estimation over the trained tokens of samples, for PPO with a critic.

Source: Schulman et al., arXiv 1506.02438, section 3, equation 16: A_t = sum over l of (gamma * lambda)^l * delta_(t+l),
delta_t = r_t + gamma * V_(t+1) - V_t; as PPO uses it, arXiv 1707.06347, section 5, equations 11 and 12.

A sample's steps are the tokens under its loss mask: what lies between them (tool output, the next prompt) is part of
the environment, so neither discount counts it and "the next value" is that of the next trained token, 0 after the last.
(verl's compute_gae_advantage_return skips observations the same way.) An attempt ends in all its samples: each leaf of
a tree session is a sequence of its own, with the attempt's score at the last trained token of that leaf; so does one
that was cut, whose verdict is of what it had done by then: nothing is bootstrapped.
"""

from __future__ import annotations

import numpy as np


def masked_gae(
    values: np.ndarray,
    rewards: np.ndarray,
    mask: np.ndarray,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    token_rewards: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns (advantage + value), float64 `[rows, width]`, 0 under mask 0.

    values, mask `[rows, width]`; rewards `[rows]`, given at the last trained token of each row. token_rewards
    `[rows, width]`: rewards of single tokens besides, such as -coefficient * KL. Nothing under mask 0 is read; a value
    that is not finite spoils its own row and no other.
    """
    trained = np.asarray(mask, dtype=bool)
    value = np.where(trained, values, 0.0)
    reward = np.zeros(trained.shape) if token_rewards is None else np.where(trained, token_rewards, 0.0)
    rows, width = trained.shape
    ends = width - 1 - np.argmax(trained[:, ::-1], axis=1) if width else np.zeros(rows, np.int64)
    some = np.flatnonzero(trained.any(axis=1))
    reward[some, ends[some]] += np.asarray(rewards, dtype=np.float64)[some]
    advantages = np.zeros(trained.shape)
    following, next_value = np.zeros(rows), np.zeros(rows)
    for t in range(width - 1, -1, -1):
        now = trained[:, t]
        delta = reward[:, t] + gamma * next_value - value[:, t]
        following = np.where(now, delta + gamma * lam * following, following)
        next_value = np.where(now, value[:, t], next_value)
        advantages[:, t] = np.where(now, following, 0.0)
    return advantages, np.where(trained, advantages + value, 0.0)
