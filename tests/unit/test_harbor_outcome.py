"""From how an attempt ended to what it is: a verdict wins, infrastructure never gets a number."""

from __future__ import annotations

import pytest

from rl360.harbor.outcome import (
    LOSSES,
    MEANINGS,
    RETRYABLE,
    VERIFIED_AFTER,
    Boundary,
    ExitStatus,
    boundary_of,
    outcome_of,
)
from rl360.ledger.outcomes import HAS_VERDICT, INFRA, Outcome
from tests.unit.verdict_data import verdict


@pytest.mark.parametrize("status", sorted(VERIFIED_AFTER))
def test_verdict_wins_over_status(status: ExitStatus) -> None:
    good, bad = outcome_of(status, verdict("a", 1.0), None), outcome_of(status, verdict("a", 0.5), None)
    if status == ExitStatus.LENGTH_LIMIT:
        assert (good, bad) == (Outcome.TRUNCATED, Outcome.TRUNCATED)
    else:
        assert (good, bad) == (Outcome.PASSED, Outcome.FAILED)


@pytest.mark.parametrize("status", [*ExitStatus, "SomethingNew"])
def test_without_verdict_it_is_infrastructure(status: str) -> None:
    for problem in (None, Outcome.NO_VERDICT, Outcome.VERIFIER_TIMEOUT, Outcome.VERIFIER_ERROR):
        assert outcome_of(status, None, problem) in INFRA


def test_unknown_status_is_unclassified() -> None:
    assert outcome_of("SomethingNew", None, Outcome.NO_VERDICT) == Outcome.UNCLASSIFIED
    assert outcome_of(ExitStatus.AGENT_ERROR, None, None) == Outcome.UNCLASSIFIED


def test_verifier_problems_keep_their_name() -> None:
    assert outcome_of(ExitStatus.SUBMITTED, None, Outcome.NO_VERDICT) == Outcome.NO_VERDICT
    assert outcome_of(ExitStatus.LENGTH_LIMIT, None, Outcome.VERIFIER_TIMEOUT) == Outcome.VERIFIER_TIMEOUT
    assert outcome_of(ExitStatus.AGENT_TIMEOUT, None, Outcome.NO_VERDICT) == Outcome.AGENT_TIMEOUT


@pytest.mark.parametrize("problem", [Outcome.JUDGE_ERROR, Outcome.SANDBOX_START, Outcome.SANDBOX_LOST])
@pytest.mark.parametrize("status", sorted(VERIFIED_AFTER))
def test_what_kept_a_verdict_away_is_named_whatever_the_agents_end(status: ExitStatus, problem: Outcome) -> None:
    """A timeout too: `rollout.unverified_timeout: score_zero` would make a number of it."""
    assert outcome_of(status, None, problem) is problem
    assert problem in RETRYABLE & INFRA


def test_what_has_a_verdict_is_not_retried() -> None:
    assert RETRYABLE.isdisjoint(HAS_VERDICT)


# every exit status seen of `/run` servers and of the harnesses behind them, and what it is here without a verdict
IN_THE_WILD = {
    "Submitted": ("unclassified", "ours"),
    "TimeLimitExceeded": ("agent_timeout", "harness"),
    "SequenceLengthLimitExceeded": ("unclassified", "ours"),
    "AgentError": ("unclassified", "harness"),
    "AgentTimeout": ("agent_timeout", "harness"),
    "EnvStartTimeout": ("sandbox_start", "provider"),
    "VerifierTimeout": ("verifier_timeout", "verifier"),
    "NotFoundError": ("session_lost", "model"),
    "Error: RuntimeError": ("unclassified", "harness"),
}


@pytest.mark.parametrize("status", sorted(IN_THE_WILD))
def test_statuses_seen_in_the_wild_are_in_the_table(status: str) -> None:
    outcome = outcome_of(status, None, None)
    assert status in MEANINGS and (outcome, boundary_of(outcome, status)) == IN_THE_WILD[status]


def test_the_table_covers_every_status_and_every_outcome() -> None:
    assert set(ExitStatus) <= MEANINGS.keys()
    assert LOSSES.keys() == INFRA, "each has a side to look at, and what has a verdict has none"
    assert {boundary_of(outcome) for outcome in INFRA} == set(Boundary)
    assert [boundary_of(outcome, "Submitted") for outcome in sorted(HAS_VERDICT)] == [None] * 3
    assert all(meaning.outcome in INFRA for meaning in MEANINGS.values()), "no status alone is a verdict"


def test_a_status_says_more_than_its_outcome() -> None:
    assert boundary_of(Outcome.SANDBOX_START, ExitStatus.QUEUE_TIMEOUT) is Boundary.OURS
    assert boundary_of(Outcome.SANDBOX_START, ExitStatus.ENV_START) is Boundary.PROVIDER
    assert boundary_of(Outcome.NO_VERDICT, ExitStatus.SUBMITTED) is Boundary.VERIFIER
    assert boundary_of(Outcome.UNCLASSIFIED, "SomethingNew") is Boundary.OURS and "SomethingNew" not in MEANINGS
