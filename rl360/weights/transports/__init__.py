"""The ways weights travel, one module each, chosen by the plan's `transport` and imported when first used.

A `Sender` reports by engine, ends by the plan's deadlines and leaves nothing hanging; pausing, naming, confirming and
fencing are the push's business and the same for all. `Senders` is one trainer process's set of them: one transfer at a
time, whatever its transport, and no plan of an older epoch than one already seen.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol

from rl360.weights.messages import PushPlan, TransferReport, Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from rl360.weights.transports.lanes import Delivered, Errand, Lanes

_MODULES = {
    Transport.BROADCAST: ("broadcast", "BroadcastTransport"),
    Transport.DIRECT_EXPERTS: ("direct_experts", "DirectExpertsTransport"),
    Transport.P2P: ("p2p", "P2PTransport"),
    Transport.COLOCATED: ("p2p", "P2PTransport"),
    Transport.DISK_DELTA: ("disk", "DiskTransport"),
    Transport.DISK_FULL: ("disk", "DiskTransport"),
}


class Sender(Protocol):
    """How a plan's tensors reach its engines."""

    def prepare(self, plan: PushPlan, tensors: Mapping[str, torch.Tensor]) -> None:
        """What can be done before the engines pause; nothing that `transfer` could not do by itself."""

    def transfer(self, plan: PushPlan, tensors: Mapping[str, torch.Tensor]) -> TransferReport: ...
    def close(self) -> None: ...


class Senders:
    """`address` is where engines reach this process. `deliver` carries out point-to-point errands on all trainer ranks;
    left out, this process is the only one that sends, over `wire` when the transport is p2p."""

    def __init__(
        self,
        address: str = "127.0.0.1",
        deliver: Callable[[Errand, Mapping[str, torch.Tensor]], dict[int, Delivered]] | None = None,
        wire: str = "gloo",
    ) -> None:
        self.address, self.wire = address, wire
        self._deliver, self._lanes = deliver, None if deliver else open_lanes(address, wire)
        self._turn: Any = None
        self._open: dict[str, Sender] = {}

    def prepare(self, plan: PushPlan, tensors: Mapping[str, torch.Tensor]) -> None:
        """What `plan` allows before the engines pause."""
        self._sender(plan.transport).prepare(plan, tensors)

    def transfer(self, plan: PushPlan, tensors: Mapping[str, torch.Tensor]) -> TransferReport:
        """Carry out `plan` by its transport."""
        return self._sender(plan.transport).transfer(plan, tensors)

    def close(self) -> None:
        """Leave all groups."""
        for sender in self._open.values():
            sender.close()
        if self._lanes is not None:
            self._lanes.close()

    def _sender(self, transport: Transport) -> Sender:
        module, name = _MODULES[transport]
        if name not in self._open:
            from rl360.weights.transports.common import Turn

            self._turn = self._turn or Turn()
            made = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            deliver = self._deliver or (self._lanes and self._lanes.deliver)
            self._open[name] = made(self.address, self._turn, deliver)
        return self._open[name]


def open_lanes(address: str = "127.0.0.1", wire: str = "gloo") -> Lanes:
    """One trainer rank's own lanes to engines (`lanes.Lanes`)."""
    from rl360.weights.transports.lanes import Lanes

    return Lanes(address, wire)
