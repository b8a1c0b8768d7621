"""Which samples train, and where every sampled token goes. Pure functions of records: counts, no payload, no I/O.

Contract: each attempt gets exactly one `Decision`, each of its samples (leaves) exactly one reason (a `Bucket`), and
the decision's token counts sum to what the attempt sampled. Rules, first match wins:

    no score                                    infra
    a score but no merged sample                prefix_break        (its score still counts for the group)
    sampled under a version that may not        stale               (same)
    train, or with other parameters than
    the run's
    more tokens than `max_seq_len`              over_length         (same)
    replay of routing, and not a row of it      routing_misaligned  (same)
    for every token but the last
    fewer than two scores in the scope          insufficient_valid
    all rewards of the scope agree              zero_disagreement
    nothing sampled is left under the mask      the first bucket of what its session dropped
    otherwise                                   trained; what its session dropped (a cut, a rewritten history, a lost
                                                race, a refused reply): the bucket the session booked it in

The scope is what the baseline is a mean of: the group, or with the estimator `reinforce_pp` the step. With `gae` a
critic is the baseline, nobody is compared with anybody, and neither rule about scopes applies: every attempt with a
score trains, and the trainer gives its tokens their advantages.
The score is what advantages are computed from, kept beside the reward, which only a verifier writes: the reward, less
`format_error_penalty` for a pass with malformed tool calls; or 0 for a timeout without a verdict, in a run that scores
those (`rollout.unverified_timeout`). `_score` alone makes it. Rewards agree or not as the verifier wrote them, or as
scored with `filter_on: shaped`.
"Valid" means *has a score* (a verdict, unless timeouts are scored) and nothing else, so a baseline never depends on
what infra did to others, and an attempt counts in it once, however many leaves it has; each leaf trains with its
attempt's advantage and its weight in the loss.
Truncated attempts are valid and train up to the cut. Kept samples come out sorted by attempt id and leaf: the batch,
and with it every floating-point sum, is the same whatever order attempts arrived in and however many failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rl360.errors import BadInput, CorruptObject
from rl360.ledger.metrics import PASS_REWARD
from rl360.ledger.outcomes import HAS_VERDICT, Bucket, Outcome
from rl360.objective.advantages import CRITIC, attempt_advantages, group_index, scopes
from rl360.objective.reductions import token_weights

if TYPE_CHECKING:
    from rl360.config.run import ObjectiveConfig
    from rl360.sessions.sample import AttemptRecord, LeafCounts

BATCH_SCHEMA = 4
FORMAT_ERRORS = "format_errors"  # what an agent calls the tool calls it could not carry out


@dataclass(frozen=True)
class TrainRow:
    """One sample to train, by reference: leaf `leaf` of the object `key`. tokens: its length; trained: ids under its
    loss mask; weight: of each of them in the step's loss; advantage: of each of them, or with the estimator `gae` the
    attempt's score, which the critic makes advantages of. The trainer refuses an object that is not what its row says.
    """

    attempt_id: str
    group_id: str
    leaf: int
    key: str
    sha256: str
    tokens: int
    trained: int
    advantage: float
    weight: float


@dataclass(frozen=True)
class Decision:
    """What became of one attempt. `leaves`: the reason of each of its samples, `bucket` that of the attempt: trained
    when one of them is, else the first one's. `tokens`: sampled tokens by bucket, summing to what it sampled.
    `reward`: the verifier's, None without a verdict. `score`: what its advantage is computed from, None for infra.
    `advantage`: None when nothing of it trains, and with the estimator `gae`, where each token has its own.
    `token_weight`: of each of its trained tokens in the step's loss, None when it trains none."""

    attempt_id: str
    group_id: str
    outcome: Outcome
    bucket: Bucket
    reward: float | None
    score: float | None
    advantage: float | None
    leaves: tuple[Bucket, ...] = ()
    tokens: dict[Bucket, int] = field(default_factory=dict)
    token_weight: float | None = None

    @property
    def trains(self) -> bool:
        return self.bucket is Bucket.TRAINED

    @property
    def trained_leaves(self) -> tuple[int, ...]:
        return tuple(index for index, bucket in enumerate(self.leaves) if bucket is Bucket.TRAINED)

    def to_wire(self) -> dict[str, Any]:
        """A msgpack-ready dict: outcome and buckets are text."""
        return dict(vars(self))

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Decision:
        if odd := wire.keys() ^ cls.__dataclass_fields__.keys():
            raise ValueError(f"decision of {wire.get('attempt_id')!r} lacks or misspells {', '.join(sorted(odd))}")
        found = cls(**wire)
        return replace(
            found,
            outcome=Outcome(found.outcome),
            bucket=Bucket(found.bucket),
            leaves=tuple(map(Bucket, found.leaves)),
            tokens={Bucket(name): count for name, count in found.tokens.items()},
        )


