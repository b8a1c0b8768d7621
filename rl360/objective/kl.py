"""Distance to a reference policy, from log-probs of sampled tokens: in the loss, or in the reward.

With d = log-prob of the policy - log-prob of the reference, for tokens the policy sampled (Schulman, "Approximating KL
Divergence", 2020, joschu.net/blog/kl-approx.html):

    k1            d                  unbiased, can be negative
    k2            d^2 / 2            biased value
    k3            exp(-d) - 1 + d    unbiased, never negative; GRPO's, arXiv 2402.03300, section 4.1.1, equation 4
    low_variance  k3 of d moved into [-20, 20], at most 10: what verl calls low_var_kl (core_algos.py, kl_penalty)

What each does as a loss is its own gradient, not the KL's (arXiv 2510.01555; arXiv 2506.09477): on the policy's own
samples that of k1 has mean 0, that of k2 is the gradient of KL(policy || reference), that of k3 the gradient of
KL(reference || policy), which agrees to first order in d; low_variance has none where it is bounded. As a reward only
k1 has the gradient of KL(policy || reference); the others are there because other trainers offer them (verl's
kl_penalty). The config refuses k1 in the loss: no penalty at all.

In the reward (`reward_advantages`), by estimator of the baseline:

    rloo          R = r - coefficient * sum of it (k1 in the papers) over the answer, R - mean(R of the group's others):
                  RLOO, arXiv 2402.14740, section 2; Ouyang et al., arXiv 2203.02155, equation 2
    grpo          the same R, then R - mean(R of the group), with normalize_std divided by the group's deviation of it;
                  reinforce_pp_baseline: by the step's. As verl does (algorithm.use_kl_in_reward, which any estimator
                  takes: apply_kl_penalty in ray_trainer.py); the papers of both have their KL in the loss
    reinforce_pp  A_t = r - coefficient * sum of it from t to the answer's end, then (A_t - mean) / std over all
                  trained tokens of the step: REINFORCE++, arXiv 2501.03262, equations for A, KL(t) and A^norm
    gae           r_t = -coefficient * estimate at token t, and the score at the last: Ouyang et al., arXiv 2203.02155,
                  equation 2, by token as Ziegler et al., arXiv 1909.08593, section 2.1 (rl360.training.critic)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rl360.errors import BadInput
from rl360.objective.advantages import STD_EPS, attempt_advantages
from rl360.objective.corrections import Trained

KINDS = ("k1", "k2", "k3", "low_variance")
_D_BOUND, _KL_BOUND = 20.0, 10.0


def token_kl(logprobs: torch.Tensor, reference: torch.Tensor, kind: str) -> torch.Tensor:
    """The estimate of each token, in the shape given. But for `low_variance` nothing is bounded, and in all of them
    what is not finite stays so."""
    d = logprobs - reference
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d * d
    if kind == "k3":
        return torch.exp(-d) - 1.0 + d
    if kind == "low_variance":
        near = torch.where(d.isfinite(), d.clamp(-_D_BOUND, _D_BOUND), d)
        estimate = torch.exp(-near) - 1.0 + near
        return torch.where(d.isfinite(), estimate.clamp(max=_KL_BOUND), estimate)
    raise BadInput(f"KL estimator {kind!r} is none of {', '.join(KINDS)}")


def kl_loss(
    logprobs: torch.Tensor,
    reference: torch.Tensor | None,
    mask: torch.Tensor,
    weights: torch.Tensor,
    *,
    coefficient: float,
    kind: str = "k3",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two sums over trained tokens: of weight * coefficient * KL, a term to add to the policy's loss, and of the KL
    alone, without gradient.

    All `[rows, width]`, as in `losses.policy_loss`. With coefficient 0 no reference is needed and none is read.
    """
    if coefficient == 0:
        return logprobs.new_zeros(()), logprobs.new_zeros(())
    if reference is None:
        raise BadInput(f"a KL term of coefficient {coefficient} needs the reference policy's log-probs")
    trained = Trained(mask.bool())
    new = trained.pick(logprobs)
    kl = token_kl(new, trained.pick(reference).to(new.dtype), kind)
    return coefficient * (trained.pick(weights).to(new.dtype) * kl).sum(), kl.detach().sum()


