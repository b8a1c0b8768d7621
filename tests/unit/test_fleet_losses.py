"""An attempt that found no engine: what a dead fleet costs is told by that name, and in no mean."""

from __future__ import annotations

from rl360.harbor.outcome import MEANINGS, ExitStatus
from rl360.ledger import metrics
from rl360.ledger.outcomes import HAS_VERDICT, INFRA, Outcome
from rl360.sessions.refusals import Refusal
from tests.unit.ledger_data import ledger_of
from tests.unit.objective_data import attempt


def test_from_a_sessions_refusal_to_the_ledgers_losses() -> None:
    """The session server refuses with it, the agent ends with it (tests/unit/test_agent_bash.py), it is a loss."""
    outcome = MEANINGS[ExitStatus.NO_ENGINE].outcome
    assert outcome == Refusal.NO_ENGINE == Outcome.NO_ENGINE
    assert outcome in INFRA and outcome not in HAS_VERDICT
    lost = [attempt(0, number, None, outcome=outcome, sample=False) for number in range(2, 5)]
    step = metrics.step_json(ledger_of([attempt(0, 0, 1.0), attempt(0, 1, 0.0), *lost]))
    assert [(loss["cause"], loss["attempts"]) for loss in step["losses_by_cause"]] == [("no_engine", 3)]
    without = metrics.step_json(ledger_of([attempt(0, 0, 1.0), attempt(0, 1, 0.0)]))
    assert step["reward"]["unfiltered_mean_valid"] == without["reward"]["unfiltered_mean_valid"] == 0.5
    assert (step["loss"], step["loss_weight_sum"]) == (without["loss"], without["loss_weight_sum"])
