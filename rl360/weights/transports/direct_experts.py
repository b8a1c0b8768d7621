"""Transport "direct_experts": routed experts straight to the engines, everything else by broadcast.

The broadcast goes first, in rounds. Then each engine gets all its experts in one call, over a group of two with the
source rank that the plan names, all engines side by side. One update session spans both.
"""

from __future__ import annotations

from rl360.errors import BadInput
from rl360.weights.messages import PushPlan
from rl360.weights.transports import lanes
from rl360.weights.transports.broadcast import BroadcastTransport
from rl360.weights.transports.common import Engine, Tensors, TransferStopped, Turn
from rl360.weights.transports.lanes import Errand
from rl360.weights.transports.p2p import Deliver, report_for


class DirectExpertsTransport(BroadcastTransport):
    """`deliver` has all source ranks carry out an errand."""

    def __init__(self, address: str, turn: Turn, deliver: Deliver) -> None:
        super().__init__(address, turn)
        self._deliver = deliver

    def _check(self, plan: PushPlan, tensors: Tensors) -> None:
        super()._check(plan, tensors)
        lanes.every_engine_served(plan)
        if not plan.buckets:
            raise BadInput("transport direct_experts: the plan broadcasts nothing; use p2p for a plan of deliveries")

    def _send_rest(self, plan: PushPlan, tensors: Tensors, engines: list[Engine], may_reuse: bool) -> tuple[int, bool]:
        """The deliveries. An engine whose delivery failed is named in its record, and the transfer stops."""
        found = self._deliver(Errand(plan, opens=False, may_reuse=may_reuse), tensors)
        for index, engine in enumerate(engines):
            told = report_for(found, index, engine.url)
            engine.calls += told.calls
            engine.control_calls += told.control_calls
            engine.error, engine.answered = told.error, told.answered
        if problem := lanes.failures(found.values()):
            raise TransferStopped(problem)
        return sum(each.sent_bytes for each in found.values()), all(each.reused for each in found.values())
