"""The policy loss of a micro-batch, token by token. Pure torch: no I/O, no torch.distributed.

`policy_loss` returns *sums* over the trained tokens it was given, never means: the caller adds micro-batches and ranks
and divides once by a number known before the first forward pass, so the loss does not depend on how a batch was split.

Three policies have names. *rollout*: what the engine sampled from, by the log-probs it reported. *old*: what the ratio
r = pi_new / pi_old is taken against. *new*: the one that is trained. Where old and rollout differ, an importance weight
(rl360.objective.corrections) stands for old / rollout; where they are one, the ratio already is that correction.

Sources
- clipped surrogate: PPO, arXiv 1707.06347, section 3, equation 7; entropy bonus: section 5, equation 9
- two clip bounds: DAPO, arXiv 2503.14476, section 3.1; bound of bad tokens (dual clip): arXiv 1912.09729, equation 5
- one ratio a sequence: GSPO, arXiv 2507.18071, sections 4.1 and 4.3 (in its GSPO-token form)
- clipped weight instead of a clipped update: CISPO, MiniMax-M1, arXiv 2506.13585, section 3.1, equations 4 and 5
- clipped value loss: arXiv 2005.12729 (what PPO's code does and its paper does not say)

A trained token whose advantage or log-prob (new or rollout) is not finite makes one of the sums not finite, whatever
masks and bounds are on; the trainer then refuses the step. Ratios are not clamped beyond what the formulas say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rl360.errors import BadInput
from rl360.objective.corrections import Trained, importance_weights, off_policy_masked, vetoed

if TYPE_CHECKING:
    from rl360.config.run import ObjectiveConfig


@dataclass(frozen=True)
class LossParts:
    """Sums over the trained tokens of one micro-batch, scalar tensors. Only `loss_sum` carries a gradient.

    loss_sum: of weight * token loss; weight_sum: of the weights. The others are plain sums, for means over tokens:
    tokens the clip held, importance weights, tokens a correction left without weight, |trainer - engine| log-probs,
    entropy.
    """

    loss_sum: torch.Tensor
    weight_sum: torch.Tensor
    clipped_sum: torch.Tensor
    importance_sum: torch.Tensor
    masked_sum: torch.Tensor
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
    *,
    weights: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    logprobs_old: torch.Tensor | None = None,
) -> LossParts:
    """Loss numerator and metric sums over the tokens where `mask` is 1.

    Shapes: `[rows, width]`, a sequence a row (or `[width]`: one); `advantages`, `weights` and `entropy` may broadcast.
    logprobs_new: log pi_new of the sampled ids, carries the gradient. logprobs_rollout: what the engine reported.
    mask: 1 on tokens that train, 0 elsewhere; values under mask 0 are never read, so they may hold anything.
    weights: of each token in the loss (rl360.objective.reductions, in any unit); None: 1. entropy: per token, for the
    metric, and with `entropy_coef` for the bonus, which needs its gradient.
    logprobs_old: the old policy's, from a copy kept before the first of several optimizer steps. None: what
    `old_policy` names, "rollout" or "recomputed"; the latter is new.detach(), which is it exactly when a batch gets one
    optimizer step: then r is 1 and carries the gradient.
    """
    if not logprobs_new.shape == logprobs_rollout.shape == mask.shape:
        shapes = f"new {tuple(logprobs_new.shape)}, rollout {tuple(logprobs_rollout.shape)}, mask {tuple(mask.shape)}"
        raise BadInput(f"log-probs and mask must have one shape, got {shapes}")
    # Select before any exp: NaN or inf under mask 0 would otherwise reach the gradient as 0 * inf.
    trained = Trained(mask.bool())
    new = trained.pick(logprobs_new)
    seen = new.detach()
    rollout = trained.pick(logprobs_rollout).to(new.dtype)
    advantage = trained.pick(advantages).to(new.dtype)
    if logprobs_old is not None:
        old = trained.pick(logprobs_old).detach().to(new.dtype)
    else:
        old = rollout if config.old_policy == "rollout" else seen
    importance = _importance(old - rollout, seen - rollout, advantage, trained, config)

    if config.loss == "cispo":
        surrogate, clipped = cispo(new, old, advantage, config.clip_low, config.clip_high)
    else:
        ratio = torch.exp(new - old) if config.loss == "ppo" else sequence_ratio(new, old, trained)
        surrogate, clipped = ppo_clip(ratio, advantage, config.clip_low, config.clip_high, config.dual_clip)
    token_loss = importance * surrogate
    spread = None if entropy is None else trained.pick(entropy).to(new.dtype)
    if config.entropy_coef:
        if spread is None:
            raise BadInput(f"entropy_coef {config.entropy_coef} needs the entropy of each token")
        token_loss = token_loss - config.entropy_coef * spread
    if weights is None:
        weight = torch.ones_like(seen)
    else:
        weight = trained.pick(weights).to(new.dtype)
    return LossParts(
        loss_sum=(weight * token_loss).sum(),
        weight_sum=weight.double().sum(),
        clipped_sum=clipped.to(seen.dtype).sum(),
        importance_sum=importance.sum(),
        masked_sum=(importance == 0).to(seen.dtype).sum(),
        abs_dlogp_sum=(seen - rollout).abs().sum(),
        entropy_sum=seen.new_zeros(()) if spread is None else spread.detach().sum(),
    )


def _importance(
    d_old: torch.Tensor, d_new: torch.Tensor, advantage: torch.Tensor, trained: Trained, config: ObjectiveConfig
) -> torch.Tensor:
    """Detached weight of each trained token `[tokens]`, 0 where a correction drops it.

    d_old, d_new: log-probs of the old and of the new policy less the engine's.
    """
    if config.correction == "off":
        weights = torch.ones_like(d_new)
    else:
        weights = importance_weights(
            d_old,
            trained,
            mode=config.correction,
            level=config.correction_level,
            low=config.correction_low,
            high=config.correction_high,
        )
    if config.veto is not None:
        weights = weights.masked_fill(vetoed(d_new, trained, config.veto), 0.0)
    if config.off_policy_delta is not None:
        weights = weights.masked_fill(off_policy_masked(d_new, advantage, trained, config.off_policy_delta), 0.0)
    return weights


def ppo_clip(
    ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float, dual: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss -min(r * A, clip(r, 1 - low, 1 + high) * A) and whether a bound held it, both `[tokens]`.

    dual: where A < 0 the loss goes no higher than -dual * A: a bad token that became far more likely pulls no harder.
    """
    plain, clipped = ratio * advantage, ratio.clamp(1.0 - low, 1.0 + high) * advantage
    kept, held = torch.minimum(plain, clipped), clipped < plain
    if dual is not None:
        bound = dual * advantage
        over = (advantage < 0) & (kept < bound)
        kept, held = torch.where(over, bound, kept), held | over
    return -kept, held.detach()


