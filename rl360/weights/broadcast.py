"""Transport "broadcast": the trainer's rank 0 sends buckets to all engines of a plan over one gloo group.

The group is built as SGLang's `init_custom_process_group` builds it (TCPStore of rank 0, the same prefixes), kept while
the engine set stays the same and rebuilt when it changes. Each bucket is one broadcast, concurrent with one HTTP call
per engine; every call and every broadcast ends by the plan's `call_deadline_s`. A failure closes the group, which frees
the engines that wait in it, and is reported by engine: the caller decides who is fenced. `transfer` blocks; one runs at
a time, and a plan of an older epoch than one already seen is refused.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rl360.engines.client import EngineClient, EngineRefused, EngineSilent, open_http
from rl360.errors import BadInput, EngineChurn, ServiceError
from rl360.weights.checksum import tensor_specs
from rl360.weights.messages import Bucket, EngineTransfer, PushPlan, TransferReport

_POLL_S = 0.002


class Transport(Protocol):
    """How a plan's tensors reach its engines. Implementations report failed engines and leave nothing hanging."""

    def transfer(self, plan: PushPlan, tensors: Mapping[str, torch.Tensor]) -> TransferReport: ...
    def close(self) -> None: ...


@dataclass
class _Group:
    """A live process group. Dropping both members closes the sockets and frees whoever waits in it."""

    name: str
    pg: Any
    store: Any


@dataclass
class _Engine:
    """One receiver during one transfer."""

    client: EngineClient
    rank: int
    calls: int = 0
    error: str = ""
    answered: bool = True
    after_stop: bool = False


class _TransferStopped(Exception):
    """A broadcast or call of the running transfer failed; the engines' own errors say more."""


