"""One trainer rank's point-to-point deliveries: a lane to each engine that it serves, all of them side by side.

A lane meets its engine, opens an update session where the errand says so, sends bucket after bucket and closes. What
carries a bucket is a `Wire`. A lane that fails concerns its engine alone: the others go on. Every step of a lane ends
by the plan's `call_deadline_s`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from rl360.engines.client import open_http
from rl360.errors import BadInput
from rl360.weights.messages import Bucket, Delivery, EngineTransfer, PushPlan, TensorSpec, Transport
from rl360.weights.transports import common
from rl360.weights.transports.common import Engine, Loop, Tensors


@dataclass(frozen=True)
class Errand:
    """What all source ranks are told: carry out your deliveries of `plan`.

    `opens`: each lane begins and ends its engine's update session. `may_reuse`: groups of earlier errands still hold.
    """

    plan: PushPlan
    opens: bool
    may_reuse: bool

    def of(self, source: int) -> list[Delivery]:
        return [delivery for delivery in self.plan.deliveries if delivery.source == source]

    def names(self, source: int) -> set[str]:
        """Tensors that this source sends."""
        return {tensor.name for delivery in self.of(source) for bucket in delivery.buckets for tensor in bucket.tensors}


@dataclass(frozen=True)
class Delivered:
    """What became of one engine's delivery."""

    transfer: EngineTransfer
    sent_bytes: int
    reused: bool


class Wire(Protocol):
    """What carries a bucket to one engine. Its methods run in the lanes' event loop and raise `ServiceError`s."""

    def check(self, errand: Errand, deliveries: list[Delivery]) -> None:
        """Refuse what this wire cannot do, before anything leaves."""

    async def meet(self, lane: Lane) -> bool:
        """Be ready to send; whether nothing had to be set up for it."""

    async def send(self, lane: Lane, bucket: Bucket) -> None:
        """Bring one bucket into the engine."""

    def drop(self, lane: Lane) -> None:
        """Close what connects to this engine: its lane failed."""

    def keep_only(self, groups: set[str]) -> None:
        """Leave all groups but these."""


@dataclass
class Lane:
    """One engine's delivery under way."""

    engine: Engine
    delivery: Delivery
    errand: Errand
    parcels: Parcels
    sent_bytes: int = 0
    reused: bool = False

    @property
    def deadline_s(self) -> float:
        return self.errand.plan.call_deadline_s

    async def run(self, wire: Wire) -> None:
        """The whole delivery; raises what stopped it."""
        whole = False
        try:
            self.reused = await wire.meet(self)
            if self.errand.opens:
                await common.begin_update(self.engine)
            for bucket in self.delivery.buckets:
                await wire.send(self, bucket)
                self.sent_bytes += bucket.size_bytes
            if self.errand.opens:
                await common.end_update(self.engine)
            whole = True
        finally:
            if not whole:
                wire.drop(self)

    def told(self) -> Delivered:
        return Delivered(self.engine.report(), self.sent_bytes, self.reused)


