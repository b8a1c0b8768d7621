"""What the session server's endpoints do, on plain ASGI: the agent's path is the hot path of a rollout.

One event loop owns the sessions. Long bodies and renders, big replies, merging and the store run in threads, of one
session one at a time. A client that goes away, a failed or a late engine changes nothing. A refusal becomes an error
reply in one place, `_Route`, or the last event of a stream whose client was kept waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import parse_qs

import numpy as np
import orjson
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rl360.config.run import explain
from rl360.errors import BadInput, StoreUnavailable
from rl360.sessions import wire
from rl360.sessions.bodies import CreateBody, StoreBody, StoreManyBody, StoreOne
from rl360.sessions.core import Session
from rl360.sessions.families.base import ChatTemplate
from rl360.sessions.formats import anthropic, openai
from rl360.sessions.merge import Pick, SessionSnapshot, merge, snapshot
from rl360.sessions.messages import Message
from rl360.sessions.openapi import ENDPOINTS, Endpoint, document_json, page
from rl360.sessions.refusals import Refusal, SessionRefusal
from rl360.sessions.registry import Held, Registry
from rl360.sessions.sample import LeafCounts, SampleRef, encode_samples
from rl360.sessions.turns import Completion, Plan, PreparedTurn, Request, Turn
from rl360.sessions.upstream import Upstream
from rl360.sessions.wire import AgentRequest, Format, Raws
from rl360.store.layout import merged_key
from rl360.store.object_store import ObjectStore

log = logging.getLogger("rl360.sessions")

CLIENT_GONE = 499  # nobody reads this reply; the status is for logs
BODY_S = 60.0
_BODIES_AT_ONCE = 4  # the largest allowed, in flight on one session
_OPERATOR_BODY_BYTES = 64 << 10
KEEP_ALIVE_S = 10.0  # a stream's client hears at least this often that its turn is being sampled
STORE_WAITS_S = 10.0  # for turns that are being sampled
# JSON that is worked on apart from the event loop: split into messages; parsed or rendered
_SPLIT_IN_THREAD_BYTES, _READ_IN_THREAD_BYTES = 256 << 10, 64 << 10
_STORES_AT_ONCE, _LONG_AT_ONCE = 4, 4
_TOLD = 2000  # characters about what is wrong with a body
_EVICT_EVERY_S = 15.0
_JSON = b"application/json"
_SSE = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
_KEY = re.compile(r"([^/]+)/steps/(\d{6,9})/merged/(\d{4,6})/[^/]+\.msgpack", re.ASCII)
_Model = TypeVar("_Model", bound=BaseModel)
_Result = TypeVar("_Result")


@dataclass
class Call:
    """One request. `body_bytes` is how much of a body was read, `beat` the event that keeps the client of a stream
    waiting (empty: no stream); once one is sent the reply has begun."""

    scope: Scope
    receive: Receive
    send: Send
    body_bytes: int = 0
    beat: bytes = b""
    begun: bool = False

    @property
    def session_id(self) -> str:
        return self.scope["path_params"]["session_id"]

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.scope["headers"] if key == name), b"")

    async def unless_gone(
        self, work: Coroutine[Any, Any, _Result], running: set[asyncio.Task[_Result]]
    ) -> _Result | None:
        """The result of `work`, or None when the client went away first: then it is cancelled and its end awaited.
        It is one of `running` until it ends."""
        task = asyncio.ensure_future(work)
        running.add(task)
        task.add_done_callback(running.discard)
        gone = asyncio.ensure_future(self.receive())  # the body is read: the next message is the disconnect
        pause_s = KEEP_ALIVE_S if self.beat else None
        try:
            while not (await asyncio.wait({task, gone}, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED))[0]:
                await self._keep_waiting()
            if task.cancelled():
                raise _storing()
            return task.result() if task.done() else None
        finally:
            gone.cancel()
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, SessionRefusal):
                    await task

    async def _keep_waiting(self) -> None:
        if not self.begun:
            self.begun = True
            await self.send({"type": "http.response.start", "status": 200, "headers": list(_SSE)})
        await self.send({"type": "http.response.body", "body": self.beat, "more_body": True})

    async def answer(self, reply: Reply) -> None:
        """Send the reply, or the events that end a stream which has begun."""
        if not self.begun:
            length = (b"content-length", b"%d" % len(reply.body))
            headers = [length, *(((b"content-type", reply.media),) if reply.media else ()), *reply.headers]
            await self.send({"type": "http.response.start", "status": reply.status, "headers": headers})
        body = reply.body if not self.begun or reply.status == 200 else b"event: error\ndata: %b\n\n" % reply.body
        await self.send({"type": "http.response.body", "body": body})


@dataclass(frozen=True)
class Reply:
    body: bytes = b""
    status: int = 200
    media: bytes = _JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


@dataclass
class Service:
    """What the routes share: one method an endpoint. `refused` counts replies by error code since the start."""

    template: ChatTemplate
    registry: Registry
    upstream: Upstream
    token: str
    store_in: ObjectStore | None = None
    drain_s: float = 0.0
    incarnation: str = field(default_factory=lambda: os.environ.get("RL360_INCARNATION") or uuid.uuid4().hex)
    turns: int = 0
    stored: int = 0
    disconnects: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    drain_until_s: float | None = None
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_STORES_AT_ONCE, "store"))
    workers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_LONG_AT_ONCE, "long"))

    def authorise(self, call: Call) -> None:
        if not hmac.compare_digest(call.header(b"authorization"), f"Bearer {self.token}".encode()):
            raise SessionRefusal(Refusal.UNAUTHORIZED, "send Authorization: Bearer <token> of this deployment")

    async def read_body(self, call: Call, held: Held | None = None) -> bytes:
        """The body. Never more than the limits in memory: of one body, of all in flight on a session, and of all in
        this server together with what its sessions hold."""
        limit = _OPERATOR_BODY_BYTES if held is None else self.registry.limits.body_bytes
        parts = []
        try:
            async with asyncio.timeout(BODY_S):
                more = True
                while more:
                    message = await call.receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    part = message.get("body", b"")
                    more = message.get("more_body", False)
                    self._count_body(call, held, len(part))
                    if call.body_bytes > limit:
                        raise SessionRefusal(Refusal.OVER_BUDGET, f"request body is over {limit} bytes, the limit")
                    if held is not None:  # not an operator's: storing and deleting are what makes room
                        if held.body_bytes > _BODIES_AT_ONCE * limit:
                            raise _too_many(f"{_BODIES_AT_ONCE * limit} bytes of requests in flight")
                        self.registry.make_room()
                    parts.append(part)
        except TimeoutError:
            raise SessionRefusal(Refusal.SLOW_BODY, f"the request body took over {BODY_S:g} s") from None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _count_body(self, call: Call, held: Held | None, size: int) -> None:
        call.body_bytes += size
        self.registry.body_bytes += size
        if held is not None:
            held.body_bytes += size

    async def _asked(self, call: Call, held: Held, read: Callable[[bytes, Raws], AgentRequest]) -> AgentRequest:
        """The request in a body; of messages that the session was sent before, its own copies."""
        data = await self.read_body(call, held)
        known, rest = wire.cut(data, held.session.last_raws)
        self._count_body(call, held, len(rest) - len(data))
        del data
        return await self._apart(held, len(rest) > _SPLIT_IN_THREAD_BYTES, read, rest, known)

    async def _apart(self, held: Held, long: bool, work: Callable[..., _Result], *args: Any) -> _Result:
        """The result of `work`; what takes long runs in a thread, of one session one at a time in the order it came, so
        that an agent's long texts delay none but its own."""
        if not long:
            return work(*args)
        await held.turnstile.acquire()
        running, loop = self.workers.submit(work, *args), asyncio.get_running_loop()
        result = asyncio.wrap_future(running)
        # not when whoever waits is cancelled: when the thread is free
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(held.turnstile.release))
        return await result

    async def chat(self, call: Call) -> Reply:
        return await self._turn(call, openai)

    async def messages(self, call: Call) -> Reply:
        return await self._turn(call, anthropic)

    async def _turn(self, call: Call, spoken: Format) -> Reply:
        """One turn, from the agent's body to its reply."""
        with self._request(call) as held:
            session = held.session
            asked = await self._asked(call, held, spoken.read)
            self.registry.make_room()
            if held.store_as is not None:
                raise _storing()
            call.beat = spoken.BEAT if asked.stream else b""
            turn = await call.unless_gone(self._sample(held, asked), held.turns)
            if turn is None:
                raise _Gone
            self.turns += 1
            if asked.stream:
                # generated as a whole before it is recorded; its events then leave in one write
                return Reply(spoken.events(session, turn, asked), media=b"", headers=_SSE)
            return Reply(spoken.body(session, turn, asked))

    async def _sample(self, held: Held, asked: AgentRequest) -> Turn:
        """Prepare, sample and record. Whatever the engine says it sampled is counted before this ends."""
        session = held.session
        try:
            plan = session.plan(await self._read(held, asked), asked.asked)
            prepared = session.assemble(plan, await self._render(held, plan))
            completion = await self._generate(session, prepared)
            return session.commit(prepared, completion, asked.ignored)
        except SessionRefusal as refusal:
            session.count_refused(refusal)
            raise

    async def _generate(self, session: Session, prepared: PreparedTurn) -> Completion:
        try:
            return await self.upstream.generate(session.session_id, prepared)
        except asyncio.CancelledError:
            session.requests_unanswered += 1
            raise

    @contextlib.contextmanager
    def _request(self, call: Call) -> Iterator[Held]:
        """Of an agent: what it has in flight limits itself, never what the operator does with its session."""
        with self.registry.using(call.session_id) as held:
            if held.in_flight > self.registry.limits.session_requests:
                raise _too_many(f"{self.registry.limits.session_requests} requests in flight")
            try:
                yield held
            finally:
                held.body_bytes -= call.body_bytes

    async def _read(self, held: Held, asked: AgentRequest) -> Request:
        session = held.session
        long = session.unread_bytes(asked.raws, asked.tools_raw, asked.parse) > _READ_IN_THREAD_BYTES
        return await self._apart(held, long, session.read, asked.raws, asked.tools_raw, asked.parse, asked.parse_tools)

    async def _render(self, held: Held, plan: Plan) -> np.ndarray:
        return await self._apart(held, plan.new_bytes > _READ_IN_THREAD_BYTES, held.session.render, plan)

    async def count_tokens(self, call: Call) -> Reply:
        """Of a body that continues the session the ids it would send, of any other those of its own prompt."""
        with self._request(call) as held:
            request = await self._read(held, await self._asked(call, held, anthropic.read))
            count = await call.unless_gone(self._count(held, request), set())
            if count is None:
                raise _Gone
            return Reply(orjson.dumps({"input_tokens": count}))

    async def _count(self, held: Held, request: Request) -> int:
        session = held.session
        try:
            plan = session.plan(request)
        except SessionRefusal:
            prompt = (request.messages, request.tools, session.spec.thinking)
            long = request.raw_bytes > _READ_IN_THREAD_BYTES
            return len(await self._apart(held, long, self.template.render_prompt, *prompt))
        return plan.held + len(await self._render(held, plan))

    async def models(self, call: Call) -> Reply:
        self.registry.get(call.session_id)
        return Reply(openai.models_body("policy"))

    async def create(self, call: Call) -> Reply:
        spec = _validated(CreateBody, await self.read_body(call)).to_spec()
        if spec.thinking:
            self.template.render_prompt((Message("user", ""),), (), thinking=True)  # refuses where there is none
        session_id = self.registry.create(spec).session_id
        base_url = f"{str(HttpRequest(call.scope).base_url).rstrip('/')}/sessions/{session_id}/v1"
        return Reply(orjson.dumps({"session_id": session_id, "base_url": base_url}))

    async def rows(self, call: Call) -> Reply:
        now = self.registry.clock()
        return Reply(orjson.dumps({"sessions": [_row(held, now) for held in self.registry]}))

    async def describe(self, call: Call) -> Reply:
        held = self.registry.get(call.session_id)
        stored = held.stored.to_wire() if held.stored else None
        return Reply(orjson.dumps({**held.session.describe(), "in_flight": held.in_flight, "stored": stored}))

    async def merged(self, call: Call) -> Reply:
        asked = parse_qs(call.scope["query_string"].decode("latin-1")).get("pick", ["last"])[-1]
        try:
            pick = Pick(asked)
        except ValueError:
            raise SessionRefusal(Refusal.BAD_BODY, f"pick {asked[:40]!r} is not {', '.join(Pick)}") from None
        with self.registry.using(call.session_id) as held:
            as_json = _JSON in call.header(b"accept")
            data = await self._apart(held, True, _encode, snapshot(held.session), pick, as_json)
        return Reply(data, media=_JSON if as_json else b"application/msgpack")

    async def store(self, call: Call) -> Reply:
        body = _validated(StoreBody, await self.read_body(call))
        return Reply(orjson.dumps((await self._stored(call.session_id, body)).to_wire()))

    async def store_many(self, call: Call) -> Reply:
        """Side by side. What cannot be stored now is null: asked for alone, it says why or is waited for."""

        async def one(asked: StoreOne) -> dict[str, Any] | None:
            if self.registry.get(asked.session_id).turns:  # they may take long, and the others would wait for it
                return None
            return (await self._stored(asked.session_id, asked)).to_wire()

        body = _validated(StoreManyBody, await self.read_body(call))
        stored = await asyncio.gather(*map(one, body.sessions), return_exceptions=True)
        for error in stored:
            if isinstance(error, BaseException):
                log.info("of %d sessions to store, one is not: %r", len(stored), error)
        return Reply(orjson.dumps({"stored": [None if isinstance(s, BaseException) else s for s in stored]}))

    async def _stored(self, session_id: str, asked: StoreBody) -> SampleRef:
        with self.registry.using(session_id) as held:
            if self.store_in is None:
                raise SessionRefusal(Refusal.NO_STORE, "this server was started without --store")
            _check_key(asked.key, held.session)
            as_asked = (asked.key, asked.pick)
            if held.store_as not in (None, as_asked):
                raise SessionRefusal(
                    Refusal.CONFLICT, f"session is stored as {held.store_as[0]}, pick {held.store_as[1]}"
                )
            if held.stored is None:
                held.store_as = as_asked
                await _end(held.turns)
                held.session.seal()
                write = (self.store_in, snapshot(held.session), *as_asked)
                try:
                    ref = await asyncio.get_running_loop().run_in_executor(self.threads, _write, *write)
                except SessionRefusal:
                    held.store_as = None  # nothing was written; after StoreUnavailable it may have been: only there
                    raise
                self.stored += held.stored is None  # of two calls at once both write, the same
                held.stored = ref
            return held.stored

    async def delete(self, call: Call) -> Reply:
        self.registry.delete(call.session_id)
        return Reply(status=204)

    async def drain(self, call: Call) -> Reply:
        self.start_drain()
        return Reply(orjson.dumps({"status": "draining", "unfinished": self.registry.unfinished}))

    def start_drain(self) -> None:
        """No new sessions from now on; `drained` turns true when the others are done, or after `drain_s`."""
        if not self.registry.draining:
            told = "draining for at most %g s, %d sessions unfinished; a second SIGTERM ends it now"
            log.info(told, self.drain_s, self.registry.unfinished)
            self.registry.draining = True
            self.drain_until_s = time.monotonic() + self.drain_s

    @property
    def drained(self) -> bool:
        if self.drain_until_s is None:
            return False
        return self.registry.unfinished == 0 or time.monotonic() >= self.drain_until_s

    async def health(self, call: Call) -> Reply:
        registry, routing = self.registry, self.registry.routing
        told = {
            "status": "draining" if registry.draining else "ok",
            "service": "sessions",
            "incarnation": self.incarnation,
            "pid": os.getpid(),
            "family": self.template.family,
            "matchers": list(registry.matchers),
            "upstream": self.upstream.url,
            "store": f"{self.store_in.endpoint_url}/{self.store_in.bucket}" if self.store_in else None,
            "routing": [routing.layers, routing.top_k, routing.experts] if routing else None,
            "sessions": len(registry),
            "created": registry.created,
            "evicted_idle": registry.evicted_idle,
            "evicted_for_room": registry.evicted_for_room,
            "in_flight": registry.in_flight,
            "held_bytes": registry.total_bytes,
            "turns": self.turns,
            "stored": self.stored,
            "disconnects": self.disconnects,
            "refused": dict(self.refused),
        }
        return Reply(orjson.dumps(told))

    async def document(self, call: Call) -> Reply:
        return Reply(document_json())

    async def page(self, call: Call) -> Reply:
        return Reply(page(), media=b"text/html; charset=utf-8")


