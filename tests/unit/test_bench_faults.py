"""The faults benchmark finds what it looks for: a lost attempt in a baseline is seen from the rows alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rl360.bench.faults import wrong_baselines
from rl360.ledger.step import AttemptRow, StepLedger
from tests.unit.ledger_data import made_up_run


def test_books_of_the_product_hold() -> None:
    ledger = made_up_run(1)[0]
    assert any(row.trains for row in ledger.attempts) and any(row.reward is None for row in ledger.attempts)
    assert wrong_baselines(ledger) == 0


@pytest.mark.parametrize("change", [{"score": 0.0}, {"advantage": 0.0}, {"loss_weight": 0.1}])
def test_a_lost_attempt_that_counts_is_seen(change: dict[str, float]) -> None:
    assert wrong_baselines(_with(made_up_run(1)[0], lambda row: row.reward is None, change)) == 1


def test_another_baseline_is_seen() -> None:
    assert wrong_baselines(_with(made_up_run(1)[0], lambda row: row.trains, {"advantage": 0.25})) == 1


def _with(ledger: StepLedger, which: Callable[[AttemptRow], bool], change: dict[str, float]) -> StepLedger:
    index = next(index for index, row in enumerate(ledger.attempts) if which(row))
    rows = list(ledger.attempts)
    rows[index] = replace(rows[index], **change)
    return replace(ledger, attempts=tuple(rows))
