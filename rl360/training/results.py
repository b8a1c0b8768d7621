"""What a step of training consumes and leaves: the batch object and the recorded result. Needs no torch.

The result is written once, by conditional put, under the step's `train.json`: its existence is the commit of the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rl360.errors import BadInput, CorruptObject
from rl360.store.codec import sha256_hex, unpack
from rl360.store.layout import step_key
from rl360.store.object_store import ObjectStore
from rl360.training.packing import TrainSequence

BATCH_SCHEMA = 1
RESULT_NAME = "train.json"


class StepStatus(StrEnum):
    TRAINED = "trained"
    EMPTY = "empty"  # no token to train on: no optimizer step
    NONFINITE = "nonfinite"  # loss or gradient was not finite: refused, no optimizer step


class TrainResult(BaseModel):
    """The outcome of a step. Means are over trained tokens and null when nothing trained, never 0."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    run: str
    step: int = Field(ge=0)
    status: StepStatus
    version_after: int = Field(ge=0, description="optimizer steps applied to the weights after this step")
    loss: float | None = None
    grad_norm: float | None = None
    trained_samples: int = 0
    trained_tokens: int = 0
    loss_weight_sum: float = Field(0.0, description="sum of the token weights the loss used: 1 when trained, else 0")
    clip_fraction: float | None = None
    tis_mean: float | None = None
    mean_abs_dlogp: float | None = None
    entropy: float | None = None
    weights_digest: str
    seconds: float
    batch_key: str
    batch_digest: str
    layout: str = Field(description="processes and threads that computed it: another layout rounds differently")
    incarnation: str


def read_result(store: ObjectStore, run: str, step: int) -> TrainResult | None:
    """The recorded result of a step, or None."""
    key = step_key(run, step, RESULT_NAME)
    try:
        data = store.get(key)
    except KeyError:
        return None
    try:
        return TrainResult.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise CorruptObject(key, f"is no train result: {first['loc']}: {first['msg']}") from None


def commit_result(store: ObjectStore, result: TrainResult) -> TrainResult:
    """Record the result; of two writers the first wins and both get the winner."""
    key = step_key(result.run, result.step, RESULT_NAME)
    if store.put_once(key, result.model_dump_json(indent=1).encode()):
        return result
    found = read_result(store, result.run, result.step)
    if found is None:
        raise CorruptObject(key, "was refused as existing and then was not there")
    return found


@dataclass(frozen=True)
class Batch:
    """A step's samples, checked."""

    samples: tuple[TrainSequence, ...]

    @property
    def trained_tokens(self) -> int:
        return sum(int(s.loss_mask.sum()) for s in self.samples)

    @property
    def trained_samples(self) -> int:
        return sum(bool(s.loss_mask.any()) for s in self.samples)


def _array(row: dict[str, Any], name: str, dtype: type, key: str, sample: str) -> np.ndarray:
    value = row.get(name)
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype != np.dtype(dtype):
        raise CorruptObject(key, f"sample {sample}: {name} is not a one-dimensional {np.dtype(dtype)} array")
    return value


def parse_batch(data: bytes, key: str, digest: str, run: str, step: int, vocab: int) -> Batch:
    """The batch in `data`, refused when anything about it is not what the step asked for."""
    if sha256_hex(data) != digest:
        raise CorruptObject(key, f"has sha256 {sha256_hex(data)[:16]}, the step asked for {digest[:16]}")
    wire = unpack(data, key)
    if not isinstance(wire, dict) or wire.get("schema_version") != BATCH_SCHEMA:
        found = wire.get("schema_version") if isinstance(wire, dict) else type(wire).__name__
        raise CorruptObject(key, f"batch schema {found!r} is unknown; this trainer reads {BATCH_SCHEMA}")
    if (wire.get("run"), wire.get("step")) != (run, step):
        raise CorruptObject(key, f"is the batch of {wire.get('run')}/{wire.get('step')}, not of {run}/{step}")
    rows = wire.get("samples")
    if not isinstance(rows, list):
        raise CorruptObject(key, "has no list of samples")
    samples: list[TrainSequence] = []
    seen: set[str] = set()
    for index, row in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(row.get("attempt_id"), str):
            raise CorruptObject(key, f"sample {index} has no attempt_id")
        name = row["attempt_id"]
        if name in seen:
            raise CorruptObject(key, f"sample {name} appears twice; a sample is trained at most once")
        seen.add(name)
        tokens = _array(row, "tokens", np.int32, key, name)
        mask = _array(row, "loss_mask", np.uint8, key, name)
        advantage = row.get("advantage")
        if not isinstance(advantage, float) or not math.isfinite(advantage):
            raise CorruptObject(key, f"sample {name}: advantage {advantage!r} is not a finite number")
        if tokens.size and (tokens.min() < 0 or tokens.max() >= vocab):
            worst = int(tokens.min() if tokens.min() < 0 else tokens.max())
            raise CorruptObject(key, f"sample {name}: token id {worst} is outside the vocabulary of {vocab}")
        if mask.size and mask.max() > 1:
            raise CorruptObject(key, f"sample {name}: loss_mask holds {int(mask.max())}; only 0 and 1 are allowed")
        try:
            samples.append(TrainSequence(tokens, mask, _array(row, "logprobs", np.float32, key, name), advantage, name))
        except BadInput as error:
            raise CorruptObject(key, str(error)) from None
    return Batch(tuple(samples))
