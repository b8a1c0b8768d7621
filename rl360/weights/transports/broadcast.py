"""Transport "broadcast": the trainer's rank 0 sends buckets to all engines of a plan at once.

With NCCL all are in one group. gloo's broadcast is a tree in which engines hand on to engines, and one that stops
holds those beside it until it is gone: so with gloo there are groups of two engines and this rank, which sends to each
itself. They all have the plan's group name, are kept while the engine set stays the same and rebuilt when it changes.
Each bucket is a broadcast in every group, concurrent with one HTTP call per engine. A failure closes the groups, which
frees the engines that wait in them, and is reported by engine: the caller decides who is fenced. `transfer` blocks.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from rl360.engines.client import open_http
from rl360.weights.messages import Bucket, PushPlan, TensorSpec, TransferReport
from rl360.weights.transports import common
from rl360.weights.transports.common import Engine, Loop, Tensors, TransferStopped, Turn

_NO_RELAY = 2  # receivers of a gloo broadcast that get it from the sender itself, both of them


class BroadcastTransport:
    """`address` is where engines reach this process, `turn` keeps the group between pushes; `deliver` is not used."""

    def __init__(self, address: str = "127.0.0.1", turn: Turn | None = None, deliver: object = None) -> None:
        self.address = address
        self.turn = turn or Turn()

    def prepare(self, plan: PushPlan, tensors: Tensors) -> None:
        """Refuse what `transfer` would refuse."""
        self._check(plan, tensors)

    def transfer(self, plan: PushPlan, tensors: Tensors) -> TransferReport:
        """Send every bucket to every engine. Bad tensors raise `BadInput` before anything is sent."""
        self._check(plan, tensors)
        with self.turn.taken(plan) as may_reuse, Loop() as loop:
            return self._transfer(plan, tensors, loop, may_reuse=may_reuse)

    def close(self) -> None:
        """Leave the groups."""
        self.turn.drop_groups()

    def _check(self, plan: PushPlan, tensors: Tensors) -> None:
        common.check_tensors_held(plan.tensors, tensors)

    def _transfer(self, plan: PushPlan, tensors: Tensors, loop: Loop, *, may_reuse: bool) -> TransferReport:
        began = time.monotonic()
        http = open_http()
        engines = common.receivers_of(plan, http)
        reused = may_reuse and {group.name for group in self.turn.groups} == {plan.group_name}
        sent_bytes, error, sent = 0, "", False
        try:
            if not reused:
                self._build_groups(plan, engines, loop, common.backend_of(tensors))
            self._everywhere(engines, loop, common.begin_update, plan.call_deadline_s)
            known = {tensor.name: tensor for tensor in plan.tensors}
            for bucket in plan.buckets:
                self._send(bucket, tensors, known, plan, engines, loop)
                sent_bytes += bucket.size_bytes
            more_bytes, pairs_reused = self._send_rest(plan, tensors, engines, may_reuse)
            sent_bytes, reused = sent_bytes + more_bytes, reused and pairs_reused
            self._everywhere(engines, loop, common.end_update, plan.call_deadline_s)
            sent = True
        except TransferStopped as stopped:
            error = str(stopped)
        finally:
            if not sent:
                self.turn.drop_groups()
            loop.start(http.aclose()).result(timeout=10)
        reports = [engine.report() for engine in engines]
        return common.report_of(plan, reports, began=began, sent_bytes=sent_bytes, reused=reused, error=error)

    def _send_rest(self, plan: PushPlan, tensors: Tensors, engines: list[Engine], may_reuse: bool) -> tuple[int, bool]:
        """What doesn't travel by broadcast: nothing here. Bytes sent, and whether all groups of it were there."""
        return 0, True

    def _build_groups(self, plan: PushPlan, engines: list[Engine], loop: Loop, backend: str) -> None:
        """Leave every older group, then meet the engines in new ones."""
        self.turn.drop_groups()
        old = self.turn.left | {*plan.stale_groups, plan.group_name}
        for name in sorted(old):
            self._everywhere(engines, loop, partial(common.leave_group, name=name), plan.call_deadline_s)
        self.turn.left.clear()
        size = len(engines) if backend == "nccl" else _NO_RELAY
        parts = [engines[at : at + size] for at in range(0, len(engines), size)]
        stores = [common.listen(self.address, plan.call_deadline_s) for _ in parts]

        def join(engine: Engine, store: Any, position: int, world_size: int) -> Awaitable[object]:
            return engine.client.init_group(
                plan.group_name,
                address=self.address,
                port=store.port,
                rank=position * plan.layout.tp + 1,  # SGLang adds an engine's own rank
                world_size=world_size,
                backend=backend,
                deadline_s=plan.call_deadline_s,
            )

        calls, meetings = [], []
        with ThreadPoolExecutor(len(parts), "push-meeting") as pool:
            for part, store in zip(parts, stores, strict=True):
                world_size = len(part) * plan.layout.tp + 1
                for position, engine in enumerate(part):
                    joining = common.control(engine, join(engine, store, position, world_size))
                    calls.append(loop.start(common.recorded(engine, joining)))
                args = (plan.group_name, store, world_size, plan.call_deadline_s, backend)
                meetings.append(pool.submit(common.connect, *args))
        problem = ""
        for meeting in meetings:
            try:
                self.turn.groups.append(meeting.result())
            except RuntimeError as error:  # torch's DistError family: a member did not come in time
                problem = f"the group did not meet: {common.first_line(error)}"
        del stores
        common.settle(calls, engines, plan.call_deadline_s)
        if problem:
            raise TransferStopped(problem)
        self._stop_on_error(engines, "joining the group")

    def _send(
        self,
        bucket: Bucket,
        tensors: Tensors,
        known: Mapping[str, TensorSpec],
        plan: PushPlan,
        engines: list[Engine],
        loop: Loop,
    ) -> None:
        """One bucket: the engines' calls and the broadcast, side by side, until all are done or one failed."""
        payload = common.flatten(bucket, tensors)
        until = time.monotonic() + plan.call_deadline_s

        def receive(engine: Engine) -> Awaitable[object]:
            update = engine.client.update_from_distributed
            return update(bucket.tensors, known, plan.group_name, plan.call_deadline_s)

        calls = [loop.start(common.recorded(engine, common.carrying(engine, receive(engine)))) for engine in engines]
        problem = ""
        try:
            sending = [group.broadcast(payload) for group in self.turn.groups]
            while not (all(work.is_completed() for work in sending) and all(call.done() for call in calls)):
                broken = any(call.done() and call.exception() for call in calls)
                if broken or any(engine.error for engine in engines) or time.monotonic() > until:
                    problem = "an engine refused, died or did not answer in time"
                    break
                time.sleep(common.POLL_S)
            if not problem:
                for group in self.turn.groups:
                    group.finish()
        except RuntimeError as error:  # a connection closed under the broadcast, or its deadline passed
            problem = f"broadcast: {common.first_line(error)}"
        if problem:
            first = {engine.url for engine in engines if engine.error}
            self.turn.drop_groups()
            # those that only waited for the broken broadcast answer now; give them a moment, and no more
            common.settle(calls, engines, min(5.0, plan.call_deadline_s))
            for engine in engines:
                engine.after_stop = bool(engine.error) and engine.answered and engine.url not in first
            raise TransferStopped(problem)
        self._stop_on_error(engines, "receiving a bucket")

    def _everywhere(
        self, engines: list[Engine], loop: Loop, call: Callable[[Engine], Awaitable[object]], deadline_s: float
    ) -> None:
        """The same call to every engine at once; a failure stops the transfer."""
        calls = [loop.start(common.recorded(engine, call(engine))) for engine in engines]
        common.settle(calls, engines, deadline_s)
        self._stop_on_error(engines, "a control call")

    @staticmethod
    def _stop_on_error(engines: list[Engine], doing: str) -> None:
        failed = [engine.url for engine in engines if engine.error]
        if failed:
            raise TransferStopped(f"{doing} failed on {', '.join(failed)}")
