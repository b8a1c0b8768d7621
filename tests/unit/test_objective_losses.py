"""Every loss by hand, its clip boundaries, and its gradient against finite differences in float64."""

from __future__ import annotations

import math

import pytest
import torch

from rl360.config.run import ObjectiveConfig
from rl360.errors import BadInput
from rl360.objective.corrections import Trained
from rl360.objective.losses import LossParts, cispo, policy_loss, ppo_clip, sequence_ratio, value_loss

RECOMPUTED = ObjectiveConfig()
ROLLOUT = ObjectiveConfig(old_policy="rollout", correction="off")
GSPO, CISPO = ObjectiveConfig(preset="gspo", clip_low=0.01, clip_high=0.02), ObjectiveConfig(preset="cispo")


def f64(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def test_recomputed_by_hand() -> None:
    new = f64(-1.0, -2.0, -0.5, grad=True)
    rollout = f64(-1.2, -1.0, -0.5)
    parts = policy_loss(new, rollout, f64(0.75, -0.25, 9.0), f64(1, 1, 0), RECOMPUTED, entropy=f64(0.5, 0.7, 9.0))
    weights = [math.exp(0.2), math.exp(-1.0)]
    assert parts.loss_sum.item() == pytest.approx(-(weights[0] * 0.75 - weights[1] * 0.25))
    assert parts.weight_sum.item() == 2
    assert parts.importance_sum.item() == pytest.approx(sum(weights))
    assert parts.abs_dlogp_sum.item() == pytest.approx(1.2)
    assert parts.entropy_sum.item() == pytest.approx(1.2)
    assert parts.clipped_sum.item() == 0
    parts.loss_sum.backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, f64(-weights[0] * 0.75, weights[1] * 0.25, 0.0))


def test_the_weight_is_truncated_and_can_be_off() -> None:
    new, rollout = f64(-1.0), f64(-5.0)
    assert policy_loss(new, rollout, f64(1.0), f64(1), RECOMPUTED).importance_sum.item() == 2.0
    off = ObjectiveConfig(correction="off")
    assert policy_loss(new, rollout, f64(1.0), f64(1), off).importance_sum.item() == 1.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.5, 1.0, -1.28, 0.0, 1),  # too far up with a good token: held at 1 + clip_high, no gradient
        (1.25, 1.0, -1.25, -1.25, 0),  # between 1.2 and 1.28: the asymmetric part still learns
        (0.5, 1.0, -0.5, -0.5, 0),  # a good token below the range is pulled back up
        (0.5, -1.0, 0.8, 0.0, 1),  # far enough down with a bad token: held at 1 - clip_low
        (1.5, -1.0, 1.5, 1.5, 0),  # a bad token above the range is pushed down
        (0.9, -1.0, 0.9, 0.9, 0),
    ],
)
def test_rollout_ratio_is_clipped_asymmetrically(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: int
) -> None:
    new = f64(-1.0 + math.log(ratio), grad=True)
    parts = policy_loss(new, f64(-1.0), f64(advantage), f64(1), ROLLOUT)
    parts.loss_sum.backward()
    assert parts.loss_sum.item() == pytest.approx(loss)
    assert new.grad is not None and new.grad.item() == pytest.approx(gradient)
    assert parts.clipped_sum.item() == clipped
    assert parts.importance_sum.item() == 1.0  # the ratio already corrects: no second weight


def test_gradient_matches_finite_differences() -> None:
    generator = torch.Generator().manual_seed(3)
    rollout = -torch.rand(40, dtype=torch.float64, generator=generator) * 3 - 0.1
    new = (rollout + 0.3 * torch.randn(40, dtype=torch.float64, generator=generator)).requires_grad_()
    advantages = torch.randn(40, dtype=torch.float64, generator=generator)
    mask = (torch.rand(40, generator=generator) > 0.3).to(torch.uint8)

    def loss(values: torch.Tensor) -> torch.Tensor:
        return policy_loss(values, rollout, advantages, mask, ROLLOUT).loss_sum

    assert torch.autograd.gradcheck(loss, (new,), eps=1e-7, atol=1e-6)


