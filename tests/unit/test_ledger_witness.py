"""The witness in the books: what it can tell must agree, and samples are excused one by one, not all at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

import pytest

from rl360.ledger.checks import Check, LedgerBroken, check_ledger, refuse_broken, samples_digest
from rl360.ledger.outcomes import Bucket
from rl360.ledger.step import StepLedger
from tests.unit.ledger_data import ledger_of
from tests.unit.objective_data import attempt

SAMPLES, POSITIONS = "samples with a gradient", "positions with a gradient"
# four samples that train (6, 6, 4 and 3 tokens; the last two of one attempt), one group that agrees, one attempt lost
ATTEMPTS = [attempt(0, 0, 0.0), attempt(0, 1, 1.0, leaves=[{}, {"trained": 4}, {"trained": 3}]), attempt(0, 2, None)]
ATTEMPTS += [attempt(1, 0, 1.0), attempt(1, 1, 1.0)]
TOKENS = (6, 6, 4, 3)
EVERY = range(len(TOKENS))


def books(flat: bool = False) -> StepLedger:
    """flat: the first attempt, of one sample, trains with an advantage of 0."""
    ledger = ledger_of(ATTEMPTS)
    first = replace(ledger.attempts[0], advantage=0.0 if flat else ledger.attempts[0].advantage)
    return replace(ledger, attempts=(first, *ledger.attempts[1:]))


def names(ledger: StepLedger) -> list[tuple[str, int]]:
    return [(row.attempt_id, at) for row in ledger.attempts for at, b in enumerate(row.leaves) if b is Bucket.TRAINED]


def seen(
    ledger: StepLedger, lit: Collection[int], excused: Collection[int] | None, *, tokens: int, cannot_tell: int
) -> StepLedger:
    """The ledger with a witness that saw a gradient in the samples `lit`; the loss took out what is missing."""
    digest = samples_digest([name for at, name in enumerate(names(ledger)) if at in lit])
    said: dict[str, Any] = {"samples": len(lit), "tokens": tokens, "digest": digest, "cannot_tell": cannot_tell}
    if excused is not None:
        said["excused"] = list(excused)
    taken = max(0, sum(TOKENS) - tokens) / sum(TOKENS)
    return replace(ledger, train=replace(ledger.train, witness=said, masked_fraction=taken, clip_fraction=0.0))


def checks(ledger: StepLedger) -> dict[str, Check]:
    return {check.name: check for check in check_ledger(ledger)}


def subsets() -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(EVERY, size) for size in range(len(TOKENS) + 1))


@pytest.mark.parametrize("flat", [False, True])
def test_of_all_samples_it_may_see_exactly_those_that_are_booked_and_not_excused(flat: bool) -> None:
    """Every set of samples against every set of excuses: the digest is computed again, whatever it cannot tell of."""
    ledger = books(flat)
    booked = set(EVERY) - ({0} if flat else set())
    for excused in subsets():
        for lit in subsets():
            tokens = sum(TOKENS[at] for at in lit)
            found = checks(seen(ledger, lit, excused, tokens=tokens, cannot_tell=len(excused)))
            assert found[SAMPLES].holds == (set(lit) == booked ^ set(excused)), (lit, excused)
            if found[SAMPLES].holds:
                assert all(check.holds for check in found.values()), (lit, excused)


def test_it_excuses_no_more_than_it_cannot_tell_of_and_only_rows_there_are() -> None:
    ledger = books()
    assert checks(seen(ledger, [1, 2, 3], [0], tokens=13, cannot_tell=3))[SAMPLES].holds
    for broken in (
        seen(ledger, [1, 2, 3], [0], tokens=13, cannot_tell=0),
        seen(ledger, [2, 3], [0, 1], tokens=7, cannot_tell=1),
        seen(ledger, EVERY, [4], tokens=19, cannot_tell=1),
    ):
        assert not checks(broken)[SAMPLES].holds
        with pytest.raises(LedgerBroken, match=SAMPLES):
            refuse_broken(broken)


@pytest.mark.parametrize("tokens", range(22))
def test_positions_are_those_booked_less_what_the_loss_took_out(tokens: int) -> None:
    ledger = books()
    assert checks(seen(ledger, EVERY, [], tokens=tokens, cannot_tell=0))[POSITIONS].holds == (tokens == 19)
    short = seen(ledger, EVERY, [], tokens=16, cannot_tell=1)  # 3 of them taken out
    witness = {**(short.train.witness or {}), "tokens": tokens}
    found = checks(replace(short, train=replace(short.train, witness=witness)))[POSITIONS]
    assert found.holds == (16 <= tokens <= 19) and "clips and corrections took out 3" in found.line()


def test_positions_of_an_advantage_of_0_count_only_where_it_cannot_tell() -> None:
    """Other terms of the loss, an entropy or a KL, reach samples whose advantage is 0."""
    ledger = books(flat=True)
    for tokens, cannot_tell, holds in ((13, 0, True), (19, 0, False), (19, 1, True), (13, 1, True), (20, 1, False)):
        lit = EVERY if tokens == 19 else [1, 2, 3]
        excused = [0] if tokens == 19 else []
        found = seen(ledger, lit, excused, tokens=tokens, cannot_tell=cannot_tell)
        found = replace(found, train=replace(found.train, masked_fraction=0.0))
        assert checks(found)[POSITIONS].holds == holds, (tokens, cannot_tell)


def test_of_a_witness_that_named_no_excuses_only_their_number_counts() -> None:
    """Results from before excuses were named: digest or, where it cannot tell, how many."""
    ledger = books()
    for lit, cannot_tell, holds in (
        (EVERY, 0, True),
        ([0, 1, 2], 0, False),
        ([0, 1, 2], 1, True),
        ([0, 1], 1, False),
        (EVERY, 4, True),
    ):
        tokens = sum(TOKENS[at] for at in lit)
        found = checks(seen(ledger, lit, None, tokens=tokens, cannot_tell=cannot_tell))[SAMPLES]
        assert found.holds == holds, (lit, cannot_tell)
    other = seen(ledger, EVERY, None, tokens=19, cannot_tell=0)
    digest = {**(other.train.witness or {}), "digest": "0" * 64}
    assert not checks(replace(other, train=replace(other.train, witness=digest)))[SAMPLES].holds
