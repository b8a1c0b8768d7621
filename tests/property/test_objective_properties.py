"""Infra neutrality, conservation, order invariance, split invariance: for any batch hypothesis comes up with."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.config.run import ObjectiveConfig
from rl360.ledger.outcomes import DROPPED, HAS_VERDICT, INFRA, SAMPLED, Bucket, Outcome
from rl360.objective.filters import FilterResult, filter_groups
from rl360.objective.losses import LossParts, policy_loss
from rl360.objective.presets import PRESETS
from rl360.sessions.sample import AttemptRecord
from tests.unit.objective_data import attempt, sample_at

MAX_SEQ_LEN = 24


@st.composite
def batches(draw: st.DrawFn, verdicts_only: bool = False) -> list[AttemptRecord]:
    """Up to 4 groups of up to 5 attempts of up to 3 leaves: any outcome, graded rewards, cuts, breaks, lost races,
    samples that are stale by version or by parameters, and long ones."""
    attempts = []
    for group in range(draw(st.integers(1, 4))):
        for index in range(draw(st.integers(1, 5))):
            outcome = draw(st.sampled_from(sorted(HAS_VERDICT if verdicts_only else Outcome)))
            reward = draw(st.sampled_from([0.0, 1.0, 1.0, 0.25, 1 / 3])) if outcome in HAS_VERDICT else None
            attempts.append(
                attempt(
                    group,
                    index,
                    reward,
                    outcome=Outcome(outcome),
                    sample=draw(st.sampled_from([True, True, True, False])),
                    unmerged=draw(st.integers(0, 9)),
                    leaves=draw(st.lists(LEAVES, min_size=1, max_size=3)),
                    seed=len(attempts),
                )
            )
    return attempts


LEAVES = st.fixed_dictionaries(
    {
        "trained": st.integers(0, 9),
        "prompt": st.integers(1, 12),
        "dropped": st.dictionaries(st.sampled_from(list(map(str, DROPPED))), st.integers(1, 5), max_size=4),
        "version": st.sampled_from(["run:0", "run:0", "run:0", "run:1"]),
        "differs": st.sampled_from([0, 0, 0, 0, 1]),
    }
)


configs = st.sampled_from([ObjectiveConfig(preset=name) for name in PRESETS])
# a token's loss depends on that token alone, so a sequence may be cut anywhere
by_token = configs.filter(lambda config: config.loss != "gspo" and config.correction_level == "token")


def run_filter(attempts: list[AttemptRecord], config: ObjectiveConfig, *, score_timeouts: bool = False) -> FilterResult:
    return filter_groups(
        attempts,
        config,
        expected_version="run:0",
        max_seq_len=MAX_SEQ_LEN,
        loss_constant=640.0,
        score_timeouts=score_timeouts,
    )


def batch_tensors(result: FilterResult) -> tuple[torch.Tensor, ...]:
    """New log-probs (a fixed offset from the rollout), rollout log-probs, advantages, mask, weights: `[all tokens]`."""
    samples = [sample_at(row) for row in result.kept]
    if not samples:
        empty = torch.zeros(0, dtype=torch.float64)
        return empty.clone().requires_grad_(), empty, empty, empty, empty
    rollout = np.concatenate([sample.logprobs for sample in samples]).astype(np.float64)
    mask = np.concatenate([sample.loss_mask for sample in samples])
    offset = np.concatenate([(sample.tokens % 13 - 6) / 20 for sample in samples])
    lengths = [len(sample.tokens) for sample in samples]
    advantages, weights = np.repeat(result.advantages, lengths), np.repeat([row.weight for row in result.kept], lengths)
    new = torch.from_numpy(rollout + offset).requires_grad_()
    return new, *(torch.from_numpy(each) for each in (rollout, advantages, mask, weights))


def loss_and_gradient(result: FilterResult, config: ObjectiveConfig) -> tuple[float, np.ndarray, LossParts]:
    new, rollout, advantages, mask, weights = batch_tensors(result)
    parts = policy_loss(new, rollout, advantages, mask, config, weights=weights)
    parts.loss_sum.backward()
    assert new.grad is not None
    return parts.loss_sum.item(), new.grad.numpy(), parts


@settings(deadline=None, max_examples=60)
@given(batches(verdicts_only=True), configs, st.booleans(), st.data())
def test_infra_neutrality_bitwise(
    valid: list[AttemptRecord], config: ObjectiveConfig, scored: bool, data: st.DataObject
) -> None:
    """Also where timeouts are scored: they are not infrastructure then, all else is."""
    lost = [
        attempt(
            data.draw(st.integers(0, 6)),
            50 + index,
            None,
            outcome=data.draw(st.sampled_from(sorted(INFRA - {Outcome.AGENT_TIMEOUT} if scored else INFRA))),
            sample=data.draw(st.booleans()),
            trained=data.draw(st.integers(0, 9)),
            version=data.draw(st.sampled_from(["run:0", "run:9"])),
        )
        for index in range(data.draw(st.integers(1, 8)))
    ]
    alone = run_filter(valid, config, score_timeouts=scored)
    crowded = run_filter(data.draw(st.permutations(valid + lost)), config, score_timeouts=scored)
    survivors = {record.attempt_id for record in valid}
    assert tuple(d for d in crowded.decisions if d.attempt_id in survivors) == alone.decisions
    assert crowded.advantages.tobytes() == alone.advantages.tobytes()
    assert crowded.kept == alone.kept
    loss_a, gradient_a, parts_a = loss_and_gradient(alone, config)
    loss_b, gradient_b, parts_b = loss_and_gradient(crowded, config)
    assert np.float64(loss_a).tobytes() == np.float64(loss_b).tobytes()
    assert gradient_a.tobytes() == gradient_b.tobytes()
    for name in LossParts.__dataclass_fields__:
        assert getattr(parts_a, name).item() == getattr(parts_b, name).item()


@settings(deadline=None, max_examples=100)
@given(batches(), configs, st.booleans())
def test_conservation(attempts: list[AttemptRecord], config: ObjectiveConfig, scored: bool) -> None:
    result = run_filter(attempts, config, score_timeouts=scored)
    sampled = {record.attempt_id: record.sampled_tokens for record in attempts}
    assert {d.attempt_id: d.sampled_tokens for d in result.decisions} == sampled
    assert sum(result.tokens.values()) == sum(sampled.values())
    assert set(result.tokens) <= set(SAMPLED)
    assert result.trained_tokens == sum(int(sample_at(row).loss_mask.sum()) for row in result.kept)
    assert all(sample_at(row).attempt_id == row.attempt_id and sample_at(row).leaf == row.leaf for row in result.kept)
    trained = [(d.attempt_id, leaf) for d in result.decisions for leaf in d.trained_leaves]
    assert [(row.attempt_id, row.leaf) for row in result.kept] == trained and len(set(trained)) == len(trained)
    advantage_of = {d.attempt_id: d.advantage for d in result.decisions}
    assert all(row.advantage == advantage_of[row.attempt_id] for row in result.kept)
    _, _, parts = loss_and_gradient(result, config)
    weights = sum(d.token_weight * d.tokens[Bucket.TRAINED] for d in result.decisions if d.token_weight is not None)
    np.testing.assert_allclose(parts.weight_sum.item(), weights, rtol=1e-12)
    if result.kept:
        whole = 1.0 if config.reduction != "constant" else result.trained_tokens / 640.0
        np.testing.assert_allclose(weights, whole, rtol=1e-12)


@settings(deadline=None, max_examples=60)
@given(batches(), configs, st.data())
def test_order_invariance(attempts: list[AttemptRecord], config: ObjectiveConfig, data: st.DataObject) -> None:
    first, second = run_filter(attempts, config), run_filter(data.draw(st.permutations(attempts)), config)
    assert first.decisions == second.decisions
    assert first.advantages.tobytes() == second.advantages.tobytes()
    assert first.kept == second.kept


@settings(deadline=None, max_examples=60)
@given(batches(verdicts_only=True), by_token, st.data())
def test_split_invariance(attempts: list[AttemptRecord], config: ObjectiveConfig, data: st.DataObject) -> None:
    result = run_filter(attempts, config)
    _, whole_gradient, whole = loss_and_gradient(result, config)
    new, rollout, advantages, mask, weights = batch_tensors(result)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(new)), max_size=4)))
    total = None
    for start, end in zip([0, *cuts], [*cuts, len(new)], strict=True):
        at = slice(start, end)
        part = policy_loss(new[at], rollout[at], advantages[at], mask[at], config, weights=weights[at])
        part.loss_sum.backward()
        total = part if total is None else total + part
    assert total is not None and new.grad is not None
    np.testing.assert_array_equal(new.grad.numpy(), whole_gradient)
    for name in LossParts.__dataclass_fields__:
        np.testing.assert_allclose(getattr(total, name).item(), getattr(whole, name).item(), rtol=1e-12, atol=1e-14)


@settings(deadline=None, max_examples=60)
@given(batches(verdicts_only=True))
def test_advantages_of_a_group_sum_to_zero_when_all_its_attempts_train(attempts: list[AttemptRecord]) -> None:
    result = run_filter(attempts, ObjectiveConfig())
    members: dict[str, list[float | None]] = {}
    for decision in result.decisions:
        members.setdefault(decision.group_id, []).append(decision.advantage)
    for values in members.values():
        trained = [value for value in values if value is not None]
        if len(trained) == len(values):
            assert abs(sum(trained)) < 1e-12
