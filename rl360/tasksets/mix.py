"""How tasks are chosen where a run asks for more than passes over the whole set: shares of domains, and difficulty.

Pure and without state: what a step draws follows from its position in an endless sequence, the seed and, for
difficulty, what the attempts of earlier steps came to.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from rl360.ledger.outcomes import HAS_VERDICT, Outcome
from rl360.sessions.sample import AttemptRecord

History = dict[str, list[float]]  # task id -> attempts that passed, attempts with a verdict; older ones count less
FADE = 0.5  # of what is known of a task, each time it is tried again: the policy has moved on


def domains_at(weights: Mapping[str, float], start: int, n: int) -> list[tuple[str, int]]:
    """The domain at each position start .. start+n-1, and how often it came before. At every position each domain has
    had its share of all positions so far, to within one or two: seats by Webster's rule, which never takes one back.
    """
    shares = {name: Fraction(weight) for name, weight in sorted(weights.items()) if weight > 0}
    whole, half = sum(shares.values()), Fraction(1, 2)
    # no more than each has after `start` seats, whatever the ties: rounding moves at most half a seat a domain
    count = {
        name: max(0, math.ceil(share / whole * (start - half * len(shares)) - half)) for name, share in shares.items()
    }
    ahead = [((2 * count[name] + 1) / share, name) for name, share in shares.items()]
    heapq.heapify(ahead)
    found = []
    for position in range(sum(count.values()), start + n):
        name = ahead[0][1]
        if position >= start:
            found.append((name, count[name]))
        count[name] += 1
        heapq.heapreplace(ahead, ((2 * count[name] + 1) / shares[name], name))
    return found


def weight_of(known: Sequence[float]) -> float:
    """p (1 - p), where p is the pass rate with one pass and one failure added. A task never tried has the largest, one
    always or never solved a small one, never none."""
    rate = (known[0] + 1) / (known[1] + 2)
    return rate * (1 - rate)


def undecided(ids: Sequence[str], history: Mapping[str, Sequence[float]], n: int, key: str) -> list[str]:
    """`n` of `ids`, none twice before all came, by their weights."""
    rng, found = random.Random(key), list[str]()
    while len(found) < n:
        keyed = [(rng.random() ** (1 / weight_of(history.get(name, (0.0, 0.0)))), name) for name in ids]
        found += [name for _, name in heapq.nlargest(n - len(found), keyed)]
    return found


def learned(history: History, records: Iterable[AttemptRecord]) -> History:
    """`history` after one more step. What infrastructure lost is no evidence."""
    seen: dict[str, list[float]] = {}
    for record in records:
        if record.outcome in HAS_VERDICT:
            of_task = seen.setdefault(record.task_id, [0.0, 0.0])
            of_task[0] += record.outcome is Outcome.PASSED
            of_task[1] += 1
    faded = {name: [FADE * value for value in history.get(name, (0.0, 0.0))] for name in seen}
    new = {name: [old + more for old, more in zip(faded[name], seen[name], strict=True)] for name in seen}
    return {**history, **new}
