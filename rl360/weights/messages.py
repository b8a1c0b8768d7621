"""What the push task, the trainer and the store say to each other about weights. Plain data: importable without torch.

The trainer's two push endpoints speak exactly these models as JSON:
`POST /push/checksums`  `ChecksumRequest` -> `ChecksumReply`; 409 when the trainer doesn't hold that version.
`POST /push/transfer`   `PushPlan` -> `TransferReport`; 409 as above. An engine that failed is a report with `ok=false`,
                        not an HTTP error.
The record of a push, `PushRecord`, is what the store keeps in `push.json`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal

from pydantic import Field, field_serializer, field_validator, model_validator

from rl360.engines.fleet import EngineIdentity, EngineState
from rl360.errors import BadInput
from rl360.store.data import Data
from rl360.store.layout import check_run


class Transport(StrEnum):
    """How the tensors of a push reach the engines."""

    BROADCAST = "broadcast"  # every tensor to every engine, bucket by bucket, in one group
    DIRECT_EXPERTS = "direct_experts"  # routed experts straight to the ranks that own them, the rest as broadcast
    P2P = "p2p"  # each engine rank gets what it needs, from one of several senders
    DISK_DELTA = "disk_delta"  # files of what changed since a version that the engines hold
    DISK_FULL = "disk_full"  # files of every tensor
    COLOCATED = "colocated"  # trainer and engine share the device or host: handed over in place

    @property
    def on_disk(self) -> bool:
        return self in (Transport.DISK_DELTA, Transport.DISK_FULL)


class TensorSpec(Data):
    """One tensor under its Hugging Face name, as it travels (dtype after the cast)."""

    name: str = Field(min_length=1)
    shape: tuple[int, ...]
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    part: tuple[int, int, int] | None = Field(
        None, description="only this piece travels: axis, first row of it, number of rows; null: the whole tensor"
    )

    @model_validator(mode="after")
    def _part_is_inside(self) -> TensorSpec:
        if self.part is not None:
            axis, first, rows = self.part
            if not 0 <= axis < len(self.shape) or first < 0 or rows < 1 or first + rows > self.shape[axis]:
                raise ValueError(f"{self.name}: part {self.part} (axis, first, rows) is not inside shape {self.shape}")
        return self

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """Shape of what travels."""
        if self.part is None:
            return self.shape
        axis, _, rows = self.part
        return (*self.shape[:axis], rows, *self.shape[axis + 1 :])

    @property
    def size_bytes(self) -> int:
        return math.prod(self.sent_shape) * (4 if self.dtype == "float32" else 2)


class Bucket(Data):
    """Tensors that travel in one call, in this order, back to back."""

    tensors: tuple[TensorSpec, ...] = Field(min_length=1)

    @cached_property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)


class EngineSet(Data):
    """The receivers of one push, frozen. Rank in the group = position + 1; the trainer is rank 0."""

    epoch: int = Field(ge=1, description="fleet-wide, grows with every push that touches engines")
    engines: tuple[EngineIdentity, ...] = Field(min_length=1)


class EngineLayout(Data):
    """How every engine spreads the model over its ranks, as SGLang does with attention data parallelism off."""

    tp: int = Field(1, ge=1, description="tensor-parallel ranks of an engine")
    ep: int = Field(
        1, ge=1, description="expert-parallel groups; each owns one contiguous block of every layer's experts"
    )
    kv_heads: int | None = Field(None, ge=1, description="of the model; needed to cut k_proj and v_proj when tp > 1")

    @model_validator(mode="after")
    def _divides(self) -> EngineLayout:
        if self.tp % self.ep:
            raise ValueError(f"ep {self.ep} does not divide tp {self.tp}: SGLang places ep groups inside the tp ranks")
        return self

    @property
    def moe_tp(self) -> int:
        """Ranks that share an expert, each with a slice of it."""
        return self.tp // self.ep


class Delivery(Data):
    """What one sender brings to one rank of one engine, bucket by bucket. The n-th buckets of all ranks of an engine
    are one call to it."""

    engine: int = Field(ge=0, description="index in the plan's engine set")
    rank: int = Field(0, ge=0, description="the engine's own tensor/expert-parallel rank")
    source: int = Field(0, ge=0, description="trainer rank that sends")
    group_name: str = Field("", description="two-member group of this sender and this engine rank; empty: none needed")
    buckets: tuple[Bucket, ...] = Field(min_length=1)


class PushPlan(Data):
    """Everything the trainer needs to send one version to one frozen engine set; also the body of `/push/transfer`."""

    run: str
    version: str
    transport: Transport
    engine_set: EngineSet
    group_name: str = Field(min_length=1, description="derived from the engine set: the same set, the same group")
    stale_groups: tuple[str, ...] = Field((), description="groups of unfinished earlier pushes, destroyed first")
    buckets: tuple[Bucket, ...] = Field((), description="what every engine gets alike: broadcast, or a file each")
    call_deadline_s: float = Field(gt=0, description="for each call to an engine and each broadcast")
    layout: EngineLayout = EngineLayout()
    sources: int = Field(1, ge=1, description="trainer ranks that can send")
    deliveries: tuple[Delivery, ...] = Field((), description="point to point; none for broadcast and files")
    base_version: str | None = Field(None, description="disk_delta: the version that the engines' files must hold")
    folder: str | None = Field(None, description="disk_*: absolute folder or s3:// prefix of this version's files")

    @field_serializer("deliveries")
    def _each_parcel_once(self, deliveries: tuple[Delivery, ...]) -> list[dict[str, Any]]:
        """Engines of one layout get the same buckets: written in full once, then as the index of that delivery."""
        first: dict[tuple[int, ...], int] = {}
        written = []
        for number, delivery in enumerate(deliveries):
            same = first.setdefault(tuple(map(id, delivery.buckets)), number)
            message = delivery.model_dump(mode="json", exclude={"buckets"} if same < number else None)
            written.append(message | {"buckets": same} if same < number else message)
        return written

    @field_validator("deliveries", mode="before")
    @classmethod
    def _find_parcels(cls, value: Any) -> Any:
        """Undo `_each_parcel_once`."""
        found: list[Any] = []
        for item in value if isinstance(value, (list, tuple)) else ():
            if isinstance(item, dict):
                same = item.get("buckets")
                if isinstance(same, int):
                    if not 0 <= same < len(found):
                        raise ValueError(
                            f"delivery {len(found)} repeats the buckets of delivery {same}: none before it"
                        )
                    item = item | {"buckets": found[same].buckets}
                item = Delivery.model_validate(item)
            found.append(item)
        return found or value

    @model_validator(mode="after")
    def _fits(self) -> PushPlan:
        """A plan sends something, to engines and from sources that it has."""
        if not self.buckets and not self.deliveries:
            raise ValueError("a plan without buckets and deliveries sends nothing")
        for delivery in self.deliveries:
            engines = len(self.engine_set.engines)
            if delivery.engine >= engines or delivery.rank >= self.layout.tp or delivery.source >= self.sources:
                raise ValueError(
                    f"delivery from source {delivery.source} to rank {delivery.rank} of engine {delivery.engine}: "
                    f"the plan has {self.sources} sources, and {engines} engines of {self.layout.tp} ranks"
                )
        return self

    def _sent(self) -> Iterator[Bucket]:
        """A broadcast bucket once, a delivery's each time."""
        yield from self.buckets
        for delivery in self.deliveries:
            yield from delivery.buckets

    def _parcels(self) -> Iterable[Bucket]:
        """Every bucket once, whoever gets it."""
        return {id(bucket): bucket for bucket in self._sent()}.values()

    @property
    def total_bytes(self) -> int:
        """Payload that leaves the trainer: a broadcast bucket counts once, a delivery each time."""
        return sum(bucket.size_bytes for bucket in self._sent())

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """What travels, each once: of a tensor that travels in parts, each different part."""
        return tuple(dict.fromkeys(tensor for bucket in self._parcels() for tensor in bucket.tensors))

    @property
    def groups(self) -> tuple[str, ...]:
        """Process groups that this plan needs, each once: that of all engines, then those of the deliveries."""
        shared = [self.group_name] if self.buckets and self.folder is None else []
        return tuple(dict.fromkeys([*shared, *(d.group_name for d in self.deliveries if d.group_name)]))

    def groups_of(self, engine: int) -> set[str]:
        """Those of them that this engine joins, by its index in the set."""
        mine = {d.group_name for d in self.deliveries if d.engine == engine and d.group_name}
        return mine | ({self.group_name} & set(self.groups))

    @property
    def calls_per_engine(self) -> int:
        """Calls that carry weights, to the engine that gets most of them. With files: fetch them, load them."""
        if self.folder is not None:
            return 2
        return len(self.buckets) + max((len(delivery.buckets) for delivery in self.deliveries), default=0)

    @property
    def control_calls(self) -> int:
        """Calls to an engine that carry none, in a push on groups that exist: pause, loading mark, checksums, version,
        version read back, flush, admit, resume; begin and end around tensors that are sent (files need neither)."""
        return 8 if self.folder is not None else 10

    @property
    def deadline_s(self) -> float:
        """Upper bound of the whole transfer: every call at its deadline and one after the other at each sender, begin
        and end, and destroying and making the groups."""
        by_source: dict[int, int] = {}
        for delivery in self.deliveries:
            by_source[delivery.source] = by_source.get(delivery.source, 0) + len(delivery.buckets) + 3
        rounds = max(self.calls_per_engine, len(self.buckets) + max(by_source.values(), default=0))
        return self.call_deadline_s * (rounds + 5 + len(self.stale_groups))