class _Gone(Exception):
    """The client went away."""


@dataclass(frozen=True)
class _Route:
    """One endpoint as an ASGI app: authorises, answers, and turns refusals into replies."""

    endpoint: Endpoint
    service: Service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(scope, receive, send)
        try:
            if self.endpoint.bearer:
                self.service.authorise(call)
            reply = await getattr(self.service, self.endpoint.name)(call)
        except SessionRefusal as error:
            if error.status >= 500:
                log.warning("%s: %s", error.code, error)
            reply = self.refusal(error)
        except BadInput as error:
            reply = self.refusal(SessionRefusal(Refusal.BAD_BODY, str(error)))
        except StoreUnavailable as error:
            log.warning("%s", error)
            reply = self.refusal(SessionRefusal(Refusal.STORE_UNAVAILABLE, str(error)))
        except asyncio.CancelledError:  # uvicorn ends and waits no longer
            reply = self.refusal(SessionRefusal(Refusal.DRAINING, "this server ends now; ask again elsewhere"))
        except _Gone:
            self.service.disconnects += 1
            reply = Reply(status=CLIENT_GONE)
        except Exception:  # a bug, whatever it raises: the client is told, in its own shape and on a stream too
            log.exception("%s has a bug", self.endpoint.name)
            reply = self.refusal(SessionRefusal(Refusal.INTERNAL, "this server has a bug: its log has the traceback"))
        finally:
            self.service.registry.body_bytes -= call.body_bytes
        await call.answer(reply)

    def refusal(self, error: SessionRefusal) -> Reply:
        self.service.refused[str(error.code)] += 1
        spoken: Format = anthropic if "/v1/messages" in self.endpoint.path else openai
        headers: tuple[tuple[bytes, bytes], ...] = () if error.retry else ((b"x-should-retry", b"false"),)
        if error.code in (Refusal.DRAINING, Refusal.SERVER_FULL, Refusal.TOO_MANY):
            headers += ((b"retry-after", b"1"),)
        more = {"sampled_tokens": error.sampled} if error.code is Refusal.CANNOT_MERGE else {}
        return Reply(
            spoken.error_body(str(error.code), str(error), error.status, **more), error.status, headers=headers
        )


