"""The losses as sums that micro-batches and ranks can add: supervised, and the run's policy objective."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl360.objective.losses import policy_loss

if TYPE_CHECKING:
    from rl360.config.run import ObjectiveConfig
    from rl360.training.megatron.policy import DeviceBatch, LossSums


def supervised_sums(logprobs: torch.Tensor, entropy: torch.Tensor, batch: DeviceBatch) -> list[torch.Tensor]:
    """Negative log-likelihood of the masked tokens."""
    trained = batch.mask.bool()
    zero = logprobs.new_zeros(())
    picked = logprobs[trained]
    return [-picked.sum(), zero + picked.numel(), zero, zero, zero, zero, entropy.detach()[trained].sum()]


def policy_sums(config: ObjectiveConfig) -> LossSums:
    """The run's objective (rl360.objective.losses)."""

    def sums(logprobs: torch.Tensor, entropy: torch.Tensor, batch: DeviceBatch) -> list[torch.Tensor]:
        parts = policy_loss(
            logprobs, batch.logprobs, batch.advantages, batch.mask, config, weights=batch.weights, entropy=entropy
        )
        return [
            parts.loss_sum,
            parts.weight_sum,
            parts.clipped_sum,
            parts.importance_sum,
            parts.masked_sum,
            parts.abs_dlogp_sum,
            parts.entropy_sum,
        ]

    return sums
