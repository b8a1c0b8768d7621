"""Six laws of a step, each through all of it: records, filter, advantages, batch, rectangles, loss, gradient, ledger
(tests/property/whole_step.py). The fifth, that no failure becomes a number, is in test_no_number_properties.py.

Bits are compared where the law says nothing changes. Where only the order of sums changes, gradients in float64 may
differ by 1e-12 of their largest entry.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any, cast

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360 import step_work
from rl360.agents.records import put_table, read_table
from rl360.config.run import ObjectiveConfig, RunConfig
from rl360.ledger.checks import check_ledger
from rl360.ledger.metrics import step_json
from rl360.ledger.outcomes import SAMPLED
from rl360.ledger.step import StepLedger
from rl360.replay.steps import replay_task
from rl360.store.codec import pack, sha256_hex, unpack
from rl360.store.layout import step_key, wave_key
from rl360.store.manifest import Manifest, commit_manifest, put_object
from rl360.training.packing import build, plan
from tests.property.whole_step import (
    CONFIGS,
    CONSTANT,
    MAX_SEQ_LEN,
    RUN,
    VERSION,
    Choices,
    Step,
    batches,
    configs,
    decided,
    lost_of,
    records_of,
    take,
    train,
)
from tests.unit.ledger_data import PUSH, train_result
from tests.unit.memory_store import MemoryStore

pytestmark = pytest.mark.timeout(900)  # of seconds on a core of its own, minutes on a busy machine
THOUSANDS = settings(deadline=None, max_examples=2000)
shuffles = st.integers(0, 2**32 - 1).map(random.Random)


# -- conservation -----------------------------------------------------------------------------------------------------


@THOUSANDS
@given(batches, configs, st.booleans())
def test_every_sampled_token_is_in_one_bucket_and_what_trains_is_what_has_a_gradient(
    choose: Choices, config: ObjectiveConfig, scored: bool
) -> None:
    records = records_of(choose)
    step = take(records, config, scored)
    decisions, ledger = {decision.attempt_id: decision for decision in step.result.decisions}, step.ledger()
    assert len(decisions) == len(records) == len(ledger.attempts)
    for record in records:
        booked = decisions[record.attempt_id].tokens
        assert sum(booked.values()) == record.sampled_tokens and all(count > 0 for count in booked.values())
    assert set(step.result.tokens) <= set(SAMPLED)
    assert sum(step.result.tokens.values()) == sum(record.sampled_tokens for record in records)
    assert [check.line() for check in check_ledger(ledger) if not check.holds] == []

    names = [(row.attempt_id, row.leaf) for row in step.batch.rows]
    assert len(set(names)) == len(names)
    assert names == [(d.attempt_id, leaf) for d in step.result.decisions for leaf in d.trained_leaves]
    assert sum(int(sample.loss_mask.sum()) for sample in step.samples) == step.result.trained_tokens
    _weights_sum(step, ledger, config)
    _gradient_where_trained(step, config)


def _weights_sum(step: Step, ledger: StepLedger, config: ObjectiveConfig) -> None:
    tokens = step.result.trained_tokens
    whole = 0.0 if not tokens else tokens / CONSTANT if config.reduction == "constant" else 1.0
    assert math.isclose(math.fsum(row.loss_weight for row in ledger.attempts), whole, rel_tol=1e-12)
    assert math.isclose(math.fsum(row.weight * row.trained for row in step.batch.rows), whole, rel_tol=1e-12)
    used = step.trained.sums["weight"] / max(tokens, 1)  # by the loss itself, from float32 rectangles
    assert math.isclose(used, whole, rel_tol=1e-6)
    if config.reduction == "token_mean":
        assert step.trained.sums["weight"] == tokens


def _gradient_where_trained(step: Step, config: ObjectiveConfig) -> None:
    """Columns with a gradient are columns under the mask; which of these have none, advantages and masks explain."""
    unexplained = 0
    for index, (row, sample) in enumerate(zip(step.batch.rows, step.samples, strict=True)):
        lit = step.trained.reached[index]
        mask = np.zeros(len(lit), bool)
        mask[: len(sample.tokens) - 1] = sample.loss_mask[1:]
        assert not (lit & ~mask).any(), "a gradient where nothing trains"
        if row.advantage != 0:
            unexplained += int(mask.sum() - lit.sum())
        elif not config.entropy_coef and not config.kl_coef:
            assert not lit.any()
    assert unexplained <= step.trained.sums["clipped"] + step.trained.sums["masked"]


# -- splits -----------------------------------------------------------------------------------------------------------


@THOUSANDS
@given(batches, configs, st.integers(1, 5), st.integers(1, 3), st.sampled_from([1.0, 1.3, 2.5, 6.0]))
def test_ranks_and_micro_batches_change_the_rounding_only(
    choose: Choices, config: ObjectiveConfig, ranks: int, multiple: int, room: float
) -> None:
    step = take(records_of(choose), config)
    lengths = [len(sample.tokens) for sample in step.samples]
    widest = -(-(max(lengths, default=2) - 1) // multiple) * multiple
    max_tokens = int(widest * room)
    parts = train(
        step.samples, step.batch.trained_tokens, config, max_tokens=max_tokens, ranks=ranks, multiple=multiple
    )
    whole = step.trained
    scale = float(np.abs(whole.gradient).max(initial=0.0))
    np.testing.assert_allclose(parts.gradient, whole.gradient, rtol=0, atol=1e-12 * scale)
    np.testing.assert_allclose([*parts.sums.values()], [*whole.sums.values()], rtol=1e-11, atol=1e-13)
    assert parts.reached.keys() == whole.reached.keys()

    shares = plan(lengths, max_tokens, ranks, multiple)
    assert len(shares) == ranks and len({len(share) for share in shares}) == 1
    placed: Counter[int] = Counter()
    for share in shares:
        for indices in share:
            rectangle = build(step.samples, indices, multiple)
            placed.update(indices)
            for row, index in enumerate(indices):
                sample, used = step.samples[index], lengths[index] - 1
                assert rectangle.mask[row, :used].tolist() == sample.loss_mask[1:].tolist()
                assert not rectangle.mask[row, used:].any()
                assert (rectangle.weights[row] == np.float32(sample.weight)).all(), "the weight, to the bit"
                assert (rectangle.advantages[row] == np.float32(sample.advantage)).all()
            assert not rectangle.mask[len(indices) :].any()
    assert placed == Counter(range(len(lengths)))


# -- order ------------------------------------------------------------------------------------------------------------


@THOUSANDS
@given(batches, configs, st.booleans(), shuffles)
def test_order_of_attempts_and_groups_changes_no_bit(
    choose: Choices, config: ObjectiveConfig, scored: bool, shuffle: random.Random
) -> None:
    records = records_of(choose)
    first = take(records, config, scored)
    shuffle.shuffle(records)
    second = take(records, config, scored)
    assert first.data == second.data
    assert first.trained.bits() == second.trained.bits()
    assert pack(first.ledger().to_wire()) == pack(second.ledger().to_wire())


# -- infra neutrality -------------------------------------------------------------------------------------------------

# what counts attempts, tokens or engine work of all attempts, the lost ones included
COUNTS_ALL = {"attempts", "outcomes", "attempt_bars", "groups", "sampled_tokens", "tokens", "context_tokens"}
COUNTS_ALL |= {"forwards", "cache_share", "decode_row_share", "losses_by_cause"}


@THOUSANDS
@given(batches, configs, st.booleans(), shuffles)
def test_attempts_lost_beside_the_rest_change_the_infra_rate_and_no_bit_of_the_rest(
    choose: Choices, config: ObjectiveConfig, scored: bool, shuffle: random.Random
) -> None:
    """Where timeouts are scored they are not infrastructure; all else is."""
    lost = lost_of(choose, timeouts=not scored)
    records = records_of(choose)
    alone = take(records, config, scored)
    crowd = [*records, *lost]
    shuffle.shuffle(crowd)
    crowded = take(crowd, config, scored)
    names = {record.attempt_id for record in records}
    assert tuple(d for d in crowded.result.decisions if d.attempt_id in names) == alone.result.decisions
    assert all(d.score is None and d.advantage is None for d in crowded.result.decisions if d.attempt_id not in names)
    assert crowded.batch_rows == alone.batch_rows
    assert crowded.trained.bits() == alone.trained.bits()
    _books_of_the_rest_stay(alone, crowded, names)


def _books_of_the_rest_stay(alone: Step, crowded: Step, names: set[str]) -> None:
    fewer, all_of_them = alone.ledger(), crowded.ledger()
    assert tuple(row for row in all_of_them.attempts if row.attempt_id in names) == fewer.attempts
    assert replace(all_of_them.train, batch_digest="") == replace(fewer.train, batch_digest="")
    before, after = step_json(fewer), step_json(all_of_them)
    rate = before["reward"].pop("infra_rate"), after["reward"].pop("infra_rate")
    for each in (before, after):
        del each["reward"]["infra_rate_by_domain"]
        # which k are listed follows from the planned size of groups, lost attempts included
        each["pass_at_k"] = {k: rate for k, rate in each["pass_at_k"].items() if rate["groups"]}
    without, lost = sum(row.score is None for row in fewer.attempts), len(crowded.records) - len(alone.records)
    assert rate == (without / len(names), (without + lost) / len(crowded.records))
    assert {k: v for k, v in before.items() if k not in COUNTS_ALL} == {
        k: v for k, v in after.items() if k not in COUNTS_ALL
    }
    for name, free in (("attempt_bars", {"infra"}), ("groups", {"infra", "total"}), ("tokens", {"infra"})):
        assert {k: v for k, v in before[name].items() if k not in free} == {
            k: v for k, v in after[name].items() if k not in free
        }


# -- replay -----------------------------------------------------------------------------------------------------------


def run_config(objective: ObjectiveConfig, scored: bool) -> RunConfig:
    rollout = {"max_seq_len": MAX_SEQ_LEN, "unverified_timeout": "score_zero" if scored else "mask"}
    taskset = {"groups_per_step": 1, "attempts_per_group": 2}
    fields = objective.model_dump()
    return RunConfig.model_validate({"run": RUN, "rollout": rollout, "taskset": taskset, "objective": fields})


RUNS = [run_config(objective, scored) for objective in CONFIGS for scored in (False, True)]


def commit(store: MemoryStore, task: str, produced: step_work.Produced) -> None:
    made = {"objects": produced.objects, "counts": produced.counts, "info": produced.info}
    commit_manifest(cast(Any, store), Manifest(run=RUN, step=0, task=task, started_at=1.0, finished_at=2.5, **made))


def _planned() -> dict[str, bytes]:
    """What is in the store whatever a step's records are."""
    store = MemoryStore()
    commit(store, "sample_groups", step_work.sample_groups(cast(Any, store), RUNS[0], 0))
    commit(store, "roll_out-0000", step_work.Produced([put_table(cast(Any, store), wave_key(RUN, 0, 0), [])]))
    commit(store, "push_weights", step_work.Produced(counts={"engines": 2}, info={**PUSH, "engines": 2}))
    commit(store, "checkpoint", step_work.Produced())
    return store.objects


