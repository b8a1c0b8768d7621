"""Which attempts train, and where every sampled token goes. Pure numpy and dataclasses: no I/O.

Contract: each attempt gets exactly one `Decision` with exactly one reason (a `Bucket`), and the decision's token
counts sum to what the attempt sampled. Rules, first match wins:

    no verdict                                  infra
    verdict but no merged sample                prefix_break        (its reward still counts for the group)
    a log-prob is NaN or infinite               nonfinite           (same)
    a span was sampled under another version    stale               (same)
    more tokens than `max_seq_len`              over_length         (same)
    fewer than two verdicts in the group        insufficient_valid
    all verdicts of the group agree             zero_disagreement
    nothing sampled is left under the mask      after_truncation or prefix_break, whichever took it
    otherwise                                   trained; what a cut or a rewritten history took: after_truncation,
                                                prefix_break

"Valid" means *has a verdict* and nothing else, so the baseline of a group never depends on what infra did to others.
Truncated attempts are valid and train up to the cut. Kept samples come out sorted by attempt id: the batch, and with
it every floating-point sum, is the same whatever order attempts arrived in and however many failed beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rl360.errors import BadInput
from rl360.ledger.outcomes import HAS_VERDICT, Bucket, Outcome
from rl360.objective.advantages import group_advantages, group_index

if TYPE_CHECKING:
    from rl360.config.run import ObjectiveConfig
    from rl360.sessions.sample import AttemptRecord


BATCH_SCHEMA = 1


@dataclass(frozen=True)
class Decision:
    """What became of one attempt. `tokens` holds sampled tokens by bucket; their sum is what the attempt sampled."""

    attempt_id: str
    group_id: str
    outcome: Outcome
    bucket: Bucket
    reward: float | None
    advantage: float | None
    tokens: dict[Bucket, int] = field(default_factory=dict)

    @property
    def sampled_tokens(self) -> int:
        return sum(self.tokens.values())

    @property
    def trains(self) -> bool:
        return self.bucket is Bucket.TRAINED

    def to_wire(self) -> dict[str, Any]:
        return {
            "attempt_id": self.attempt_id,
            "group_id": self.group_id,
            "outcome": self.outcome.value,
            "bucket": self.bucket.value,
            "reward": self.reward,
            "advantage": self.advantage,
            "tokens": {bucket.value: count for bucket, count in self.tokens.items()},
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Decision:
        return cls(
            attempt_id=wire["attempt_id"],
            group_id=wire["group_id"],
            outcome=Outcome(wire["outcome"]),
            bucket=Bucket(wire["bucket"]),
            reward=wire["reward"],
            advantage=wire["advantage"],
            tokens={Bucket(name): int(count) for name, count in wire["tokens"].items()},
        )


@dataclass(frozen=True)
class FilterResult:
    """Decisions sorted by attempt id, and the attempts to train in the same order."""

    decisions: tuple[Decision, ...]
    kept: tuple[AttemptRecord, ...]
    advantages: np.ndarray  # float64 [kept]
    tokens: dict[Bucket, int]
    trained_tokens: int

    @property
    def loss_weight(self) -> float:
        """Weight of each trained token in the step's loss: 1 / trained tokens; 0 when nothing trains."""
        return 1.0 / self.trained_tokens if self.trained_tokens else 0.0

    def to_wire(self, run: str, step: int) -> dict[str, Any]:
        """The train batch object (`filter.msgpack`): kept samples with their advantages, and every decision."""
        samples = [
            {
                "attempt_id": attempt.attempt_id,
                "group_id": attempt.group_id,
                "tokens": attempt.sample.tokens,
                "loss_mask": attempt.sample.loss_mask,
                "logprobs": attempt.sample.logprobs,
                "advantage": float(advantage),
            }
            for attempt, advantage in zip(self.kept, self.advantages, strict=True)
            if attempt.sample is not None
        ]
        return {
            "schema_version": BATCH_SCHEMA,
            "run": run,
            "step": step,
            "samples": samples,
            "decisions": [decision.to_wire() for decision in self.decisions],
        }


