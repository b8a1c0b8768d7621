"""The trainer over HTTP: every answer but /health comes from the main thread of rank 0, one command at a time.

A request that equals one in progress joins it. An error that the code does not expect ends the process.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError

from rl360.config.run import explain
from rl360.errors import BadInput, CorruptObject, ReplayMismatch, Rl360Error, StoreUnavailable, WitnessDisagrees
from rl360.training.director import Conflict, Director, ExportBody, StepBody, UnknownRun
from rl360.weights.messages import ChecksumRequest, PushPlan

log = logging.getLogger("rl360.training")

_STATUS: tuple[tuple[type[Rl360Error], int], ...] = (
    (UnknownRun, 404),
    (Conflict, 409),
    (CorruptObject, 422),
    (ReplayMismatch, 422),
    (WitnessDisagrees, 422),
    (StoreUnavailable, 503),
    (BadInput, 400),
)
_MAX_BODY_BYTES = 16 << 20


class Commands:
    """Requests on their way to rank 0's main thread. Equal requests share one answer."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[str, Callable[[], Any], Future[Any]]] = queue.Queue()
        self._open: dict[str, Future[Any]] = {}
        self._lock = threading.Lock()

    def submit(self, key: str, work: Callable[[], Any]) -> Future[Any]:
        with self._lock:
            held = self._open.get(key)
            if held is not None:
                return held
            future: Future[Any] = Future()
            future.set_running_or_notify_cancel()  # a client that leaves does not undo the work
            self._open[key] = future
        self._queue.put((key, work, future))
        return future

    def run_one(self) -> None:
        """Wait for a request and answer it. Errors that are not ours end the process."""
        key, work, future = self._queue.get()
        try:
            answer = work()
        except Rl360Error as error:
            log.warning("%s: %s", key[:80], error)
            self._close(key)
            future.set_exception(error)
        else:
            self._close(key)
            future.set_result(answer)

    def _close(self, key: str) -> None:
        with self._lock:
            del self._open[key]


def _json(status: int, value: Any) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


async def _body(request: Request, model: type[BaseModel]) -> Any:
    data = await request.body()
    if len(data) > _MAX_BODY_BYTES:
        raise BadInput(f"body of {len(data)} bytes is over the limit of {_MAX_BODY_BYTES}")
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise BadInput(f"{request.method} {request.url.path}: {explain(error)}") from None


def create_app(director: Director, commands: Commands, token: str, health: dict[str, Any]) -> FastAPI:
    """Routes only: every answer comes from the command loop, except /health."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    async def ask(key: str, work: Callable[[], Any]) -> Response:
        answer = await asyncio.shield(asyncio.wrap_future(commands.submit(key, work)))
        return _json(200, answer.model_dump(mode="json") if isinstance(answer, BaseModel) else answer)

    @app.middleware("http")
    async def authorise(request: Request, call_next: Any) -> Response:
        given = request.headers.get("authorization", "").encode("utf-8", "replace")
        if request.url.path != "/health" and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            return _json(401, {"error": "send Authorization: Bearer <token> of this deployment"})
        return await call_next(request)

    @app.exception_handler(Rl360Error)
    async def refused(_request: Request, error: Rl360Error) -> Response:
        status = next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
        return _json(status, {"error": str(error), "type": type(error).__name__})

    @app.get("/health")
    async def read_health() -> Response:
        at = director.replica.at
        return _json(200, health | {"run": at.run if at else None, "next_step": at.next_step if at else None})

    @app.get("/runs/{run}")
    async def open_run(run: str) -> Response:
        return await ask(f"open {run}", lambda: director.open_run(run))

    @app.put("/steps/{step}")
    async def put_step(step: int, request: Request) -> Response:
        body: StepBody = await _body(request, StepBody)
        return await ask(f"step {step} {body.model_dump_json()}", lambda: director.put_step(step, body))

    @app.post("/runs/{run}/checkpoints/{step}")
    async def checkpoint(run: str, step: int) -> Response:
        return await ask(f"checkpoint {run} {step}", lambda: director.checkpoint(run, step))

    @app.post("/runs/{run}/export")
    async def export(run: str, request: Request) -> Response:
        body: ExportBody = await _body(request, ExportBody)
        return await ask(f"export {run} {body.model_dump_json()}", lambda: director.export(run, body))

    def push(what: str, kind: type[BaseModel], act: Callable[[Any], Any]) -> None:
        @app.post(f"/push/{what}")
        async def answer(request: Request) -> Response:
            body = await _body(request, kind)
            return await ask(f"{what} {body.model_dump_json()}", lambda: act(body))

    push("checksums", ChecksumRequest, lambda body: director.checksums(body))
    push("prepare", PushPlan, lambda plan: director.prepare(plan))
    push("transfer", PushPlan, lambda plan: director.transfer(plan))

    return app
