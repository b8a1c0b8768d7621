"""The sums that must hold in a ledger. Each check names both sides, so a broken book says what it disagrees about.

`check_ledger` computes all of them from a stored ledger, for a person to see; `refuse_broken` raises on the first
that does not hold, so books that do not balance are never written.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl360.errors import Rl360Error
from rl360.ledger.outcomes import HAS_VERDICT, Bucket, Outcome
from rl360.store.codec import sha256_hex

if TYPE_CHECKING:
    from rl360.ledger.step import AttemptRow, StepLedger

WEIGHT_RTOL = 1e-6
NO_STEP = ("empty", "nonfinite")
# Means over trained tokens, and the gradient of their loss: absent when there is none.
TRAIN_FIGURES = (
    *("loss", "grad_norm", "clip_fraction", "tis_mean", "masked_fraction"),
    *("mean_abs_dlogp", "entropy", "kl_mean"),
    *("value_loss", "explained_variance", "value_clip_fraction", "critic_grad_norm"),
)


class LedgerBroken(Rl360Error):
    """A sum of a step's ledger does not hold: something was lost, counted twice, or trained without being booked."""


@dataclass(frozen=True)
class Check:
    """One sum: `left` (named) against `right` (named). `detail` names the first attempt at fault, if one is."""

    name: str
    left_name: str
    left: float
    right_name: str
    right: float
    holds: bool
    detail: str = ""

    def line(self) -> str:
        relation = "=" if self.holds else "!="
        text = f"{self.left_name} {_number(self.left)} {relation} {self.right_name} {_number(self.right)}"
        return f"{text} ({self.detail})" if self.detail else text


def version_number(version: str) -> int:
    """Optimizer steps applied to the weights of a version `run:k`: k."""
    number = version.rpartition(":")[2]
    if not (number.isascii() and number.isdecimal()):
        raise LedgerBroken(f"weight version {version!r} is not of the form run:k")
    return int(number)


def refuse_broken(ledger: StepLedger) -> None:
    """Raise `LedgerBroken` for the first check that does not hold."""
    for check in check_ledger(ledger):
        if not check.holds:
            raise LedgerBroken(f"{ledger.run} step {ledger.step}: {check.name}: {check.line()}")


def check_ledger(ledger: StepLedger, trained_before: Collection[str] = frozenset()) -> Iterator[Check]:
    """All checks of one step. `trained_before`: attempt ids that earlier steps of the run trained."""
    rows = ledger.attempts
    ids = Counter(row.attempt_id for row in rows)
    twice = next((attempt_id for attempt_id, count in ids.items() if count > 1), "")
    yield equal("one outcome per attempt", "rows", len(rows), "distinct attempts", len(ids), twice)
    prefix = f"s{ledger.step:06}-"
    foreign = [row.attempt_id for row in rows if not row.attempt_id.startswith(prefix)]
    yield equal("attempts of this step", "of another step", len(foreign), "allowed", 0, foreign[0] if foreign else "")
    fault = _first(rows, lambda row: (row.reward is not None) != (row.outcome in HAS_VERDICT))
    verdicts = sum(row.outcome in HAS_VERDICT for row in rows)
    rewards = sum(row.reward is not None for row in rows)
    yield equal("a reward exactly where a verdict is", "rewards", rewards, "verdicts", verdicts, fault)
    timeouts = sum(row.score is not None and row.outcome is Outcome.AGENT_TIMEOUT for row in rows)
    scores = sum(row.score is not None for row in rows)
    fault = _first(rows, _oddly_scored)
    name = "a score of every reward, else of scored timeouts"
    yield equal(name, "scores", scores, "verdicts and scored timeouts", verdicts + timeouts, fault)

    booked = sum(sum(row.tokens.values()) for row in rows)
    sampled = sum(row.sampled_tokens for row in rows)
    fault = _first(rows, lambda row: sum(row.tokens.values()) != row.sampled_tokens)
    yield equal("every sampled token in one bucket", "tokens in buckets", booked, "tokens sampled", sampled, fault)
    yield _engine_check(rows)

    trained = sum(row.tokens.get(Bucket.TRAINED, 0) for row in rows)
    fault = _first(
        rows, lambda row: len({row.trains, row.trained_samples > 0, row.tokens.get(Bucket.TRAINED, 0) > 0}) > 1
    )
    train, samples = ledger.train, sum(row.trained_samples for row in rows)
    yield equal("trained samples", "booked", samples, "trainer", train.trained_samples, fault)
    yield equal("trained tokens", "booked", trained, "trainer", train.trained_tokens)
    weights = math.fsum(row.loss_weight for row in rows)
    holds = math.isclose(weights, train.loss_weight_sum, rel_tol=WEIGHT_RTOL, abs_tol=0.0)
    yield Check("loss weights", "booked", weights, "trainer", float(train.loss_weight_sum), holds)
    yield from _step_checks(ledger, trained)
    yield from _witness_check(ledger)
    again = sorted(set(ledger.trained_ids) & set(trained_before))
    yield equal("trained once", "trained in an earlier step too", len(again), "allowed", 0, again[0] if again else "")


