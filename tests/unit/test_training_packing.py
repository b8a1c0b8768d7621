"""Packing: every sample once, equal counts per rank, nothing over the limit, padding that weighs nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.errors import BadInput
from rl360.training.packing import TrainSequence, build, plan


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 200), max_size=60),
    max_tokens=st.integers(200, 2000),
    ranks=st.integers(1, 5),
    multiple=st.sampled_from([1, 2, 4]),
)
def test_plan_is_a_partition(lengths: list[int], max_tokens: int, ranks: int, multiple: int) -> None:
    by_rank = plan(lengths, max_tokens, ranks, multiple)
    assert len(by_rank) == ranks
    assert len({len(groups) for groups in by_rank}) == 1
    found = [i for groups in by_rank for group in groups for i in group]
    assert sorted(found) == list(range(len(lengths)))
    for groups in by_rank:
        for group in groups:
            if group:
                width = -(-(max(lengths[i] for i in group) - 1) // multiple) * multiple
                assert width * len(group) <= max_tokens
    assert plan(lengths, max_tokens, ranks, multiple) == by_rank


@given(count=st.integers(1, 40), ranks=st.integers(1, 4))
def test_no_rank_idles_while_another_could_share(count: int, ranks: int) -> None:
    by_rank = plan([20] * count, 4000, ranks)
    rows = [sum(len(group) for group in groups) for groups in by_rank]
    assert min(rows) > 0 or count < ranks


def test_similar_lengths_share_a_rectangle() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(40, 185, 256).tolist()
    groups = plan(lengths, 4096)[0]
    area = sum(len(g) * (max(lengths[i] for i in g) - 1) for g in groups)
    assert sum(n - 1 for n in lengths) / area > 0.9


def test_too_long_a_sample_is_named() -> None:
    with pytest.raises(BadInput, match="sample 1 has 500 tokens, more than max_tokens_per_micro_batch 100"):
        plan([10, 500], 100)


def sequence(tokens: list[int], mask: list[int], logprobs: list[float], advantage: float) -> TrainSequence:
    return TrainSequence(
        np.array(tokens, np.int32), np.array(mask, np.uint8), np.array(logprobs, np.float32), advantage, "s"
    )


def test_build_aligns_targets_with_what_predicts_them() -> None:
    a = sequence([5, 6, 7, 8], [0, 0, 1, 1], [0, 0, -1, -2], 0.5)
    b = replace(sequence([9, 10], [0, 1], [0, -3], -0.5), weight=0.25)
    micro = build([b, a], (1, 0))
    assert micro.inputs.tolist() == [[5, 6, 7], [9, 10, 0]]
    assert micro.targets.tolist() == [[6, 7, 8], [10, 0, 0]]
    assert micro.mask.tolist() == [[0, 1, 1], [1, 0, 0]]
    assert micro.logprobs.tolist() == [[0, -1, -2], [-3, 0, 0]]
    assert micro.advantages.tolist() == [[0.5] * 3, [-0.5] * 3]
    assert micro.weights.tolist() == [[1.0] * 3, [0.25] * 3]


def test_dummy_weighs_nothing() -> None:
    micro = build([], (), multiple=4)
    assert micro.inputs.shape == (1, 4)
    assert micro.mask.sum() == 0 and micro.weights.sum() == 0


@pytest.mark.parametrize(
    ("tokens", "mask", "logprobs", "match"),
    [
        ([1], [0], [0.0], "needs at least 2"),
        ([1, 2], [0], [0.0, 0.0], "differ in length"),
        ([1, 2], [1, 1], [0.0, 0.0], "first token"),
    ],
)
def test_bad_sequences_are_refused(tokens: list[int], mask: list[int], logprobs: list[float], match: str) -> None:
    with pytest.raises(BadInput, match=match):
        sequence(tokens, mask, logprobs, 0.0)