class EngineTransfer(Data):
    """What became of one engine in a transfer. `error` is empty when every call of it succeeded."""

    url: str
    calls: int = Field(ge=0, description="that carried weights")
    control_calls: int = Field(0, ge=0, description="of the transfer that carried none")
    error: str = ""
    answered: bool = Field(description="False: a call got no answer (no connection, or past its deadline)")
    after_stop: bool = Field(False, description="it failed only after the transfer was stopped: likely a victim")
    note: str = Field("", description="what went another way than planned, e.g. all tensors where a base was missing")
    whole: bool = Field(False, description="files: it took every tensor, not a difference")


class TransferReport(Data):
    """The trainer's account of one transfer. `ok` only when every engine took every bucket."""

    ok: bool
    engines: tuple[EngineTransfer, ...]
    sent_bytes: int = Field(ge=0, description="payload bytes broadcast once, whatever the number of receivers")
    seconds: float = Field(ge=0)
    group_name: str
    group_reused: bool
    error: str = Field("", description="why the transfer stopped, when ok is false")


class ChecksumRequest(Data):
    run: str
    version: str


class ChecksumReply(Data):
    """What the trainer holds as `version`: the tensors that travel and the checksums an engine must answer."""

    run: str
    version: str
    tensors: tuple[TensorSpec, ...]
    checksums: dict[str, str] = Field(description="engine's parameter name -> 16 hex digits")
    sources: int = Field(1, ge=1, description="trainer ranks that can send")


