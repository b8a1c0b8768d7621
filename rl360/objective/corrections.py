"""Trainer against sampler: weights and masks for tokens whose probability the two compute differently.

d = log-prob of the trainer - log-prob the engine reported, for the trained tokens of a micro-batch. Everything here is
detached and computed from trained tokens only (`Trained` selects before any exp), and a value that is not finite stays
not finite: no mask hides it.

Sources
- truncate: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (Yao et al., 2025): TIS,
  min(w, high)
- mask, token: IcePop, "Small Leak Can Sink a Great Ship" (Ant Group, 2025) and Ring-1T, arXiv 2510.18855: w inside
  [low, high], else 0
- mask, sequence and geometric; veto: "When Speed Kills Stability" (Liu, Li et al., 2025) and what verl made of it
  (docs/algo/rollout_corr_math.md there): MIS, the ratio of the whole sequence or its geometric mean; a token below the
  veto drops its sequence
- the trainer's own log-probs as the point between sampler and update: decoupled PPO, arXiv 2110.00641, section 3
- off-policy sequence masking: DeepSeek-V3.2, arXiv 2512.02556, section 3.1
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rl360.errors import BadInput

MODES = ("truncate", "clip", "mask")
LEVELS = ("token", "sequence", "geometric")


@dataclass(frozen=True)
class Trained:
    """Where a micro-batch trains: bool `[rows, width]`, a sequence a row (or `[width]`: one sequence)."""

    mask: torch.Tensor

    def pick(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the trained tokens `[tokens]`; `values` may broadcast to the mask."""
        return values.expand(self.mask.shape)[self.mask]

    def row_sums(self, picked: torch.Tensor) -> torch.Tensor:
        """Sum by row `[rows]` of `[tokens]`, added in float64: a row's sum does not depend on the padding beside it."""
        full = torch.zeros(self.mask.shape, dtype=torch.float64, device=picked.device)
        full[self.mask] = picked.double()
        return full.sum(-1).to(picked.dtype)

    def row_means(self, picked: torch.Tensor) -> torch.Tensor:
        """Mean by row `[rows]`; 0 for a row without trained tokens."""
        return self.row_sums(picked) / self.mask.sum(-1).clamp(min=1)

    def spread(self, by_row: torch.Tensor) -> torch.Tensor:
        """Each row's value at each of its trained tokens `[tokens]`."""
        return by_row.unsqueeze(-1).expand(self.mask.shape)[self.mask]


def importance_weights(
    d: torch.Tensor, trained: Trained, *, mode: str, level: str = "token", low: float | None = None, high: float
) -> torch.Tensor:
    """Weights w `[tokens]` from d `[tokens]`, bounded by `mode`.

    level: `token` w = exp(d); `sequence` w = exp(sum of d over the row); `geometric` w = exp(mean of d over the row).
    mode: `truncate` min(w, high); `clip` w moved into [low, high]; `mask` w inside [low, high], else 0 (low None: 0).
    """
    if mode not in MODES or level not in LEVELS:
        raise BadInput(f"correction {mode!r} by {level!r} is none of {', '.join(MODES)} by {', '.join(LEVELS)}")
    if mode == "clip" and low is None:
        raise BadInput("correction clip needs a lower bound")
    d = d.detach()
    if level == "token":
        weights = torch.exp(d)
    else:
        by_row = trained.row_sums(d) if level == "sequence" else trained.row_means(d)
        weights = trained.spread(torch.exp(by_row))
    if mode == "mask":
        outside = (weights > high) if low is None else (weights > high) | (weights < low)
        return weights.masked_fill(outside, 0.0)
    return weights.clamp(min=low if mode == "clip" else None, max=high)


def vetoed(d: torch.Tensor, trained: Trained, threshold: float) -> torch.Tensor:
    """Bool `[tokens]`: the token's sequence holds one whose exp(d) is below `threshold`."""
    below = d.detach() < math.log(threshold)
    return trained.spread(trained.row_sums(below.to(d.dtype)) > 0)


def off_policy_masked(d: torch.Tensor, advantages: torch.Tensor, trained: Trained, delta: float) -> torch.Tensor:
    """Bool `[tokens]`: advantage below 0 and the sequence's mean of (engine - trainer) log-probs above `delta`."""
    drift = trained.spread(trained.row_means(-d.detach()))
    return (advantages < 0) & (drift > delta)