class Parcels:
    """Buckets as they travel. Lanes that are at the same bucket share one copy; it goes when the last one is done."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self.known: dict[str, TensorSpec] = {}
        self._flat: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def flat(self, bucket: Bucket) -> torch.Tensor:
        """uint8 [size_bytes]; call it in a thread. The plan keeps its buckets alive, so an id means one bucket."""
        with self._lock:
            found = self._flat.get(id(bucket))
            if found is None:
                found = self._flat[id(bucket)] = common.flatten(bucket, self.tensors)
            return found


class Lanes:
    """Keeps a rank's wires between pushes. `address` is where engines reach this rank; `wire` is that of p2p pushes."""

    def __init__(self, address: str = "127.0.0.1", wire: str = "gloo") -> None:
        self.address, self.wire = address, wire
        self._wires: dict[str, Wire] = {}

    def check(self, errand: Errand, source: int, tensors: Tensors) -> list[Delivery]:
        """This rank's deliveries; `BadInput` for one that can't be made."""
        deliveries = errand.of(source)
        plan = errand.plan
        shared = [tensor.name for bucket in plan.buckets for tensor in bucket.tensors]
        served: set[int] = set()
        for delivery in deliveries:
            url = plan.engine_set.engines[delivery.engine].url
            if delivery.rank or delivery.engine in served:
                raise BadInput(
                    f"engine {url}: delivery to its rank {delivery.rank}; SGLang's calls reach all ranks of an engine "
                    "at once and name one group: engines of one rank only, or transport broadcast"
                )
            served.add(delivery.engine)
            names = [*shared, *(tensor.name for bucket in delivery.buckets for tensor in bucket.tensors)]
            if len(set(names)) != len(names):
                repeated = next(name for name in names if names.count(name) > 1)
                raise BadInput(f"plan sends tensor {repeated} twice to engine {url}; each must travel once")
        specs = dict.fromkeys(t for d in deliveries for bucket in d.buckets for t in bucket.tensors)
        common.check_tensors_held(tuple(specs), tensors)
        if deliveries:
            self._wire(errand).check(errand, deliveries)
        return deliveries

    def deliver(self, errand: Errand, tensors: Tensors, source: int = 0) -> dict[int, Delivered]:
        """Carry out this rank's deliveries; what became of each engine, by its index in the plan's set."""
        deliveries = self.check(errand, source, tensors)
        if not deliveries and self._wire_name(errand) not in self._wires:
            return {}
        wire = self._wire(errand)
        wire.keep_only({delivery.group_name for delivery in deliveries})
        if not deliveries:
            return {}
        parcels = Parcels(tensors)
        parcels.known = {tensor.name: tensor for tensor in errand.plan.tensors}
        http = open_http()
        engines = common.receivers_of(errand.plan, http)
        lanes = [Lane(engines[delivery.engine], delivery, errand, parcels) for delivery in deliveries]
        with Loop(threads=8 + 2 * len(lanes)) as loop:
            try:
                self._run(lanes, wire, loop)
            finally:
                loop.start(http.aclose()).result(timeout=10)
        return {lane.delivery.engine: lane.told() for lane in lanes}

    def close(self) -> None:
        """Leave all groups."""
        for wire in self._wires.values():
            wire.keep_only(set())

    @staticmethod
    def _run(lanes: list[Lane], wire: Wire, loop: Loop) -> None:
        """All lanes at once, each to its end. An error of our own is raised when all of them are over."""
        calls = [loop.start(common.recorded(lane.engine, lane.run(wire))) for lane in lanes]
        steps = max(len(lane.delivery.buckets) for lane in lanes) + 5 + len(lanes[0].errand.plan.stale_groups)
        deadline_s = lanes[0].deadline_s
        # a backstop: each step has a deadline of its own
        common.settle(calls, [lane.engine for lane in lanes], deadline_s, (deadline_s + 7.0) * steps)

    def _wire_name(self, errand: Errand) -> str:
        """Experts beside a broadcast always travel over groups, as the broadcast does."""
        transport = errand.plan.transport
        if transport is Transport.COLOCATED:
            return "colocated"
        return self.wire if transport is Transport.P2P else "gloo"

    def _wire(self, errand: Errand) -> Wire:
        name = self._wire_name(errand)
        if name not in self._wires:
            self._wires[name] = _open_wire(name, self.address)
        return self._wires[name]


def _open_wire(name: str, address: str) -> Wire:
    if name == "rdma":
        from rl360.weights.transports.rdma import RdmaWire

        return RdmaWire(address)
    if name == "colocated":
        from rl360.weights.transports.colocated import SharedMemoryWire

        return SharedMemoryWire()
    if name != "gloo":
        raise BadInput(f"p2p wire {name!r} is unknown; use gloo or rdma")
    from rl360.weights.transports.pairs import PairWire

    return PairWire(address)


def every_engine_served(plan: PushPlan) -> None:
    """`BadInput` when an engine of the set gets no delivery: it would be confirmed to hold what it never got."""
    served = {delivery.engine for delivery in plan.deliveries}
    for index, engine in enumerate(plan.engine_set.engines):
        if index not in served:
            raise BadInput(f"transport {plan.transport}: the plan has no delivery for engine {engine.url}; plan again")


def failures(found: Iterable[Delivered]) -> str:
    """One line that names the engines whose deliveries failed; empty when none did."""
    failed = [each.transfer.url for each in found if each.transfer.error]
    return f"deliveries failed on {', '.join(failed)}" if failed else ""