@dataclass(frozen=True)
class RowKl:
    """The KL of one sample: `total` over its trained tokens; over the sums from each of them to the end, their number,
    sum and sum of squares. float64: what ranks tell each other of their samples."""

    total: float
    tokens: int
    ahead: float
    ahead_squares: float


def kl_ahead(kl: np.ndarray, mask: np.ndarray) -> tuple[RowKl, np.ndarray]:
    """Of one sample, kl and mask `[width]`: the summary, and at each column the sum of `kl` over the trained tokens
    from there on, float64 `[width]`. Nothing under mask 0 is read."""
    trained = mask.astype(bool)
    ahead = np.cumsum(np.where(trained, kl, 0.0).astype(np.float64)[::-1])[::-1]
    at = ahead[trained]
    return RowKl(float(ahead[0]), int(at.size), float(at.sum()), float(at @ at)), ahead


def reward_advantages(
    estimator: str,
    coefficient: float,
    rows: Sequence[RowKl],
    *,
    attempt_ids: Sequence[str],
    group_ids: Sequence[str],
    scored: Mapping[str, tuple[str, float]],
    advantages: Sequence[float],
    normalize_std: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Of a step's rows (its samples that train, all of them, in order): `base` and `slope`, float64 `[rows]`, with
    which the advantage of a token of row i is base[i] + slope[i] * (sum of the KL from the token to the row's end).

    advantages: without the KL, as the filter gave them; scored: group and score of every attempt that has one, which
    estimators with a deviation need. An attempt's KL is that of all its rows. A group's baseline of the KL is of its
    attempts that train: of others nothing is computed, and they are in a deviation as if at that baseline.
    """
    plain = estimator == "rloo" or (estimator == "grpo" and not normalize_std)
    unknown = sorted(set(attempt_ids) - scored.keys())
    if unknown and not plain:
        raise BadInput(f"the batch gives no score of attempt {unknown[0]}, which {estimator} with the KL in it needs")
    if estimator != "reinforce_pp":
        group_of = dict(zip(attempt_ids, group_ids, strict=True))
        total = dict.fromkeys(sorted(group_of), 0.0)
        for name, row in zip(attempt_ids, rows, strict=True):
            total[name] -= coefficient * row.total
        if not np.isfinite([*total.values()]).all():  # for the trainer to refuse and to book
            return np.full(len(rows), np.nan), np.zeros(len(rows))
        baseline = "rloo" if estimator == "rloo" else "grpo"
        moved = _advantages({name: (group_of[name], value) for name, value in total.items()}, baseline)
        if plain:
            return np.asarray(advantages) + np.array([moved[name] for name in attempt_ids]), np.zeros(len(rows))
        centred = {n: (scored[n][0], value + moved.get(n, 0.0)) for n, value in _advantages(scored, "grpo").items()}
        final = _advantages(centred, estimator, normalize_std)
        return np.array([final[name] for name in attempt_ids]), np.zeros(len(rows))
    score = np.array([scored[name][1] for name in attempt_ids], np.float64)
    n, ahead, squares = (
        np.array([getattr(row, name) for row in rows], np.float64) for name in ("tokens", "ahead", "ahead_squares")
    )
    count = n.sum()
    mean = (n * score - coefficient * ahead).sum() / count
    # around the mean score, so that the squares lose nothing to a large one
    s = score - mean
    square = (n * s * s - 2 * coefficient * s * ahead + coefficient**2 * squares).sum() / count
    scale = np.sqrt(max(square, 0.0)) + STD_EPS
    return s / scale, np.full(len(rows), -coefficient / scale)


def _advantages(
    values: Mapping[str, tuple[str, float]], estimator: str, normalize_std: bool = False
) -> dict[str, float]:
    """Of attempts from their group and value."""
    names = sorted(values)
    groups, of = [values[name][0] for name in names], np.array([values[name][1] for name in names])
    found = attempt_advantages(of, groups, names, estimator=estimator, normalize_std=normalize_std)
    return dict(zip(names, found.tolist(), strict=True))
