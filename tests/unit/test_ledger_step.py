"""The books balance, and every way they can fail to is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rl360.config.run import ObjectiveConfig
from rl360.errors import CorruptObject
from rl360.ledger.checks import TRAIN_FIGURES, LedgerBroken, check_ledger
from rl360.ledger.outcomes import DROPPED, Bucket, Outcome
from rl360.ledger.step import StepLedger, build_step_ledger
from rl360.objective.filters import filter_groups
from rl360.store.codec import pack, unpack
from tests.unit.ledger_data import PHASES_S, PUSH, ledger_of, train_result
from tests.unit.objective_data import attempt

ATTEMPTS = [
    attempt(0, 0, 1.0),
    attempt(0, 1, 0.0, outcome=Outcome.TRUNCATED, truncated=True, dropped={"after_truncation": 4}),
    attempt(0, 2, None),
    attempt(1, 0, 1.0),
    attempt(1, 1, 1.0),
    attempt(2, 0, 0.0),
    attempt(2, 1, None, sample=False, outcome=Outcome.SESSION_LOST),
]


def build(**changes: Any) -> StepLedger:
    result = filter_groups(ATTEMPTS, ObjectiveConfig(), expected_version="run:0", max_seq_len=384)
    arguments: dict[str, Any] = {
        "run": "demo",
        "step": 0,
        "attempts": ATTEMPTS,
        "decisions": result.decisions,
        "train": train_result(result, 0),
        "push": PUSH,
        "phases_s": PHASES_S,
        **changes,
    }
    return build_step_ledger(**arguments)


def decisions_with(index: int, **changes: Any) -> list[Any]:
    decisions = list(filter_groups(ATTEMPTS, ObjectiveConfig(), expected_version="run:0", max_seq_len=384).decisions)
    decisions[index] = replace(decisions[index], **changes)
    return decisions


def train_with(**changes: Any) -> dict[str, Any]:
    result = filter_groups(ATTEMPTS, ObjectiveConfig(), expected_version="run:0", max_seq_len=384)
    return train_result(result, 0, **changes)


def test_rows_hold_outcome_bucket_and_weight() -> None:
    ledger = build()
    first, cut, lost = ledger.attempts[:3]
    assert (first.bucket, first.reward, first.advantage) == (Bucket.TRAINED, 1.0, 0.5)
    assert first.token_weight == 1 / 12
    assert first.loss_weight == pytest.approx(0.5)
    assert first.context == {Bucket.PROMPT: 4, Bucket.OBSERVATION: 3}
    assert cut.tokens == {Bucket.TRAINED: 6, Bucket.AFTER_TRUNCATION: 4}
    assert cut.truncated
    assert (lost.bucket, lost.reward, lost.token_weight, lost.loss_weight) == (Bucket.INFRA, None, None, 0.0)
    assert lost.seconds == pytest.approx(2.7)
    assert all(check.holds for check in check_ledger(ledger))


def test_the_leaves_of_an_attempt_are_one_row() -> None:
    """Its baseline counts once, its samples are counted apart, its tokens and context are those of all its samples."""
    leaves = [
        {"trained": 6, "dropped": {"prefix_break": 1}},
        {"trained": 4, "dropped": {"duplicate": 2}},
        {"version": "run:7"},
    ]
    ledger = ledger_of([attempt(0, 0, 1.0, leaves=leaves), attempt(0, 1, 0.0)])
    row = ledger.attempts[0]
    assert row.leaves == (Bucket.TRAINED, Bucket.TRAINED, Bucket.STALE)
    assert (row.bucket, row.advantage, row.trained_samples) == (Bucket.TRAINED, 0.5, 2)
    assert row.tokens == {Bucket.TRAINED: 10, Bucket.PREFIX_BREAK: 1, Bucket.DUPLICATE: 2, Bucket.STALE: 6}
    assert row.sampled_tokens == 19
    assert row.context == {Bucket.PROMPT: 12, Bucket.OBSERVATION: 9}
    assert row.loss_weight == pytest.approx(10 / 16)
    assert ledger.train.trained_samples == 3 and ledger.trained_ids == [r.attempt_id for r in ledger.attempts]
    assert all(check.holds for check in check_ledger(ledger))


def test_weights_are_those_of_the_runs_reduction() -> None:
    attempts = [attempt(0, 0, 1.0, leaves=[{"trained": 6}, {"trained": 2}]), attempt(0, 1, 0.0, trained=4)]
    config = ObjectiveConfig(reduction="sample_mean")
    result = filter_groups(attempts, config, expected_version="run:0", max_seq_len=384)
    ledger = build(attempts=attempts, decisions=result.decisions, train=train_result(result, 0, masked_fraction=0.25))
    assert [row.token_weight for row in ledger.attempts] == [1 / 16, 1 / 8]
    assert [row.loss_weight for row in ledger.attempts] == [0.5, 0.5], "each attempt counts the same"
    assert ledger.train.masked_fraction == 0.25
    fixed = ObjectiveConfig(preset="dr_grpo")
    result = filter_groups(attempts, fixed, expected_version="run:0", max_seq_len=384, loss_constant=48.0)
    train = train_result(result, 0, loss_weight_sum=0.25)
    ledger = build(attempts=attempts, decisions=result.decisions, train=train)
    assert all(check.holds for check in check_ledger(ledger))
    with pytest.raises(LedgerBroken, match=r"loss weights: booked 0\.25 != trainer 1"):
        build(attempts=attempts, decisions=result.decisions, train=train_result(result, 0))


def test_a_step_that_trains_nothing_is_empty_not_zero() -> None:
    ledger = ledger_of([attempt(0, 0, 1.0), attempt(0, 1, 1.0)])
    assert ledger.train.status == "empty"
    assert ledger.train.loss is None
    assert ledger.push is None
    assert all(check.holds for check in check_ledger(ledger))


def test_round_trip_through_the_store_format() -> None:
    ledger = build()
    assert StepLedger.from_wire(unpack(pack(ledger.to_wire()), "k"), "k") == ledger


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": train_with(trained_tokens=13)}, "trained tokens: booked 12 != trainer 13"),
        ({"train": train_with(trained_samples=3)}, "trained samples: booked 2 != trainer 3"),
        ({"train": train_with(loss_weight_sum=1.001)}, "loss weights: booked 1 != trainer 1.001"),
        ({"train": {"status": "trained"}}, "trainer's result lacks a field"),
        ({"push": {"path": "broadcast"}}, "push record lacks calls_per_engine, bytes, paused_s, engines"),
        (
            {"decisions": decisions_with(2, tokens={Bucket.INFRA: 5})},
            r"tokens in buckets 39 != tokens sampled 40 .*a02-t0",
        ),
        (
            {"decisions": decisions_with(0, reward=0.0)},
            "recorded as passed .* reward 1.0, decided as passed .* reward 0.0",
        ),
        ({"decisions": decisions_with(0, outcome=Outcome.FAILED)}, "decided as failed"),
        ({"decisions": decisions_with(0, score=1.5)}, "a score of every reward.* 5 != .* 5 .*a00-t0"),
        ({"decisions": decisions_with(0, score=None)}, "a score of every reward.* 4 != .* 5 .*a00-t0"),
        ({"decisions": decisions_with(2, score=0.5)}, "a score of every reward.* 6 != .* 6 .*a02-t0"),
        ({"decisions": decisions_with(6, score=0.0)}, "a score of every reward.* 6 != .* 5"),
        (
            {"decisions": decisions_with(0, leaves=(Bucket.TRAINED, Bucket.STALE))},
            "a00-t0: 1 samples recorded, 2 decided",
        ),
        ({"decisions": decisions_with(0, leaves=(Bucket.STALE,))}, "trained samples: booked 1 != trainer 2 .*a00-t0"),
        ({"decisions": decisions_with(0)[1:]}, "7 attempts were recorded and 6 decided"),
        ({"decisions": [*decisions_with(0)[1:], decisions_with(1)[1]]}, "7 attempts were recorded and 7 decided"),
        ({"attempts": [*ATTEMPTS, ATTEMPTS[0]]}, "8 attempts were recorded and 7 decided"),
    ],
)
def test_books_that_do_not_balance_are_refused(changes: dict[str, Any], message: str) -> None:
    if "attempts" in changes:
        changes = {"decisions": decisions_with(0), "train": train_with(), **changes}
    with pytest.raises(LedgerBroken, match=message):
        build(**changes)


def test_what_an_earlier_step_trained_too_is_found() -> None:
    twice = "s000000-g000-a01-t0"
    (found,) = [check for check in check_ledger(build(), {twice}) if not check.holds]
    assert found.name == "trained once" and twice in found.line() and "1 != allowed 0" in found.line()


def test_an_attempt_of_another_step_is_refused_without_reading_that_step() -> None:
    """Ids name their step, so what is of this step alone cannot have trained in an earlier one."""
    attempts = [attempt(0, 0, 1.0, step=3), attempt(0, 1, 0.0, step=3), attempt(1, 0, 1.0, step=2)]
    with pytest.raises(LedgerBroken, match=r"attempts of this step: of another step 1 != allowed 0 .*s000002-g001-a00"):
        ledger_of(attempts, step=3)
    assert ledger_of(attempts[:2], step=3).step == 3


def test_faults_that_cancel_in_the_sum_are_found() -> None:
    decisions = decisions_with(2, tokens={Bucket.INFRA: 5})
    decisions[3] = replace(decisions[3], tokens={Bucket.ZERO_DISAGREEMENT: 7})
    with pytest.raises(
        LedgerBroken, match=r"tokens in buckets 40 != tokens sampled 40 \(e.g. attempt s000000-g000-a02-t0\)"
    ):
        build(decisions=decisions)


def test_a_batch_the_trainer_refused_is_booked_as_nonfinite() -> None:
    refused = {"status": "nonfinite", **dict.fromkeys(TRAIN_FIGURES), "version_after": 0}
    ledger = build(train={**refused, "trained_samples": 0, "trained_tokens": 0, "loss_weight_sum": 0.0})
    assert ledger.trained_ids == []
    assert ledger.attempts[0].tokens == {Bucket.NONFINITE: 6}
    assert ledger.attempts[1].tokens == {Bucket.NONFINITE: 6, Bucket.AFTER_TRUNCATION: 4}
    assert (ledger.attempts[0].advantage, ledger.attempts[0].loss_weight) == (None, 0.0)
    assert ledger.attempts[0].leaves == (Bucket.NONFINITE,)
    assert all(check.holds for check in check_ledger(ledger))


def test_what_a_session_dropped_is_booked_where_it_said() -> None:
    dropped = {str(bucket): 1 + index for index, bucket in enumerate(DROPPED)}
    attempts = [attempt(0, 0, 1.0, dropped=dropped), attempt(0, 1, 0.0)]
    ledger = ledger_of(attempts)
    assert ledger.attempts[0].tokens == {Bucket.TRAINED: 6, **dropped}
    lost = {"trained_samples": 0, "trained_tokens": 0, "loss_weight_sum": 0.0, **dict.fromkeys(TRAIN_FIGURES)}
    refused = ledger_of(attempts, status="nonfinite", version_after=0, **lost).attempts[0]
    assert refused.tokens == {**dropped, Bucket.NONFINITE: 6 + dropped["nonfinite"]}
    assert refused.sampled_tokens == sum(refused.tokens.values())


def test_an_empty_step_may_not_have_taken_an_optimizer_step() -> None:
    with pytest.raises(LedgerBroken, match="optimizer steps 1 != expected 0"):
        ledger_of([attempt(0, 0, 1.0), attempt(0, 1, 1.0)], status="trained", loss=0.0)


def test_tokens_the_engine_reported_and_nobody_recorded_are_found() -> None:
    seen = [replace(record, agent_metrics={"completion_tokens": 6.0}) for record in ATTEMPTS[:2]]
    ledger = build(attempts=[*seen, *ATTEMPTS[2:]])
    check = next(check for check in check_ledger(ledger) if check.name == "no token lost")
    assert check.holds
    assert check.detail == "2 attempts compared with what their agents received; 4 sampled tokens reached no agent"
    short = replace(ATTEMPTS[0], agent_metrics={"completion_tokens": 7.0})
    with pytest.raises(LedgerBroken, match=r"no token lost: .* 1 != allowed 0 \(s000000-g000-a00-t0\)"):
        build(attempts=[short, *ATTEMPTS[1:]])


def test_tokens_of_a_session_that_was_not_merged_are_in_the_books() -> None:
    unmerged = attempt(0, 1, None, sample=False, unmerged=5)
    seen = [replace(unmerged, agent_metrics={"completion_tokens": 5.0}), attempt(0, 0, 1.0)]
    assert ledger_of(seen).attempts[1].tokens == {Bucket.INFRA: 5}
    with pytest.raises(LedgerBroken, match=r"no token lost: .* 1 != allowed 0 \(s000000-g000-a01-t0\)"):
        ledger_of([replace(unmerged, agent_metrics={"completion_tokens": 6.0})])
    assert ledger_of([replace(unmerged, unmerged_tokens=0, agent_metrics={"completion_tokens": 6.0})])


def test_malformed_objects_are_refused_by_key() -> None:
    wire = build().to_wire()
    with pytest.raises(
        CorruptObject, match=r"object some/key: ledger schema 9, this rl360 reads 3 and 4; read it with"
    ):
        StepLedger.from_wire({**wire, "schema_version": 9}, "some/key")
    with pytest.raises(CorruptObject, match=r"some/key: is not a ledger \(KeyError: 'train'\)"):
        StepLedger.from_wire({name: value for name, value in wire.items() if name != "train"}, "some/key")
    for schema, said in ((3, "versions"), (4, "odd")):  # a row of another schema than it says
        row = {**wire["attempts"][0], **({} if schema == 3 else {"odd": 1})}
        with pytest.raises(CorruptObject, match=f"a row lacks, or should not have, .*{said}"):
            StepLedger.from_wire({**wire, "schema_version": schema, "attempts": [row]}, "some/key")
    for lacking in ("samples", "tokens", "digest", "cannot_tell"):
        seen = {"samples": 2, "tokens": 12, "digest": "d", "cannot_tell": 0}
        del seen[lacking]
        with pytest.raises(CorruptObject, match=f"witness lacks {lacking}"):
            StepLedger.from_wire({**wire, "train": {**wire["train"], "witness": seen}}, "some/key")
        with pytest.raises(LedgerBroken, match=f"lacks a field the ledger needs .*witness lacks {lacking}"):
            build(train=train_with(witness=seen))
    unknown = {**wire, "attempts": [{**wire["attempts"][0], "outcome": "vanished"}]}
    with pytest.raises(CorruptObject, match="'vanished' is not a valid Outcome"):
        StepLedger.from_wire(unknown, "some/key")
    prompt = {**wire, "attempts": [{**wire["attempts"][0], "tokens": {"prompt": 6}}]}
    with pytest.raises(CorruptObject, match="counts unsampled tokens as sampled"):
        StepLedger.from_wire(prompt, "some/key")
