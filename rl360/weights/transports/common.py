"""What the transports share: process groups with engines, calls to engines and their records, one transfer at a time.

A group is built as SGLang's `init_custom_process_group` builds its side: a TCPStore of the sender, the same prefixes.
gloo carries tensors on the CPU. NCCL is chosen when the trainer's tensors are on CUDA; that was not run on a GPU.
Every call and every send ends by the plan's `call_deadline_s`. What an engine does is in its `Engine` record; any other
error is the sender's own: it is raised, and no engine is blamed for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Coroutine, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import httpx
import psutil
import torch
import torch.distributed as dist

from rl360.engines.client import EngineClient, EngineRefused, EngineSilent, deployment_token
from rl360.errors import BadInput, EngineChurn, Rl360Error, ServiceError
from rl360.weights.checksum import tensor_specs
from rl360.weights.messages import Bucket, EngineTransfer, PushPlan, TensorSpec, TransferReport

POLL_S = 0.002
Tensors = Mapping[str, torch.Tensor]


Address = tuple[str, int]  # IP, port


@dataclass
class Group:
    """A live process group in which this process is rank 0. `members`: gloo's listeners by rank, empty if not known.

    gloo's own `abort` does nothing, and to destroy a group waits, with the interpreter locked, until its last send is
    over. So to leave means: shut the connections, which ends the send, and keep the group until that is seen.
    """

    name: str
    pg: Any
    store: Any
    members: tuple[Address, ...] = ()
    work: Any = None

    def broadcast(self, payload: torch.Tensor) -> Any:
        """Begin to send `payload` to all other members; the work to poll and to wait for."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self.work = self.pg.broadcast([payload], options)
        return self.work

    def finish(self) -> None:
        """Wait for what `broadcast` began, raise what broke it, and let go of its payload."""
        self.work.wait()
        self.work = None

    def leave(self) -> None:
        """Close the connections at once: who waits in the group, here or in an engine, gets an error and goes on."""
        if not self.members:
            self.pg.abort()
        for row in psutil.Process().net_connections("tcp") if self.members else ():
            accepted = row.laddr.port == self.members[0][1] and row.status != psutil.CONN_LISTEN
            if row.fd >= 0 and (accepted or tuple(row.raddr) in self.members[1:]):
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(row.fd)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
        _left.append(self)
        bury()


_left: list[Group] = []


def bury() -> None:
    """Destroy the groups that were left and send no more."""
    _left[:] = [group for group in _left if group.work is not None and not group.work.is_completed()]


@dataclass
class Engine:
    """One receiver during one transfer."""

    client: EngineClient
    calls: int = 0
    control_calls: int = 0
    error: str = ""
    answered: bool = True
    after_stop: bool = False

    @property
    def url(self) -> str:
        return self.client.url

    def report(self) -> EngineTransfer:
        return EngineTransfer(
            url=self.url,
            calls=self.calls,
            control_calls=self.control_calls,
            error=self.error,
            answered=self.answered,
            after_stop=self.after_stop,
        )


def receivers_of(plan: PushPlan, http: httpx.AsyncClient) -> list[Engine]:
    """The plan's engines, in its order. Those of this deployment are shown its token."""
    token, deadline_s, epoch = deployment_token(), plan.call_deadline_s, plan.engine_set.epoch
    each = plan.engine_set.engines
    return [Engine(EngineClient(one.url, http, deadline_s, epoch, token, one.external)) for one in each]


class SenderFault(Rl360Error):
    """This process cannot send; no engine is to blame. Safe to retry."""


class TransferStopped(Exception):
    """A send or a call of the running transfer failed; the engines' own errors say more."""


@dataclass
class Loop:
    """An event loop in a thread, so that HTTP calls run while another thread is inside a send."""

    threads: int = 8
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def __enter__(self) -> Loop:
        # what blocks (meeting in a group) waits in a thread of its own: one stuck engine takes no turn of another's
        self.loop.set_default_executor(ThreadPoolExecutor(self.threads, "push-blocking"))
        self._thread = threading.Thread(target=self.loop.run_forever, name="push-calls", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=5)
        self.loop.close()

    def start(self, call: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(call, self.loop)


class Turn:
    """What the transports of this process share: one transfer at a time, no plan of an older epoch than one already
    seen, and the groups of the broadcast: their name means the same ones, whichever transport met in them."""

    def __init__(self) -> None:
        self.epoch = 0
        self.groups: list[Group] = []
        self.left: set[str] = set()  # groups this side left and engines may still hold
        self._lock = threading.Lock()

    def drop_groups(self) -> None:
        groups, self.groups = self.groups, []
        for group in groups:
            self.left.add(group.name)
            group.leave()

    @contextmanager
    def taken(self, plan: PushPlan) -> Iterator[bool]:
        """Wait for the turn. Yields whether groups of earlier transfers may be used again."""
        if not self._lock.acquire(timeout=plan.deadline_s):
            raise ServiceError(f"an earlier transfer still runs after {plan.deadline_s:g} s")
        try:
            epoch = plan.engine_set.epoch
            if epoch < self.epoch:
                raise EngineChurn(f"push epoch {epoch} is over: epoch {self.epoch} has begun")
            # an epoch that was not ours lies between: somebody else may have met these engines under the group's name
            alone = epoch <= self.epoch + 1
            self.epoch = epoch
            yield alone and not plan.stale_groups
        finally:
            self._lock.release()


def check_tensors_held(specs: tuple[TensorSpec, ...], tensors: Tensors) -> None:
    """`BadInput` unless `tensors` are what the plan says, name by name, in shape and dtype."""
    held = {spec.name: spec for spec in tensor_specs({s.name: tensors[s.name] for s in specs if s.name in tensors})}
    for spec in specs:
        if spec.part is not None:
            raise BadInput(
                f"plan cuts tensor {spec.name} for an engine of several tensor-parallel ranks; SGLang takes whole "
                "tensors and cuts them itself: plan with engines of one rank"
            )
        if held.get(spec.name) != spec:
            raise BadInput(f"plan names {spec}, the trainer holds {held.get(spec.name)}; plan again")


def listen(address: str, timeout_s: float) -> Any:
    """The group's TCPStore on a free port of `address` alone: left to itself it listens on every interface."""
    try:
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
    except (RuntimeError, OSError) as error:
        raise SenderFault(f"cannot listen on {address} for the engines: {first_line(error)}") from None


def backend_of(tensors: Tensors) -> str:
    """What carries these tensors; all of them are on one kind of device."""
    kinds = {tensor.device.type for tensor in tensors.values()}
    if kinds - {"cpu"} and kinds != {"cuda"}:
        raise BadInput(
            f"the trainer's tensors are on {', '.join(sorted(kinds))}; a push needs all on cpu or all on cuda"
        )
    return "nccl" if kinds == {"cuda"} else "gloo"


def connect(name: str, store: Any, world_size: int, timeout_s: float, backend: str) -> Group:
    """Rank 0's side on the store's host, with the prefixes that torch's `_new_process_group_helper` gives SGLang's."""
    bury()
    device = "cuda" if backend == "nccl" else "cpu"
    prefixed = dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        return Group(name, dist.ProcessGroupNCCL(prefixed, 0, world_size, options), store)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=store.host)]
    pg = dist.ProcessGroupGloo(prefixed, 0, world_size, options)
    return Group(name, pg, store, _members([prefixed.get(f"0/{rank}") for rank in range(world_size)]))


