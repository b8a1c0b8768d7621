"""From how an attempt ended to what it is: a verdict wins, infrastructure never gets a number."""

from __future__ import annotations

import pytest

from rl360.harbor.outcome import RETRYABLE, VERIFIED_AFTER, ExitStatus, outcome_of
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


@pytest.mark.parametrize("status", sorted(VERIFIED_AFTER))
def test_a_judge_that_failed_is_named_whatever_the_agents_end(status: ExitStatus) -> None:
    """A timeout too: `rollout.unverified_timeout: score_zero` would make a number of it."""
    assert outcome_of(status, None, Outcome.JUDGE_ERROR) is Outcome.JUDGE_ERROR
    assert Outcome.JUDGE_ERROR in RETRYABLE & INFRA


def test_what_has_a_verdict_is_not_retried() -> None:
    assert RETRYABLE.isdisjoint(HAS_VERDICT)
