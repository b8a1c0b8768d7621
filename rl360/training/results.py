"""What a step of training consumes and leaves: the batch object, the samples it refers to and the recorded result.
Needs no torch.

A batch is rows of references; whoever trains a row reads its object and refuses it, naming it, unless bytes, counts and
ids are what the row and the model say.

The result is written once, by conditional put, under the step's `train.json`: its existence is the commit of the step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from pydantic import Field

from rl360.errors import BadInput, CorruptObject
from rl360.objective.filters import BATCH_SCHEMA, TrainRow
from rl360.sessions.routing import RoutingShape
from rl360.sessions.sample import MergedSample, decode_samples
from rl360.store.codec import sha256_hex, unpack
from rl360.store.data import Data, commit, read
from rl360.store.layout import step_key
from rl360.store.object_store import ObjectStore
from rl360.training.packing import TrainSequence

RESULT_NAME = "train.json"
_READERS = 8


class StepStatus(StrEnum):
    TRAINED = "trained"
    EMPTY = "empty"  # no token to train on: no optimizer step
    NONFINITE = "nonfinite"  # loss or gradient was not finite: refused, no optimizer step


class Witnessed(Data):
    """What the witness saw (rl360.training.megatron.witness): samples and positions with a gradient."""

    samples: int
    tokens: int
    digest: str = Field(description="of the samples' names: rl360.ledger.checks.samples_digest")
    cannot_tell: int = Field(description="samples with fewer positions than booked, which clips or masks may explain")
    excused: tuple[int, ...] | None = Field(
        None, description="of those, rows of the batch that have no gradient, or one with an advantage of 0"
    )  # null: written before it was told


class TrainResult(Data):
    """The outcome of a step. Means are over trained tokens and null when nothing trained, never 0."""

    schema_version: Literal[1] = 1
    run: str
    step: int = Field(ge=0)
    status: StepStatus
    version_after: int = Field(ge=0, description="optimizer steps applied to the weights after this step")
    loss: float | None = None
    grad_norm: float | None = None
    trained_samples: int = 0
    trained_tokens: int = 0
    loss_weight_sum: float = Field(
        0.0, description="sum of the token weights the loss used: 1 for a mean, 0 when nothing trained"
    )
    clip_fraction: float | None = None
    tis_mean: float | None = None
    masked_fraction: float | None = None
    mean_abs_dlogp: float | None = None
    entropy: float | None = None
    kl_mean: float | None = Field(None, description="of the KL's estimate to the reference; null without one")
    actors_used: tuple[int, ...] = Field((), description="earlier versions whose kept actors gave old log-probs")
    witness: Witnessed | None = Field(None, description="with trainer.witness: which samples had a gradient")
    value_loss: float | None = Field(None, description="the critic's, over trained tokens; null without a critic")
    explained_variance: float | None = Field(None, description="of the returns by the critic's values before the step")
    value_clip_fraction: float | None = None
    critic_grad_norm: float | None = Field(None, description="of the critic's first update, before clipping")
    weights_digest: str
    critic_digest: str | None = Field(None, description="of the critic's weights after this step")
    seconds: float
    batch_key: str
    batch_digest: str
    layout: str = Field(description="processes and threads that computed it: another layout rounds differently")
    incarnation: str

    @property
    def left(self) -> tuple[str, str | None]:
        """The weights that the step ended in, policy's and critic's."""
        return self.weights_digest, self.critic_digest


def read_result(store: ObjectStore, run: str, step: int) -> TrainResult | None:
    """The recorded result of a step, or None."""
    return read(store, step_key(run, step, RESULT_NAME), TrainResult, "is no train result")


def commit_result(store: ObjectStore, result: TrainResult) -> TrainResult:
    """Record the result; of two writers the first wins and both get the winner."""
    key = step_key(result.run, result.step, RESULT_NAME)
    data = result.model_dump_json(indent=1).encode()
    return commit(store, key, result, data, lambda: read_result(store, result.run, result.step))


@dataclass(frozen=True)
class Batch:
    """A step's rows, checked; the samples themselves are not read yet."""

    rows: tuple[TrainRow, ...]
    scored: dict[str, tuple[str, float]] = field(default_factory=dict)  # group and score, of every attempt with a score

    @property
    def trained_tokens(self) -> int:
        return sum(row.trained for row in self.rows)

    @property
    def trained_samples(self) -> int:
        return sum(row.trained > 0 for row in self.rows)


