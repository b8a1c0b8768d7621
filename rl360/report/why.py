"""Which attempts or groups ended as they did: the listing behind `rl360 ledger RUN --why NAME`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl360.errors import BadInput
from rl360.ledger.metrics import AGREED, group_fates
from rl360.ledger.outcomes import SAMPLED, Bucket, Outcome
from rl360.report.waste import CLASSES, class_of, token_class

if TYPE_CHECKING:
    from rl360.ledger.step import AttemptRow, StepLedger


@dataclass(frozen=True)
class Reason:
    """A name that can be asked for: what kind it is of, and how many of an attempt's tokens it concerns.

    `tokens(row, fate)` is None for an attempt that it does not name; `fate` is its group's.
    """

    name: str
    kind: str
    tokens: Callable[[AttemptRow, str], int | None]


def allowed() -> dict[str, tuple[str, ...]]:
    """Every name that can be asked for, by kind. A bucket that has a class's name is that class."""
    return {
        "class": CLASSES,
        "bucket": tuple(bucket.value for bucket in SAMPLED if bucket.value not in CLASSES),
        "outcome": tuple(outcome.value for outcome in Outcome),
        "agreement": AGREED,
    }


def reason(text: str) -> Reason:
    """The reason named, in any case, with hyphens or spaces for underscores; `BadInput` listing all names else."""
    name = "_".join(text.strip().lower().replace("-", " ").replace("_", " ").split())
    kind = next((kind for kind, names in allowed().items() if name in names), None)
    if kind is None:
        lists = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in allowed().items())
        raise BadInput(f"--why {text!r} is no reason; choose among {lists}")
    return Reason(name, kind, _MATCH[kind](name))


def _of_class(name: str) -> Callable[[AttemptRow, str], int | None]:
    def tokens(row: AttemptRow, _fate: str) -> int | None:
        if class_of(row) != name:
            return None
        return sum(count for bucket, count in row.tokens.items() if token_class(row, bucket) == name)

    return tokens


def _of_bucket(name: str) -> Callable[[AttemptRow, str], int | None]:
    bucket = Bucket(name)
    return lambda row, _fate: row.tokens.get(bucket, 0) if bucket in row.tokens or row.bucket is bucket else None


def _of_outcome(name: str) -> Callable[[AttemptRow, str], int | None]:
    return lambda row, _fate: row.sampled_tokens if row.outcome == name else None


def _of_fate(name: str) -> Callable[[AttemptRow, str], int | None]:
    return lambda row, fate: row.sampled_tokens if fate == name and row.score is not None else None


_MATCH = {"class": _of_class, "bucket": _of_bucket, "outcome": _of_outcome, "agreement": _of_fate}


def why(
    ledgers: Iterable[StepLedger], asked: Reason, *, groups: bool = False, limit: int | None = None
) -> dict[str, Any]:
    """Everything that `asked` names, in step and attempt order: totals, counts by (outcome, bucket), and the first
    `limit` rows (None: all), one an attempt or one a group. `tokens` are those that `asked` names, of the attempts'
    `sampled_tokens`; `seconds` are the attempts' own."""
    totals: Counter[str] = Counter()
    seconds = 0.0
    causes: dict[tuple[str, str], dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    listed = 0
    for ledger in ledgers:
        found = list(_matches(ledger, asked))
        for row, tokens, _fate in found:
            entry = causes.setdefault(
                (row.outcome.value, row.bucket.value), {"attempts": 0, "tokens": 0, "seconds": 0.0}
            )
            entry["attempts"] += 1
            entry["tokens"] += tokens
            entry["seconds"] += row.seconds
            totals.update(attempts=1, tokens=tokens, sampled_tokens=row.sampled_tokens)
            seconds += row.seconds
        totals["groups"] += len({row.group_id for row, _, _ in found})
        for entry in _by_group(ledger, found) if groups else _by_attempt(ledger, found):
            listed += 1
            if limit is None or len(rows) < limit:
                rows.append(entry)
    names = ("attempts", "groups", "tokens", "sampled_tokens")
    by_cause = [{"outcome": outcome, "bucket": bucket, **entry} for (outcome, bucket), entry in causes.items()]
    return {
        "why": asked.name,
        "kind": asked.kind,
        **{name: totals[name] for name in names},
        "seconds": seconds,
        "by_cause": sorted(by_cause, key=lambda each: (-each["attempts"], each["outcome"], each["bucket"])),
        "listed": "groups" if groups else "attempts",
        "rows": rows,
        "rows_in_all": listed,
    }


Match = tuple["AttemptRow", int, str]


def _matches(ledger: StepLedger, asked: Reason) -> Iterator[Match]:
    fates = group_fates(ledger)
    for row in ledger.attempts:
        tokens = asked.tokens(row, fates[row.group_id])
        if tokens is not None:
            yield row, tokens, fates[row.group_id]


def _by_attempt(ledger: StepLedger, found: Iterable[Match]) -> Iterator[dict[str, Any]]:
    for row, tokens, fate in found:
        yield {
            "step": ledger.step,
            "attempt_id": row.attempt_id,
            "group_id": row.group_id,
            "group_fate": fate,
            "task_id": row.task_id,
            "outcome": row.outcome.value,
            "bucket": row.bucket.value,
            "reward": row.reward,
            "score": row.score,
            "tokens": tokens,
            "sampled_tokens": row.sampled_tokens,
            "seconds": row.seconds,
        }


def _by_group(ledger: StepLedger, found: Iterable[Match]) -> Iterator[dict[str, Any]]:
    groups: dict[str, list[Match]] = {}
    for match in found:
        groups.setdefault(match[0].group_id, []).append(match)
    members: dict[str, list[AttemptRow]] = {}
    for row in ledger.attempts:
        members.setdefault(row.group_id, []).append(row)
    for group_id, matches in groups.items():
        yield {
            "step": ledger.step,
            "group_id": group_id,
            "task_id": matches[0][0].task_id,
            "fate": matches[0][2],
            "attempts": len(matches),
            "of": len(members[group_id]),
            "rewards": [row.reward for row in members[group_id]],
            "tokens": sum(tokens for _, tokens, _ in matches),
            "sampled_tokens": sum(row.sampled_tokens for row, _, _ in matches),
            "seconds": sum(row.seconds for row, _, _ in matches),
        }
