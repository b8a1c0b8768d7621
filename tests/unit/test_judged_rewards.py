"""Rewards between 0 and 1, as judges give: raw and shaped stay apart in record, decision, ledger and metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rl360.config.run import ObjectiveConfig
from rl360.harbor.verdict import JudgeReceipt, receipt_problem, run_key, sign
from rl360.ledger import metrics
from rl360.ledger.outcomes import Bucket, Outcome
from rl360.ledger.step import StepLedger
from rl360.objective.filters import filter_groups
from rl360.sessions.sample import AttemptRecord
from rl360.store.codec import pack, unpack
from tests.unit.ledger_data import ledger_of
from tests.unit.objective_data import attempt
from tests.unit.verdict_data import TOKEN

SHAPED = ObjectiveConfig(format_error_penalty=0.3)
KEY = run_key(TOKEN, "demo")


def judged(group: int, index: int, score: float, errors: float = 0.0) -> AttemptRecord:
    """An attempt that a judge gave `score` of 10."""
    record = attempt(group, index, score / 10)
    assert record.verdict is not None
    receipt = JudgeReceipt(
        model="j", served_model="j-1", host="h", prompt_digest="ab" * 32, reply_id="r", score=score, prompt_tokens=9
    )
    said = {n: v for n, v in record.verdict if n not in ("signature", "written_by_verifier", "judge")}
    signed = sign(KEY, judge=receipt, **said)
    return replace(record, verdict=signed, agent_metrics={"format_errors": errors}).check("k")


GROUP = [judged(0, 0, 2.0, errors=4), judged(0, 1, 9.5), judged(0, 2, 10.0, errors=2), judged(0, 3, 10.0)]


def decide(attempts: list[AttemptRecord], objective: ObjectiveConfig) -> Any:
    return filter_groups(attempts, objective, expected_version="run:0", max_seq_len=384)


def test_a_record_keeps_what_the_judge_said() -> None:
    for record in GROUP:
        again = AttemptRecord.from_wire(unpack(pack(record.to_wire()), "k"), "k")
        assert again == record and again.verdict is not None
        assert receipt_problem(again.verdict, KEY, "demo") is None
        assert again.verdict.judge is not None and again.verdict.judge.score == 10 * again.verdict.reward


def test_only_passes_are_penalised_and_rewards_stay() -> None:
    result = decide(GROUP, SHAPED)
    assert [(d.reward, d.score) for d in result.decisions] == [(0.2, 0.2), (0.95, 0.95), (1.0, 0.7), (1.0, 1.0)]
    mean = (0.2 + 0.95 + 0.7 + 1.0) / 4
    assert [row.advantage for row in result.kept] == pytest.approx([0.2 - mean, 0.95 - mean, 0.7 - mean, 1.0 - mean])


def test_ledger_and_metrics_tell_them_apart() -> None:
    ledger = ledger_of(GROUP, objective=SHAPED)
    ledger = StepLedger.from_wire(unpack(pack(ledger.to_wire()), "k"), "k")
    assert [(row.reward, row.score) for row in ledger.attempts] == [(0.2, 0.2), (0.95, 0.95), (1.0, 0.7), (1.0, 1.0)]
    assert [row.outcome for row in ledger.attempts] == [Outcome.FAILED] * 2 + [Outcome.PASSED] * 2
    reward = metrics.reward_metrics(ledger)
    assert reward["unfiltered_mean_valid"] == reward["kept_mean"] == pytest.approx((0.2 + 0.95 + 2.0) / 4)
    assert reward["kept_mean_score"] == pytest.approx((0.2 + 0.95 + 0.7 + 1.0) / 4)
    assert reward["penalised"] == 1


def test_groups_agree_by_raw_rewards_unless_told_otherwise() -> None:
    """Two that differ in spelling alone, at 1; and two that differ raw, at 1 and 0.7, and not shaped."""
    spelling = [judged(0, 0, 10.0, errors=1), judged(0, 1, 10.0)]
    raw = [judged(1, 0, 10.0, errors=1), judged(1, 1, 7.0)]
    by_raw = decide([*spelling, *raw], SHAPED).decisions
    assert [d.bucket for d in by_raw] == [Bucket.ZERO_DISAGREEMENT] * 2 + [Bucket.TRAINED] * 2
    assert [d.advantage for d in by_raw[2:]] == [0.0, 0.0]
    by_shaped = decide([*spelling, *raw], ObjectiveConfig(format_error_penalty=0.3, filter_on="shaped")).decisions
    assert [d.bucket for d in by_shaped] == [Bucket.TRAINED] * 2 + [Bucket.ZERO_DISAGREEMENT] * 2
    assert [d.reward for d in by_shaped] == [d.reward for d in by_raw] == [1.0, 1.0, 1.0, 0.7]


def test_a_judges_failures_change_nothing_of_the_others() -> None:
    lost = [attempt(0, index, None, outcome=Outcome.JUDGE_ERROR) for index in (7, 8)]
    with_lost, without = decide([*GROUP, *lost], SHAPED), decide(GROUP, SHAPED)
    assert with_lost.kept == without.kept
    assert [d.bucket for d in with_lost.decisions if d.outcome is Outcome.JUDGE_ERROR] == [Bucket.INFRA] * 2
    scored = filter_groups([*GROUP, *lost], SHAPED, expected_version="run:0", max_seq_len=384, score_timeouts=True)
    assert scored.kept == without.kept, "no switch scores them"
