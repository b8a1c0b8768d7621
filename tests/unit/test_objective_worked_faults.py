"""Two faults that RL pipelines have had, worked out by hand, through the code a step runs: filter, advantages, weights,
loss, ledger. The naive way stands beside ours in each test.

**Lost attempts that count.** Five groups of eight planned attempts; each try is a row. Seven attempts are lost to
infrastructure twice, nine once and then run through: 56 rows, 33 with a verdict and 23 without. Every row sampled
6 tokens. By group:

    rows  n       10    11    11    12    12     56
    valid v        8     7     7     6     5     33
    lost           2     4     4     6     7     23
    passes         7     6     6     5     3     27
    reward s       7     6     6     5   3.5   27.5   the last group has one of 0.5; one attempt a group gets 0

A pipeline that keeps lost attempts with reward 0 and a loss mask of 0, divisors counting all rows:

    gradient        33 / 56 = 0.59 of what it should be: the sum is over 33 rows, the mean over 56
    advantage       a pass gets 1 - s/n instead of 1 - s/v, so s/v - s/n more: 0.175, 0.312, 0.312, 0.417, 0.408 by
                    group, (7 x 0.175 + 12 x 0.312 + 5 x 0.417 + 3 x 0.408) / 27 = +0.31 over the passes, on 0.16
    mean reward     27.5 / 56 = 0.49 instead of 27.5 / 33 = 0.83
    mean |dlogp|    0.59 of itself, and so is the mean importance weight: both are sums over 33 rows

**One baseline for a batch that does not divide.** Two groups, 7 of 8 passed and, after one loss, 1 of 7. 15 rows cannot
be cut into two equal groups, so the whole batch gets one baseline, 8 / 15 = 0.533. Every pass is then worth 0.467 and
every failure -0.533, and a group's advantages sum to 7 - 8 x 8/15 = +2.73 and 1 - 7 x 8/15 = -2.73: the easy task is
pushed up and the hard one down whatever was done in it. Ours by group: 0.125 / -0.875 and 0.857 / -0.143, sums 0.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from rl360.config.run import ObjectiveConfig
from rl360.ledger.metrics import reward_metrics
from rl360.ledger.outcomes import Outcome
from rl360.ledger.step import build_step_ledger
from rl360.objective.filters import FilterResult, filter_groups
from rl360.objective.losses import policy_loss
from rl360.sessions.sample import AttemptRecord, decode_samples
from rl360.store.layout import merged_key
from tests.unit.objective_data import OBJECTS, attempt, sample_at, store_samples
from tests.unit.verdict_data import renamed

CONFIG = ObjectiveConfig()
PLANNED = 8
TOKENS = 6  # sampled by each row
DRIFT = 0.05  # trainer less engine, log-prob of every token
# by group: rewards of the valid attempts, attempts lost twice, attempts lost once
GROUPS = [
    ([1.0] * 7 + [0.0], 0, 2),
    ([1.0] * 6 + [0.0], 1, 2),
    ([1.0] * 6 + [0.0], 1, 2),
    ([1.0] * 5 + [0.0], 2, 2),
    ([1.0] * 3 + [0.5, 0.0], 3, 1),
]


def tries() -> list[AttemptRecord]:
    """Every try of the step, 33 with a verdict and 23 without."""
    rows = []
    for group, (rewards, lost_twice, lost_once) in enumerate(GROUPS):
        assert len(rewards) + lost_twice == PLANNED
        for index, reward in enumerate([*rewards, *[None] * lost_twice]):
            common = {"trained": TOKENS, "seed": 100 * group + index}
            if reward is None or index < lost_once:
                rows.append(attempt(group, index, None, outcome=Outcome.SANDBOX_LOST, **common))
                if reward is None:
                    rows.append(again(attempt(group, index, None, outcome=Outcome.SANDBOX_LOST, **common)))
                else:
                    rows.append(again(attempt(group, index, reward, **common)))
            else:
                rows.append(attempt(group, index, reward, **common))
    return rows


def again(record: AttemptRecord) -> AttemptRecord:
    """The same attempt's second try."""
    name = record.attempt_id.replace("-t0", "-t1")
    verdict = None if record.verdict is None else renamed(record.verdict, attempt_id=name)
    assert record.stored is not None
    merged = decode_samples(OBJECTS[record.stored.sha256], name)
    stored = store_samples([replace(each, attempt_id=name) for each in merged], merged_key("demo", 0, 0, name))
    return replace(record, attempt_id=name, try_index=1, verdict=verdict, stored=stored)