def _step_checks(ledger: StepLedger, trained: int) -> Iterator[Check]:
    """One optimizer step exactly where something trained, on weights no younger than those its tokens came from."""
    rows, train = ledger.attempts, ledger.train
    told = [name for name in TRAIN_FIGURES if getattr(train, name) is not None]
    steps, expected = int(train.status not in NO_STEP or bool(told)), int(trained > 0)
    if trained:
        steps = int(train.status not in NO_STEP and train.loss is not None and math.isfinite(train.loss))
    detail = "" if steps == expected else f"status {train.status}, {', '.join(told) or 'no figure'} given"
    name = "an optimizer step exactly where something trained"
    yield Check(name, "optimizer steps", steps, "expected", expected, steps == expected, detail)
    if ledger.version_before is None:  # of a schema that says no versions
        return
    yield equal("one version on", "version after", train.version_after, "expected", ledger.version_before + expected)
    fault = _first(rows, lambda row: sum((row.trained_versions or {}).values()) != row.tokens.get(Bucket.TRAINED, 0))
    counts = [(version_number(version), n) for row in rows for version, n in (row.trained_versions or {}).items()]
    versioned = sum(n for _, n in counts)
    yield equal("a weight version of every trained token", "with a version", versioned, "trained", trained, fault)
    early = sum(n for version, n in counts if version > ledger.version_before)
    yield equal("sampled before it trained", "trained tokens of later weights", early, "allowed", 0)


def samples_digest(names: Collection[tuple[str, int]]) -> str:
    """sha256 of samples by attempt id and leaf, in whatever order they come."""
    return sha256_hex("".join(f"{attempt_id} {leaf}\n" for attempt_id, leaf in sorted(names)).encode())


def _witness_check(ledger: StepLedger) -> Iterator[Check]:
    """What the trainer's witness saw, where the run has one: the samples booked with an advantage and no other, but for
    those it excuses by name; at as many positions as they have trained tokens, less what the loss says it took out."""
    train, seen = ledger.train, ledger.train.witness
    if seen is None:
        return
    rows = [(row, at) for row in ledger.attempts for at, each in enumerate(row.leaves) if each is Bucket.TRAINED]
    excused, unclear = set(seen.get("excused") or ()), seen["cannot_tell"]
    booked = [(row.attempt_id, at) for n, (row, at) in enumerate(rows) if (row.advantage != 0) != (n in excused)]
    same = samples_digest(booked) == seen["digest"] and len(booked) == seen["samples"]
    holds = same and len(excused) <= unclear and excused <= set(range(len(rows)))
    if seen.get("excused") is None:  # of before they were named: only their number is known
        holds = same or abs(len(booked) - seen["samples"]) <= unclear > 0
    detail = f"{unclear} it cannot tell of in full" if unclear else "" if same else "other samples"
    yield Check("samples with a gradient", "booked", len(booked), "seen", seen["samples"], holds, detail)
    pulls, flat = (
        sum(row.tokens.get(Bucket.TRAINED, 0) for row in ledger.attempts if (row.advantage == 0) is zero)
        for zero in (False, True)
    )
    taken = round(((train.clip_fraction or 0.0) + (train.masked_fraction or 0.0)) * train.trained_tokens)
    holds = pulls - taken <= seen["tokens"] <= pulls + flat if unclear else pulls == seen["tokens"]
    detail = f"clips and corrections took out {taken}" if taken else ""
    yield Check("positions with a gradient", "booked", pulls, "seen", seen["tokens"], holds, detail)


def _oddly_scored(row: AttemptRow) -> bool:
    """Shaping only takes from a reward; without one the only score is a timeout's 0."""
    if row.reward is None:
        return row.score not in (None, 0.0)
    return row.score is None or row.score > row.reward


def _engine_check(rows: tuple[AttemptRow, ...]) -> Check:
    """What the engine's replies to the agent add up to, against what the session recorded, per attempt.

    A session may hold more than its agent saw (the agent was stopped while a turn was being sampled), never less:
    less would be tokens the engine sampled that nobody accounts for. Of one that is lost nothing is known.
    """
    known = [row for row in rows if row.leaves or row.sampled_tokens]
    compared = [(row, row.agent_tokens) for row in known if row.agent_tokens is not None]
    lost = [row.attempt_id for row, agent_tokens in compared if agent_tokens > row.sampled_tokens]
    unseen = sum(max(0, row.sampled_tokens - agent_tokens) for row, agent_tokens in compared)
    detail = (
        f"{len(compared)} attempts compared with what their agents received; {unseen} sampled tokens reached no agent"
    )
    return Check(
        "no token lost", "attempts short of tokens", len(lost), "allowed", 0, not lost, lost[0] if lost else detail
    )


def equal(name: str, left_name: str, left: int, right_name: str, right: int, fault: str = "") -> Check:
    """Both sides equal and no single attempt at fault (faults of opposite sign could cancel in the sums)."""
    detail = f"e.g. attempt {fault}" if fault else ""
    return Check(name, left_name, left, right_name, right, left == right and not fault, detail)


def _first(rows: tuple[AttemptRow, ...], at_fault: Callable[[AttemptRow], bool]) -> str:
    return next((row.attempt_id for row in rows if at_fault(row)), "")


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.9g}"
