"""Wire "rdma": this rank writes an engine's parameters in place, through Mooncake's transfer engine.

For engines started with SGLang's `--remote-instance-weight-loader-start-seed-via-transfer-engine`: each says at which
address every parameter of it lies. No call carries weights; `calls` counts the writes of a bucket. Needs the extra
`rdma` (`pip install rl360[rdma]`), imported on first use. Tested up to the addresses that are written. With Mooncake
0.3.13 over TCP it was run by hand between processes; never over RDMA, nor on a real engine: SGLang offers it on CUDA.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rl360.engines.client import EngineRefused, EngineSilent, check_tensors
from rl360.errors import BadInput
from rl360.weights.checksum import position
from rl360.weights.messages import Bucket, Delivery, TensorSpec
from rl360.weights.plan import engine_name
from rl360.weights.transports import common
from rl360.weights.transports.lanes import Errand, Lane

_WRITERS = 64  # writes at once; each waits for the network
ENGINE_FLAG = "--remote-instance-weight-loader-start-seed-via-transfer-engine"


@dataclass(frozen=True)
class Remote:
    """An engine rank's memory: session of its transfer engine, parameter -> (address, elements, bytes an element)."""

    session: str
    parameters: Mapping[str, tuple[int, int, int]]


@dataclass(frozen=True)
class Write:
    """`size_bytes` at `offset` of a flat bucket go to `address`."""

    offset: int
    address: int
    size_bytes: int


def writes(bucket: Bucket, known: Mapping[str, TensorSpec], remote: Remote) -> list[Write]:
    """Where each tensor of the bucket belongs: an engine's parameter is its parts one behind the other."""
    parts: dict[str, list[str]] = {}
    for name in known:
        parts.setdefault(engine_name(name), []).append(name)
    starts: dict[str, int] = {}
    for fused, names in parts.items():
        at = 0
        for name in sorted(names, key=position):
            starts[name] = at
            at += known[name].size_bytes
        if fused in remote.parameters:
            _, elements, element_bytes = remote.parameters[fused]
            if at != elements * element_bytes:
                raise BadInput(f"parameter {fused}: {at} bytes to write, the engine holds {elements * element_bytes}")
    found, offset = [], 0
    for spec in bucket.tensors:
        fused = engine_name(spec.name)
        if fused not in remote.parameters:
            raise BadInput(f"tensor {spec.name}: the engine registered no parameter {fused}")
        found.append(Write(offset, remote.parameters[fused][0] + starts[spec.name], spec.size_bytes))
        offset += spec.size_bytes
    return found


def _place(told: Sequence[int]) -> tuple[int, int, int]:
    address, elements, element_bytes = map(int, told)
    return address, elements, element_bytes


class RdmaWire:
    """This rank's transfer engine, and writes to engines that have not ended yet."""

    def __init__(self, address: str) -> None:
        try:
            from mooncake.engine import TransferEngine
        except ImportError:
            raise BadInput("p2p wire rdma needs Mooncake's transfer engine: pip install 'rl360[rdma]'") from None
        self._engine: Any = TransferEngine()
        protocol, device = os.environ.get("MOONCAKE_PROTOCOL", "rdma"), os.environ.get("MOONCAKE_DEVICE", "")
        if self._engine.initialize(address, "P2PHANDSHAKE", protocol, device) != 0:
            how = f"{address} with {protocol} {device!r}"
            raise common.SenderFault(f"Mooncake's transfer engine does not start on {how}")
        self._threads = ThreadPoolExecutor(_WRITERS, "push-rdma")
        self._writing: dict[str, Future[int]] = {}
        self._remotes: dict[str, Remote] = {}

    def check(self, errand: Errand, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            url = errand.plan.engine_set.engines[delivery.engine].url
            if self._unfinished(url):
                raise common.SenderFault(f"a write of an earlier push into engine {url} has not ended; retry later")

    async def meet(self, lane: Lane) -> bool:
        """Ask the engine where its parameters lie: they move when it restarts."""
        url = lane.engine.url
        lane.engine.control_calls += 1
        try:
            session, parameters = await lane.engine.client.transfer_engine(lane.delivery.rank, lane.deadline_s)
            self._remotes[url] = Remote(str(session), {name: _place(at) for name, at in parameters.items()})
        except (AttributeError, TypeError, ValueError):
            raise EngineRefused(
                f"engine {url}: names no places of its parameters; start it with {ENGINE_FLAG}"
            ) from None
        return True

    async def send(self, lane: Lane, bucket: Bucket) -> None:
        """Write the bucket's tensors to their places. A write that misses its deadline cannot be called back: until it
        has ended, nothing more is sent to that engine, so none is confirmed while an old write may still land."""
        check_tensors(bucket.tensors, lane.parcels.known)
        url, remote = lane.engine.url, self._remotes[lane.engine.url]
        # a copy of its own: a buffer that another lane has registered is refused
        flat = await asyncio.to_thread(common.flatten, bucket, lane.parcels.tensors)
        todo = writes(bucket, lane.parcels.known, remote)

        def write() -> int:
            base = flat.data_ptr()
            if self._engine.register_memory(base, flat.numel()) != 0:
                return -1
            try:
                local = [base + each.offset for each in todo]
                there, sizes = [each.address for each in todo], [each.size_bytes for each in todo]
                return int(self._engine.batch_transfer_sync_write(remote.session, local, there, sizes))
            finally:
                self._engine.unregister_memory(base)

        lane.engine.calls += 1
        writing = self._writing[url] = self._threads.submit(write)
        try:
            status = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(writing)), lane.deadline_s)
        except TimeoutError:
            text = f"engine {url}: a write of {flat.numel()} bytes still runs after {lane.deadline_s:g} s"
            raise EngineSilent(text, True) from None
        if status != 0:
            raise EngineRefused(f"engine {url}: the transfer engine answered {status} to a write")

    def _unfinished(self, url: str) -> bool:
        return url in self._writing and not self._writing[url].done()

    def drop(self, lane: Lane) -> None:
        self._remotes.pop(lane.engine.url, None)

    def keep_only(self, groups: set[str]) -> None:
        pass
