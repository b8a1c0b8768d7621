"""The sandbox server: `POST /run` carries one attempt, `POST /flush` cancels, `GET /health` needs no token.

A repeated POST of an attempt joins the running one or gets the recorded reply; a client that hangs up loses nothing.
With a store (rl360.harbor.replies) that holds across restarts and across servers. Attempts wait in a bounded queue with
its own clock, so waiting is never agent time; a full queue is refused at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import orjson
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rl360.agents.base import Agent
from rl360.config.run import explain
from rl360.errors import BadInput, Rl360Error, StoreUnavailable
from rl360.harbor.judge import Judge
from rl360.harbor.outcome import MEANINGS, ExitStatus, boundary_of
from rl360.harbor.protocol import RunReply, RunRequest
from rl360.harbor.replies import OtherRequest, Replies, identity, lost_reply, refuse_another
from rl360.harbor.runner import Attempt, Prepared, Runner, prepare, request_key
from rl360.harbor.task import image_group
from rl360.harbor.turns import Turns, need_of
from rl360.ledger.outcomes import Outcome
from rl360.sandboxes.admission import Gate
from rl360.sandboxes.provider import SandboxProvider

log = logging.getLogger("rl360.sandbox")
MAX_BODY_BYTES, BODY_S = 1 << 20, 30.0
JSON = "application/json"
FEW_IDLE = httpx.Limits(max_connections=None, max_keepalive_connections=8)  # httpx polls each at every request
IN_MEMORY, IN_STORE = 20_000, 512  # replies that are remembered here: all there are, or a shortcut to the store


class QueueFull(Rl360Error):
    """More attempts wait than the server takes; the client asks again later or elsewhere."""


class Unauthorised(Rl360Error):
    """Without this deployment's token."""


class TooLarge(Rl360Error):
    """A body over the limit."""


class TooSlow(Rl360Error):
    """A body that does not come."""


_STATUS: tuple[tuple[type[Rl360Error], int], ...] = (
    (BadInput, 400),
    (Unauthorised, 401),
    (TooSlow, 408),
    (OtherRequest, 409),
    (TooLarge, 413),
    (QueueFull, 503),
    (StoreUnavailable, 503),
)