def decided(records: list[AttemptRecord]) -> FilterResult:
    return filter_groups(records, CONFIG, expected_version="run:0", max_seq_len=384)


@dataclass(frozen=True)
class Trained:
    """What the trainer makes of a batch: loss, its gradient by row and token, and two means over trained tokens."""

    loss: float
    gradient: np.ndarray
    mean_abs_dlogp: float
    tis_mean: float


def train(result: FilterResult, advantages: np.ndarray | None = None, divisor: int | None = None) -> Trained:
    """As the trainer does it: weights of the batch's rows in units of the mean, sums divided once by `divisor`."""
    samples = [sample_at(row) for row in result.kept]
    divisor = divisor or result.trained_tokens
    mask = torch.tensor(np.stack([s.loss_mask for s in samples]))
    rollout = torch.tensor(np.stack([s.logprobs for s in samples]))
    new = (rollout + DRIFT).requires_grad_()
    by_row = torch.tensor(
        [row.advantage for row in result.kept] if advantages is None else advantages, dtype=torch.float32
    ).unsqueeze(-1)
    weights = torch.tensor([row.weight * result.trained_tokens for row in result.kept]).unsqueeze(-1)
    parts = policy_loss(new, rollout, by_row, mask, CONFIG, weights=weights)
    loss = parts.loss_sum / divisor
    loss.backward()
    assert new.grad is not None
    means = (float(total) / divisor for total in (parts.abs_dlogp_sum, parts.importance_sum))
    return Trained(loss.item(), new.grad.numpy(), *means)