def sequence_ratio(new: torch.Tensor, old: torch.Tensor, trained: Trained) -> torch.Tensor:
    """GSPO's ratio `[tokens]`: its value is s = exp(mean over the row's trained tokens of new - old), the same at each
    token of a row; its gradient at a token is s times that token's own, so a row of equal weights and advantages gets
    exactly the gradient of GSPO's sequence term."""
    s = trained.spread(trained.row_means((new - old).detach()))
    return torch.exp(s + (new - new.detach()))


def cispo(
    new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss -stop_gradient(clip(r, 1 - low, 1 + high)) * A * new and whether the clip moved r, both `[tokens]`: every
    token keeps a gradient. low 1 is no lower bound."""
    ratio = torch.exp(new.detach() - old)
    weight = ratio.clamp(1.0 - low, 1.0 + high)
    return -weight * advantage * new, weight != ratio


def value_loss(
    values: torch.Tensor,
    values_old: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    weights: torch.Tensor,
    clip: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over trained tokens of weight * max((V - R)^2, (V_clipped - R)^2) / 2, for a critic, and how many of them
    V_clipped held; all `[rows, width]`.

    V_clipped: V moved to within `clip` of the value it had when advantages were computed; None: V itself.
    """
    trained = Trained(mask.bool())
    value, old, goal, weight = (trained.pick(each) for each in (values, values_old.detach(), returns, weights))
    moved = value - old
    # V itself within the bound: by way of old it would be V rounded, and seem held
    near = value if clip is None else torch.where(moved.abs() > clip, old + clip * moved.sign(), value)
    plain, clipped = (value - goal).square(), (near - goal).square()
    return 0.5 * (weight * torch.maximum(plain, clipped)).sum(), (clipped > plain).sum()