def parse_batch(data: bytes, key: str, digest: str, run: str, step: int) -> Batch:
    """The batch in `data`, refused when anything about it is not what the step asked for."""
    if sha256_hex(data) != digest:
        raise CorruptObject(key, f"has sha256 {sha256_hex(data)[:16]}, the step asked for {digest[:16]}")
    wire = unpack(data, key)
    if not isinstance(wire, dict) or wire.get("schema_version") != BATCH_SCHEMA:
        found = wire.get("schema_version") if isinstance(wire, dict) else type(wire).__name__
        raise CorruptObject(key, f"batch schema {found!r} is unknown; this trainer reads {BATCH_SCHEMA}")
    if (wire.get("run"), wire.get("step")) != (run, step):
        raise CorruptObject(key, f"is the batch of {wire.get('run')}/{wire.get('step')}, not of {run}/{step}")
    if not isinstance(wire.get("samples"), list):
        raise CorruptObject(key, "has no list of samples")
    rows = tuple(_row(row, index, key) for index, row in enumerate(wire["samples"]))
    seen: set[tuple[str, int]] = set()
    for row in rows:
        if (row.attempt_id, row.leaf) in seen:
            raise CorruptObject(key, f"sample {_name(row)} appears twice; a sample is trained at most once")
        seen.add((row.attempt_id, row.leaf))
    decisions = wire.get("decisions")
    if not isinstance(decisions, list) or not all(isinstance(each, dict) for each in decisions):
        raise CorruptObject(key, "has no list of decisions")
    scored = {str(each.get("attempt_id")): (str(each.get("group_id")), each.get("score")) for each in decisions}
    known = {name: (group, s) for name, (group, s) in scored.items() if isinstance(s, float) and math.isfinite(s)}
    for row in rows:
        if row.attempt_id in known and known[row.attempt_id][0] != row.group_id:
            raise CorruptObject(key, f"sample {_name(row)} is of {row.group_id}, decided in {known[row.attempt_id][0]}")
    return Batch(rows, known)


def _row(wire: Any, index: int, key: str) -> TrainRow:
    if not isinstance(wire, dict) or not isinstance(wire.get("attempt_id"), str):
        raise CorruptObject(key, f"sample {index} has no attempt_id")
    try:
        row = TrainRow(**wire)
    except TypeError as error:
        raise CorruptObject(key, f"sample {wire['attempt_id']} is no row of a batch ({error})") from None
    for each in fields(TrainRow):
        value = getattr(row, each.name)
        if type(value).__name__ != each.type:
            raise CorruptObject(key, f"sample {row.attempt_id}: {each.name} {value!r} is not of type {each.type}")
    if row.leaf < 0 or row.trained < 0 or row.tokens < 2:
        raise CorruptObject(key, f"sample {_name(row)}: {row.tokens} tokens, {row.trained} of them to train")
    if not math.isfinite(row.advantage):
        raise CorruptObject(key, f"sample {row.attempt_id}: advantage {row.advantage!r} is not a finite number")
    if not 0 < row.weight < math.inf:
        raise CorruptObject(key, f"sample {row.attempt_id}: weight {row.weight!r} is not a finite number above 0")
    return row


def _name(row: TrainRow) -> str:
    return f"{row.attempt_id} leaf {row.leaf}"