def filter_groups(
    attempts: Sequence[AttemptRecord], config: ObjectiveConfig, *, expected_version: str, max_seq_len: int
) -> FilterResult:
    """Decide about every attempt of a step.

    expected_version: the weight version this step samples from; a sample with a span of another one is stale.
    Refuses (BadInput) duplicated attempt ids, missing group ids, and records that contradict themselves.
    """
    ordered = sorted(attempts, key=lambda attempt: attempt.attempt_id)
    _refuse_malformed(ordered)
    valid = [attempt for attempt in ordered if attempt.verdict is not None]
    rewards = np.array([a.verdict.reward for a in valid if a.verdict is not None], dtype=np.float64)
    group_ids = [attempt.group_id for attempt in valid]
    advantages = group_advantages(
        rewards, group_ids, [attempt.attempt_id for attempt in valid], normalize_std=config.normalize_std
    )
    group_reasons = _group_reasons(rewards, group_ids, config.disagreement_rtol)
    advantage_of = {attempt.attempt_id: float(value) for attempt, value in zip(valid, advantages, strict=True)}

    decisions: list[Decision] = []
    kept: list[AttemptRecord] = []
    for attempt in ordered:
        reason = _sample_reason(attempt, expected_version, max_seq_len) or group_reasons.get(attempt.group_id)
        bucket, tokens = _place_tokens(attempt, reason)
        if bucket is Bucket.TRAINED:
            kept.append(attempt)
        decisions.append(
            Decision(
                attempt_id=attempt.attempt_id,
                group_id=attempt.group_id,
                outcome=attempt.outcome,
                bucket=bucket,
                reward=None if attempt.verdict is None else attempt.verdict.reward,
                advantage=advantage_of[attempt.attempt_id] if bucket is Bucket.TRAINED else None,
                tokens=tokens,
            )
        )
    totals: Counter[Bucket] = Counter()
    for decision in decisions:
        totals.update(decision.tokens)
    return FilterResult(
        decisions=tuple(decisions),
        kept=tuple(kept),
        advantages=np.array([advantage_of[attempt.attempt_id] for attempt in kept], dtype=np.float64),
        tokens=dict(totals),
        trained_tokens=totals[Bucket.TRAINED],
    )


def agrees(rewards: np.ndarray, rtol: float) -> bool:
    """True when rewards `[attempts]` differ by no more than `rtol` times the largest magnitude among them."""
    return bool(rewards.max() - rewards.min() <= rtol * np.abs(rewards).max())


def _group_reasons(rewards: np.ndarray, group_ids: Sequence[str], rtol: float) -> dict[str, Bucket]:
    """Why a whole group does not train, for the groups that do not; every group here has at least one verdict."""
    reasons: dict[str, Bucket] = {}
    names, index = group_index(group_ids)
    for position, name in enumerate(names):
        members = rewards[index == position]
        if len(members) < 2:
            reasons[name] = Bucket.INSUFFICIENT_VALID
        elif agrees(members, rtol):
            reasons[name] = Bucket.ZERO_DISAGREEMENT
    return reasons


def _sample_reason(attempt: AttemptRecord, expected_version: str, max_seq_len: int) -> Bucket | None:
    """Why this attempt cannot train whatever its group does, or None."""
    sample = attempt.sample
    if attempt.verdict is None:
        return Bucket.INFRA
    if sample is None:
        return Bucket.PREFIX_BREAK
    if not np.isfinite(sample.logprobs).all():
        return Bucket.NONFINITE
    if any(version != expected_version for _, _, version in sample.version_spans):
        return Bucket.STALE
    if len(sample.tokens) > max_seq_len:
        return Bucket.OVER_LENGTH
    return None


def _place_tokens(attempt: AttemptRecord, reason: Bucket | None) -> tuple[Bucket, dict[Bucket, int]]:
    """The attempt's final bucket and its sampled tokens by bucket (zero counts left out)."""
    sample = attempt.sample
    if reason is not None or sample is None:
        bucket = reason or Bucket.PREFIX_BREAK
        return bucket, {bucket: attempt.sampled_tokens} if attempt.sampled_tokens else {}
    tokens = {
        Bucket.TRAINED: int(np.count_nonzero(sample.loss_mask)),
        Bucket.AFTER_TRUNCATION: sample.after_truncation_tokens,
        Bucket.PREFIX_BREAK: sample.prefix_break_tokens,
    }
    left = {bucket: count for bucket, count in tokens.items() if count}
    return next(iter(left), Bucket.PREFIX_BREAK), left


def _refuse_malformed(attempts: Sequence[AttemptRecord]) -> None:
    seen: set[str] = set()
    for attempt in attempts:
        name = attempt.attempt_id
        if not attempt.group_id:
            raise BadInput(
                f"attempt {name}: no group id; advantages are relative to a group, so every attempt needs one"
            )
        if name in seen:
            raise BadInput(f"attempt {name} appears twice in one step; a sample trains at most once")
        seen.add(name)
        if (attempt.verdict is not None) != (attempt.outcome in HAS_VERDICT):
            has = "a verdict" if attempt.verdict is not None else "no verdict"
            raise BadInput(f"attempt {name}: outcome {attempt.outcome} with {has}; a reward exists only with a verdict")
        sample = attempt.sample
        if sample is not None:
            masked = int(np.count_nonzero(sample.loss_mask))
            dropped = sample.after_truncation_tokens + sample.prefix_break_tokens
            if masked + dropped != sample.sampled_tokens:
                raise BadInput(
                    f"attempt {name}: {masked} tokens under the loss mask + {dropped} dropped != "
                    f"{sample.sampled_tokens} sampled; the sample is broken"
                )
