"""Laws of the objective's formulas on any rectangle and any groups: splits, order, garbage under the mask, scale."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.config.run import ObjectiveConfig
from rl360.objective.advantages import ESTIMATORS, attempt_advantages
from rl360.objective.corrections import LEVELS, MODES, Trained, importance_weights
from rl360.objective.gae import masked_gae
from rl360.objective.losses import LossParts, policy_loss
from rl360.objective.presets import PRESETS
from rl360.objective.reductions import token_weights

LIGHT = settings(deadline=None, max_examples=60)
FIELDS = [*({"preset": name} for name in PRESETS)]
FIELDS += [
    {"correction": "clip", "correction_low": 0.8, "correction_high": 1.2, "correction_level": level} for level in LEVELS
]
FIELDS += [{"veto": 0.8}, {"off_policy_delta": 0.05}, {"preset": "gspo", "veto": 0.8, "off_policy_delta": 0.01}]
FIELDS += [{"old_policy": "rollout", "correction": "off", "dual_clip": 1.1}, {"entropy_coef": 0.1}]
configs = st.sampled_from(FIELDS).map(ObjectiveConfig.model_validate)


@dataclass(frozen=True)
class Rectangle:
    """What a micro-batch holds, all float64 `[rows, width]` (mask uint8)."""

    new: torch.Tensor
    rollout: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    weights: torch.Tensor
    entropy: torch.Tensor

    def map(self, change: object) -> Rectangle:
        return Rectangle(**{name: change(getattr(self, name)) for name in self.__dataclass_fields__})  # type: ignore[operator]


@st.composite
def rectangles(draw: st.DrawFn) -> Rectangle:
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([1e-3, 0.1, 1.0]))

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    rollout = -noise(rows, width).abs() - 0.01
    bits = draw(st.lists(st.integers(0, 1), min_size=rows * width, max_size=rows * width))
    return Rectangle(
        new=rollout + spread * noise(rows, width),
        rollout=rollout,
        advantages=noise(rows, 1).expand(rows, width),
        mask=torch.tensor(bits, dtype=torch.uint8).reshape(rows, width),
        weights=noise(rows, 1).abs().expand(rows, width),
        entropy=noise(rows, width).abs(),
    )


def computed(batch: Rectangle, config: ObjectiveConfig) -> tuple[LossParts, torch.Tensor]:
    new = batch.new.clone().requires_grad_()
    parts = policy_loss(
        new, batch.rollout, batch.advantages, batch.mask, config, weights=batch.weights, entropy=batch.entropy
    )
    parts.loss_sum.backward()
    assert new.grad is not None
    return parts, new.grad


def sums(parts: LossParts) -> np.ndarray:
    return np.array([getattr(parts, name).item() for name in LossParts.__dataclass_fields__])


def close(found: LossParts, expected: LossParts) -> None:
    np.testing.assert_allclose(sums(found), sums(expected), rtol=1e-11, atol=1e-13)


@LIGHT
@given(rectangles(), configs, st.data())
def test_rows_may_be_split_and_reordered(batch: Rectangle, config: ObjectiveConfig, data: st.DataObject) -> None:
    whole, gradient = computed(batch, config)
    rows = data.draw(st.permutations(range(len(batch.mask))))
    cut = data.draw(st.integers(0, len(rows)))
    first, left = computed(batch.map(lambda t: t[list(rows[:cut])]), config)
    second, right = computed(batch.map(lambda t: t[list(rows[cut:])]), config)
    close(first + second, whole)
    torch.testing.assert_close(torch.cat([left, right]), gradient[list(rows)], rtol=1e-12, atol=1e-15)


@LIGHT
@given(rectangles(), configs, st.sampled_from([math.nan, math.inf, -math.inf, 1e308, 0.0]))
def test_what_lies_under_mask_zero_changes_no_bit(batch: Rectangle, config: ObjectiveConfig, junk: float) -> None:
    clean, gradient = computed(batch, config)
    dirty = batch.map(lambda t: t if t.dtype == torch.uint8 else t.masked_fill(batch.mask == 0, junk))
    parts, spoilt = computed(dirty, config)
    assert sums(parts).tobytes() == sums(clean).tobytes()
    assert spoilt.numpy().tobytes() == gradient.numpy().tobytes()
    assert (gradient[batch.mask == 0] == 0).all()


@LIGHT
@given(rectangles(), configs, st.integers(1, 40))
def test_padding_changes_nothing(batch: Rectangle, config: ObjectiveConfig, more: int) -> None:
    clean, gradient = computed(batch, config)
    parts, padded = computed(batch.map(lambda t: torch.nn.functional.pad(t, (0, more))), config)
    close(parts, clean)
    torch.testing.assert_close(padded[:, : -more or None], gradient, rtol=1e-12, atol=1e-15)


@LIGHT
@given(rectangles(), configs, st.sampled_from([0.25, 2.0, 1024.0]))
def test_the_loss_is_linear_in_weights_and_in_the_size_of_advantages(
    batch: Rectangle, config: ObjectiveConfig, scale: float
) -> None:
    parts, gradient = computed(batch, config)
    heavier, steeper = computed(batch.map(lambda t: scale * t if t is batch.weights else t), config)
    assert heavier.loss_sum.item() == scale * parts.loss_sum.item(), "powers of two are exact"
    assert torch.equal(steeper, scale * gradient)
    if not config.entropy_coef:
        bolder, steeper = computed(batch.map(lambda t: scale * t if t is batch.advantages else t), config)
        assert bolder.loss_sum.item() == scale * parts.loss_sum.item()
        assert torch.equal(steeper, scale * gradient)


@LIGHT
@given(rectangles(), configs.filter(lambda config: config.old_policy == "recomputed"))
def test_recomputed_gradients_are_the_weighted_policy_gradient(batch: Rectangle, config: ObjectiveConfig) -> None:
    """r is 1, so -weight * importance * A remains, the importance being that of `corrections` and detached."""
    parts, gradient = computed(batch, config)
    trained = Trained(batch.mask.bool())
    d = trained.pick(batch.new - batch.rollout)
    importance = torch.ones_like(d)
    if config.correction != "off":
        importance = importance_weights(
            d,
            trained,
            mode=config.correction,
            level=config.correction_level,
            low=config.correction_low,
            high=config.correction_high,
        )
    if config.veto is None and config.off_policy_delta is None:
        expected = -trained.pick(batch.weights) * importance * trained.pick(batch.advantages)
        torch.testing.assert_close(trained.pick(gradient), expected, rtol=1e-13, atol=1e-300)
        assert parts.importance_sum.item() == importance.sum().item()
    assert parts.clipped_sum.item() == 0


@LIGHT
@given(rectangles(), st.sampled_from(MODES), st.sampled_from(LEVELS), st.floats(0.1, 0.99), st.floats(1.0, 4.0))
def test_importance_weights_keep_their_bounds(batch: Rectangle, mode: str, level: str, low: float, high: float) -> None:
    trained = Trained(batch.mask.bool())
    d = trained.pick(batch.new - batch.rollout)
    weights = importance_weights(d, trained, mode=mode, level=level, low=low, high=high)
    free = importance_weights(d, trained, mode="truncate", level=level, high=math.inf)
    inside = (free >= low) & (free <= high)
    assert torch.equal(weights[inside], free[inside])
    outside = {"truncate": free.clamp(max=high), "clip": free.clamp(low, high), "mask": torch.zeros_like(free)}[mode]
    assert torch.equal(weights[~inside], outside[~inside])
    flat = importance_weights(torch.full_like(d, 0.3), trained, mode="truncate", level="geometric", high=9.0)
    torch.testing.assert_close(flat, torch.full_like(d, math.exp(0.3)))


groups_of_rewards = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from([0.0, 0.25, 1.0, 2.0, -1.0])), min_size=1, max_size=16
)


@LIGHT
@given(groups_of_rewards, st.sampled_from(ESTIMATORS), st.booleans(), st.data())
def test_advantages_depend_on_neither_order_nor_names(
    drawn: list[tuple[str, float]], estimator: str, std: bool, data: st.DataObject
) -> None:
    groups, rewards = [group for group, _ in drawn], np.array([reward for _, reward in drawn])
    names = [f"{index:02}" for index in range(len(drawn))]

    def advantages(order: list[int], prefix: str = "") -> np.ndarray:
        return attempt_advantages(
            rewards[order],
            [prefix + groups[i] for i in order],
            [names[i] for i in order],
            estimator=estimator,
            normalize_std=std,
        )

    as_given = advantages(list(range(len(drawn))))
    order = data.draw(st.permutations(range(len(drawn))))
    assert advantages(order).tobytes() == as_given[order].tobytes()
    assert advantages(list(range(len(drawn))), "group-").tobytes() == as_given.tobytes()


@LIGHT
@given(groups_of_rewards, st.sampled_from(ESTIMATORS), st.floats(-3, 3), st.sampled_from([0.5, 4.0]))
def test_advantages_ignore_a_shift_and_follow_a_scale(
    drawn: list[tuple[str, float]], estimator: str, shift: float, scale: float
) -> None:
    groups, rewards = [group for group, _ in drawn], np.array([reward for _, reward in drawn])
    names = [f"{index:02}" for index in range(len(drawn))]

    def advantages(values: np.ndarray) -> np.ndarray:
        return attempt_advantages(values, groups, names, estimator=estimator)

    base = advantages(rewards)
    np.testing.assert_allclose(advantages(rewards + shift), base, rtol=1e-6, atol=1e-6)
    factor = scale if estimator in ("grpo", "rloo") else 1.0
    np.testing.assert_allclose(advantages(rewards * scale), base * factor, rtol=1e-4, atol=1e-12)
    for group in set(groups):
        members = np.array(groups) == group
        if estimator != "reinforce_pp":
            assert abs(base[members].sum()) < 1e-9
        if estimator == "rloo":
            k = members.sum()
            grpo = attempt_advantages(rewards, groups, names)[members]
            np.testing.assert_allclose(base[members], grpo * k / max(k - 1, 1), rtol=1e-12, atol=1e-15)
    assert abs(base.sum()) < 1e-9


@LIGHT
@given(st.lists(st.integers(0, 60_000), min_size=1, max_size=20), st.floats(0.5, 1e9))
def test_the_weights_of_a_step(tokens: list[int], constant: float) -> None:
    counts = np.array(tokens)
    for reduction, total in (("token_mean", 1.0), ("sample_mean", 1.0), ("constant", counts.sum() / constant)):
        weights = token_weights(reduction, tokens, constant)
        np.testing.assert_allclose((weights * counts).sum(), total if counts.any() else 0.0, rtol=1e-12)
        assert ((weights > 0) == (counts > 0)).all()
        # what the trainer multiplies by, in units of 1 / all tokens: exactly 1 for the mean over tokens
        if reduction == "token_mean":
            assert (np.float32(weights[counts > 0] * counts.sum()) == 1).all()


@LIGHT
@given(rectangles(), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_its_definition_on_the_trained_tokens(batch: Rectangle, gamma: float, lam: float) -> None:
    values, mask = batch.new.numpy(), batch.mask.numpy().astype(bool)
    rewards, extra = batch.advantages[:, 0].numpy(), batch.entropy.numpy()
    advantages, returns = masked_gae(
        np.where(mask, values, np.nan), rewards, mask, gamma=gamma, lam=lam, token_rewards=np.where(mask, extra, np.nan)
    )
    for row in range(len(mask)):
        at = np.flatnonzero(mask[row])
        v, r = np.append(values[row, at], 0.0), extra[row, at].copy()
        if len(at):
            r[-1] += rewards[row]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(at))]
        expected = [sum((gamma * lam) ** (u - t) * delta[u] for u in range(t, len(at))) for t in range(len(at))]
        np.testing.assert_allclose(advantages[row, at], expected, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(returns[row, at], np.array(expected) + v[:-1], rtol=1e-10, atol=1e-12)
    assert not advantages[~mask].any() and not returns[~mask].any()
