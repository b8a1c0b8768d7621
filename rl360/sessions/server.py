"""The session server: `python -m rl360.sessions.server --host H --port P --upstream URL --model DIR`.

One process, one event loop, many sessions. `POST /sessions` and everything else but `/health` ask for the bearer
token; the agent's path `/sessions/{id}/v1/...` is authorised by the unguessable id alone. Long renders, merging and
packing run in threads; the state itself is touched by the event loop only. A client that goes away, a failed or a late
engine changes nothing. Errors are `{"error": {message, type, code}}` with the statuses of `refusals.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import logging
import os
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from rl360.config.services import service_token
from rl360.errors import BadInput, Rl360Error
from rl360.sessions.core import PreparedTurn, Sampling, Session, SessionSpec, Turn
from rl360.sessions.families.base import ChatTemplate
from rl360.sessions.families.registry import load_template
from rl360.sessions.merge import merge, snapshot
from rl360.sessions.refusals import Refusal, SessionRefusal
from rl360.sessions.registry import Limits, Registry
from rl360.sessions.upstream import Upstream
from rl360.sessions.wire import ChatRequest, error_body, parse_chat_request, reply_body, reply_sse
from rl360.store.codec import pack

log = logging.getLogger("rl360.sessions")

_RENDER_IN_THREAD_BYTES = 64 << 10
_EVICT_EVERY_S = 15.0
CLIENT_GONE = 499  # nobody reads this reply; the status is for logs
_JSON = "application/json"
_Id = Field(min_length=1, max_length=200)


class SamplingBody(BaseModel):
    """Pinned sampling parameters; all must be stated."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    temperature: float = Field(ge=0.0, le=2.0)
    top_p: float = Field(gt=0.0, le=1.0)
    top_k: int = Field(ge=-1, le=1 << 30)
    max_new_tokens: int = Field(ge=1, le=1 << 20)

    @field_validator("top_k")
    @classmethod
    def _not_zero(cls, value: int) -> int:
        if value == 0:
            raise ValueError("top_k 0 samples nothing; use -1 for off, or at least 1")
        return value


class CreateBody(BaseModel):
    """Body of `POST /sessions`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    attempt_id: str = _Id
    group_id: str = _Id
    task_id: str = _Id
    sampling: SamplingBody
    max_seq_len: int = Field(ge=2, le=1 << 24)
    expected_weight_version: str | None = None

    def to_spec(self) -> SessionSpec:
        return SessionSpec(
            attempt_id=self.attempt_id,
            group_id=self.group_id,
            task_id=self.task_id,
            sampling=Sampling(**self.sampling.model_dump()),
            max_seq_len=self.max_seq_len,
            expected_weight_version=self.expected_weight_version,
        )


@dataclass
class SessionService:
    """What the routes share. `refused` counts replies by error code since the process started."""

    template: ChatTemplate
    registry: Registry
    upstream: Upstream
    upstream_url: str
    token: str
    incarnation: str = field(default_factory=lambda: os.environ.get("RL360_INCARNATION") or uuid.uuid4().hex)
    turns: int = 0
    disconnects: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def health(self) -> dict[str, Any]:
        return {
            "status": "ok",
            "service": "sessions",
            "incarnation": self.incarnation,
            "pid": os.getpid(),
            "family": self.template.family,
            "upstream": self.upstream_url,
            "sessions": len(self.registry),
            "created": self.registry.created,
            "evicted": self.registry.evicted,
            "in_flight": self.registry.in_flight,
            "held_bytes": self.registry.total_bytes,
            "turns": self.turns,
            "disconnects": self.disconnects,
            "refused": dict(self.refused),
        }

    def authorise(self, request: Request) -> None:
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {self.token}".encode()):
            raise SessionRefusal(Refusal.UNAUTHORIZED, "send Authorization: Bearer <token> of this deployment")

    async def chat(self, session_id: str, request: Request) -> Response:
        """One turn, from the agent's body to its reply."""
        with self.registry.using(session_id) as session:
            chat = parse_chat_request(await self.read_body(request), session.spec.sampling)
            prepared = await self._prepare(session, chat)
            call = self.upstream.generate(session_id, session.spec.sampling, prepared)
            completion = await _unless_disconnected(request, call)
            if completion is None:
                self.disconnects += 1
                return Response(status_code=CLIENT_GONE)
            turn = session.commit(prepared, completion, chat.ignored)
            self.turns += 1
            return _reply(session, turn, chat)

    async def _prepare(self, session: Session, chat: ChatRequest) -> PreparedTurn:
        plan = session.plan(chat.messages, chat.tools)
        if sum(len(message.content) for message in plan.new_messages) > _RENDER_IN_THREAD_BYTES:
            delta = await asyncio.to_thread(session.render, plan)
        else:
            delta = session.render(plan)
        return session.assemble(plan, delta)

    async def read_body(self, request: Request) -> bytes:
        """The body, never more than the limit in memory."""
        limit = self.registry.limits.body_bytes
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise SessionRefusal(Refusal.OVER_BUDGET, f"request body is over {limit} bytes, the limit")
            parts.append(part)
        return b"".join(parts)