def _members(told: list[bytes]) -> tuple[Address, ...]:
    """Where the members' gloo devices listen, from what they told each other: a `sockaddr` behind a head whose length
    is found by our own port. Empty when it is not there: the group can be left all the same, only later."""
    rows = psutil.Process().net_connections("tcp")
    ports = {row.laddr.port for row in rows if row.status == psutil.CONN_LISTEN}
    at = next((at for at in range(len(told[0]) - 8) if (_address(told[0], at) or ("", 0))[1] in ports), None)
    found = [] if at is None else [_address(each, at) for each in told]
    return tuple(each for each in found if each) if all(found) else ()


def _address(told: bytes, at: int) -> Address | None:
    family, port = int.from_bytes(told[at : at + 2], sys.byteorder), int.from_bytes(told[at + 2 : at + 4], "big")
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, told[at + 4 : at + 8]), port
    if family == socket.AF_INET6 and len(told) >= at + 24:
        return socket.inet_ntop(socket.AF_INET6, told[at + 8 : at + 24]), port
    return None


def flatten(bucket: Bucket, tensors: Tensors) -> torch.Tensor:
    """The bucket's tensors back to back, on their device: uint8 [size_bytes]."""
    return torch.cat([tensors[t.name].detach().contiguous().reshape(-1).view(torch.uint8) for t in bucket.tensors])


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]


def report_of(
    plan: PushPlan,
    engines: list[EngineTransfer],
    *,
    began: float,
    sent_bytes: int,
    reused: bool,
    error: str,
) -> TransferReport:
    """The account of a transfer that began at `began` (monotonic)."""
    return TransferReport(
        ok=not error,
        engines=tuple(engines),
        sent_bytes=sent_bytes,
        seconds=round(time.monotonic() - began, 6),
        group_name=plan.group_name,
        group_reused=reused,
        error=error,
    )


async def carrying(engine: Engine, call: Awaitable[object]) -> None:
    """A call that carries weights."""
    engine.calls += 1
    await call


async def control(engine: Engine, call: Awaitable[object]) -> None:
    engine.control_calls += 1
    await call


async def leave_group(engine: Engine, name: str) -> None:
    await control(engine, engine.client.destroy_group(name))


async def begin_update(engine: Engine) -> None:
    """Open an update session; one left open by a transfer that died is closed first."""
    try:
        await control(engine, engine.client.begin_weight_update())
    except EngineRefused as error:
        if "already open" not in str(error):
            raise
        await end_update(engine)
        await control(engine, engine.client.begin_weight_update())


async def end_update(engine: Engine) -> None:
    await control(engine, engine.client.end_weight_update())


async def recorded(engine: Engine, call: Awaitable[object]) -> None:
    """Turn an engine's failure into its record; the first one counts."""
    try:
        await call
    except EngineSilent as error:
        engine.error, engine.answered = engine.error or str(error), False
    except ServiceError as error:
        engine.error = engine.error or str(error)


def settle(calls: list[Future[None]], engines: list[Engine], deadline_s: float, wait_s: float | None = None) -> None:
    """Wait for `recorded` calls, one an engine; one that outlasts its own deadline counts as unanswered.

    What engines do is in their records. Any other error is ours: it is raised, and no engine is blamed for it.
    `wait_s`: where a call has several steps, each with that deadline.
    """
    wait(calls, timeout=deadline_s + 2.0 if wait_s is None else wait_s)
    for call, engine in zip(calls, engines, strict=True):
        if not call.done():
            call.cancel()
            engine.error = engine.error or f"engine {engine.url}: call still open after {deadline_s:g} s"
            engine.answered = False
    for call in calls:
        if not call.cancelled():
            call.result()
