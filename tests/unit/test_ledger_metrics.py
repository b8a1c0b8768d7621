"""Every figure by hand from a small ledger."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest

from rl360.config.run import ObjectiveConfig
from rl360.ledger import metrics
from rl360.ledger.checks import TRAIN_FIGURES
from rl360.ledger.outcomes import Bucket, Outcome
from rl360.ledger.step import _trained_versions
from rl360.objective.filters import Decision
from rl360.report.markdown import step_markdown
from rl360.report.numbers import rolling_mean, run_losses
from tests.unit.ledger_data import ledger_of
from tests.unit.objective_data import attempt

LEDGER = ledger_of(
    [
        attempt(0, 0, 1.0),
        attempt(0, 1, 0.0, outcome=Outcome.TRUNCATED, truncated=True, dropped={"after_truncation": 4}),
        attempt(0, 2, None),
        attempt(1, 0, 1.0, domain="text"),
        attempt(1, 1, 1.0, domain="text"),
        attempt(2, 0, 0.0),
        attempt(2, 1, 0.0),
        attempt(3, 0, 0.5),
        attempt(3, 1, 0.5),
        attempt(4, 0, 1.0),
        attempt(4, 1, None, sample=False, outcome=Outcome.SESSION_LOST),
        attempt(5, 0, None, outcome=Outcome.NO_ENGINE, sample=False),
        attempt(6, 0, 1.0, version="run:4"),
        attempt(6, 1, 0.0, version="run:4"),
    ]
)


def test_groups_by_fate() -> None:
    assert metrics.group_counts(LEDGER) == {
        "total": 7,
        "trained": 1,
        "all_pass": 1,
        "all_fail": 1,
        "agree_between": 1,
        "insufficient_valid": 1,
        "dropped": 1,
        "infra": 1,
    }


def test_reward_before_and_after_the_filter() -> None:
    reward = metrics.reward_metrics(LEDGER)
    assert reward["unfiltered_mean_valid"] == pytest.approx(6 / 11)
    assert reward["kept_mean"] == 0.5
    assert reward["infra_rate"] == pytest.approx(3 / 14)
    assert reward["by_domain"] == {"files": pytest.approx(4 / 9), "text": 1.0}
    assert reward["kept_by_domain"] == {"files": 0.5}, "nothing of text was kept: no mean, not a 0"
    assert reward["infra_rate_by_domain"] == {"files": 3 / 12, "text": 0.0}


def test_agreement_in_shares_of_the_groups_that_could_have_disagreed() -> None:
    """Of seven groups one has one score and one has none: neither could."""
    assert metrics.zero_disagreement(LEDGER) == {"share": 3 / 5, "all_pass": 0.2, "all_fail": 0.2, "agree_between": 0.2}
    alone = metrics.zero_disagreement(ledger_of([attempt(0, 0, 1.0), attempt(1, 0, None)]))
    assert alone == dict.fromkeys(("share", "all_pass", "all_fail", "agree_between"))


@pytest.mark.parametrize(("n", "c"), [(n, c) for n in range(1, 9) for c in range(n + 1)])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_pass(n: int, c: int) -> None:
    """By counting every draw of k of the n attempts."""
    found = metrics.pass_at_k(ledger_of([attempt(0, index, float(index < c)) for index in range(n)]))
    assert list(found) == [str(k) for k in (1, 2, 4, 8) if k <= n]
    for k, each in found.items():
        draws = list(itertools.combinations(range(n), int(k)))
        held = sum(any(index < c for index in draw) for draw in draws)
        assert each == {"mean": pytest.approx(held / len(draws)), "groups": 1}


def test_pass_at_k_is_over_groups_with_k_verdicts() -> None:
    attempts = [attempt(0, index, float(index == 0)) for index in range(4)]
    attempts += [attempt(1, 0, 1.0), attempt(1, 1, 1.0), attempt(1, 2, None), attempt(1, 3, None, sample=False)]
    attempts += [attempt(2, 0, 0.5), attempt(2, 1, None)]
    found = metrics.pass_at_k(ledger_of(attempts))
    assert found == {
        "1": {"mean": pytest.approx((0.25 + 1 + 0) / 3), "groups": 3},
        "2": {"mean": pytest.approx((0.5 + 1) / 2), "groups": 2},
        "4": {"mean": 1.0, "groups": 1},
    }
    lost = metrics.pass_at_k(ledger_of([attempt(0, index, None) for index in range(3)]))
    assert lost == {k: {"mean": None, "groups": 0} for k in ("1", "2")}
    scored = [attempt(0, 0, 1.0), attempt(0, 1, None)]
    assert metrics.pass_at_k(ledger_of(scored, score_timeouts=True))["1"] == {"mean": 1.0, "groups": 1}


def test_second_tries_make_no_group_larger() -> None:
    lost = attempt(0, 0, None, sample=False, outcome=Outcome.SANDBOX_LOST)
    again = replace(lost, attempt_id="s000000-g000-a00-t1", try_index=1)
    assert list(metrics.pass_at_k(ledger_of([lost, again, attempt(0, 1, 1.0)]))) == ["1", "2"]


def test_staleness_is_over_trained_tokens() -> None:
    """Six tokens of the weights that train, two of one step before; what does not train is in no mean."""
    assert metrics.staleness(LEDGER) == {"mean": 0.0, "max": 0}
    rows = LEDGER.attempts
    older = [
        replace(rows[0], trained_versions={"run:5": 2, "run:7": 4}),
        replace(rows[1], trained_versions={"run:8": 6}),
    ]
    ledger = replace(LEDGER, version_before=8, attempts=(*older, *rows[2:]))
    assert metrics.staleness(ledger) == {"mean": (2 * 3 + 4 * 1) / 12, "max": 3}
    assert metrics.staleness(ledger_of([attempt(0, 0, 1.0), attempt(0, 1, 1.0)])) == {"mean": None, "max": None}


def test_a_sample_of_several_versions_counts_as_its_oldest() -> None:
    record = attempt(0, 0, 1.0)
    assert record.stored is not None
    leaf = replace(record.stored.leaves[0], versions=("run:3", "run:2"))
    mixed = replace(record, stored=replace(record.stored, leaves=(leaf,)))
    decision = Decision("a", "g", Outcome.PASSED, Bucket.TRAINED, 1.0, 1.0, 0.5, (Bucket.TRAINED,), {Bucket.TRAINED: 6})
    assert _trained_versions(mixed.stored.leaves, decision) == {"run:2": 6}


def test_what_the_trainer_said_is_as_it_said_it() -> None:
    step = metrics.step_json(LEDGER)
    for name in ("loss", "grad_norm", "clip_fraction", "tis_mean", "mean_abs_dlogp", "entropy", "trained_tokens"):
        assert step[name] == getattr(LEDGER.train, name) is not None
    nothing = metrics.step_json(ledger_of([attempt(0, 0, 1.0), attempt(0, 1, 1.0)]))
    assert [name for name in TRAIN_FIGURES if nothing[name] is not None] == []


MAPS = {
    "outcomes": "outcome",
    "attempt_bars": "class",
    "tokens": "bucket",
    "context_tokens": "kind",
    "forwards": "name",
    "phases_s": "task",
    "pass_at_k": "k",
    "reward.by_domain": "domain",
    "reward.kept_by_domain": "domain",
    "reward.infra_rate_by_domain": "domain",
}


def keys(value: object, path: str = "") -> set[str]:
    """The paths of every value in a step, maps with open keys and lists shown as the page shows them."""
    if isinstance(value, list):
        return set().union(*(keys(item, f"{path}[]") for item in value))
    if not isinstance(value, dict):
        return {path}
    if path in MAPS:
        return set().union(*(keys(item, f"{path}[{MAPS[path]}]") for item in value.values()))
    return set().union(*(keys(item, f"{path}.{name}" if path else name) for name, item in value.items()))


def test_the_page_of_metrics_names_every_key_and_nothing_else() -> None:
    step = metrics.step_json(LEDGER) | {"forwards": {"prompt_tokens": 1}}
    page = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()
    named = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert sorted(named) == sorted(set(named)), "a key has one place"
    assert set(named) == keys(step)
    assert keys({"reward": {"by_domain": {"x": 1}}, "losses_by_cause": [{"a": 1}]}) == {
        "reward.by_domain[domain]",
        "losses_by_cause[].a",
    }


def test_timeouts_that_are_scored_are_in_no_mean_of_rewards() -> None:
    attempts = [attempt(0, 0, 1.0), attempt(0, 1, None), attempt(0, 2, None, outcome=Outcome.SANDBOX_LOST)]
    attempts += [attempt(1, 0, None), attempt(1, 1, None), attempt(2, 0, 0.0), attempt(2, 1, None)]
    ledger = ledger_of(attempts, score_timeouts=True)
    assert metrics.reward_metrics(ledger) == {
        "unfiltered_mean_valid": 0.5,
        "kept_mean": 1.0,
        "kept_mean_score": 0.5,
        "penalised": 0,
        "timeouts_scored": 4,
        "infra_rate": pytest.approx(1 / 7),
        "by_domain": {"files": 0.5},
        "kept_by_domain": {"files": 1.0},
        "infra_rate_by_domain": {"files": pytest.approx(1 / 7)},
    }
    fates = {group[-4:]: fate for group, fate in metrics.group_fates(ledger).items()}
    assert fates == {"g000": "trained", "g001": "all_fail", "g002": "all_fail"}
    bars = {name: count for name, count in metrics.attempt_bars(ledger).items() if count}
    assert bars == {"trained_pass": 1, "all_fail": 1, "timeout_scored": 4, "infra": 1}
    assert [loss["cause"] for loss in metrics.losses_by_cause(ledger)] == ["sandbox_lost"]
    assert metrics.outcome_counts(ledger)["agent_timeout"] == 4, "what happened keeps its name"
    assert "timeouts scored 0 without a verdict | 4" in step_markdown(ledger, {})


def test_raw_and_shaped_rewards_are_kept_apart() -> None:
    attempts = [
        replace(attempt(0, index, reward), agent_metrics={"format_errors": errors})
        for index, (reward, errors) in enumerate([(1.0, 2.0), (1.0, 0.0), (0.0, 1.0)])
    ]
    ledger = ledger_of(attempts, objective=ObjectiveConfig(format_error_penalty=0.3))
    assert [(row.reward, row.score) for row in ledger.attempts] == [(1.0, 0.7), (1.0, 1.0), (0.0, 0.0)]
    reward = metrics.reward_metrics(ledger)
    assert reward["unfiltered_mean_valid"] == reward["kept_mean"] == pytest.approx(2 / 3)
    assert reward["kept_mean_score"] == pytest.approx(1.7 / 3)
    assert (reward["penalised"], reward["timeouts_scored"]) == (1, 0)
    assert "passes penalised for format errors | 1" in step_markdown(ledger, {})
    assert "penalised" not in step_markdown(LEDGER, {}), "nothing is said where nothing was shaped"


def test_counts_sum_to_what_was_sampled_and_attempted() -> None:
    tokens = metrics.token_counts(LEDGER)
    assert tokens == {
        "trained": 12,
        "zero_disagreement": 36,
        "insufficient_valid": 6,
        "infra": 6,
        "after_truncation": 4,
        "stale": 12,
    }
    assert sum(tokens.values()) == metrics.sampled_tokens(LEDGER) == 76
    assert sum(metrics.outcome_counts(LEDGER).values()) == 14
    assert metrics.attempt_bars(LEDGER) == {
        "trained_pass": 1,
        "trained_fail": 1,
        "all_pass": 2,
        "all_fail": 2,
        "other": 5,
        "timeout_scored": 0,
        "infra": 3,
    }


def test_what_the_engines_did_is_summed_over_samples_and_attempts() -> None:
    leaves = [{"sent": 40, "cached": 10}, {"sent": 60}]
    ledger = ledger_of([attempt(0, 0, 1.0, leaves=leaves), attempt(0, 1, None, sent=100, cached=90)])
    assert ledger.attempts[0].forwards == {"prompt_tokens": 100, "cached_tokens": 10}
    step = metrics.step_json(ledger)
    assert step["forwards"] == {"prompt_tokens": 200, "cached_tokens": 100}
    assert (step["cache_share"], step["decode_row_share"]) == (0.5, None)
    step = metrics.step_json(ledger_of([attempt(0, 0, 1.0, routed=True), attempt(0, 1, 0.0)]))
    assert step["forwards"] == {"routing_rows": 12, "decode_rows": 5}
    assert step["decode_row_share"] == 5 / 12


def test_losses_by_cause() -> None:
    assert metrics.losses_by_cause(LEDGER) == [
        {"cause": "agent_timeout", "attempts": 1, "seconds": pytest.approx(2.7), "sampled_tokens": 6},
        {"cause": "no_engine", "attempts": 1, "seconds": pytest.approx(2.7), "sampled_tokens": 0},
        {"cause": "session_lost", "attempts": 1, "seconds": pytest.approx(2.7), "sampled_tokens": 0},
    ]


def test_truncation_share_is_over_valid_attempts() -> None:
    assert metrics.truncation_share(LEDGER) == pytest.approx(1 / 11)


def test_nothing_is_none_not_zero() -> None:
    lost = ledger_of([attempt(0, 0, None), attempt(0, 1, None)])
    reward = metrics.reward_metrics(lost)
    assert (reward["unfiltered_mean_valid"], reward["kept_mean"], reward["infra_rate"]) == (None, None, 1.0)
    assert metrics.truncation_share(lost) is None
    assert metrics.step_json(lost)["loss"] is None


def test_the_json_has_the_fixed_keys() -> None:
    step = metrics.step_json(LEDGER)
    fixed = (
        "step attempts outcomes groups sampled_tokens tokens trained_samples loss_weight_sum loss reward push phases_s"
    )
    assert set(fixed.split()) <= set(step)
    fixed = {"unfiltered_mean_valid", "kept_mean", "infra_rate", "by_domain"}
    more = {"kept_mean_score", "penalised", "timeouts_scored", "kept_by_domain", "infra_rate_by_domain"}
    assert set(step["reward"]) == fixed | more
    assert set(step["push"]) == {"path", "calls_per_engine", "bytes", "paused_s", "engines"}


def test_rolling_mean_skips_what_is_missing() -> None:
    assert rolling_mean([1.0, None, 2.0, 6.0], 2) == [1.0, 1.0, 2.0, 4.0]
    assert rolling_mean([None], 5) == [None]


def test_losses_add_up_over_steps() -> None:
    step = metrics.step_json(LEDGER)
    total = run_losses([step, step])
    assert [(loss["cause"], loss["attempts"], loss["sampled_tokens"]) for loss in total] == [
        ("agent_timeout", 2, 12),
        ("no_engine", 2, 0),
        ("session_lost", 2, 0),
    ]