def test_recomputed_gradient_matches_finite_differences_of_the_frozen_surrogate() -> None:
    # old = new.detach() moves with `new`, so the surrogate is differentiated with old and the weight held fixed.
    generator = torch.Generator().manual_seed(5)
    rollout = -torch.rand(30, dtype=torch.float64, generator=generator) - 0.1
    old = rollout + 0.2 * torch.randn(30, dtype=torch.float64, generator=generator)
    advantages = torch.randn(30, dtype=torch.float64, generator=generator)
    new = old.clone().requires_grad_()
    policy_loss(new, rollout, advantages, torch.ones(30), RECOMPUTED).loss_sum.backward()
    weight = torch.exp(old - rollout).clamp(max=2.0)

    def surrogate(values: torch.Tensor) -> float:
        return float(-(weight * torch.exp(values - old) * advantages).sum())

    step = 1e-6
    numeric = torch.stack(
        [
            f64((surrogate(old + step * unit) - surrogate(old - step * unit)) / (2 * step)).squeeze()
            for unit in torch.eye(30, dtype=torch.float64)
        ]
    )
    assert new.grad is not None
    torch.testing.assert_close(new.grad, numeric, rtol=1e-6, atol=1e-8)


def test_what_lies_under_mask_zero_is_never_read() -> None:
    new = torch.tensor([-1.0, math.nan, -math.inf], dtype=torch.float64, requires_grad=True)
    parts = policy_loss(new, f64(-1.0, math.inf, math.nan), f64(0.5, math.nan, 1.0), f64(1, 0, 0), RECOMPUTED)
    parts.loss_sum.backward()
    assert parts.loss_sum.item() == -0.5
    assert new.grad is not None and new.grad.tolist() == [-0.5, 0.0, 0.0]


def test_nothing_to_train_is_zero_with_a_zero_gradient() -> None:
    new = f64(-1.0, grad=True)
    parts = policy_loss(new, f64(-1.0), f64(1.0), f64(0), RECOMPUTED)
    parts.loss_sum.backward()
    assert parts.loss_sum.item() == 0 and parts.weight_sum.item() == 0
    assert new.grad is not None and new.grad.item() == 0


def test_parts_add_up_and_shapes_are_checked() -> None:
    one = policy_loss(f64(-1.0), f64(-1.5), f64(1.0), f64(1), RECOMPUTED)
    both = one + one
    assert both.loss_sum.item() == 2 * one.loss_sum.item() and both.weight_sum.item() == 2
    with pytest.raises(BadInput, match="must have one shape"):
        policy_loss(f64(-1.0, -1.0), f64(-1.5), f64(1.0), f64(1), RECOMPUTED)


def grad_of(parts: LossParts, new: torch.Tensor) -> list[float]:
    parts.loss_sum.backward()
    assert new.grad is not None
    return new.grad.tolist()


# -- weights, entropy, a kept old policy ------------------------------------------------------------------------------


def test_weights_weigh_the_loss_and_nothing_else() -> None:
    new = f64(-1.0, -2.0, -3.0, grad=True)
    rollout, advantages, mask = f64(-1.0, -2.0, -3.0), f64(1.0, -2.0, 4.0), f64(1, 1, 0)
    parts = policy_loss(
        new, rollout, advantages, mask, RECOMPUTED, weights=f64(0.5, 0.25, math.nan), entropy=f64(1, 2, 3)
    )
    assert parts.loss_sum.item() == -0.5 * 1.0 + 0.25 * 2.0
    assert parts.weight_sum.item() == 0.75
    assert (parts.importance_sum.item(), parts.masked_sum.item(), parts.entropy_sum.item()) == (2, 0, 3)
    assert grad_of(parts, new) == [-0.5, 0.5, 0.0]


def test_entropy_bonus_by_hand_and_by_finite_differences() -> None:
    bonus = ObjectiveConfig(entropy_coef=0.1)
    new, entropy = f64(-1.0, -2.0, grad=True), f64(0.5, 0.7, grad=True)
    parts = policy_loss(
        new, f64(-1.0, -2.0), f64(1.0, -1.0), f64(1, 1), bonus, weights=f64(0.25, 0.75), entropy=entropy
    )
    parts.loss_sum.backward()
    assert parts.loss_sum.item() == pytest.approx(-0.25 + 0.75 - 0.1 * (0.25 * 0.5 + 0.75 * 0.7))
    assert entropy.grad is not None and entropy.grad.tolist() == pytest.approx([-0.025, -0.075])
    assert parts.entropy_sum.item() == pytest.approx(1.2) and not parts.entropy_sum.requires_grad
    with pytest.raises(BadInput, match=r"entropy_coef 0\.1 needs the entropy"):
        policy_loss(new, f64(-1.0, -2.0), f64(1.0, -1.0), f64(1, 1), bonus)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        logprobs = logits.log_softmax(-1)
        spread = -(logprobs.exp() * logprobs).sum(-1)
        held = ObjectiveConfig(entropy_coef=0.1, old_policy="rollout", correction="off")
        return policy_loss(logprobs[:, 0], f64(-1.0, -1.2), f64(1.0, -1.0), f64(1, 1), held, entropy=spread).loss_sum

    logits = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(4), requires_grad=True)
    assert torch.autograd.gradcheck(loss, (logits,))