class FlushRequest(BaseModel):
    """Which attempts to cancel; at least one field must be given."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    session_server_instance_id: str | None = Field(None, min_length=1)  # an empty one is everybody's who has none
    run: str | None = Field(None, min_length=1)
    attempt_ids: list[str] | None = None


@dataclass
class Entry:
    """One attempt of the server's life: `owner` is the session server that Miles' clients flush by."""

    attempt: Attempt
    job: asyncio.Task[RunReply]
    owner: str


@dataclass(frozen=True)
class Finished:
    """An attempt that ended. Not `settled`: the store could not take its reply yet, so nobody was told of it."""

    request: RunRequest
    reply: RunReply
    settled: bool


class Attempts:
    """The queue and the record of attempts. `replies`: where what ended is kept; without it only here, for as long as
    this process lives and for the last `IN_MEMORY` of them."""

    def __init__(self, runner: Runner, gate: Gate, queue_limit: int, replies: Replies | None = None) -> None:
        self.runner, self.replies = runner, replies
        self.gate, self.queue_limit = gate, queue_limit
        self.max_concurrent = gate.waves.pace.max_concurrent
        self._turns = Turns(gate)
        self._open: dict[str, Entry] = {}
        self._finished: dict[str, Finished] = {}
        self.waiting = 0
        self.outcomes: Counter[str] = Counter()
        self.losses: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self.unconfirmed = self.held = 0

    @property
    def running(self) -> int:
        """That have a turn: neither those whose reply is still to be stored nor what is held without anyone running."""
        return self.gate.waves.live - self.held

    async def submit(self, request: RunRequest, owner: str, agents: Mapping[str, Agent]) -> RunReply:
        """The reply of this attempt, whoever started it."""
        key, prepared, came = request_key(request), None, asyncio.get_running_loop().time()
        if key not in self._finished and key not in self._open:
            self._require_room()
            prepared = await asyncio.to_thread(prepare, request, self.runner.provider, agents, self.runner.judge)
            self.gate.reservations.require(need_of(prepared))
        known = self._finished.get(key)  # another may have asked for it meanwhile
        if known is not None:
            refuse_another(identity(known.request), request)
            return known.reply if known.settled else await self._settle(known.request, known.reply)
        entry = self._open.get(key)
        if entry is None:
            assert prepared is not None
            self._require_room()
            attempt = Attempt(request, came)
            entry = Entry(attempt, asyncio.create_task(self._carry(prepared, attempt)), owner)
            self._open[key] = entry
            # not in `_carry`: a flush may cancel it before it has begun
            entry.job.add_done_callback(lambda _: self._open.pop(key, None))
        refuse_another(identity(entry.attempt.request), request)
        try:  # shielded: the attempt belongs to the server, not to the connection
            return await asyncio.shield(entry.job)
        except asyncio.CancelledError:
            asked = asyncio.current_task()
            if not entry.job.cancelled() or (asked is not None and asked.cancelling()):
                raise
            entry.attempt.failed("queue", ExitStatus.ABORTED, "cancelled before it began")
            return await self._settle(entry.attempt.request, entry.attempt.reply())

    def _require_room(self) -> None:
        if len(self._open) >= self.max_concurrent + self.queue_limit:
            raise QueueFull(f"{self.waiting} attempts wait, limit {self.queue_limit}; try later or raise --queue-limit")

    async def _carry(self, prepared: Prepared, attempt: Attempt) -> RunReply:
        request = prepared.request
        if self.replies is not None:
            recorded = await self.replies.claim(request)
            if recorded is not None:
                return self._remember(request, recorded)
        elif request.resent:
            return await self._settle(request, lost_reply("asked again of a server that has no store and knows it not"))
        attempt.ours = True
        if await self._turn(prepared, attempt):
            try:
                if self.replies is not None:
                    await self.replies.begin(request)
                reply = await self.runner.run(prepared, attempt)
            finally:
                self._leave(attempt)
        else:
            reply = attempt.reply()
        attempt.closing = True
        return await self._settle(request, reply)

    def _leave(self, attempt: Attempt) -> None:
        """Give back what it held: what may still live, as long as its lease may last, holds it on."""
        key = request_key(attempt.request)
        if all(proof.confirmed for proof in attempt.stops):
            self._turns.leave(key, () if attempt.workspace is None else attempt.workspace.deleting)
            return

        def later() -> None:
            self.held -= 1
            self._turns.leave(key)

        self.held += 1
        self._turns.give_up(key)
        asyncio.get_running_loop().call_later(attempt.request.deadline_s, later)

    async def _settle(self, request: RunRequest, reply: RunReply) -> RunReply:
        """The reply that counts, in the store. Where that is away `StoreUnavailable`, and whoever asks again tries
        again."""
        key = request_key(request)
        self._finished.setdefault(key, Finished(request, reply, False))
        if self.replies is not None:
            reply = await self.replies.keep(request, reply)
        known = self._finished.get(key)
        if known is None or not known.settled:  # several may have asked for it at once
            self._count(request, reply)
        return self._remember(request, reply)

    def _remember(self, request: RunRequest, reply: RunReply) -> RunReply:
        self._finished[request_key(request)] = Finished(request, reply, True)
        over = len(self._finished) - (IN_MEMORY if self.replies is None else IN_STORE)
        # one that is not settled is nowhere else: without it the attempt would run again
        settled = (key for key, known in self._finished.items() if known.settled)
        for key in [*islice(settled, max(0, over))]:
            del self._finished[key]
        return reply

    async def _turn(self, prepared: Prepared, attempt: Attempt) -> bool:
        """Wait for a turn on the queue's own clock; False when there was none in time, or the attempt was cancelled."""
        request = attempt.request
        key, limit_s = request_key(request), request.queue_timeout_s
        attempt.started, attempt.again = partial(self._turns.settle, key), partial(self._turns.again, key)
        started = time.monotonic()
        self.waiting += 1
        try:
            async with asyncio.timeout(limit_s):
                await self._turns.wait(key, image_group(prepared.task, self.runner.provider.image), need_of(prepared))
            return True
        except TimeoutError:
            said = f"no turn within {limit_s:g} s: {self.gate.waves.live} of {self.max_concurrent} run, "
            attempt.failed("queue", ExitStatus.QUEUE_TIMEOUT, f"{said}left to promise: {self.gate.reservations.left}")
            return False
        except asyncio.CancelledError:
            attempt.failed("queue", ExitStatus.ABORTED, "cancelled while queued")
            return False
        finally:
            self.waiting -= 1
            attempt.phases["queue"] = time.monotonic() - started

    def _count(self, request: RunRequest, reply: RunReply) -> None:
        self.outcomes[reply.outcome] += 1
        boundary = boundary_of(reply.outcome, reply.exit_status)
        self.losses.update([boundary] if boundary is not None else [])
        self.unknown.update([] if reply.exit_status in MEANINGS else [reply.exit_status[:80]])
        self.unconfirmed += not reply.cleanup.confirmed
        odd = reply.outcome == Outcome.UNCLASSIFIED or not reply.cleanup.confirmed
        level = logging.WARNING if odd else logging.INFO
        evidence = "" if reply.cleanup.confirmed else f" CLEANUP UNCONFIRMED: {reply.cleanup.evidence}"
        log.log(level, "%s %s %s %s%s", request.attempt_id, reply.outcome, reply.exit_status, reply.detail, evidence)

    def counts(self) -> dict[str, object]:
        """What `/health` tells."""
        waves, reservations, replies = self.gate.waves, self.gate.reservations, self.replies
        return {
            "running": self.running,
            "queued": self.waiting,
            "max_concurrent": self.max_concurrent,
            "starting": waves.starting,
            "window": int(waves.window),
            "starts": waves.begun,
            "warm_starts": waves.warm,
            "room": reservations.room._asdict(),
            "room_left": reservations.left._asdict(),
            "promised_to": len(reservations.held),
            "withheld_disk_mb": reservations.withheld_mb,
            "queue_limit": self.queue_limit,
            "per_image": waves.pace.per_group,
            "image": self.runner.provider.image,
            # nobody needs them where the cap holds nothing back
            "images": dict(self.gate.asked()) if waves.pace.per_group < self.max_concurrent else {},
            "outcomes": {str(name): count for name, count in self.outcomes.items()},
            "losses": {str(name): count for name, count in self.losses.items()},
            "unknown_statuses": dict(self.unknown),
            "store": None if replies is None else f"{replies.store.endpoint_url}/{replies.store.bucket}",
            "cleanup_unconfirmed": self.unconfirmed,
            "held_unconfirmed": self.held,
        }

    def flush(self, which: FlushRequest) -> int:
        """Cancel the open attempts that match any given field; returns how many."""
        cancelled = 0
        for entry in list(self._open.values()):
            request = entry.attempt.request
            hit = (
                (which.run is not None and request.run == which.run)
                or (which.attempt_ids is not None and request.attempt_id in which.attempt_ids)
                or (which.session_server_instance_id is not None and entry.owner == which.session_server_instance_id)
            )
            if hit and not entry.attempt.closing and not entry.job.cancelling():
                entry.job.cancel()
                cancelled += 1
        return cancelled

    def elsewhere(self, which: FlushRequest) -> list[str]:
        """Of the attempts that are named those that do not run here, nor do those that wait for another's reply."""
        here = {entry.attempt.request.attempt_id for entry in self._open.values() if entry.attempt.ours}
        return [attempt_id for attempt_id in which.attempt_ids or () if attempt_id not in here]

    async def close(self) -> None:
        """Cancel everything and wait until each is torn down."""
        jobs = [entry.job for entry in self._open.values()]
        for entry in self._open.values():
            if not entry.attempt.closing and not entry.job.cancelling():
                entry.job.cancel()
        if jobs:
            await asyncio.wait(jobs)
        if self.replies is not None:
            self.replies.close()


