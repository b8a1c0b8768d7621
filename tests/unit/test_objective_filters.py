"""Each rule of the filter, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rl360.config.run import ObjectiveConfig
from rl360.errors import BadInput, CorruptObject
from rl360.ledger.outcomes import INFRA, Bucket, Outcome
from rl360.objective.filters import FilterResult, filter_groups, read_decisions
from rl360.sessions.sample import AttemptRecord
from rl360.store.codec import pack, unpack
from tests.unit.objective_data import attempt, sample_of

CONFIG = ObjectiveConfig()


def run_filter(
    attempts: list[AttemptRecord],
    *,
    max_seq_len: int = 384,
    config: ObjectiveConfig = CONFIG,
    loss_constant: float | None = None,
    routing_replay: bool = False,
    score_timeouts: bool = False,
) -> FilterResult:
    return filter_groups(
        attempts,
        config,
        expected_version="run:0",
        max_seq_len=max_seq_len,
        loss_constant=loss_constant,
        routing_replay=routing_replay,
        score_timeouts=score_timeouts,
    )


def attempts_of(first: AttemptRecord) -> list[AttemptRecord]:
    """A group of four that passed once."""
    return [first, attempt(0, 1, 0.0), attempt(0, 2, 0.0), attempt(0, 3, 0.0)]


def buckets(result: FilterResult) -> list[Bucket]:
    return [decision.bucket for decision in result.decisions]


def test_a_group_that_disagrees_trains_with_its_mean_as_baseline() -> None:
    result = run_filter([attempt(0, 0, 1.0), attempt(0, 1, 0.0), attempt(0, 2, 0.0), attempt(0, 3, 0.0)])
    assert buckets(result) == [Bucket.TRAINED] * 4
    assert [row.advantage for row in result.kept] == [0.75, -0.25, -0.25, -0.25]
    assert result.trained_tokens == 24
    assert [row.weight for row in result.kept] == [1 / 24] * 4


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.0, 0.0], [0.3, 0.3 + 1e-8]])
def test_a_group_that_agrees_is_zero_disagreement(rewards: list[float]) -> None:
    result = run_filter([attempt(0, i, reward) for i, reward in enumerate(rewards)])
    assert set(buckets(result)) == {Bucket.ZERO_DISAGREEMENT}
    assert result.tokens == {Bucket.ZERO_DISAGREEMENT: 6 * len(rewards)}
    assert result.trained_tokens == 0
    assert result.kept == () and {d.token_weight for d in result.decisions} == {None}


def test_the_tolerance_is_relative() -> None:
    assert set(buckets(run_filter([attempt(0, 0, 1e-9), attempt(0, 1, 2e-9)]))) == {Bucket.TRAINED}
    assert set(buckets(run_filter([attempt(0, 0, 1e9), attempt(0, 1, 1e9 + 1)]))) == {Bucket.ZERO_DISAGREEMENT}


def test_a_baseline_of_the_whole_step_asks_the_step_whether_it_disagrees() -> None:
    """REINFORCE++: a group that agrees, and one with a single verdict, still differ from the others."""
    pp = ObjectiveConfig(preset="reinforce_pp")
    attempts = [attempt(0, 0, 1.0), attempt(0, 1, 1.0), attempt(1, 0, 0.0), attempt(1, 1, None)]
    result = run_filter(attempts, config=pp)
    assert buckets(result) == [Bucket.TRAINED] * 3 + [Bucket.INFRA]
    std = np.sqrt(2) / 3
    np.testing.assert_allclose(
        [row.advantage for row in result.kept], np.array([1 / 3, 1 / 3, -2 / 3]) / (std + 1e-6), rtol=1e-14
    )
    assert set(buckets(run_filter(attempts[:2], config=pp))) == {Bucket.ZERO_DISAGREEMENT}
    assert set(buckets(run_filter(attempts[:1], config=pp))) == {Bucket.INSUFFICIENT_VALID}
    grouped = run_filter(attempts, config=ObjectiveConfig(preset="reinforce_pp_baseline"))
    assert buckets(grouped)[:3] == [Bucket.ZERO_DISAGREEMENT] * 2 + [Bucket.INSUFFICIENT_VALID]


def test_a_constant_divides_whatever_trains() -> None:
    dr = ObjectiveConfig(preset="dr_grpo")
    result = run_filter([attempt(0, 0, 1.0), attempt(0, 1, 0.0), attempt(0, 2, None)], config=dr, loss_constant=60.0)
    assert [row.weight for row in result.kept] == [1 / 60] * 2
    with pytest.raises(BadInput, match="needs a divisor above 0, got None"):
        run_filter([attempt(0, 0, 1.0), attempt(0, 1, 0.0)], config=dr)


def test_one_verdict_is_too_few() -> None:
    result = run_filter([attempt(0, 0, 1.0), attempt(0, 1, None), attempt(0, 2, None, sample=False)])
    assert buckets(result) == [Bucket.INSUFFICIENT_VALID, Bucket.INFRA, Bucket.INFRA]
    assert result.tokens == {Bucket.INSUFFICIENT_VALID: 6, Bucket.INFRA: 6}


def test_infra_takes_no_part_in_the_baseline() -> None:
    result = run_filter([attempt(0, 0, 1.0), attempt(0, 1, 0.0), attempt(0, 2, None)])
    assert buckets(result) == [Bucket.TRAINED, Bucket.TRAINED, Bucket.INFRA]
    assert [row.advantage for row in result.kept] == [0.5, -0.5]


# -- timeouts without a verdict ---------------------------------------------------------------------------------------


def test_a_timeout_without_a_verdict_is_infrastructure_unless_the_run_scores_it() -> None:
    attempts = [attempt(0, 0, 1.0), attempt(0, 1, 0.0), attempt(0, 2, None), attempt(0, 3, None)]
    masked, scored = run_filter(attempts), run_filter(attempts, score_timeouts=True)
    assert buckets(masked) == [Bucket.TRAINED] * 2 + [Bucket.INFRA] * 2
    assert [row.advantage for row in masked.kept] == [0.5, -0.5]
    assert buckets(scored) == [Bucket.TRAINED] * 4
    assert [row.advantage for row in scored.kept] == [0.75, -0.25, -0.25, -0.25]
    assert [decision.reward for decision in scored.decisions] == [1.0, 0.0, None, None], "no verdict was made up"
    assert [decision.score for decision in scored.decisions] == [1.0, 0.0, 0.0, 0.0]
    assert [decision.score for decision in masked.decisions] == [1.0, 0.0, None, None]
    assert {attempt.verdict for attempt in attempts[2:]} == {None}


@pytest.mark.parametrize("outcome", sorted(INFRA - {Outcome.AGENT_TIMEOUT}))
def test_no_other_loss_is_scored(outcome: Outcome) -> None:
    attempts = [attempt(0, 0, 1.0), attempt(0, 1, 0.0), attempt(0, 2, None, outcome=outcome)]
    assert run_filter(attempts, score_timeouts=True) == run_filter(attempts)


def test_a_verified_timeout_keeps_its_reward() -> None:
    late = replace(attempt(0, 0, 1.0), exit_status="AgentTimeout")
    result = run_filter([late, attempt(0, 1, 0.0)], score_timeouts=True)
    assert (result.decisions[0].reward, result.decisions[0].score) == (1.0, 1.0)


def test_scored_timeouts_agree_and_disagree_like_rewards() -> None:
    failed = run_filter([attempt(0, 0, None), attempt(0, 1, 0.0)], score_timeouts=True)
    assert buckets(failed) == [Bucket.ZERO_DISAGREEMENT] * 2
    passed = run_filter([attempt(0, 0, None), attempt(0, 1, 1.0)], score_timeouts=True)
    assert [row.advantage for row in passed.kept] == [-0.5, 0.5]
    without = run_filter([attempt(0, 0, None, sample=False, unmerged=3), attempt(0, 1, 1.0)], score_timeouts=True)
    assert buckets(without) == [Bucket.PREFIX_BREAK, Bucket.TRAINED]
    alone = run_filter([attempt(0, 0, None)], score_timeouts=True)
    assert buckets(alone) == [Bucket.INSUFFICIENT_VALID]


# -- shaping ----------------------------------------------------------------------------------------------------------


def spelled(index: int, reward: float, errors: int) -> AttemptRecord:
    return replace(attempt(0, index, reward), agent_metrics={"format_errors": float(errors)})


SHAPED = ObjectiveConfig(format_error_penalty=0.3)


def test_a_pass_with_format_errors_is_worth_less_and_its_reward_stays() -> None:
    records = [spelled(0, 1.0, 2), spelled(1, 1.0, 0), spelled(2, 0.0, 5), spelled(3, 0.0, 0)]
    result = run_filter(records, config=SHAPED)
    assert [decision.reward for decision in result.decisions] == [1.0, 1.0, 0.0, 0.0]
    assert [decision.score for decision in result.decisions] == [0.7, 1.0, 0.0, 0.0], "once, and off passes alone"
    np.testing.assert_allclose([row.advantage for row in result.kept], [0.275, 0.575, -0.425, -0.425], rtol=1e-14)
    plain = run_filter(records)
    assert [decision.score for decision in plain.decisions] == [1.0, 1.0, 0.0, 0.0]


def test_the_filter_looks_at_what_the_verifier_wrote_unless_told_otherwise() -> None:
    passed = [spelled(0, 1.0, 1), spelled(1, 1.0, 0)]
    assert buckets(run_filter(passed, config=SHAPED)) == [Bucket.ZERO_DISAGREEMENT] * 2
    told = run_filter(passed, config=ObjectiveConfig(format_error_penalty=0.3, filter_on="shaped"))
    assert buckets(told) == [Bucket.TRAINED] * 2
    np.testing.assert_allclose([row.advantage for row in told.kept], [-0.15, 0.15], rtol=1e-14)
    with pytest.raises(ValueError, match="filter_on shaped says nothing without format_error_penalty"):
        ObjectiveConfig(filter_on="shaped")


def test_an_agent_that_does_not_count_its_format_errors_cannot_be_penalised() -> None:
    """Not counted is not none."""
    with pytest.raises(BadInput, match="attempt s000000-g000-a00-t0: its agent reports no format_errors"):
        run_filter([attempt(0, 0, 1.0), attempt(0, 1, 0.0)], config=SHAPED)
    assert run_filter([attempt(0, 0, 0.5), attempt(0, 1, 0.0)], config=SHAPED).kept, "no pass, nothing to ask"


def test_truncated_attempts_are_valid_and_train_up_to_the_cut() -> None:
    cut = attempt(0, 0, 0.0, outcome=Outcome.TRUNCATED, truncated=True, dropped={"after_truncation": 5})
    result = run_filter([cut, attempt(0, 1, 1.0)])
    assert buckets(result) == [Bucket.TRAINED, Bucket.TRAINED]
    assert result.tokens == {Bucket.TRAINED: 12, Bucket.AFTER_TRUNCATION: 5}
    assert result.decisions[0].tokens == {Bucket.TRAINED: 6, Bucket.AFTER_TRUNCATION: 5}


def test_what_a_rewritten_history_dropped_is_counted() -> None:
    result = run_filter(
        [attempt(0, 0, 0.0, dropped={"prefix_break": 4}), attempt(0, 1, 1.0, trained=0, dropped={"prefix_break": 2})]
    )
    assert buckets(result) == [Bucket.TRAINED, Bucket.PREFIX_BREAK]
    assert result.tokens == {Bucket.TRAINED: 6, Bucket.PREFIX_BREAK: 6}


def test_another_weight_version_is_stale_and_its_reward_still_counts() -> None:
    result = run_filter([attempt(0, 0, 1.0, version="run:7"), attempt(0, 1, 0.0), attempt(0, 2, 0.0)])
    assert buckets(result) == [Bucket.STALE, Bucket.TRAINED, Bucket.TRAINED]
    np.testing.assert_allclose([row.advantage for row in result.kept], [-1 / 3, -1 / 3], rtol=1e-15)


def test_over_length() -> None:
    result = run_filter([attempt(0, 0, 1.0, prompt=20), attempt(0, 1, 0.0)], max_seq_len=20)
    assert buckets(result) == [Bucket.OVER_LENGTH, Bucket.TRAINED]


def test_a_sample_without_routing_cannot_be_replayed_and_its_reward_still_counts() -> None:
    attempts = [attempt(0, 0, 1.0, leaves=[{"routed": True}, {}]), *(attempt(0, i, 0.0, routed=i < 2) for i in (1, 2))]
    assert run_filter(attempts).trained_tokens == 24
    result = run_filter(attempts, routing_replay=True)
    assert buckets(result) == [Bucket.TRAINED, Bucket.TRAINED, Bucket.ROUTING_MISALIGNED]
    assert result.decisions[0].leaves == (Bucket.TRAINED, Bucket.ROUTING_MISALIGNED)
    assert result.tokens == {Bucket.TRAINED: 12, Bucket.ROUTING_MISALIGNED: 12}
    np.testing.assert_allclose([row.advantage for row in result.kept], [2 / 3, -1 / 3], rtol=1e-15)
    gone = attempt(0, 3, None, sample=True)
    assert run_filter([*attempts, gone], routing_replay=True).decisions[3].bucket is Bucket.INFRA


def test_nonfinite_logprobs_are_never_stored() -> None:
    """They get no reference, so no filter ever sees them: the merge is refused."""
    sample = sample_of("a", "g")
    logprobs = sample.logprobs.copy()
    logprobs[5] = np.nan
    with pytest.raises(CorruptObject, match="not finite"):
        replace(sample, logprobs=logprobs).check("a")


def test_sampled_with_other_parameters_than_the_runs_is_stale() -> None:
    result = run_filter([attempt(0, 0, 1.0, differs=1), attempt(0, 1, 0.0), attempt(0, 2, 0.0)])
    assert buckets(result) == [Bucket.STALE, Bucket.TRAINED, Bucket.TRAINED]
    assert result.tokens == {Bucket.STALE: 6, Bucket.TRAINED: 12}
    np.testing.assert_allclose([row.advantage for row in result.kept], [-1 / 3, -1 / 3], rtol=1e-15)


def test_what_lost_a_race_is_counted() -> None:
    result = run_filter(
        [attempt(0, 0, 0.0, dropped={"duplicate": 4}), attempt(0, 1, 1.0, trained=0, dropped={"duplicate": 2})]
    )
    assert buckets(result) == [Bucket.TRAINED, Bucket.DUPLICATE]
    assert result.tokens == {Bucket.TRAINED: 6, Bucket.DUPLICATE: 6}


def test_an_attempt_counts_once_in_its_baseline_however_many_leaves_it_has() -> None:
    branched = attempt(
        0, 0, 1.0, leaves=[{"trained": 6, "dropped": {"prefix_break": 2}}, {"trained": 3}, {"trained": 5}]
    )
    result = run_filter(attempts_of(branched))
    assert [row.advantage for row in result.kept] == [0.75] * 3 + [-0.25] * 3, "one passed of four, not three of six"
    assert [(row.attempt_id[-6:], row.leaf, row.trained) for row in result.kept] == [
        ("a00-t0", 0, 6),
        ("a00-t0", 1, 3),
        ("a00-t0", 2, 5),
        ("a01-t0", 0, 6),
        ("a02-t0", 0, 6),
        ("a03-t0", 0, 6),
    ]
    assert len({(row.key, row.leaf) for row in result.kept}) == 6 and len({row.key for row in result.kept}) == 4
    assert result.decisions[0].trained_leaves == (0, 1, 2)
    assert result.decisions[0].tokens == {Bucket.TRAINED: 14, Bucket.PREFIX_BREAK: 2}
    assert {row.weight for row in result.kept} == {1 / 32}
    even = run_filter([*attempts_of(branched)], config=ObjectiveConfig(reduction="sample_mean"))
    assert [row.weight for row in even.kept] == [1 / (4 * 14)] * 3 + [1 / (4 * 6)] * 3, "a sample here is an attempt"
    assert sum(row.weight * row.trained for row in even.kept) == pytest.approx(1.0, rel=1e-15)


def test_each_leaf_trains_or_has_its_own_reason() -> None:
    leaves = [
        {"version": "run:7", "dropped": {"prefix_break": 2}},
        {"prompt": 30},
        {},
        {"trained": 0, "dropped": {"after_truncation": 1}},
    ]
    result = run_filter([attempt(0, 0, 1.0, leaves=leaves), attempt(0, 1, 0.0)], max_seq_len=20)
    decision = result.decisions[0]
    assert decision.leaves == (Bucket.STALE, Bucket.OVER_LENGTH, Bucket.TRAINED, Bucket.AFTER_TRUNCATION)
    assert (decision.bucket, decision.advantage, decision.trained_leaves) == (Bucket.TRAINED, 0.5, (2,))
    assert decision.tokens == {
        Bucket.STALE: 8,
        Bucket.OVER_LENGTH: 6,
        Bucket.TRAINED: 6,
        Bucket.AFTER_TRUNCATION: 1,
    }
    assert [row.leaf for row in result.kept] == [2, 0]
    nothing = run_filter([attempt(0, 0, 1.0, leaves=leaves[:2]), attempt(0, 1, 0.0)], max_seq_len=20).decisions[0]
    assert (nothing.bucket, nothing.advantage, nothing.trained_leaves) == (Bucket.STALE, None, ())


@pytest.mark.parametrize(("reward", "bucket"), [(None, Bucket.INFRA), (1.0, Bucket.ZERO_DISAGREEMENT)])
def test_what_holds_for_the_attempt_holds_for_all_its_leaves(reward: float | None, bucket: Bucket) -> None:
    result = run_filter(
        [attempt(0, 0, reward, leaves=[{}, {"dropped": {"duplicate": 3}}]), attempt(0, 1, 1.0), attempt(0, 2, 1.0)]
    )
    assert result.decisions[0].leaves == (bucket, bucket)
    assert result.decisions[0].tokens == {bucket: 15}
    assert result.kept == ()


def test_a_verdict_without_a_sample_counts_for_the_group_only() -> None:
    result = run_filter([attempt(0, 0, 1.0, sample=False), attempt(0, 1, 0.0)])
    assert buckets(result) == [Bucket.PREFIX_BREAK, Bucket.TRAINED]
    assert sum(result.decisions[0].tokens.values()) == 0


def test_what_a_session_sampled_and_could_not_merge_is_counted() -> None:
    counted = {"sample": False, "unmerged": 7}
    result = run_filter([attempt(0, 0, 1.0, **counted), attempt(0, 1, 0.0), attempt(0, 2, None, **counted)])
    assert buckets(result) == [Bucket.PREFIX_BREAK, Bucket.TRAINED, Bucket.INFRA]
    assert result.tokens == {Bucket.PREFIX_BREAK: 7, Bucket.TRAINED: 6, Bucket.INFRA: 7}


def test_duplicates_and_missing_groups_are_refused() -> None:
    with pytest.raises(BadInput, match="s000000-g000-a00-t0 appears twice"):
        run_filter([attempt(0, 0, 1.0), attempt(0, 0, 1.0)])
    with pytest.raises(BadInput, match="no group id"):
        run_filter([replace(attempt(0, 0, 1.0), group_id="")])


def test_contradictions_are_refused() -> None:
    good = attempt(0, 0, 1.0)
    with pytest.raises(BadInput, match="no verdict; a reward exists only with a verdict"):
        run_filter([replace(good, verdict=None)])
    with pytest.raises(BadInput, match="outcome aborted with a verdict"):
        run_filter([replace(good, outcome=Outcome.ABORTED)])
    assert good.stored is not None
    broken = replace(good.stored, leaves=(replace(good.stored.leaves[0], sampled_tokens=9),))
    with pytest.raises(BadInput, match=r"a00-t0 leaf 0: 6 tokens under the loss mask \+ 0 dropped != 9 sampled"):
        run_filter([replace(good, stored=broken)])


def test_nothing_at_all_is_an_empty_step() -> None:
    result = run_filter([])
    assert result.decisions == ()
    assert result.trained_tokens == 0


def test_the_batch_object_holds_references_to_kept_samples_and_all_decisions() -> None:
    records = [attempt(0, 1, 0.0), attempt(0, 0, 1.0), attempt(1, 0, None)]
    result = run_filter(records)
    wire = unpack(pack(result.to_wire("demo", 3)), "k")
    assert (wire["schema_version"], wire["run"], wire["step"]) == (4, "demo", 3)
    assert records[1].stored is not None
    assert wire["samples"][0] == {
        "attempt_id": "s000000-g000-a00-t0",
        "group_id": "s000000-g000",
        "leaf": 0,
        "key": "demo/steps/000000/merged/0000/s000000-g000-a00-t0.msgpack",
        "sha256": records[1].stored.sha256,
        "tokens": 13,
        "trained": 6,
        "advantage": 0.5,
        "weight": 1 / 12,
    }
    assert [sample["attempt_id"] for sample in wire["samples"]] == ["s000000-g000-a00-t0", "s000000-g000-a01-t0"]
    assert [sample["advantage"] for sample in wire["samples"]] == [0.5, -0.5]
    assert tuple(read_decisions(wire, "k")) == result.decisions


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_version": 3}, "batch schema 3 is unknown; 4 is read here"),
        ({"decisions": 7}, "not iterable"),
        ({"decisions": [7]}, "has no attribute"),
        ({"without": "token_weight"}, "decision of 's000000-g000-a00-t0' lacks or misspells token_weight"),
        ({"without": "reward"}, "lacks or misspells reward"),
        ({"more": {"surprise": 1}}, "lacks or misspells surprise"),
        ({"more": {"bucket": "dreamt"}}, "'dreamt' is not a valid Bucket"),
    ],
)
def test_decisions_that_are_not_what_was_written_are_a_corrupt_object(change: dict[str, Any], said: str) -> None:
    batch = unpack(pack(run_filter([attempt(0, 1, 0.0), attempt(0, 0, 1.0)]).to_wire("demo", 3)), "k")
    assert len(read_decisions(batch, "k")) == 2
    batch["decisions"][0].pop(change.pop("without", ""), None)
    batch["decisions"][0].update(change.pop("more", {}))
    with pytest.raises(CorruptObject, match=f"^object k: has no decisions to read .*{said}"):
        read_decisions(batch | change, "k")