def create_app(service: Service) -> Starlette:
    """The routes over one service; the server and tests both use it."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> Any:
        evictor = asyncio.create_task(_evict_forever(service.registry))
        yield
        evictor.cancel()
        await service.upstream.aclose()
        for threads in (service.threads, service.workers):
            threads.shutdown(wait=False, cancel_futures=True)

    def answer(code: str, message: str, status: int) -> Response:
        service.refused[code] += 1
        return Response(openai.error_body(code, message, status), status, media_type="application/json")

    async def no_route(request: HttpRequest, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        code = Refusal.METHOD if status == 405 else Refusal.NOT_FOUND
        path = request.url.path
        more = "an Anthropic client's base_url ends before /v1" if "/v1/v1/" in path else "see /docs"
        return answer(str(code), f"{request.method} {path[:80]}: no such endpoint; {more}", status)

    routes = [Route(e.path, _Route(e, service), methods=[e.method], name=e.name) for e in ENDPOINTS]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: no_route})
    app.router.redirect_slashes = False
    return app


def _validated(kind: type[_Model], data: bytes) -> _Model:
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        told = " ".join(explain(error).split())
        raise wire.refuse(told if len(told) <= _TOLD else f"{told[:_TOLD]}...") from None


def _too_many(limit: str) -> SessionRefusal:
    """Passes by itself: an agent must not take it for the end of its sequence, as it does a 413."""
    return SessionRefusal(Refusal.TOO_MANY, f"session has {limit}, the limit")


def _storing() -> SessionRefusal:
    return SessionRefusal(Refusal.SEALED, "the session takes no more turns: its samples are being stored")


async def _end(turns: set[asyncio.Task[Turn]]) -> None:
    """Wait for the turns that are being sampled; what takes too long is cancelled."""
    if turns:
        _ended, late = await asyncio.wait(turns, timeout=STORE_WAITS_S)
        for turn in late:
            turn.cancel()
        if late:
            await asyncio.wait(late)


def _check_key(key: str, session: Session) -> None:
    """Only the place the layout gives this attempt's samples: a token holder cannot overwrite or plant anything."""
    found = _KEY.fullmatch(key)
    attempt_id = session.spec.attempt_id
    if not found or key != merged_key(found[1], int(found[2]), int(found[3]), attempt_id):
        raise wire.refuse(
            f"key {key[:200]!r} is not RUN/steps/STEP/merged/WAVE/{attempt_id}.msgpack, the place of this attempt"
        )


