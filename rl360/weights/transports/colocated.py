"""Wire "colocated": trainer and engine on one host. A call names the tensors; their bytes stay where they are.

On the CPU a bucket lies in a file of shared memory that the engine maps (sharing strategy `file_system`: SGLang dies
of the default one, which passes file descriptors between processes). On CUDA the call carries IPC handles, with devices
named by UUID as SGLang does; that branch was not run on a GPU. Engines on other hosts are refused.
"""

from __future__ import annotations

import asyncio
import io
import threading
from multiprocessing.reduction import ForkingPickler

import pybase64
import torch
import torch.multiprocessing

from rl360.engines.client import check_tensors
from rl360.engines.processes import boot_id, host_id
from rl360.errors import BadInput
from rl360.weights.messages import Bucket, Delivery
from rl360.weights.transports import common
from rl360.weights.transports.lanes import Errand, Lane

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
_strategy = threading.Lock()  # torch keeps one sharing strategy a process


class SharedMemoryWire:
    """Holds nothing between pushes: a bucket's memory goes when the engines that share it have loaded it."""

    def check(self, errand: Errand, deliveries: list[Delivery]) -> None:
        here = (host_id(), boot_id())
        for delivery in deliveries:
            engine = errand.plan.engine_set.engines[delivery.engine]
            tree = engine.process
            if tree is None or (tree.host, tree.boot_id) != here:
                where = "another host" if tree is None else tree.host
                raise BadInput(
                    f"engine {engine.url} is on {where}, this trainer on {here[0]}: transport colocated needs both on "
                    "one host and in one pid namespace; use broadcast or p2p"
                )

    async def meet(self, lane: Lane) -> bool:
        return True

    async def send(self, lane: Lane, bucket: Bucket) -> None:
        """One call; it answers when the engine has copied the tensors into its own."""
        check_tensors(bucket.tensors, lane.parcels.known)  # before memory is shared that nobody would open
        update = lane.engine.client.update_from_tensor
        flat = await asyncio.to_thread(lane.parcels.flat, bucket)  # held until the engine has answered
        handle = await asyncio.to_thread(handle_of, bucket, flat)
        await common.carrying(lane.engine, update(bucket.tensors, lane.parcels.known, handle, lane.deadline_s))

    def drop(self, lane: Lane) -> None:
        pass

    def keep_only(self, groups: set[str]) -> None:
        pass


def handle_of(bucket: Bucket, flat: torch.Tensor) -> str:
    """What SGLang unpickles: (name, tensor) pairs, all views of one shared storage. base64. For one receiver: the
    storage lives until it has been opened once for each handle made."""
    views, at = [], 0
    for spec in bucket.tensors:
        views.append((spec.name, flat[at : at + spec.size_bytes].view(_DTYPES[spec.dtype]).reshape(spec.shape)))
        at += spec.size_bytes
    out = io.BytesIO()
    with _strategy:
        if flat.is_cuda:
            from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

            monkey_patch_torch_reductions()
        before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            ForkingPickler(out).dump(views)
        finally:
            torch.multiprocessing.set_sharing_strategy(before)
    return pybase64.b64encode(out.getvalue()).decode()
