"""Distance to a reference policy, from log-probs of sampled tokens: in the loss, or in the reward.

With d = log-prob of the policy - log-prob of the reference, for tokens the policy sampled (Schulman, "Approximating KL
Divergence", 2020, joschu.net/blog/kl-approx.html):

    k1  d                    unbiased, can be negative; its own gradient has mean 0: for the reward, not for the loss
    k2  d^2 / 2              biased value; its gradient is that of the KL on tokens the policy sampled
    k3  exp(-d) - 1 + d      unbiased, never negative, low variance; GRPO's, arXiv 2402.03300, section 4.1.1, equation 4
"""

from __future__ import annotations

import torch

from rl360.errors import BadInput
from rl360.objective.corrections import Trained

KINDS = ("k1", "k2", "k3")


def token_kl(logprobs: torch.Tensor, reference: torch.Tensor, kind: str) -> torch.Tensor:
    """The estimate of each token, in the shape given. Nothing is clamped: what overflows is not finite."""
    d = logprobs - reference
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d * d
    if kind == "k3":
        return torch.exp(-d) - 1.0 + d
    raise BadInput(f"KL estimator {kind!r} is none of {', '.join(KINDS)}")


def kl_loss(
    logprobs: torch.Tensor,
    reference: torch.Tensor | None,
    mask: torch.Tensor,
    weights: torch.Tensor,
    *,
    coefficient: float,
    kind: str = "k3",
) -> torch.Tensor:
    """Sum over trained tokens of weight * coefficient * KL: a term to add to the policy's loss.

    All `[rows, width]`, as in `losses.policy_loss`. With coefficient 0 no reference is needed and none is read.
    """
    if coefficient == 0:
        return logprobs.new_zeros(())
    if reference is None:
        raise BadInput(f"a KL term of coefficient {coefficient} needs the reference policy's log-probs")
    trained = Trained(mask.bool())
    new = trained.pick(logprobs)
    kl = token_kl(new, trained.pick(reference).to(new.dtype), kind)
    return coefficient * (trained.pick(weights).to(new.dtype) * kl).sum()


def rewards_with_kl(
    rewards: torch.Tensor,
    logprobs: torch.Tensor,
    reference: torch.Tensor | None,
    mask: torch.Tensor,
    coefficient: float,
) -> torch.Tensor:
    """Rewards `[rows]` less coefficient * the k1 estimate summed over each row's trained tokens: the penalty of a whole
    answer (RLOO, arXiv 2402.14740; Ouyang et al., arXiv 2203.02155, equation 2). `masked_gae` takes it by token."""
    if coefficient == 0:
        return rewards
    if reference is None:
        raise BadInput(f"a KL penalty of coefficient {coefficient} needs the reference policy's log-probs")
    trained = Trained(mask.bool())
    kl = token_kl(trained.pick(logprobs.detach()), trained.pick(reference.detach()), "k1")
    return rewards - coefficient * trained.row_sums(kl)
