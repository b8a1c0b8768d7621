"""Token-level clipped policy loss with truncated importance sampling. Pure torch: no I/O, no torch.distributed.

`policy_loss` returns *sums* over the trained tokens it was given, never means: the caller adds micro-batches and ranks
and divides once by the step's number of trained tokens, so the loss does not depend on how a batch was split.

Sources
- token-level aggregation over the whole batch: DAPO (arXiv 2503.14476), section 3.3
- asymmetric clip range (low 0.2, high 0.28): DAPO, section 3.1
- clipped surrogate: PPO (arXiv 1707.06347), section 3
- truncated importance sampling between sampler and trainer: "Your Efficient RL Framework Secretly Brings You
  Off-Policy RL Training" (Yao et al., 2025), the `TIS` correction min(pi_train / pi_sampler, C)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rl360.errors import BadInput

if TYPE_CHECKING:
    from rl360.config.run import ObjectiveConfig


@dataclass(frozen=True)
class LossParts:
    """Sums over the trained tokens of one micro-batch; every field is a scalar tensor in the dtype of the log-probs.

    Only `loss_sum` carries a gradient. Add the parts of all micro-batches, then divide by `weight_sum`.
    """

    loss_sum: torch.Tensor
    weight_sum: torch.Tensor
    clipped_sum: torch.Tensor
    tis_sum: torch.Tensor
    abs_dlogp_sum: torch.Tensor
    entropy_sum: torch.Tensor

    def __add__(self, other: LossParts) -> LossParts:
        return LossParts(**{name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__})


def policy_loss(
    logprobs_new: torch.Tensor,
    logprobs_rollout: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: ObjectiveConfig,
    entropy: torch.Tensor | None = None,
) -> LossParts:
    """Loss numerator and metric sums over the tokens where `mask` is 1.

    Shapes: all `[tokens]` (any common shape works; `advantages` may broadcast to it).
    logprobs_new: log pi_theta of the sampled ids, carries the gradient. logprobs_rollout: what the engine reported.
    mask: 1 on tokens that train, 0 elsewhere; values under mask 0 are never read, so they may hold anything.
    entropy: per-token entropy, only for the metric.

    Per trained token, with r = exp(new - old):  -w * min(r * A, clip(r, 1 - low, 1 + high) * A)
    - old_policy "recomputed": old = new.detach() (one optimizer step a batch, so r is exactly 1 and carries the
      gradient) and w = min(exp(old - rollout), cap), detached, corrects for the sampler's different numerics
      (cap None: w = 1).
    - old_policy "rollout": old = rollout log-probs. r itself already is the correction, so w = 1: never applied twice.
    """
    if not logprobs_new.shape == logprobs_rollout.shape == mask.shape:
        shapes = f"new {tuple(logprobs_new.shape)}, rollout {tuple(logprobs_rollout.shape)}, mask {tuple(mask.shape)}"
        raise BadInput(f"log-probs and mask must have one shape, got {shapes}")
    trained = mask.bool()
    # Select before any exp: NaN or inf under mask 0 would otherwise reach the gradient as 0 * inf.
    new = logprobs_new[trained]
    rollout = logprobs_rollout[trained].to(new.dtype)
    advantage = advantages.expand(logprobs_new.shape)[trained].to(new.dtype)
    old, tis = _old_policy(new, rollout, config)

    ratio = torch.exp(new - old)
    clipped_ratio = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    plain, clipped = ratio * advantage, clipped_ratio * advantage
    token_loss = -tis * torch.minimum(plain, clipped)
    seen = new.detach()
    return LossParts(
        loss_sum=token_loss.sum(),
        weight_sum=torch.ones_like(seen).sum(),
        clipped_sum=(clipped < plain).detach().to(seen.dtype).sum(),
        tis_sum=tis.sum(),
        abs_dlogp_sum=(seen - rollout).abs().sum(),
        entropy_sum=seen.new_zeros(()) if entropy is None else entropy.detach()[trained].to(seen.dtype).sum(),
    )


def _old_policy(new: torch.Tensor, rollout: torch.Tensor, config: ObjectiveConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the old policy and the detached TIS weight, both `[trained tokens]`."""
    if config.old_policy == "rollout":
        return rollout, torch.ones_like(rollout)
    old = new.detach()
    if config.tis_cap is None:
        return old, torch.ones_like(old)
    return old, torch.exp(old - rollout).clamp(max=config.tis_cap)
