"""The run's policy objective as sums that micro-batches and ranks can add."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl360.objective.kl import kl_loss
from rl360.objective.losses import policy_loss

if TYPE_CHECKING:
    from rl360.config.run import ObjectiveConfig
    from rl360.training.megatron.policy import DeviceBatch, LossSums


def counts(batch: DeviceBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and samples under the mask: counted where the loss is computed, so that the books compare two counts."""
    return batch.mask.bool().sum(), batch.mask.any(-1).sum()


def policy_sums(config: ObjectiveConfig, version: int = 0) -> LossSums:
    """The run's objective (rl360.objective.losses, .kl). version: of the weights under training, whose own log-probs
    are the old ones of tokens they sampled themselves."""

    def sums(logprobs: torch.Tensor, entropy: torch.Tensor, batch: DeviceBatch) -> list[torch.Tensor]:
        old = None
        if batch.old is not None:
            assert batch.versions is not None
            old = torch.where(batch.versions == version, logprobs.detach(), batch.old)
        parts = policy_loss(
            logprobs,
            batch.logprobs,
            batch.advantages,
            batch.mask,
            config,
            weights=batch.weights,
            entropy=entropy,
            logprobs_old=old,
        )
        term, kl = kl_loss(
            logprobs,
            batch.reference,
            batch.mask,
            batch.weights,
            coefficient=config.kl_coef,
            kind=config.kl_estimator,
        )
        return [
            parts.loss_sum + term if config.kl_in == "loss" else parts.loss_sum,
            parts.weight_sum,
            *counts(batch),
            parts.clipped_sum,
            parts.importance_sum,
            parts.masked_sum,
            parts.abs_dlogp_sum,
            parts.entropy_sum,
            kl,
        ]

    return sums
