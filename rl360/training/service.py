"""The trainer service: `torchrun ... -m rl360.training.service --host H --port P`.

Rank 0 serves HTTP from a thread; the main thread of every rank runs commands, one at a time, in the same order. A
request that equals one in progress joins it. Ranks wait for commands blocked in a socket, not spinning. An error that
the code does not expect ends the process: whoever started it starts it again, and it rebuilds its state from the store.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import datetime
import hmac
import logging
import os
import queue
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import orjson
import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError

from rl360.config.run import explain
from rl360.config.services import load_services, service_token
from rl360.errors import BadInput, CorruptObject, ReplayMismatch, Rl360Error, StoreUnavailable, WitnessDisagrees
from rl360.store.object_store import ObjectStore
from rl360.training.director import Conflict, Director, ExportBody, StepBody, UnknownRun
from rl360.training.megatron import parallel
from rl360.training.megatron.model import Layout
from rl360.training.replica import Command, Replica
from rl360.weights.messages import ChecksumRequest, PushPlan
from rl360.weights.transports import open_lanes

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
_WAIT_FOR_COMMANDS = datetime.timedelta(days=365)  # an idle trainer is not a stuck one
_MAX_BODY_BYTES = 16 << 20
_LISTEN_DEADLINE_S = 15.0


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

    @app.post("/push/checksums")
    async def checksums(request: Request) -> Response:
        body: ChecksumRequest = await _body(request, ChecksumRequest)
        return await ask(f"checksums {body.model_dump_json()}", lambda: director.checksums(body))

    @app.post("/push/prepare")
    async def prepare(request: Request) -> Response:
        plan: PushPlan = await _body(request, PushPlan)
        return await ask(f"prepare {plan.model_dump_json()}", lambda: director.prepare(plan))

    @app.post("/push/transfer")
    async def transfer(request: Request) -> Response:
        plan: PushPlan = await _body(request, PushPlan)
        return await ask(f"transfer {plan.model_dump_json()}", lambda: director.transfer(plan))

    return app


def _follow(replica: Replica, group: Any) -> None:
    """Ranks above 0: execute what rank 0 sends until the process ends."""
    while True:
        held: list[Any] = [None]
        torch.distributed.broadcast_object_list(held, src=0, group=group)
        try:
            replica.execute(held[0])
        except Rl360Error as error:  # rank 0 raised the same and answers the request
            log.warning("rank %d: %s", torch.distributed.get_rank(), error)


def _listen(app: FastAPI, host: str, port: int) -> threading.Thread:
    server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level="warning", access_log=False))
    thread = threading.Thread(target=server.run, name="http", daemon=True)
    thread.start()
    until = time.monotonic() + _LISTEN_DEADLINE_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > until:
            raise Rl360Error(f"cannot listen on {host}:{port}; is the port taken?")
        time.sleep(0.05)
    return thread


def _die_with_parent() -> None:
    """torchrun killed by SIGKILL would leave its ranks running, holding the port and a state of their own."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() == 1:
            raise SystemExit("rl360 trainer: torchrun is already gone")


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torchrun ... -m rl360.training.service",
        description="Train runs step by step, each step once.",
        epilog="example: torchrun --nproc-per-node 1 -m rl360.training.service --port 13400",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--address", default="127.0.0.1", help="where engines reach this host's ranks during a push")
    parser.add_argument("--p2p-wire", default="gloo", choices=("gloo", "rdma"), help="what carries pushes by p2p")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel size")
    parser.add_argument("--ep", type=int, default=1, help="expert parallel size")
    parser.add_argument("--sequence-parallel", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Serve until stopped; 2 on a bad option, token or services file."""
    options = parse_options(argv)
    _die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        services, token = load_services(), service_token()
        layout = Layout(options.tp, options.pp, options.ep, sequence_parallel=options.sequence_parallel)
        torch.use_deterministic_algorithms(True)  # replay must give the same bits
        torch.utils.deterministic.fill_uninitialized_memory = False
        parallel.enter(layout)
        incarnation = os.environ.get("RL360_INCARNATION") or uuid.uuid4().hex
        lanes = open_lanes(options.address, options.p2p_wire)
        replica = Replica(ObjectStore.from_services(services), layout, incarnation, lanes)
        if torch.distributed.get_world_size() > 1:
            waiting = torch.distributed.new_group(backend="gloo", timeout=_WAIT_FOR_COMMANDS)
            if torch.distributed.get_rank() != 0:
                _follow(replica, waiting)

        def everyone(command: Command) -> Any:
            if torch.distributed.get_world_size() > 1:
                torch.distributed.broadcast_object_list([command], src=0, group=waiting)
            return replica.execute(command)

        commands = Commands()
        director = Director(replica, services, everyone, options.address)
        health = {
            "status": "ok",
            "service": "trainer",
            "incarnation": replica.incarnation,
            "pid": os.getpid(),
            "layout": replica.layout_name(),
        }
        _listen(create_app(director, commands, token, health), options.host, options.port)
    except (Rl360Error, OSError) as error:
        print(f"rl360 trainer: {error}", file=sys.stderr)
        return 2
    log.info("trainer %s ready on %s:%d (%s)", replica.incarnation, options.host, options.port, replica.layout_name())
    while True:
        commands.run_one()


if __name__ == "__main__":
    sys.exit(main())
