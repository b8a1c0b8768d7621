"""The names of everything that can happen to an attempt and to a token.

Every attempt ends in exactly one `Outcome`; every sampled token in exactly one sampled `Bucket`.
`passed`, `failed` and `truncated` are the only outcomes that carry a verdict; all others are infrastructure.
"""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """How one attempt ended."""

    PASSED = "passed"
    FAILED = "failed"
    TRUNCATED = "truncated"
    NO_ENGINE = "no_engine"
    SANDBOX_START = "sandbox_start"
    SANDBOX_LOST = "sandbox_lost"
    AGENT_TIMEOUT = "agent_timeout"
    VERIFIER_TIMEOUT = "verifier_timeout"
    VERIFIER_ERROR = "verifier_error"
    NO_VERDICT = "no_verdict"
    JUDGE_ERROR = "judge_error"
    SESSION_LOST = "session_lost"
    GENERATION_ERROR = "generation_error"
    ABORTED = "aborted"
    UNCLASSIFIED = "unclassified"


HAS_VERDICT: frozenset[Outcome] = frozenset({Outcome.PASSED, Outcome.FAILED, Outcome.TRUNCATED})
INFRA: frozenset[Outcome] = frozenset(Outcome) - HAS_VERDICT


class Bucket(StrEnum):
    """Where one token ended."""

    TRAINED = "trained"
    ZERO_DISAGREEMENT = "zero_disagreement"
    INSUFFICIENT_VALID = "insufficient_valid"
    INFRA = "infra"
    AFTER_TRUNCATION = "after_truncation"
    OVER_LENGTH = "over_length"
    PREFIX_BREAK = "prefix_break"
    ROUTING_MISALIGNED = "routing_misaligned"
    STALE = "stale"
    SURPLUS = "surplus"
    DUPLICATE = "duplicate"
    NONFINITE = "nonfinite"
    DROPPED_BY_ROUNDING = "dropped_by_rounding"
    PROMPT = "prompt"
    OBSERVATION = "observation"
    PADDING = "padding"


# Why a session itself keeps sampled tokens out of its samples, in the order they are written down.
DROPPED: tuple[Bucket, ...] = (
    *(Bucket.AFTER_TRUNCATION, Bucket.PREFIX_BREAK, Bucket.DUPLICATE),
    *(Bucket.STALE, Bucket.ROUTING_MISALIGNED, Bucket.NONFINITE, Bucket.INFRA),
)
NOT_SAMPLED: frozenset[Bucket] = frozenset({Bucket.PROMPT, Bucket.OBSERVATION, Bucket.PADDING})
SAMPLED: tuple[Bucket, ...] = tuple(b for b in Bucket if b not in NOT_SAMPLED)