def test_a_kept_old_policy_has_its_own_ratio_and_weight() -> None:
    """Three policies: rollout -1.2, old -1.0, new -0.9 (decoupled PPO)."""
    new, old = f64(-0.9, grad=True), f64(-1.0, grad=True)
    parts = policy_loss(new, f64(-1.2), f64(0.5), f64(1), RECOMPUTED, logprobs_old=old)
    weight, ratio = math.exp(0.2), math.exp(0.1)
    assert parts.loss_sum.item() == pytest.approx(-weight * ratio * 0.5)
    assert parts.importance_sum.item() == pytest.approx(weight)
    assert parts.abs_dlogp_sum.item() == pytest.approx(0.3)
    assert grad_of(parts, new) == pytest.approx([-weight * ratio * 0.5])
    assert old.grad is None


# -- bounds of a bad token --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (4.0, -1.0, 3.0, 0.0, 1),  # above the bound: held at 3, no gradient
        (2.9, -1.0, 2.9, 2.9, 0),  # below it: as PPO
        (0.5, -1.0, 0.8, 0.0, 1),  # the lower clip still holds
        (4.0, 1.0, -1.28, 0.0, 1),  # good tokens are bounded by the clip alone
    ],
)
def test_dual_clip(ratio: float, advantage: float, loss: float, gradient: float, clipped: int) -> None:
    config = ObjectiveConfig(old_policy="rollout", correction="off", dual_clip=3.0)
    new = f64(-1.0 + math.log(ratio), grad=True)
    parts = policy_loss(new, f64(-1.0), f64(advantage), f64(1), config)
    assert (parts.loss_sum.item(), parts.clipped_sum.item()) == (pytest.approx(loss), clipped)
    assert grad_of(parts, new) == pytest.approx([gradient])


# -- one ratio a sequence ---------------------------------------------------------------------------------------------


def test_gspo_by_hand() -> None:
    """Rows of ratios (1.1, -, 0.9) and (1.2, 1.1): s = sqrt(0.99) and sqrt(1.32)."""
    logs = torch.tensor([[1.1, 7.0, 0.9], [1.2, 1.1, 7.0]], dtype=torch.float64).log()
    mask, rollout = torch.tensor([[1, 0, 1], [1, 1, 0]]), torch.full((2, 3), -2.0, dtype=torch.float64)
    new = (rollout + logs).requires_grad_()
    weights = torch.tensor([[0.25], [0.25]], dtype=torch.float64)  # 1 / (2 sequences * 2 tokens)
    parts = policy_loss(new, rollout, torch.tensor([[2.0], [0.5]]), mask, GSPO, weights=weights)
    s = math.sqrt(0.99)  # inside [0.99, 1.02]; sqrt(1.32) is above it and good: held at 1.02
    assert parts.loss_sum.item() == pytest.approx(-(s * 2.0 + 1.02 * 0.5) / 2)
    assert parts.clipped_sum.item() == 2, "a sequence is clipped as a whole"
    parts.loss_sum.backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, f64(-s * 2.0 / 4, 0, -s * 2.0 / 4, 0, 0, 0).reshape(2, 3))