PLANNED = _planned()


@THOUSANDS
@given(batches, st.sampled_from(RUNS))
def test_what_is_computed_again_from_the_records_is_equal_to_the_byte(choose: Choices, config: RunConfig) -> None:
    records = records_of(choose)
    store = MemoryStore()
    store.objects.update(PLANNED)
    s3 = cast(Any, store)
    table = put_table(s3, step_key(RUN, 0, "records.msgpack"), records)
    commit(store, "collect", step_work.Produced([table]))
    read = read_table(s3, table)
    assert read == sorted(records, key=lambda record: record.attempt_id)
    commit(store, "filter_groups", step_work.filter_groups(s3, config, 0, VERSION))

    scored = config.rollout.unverified_timeout == "score_zero"
    result = decided(read, config.objective, scored, config.loss_constant)
    data = pack(result.to_wire(RUN, 0))
    assert data == store.objects[step_key(RUN, 0, "filter.msgpack")]
    weights = math.fsum(row.weight * row.trained for row in result.kept)
    report = train_result(result, 0, loss_weight_sum=weights, batch_digest=sha256_hex(data))
    trained = put_object(s3, step_key(RUN, 0, "train.json"), orjson.dumps(report))
    commit(store, "train", step_work.Produced([trained]))
    produced, ledger = step_work.close_books(s3, config, 0)
    commit(store, "report", produced)

    before = dict(store.objects)
    for task in ("filter_groups", "report"):
        assert [row.line() for row in replay_task(s3, config, 0, task, b"") if not row.equal] == []
    assert store.objects == before
    stored = store.objects[step_key(RUN, 0, "ledger.msgpack")]
    back = StepLedger.from_wire(unpack(stored, "ledger.msgpack"), "ledger.msgpack")
    assert back == ledger and pack(back.to_wire()) == stored