def _reply(session: Session, turn: Turn, chat: ChatRequest) -> Response:
    if chat.stream:
        # generated as a whole before it is recorded; the events then leave in one write
        events = reply_sse(session, turn, chat.model, chat.include_usage)
        return Response(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
    return Response(reply_body(session, turn, chat.model), media_type=_JSON)


async def _unless_disconnected(request: Request, call: Coroutine[Any, Any, Any]) -> Any:
    """The result of `call`, or None when the client went away first: then `call` is cancelled and its end awaited."""
    work = asyncio.ensure_future(call)
    gone = asyncio.ensure_future(request.receive())  # the body is read: the next message is the disconnect
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        return None
    finally:
        gone.cancel()
        if not work.done():
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError, SessionRefusal):
                await work


def create_app(service: SessionService) -> FastAPI:
    """The routes over one service; `server.main` and tests both use it."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        evictor = asyncio.create_task(_evict_forever(service.registry))
        yield
        evictor.cancel()
        await service.upstream.aclose()

    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)

    @app.get("/health")
    async def health() -> Response:
        return Response(orjson.dumps(service.health()), media_type=_JSON)

    @app.post("/sessions")
    async def create(request: Request) -> Response:
        service.authorise(request)
        data = await service.read_body(request)
        try:
            spec = CreateBody.model_validate_json(data).to_spec()
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "body"
            raise SessionRefusal(Refusal.BAD_BODY, f"{where}: {first['msg']} (of {error.error_count()})") from None
        session_id = service.registry.create(spec).session_id
        base_url = f"{str(request.base_url).rstrip('/')}/sessions/{session_id}/v1"
        return Response(orjson.dumps({"session_id": session_id, "base_url": base_url}), media_type=_JSON)

    async def chat(request: Request) -> Response:
        return await service.chat(request.path_params["session_id"], request)

    # the hot path is a plain Starlette route: FastAPI's parameter solving would cost as much as the session itself
    app.add_route("/sessions/{session_id}/v1/chat/completions", chat, methods=["POST"])

    @app.get("/sessions/{session_id}")
    async def describe(session_id: str, request: Request) -> Response:
        service.authorise(request)
        session = service.registry.get(session_id)
        return Response(orjson.dumps(session.describe()), media_type=_JSON)

    @app.get("/sessions/{session_id}/merged")
    async def merged(session_id: str, request: Request) -> Response:
        service.authorise(request)
        held = snapshot(service.registry.get(session_id))
        as_json = _JSON in request.headers.get("accept", "")
        data = await asyncio.to_thread(lambda: _encode(merge(held).to_wire(), as_json))
        return Response(data, media_type=_JSON if as_json else "application/msgpack")

    @app.delete("/sessions/{session_id}")
    async def delete(session_id: str, request: Request) -> Response:
        service.authorise(request)
        service.registry.delete(session_id)
        return Response(status_code=204)

    _handle_errors(app, service)
    return app


def _encode(wire: dict[str, Any], as_json: bool) -> bytes:
    return orjson.dumps(wire, option=orjson.OPT_SERIALIZE_NUMPY) if as_json else pack(wire)


def _handle_errors(app: FastAPI, service: SessionService) -> None:
    def answer(status: int, code: str, message: str, retry: bool) -> Response:
        service.refused[code] += 1
        headers = {} if retry else {"x-should-retry": "false"}
        return Response(error_body(code, message, status), status, headers, media_type=_JSON)

    @app.exception_handler(SessionRefusal)
    async def refused(_request: Request, error: SessionRefusal) -> Response:
        if error.status >= 500:
            log.warning("%s: %s", error.code, error)
        return answer(error.status, str(error.code), str(error), error.retry)

    @app.exception_handler(BadInput)
    async def bad_input(_request: Request, error: BadInput) -> Response:
        return answer(400, str(Refusal.BAD_BODY), str(error), False)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        code = {404: str(Refusal.NOT_FOUND), 405: str(Refusal.METHOD)}.get(error.status_code, "http_error")
        return answer(error.status_code, code, f"{request.method} {request.url.path[:80]}: {error.detail}", False)

    @app.exception_handler(ClientDisconnect)
    async def disconnected(_request: Request, _error: ClientDisconnect) -> Response:
        service.disconnects += 1
        return Response(status_code=CLIENT_GONE)


async def _evict_forever(registry: Registry) -> None:
    while True:
        await asyncio.sleep(min(_EVICT_EVERY_S, registry.limits.idle_ttl_s / 2))
        gone = registry.evict_idle()
        if gone:
            log.info("evicted %d idle sessions", gone)


def build_service(options: argparse.Namespace) -> SessionService:
    """Load the template, read the token, make the client: everything that can be refused before listening."""
    template = load_template(options.model)
    limits = Limits(idle_ttl_s=options.idle_ttl_s, total_bytes=options.max_bytes)
    return SessionService(
        template=template,
        registry=Registry(template, limits),
        upstream=Upstream(options.upstream, template.vocab_size, template.stop_ids[0], options.deadline_s),
        upstream_url=options.upstream,
        token=_read_token(options.token_file),
    )


def _read_token(path: Path | None) -> str:
    if path is not None:
        os.environ["RL360_TOKEN_FILE"] = str(path)
    return service_token()


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """Command-line options of one session server."""
    parser = argparse.ArgumentParser(
        prog="python -m rl360.sessions.server",
        description="Hold agent sessions as token ids and forward each turn to the gateway.",
        epilog="example: python -m rl360.sessions.server --port 13200 --upstream http://127.0.0.1:13100 --model DIR",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--upstream", required=True, help="URL of the gateway (or of one engine)")
    parser.add_argument(
        "--model", required=True, help="directory with tokenizer.json, chat_template.jinja, config.json"
    )
    parser.add_argument("--token-file", type=Path, help="0600 file with the bearer token (default: $RL360_TOKEN_FILE)")
    parser.add_argument("--deadline-s", type=float, default=600.0, help="of one generation (default 600)")
    parser.add_argument("--idle-ttl-s", type=float, default=7200.0, help="forget sessions unused this long")
    parser.add_argument("--max-bytes", type=int, default=4 << 30, help="memory of all sessions together")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Serve until stopped; 2 on a bad model directory, token or option."""
    options = parse_options(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
    try:
        service = build_service(options)
    except (Rl360Error, OSError) as error:
        print(f"rl360 sessions: {error}", file=sys.stderr)
        return 2
    uvicorn.run(
        create_app(service),
        host=options.host,
        port=options.port,
        loop="uvloop",
        access_log=False,
        log_level="warning",
        timeout_keep_alive=120,  # an agent thinks nothing of a minute between two turns
        timeout_graceful_shutdown=5,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