def test_gspo_is_the_sequence_objective_of_its_paper() -> None:
    """Mean over sequences of min(s A, clip(s) A), s = exp(mean log-ratio), written out and differentiated as it is."""
    generator = torch.Generator().manual_seed(9)
    rollout = -torch.rand(4, 6, dtype=torch.float64, generator=generator) - 0.1
    noise = 0.03 * torch.randn(4, 6, dtype=torch.float64, generator=generator)
    mask = torch.rand(4, 6, generator=generator) > 0.3
    mask[:, 0] = True
    advantages = torch.randn(4, 1, dtype=torch.float64, generator=generator)
    weights = 1.0 / (4 * mask.sum(-1, keepdim=True).double())
    new, plain = (rollout + noise).requires_grad_(), (rollout + noise).requires_grad_()
    parts = policy_loss(new, rollout, advantages, mask, GSPO, weights=weights)
    parts.loss_sum.backward()
    s = ((plain - rollout) * mask).sum(-1).div(mask.sum(-1)).exp()
    a = advantages[:, 0]
    objective = torch.minimum(s * a, s.clamp(0.99, 1.02) * a).mean()
    (-objective).backward()
    assert parts.loss_sum.item() == pytest.approx(-objective.item(), rel=1e-12)
    assert new.grad is not None and plain.grad is not None
    torch.testing.assert_close(new.grad, plain.grad, rtol=1e-12, atol=1e-15)

    def loss(values: torch.Tensor) -> torch.Tensor:
        return policy_loss(values, rollout, advantages, mask, GSPO, weights=weights).loss_sum

    assert torch.autograd.gradcheck(loss, (new,), eps=1e-7, atol=1e-6)


def test_a_sequence_ratio_is_one_number_a_row() -> None:
    trained = Trained(torch.tensor([[True, True], [True, False]]))
    ratio = sequence_ratio(f64(-1.0, -2.0, -3.0), f64(-1.2, -2.4, -3.5), trained)
    assert ratio.tolist() == pytest.approx([math.exp(0.3), math.exp(0.3), math.exp(0.5)])


# -- clipped weight ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "weight", "clipped"), [(6.0, 5.0, 1), (4.9, 4.9, 0), (0.01, 0.01, 0)]
)  # the preset: no lower bound, 5 above
@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_cispo_clips_the_weight_and_every_token_learns(
    ratio: float, weight: float, clipped: int, advantage: float
) -> None:
    new = f64(-8.0 + math.log(ratio), grad=True)
    parts = policy_loss(new, f64(-8.0), f64(advantage), f64(1), CISPO)
    assert parts.loss_sum.item() == pytest.approx(-weight * advantage * new.item())
    assert parts.clipped_sum.item() == clipped
    assert grad_of(parts, new) == pytest.approx([-weight * advantage])


def test_cispo_gradient_matches_finite_differences_with_the_weight_held() -> None:
    old, advantage = f64(-1.0, -2.0, -0.5), f64(1.0, -0.5, 2.0)
    new = f64(-0.7, -2.4, -0.3, grad=True)
    loss, _ = cispo(new, old, advantage, 0.2, 0.28)
    loss.sum().backward()
    weight = (new.detach() - old).exp().clamp(0.8, 1.28)
    numeric = [
        (-(weight * advantage * (new.detach() + h)).sum() + (weight * advantage * (new.detach() - h)).sum()).item()
        / 2e-6
        for h in 1e-6 * torch.eye(3, dtype=torch.float64)
    ]
    assert new.grad is not None and new.grad.tolist() == pytest.approx(numeric, rel=1e-6)


# -- corrections in the loss ------------------------------------------------------------------------------------------


def test_masked_tokens_weigh_nothing_and_are_counted() -> None:
    """IcePop: trainer / engine of 6, 2 and 0.4, of which only the second is within [0.5, 5]."""
    new = f64(-1.0, -1.0, -1.0, grad=True)
    rollout = f64(*(-1.0 - math.log(r) for r in (6.0, 2.0, 0.4)))
    parts = policy_loss(new, rollout, f64(1.0, 1.0, 1.0), f64(1, 1, 1), ObjectiveConfig(preset="icepop"))
    assert parts.loss_sum.item() == pytest.approx(-2.0)
    assert (parts.masked_sum.item(), parts.weight_sum.item()) == (2, 3), "they still count in the divisor"
    assert parts.importance_sum.item() == pytest.approx(2.0)
    assert grad_of(parts, new) == pytest.approx([0.0, -2.0, 0.0])


