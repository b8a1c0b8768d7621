"""Wire "gloo": a process group of two, this rank and one engine, for each engine that this rank serves.

A pair is kept while the same two meet (same group name), made again when a member changed or when somebody else may
have used the name, and closed at the first failure, which frees the engine that waits in it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

from rl360.engines.client import EngineSilent
from rl360.errors import BadInput, ServiceError
from rl360.weights.messages import Bucket, Delivery
from rl360.weights.transports import common
from rl360.weights.transports.common import Group
from rl360.weights.transports.lanes import Errand, Lane

_GRACE_S = 5.0  # for the answer of an engine whose group was closed


class PairWire:
    """This rank's pairs between pushes."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._pairs: dict[str, Group] = {}
        self._left: dict[str, set[str]] = {}  # engine URL -> pairs this side left and the engine may still hold
        self._urls: dict[str, str] = {}

    def check(self, errand: Errand, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            if not delivery.group_name:
                url = errand.plan.engine_set.engines[delivery.engine].url
                raise BadInput(f"transport {errand.plan.transport}: the delivery to {url} names no group; plan again")

    def drop(self, lane: Lane) -> None:
        self._drop(lane.delivery.group_name)

    def keep_only(self, groups: set[str]) -> None:
        for name in self._pairs.keys() - groups:
            self._drop(name)

    async def meet(self, lane: Lane) -> bool:
        """Join the pair, after the engine left the older ones that it may hold."""
        name, engine, plan = lane.delivery.group_name, lane.engine, lane.errand.plan
        if name in self._pairs and lane.errand.may_reuse:
            return True
        self._drop(name)
        old = {name, *self._left.get(engine.url, ()), *(plan.stale_groups if lane.errand.opens else ())}
        for each in sorted(old):
            await common.leave_group(engine, each)
        self._left.pop(engine.url, None)
        backend = common.backend_of(lane.parcels.tensors)
        store = common.listen(self.address, lane.deadline_s)
        join = engine.client.init_group(
            name,
            address=self.address,
            port=store.port,
            rank=1,
            world_size=2,
            backend=backend,
            deadline_s=lane.deadline_s,
        )
        pair: Group = await _both(
            common.control(engine, join),
            asyncio.to_thread(common.connect, name, store, 2, lane.deadline_s, backend),
            lane,
        )
        self._pairs[name], self._urls[name] = pair, engine.url
        return False

    async def send(self, lane: Lane, bucket: Bucket) -> None:
        """The engine's call and the broadcast, side by side, until both are done or one failed."""
        engine, name = lane.engine, lane.delivery.group_name
        until = time.monotonic() + lane.deadline_s
        update = engine.client.update_from_distributed(bucket.tensors, lane.parcels.known, name, lane.deadline_s)
        call = asyncio.ensure_future(common.carrying(engine, update))
        problem, work = "", None
        try:
            payload = await asyncio.to_thread(lane.parcels.flat, bucket)
            pair = self._pairs[name]
            work = pair.broadcast(payload)
            waited = False
            while not (waited and call.done()):
                if not waited and work.is_completed():
                    pair.finish()
                    waited = True
                if call.done() and call.exception() is not None:
                    problem = "the engine refused or was lost"
                    break
                if time.monotonic() > until:
                    problem = f"not sent within {lane.deadline_s:g} s"
                    break
                await asyncio.sleep(common.POLL_S)
        except RuntimeError as error:  # the connection closed under the broadcast, or its deadline passed
            problem = f"sending: {common.first_line(error)}"
        if problem:
            self._drop(name)  # frees an engine that waits in it
            await _answer_of(call, lane, problem)

    def _drop(self, name: str) -> None:
        pair = self._pairs.pop(name, None)
        if pair is not None:
            self._left.setdefault(self._urls.pop(name), set()).add(name)
            pair.leave()


async def _both(join: Awaitable[None], connecting: Awaitable[Any], lane: Lane) -> Any:
    """The group, once engine and sender both joined. When the engine says no, the sender's side isn't waited for."""
    call, meeting = asyncio.ensure_future(join), asyncio.ensure_future(connecting)
    await asyncio.wait({call, meeting}, return_when=asyncio.FIRST_EXCEPTION)
    if call.done() and call.exception() is not None:
        meeting.cancel()  # its thread ends by its own deadline, and a group that it meets after all is closed unused
        await asyncio.wait({meeting}, timeout=1.0)
        await call
    try:
        pg = await meeting
    except RuntimeError as error:  # torch's DistError family: the engine did not come in time
        await _answer_of(call, lane, f"the pair did not meet: {common.first_line(error)}")
    await call
    return pg


async def _answer_of(call: asyncio.Future[None], lane: Lane, problem: str) -> None:
    """Raise the engine's own failure, or else `problem`; an engine that still says nothing is silent."""
    await asyncio.wait({call}, timeout=min(_GRACE_S, lane.deadline_s))
    url = lane.engine.url
    if not call.done():
        call.cancel()
        raise EngineSilent(f"engine {url}: {problem}, and its call is still open", True)
    await call
    raise ServiceError(f"engine {url}: {problem}, although it answered well")