def read_decisions(batch: Any, key: str) -> list[Decision]:
    """Those of a train batch, the object `key`. Raises `CorruptObject`."""
    try:
        if batch["schema_version"] != BATCH_SCHEMA:
            raise ValueError(f"batch schema {batch['schema_version']!r} is unknown; {BATCH_SCHEMA} is read here")
        return [Decision.from_wire(wire) for wire in batch["decisions"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptObject(key, f"has no decisions to read ({error})") from None


@dataclass(frozen=True)
class FilterResult:
    """Decisions sorted by attempt id, and the samples to train in the same order."""

    decisions: tuple[Decision, ...]
    kept: tuple[TrainRow, ...]
    tokens: dict[Bucket, int]

    @property
    def trained_tokens(self) -> int:
        return self.tokens.get(Bucket.TRAINED, 0)

    def to_wire(self, run: str, step: int) -> dict[str, Any]:
        """The train batch object (`filter.msgpack`): kept samples by reference with advantages, and every decision."""
        return {
            "schema_version": BATCH_SCHEMA,
            "run": run,
            "step": step,
            "samples": [asdict(row) for row in self.kept],
            "decisions": [decision.to_wire() for decision in self.decisions],
        }


def filter_groups(
    attempts: Sequence[AttemptRecord],
    config: ObjectiveConfig,
    *,
    expected_version: str,
    max_seq_len: int,
    loss_constant: float | None = None,
    routing_replay: bool = False,
    kept_versions: int = 0,
    score_timeouts: bool = False,
) -> FilterResult:
    """Decide about every attempt of a step.

    expected_version: the weight version this step samples from; a sample with ids of another one is stale, but for the
    `kept_versions` before it, of which the trainer keeps the actors.
    loss_constant: divisor of the reduction `constant`, which the other reductions have no use for.
    routing_replay: the trainer replays routed experts, so a sample without them cannot train.
    score_timeouts: an agent_timeout without a verdict is scored 0 instead of being infrastructure.
    Refuses (BadInput) duplicated attempt ids, missing group ids, and records that contradict themselves.
    """
    ordered = sorted(attempts, key=lambda attempt: attempt.attempt_id)
    _refuse_malformed(ordered)
    score_of = {a.attempt_id: s for a in ordered if (s := _score(a, config.format_error_penalty, score_timeouts))}
    names = list(score_of)
    group_ids = [attempt.group_id for attempt in ordered if attempt.attempt_id in score_of]
    raw, shaped = np.array([*score_of.values()], dtype=np.float64).reshape(-1, 2).T.copy()
    scope_of = dict(zip(names, scopes(config.estimator, group_ids), strict=True))
    advantage_of: dict[str, float] = {}
    reasons: dict[str, Bucket] = {}
    if config.estimator != CRITIC:
        advantages = attempt_advantages(
            shaped, group_ids, names, estimator=config.estimator, normalize_std=config.normalize_std
        )
        advantage_of = {name: float(value) for name, value in zip(names, advantages, strict=True)}
        compared = raw if config.filter_on == "raw" else shaped
        reasons = _scope_reasons(compared, list(scope_of.values()), config.disagreement_rtol)

    versions = trainable_versions(expected_version, kept_versions)
    decisions: list[Decision] = []
    totals: Counter[Bucket] = Counter()
    for attempt in ordered:
        name = attempt.attempt_id
        score = score_of[name][1] if name in score_of else None
        reason = Bucket.INFRA if score is None else reasons.get(scope_of[name])
        own = [_leaf_reason(leaf, versions, max_seq_len, routing_replay) for leaf in _leaves(attempt)]
        decisions.append(_decide(attempt, reason, score, advantage_of.get(name), own))
        totals.update(decisions[-1].tokens)
    weights = token_weights(
        config.reduction, [decision.tokens.get(Bucket.TRAINED, 0) for decision in decisions], loss_constant
    )
    decisions = [
        replace(decision, token_weight=float(weight)) if decision.trains else decision
        for decision, weight in zip(decisions, weights, strict=True)
    ]
    kept = [row for attempt, decision in zip(ordered, decisions, strict=True) for row in _rows(attempt, decision)]
    return FilterResult(tuple(decisions), tuple(kept), dict(totals))


def _score(attempt: AttemptRecord, penalty: float, score_timeouts: bool) -> tuple[float, float] | None:
    """(raw, shaped) reward of an attempt as advantages see it, None of one that infrastructure lost. A timeout that is
    scored has no reward: its two zeros are the run's policy, not a verdict."""
    if attempt.verdict is None:
        return (0.0, 0.0) if score_timeouts and attempt.outcome is Outcome.AGENT_TIMEOUT else None
    reward = attempt.verdict.reward
    if not penalty or reward < PASS_REWARD:
        return reward, reward
    errors = attempt.agent_metrics.get(FORMAT_ERRORS)
    if errors is None:
        raise BadInput(
            f"attempt {attempt.attempt_id}: its agent reports no {FORMAT_ERRORS}, which objective.format_error_penalty "
            "needs; use an agent that counts them, or a run without the penalty"
        )
    return reward, reward - penalty if errors > 0 else reward


def _decide(
    attempt: AttemptRecord,
    reason: Bucket | None,
    score: float | None,
    advantage: float | None,
    leaf_reasons: Sequence[Bucket | None],
) -> Decision:
    """The decision about one attempt; `reason` is why nothing of it trains, or None; `leaf_reasons` of each sample."""
    leaves: list[Bucket] = []
    tokens: Counter[Bucket] = Counter()
    for leaf, own in zip(_leaves(attempt), leaf_reasons, strict=True):
        bucket, counts = _place_tokens(leaf, reason if reason is Bucket.INFRA else own or reason)
        leaves.append(bucket)
        tokens.update(counts)
    unmerged = reason if reason is Bucket.INFRA else Bucket.PREFIX_BREAK
    if attempt.unmerged_tokens:
        tokens[unmerged] += attempt.unmerged_tokens
    bucket = Bucket.TRAINED if Bucket.TRAINED in leaves else next(iter(leaves), unmerged)
    return Decision(
        attempt_id=attempt.attempt_id,
        group_id=attempt.group_id,
        outcome=attempt.outcome,
        bucket=bucket,
        reward=None if attempt.verdict is None else attempt.verdict.reward,
        score=score,
        advantage=advantage if bucket is Bucket.TRAINED else None,
        leaves=tuple(leaves),
        tokens=dict(tokens),
    )


def _rows(attempt: AttemptRecord, decision: Decision) -> list[TrainRow]:
    stored, weight = attempt.stored, decision.token_weight
    advantage = decision.score if decision.advantage is None else decision.advantage
    if stored is None or advantage is None or weight is None:
        return []
    return [
        TrainRow(
            attempt_id=attempt.attempt_id,
            group_id=attempt.group_id,
            leaf=index,
            key=stored.key,
            sha256=stored.sha256,
            tokens=stored.leaves[index].tokens,
            trained=stored.leaves[index].trainable,
            advantage=advantage,
            weight=weight,
        )
        for index in decision.trained_leaves
    ]


def agrees(rewards: np.ndarray, rtol: float) -> bool:
    """True when rewards `[attempts]` differ by no more than `rtol` times the largest magnitude among them."""
    return bool(rewards.max() - rewards.min() <= rtol * np.abs(rewards).max())


def _scope_reasons(rewards: np.ndarray, scope_ids: Sequence[str], rtol: float) -> dict[str, Bucket]:
    """Why a whole scope does not train, for those that do not; every one here has at least one score."""
    reasons: dict[str, Bucket] = {}
    names, index = group_index(scope_ids)
    for position, name in enumerate(names):
        members = rewards[index == position]
        if len(members) < 2:
            reasons[name] = Bucket.INSUFFICIENT_VALID
        elif agrees(members, rtol):
            reasons[name] = Bucket.ZERO_DISAGREEMENT
    return reasons


def _leaves(attempt: AttemptRecord) -> tuple[LeafCounts, ...]:
    return attempt.stored.leaves if attempt.stored is not None else ()


def trainable_versions(version: str, kept: int) -> tuple[str, ...]:
    """The weight versions whose samples may train in a step at `version`: it, and the `kept` before it."""
    if not kept:
        return (version,)
    run, _, number = version.rpartition(":")
    return tuple(f"{run}:{each}" for each in range(max(0, int(number) - kept), int(number) + 1))


def _leaf_reason(leaf: LeafCounts, versions: Sequence[str], max_seq_len: int, routing_replay: bool) -> Bucket | None:
    """Why this sample cannot train whatever its group does, or None."""
    if leaf.sampling_differs or any(version not in versions for version in leaf.versions):
        return Bucket.STALE
    if leaf.tokens > max_seq_len:
        return Bucket.OVER_LENGTH
    return Bucket.ROUTING_MISALIGNED if routing_replay and leaf.routing_rows != leaf.tokens - 1 else None


def _place_tokens(leaf: LeafCounts, reason: Bucket | None) -> tuple[Bucket, dict[Bucket, int]]:
    """The sample's final bucket and its sampled tokens by bucket (zero counts left out)."""
    dropped = {Bucket(name): count for name, count in leaf.dropped.items()}
    tokens = {reason: leaf.sampled_tokens} if reason else {Bucket.TRAINED: leaf.trainable, **dropped}
    left = {bucket: count for bucket, count in tokens.items() if count}
    return reason or next(iter(left), Bucket.PREFIX_BREAK), left


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
        for index, leaf in enumerate(_leaves(attempt)):
            dropped = sum(leaf.dropped.values())
            if leaf.trainable + dropped != leaf.sampled_tokens:
                raise BadInput(
                    f"attempt {name} leaf {index}: {leaf.trainable} tokens under the loss mask + {dropped} dropped != "
                    f"{leaf.sampled_tokens} sampled; the sample is broken"
                )