def test_a_sequence_is_weighed_dropped_vetoed_as_a_whole() -> None:
    """Rows of trainer / engine (2, 1.5 | product 3) and (0.8, 1 | product 0.8)."""
    ratios = torch.tensor([[2.0, 1.5], [0.8, 1.0]], dtype=torch.float64)
    new, mask = torch.full((2, 2), -1.0, dtype=torch.float64), torch.ones(2, 2)
    rollout, advantages = new - ratios.log(), torch.tensor([[-1.0], [-1.0]], dtype=torch.float64)

    def importance(**fields: object) -> tuple[float, float]:
        parts = policy_loss(new, rollout, advantages, mask, ObjectiveConfig.model_validate(fields))
        return parts.loss_sum.item(), parts.masked_sum.item()

    assert importance(preset="mis") == (pytest.approx(0.8 * 2), 2)
    assert importance(correction_level="sequence") == (pytest.approx(2.0 * 2 + 0.8 * 2), 0)
    assert importance(correction="off", veto=0.9) == (pytest.approx(2.0), 2)
    assert importance(correction="off", off_policy_delta=0.1) == (pytest.approx(2.0), 2), "log(1.25) / 2 = 0.11"
    assert importance(correction="off", off_policy_delta=0.12) == (pytest.approx(4.0), 0)
    assert importance(preset="mis_geometric", correction_low=0.5, correction_high=1.1)[1] == 2, "sqrt(3) is above 1.1"
    against_rollout = {"old_policy": "rollout", "correction": "off"}
    assert importance(**against_rollout, off_policy_delta=0.1)[1] == 2, "it needs no recomputed policy"
    assert importance(**against_rollout, veto=0.9)[1] == 2


# -- value loss -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "loss", "slope", "held"),
    [
        (1.0, 0.5 * 1.3**2, 0.0, 1),  # moved further than 0.2 from 0.5 towards the return 2: held at 0.7
        (0.6, 0.5 * 1.4**2, -1.4, 0),  # within reach: the plain square
        (0.0, 0.5 * 2.0**2, -2.0, 0),  # moved away: the plain square is the larger
    ],
)
def test_value_loss_by_hand(value: float, loss: float, slope: float, held: int) -> None:
    values = f64(value, math.nan, grad=True)
    found, clipped = value_loss(values, f64(0.5, math.inf), f64(2.0, math.nan), f64(1, 0), f64(0.25, math.nan), 0.2)
    found.backward()
    assert (found.item(), clipped.item()) == (pytest.approx(0.25 * loss), held)
    assert values.grad is not None and values.grad.tolist() == pytest.approx([0.25 * slope, 0.0])


def test_a_value_within_the_bound_is_not_held() -> None:
    """Also where value - old rounds: the count says what the clip did, and no more."""
    generator = torch.Generator().manual_seed(1)
    old, goal = torch.rand(2, 4000, generator=generator)
    value = old + 0.19 * (torch.rand(4000, generator=generator) * 2 - 1)
    every = torch.ones(4000)
    loss, held = value_loss(value, old, goal, every, every, 0.2)
    assert held == 0 and loss == value_loss(value, old, goal, every, every, None)[0]


def test_value_loss_and_dual_clip_match_finite_differences() -> None:
    generator = torch.Generator().manual_seed(6)
    a, b, c, w = (torch.randn(30, dtype=torch.float64, generator=generator) for _ in range(4))
    mask = torch.rand(30, generator=generator) > 0.3
    for clip in (0.3, None):
        assert torch.autograd.gradcheck(
            lambda v, clip=clip: value_loss(v, b, c, mask, w, clip)[0], (a.requires_grad_(),), eps=1e-7
        )

    def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
        return ppo_clip(log_ratio.exp(), b, 0.2, 0.28, 1.5)[0].sum()

    assert torch.autograd.gradcheck(bounded, (a,), eps=1e-7, atol=1e-6)


# -- what is not finite -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["rl360", "grpo", "gspo", "cispo", "icepop", "mis", "mis_geometric"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["new", "rollout", "advantage"])
def test_what_is_not_finite_under_the_mask_is_never_hidden(preset: str, bad: float, place: str) -> None:
    config = ObjectiveConfig(preset=preset, veto=0.5, off_policy_delta=0.01)
    held = {"new": f64(-1.0, -3.0), "rollout": f64(-1.1, -1.0), "advantage": f64(1.0, -1.0)}
    held[place] = f64(held[place][0].item(), bad)  # the second token is one that veto and off-policy mask drop
    parts = policy_loss(held["new"], held["rollout"], held["advantage"], f64(1, 1), config)
    sums = [getattr(parts, name).item() for name in LossParts.__dataclass_fields__]
    assert not all(math.isfinite(value) for value in sums)
