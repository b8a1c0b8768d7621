"""Importance weights, vetoes, off-policy masks and KL estimates, by hand.

One micro-batch throughout: two rows of three, four trained tokens with d = log 2, log 1/4 | log 1, log 9/8.
"""

from __future__ import annotations

import math

import pytest
import torch

from rl360.errors import BadInput
from rl360.objective.corrections import Trained, importance_weights, off_policy_masked, vetoed
from rl360.objective.kl import kl_loss, token_kl

TRAINED = Trained(torch.tensor([[True, False, True], [False, True, True]]))
RATIOS = [2.0, 0.25, 1.0, 1.125]
D = torch.tensor(RATIOS, dtype=torch.float64).log()
NAN, INF = math.nan, math.inf


def f64(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def test_picking_summing_and_spreading() -> None:
    picked = TRAINED.pick(f64(1, NAN, 3))  # broadcast over the rows; what is not trained is not read
    assert picked.tolist()[:2] == [1, 3] and math.isnan(picked[2])
    assert TRAINED.row_sums(f64(1, 2, 3, 4)).tolist() == [3, 7]
    assert TRAINED.row_means(f64(1, 2, 3, 4)).tolist() == [1.5, 3.5]
    assert TRAINED.spread(f64(5, 6)).tolist() == [5, 5, 6, 6]
    nothing = Trained(torch.zeros(2, 3, dtype=torch.bool))
    assert nothing.row_means(f64()).tolist() == [0, 0]
    one = Trained(torch.tensor([True, False, True]))  # one sequence, without a row axis
    assert one.spread(one.row_sums(f64(1, 2))).tolist() == [3, 3]


@pytest.mark.parametrize(
    ("mode", "level", "low", "expected"),
    [
        ("truncate", "token", None, [1.5, 0.25, 1.0, 1.125]),
        ("clip", "token", 0.5, [1.5, 0.5, 1.0, 1.125]),
        ("mask", "token", 0.5, [0.0, 0.0, 1.0, 1.125]),  # IcePop
        ("mask", "token", None, [0.0, 0.25, 1.0, 1.125]),
        ("truncate", "sequence", None, [0.5, 0.5, 1.125, 1.125]),  # 2 * 1/4 and 1 * 9/8
        ("clip", "sequence", 0.75, [0.75, 0.75, 1.125, 1.125]),
        ("mask", "sequence", 0.75, [0.0, 0.0, 1.125, 1.125]),
        ("truncate", "geometric", None, [math.sqrt(0.5)] * 2 + [math.sqrt(1.125)] * 2),
        ("mask", "geometric", 0.75, [0.0, 0.0] + [math.sqrt(1.125)] * 2),
    ],
)
def test_every_mode_by_every_level(mode: str, level: str, low: float | None, expected: list[float]) -> None:
    got = importance_weights(D, TRAINED, mode=mode, level=level, low=low, high=1.5)
    torch.testing.assert_close(got, f64(*expected), rtol=1e-14, atol=0)


def test_the_bounds_of_a_mask_are_inside() -> None:
    for low in (1.0, None):
        got = importance_weights(f64(0, 0, 0, 0), TRAINED, mode="mask", low=low, high=1.0)
        assert got.tolist() == [1, 1, 1, 1]


def test_sums_that_overflow_are_bounded_and_what_is_not_a_number_stays() -> None:
    huge = f64(900, 900, -900, -900)
    assert importance_weights(huge, TRAINED, mode="truncate", level="sequence", high=2.0).tolist() == [2, 2, 0, 0]
    assert importance_weights(huge, TRAINED, mode="mask", high=2.0).tolist() == [0, 0, 0, 0]
    lost = f64(NAN, 0, 0, 0)
    for mode in ("truncate", "clip", "mask"):
        for level, spoilt in (("token", 1), ("sequence", 2), ("geometric", 2)):
            got = importance_weights(lost, TRAINED, mode=mode, level=level, low=0.5, high=2.0)
            assert got.isnan().tolist() == [True] * spoilt + [False] * (4 - spoilt), (mode, level)


def test_weights_carry_no_gradient() -> None:
    d = D.clone().requires_grad_()
    assert not importance_weights(d, TRAINED, mode="clip", level="sequence", low=0.5, high=2.0).requires_grad


def test_a_catastrophic_token_vetoes_its_sequence() -> None:
    assert vetoed(D, TRAINED, 0.3).tolist() == [True, True, False, False]
    assert vetoed(D, TRAINED, 0.25).tolist() == [False] * 4, "below, not at"


def test_bad_sequences_far_from_the_sampler_are_masked() -> None:
    # mean of log(engine / trainer): log(2) / 2 = 0.3466 in the first row, -log(9/8) / 2 in the second
    bad = f64(-1, -1, -1, -1)
    assert off_policy_masked(D, bad, TRAINED, 0.34).tolist() == [True, True, False, False]
    assert off_policy_masked(D, bad, TRAINED, 0.35).tolist() == [False] * 4
    assert off_policy_masked(D, -bad, TRAINED, 0.34).tolist() == [False] * 4, "good ones stay"
    assert off_policy_masked(D, f64(-1, 0, -1, -1), TRAINED, 0.34).tolist() == [True, False, False, False]


def test_unknown_names_and_missing_bounds_are_refused() -> None:
    with pytest.raises(BadInput, match="correction 'drop' by 'token' is none of truncate, clip, mask by token"):
        importance_weights(D, TRAINED, mode="drop", high=2.0)
    with pytest.raises(BadInput, match="clip needs a lower bound"):
        importance_weights(D, TRAINED, mode="clip", high=2.0)


# -- KL ---------------------------------------------------------------------------------------------------------------


def test_kl_estimates_by_hand() -> None:
    d = math.log(2)  # the policy is twice as likely as the reference
    new, reference = f64(math.log(0.5)), f64(math.log(0.25))
    assert token_kl(new, reference, "k1").item() == pytest.approx(d)
    assert token_kl(new, reference, "k2").item() == pytest.approx(d * d / 2)
    assert token_kl(new, reference, "k3").item() == pytest.approx(0.5 - 1 + d)
    with pytest.raises(BadInput, match="KL estimator 'k4' is none of k1, k2, k3"):
        token_kl(new, reference, "k4")


def test_kl_estimates_have_the_divergence_as_their_mean() -> None:
    policy, reference = f64(0.5, 0.3, 0.2), f64(0.25, 0.25, 0.5)
    exact = (policy * (policy / reference).log()).sum().item()
    for kind in ("k1", "k3"):
        mean = (policy * token_kl(policy.log(), reference.log(), kind)).sum().item()
        assert mean == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(("kind", "slope"), [("k1", 1.0), ("k2", math.log(2)), ("k3", 0.5)])
def test_kl_loss_and_its_gradient(kind: str, slope: float) -> None:
    new = f64(math.log(0.5), NAN, -1.0, grad=True)
    reference, mask = f64(math.log(0.25), INF, -1.0), f64(1, 0, 1)
    loss, total = kl_loss(new, reference, mask, f64(0.25, NAN, 0.25), coefficient=0.4, kind=kind)
    loss.backward()
    value = {"k1": math.log(2), "k2": math.log(2) ** 2 / 2, "k3": math.log(2) - 0.5}[kind]
    assert loss.item() == pytest.approx(0.1 * value)
    assert total.item() == pytest.approx(value) and not total.requires_grad
    assert new.grad is not None
    torch.testing.assert_close(new.grad, f64(0.1 * slope, 0.0, 0.1 if kind == "k1" else 0.0))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_gradient_matches_finite_differences(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    new, reference, weights = (-torch.rand(3, 5, dtype=torch.float64, generator=generator) for _ in range(3))
    mask = torch.rand(3, 5, generator=generator) > 0.4
    assert torch.autograd.gradcheck(
        lambda values: kl_loss(values, reference, mask, weights, coefficient=0.3, kind=kind)[0], (new.requires_grad_(),)
    )


def test_coefficient_zero_needs_no_reference() -> None:
    new, mask = f64(-1.0, -2.0), f64(1, 1)
    assert [each.item() for each in kl_loss(new, None, mask, mask, coefficient=0.0)] == [0, 0]
    with pytest.raises(BadInput, match=r"coefficient 0\.1 needs the reference"):
        kl_loss(new, None, mask, mask, coefficient=0.1)