def read_samples(
    store: ObjectStore,
    rows: Sequence[TrainRow],
    vocab: int,
    replay: RoutingShape | None = None,
    versions: Sequence[str] = (),
) -> list[TrainSequence]:
    """The samples of `rows`, in their order. Each object is read once; one that is not what its rows say is refused.

    replay: routing of this shape is read too, and a sample without it refused; None leaves routing aside.
    versions: the version of each token is read too, and must be one of these; () leaves them aside.
    """
    wanted: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        wanted[row.key, row.sha256].append(index)

    def read(where: tuple[str, str]) -> list[tuple[int, TrainSequence]]:
        key, digest = where
        data = store.get_required(key)
        if sha256_hex(data) != digest:
            raise CorruptObject(key, f"has sha256 {sha256_hex(data)[:16]}, the batch asks for {digest[:16]}")
        samples = decode_samples(data, key)
        return [(index, _sequence(samples, rows[index], vocab, replay, versions)) for index in wanted[where]]

    with ThreadPoolExecutor(_READERS, thread_name_prefix="samples") as readers:
        found = dict(pair for pairs in readers.map(read, wanted) for pair in pairs)
    return [found[index] for index in range(len(rows))]


def _sequence(
    samples: Sequence[MergedSample], row: TrainRow, vocab: int, replay: RoutingShape | None, versions: Sequence[str]
) -> TrainSequence:
    """What the trainer needs of the row's sample, copied: views would keep the whole object, all its leaves."""
    if row.leaf >= len(samples):
        raise CorruptObject(row.key, f"holds {len(samples)} samples, the batch asks for leaf {row.leaf}")
    sample, name = samples[row.leaf], _name(row)
    tokens, mask = sample.tokens.copy(), sample.loss_mask.copy()
    held = (sample.attempt_id, sample.group_id, sample.leaf, len(tokens), int(mask.sum()))
    said = (row.attempt_id, row.group_id, row.leaf, row.tokens, row.trained)
    if held != said:
        raise CorruptObject(
            row.key, f"sample {name} (attempt, group, leaf, tokens, trained) is {held}, the batch says {said}"
        )
    if tokens.size and (tokens.min() < 0 or tokens.max() >= vocab):
        worst = int(tokens.min() if tokens.min() < 0 else tokens.max())
        raise CorruptObject(row.key, f"sample {name}: token id {worst} is outside the vocabulary of {vocab}")
    try:
        routing = None if replay is None else _routing(sample, replay, name)
        sampled_by = _versions(sample, versions, name) if versions else None
        logprobs = sample.logprobs.copy()
        return TrainSequence(tokens, mask, logprobs, row.advantage, name, routing=routing, versions=sampled_by)
    except BadInput as error:
        raise CorruptObject(row.key, str(error)) from None


def _versions(sample: MergedSample, allowed: Sequence[str], name: str) -> np.ndarray:
    """The number of the version that sampled each token, int32 [T], -1 where none did."""
    found = np.full(len(sample.tokens), -1, np.int32)
    for start, end, version in sample.version_spans:
        if version not in allowed:
            raise BadInput(
                f"sample {name} holds tokens of version {version}; with trainer.kept_versions this step trains those "
                f"of {', '.join(allowed)}"
            )
        found[start:end] = int(version.rpartition(":")[2])
    return found


def _routing(sample: MergedSample, shape: RoutingShape, name: str) -> np.ndarray:
    """The sample's routed experts, copied, when the trainer's model can replay them."""
    rows, wanted = sample.routing, (len(sample.tokens) - 1, shape.layers, shape.top_k)
    if rows is None:
        raise BadInput(f"sample {name} has no routed experts, trainer.routing_replay needs them")
    if rows.shape != wanted:
        raise BadInput(f"sample {name}: routed experts are {rows.shape}, the model replays {wanted}")
    if int(rows.max()) >= shape.experts:
        raise BadInput(f"sample {name}: routed experts name expert {rows.max()}, the model has {shape.experts}")
    ordered = np.sort(rows, axis=-1)
    twice = np.argwhere(ordered[..., 1:] == ordered[..., :-1])
    if len(twice):
        position, layer, _ = twice[0].tolist()
        raise BadInput(
            f"sample {name}: position {position}, layer {layer} names an expert twice: {rows[position, layer]}"
        )
    return rows.astype(shape.dtype)
