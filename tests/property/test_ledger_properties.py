"""For any batch: the books balance, survive the store format, and do not change when infra fails beside them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.ledger import metrics
from rl360.ledger.checks import check_ledger
from rl360.ledger.outcomes import DROPPED, HAS_VERDICT, INFRA, Outcome
from rl360.ledger.step import StepLedger
from rl360.sessions.sample import AttemptRecord
from rl360.store.codec import pack, unpack
from tests.unit.ledger_data import ledger_of
from tests.unit.objective_data import attempt


@st.composite
def records(draw: st.DrawFn, outcomes: list[Outcome], first_index: int = 0) -> list[AttemptRecord]:
    drawn = []
    for group in range(draw(st.integers(1, 4))):
        for index in range(draw(st.integers(1, 4))):
            outcome = draw(st.sampled_from(outcomes))
            reward = draw(st.sampled_from([0.0, 1.0, 0.5])) if outcome in HAS_VERDICT else None
            drawn.append(
                attempt(
                    group,
                    first_index + index,
                    reward,
                    outcome=outcome,
                    sample=draw(st.sampled_from([True, True, False])),
                    unmerged=draw(st.integers(0, 9)),
                    leaves=draw(st.lists(LEAVES, min_size=1, max_size=3)),
                    domain=draw(st.sampled_from(["files", "text"])),
                )
            )
    return drawn


LEAVES = st.fixed_dictionaries(
    {
        "trained": st.integers(0, 8),
        "dropped": st.dictionaries(st.sampled_from(list(map(str, DROPPED))), st.integers(1, 5), max_size=4),
        "version": st.sampled_from(["run:0", "run:0", "run:3"]),
        "differs": st.sampled_from([0, 0, 1]),
    }
)


@settings(deadline=None, max_examples=60)
@given(records(sorted(Outcome)))
def test_every_book_balances(attempts: list[AttemptRecord]) -> None:
    ledger = ledger_of(attempts)
    assert all(check.holds for check in check_ledger(ledger))
    assert sum(metrics.token_counts(ledger).values()) == sum(record.sampled_tokens for record in attempts)
    assert sum(metrics.outcome_counts(ledger).values()) == len(attempts)
    assert sum(metrics.attempt_bars(ledger).values()) == len(attempts)
    groups = metrics.group_counts(ledger)
    assert sum(groups.values()) == 2 * groups["total"] == 2 * len({record.group_id for record in attempts})
    assert StepLedger.from_wire(unpack(pack(ledger.to_wire()), "k"), "k") == ledger


@settings(deadline=None, max_examples=60)
@given(records(sorted(HAS_VERDICT)), records(sorted(INFRA), first_index=50))
def test_failures_beside_the_rest_change_only_the_infra_rate(
    valid: list[AttemptRecord], lost: list[AttemptRecord]
) -> None:
    alone, crowded = ledger_of(valid), ledger_of(valid + lost)
    ids = {record.attempt_id for record in valid}
    assert tuple(row for row in crowded.attempts if row.attempt_id in ids) == alone.attempts
    before, after = metrics.reward_metrics(alone), metrics.reward_metrics(crowded)
    rates = {"infra_rate": None, "infra_rate_by_domain": None}
    assert {**before, **rates} == {**after, **rates}
    assert after["infra_rate"] == len(lost) / (len(valid) + len(lost))
    for figure in (metrics.truncation_share, metrics.zero_disagreement, metrics.staleness):
        assert figure(alone) == figure(crowded)
    wider = metrics.pass_at_k(crowded)  # larger groups: larger k, which no group has the verdicts for
    assert {k: found for k, found in wider.items() if found["groups"]} == metrics.pass_at_k(alone)