def naive_advantages(records: list[AttemptRecord]) -> dict[str, float]:
    """Reward less the mean of all rows of the group, a row without a verdict counting as 0."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for record in records:
        rewards[record.group_id].append(0.0 if record.verdict is None else record.verdict.reward)
    return {
        record.attempt_id: record.verdict.reward - float(np.mean(rewards[record.group_id]))
        for record in records
        if record.verdict is not None
    }


def test_the_layout_is_the_one_worked_out_above() -> None:
    records = tries()
    valid = [record for record in records if record.verdict is not None]
    assert (len(records), len(valid)) == (56, 33)
    by_group = [[record for record in records if record.group_id.endswith(f"g{g:03}")] for g in range(5)]
    assert [len(rows) for rows in by_group] == [10, 11, 11, 12, 12]
    assert [sum(row.verdict is not None for row in rows) for rows in by_group] == [8, 7, 7, 6, 5]
    assert all(record.sampled_tokens == TOKENS for record in records)


def test_lost_attempts_scale_no_gradient_and_dilute_no_mean() -> None:
    records = tries()
    result = decided(records)
    assert len(result.kept) == 33 and result.trained_tokens == 33 * TOKENS
    ours, naive = train(result), train(result, divisor=56 * TOKENS)
    alone = train(decided([record for record in records if record.verdict is not None]))

    assert ours.loss == alone.loss and (ours.gradient == alone.gradient).all()  # bit by bit: scale x 1
    share = naive.gradient[ours.gradient != 0] / ours.gradient[ours.gradient != 0]
    np.testing.assert_allclose(share, 33 / 56, rtol=1e-5)
    assert round(33 / 56, 2) == 0.59 and naive.loss == pytest.approx(ours.loss * 33 / 56, rel=1e-5)

    assert ours.mean_abs_dlogp == pytest.approx(DRIFT, rel=1e-5)
    assert ours.tis_mean == pytest.approx(np.exp(DRIFT), rel=1e-5)
    assert naive.mean_abs_dlogp == pytest.approx(DRIFT * 33 / 56, rel=1e-5)
    assert naive.tis_mean == pytest.approx(0.62, abs=0.005)  # reads as if the trainer gave the tokens up


def test_lost_attempts_shift_no_advantage() -> None:
    records = tries()
    ours = {row.attempt_id: row.advantage for row in decided(records).kept}
    naive = naive_advantages(records)
    passes = [record.attempt_id for record in records if record.verdict is not None and record.verdict.reward == 1]
    assert len(passes) == 27
    shifts = {round(naive[name] - ours[name], 3) for name in passes}
    assert shifts == {0.175, 0.312, 0.417, 0.408}
    assert np.mean([ours[name] for name in passes]) == pytest.approx(0.16, abs=0.005)
    assert np.mean([naive[name] - ours[name] for name in passes]) == pytest.approx(0.31, abs=0.005)
    # around its own baseline a group pushes nowhere; around the naive one it pushes every valid attempt up
    for group in range(5):
        names = [name for name in ours if f"-g{group:03}-" in name]
        assert sum(ours[name] for name in names) == pytest.approx(0, abs=1e-12)
        assert sum(naive[name] for name in names) > 1


def test_lost_attempts_are_in_no_mean_reward() -> None:
    records = tries()
    result = decided(records)
    trained = train(result)
    report = {"status": "trained", "version_after": 1, "loss": trained.loss, "grad_norm": 1.0, "trained_samples": 33}
    report |= {"trained_tokens": 33 * TOKENS, "loss_weight_sum": 1.0}
    ledger = build_step_ledger(
        run="demo", step=0, attempts=records, decisions=result.decisions, train=report, push=None, phases_s={}
    )
    reward = reward_metrics(ledger)
    naive = np.mean([0.0 if record.verdict is None else record.verdict.reward for record in records])
    assert reward["unfiltered_mean_valid"] == reward["kept_mean"] == pytest.approx(27.5 / 33)
    assert reward["infra_rate"] == pytest.approx(23 / 56)
    assert round(reward["unfiltered_mean_valid"], 2) == 0.83 and round(float(naive), 2) == 0.49


def test_uneven_groups_keep_their_own_baselines() -> None:
    easy = [attempt(0, index, float(index < 7)) for index in range(8)]
    hard = [attempt(1, index, float(index < 1)) for index in range(7)] + [attempt(1, 7, None)]
    result = decided([*easy, *hard])
    assert len(result.kept) == 15
    rewards = np.array([record.verdict.reward for record in [*easy, *hard] if record.verdict is not None])
    ours, naive = np.array([row.advantage for row in result.kept]), rewards - rewards.mean()
    first, second = slice(0, 8), slice(8, 15)

    np.testing.assert_allclose(ours[[0, 7, 8, 9]], [0.125, -0.875, 6 / 7, -1 / 7], rtol=1e-12)
    np.testing.assert_allclose(naive[[0, 7, 8, 9]], [7 / 15, -8 / 15, 7 / 15, -8 / 15], rtol=1e-12)
    np.testing.assert_allclose([ours[first].sum(), ours[second].sum()], 0, atol=1e-12)
    np.testing.assert_allclose([naive[first].sum(), naive[second].sum()], [41 / 15, -41 / 15], rtol=1e-12)

    def pushed(trained: Trained) -> list[float]:
        """How far gradient descent raises the log-probs of each group's tokens, all in all."""
        return [-float(trained.gradient[rows].sum()) for rows in (first, second)]

    np.testing.assert_allclose(pushed(train(result)), 0, atol=1e-6)
    up, down = pushed(train(result, naive))
    assert up > 0.1 and down == pytest.approx(-up, rel=1e-4)