def _write(store: ObjectStore, held: SessionSnapshot, key: str, pick: Pick) -> SampleRef:
    """Merge and write once; an object that is there already must be this very one."""
    samples = merge(held, pick)
    data = encode_samples(samples)
    try:
        conflict = not store.put_once(key, data) and store.get(key) != data
    except KeyError:
        raise StoreUnavailable(f"object {key} was there a moment ago and is gone") from None
    if conflict:
        raise SessionRefusal(Refusal.CONFLICT, f"object {key} exists and holds something else")
    digest = hashlib.sha256(data).hexdigest()
    return SampleRef(key, digest, len(data), tuple(LeafCounts.of(sample) for sample in samples))


def _encode(held: SessionSnapshot, pick: Pick, as_json: bool) -> bytes:
    samples = merge(held, pick)
    if not as_json:
        return encode_samples(samples)
    return orjson.dumps({"samples": [sample.to_wire() for sample in samples]}, option=orjson.OPT_SERIALIZE_NUMPY)


def _row(held: Held, now_s: float) -> dict[str, Any]:
    session = held.session
    return {
        "session_id": session.session_id,
        "attempt_id": session.spec.attempt_id,
        "mode": session.spec.mode,
        "turns": len(session.turns),
        "tokens": session.head.end if session.head else 0,
        "sampled_tokens": session.sampled_tokens,
        "held_bytes": session.held_bytes,
        "in_flight": held.in_flight,
        "idle_s": round(now_s - held.last_used_s, 1),
        "sealed": session.sealed,
        "stored": held.stored.key if held.stored else None,
    }


async def _evict_forever(registry: Registry) -> None:
    while True:
        await asyncio.sleep(min(_EVICT_EVERY_S, registry.limits.idle_ttl_s / 2))
        gone = registry.evict_idle()
        if gone:
            log.info("evicted %d idle sessions", gone)
