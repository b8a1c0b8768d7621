"""The loss by hand, its clip boundaries, and its gradient against finite differences in float64."""

from __future__ import annotations

import math

import pytest
import torch

from rl360.config.run import ObjectiveConfig
from rl360.errors import BadInput
from rl360.objective.losses import policy_loss

RECOMPUTED = ObjectiveConfig()
ROLLOUT = ObjectiveConfig(old_policy="rollout")


def f64(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def test_recomputed_by_hand() -> None:
    new = f64(-1.0, -2.0, -0.5, grad=True)
    rollout = f64(-1.2, -1.0, -0.5)
    parts = policy_loss(new, rollout, f64(0.75, -0.25, 9.0), f64(1, 1, 0), RECOMPUTED, entropy=f64(0.5, 0.7, 9.0))
    weights = [math.exp(0.2), math.exp(-1.0)]
    assert parts.loss_sum.item() == pytest.approx(-(weights[0] * 0.75 - weights[1] * 0.25))
    assert parts.weight_sum.item() == 2
    assert parts.tis_sum.item() == pytest.approx(sum(weights))
    assert parts.abs_dlogp_sum.item() == pytest.approx(1.2)
    assert parts.entropy_sum.item() == pytest.approx(1.2)
    assert parts.clipped_sum.item() == 0
    parts.loss_sum.backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, f64(-weights[0] * 0.75, weights[1] * 0.25, 0.0))


def test_tis_is_capped_and_can_be_off() -> None:
    new, rollout = f64(-1.0), f64(-5.0)
    assert policy_loss(new, rollout, f64(1.0), f64(1), RECOMPUTED).tis_sum.item() == 2.0
    off = ObjectiveConfig(tis_cap=None)
    assert policy_loss(new, rollout, f64(1.0), f64(1), off).tis_sum.item() == 1.0


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
    assert parts.tis_sum.item() == 1.0  # the ratio already corrects: no second weight


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
