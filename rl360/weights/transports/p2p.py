"""Transport "p2p": each engine gets the tensors it needs from one of several trainer ranks, and from nobody else.

The plan says who sends what to whom; here rank 0 hands it out and puts the accounts together. Each engine is opened,
fed and closed by its own sender, side by side with the others. Two wires carry the parts: groups of two (`pairs.py`),
or writes into the engine's memory (`rdma.py`). Transport colocated is carried out here too (`colocated.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rl360.weights.messages import EngineTransfer, PushPlan, TransferReport
from rl360.weights.transports import common, lanes
from rl360.weights.transports.common import Tensors, Turn
from rl360.weights.transports.lanes import Delivered, Errand

Deliver = Callable[[Errand, Tensors], dict[int, Delivered]]


class P2PTransport:
    """`deliver` has all source ranks carry out an errand."""

    def __init__(self, address: str, turn: Turn, deliver: Deliver) -> None:
        self.turn = turn
        self._deliver = deliver

    def prepare(self, plan: PushPlan, tensors: Tensors) -> None:
        """Nothing: a plan is refused, when it must be, before anything of it is sent."""

    def transfer(self, plan: PushPlan, tensors: Tensors) -> TransferReport:
        """Carry out all deliveries. Bad tensors raise `BadInput` before anything is sent."""
        lanes.every_engine_served(plan)
        with self.turn.taken(plan) as may_reuse:
            began = time.monotonic()
            found = self._deliver(Errand(plan, opens=True, may_reuse=may_reuse), tensors)
        reports = [report_for(found, index, engine.url) for index, engine in enumerate(plan.engine_set.engines)]
        return common.report_of(
            plan,
            reports,
            began=began,
            sent_bytes=sum(each.sent_bytes for each in found.values()),
            reused=all(each.reused for each in found.values()),
            error=lanes.failures(found.values()),
        )

    def close(self) -> None:
        """The groups are those of the lanes."""


def report_for(found: dict[int, Delivered], index: int, url: str) -> EngineTransfer:
    """The account of one engine."""
    if index not in found:
        raise common.SenderFault(f"no trainer rank told what became of engine {url}")
    return found[index].transfer