class PushStatus(StrEnum):
    CONFIRMED = "confirmed"  # every engine of `engines` read back
    FAILED = "failed"  # no receiver is left half-written and serving; nothing is confirmed
    SUPERSEDED = "superseded"  # a later epoch took its receivers over


class EngineOutcome(Data):
    """One engine at the end of a push."""

    identity: EngineIdentity
    state: EngineState
    calls: int = 0
    control_calls: int = 0
    paused_s: float = 0.0
    reason: str = ""
    note: str = Field("", description="what went another way than planned though it serves")


class PushRecord(Data):
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
    control_calls: int = 0
    bytes: int = 0
    paused_s: float = Field(0.0, description="longest pause of a serving engine")
    rounds: int = Field(0, description="transfers it took; more than 1 after the set changed under the push")
    flushed: bool = True
    group_reused: bool = False
    phases_s: dict[str, float] = Field(default_factory=dict)
    checksum: str = Field("", description="digest over the confirmed per-tensor checksums")
    plan_reused: bool = Field(False, description="same engines, path and calls as the run's push before")
    changed: str = Field("", description="how path or calls per engine differ from the run's push before; else empty")
    reason: str = ""

    @property
    def serving(self) -> tuple[EngineOutcome, ...]:
        return tuple(engine for engine in self.engines if engine.state is EngineState.SERVING)

    @property
    def fenced(self) -> tuple[EngineOutcome, ...]:
        """Engines that this push lost."""
        return tuple(e for e in self.engines if e.state in (EngineState.FENCED, EngineState.GONE))

    @property
    def way(self) -> str:
        """Path and calls, as people compare them."""
        return f"{self.path}, {self.calls_per_engine} calls per engine"

    def compared(self, last: PushRecord | None) -> PushRecord:
        """This record, saying what became of the plan since `last`."""
        if last is None:
            return self
        changed = "" if self.way == last.way else f"{last.way} -> {self.way}"
        same = [e.identity.incarnation for e in self.serving] == [e.identity.incarnation for e in last.serving]
        return self.model_copy(update={"changed": changed, "plan_reused": same and not changed and self.rounds == 1})


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
