"""The merged sample of one attempt, and the record of an attempt: what travels from a rollout to the trainer.

Arrays are raw and little-endian; readers refuse unknown schema versions, wrong lengths and wrong types
(`CorruptObject` naming the object) and never repair.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import ValidationError

from rl360.config.run import explain
from rl360.errors import CorruptObject
from rl360.harbor.verdict import Verdict
from rl360.ledger.outcomes import HAS_VERDICT, Outcome

SAMPLE_SCHEMA = 1
ATTEMPT_SCHEMA = 1


@dataclass(frozen=True)
class MergedSample:
    """One trajectory as the engine saw and sampled it.

    tokens `[T]` int32: prompt, sampled and observation ids in order.
    loss_mask `[T]` uint8: 1 exactly on sampled ids. logprobs `[T]` float32: the engine's log-probability of each
    sampled id (natural log, at the sampling temperature, before top-p and top-k), 0 elsewhere.
    version_spans: (start, end, weight version) over `tokens`, half-open, covering exactly the sampled ids.
    sampled_tokens: every id the engine sampled for this session, kept or not;
    `mask.sum() + after_truncation_tokens + prefix_break_tokens == sampled_tokens`.
    """

    attempt_id: str
    group_id: str
    task_id: str
    session_id: str
    tokens: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    version_spans: list[tuple[int, int, str]]
    sampled_tokens: int
    after_truncation_tokens: int
    prefix_break_tokens: int
    truncated: bool
    turns: int
    cached_tokens: int = 0
    prompt_tokens: int = 0

    def check(self, key: str) -> MergedSample:
        """Return self when every length, dtype and count agrees; else `CorruptObject` naming `key`."""
        length = self.tokens.shape[0] if self.tokens.ndim == 1 else -1
        for name, dtype in (("tokens", np.int32), ("loss_mask", np.uint8), ("logprobs", np.float32)):
            array = getattr(self, name)
            if array.dtype != dtype or array.shape != (length,):
                raise CorruptObject(
                    key, f"{name} is {array.dtype} {array.shape}, expected {np.dtype(dtype)} ({length},)"
                )
        if self.loss_mask.size and int(self.loss_mask.max()) > 1:
            raise CorruptObject(key, f"loss_mask holds {int(self.loss_mask.max())}, expected 0 or 1")
        if not np.isfinite(self.logprobs).all():
            raise CorruptObject(key, "logprobs holds a value that is not finite")
        if np.any(self.logprobs[self.loss_mask == 0] != 0.0):
            raise CorruptObject(key, "logprobs is not 0 on an id that was not sampled")
        kept = int(self.loss_mask.sum())
        total = kept + self.after_truncation_tokens + self.prefix_break_tokens
        if total != self.sampled_tokens:
            raise CorruptObject(
                key, f"kept {kept} + dropped {total - kept} tokens is not the {self.sampled_tokens} sampled"
            )
        covered = np.zeros(length, dtype=bool)
        for start, end, _version in self.version_spans:
            if not 0 <= start < end <= length or covered[start:end].any():
                raise CorruptObject(key, f"version span [{start}, {end}) is outside [0, {length}) or overlaps another")
            covered[start:end] = True
        if not np.array_equal(covered, self.loss_mask.astype(bool)):
            raise CorruptObject(key, "version spans do not cover exactly the sampled ids")
        return self

    def to_wire(self) -> dict[str, Any]:
        """A msgpack-ready dict (arrays stay arrays)."""
        return {"schema_version": SAMPLE_SCHEMA, **{name: getattr(self, name) for name in _SAMPLE_FIELDS}}

    @classmethod
    def from_wire(cls, wire: Any, key: str) -> MergedSample:
        """Rebuild and check; `key` names the object in errors."""
        fields = _fields(wire, key, "sample", SAMPLE_SCHEMA, _SAMPLE_FIELDS)
        for names, kind in _SAMPLE_KINDS.items():
            _refuse_other_kinds(fields, key, "sample", names, kind)
        for name in ("sampled_tokens", "after_truncation_tokens", "prefix_break_tokens"):
            if fields[name] < 0:
                raise CorruptObject(key, f"sample field {name} is {fields[name]}, a count is at least 0")
        try:
            fields["version_spans"] = [(int(a), int(b), str(v)) for a, b, v in fields["version_spans"]]
        except (TypeError, ValueError):
            raise CorruptObject(key, "sample field version_spans is not a list of (start, end, version)") from None
        return cls(**fields).check(key)


_SAMPLE_FIELDS = tuple(MergedSample.__dataclass_fields__)
_SAMPLE_KINDS: dict[tuple[str, ...], type] = {
    ("tokens", "loss_mask", "logprobs"): np.ndarray,
    ("attempt_id", "group_id", "task_id", "session_id"): str,
    (
        "sampled_tokens",
        "after_truncation_tokens",
        "prefix_break_tokens",
        "turns",
        "cached_tokens",
        "prompt_tokens",
    ): int,
    ("truncated",): bool,
}


@dataclass(frozen=True)
class AttemptRecord:
    """One try of one attempt: what the rollout task writes, and the only thing later tasks read.

    `verdict` is present exactly when `outcome` is passed, failed or truncated. `sample` is None when the session
    could not be read: what was sampled is then unknown, and `sampled_tokens` is 0. `phases_s` are seconds by phase.
    """

    attempt_id: str
    group_id: str
    task_id: str
    try_index: int
    outcome: Outcome
    verdict: Verdict | None
    exit_status: str
    session_id: str
    sample: MergedSample | None
    domain: str = ""
    detail: str = ""
    started_at: float = 0.0
    finished_at: float = 0.0
    phases_s: dict[str, float] = field(default_factory=dict)
    agent_metrics: dict[str, float] = field(default_factory=dict)
    cleanup_confirmed: bool = False

    @property
    def sampled_tokens(self) -> int:
        return self.sample.sampled_tokens if self.sample is not None else 0

    def check(self, key: str) -> AttemptRecord:
        """Return self when outcome, verdict and sample agree; else `CorruptObject`."""
        if (self.verdict is not None) != (self.outcome in HAS_VERDICT):
            raise CorruptObject(
                key, f"outcome {self.outcome} with verdict {self.verdict!r}: only a verified attempt has one"
            )
        if self.verdict is not None and (self.verdict.attempt_id, self.verdict.task_id) != (
            self.attempt_id,
            self.task_id,
        ):
            raise CorruptObject(key, f"verdict of {self.verdict.attempt_id} on attempt {self.attempt_id}")
        if self.sample is not None and (self.sample.attempt_id, self.sample.group_id) != (
            self.attempt_id,
            self.group_id,
        ):
            raise CorruptObject(key, f"sample of {self.sample.attempt_id} on attempt {self.attempt_id}")
        return self

    def to_wire(self) -> dict[str, Any]:
        """A msgpack-ready dict."""
        wire: dict[str, Any] = {
            "schema_version": ATTEMPT_SCHEMA,
            **{name: getattr(self, name) for name in _ATTEMPT_FIELDS},
        }
        wire["outcome"] = str(self.outcome)
        wire["verdict"] = self.verdict.model_dump() if self.verdict is not None else None
        wire["sample"] = self.sample.to_wire() if self.sample is not None else None
        return wire

    @classmethod
    def from_wire(cls, wire: Any, key: str) -> AttemptRecord:
        """Rebuild and check; `key` names the object in errors."""
        fields = _fields(wire, key, "attempt", ATTEMPT_SCHEMA, _ATTEMPT_FIELDS)
        for names, kind in _ATTEMPT_KINDS.items():
            _refuse_other_kinds(fields, key, "attempt", names, kind)
        try:
            fields["outcome"] = Outcome(fields["outcome"])
            verdict = fields["verdict"]
            fields["verdict"] = Verdict.model_validate(verdict) if verdict is not None else None
        except ValidationError as error:
            raise CorruptObject(key, f"bad verdict ({explain(error)})") from None
        except ValueError as error:
            raise CorruptObject(key, f"bad outcome ({error})") from None
        if fields["sample"] is not None:
            fields["sample"] = MergedSample.from_wire(fields["sample"], key)
        return cls(**fields).check(key)


_ATTEMPT_FIELDS = tuple(AttemptRecord.__dataclass_fields__)
_ATTEMPT_KINDS: dict[tuple[str, ...], type] = {
    ("attempt_id", "group_id", "task_id", "exit_status", "session_id", "domain", "detail"): str,
    ("try_index",): int,
    ("phases_s", "agent_metrics"): dict,
    ("cleanup_confirmed",): bool,
}


def _refuse_other_kinds(fields: dict[str, Any], key: str, what: str, names: tuple[str, ...], kind: type) -> None:
    for name in names:
        if type(fields[name]) is not kind:
            found = type(fields[name]).__name__
            raise CorruptObject(key, f"{what} field {name} is of type {found}, expected {kind.__name__}")


def _fields(wire: Any, key: str, what: str, schema: int, names: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(wire, dict):
        raise CorruptObject(key, f"{what} is {type(wire).__name__}, expected a map")
    if wire.get("schema_version") != schema:
        raise CorruptObject(key, f"{what} schema version {wire.get('schema_version')!r}, this rl360 reads {schema}")
    missing = [name for name in names if name not in wire]
    unknown = sorted(set(wire) - set(names) - {"schema_version"})
    if missing or unknown:
        raise CorruptObject(key, f"{what} lacks {missing} and has unknown {unknown}")
    return {name: wire[name] for name in names}