@dataclass
class _Loop:
    """An event loop in a thread, so that HTTP calls run while this thread is inside a broadcast."""

    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def __enter__(self) -> _Loop:
        self._thread = threading.Thread(target=self.loop.run_forever, name="push-calls", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=5)
        self.loop.close()

    def start(self, call: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(call, self.loop)


def listen(address: str, timeout_s: float) -> Any:
    """The group's TCPStore on a free port of `address` alone: left to itself it listens on every interface."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address,
        port,
        None,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _connect(name: str, store: Any, world_size: int, timeout_s: float) -> Any:
    """Rank 0's gloo backend, with the store prefixes that torch's `_new_process_group_helper` gives SGLang's side."""
    prefixed = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
    return dist.ProcessGroupGloo(prefixed, 0, world_size, timedelta(seconds=timeout_s))


def flatten(bucket: Bucket, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The bucket's tensors back to back: uint8 [size_bytes]."""
    return torch.cat(
        [tensors[t.name].detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in bucket.tensors]
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]


class BroadcastTransport:
    """Owns the group between pushes. `address` is where engines reach this process."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.address = address
        self._lock = threading.Lock()
        self._group: _Group | None = None
        self._left: set[str] = set()  # groups this side left and engines may still hold
        self._epoch = 0

    def transfer(self, plan: PushPlan, tensors: Mapping[str, torch.Tensor]) -> TransferReport:
        """Send every bucket to every engine. Bad tensors raise `BadInput` before anything is sent."""
        held = {spec.name: spec for spec in tensor_specs(tensors)}
        for spec in plan.tensors:
            if held.get(spec.name) != spec:
                raise BadInput(f"plan names {spec}, the trainer holds {held.get(spec.name)}; plan again")
        if not self._lock.acquire(timeout=plan.deadline_s):
            raise ServiceError(f"an earlier transfer still runs after {plan.deadline_s:g} s")
        try:
            if plan.engine_set.epoch < self._epoch:
                raise EngineChurn(f"push epoch {plan.engine_set.epoch} is over: epoch {self._epoch} has begun")
            # an epoch that was not ours lies between: somebody else may have met these engines under the group's name
            alone = plan.engine_set.epoch <= self._epoch + 1
            self._epoch = plan.engine_set.epoch
            with _Loop() as loop:
                return self._transfer(plan, tensors, loop, may_reuse=alone and not plan.stale_groups)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Leave the group."""
        self._drop_group()

    def _drop_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            self._left.add(group.name)
            # closes the connections at once, so a broadcast that still waits for a stuck engine ends too
            group.pg.abort()

    def _transfer(
        self, plan: PushPlan, tensors: Mapping[str, torch.Tensor], loop: _Loop, *, may_reuse: bool
    ) -> TransferReport:
        began = time.monotonic()
        http = open_http()
        engines = [
            _Engine(EngineClient(engine.url, http, plan.call_deadline_s), rank)
            for rank, engine in enumerate(plan.engine_set.engines, start=1)
        ]
        reused = may_reuse and self._group is not None and self._group.name == plan.group_name
        sent_bytes, error, sent = 0, "", False
        try:
            if not reused:
                self._build_group(plan, engines, loop)
            self._everywhere(engines, loop, lambda engine: _begin(engine), plan.call_deadline_s)
            known = {tensor.name: tensor for tensor in plan.tensors}
            for bucket in plan.buckets:
                self._send(bucket, tensors, known, plan, engines, loop)
                sent_bytes += bucket.size_bytes
            self._everywhere(engines, loop, lambda e: _counted(e, e.client.end_weight_update()), plan.call_deadline_s)
            sent = True
        except _TransferStopped as stopped:
            error = str(stopped)
        finally:
            if not sent:
                self._drop_group()
            loop.start(http.aclose()).result(timeout=10)
        return TransferReport(
            ok=not error,
            engines=tuple(
                EngineTransfer(
                    url=e.client.url, calls=e.calls, error=e.error, answered=e.answered, after_stop=e.after_stop
                )
                for e in engines
            ),
            sent_bytes=sent_bytes,
            seconds=round(time.monotonic() - began, 6),
            group_name=plan.group_name,
            group_reused=reused,
            error=error,
        )

    def _build_group(self, plan: PushPlan, engines: list[_Engine], loop: _Loop) -> None:
        """Leave every older group, then meet the engines in a new one."""
        self._drop_group()
        old = self._left | {*plan.stale_groups, plan.group_name}
        for name in sorted(old):
            self._everywhere(engines, loop, partial(_leave, name=name), plan.call_deadline_s)
        self._left.clear()
        world_size = len(engines) + 1
        try:
            store = listen(self.address, plan.call_deadline_s)
        except (RuntimeError, OSError) as error:
            raise ServiceError(f"cannot listen on {self.address} for the engines: {_first_line(error)}") from None

        def join(engine: _Engine) -> Awaitable[object]:
            return engine.client.init_group(
                plan.group_name,
                address=self.address,
                port=store.port,
                rank=engine.rank,
                world_size=world_size,
                backend="gloo",
                deadline_s=plan.call_deadline_s,
            )

        calls = [loop.start(_recorded(engine, _counted(engine, join(engine)))) for engine in engines]
        try:
            pg = _connect(plan.group_name, store, world_size, plan.call_deadline_s)
        except RuntimeError as error:  # torch's DistError family: a member did not come in time
            del store
            self._settle(calls, engines, plan.call_deadline_s)
            raise _TransferStopped(f"the group did not meet: {_first_line(error)}") from None
        self._group = _Group(plan.group_name, pg, store)
        self._settle(calls, engines, plan.call_deadline_s)
        self._stop_on_error(engines, "joining the group")

    def _send(
        self,
        bucket: Bucket,
        tensors: Mapping[str, torch.Tensor],
        known: Mapping[str, Any],
        plan: PushPlan,
        engines: list[_Engine],
        loop: _Loop,
    ) -> None:
        """One bucket: the engines' calls and the broadcast, side by side, until all are done or one failed."""
        assert self._group is not None
        payload = flatten(bucket, tensors)
        until = time.monotonic() + plan.call_deadline_s
        calls = [
            loop.start(
                _recorded(
                    e,
                    _counted(
                        e,
                        e.client.update_from_distributed(bucket.tensors, known, plan.group_name, plan.call_deadline_s),
                    ),
                )
            )
            for e in engines
        ]
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        problem = ""
        try:
            work = self._group.pg.broadcast([payload], options)
            while not (work.is_completed() and all(call.done() for call in calls)):
                broken = any(call.done() and call.exception() for call in calls)
                if broken or any(engine.error for engine in engines) or time.monotonic() > until:
                    problem = "an engine refused, died or did not answer in time"
                    break
                time.sleep(_POLL_S)
            if not problem:
                work.wait()
        except RuntimeError as error:  # gloo: a connection closed under the broadcast, or its deadline passed
            problem = f"broadcast: {_first_line(error)}"
        if problem:
            first = {engine.rank for engine in engines if engine.error}
            self._drop_group()
            # those that only waited for the broken broadcast answer now; give them a moment, and no more
            self._settle(calls, engines, min(5.0, plan.call_deadline_s))
            for engine in engines:
                engine.after_stop = bool(engine.error) and engine.answered and engine.rank not in first
            raise _TransferStopped(problem)
        self._stop_on_error(engines, "receiving a bucket")

    def _everywhere(
        self, engines: list[_Engine], loop: _Loop, call: Callable[[_Engine], Awaitable[object]], deadline_s: float
    ) -> None:
        """The same call to every engine at once; a failure stops the transfer."""
        calls = [loop.start(_recorded(engine, call(engine))) for engine in engines]
        self._settle(calls, engines, deadline_s)
        self._stop_on_error(engines, "a control call")

    @staticmethod
    def _settle(calls: list[Future[None]], engines: list[_Engine], deadline_s: float) -> None:
        """Wait for the calls; one that outlasts its own deadline counts as unanswered.

        What engines do is in their records. Any other error is ours: it is raised, and no engine is blamed for it.
        """
        wait(calls, timeout=deadline_s + 2.0)
        for call, engine in zip(calls, engines, strict=True):
            if not call.done():
                call.cancel()
                engine.error = engine.error or f"engine {engine.client.url}: call still open after {deadline_s:g} s"
                engine.answered = False
        for call in calls:
            if not call.cancelled():
                call.result()

    @staticmethod
    def _stop_on_error(engines: list[_Engine], doing: str) -> None:
        failed = [engine.client.url for engine in engines if engine.error]
        if failed:
            raise _TransferStopped(f"{doing} failed on {', '.join(failed)}")


async def _counted(engine: _Engine, call: Awaitable[object]) -> None:
    engine.calls += 1
    await call


async def _leave(engine: _Engine, name: str) -> None:
    await _counted(engine, engine.client.destroy_group(name))


async def _begin(engine: _Engine) -> None:
    """Open an update session; one left open by a transfer that died is closed first."""
    try:
        await _counted(engine, engine.client.begin_weight_update())
    except EngineRefused as error:
        if "already open" not in str(error):
            raise
        await _counted(engine, engine.client.end_weight_update())
        await _counted(engine, engine.client.begin_weight_update())


async def _recorded(engine: _Engine, call: Awaitable[object]) -> None:
    """Turn an engine's failure into its record; the first one counts."""
    try:
        await call
    except EngineSilent as error:
        engine.error, engine.answered = engine.error or str(error), False
    except ServiceError as error:
        engine.error = engine.error or str(error)
