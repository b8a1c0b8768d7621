"""What the push task, the trainer and the store say to each other about weights. Plain data: importable without torch.

The trainer's two push endpoints speak exactly these models as JSON:
`POST /push/checksums`  `ChecksumRequest` -> `ChecksumReply`; 409 when the trainer doesn't hold that version.
`POST /push/transfer`   `PushPlan` -> `TransferReport`; 409 as above. An engine that failed is a report with `ok=false`,
                        not an HTTP error.
The record of a push, `PushRecord`, is what the store keeps in `push.json`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from rl360.engines.fleet import EngineIdentity, EngineState
from rl360.errors import BadInput
from rl360.store.layout import check_run


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorSpec(_Message):
    """One tensor under its Hugging Face name, as it travels (dtype after the cast)."""

    name: str = Field(min_length=1)
    shape: tuple[int, ...]
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"

    @property
    def size_bytes(self) -> int:
        count = 1
        for dim in self.shape:
            count *= dim
        return count * (4 if self.dtype == "float32" else 2)


class Bucket(_Message):
    """Tensors that travel in one call, in this order, back to back."""

    tensors: tuple[TensorSpec, ...] = Field(min_length=1)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)


class EngineSet(_Message):
    """The receivers of one push, frozen. Rank in the group = position + 1; the trainer is rank 0."""

    epoch: int = Field(ge=1, description="fleet-wide, grows with every push that touches engines")
    engines: tuple[EngineIdentity, ...] = Field(min_length=1)


class PushPlan(_Message):
    """Everything the trainer needs to send one version to one frozen engine set; also the body of `/push/transfer`."""

    run: str
    version: str
    transport: Literal["broadcast"]
    engine_set: EngineSet
    group_name: str = Field(min_length=1, description="derived from the engine set: the same set, the same group")
    stale_groups: tuple[str, ...] = Field((), description="groups of unfinished earlier pushes, destroyed first")
    buckets: tuple[Bucket, ...] = Field(min_length=1)
    call_deadline_s: float = Field(gt=0, description="for each call to an engine and each broadcast")

    @property
    def total_bytes(self) -> int:
        return sum(bucket.size_bytes for bucket in self.buckets)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(tensor for bucket in self.buckets for tensor in bucket.tensors)

    @property
    def calls_per_engine(self) -> int:
        """Calls of one transfer on an existing group: open, one a bucket, close."""
        return len(self.buckets) + 2

    @property
    def deadline_s(self) -> float:
        """Upper bound of the whole transfer: every call at its deadline, plus destroying and making the group."""
        return self.call_deadline_s * (self.calls_per_engine + 3 + len(self.stale_groups))


class EngineTransfer(_Message):
    """What became of one engine in a transfer. `error` is empty when every call of it succeeded."""

    url: str
    calls: int = Field(ge=0)
    error: str = ""
    answered: bool = Field(description="False: a call got no answer (no connection, or past its deadline)")
    after_stop: bool = Field(False, description="it failed only after the transfer was stopped: likely a victim")


class TransferReport(_Message):
    """The trainer's account of one transfer. `ok` only when every engine took every bucket."""

    ok: bool
    engines: tuple[EngineTransfer, ...]
    sent_bytes: int = Field(ge=0, description="payload bytes broadcast once, whatever the number of receivers")
    seconds: float = Field(ge=0)
    group_name: str
    group_reused: bool
    error: str = Field("", description="why the transfer stopped, when ok is false")


class ChecksumRequest(_Message):
    run: str
    version: str


class ChecksumReply(_Message):
    """What the trainer holds as `version`: the tensors that travel and the checksums an engine must answer."""

    run: str
    version: str
    tensors: tuple[TensorSpec, ...]
    checksums: dict[str, str] = Field(description="engine's parameter name -> 16 hex digits")


class PushStatus(StrEnum):
    CONFIRMED = "confirmed"  # every engine of `engines` read back
    FAILED = "failed"  # no receiver is left half-written and serving; nothing is confirmed
    SUPERSEDED = "superseded"  # a later epoch took its receivers over


class EngineOutcome(_Message):
    """One engine at the end of a push."""

    identity: EngineIdentity
    state: EngineState
    calls: int = 0
    paused_s: float = 0.0
    reason: str = ""


class PushRecord(_Message):
    """A finished push, as stored. `path` names the transport that carried it."""

    schema_version: Literal[1] = 1
    run: str
    step: int | None = Field(description="step whose result was pushed; null when a step's first act pushed")
    version: str
    epoch: int
    status: PushStatus
    path: str
    engines: tuple[EngineOutcome, ...]
    absent: tuple[str, ...] = Field((), description="engine URLs that did not answer when the set was frozen")
    calls_per_engine: int = 0
    bytes: int = 0
    paused_s: float = Field(0.0, description="longest pause of a serving engine")
    rounds: int = Field(0, description="transfers it took; more than 1 after the set changed under the push")
    flushed: bool = True
    group_reused: bool = False
    phases_s: dict[str, float] = Field(default_factory=dict)
    checksum: str = Field("", description="digest over the confirmed per-tensor checksums")
    reason: str = ""

    @property
    def serving(self) -> tuple[EngineOutcome, ...]:
        return tuple(engine for engine in self.engines if engine.state is EngineState.SERVING)


def version_name(run: str, applied_steps: int) -> str:
    """`"{run}:{k}"`: the weights after k optimizer steps."""
    if applied_steps < 0:
        raise BadInput(f"weight version {applied_steps} of run {run}: a version counts applied steps, from 0")
    return f"{check_run(run)}:{applied_steps}"


def parse_version(version: str) -> tuple[str, int]:
    """Run and applied steps of a version name, else `BadInput`."""
    run, _, steps = version.rpartition(":")
    if not steps.isdecimal():
        raise BadInput(f"weight version {version!r}: expected '<run>:<applied steps>', e.g. 'demo:3'")
    return check_run(run), int(steps)


def loading_mark(version: str, epoch: int) -> str:
    """What an engine calls its weights while they are half written: equal to no version anyone accepts."""
    return f"{version}#loading-{epoch}"
