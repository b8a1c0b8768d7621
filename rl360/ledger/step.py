"""The ledger of one step: where every attempt and every sampled token went. Written once, as `ledger.msgpack`.

`build_step_ledger` joins what the rollout recorded, what the filter decided, what the trainer reported and what the
push did, and refuses (`LedgerBroken`) to write books that do not balance. Everything a person sees - metrics, tables,
pictures - is computed from this object alone (rl360.ledger.metrics), never from counters kept elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rl360.errors import CorruptObject
from rl360.ledger.checks import LedgerBroken, refuse_broken, version_number
from rl360.ledger.outcomes import NOT_SAMPLED, Bucket, Outcome
from rl360.store.codec import pack
from rl360.store.layout import step_key
from rl360.store.manifest import ObjectRef, put_object

if TYPE_CHECKING:
    from rl360.objective.filters import Decision
    from rl360.sessions.sample import AttemptRecord, LeafCounts
    from rl360.store.object_store import ObjectStore

LEDGER_NAME = "ledger.msgpack"
LEDGER_SCHEMA = 4
# Steps of an older schema are read too, so that a run which was resumed since can be audited whole. What it did not say
# of an attempt stays unsaid (None), by schema.
UNSAID: dict[int, dict[str, None]] = {3: {"versions": None, "trained_versions": None}, LEDGER_SCHEMA: {}}
# Ids sent with an attempt's turns and those of them the engine held in its cache; rows of routed experts, those of them
# that a decode step wrote, and those whose cache a later forward had to rebuild.
FORWARD_COUNTS = ("prompt_tokens", "cached_tokens", "routing_rows", "decode_rows", "reprefilled_rows")
# What the agent was told the engine had sampled for it (the usage of each reply, summed).
AGENT_TOKENS = "completion_tokens"
# The trainer's status for a batch whose loss or gradient was not finite: no optimizer step was taken.
REFUSED = "nonfinite"
TRAINED = "trained"


@dataclass(frozen=True)
class AttemptRow:
    """One attempt in the books.

    leaves: why each of its samples trained or not, in order; empty when the session could not be merged.
    tokens: sampled tokens by bucket, sums to `sampled_tokens`; context: ids under no loss mask, by prompt (before a
    sample's first trained id) and observation (after it).
    forwards: what the engine did for it, by `FORWARD_COUNTS`, zero counts left out.
    reward: the verifier's, None without a verdict. score: what its advantage was computed from: the reward, shaped;
    0 of a timeout that the run scores; None of what infrastructure lost. advantage: of each of its trained tokens; None
    when it trains nothing, and with the estimator gae, where each token has one of its own.
    token_weight: the loss weight of each of its trained tokens (rl360.objective.reductions), None when it trains
    nothing; `loss_weight` is their sum. agent_tokens: what the engine's replies to the agent added up to, None when
    the attempt reported none.
    versions: the weight versions its samples were sampled under, in order of appearance; trained_versions: its trained
    tokens by version, those of a sample that saw several under the oldest; None in a ledger of schema 3.
    """

    attempt_id: str
    group_id: str
    task_id: str
    domain: str
    try_index: int
    outcome: Outcome
    exit_status: str
    bucket: Bucket
    reward: float | None
    score: float | None
    advantage: float | None
    sampled_tokens: int
    tokens: dict[Bucket, int]
    context: dict[Bucket, int]
    forwards: dict[str, int]
    agent_tokens: int | None
    token_weight: float | None
    loss_weight: float
    leaves: tuple[Bucket, ...]
    truncated: bool
    turns: int
    seconds: float
    versions: tuple[str, ...] | None = ()
    trained_versions: dict[str, int] | None = field(default_factory=dict)
    phases_s: dict[str, float] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        return self.bucket is Bucket.TRAINED

    @property
    def trained_samples(self) -> int:
        return self.leaves.count(Bucket.TRAINED)


@dataclass(frozen=True)
class TrainReport:
    """What the trainer said of the step. `loss` and the other means are None when nothing trained, never 0."""

    status: str
    version_after: int
    loss: float | None
    grad_norm: float | None
    trained_samples: int
    trained_tokens: int
    loss_weight_sum: float
    clip_fraction: float | None = None
    tis_mean: float | None = None
    masked_fraction: float | None = None
    mean_abs_dlogp: float | None = None
    entropy: float | None = None
    kl_mean: float | None = None
    value_loss: float | None = None
    explained_variance: float | None = None
    value_clip_fraction: float | None = None
    critic_grad_norm: float | None = None
    weights_digest: str = ""
    batch_digest: str = ""
    witness: dict[str, Any] | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        lacking = {"samples", "tokens", "digest", "cannot_tell"} - (self.witness or {}).keys()
        if self.witness is not None and lacking:
            raise TypeError(f"witness lacks {', '.join(sorted(lacking))}")

    @classmethod
    def from_result(cls, result: Mapping[str, Any]) -> TrainReport:
        """From the trainer's result (`train.json`); fields the ledger does not keep are ignored."""
        try:
            return cls(**{name: result[name] for name in cls.__dataclass_fields__ if name in result})
        except TypeError as error:
            raise LedgerBroken(f"the trainer's result lacks a field the ledger needs ({error})") from None

    @property
    def implied_before(self) -> int:
        return self.version_after - (self.status == TRAINED)


@dataclass(frozen=True)
class PushReport:
    """How the new weights reached the engines."""

    path: str
    calls_per_engine: float
    bytes: int
    paused_s: float
    engines: int

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> PushReport:
        """From what the push's manifest says; `engines` are the serving ones."""
        missing = [name for name in cls.__dataclass_fields__ if name not in record]
        if missing:
            raise LedgerBroken(f"the push record lacks {', '.join(missing)}")
        return cls(**{name: record[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class StepLedger:
    """The books of one step. `phases_s` are wall seconds of the step's tasks, in the order they ran; `version_before`
    counts the optimizer steps in the weights that the step trained, None in a ledger of schema 3."""

    run: str
    step: int
    version_before: int | None
    attempts: tuple[AttemptRow, ...]
    train: TrainReport
    push: PushReport | None
    phases_s: dict[str, float]

    @property
    def trained_ids(self) -> list[str]:
        return [row.attempt_id for row in self.attempts if row.trains]

    def to_wire(self) -> dict[str, Any]:
        """A msgpack-ready dict."""
        return {
            "schema_version": LEDGER_SCHEMA,
            "run": self.run,
            "step": self.step,
            "version_before": self.version_before,
            "attempts": [dict(vars(row)) for row in self.attempts],
            "train": asdict(self.train),
            "push": None if self.push is None else asdict(self.push),
            "phases_s": dict(self.phases_s),
        }

    @classmethod
    def from_wire(cls, wire: Any, key: str) -> StepLedger:
        """Rebuild; `CorruptObject` naming `key` for an unknown schema, a missing field or an unknown name."""
        schema = wire.get("schema_version") if isinstance(wire, dict) else type(wire).__name__
        if type(schema) is not int or schema not in UNSAID:
            raise CorruptObject(
                key,
                f"ledger schema {schema!r}, this rl360 reads {' and '.join(map(str, UNSAID))}; read it with the rl360 "
                "that wrote it, other steps with --step",
            )
        try:
            return cls(
                run=wire["run"],
                step=int(wire["step"]),
                version_before=int(wire["version_before"]) if schema == LEDGER_SCHEMA else None,
                attempts=tuple(_row_from_wire(row, UNSAID[schema]) for row in wire["attempts"]),
                train=TrainReport(**wire["train"]),
                push=None if wire["push"] is None else PushReport(**wire["push"]),
                phases_s={str(name): float(seconds) for name, seconds in wire["phases_s"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptObject(key, f"is not a ledger ({type(error).__name__}: {error})") from None


def write_ledger(store: ObjectStore, ledger: StepLedger) -> ObjectRef:
    """Write the step's ledger once; a ledger that is already there wins and its reference is returned."""
    return put_object(store, step_key(ledger.run, ledger.step, LEDGER_NAME), pack(ledger.to_wire()))


def build_step_ledger(
    *,
    run: str,
    step: int,
    attempts: Sequence[AttemptRecord],
    decisions: Sequence[Decision],
    train: Mapping[str, Any],
    push: Mapping[str, Any] | None,
    phases_s: Mapping[str, float],
    version_before: int | None = None,
    batch_digest: str | None = None,
) -> StepLedger:
    """Join the step's records into its ledger and check that the books balance.

    attempts: every record of the step, every try of it. decisions: the filter's, one per attempt.
    train: the trainer's result. push: what the push's manifest says, None when nothing was pushed.
    version_before: optimizer steps applied before this one; None: as the trainer's result has it.
    batch_digest: sha256 of the batch that holds the decisions; a result of another batch, step or run is refused.
    Raises `LedgerBroken` naming both sides of the first sum that does not hold.
    """
    by_id = {decision.attempt_id: decision for decision in decisions}
    seen = [record.attempt_id for record in attempts]
    if len(by_id) != len(decisions) or len(set(seen)) != len(seen) or set(by_id) != set(seen):
        odd = sorted(set(by_id) ^ set(seen))[:3]
        raise LedgerBroken(
            f"step {step}: {len(seen)} attempts were recorded and {len(decisions)} decided, and the two differ"
            f" (e.g. {', '.join(odd) or 'an id twice'}); every attempt needs exactly one decision"
        )
    asked = {"run": run, "step": step, "batch_digest": batch_digest} if batch_digest is not None else {}
    other = [f"{name} {train.get(name)!r}, not {value!r}" for name, value in asked.items() if train.get(name) != value]
    if other:
        raise LedgerBroken(f"step {step}: the trainer's result is of {'; '.join(other)}: it trained something else")
    reported = TrainReport.from_result(train)
    if reported.status == REFUSED:
        by_id = {attempt_id: _refused(decision) for attempt_id, decision in by_id.items()}
    rows = [_row(record, by_id[record.attempt_id]) for record in attempts]
    ledger = StepLedger(
        run=run,
        step=step,
        version_before=reported.implied_before if version_before is None else version_before,
        attempts=tuple(sorted(rows, key=lambda row: row.attempt_id)),
        train=reported,
        push=None if push is None else PushReport.from_record(push),
        phases_s={name: float(seconds) for name, seconds in phases_s.items()},
    )
    refuse_broken(ledger)
    return ledger


def _refused(decision: Decision) -> Decision:
    """The decision after the trainer refused the batch: what would have trained did not, and is booked as nonfinite."""
    if not decision.trains:
        return decision

    def booked(bucket: Bucket) -> Bucket:
        return Bucket.NONFINITE if bucket is Bucket.TRAINED else bucket

    tokens: Counter[Bucket] = Counter()
    for bucket, count in decision.tokens.items():
        tokens[booked(bucket)] += count
    return replace(
        decision,
        bucket=Bucket.NONFINITE,
        advantage=None,
        token_weight=None,
        leaves=tuple(booked(bucket) for bucket in decision.leaves),
        tokens=dict(tokens),
    )


def _row(record: AttemptRecord, decision: Decision) -> AttemptRow:
    reward = None if record.verdict is None else record.verdict.reward
    if (record.outcome, record.group_id, reward) != (decision.outcome, decision.group_id, decision.reward):
        raise LedgerBroken(
            f"attempt {record.attempt_id}: recorded as {record.outcome} in {record.group_id} with reward {reward}, "
            f"decided as {decision.outcome} in {decision.group_id} with reward {decision.reward}"
        )
    leaves = record.stored.leaves if record.stored is not None else ()
    if len(leaves) != len(decision.leaves):
        raise LedgerBroken(
            f"attempt {record.attempt_id}: {len(leaves)} samples recorded, {len(decision.leaves)} decided"
        )
    trained = decision.tokens.get(Bucket.TRAINED, 0)
    reported = record.agent_metrics.get(AGENT_TOKENS)
    return AttemptRow(
        attempt_id=record.attempt_id,
        group_id=record.group_id,
        task_id=record.task_id,
        domain=record.domain or "none",
        try_index=record.try_index,
        outcome=record.outcome,
        exit_status=record.exit_status,
        bucket=decision.bucket,
        reward=reward,
        score=decision.score,
        advantage=decision.advantage,
        sampled_tokens=record.sampled_tokens,
        tokens=dict(decision.tokens),
        context=_context_tokens(leaves),
        forwards={name: count for name in FORWARD_COUNTS if (count := sum(getattr(leaf, name) for leaf in leaves))},
        agent_tokens=None if reported is None else int(reported),
        token_weight=decision.token_weight,
        loss_weight=trained * (decision.token_weight or 0.0),
        leaves=decision.leaves,
        truncated=record.outcome is Outcome.TRUNCATED or any(leaf.truncated for leaf in leaves),
        turns=sum(leaf.turns for leaf in leaves),
        seconds=max(record.finished_at - record.started_at, sum(record.phases_s.values())),
        versions=tuple(dict.fromkeys(version for leaf in leaves for version in leaf.versions)),
        trained_versions=_trained_versions(leaves, decision),
        phases_s=dict(record.phases_s),
    )


def _trained_versions(leaves: Sequence[LeafCounts], decision: Decision) -> dict[str, int]:
    found: Counter[str] = Counter()
    for leaf, bucket in zip(leaves, decision.leaves, strict=True):
        if bucket is Bucket.TRAINED and leaf.versions:
            found[min(leaf.versions, key=version_number)] += leaf.trainable
    return dict(found)


def _context_tokens(leaves: Sequence[LeafCounts]) -> dict[Bucket, int]:
    if not leaves:
        return {}
    prompt, observation = sum(leaf.prompt for leaf in leaves), sum(leaf.observation for leaf in leaves)
    return {Bucket.PROMPT: prompt, Bucket.OBSERVATION: observation}


def _row_from_wire(wire: Mapping[str, Any], unsaid: Mapping[str, None]) -> AttemptRow:
    fields = {**wire, **unsaid}
    odd = (fields.keys() ^ AttemptRow.__dataclass_fields__.keys()) | (wire.keys() & unsaid.keys())
    if odd:
        raise ValueError(f"a row lacks, or should not have, {', '.join(sorted(odd))}")
    fields["outcome"] = Outcome(fields["outcome"])
    fields["bucket"] = Bucket(fields["bucket"])
    fields["leaves"] = tuple(Bucket(leaf) for leaf in fields["leaves"])
    fields["versions"] = None if fields["versions"] is None else tuple(fields["versions"])
    fields["tokens"] = {Bucket(name): int(count) for name, count in fields["tokens"].items()}
    fields["context"] = {Bucket(name): int(count) for name, count in fields["context"].items()}
    if NOT_SAMPLED & fields["tokens"].keys():
        raise ValueError(f"attempt {fields['attempt_id']} counts unsampled tokens as sampled")
    return AttemptRow(**fields)