def make_app(
    provider: SandboxProvider,
    agents: Mapping[str, Agent],
    gate: Gate,
    queue_limit: int,
    token: str,
    judge: Judge | None = None,
    replies: Replies | None = None,
    tasks: Path | None = None,
) -> FastAPI:
    """The HTTP face. `tasks`: the folder of the tasks of requests that name one by its id alone."""
    incarnation = os.environ.get("RL360_INCARNATION") or uuid4().hex
    identity = {"status": "ok", "service": "sandbox", "incarnation": incarnation, "pid": os.getpid()}
    expected = f"Bearer {token}".encode()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for line in await provider.reap():
            log.warning("left by an earlier server: %s", line)
        async with httpx.AsyncClient(limits=FEW_IDLE, trust_env=False) as http:
            attempts = Attempts(Runner(provider, http, token, judge), gate, queue_limit, replies)
            app.state.attempts = attempts
            yield
            await attempts.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None)

    @app.get("/health")
    async def health() -> Response:
        judged_by = None if judge is None else judge.host
        counts = app.state.attempts.counts()
        return answer(200, {**identity, **counts, "agents": sorted(agents), "judge": judged_by})

    @app.exception_handler(Rl360Error)
    async def refused(_request: Request, error: Rl360Error) -> Response:
        status = next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
        code = "store_unavailable" if isinstance(error, StoreUnavailable) else status
        return answer(status, {"error": {"message": str(error), "code": code}})

    @app.post("/run")
    async def run(request: Request) -> Response:
        order: RunRequest = await body_of(request, expected, RunRequest)
        if order.task_dir is None and tasks is not None:
            order = order.model_copy(update={"task_dir": str(_below(tasks, order.instance_id))})
        reply = await app.state.attempts.submit(order, order.session_server_instance_id or "", agents)
        return Response(reply.model_dump_json(), media_type=JSON)

    @app.post("/flush")
    async def flush(request: Request) -> Response:
        which: FlushRequest = await body_of(request, expected, FlushRequest)
        if which == FlushRequest():
            raise BadInput("nothing named: give run, attempt_ids or session_server_instance_id")
        attempts: Attempts = app.state.attempts
        return answer(200, {"cancelled": attempts.flush(which), "elsewhere": attempts.elsewhere(which)})

    return app


def _below(tasks: Path, name: str) -> Path:
    path = tasks / name
    if path == tasks or ".." in Path(name).parts or not path.is_relative_to(tasks):
        raise BadInput(f"instance_id {name[:80]!r} is not the name of a folder under --tasks {tasks}")
    return path


async def body_of(request: Request, authorization: bytes, model: type[BaseModel]) -> Any:
    """The body, a `model`, of a request that carries this authorization."""
    if not hmac.compare_digest(request.headers.get("authorization", "").encode(), authorization):
        raise Unauthorised("needs the bearer token of this deployment")
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                data += chunk
                if len(data) > MAX_BODY_BYTES:
                    raise TooLarge(f"body over {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise TooSlow(f"no whole body within {BODY_S:g} s") from None
    try:
        return model.model_validate_json(bytes(data))
    except ValidationError as error:
        raise BadInput(explain(error)) from None


def answer(status: int, body: object) -> Response:
    return Response(orjson.dumps(body), status, media_type=JSON)
