"""An engine's own door: who may change it, and when it may generate. ASGI middleware around SGLang's app.

A push sends its epoch with every control call (`X-RL360-Epoch`); the door remembers the highest and refuses lower ones
with 409: a pusher that was taken over and wakes up later changes nothing, whatever the gateway or the store believe.
Generation is refused with 503 unless the push that confirmed the weights admitted the engine, and again once it is
barred or a later epoch begins to change it. Requests that arrive between that epoch's pause and its end wait here: they
go on when the engine is admitted and are refused when it is barred; no more than `hold_requests` wait, none longer than
`hold_s`. Requests in flight are not touched.
An engine that no push ever admitted or barred generates as if it had no door; `strict`, which the engines are that
rl360 starts, refuses until admitted, and refuses control calls without an epoch. All is forgotten when the engine
restarts: it has other weights then.

`GET /rl360/door` says what it knows; `POST /rl360/admit {"epoch", "version"}`; `POST /rl360/bar {"epoch", "reason"}`;
`POST /rl360/pull {"epoch", "folder", "version", "base_version"}` fetches and applies files (rl360.engines.pull).
All but probes and facts is for callers with the deployment's bearer token (the gateway sends it), where the engine has
one; without `strict`, or without a token, for callers on this host.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Callable, MutableMapping
from enum import StrEnum
from typing import Any

import orjson
from pydantic import Field, ValidationError

from rl360.engines.client import EPOCH_HEADER
from rl360.engines.launchers.options import HOLD_REQUESTS, HOLD_S
from rl360.engines.pull import Puller
from rl360.errors import BadInput, CorruptObject, Rl360Error, ServiceError, StoreUnavailable
from rl360.store.data import Data
from rl360.weights.delta import WrongBase

log = logging.getLogger("rl360.door")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PAUSE, RESUME = "/pause_generation", "/continue_generation"
OPEN = frozenset(
    (
        "/",
        "/ping",
        "/health",
        "/ready",
        "/metrics",
        "/metrics/",
        "/v1/models",
        "/v1/loads",
        "/get_load",
        "/loads",
        "/version",
        "/server_info",
        "/get_server_info",
        "/model_info",
        "/get_model_info",
    )
)
# what a push calls: with an epoch, admitted or not. An SGLang without one of them is none that this door knows
CONTROL = frozenset(
    (
        "/pause_generation",
        "/continue_generation",
        "/begin_weight_update",
        "/end_weight_update",
        "/update_weights_from_disk",
        "/update_weights_from_distributed",
        "/update_weights_from_tensor",
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/update_weight_version",
        "/weights_checker",
        "/flush_cache",
        "/abort_request",
        "/remote_instance_transfer_engine_info",
    )
)
_GENERATES = frozenset(
    ("/generate", "/health_generate", "/tokenize", "/detokenize")
)  # with all of /v1/: for whom an engine is admitted
_KEEPS_SERVING = frozenset((PAUSE, "/rl360/pull"))  # a later epoch's calls that alone do not end the admission
_EPOCH = EPOCH_HEADER.lower().encode()
_BODY_BYTES = 64 << 10
_RETRY_AFTER_S = 5  # told with every 503


class Phase(StrEnum):
    SERVING = "serving"
    HELD = "held"  # an epoch has paused it and not ended: requests wait
    BARRED = "barred"


class _Body(Data):
    epoch: int = Field(ge=1)


class AdmitBody(_Body):
    version: str = Field(min_length=1, max_length=200)


class BarBody(_Body):
    reason: str = Field(min_length=1, max_length=2000)


class PullBody(_Body):
    folder: str = Field(pattern=r"^(/|s3://)")
    version: str = Field(min_length=1, max_length=200)
    base_version: str | None = None


class Refused(Exception):
    """Answered with a status and `{"error": ...}`."""

    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.status = status


class Doorkeeper:
    """All that a door remembers; one an engine, used on its event loop alone."""

    def __init__(
        self,
        puller: Puller,
        *,
        strict: bool = False,
        token: str | None = None,
        hold_requests: int = HOLD_REQUESTS,
        hold_s: float = HOLD_S,
    ) -> None:
        self.puller, self.strict = puller, strict
        self.hold_requests, self.hold_s = hold_requests, hold_s
        self.waiting = 0
        self.counts: Counter[str] = Counter()  # of requests: held, and refused as barred, too_many, too_long, left
        self.bearer = None if token is None else b"Bearer " + token.encode()
        self.epoch = 0
        self.admitted_epoch = 0
        self.admitted_version: str | None = None
        self.governed = strict  # whether pushes say when it generates
        self.phase = Phase.BARRED if strict else Phase.SERVING
        self.reason = "no push has admitted this engine yet" if strict else ""
        self.incarnation = uuid.uuid4().hex[:16]
        self.started_at = time.time()
        self._moved = asyncio.Event()

    def facts(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "admitted_version": self.admitted_version,
            "incarnation": self.incarnation,
            "started_at": self.started_at,
            "phase": self.phase,
            "reason": self.reason,
            "strict": self.strict,
            "waiting": self.waiting,
            "counts": dict(self.counts),
        }

    def _move(self, phase: Phase, reason: str = "") -> None:
        if phase is not Phase.SERVING:
            self.admitted_version = None
        self.phase, self.reason = phase, reason
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def enter(self, path: str, epoch: int) -> None:
        """A control call of `epoch`; `Refused` when a later one has begun."""
        if epoch < self.epoch:
            raise Refused(409, f"epoch {epoch} is over: {self.epoch} has begun")
        self.epoch = epoch
        if self.phase is Phase.SERVING and self.governed and epoch > self.admitted_epoch:
            if path == PAUSE:
                self._move(Phase.HELD, f"epoch {epoch} has paused it")
            elif path not in _KEEPS_SERVING:
                self._move(Phase.BARRED, f"epoch {epoch} is changing it")
        elif self.phase is Phase.HELD and path == RESUME:
            # whatever it holds now, nobody confirmed it
            self._move(Phase.BARRED, f"epoch {epoch} resumed it before it was admitted")

    def admit(self, body: AdmitBody) -> None:
        self.enter("/rl360/admit", body.epoch)
        self.governed = True
        self._move(Phase.SERVING)
        self.admitted_epoch, self.admitted_version = body.epoch, body.version

    def bar(self, body: BarBody) -> None:
        self.enter("/rl360/bar", body.epoch)
        self.governed = True
        self._move(Phase.BARRED, body.reason)

    async def may_generate(self, client: _Client) -> None:
        """Returns when a request may go on to the engine; `Refused` when it may not."""
        if self.phase is Phase.HELD:
            await self._hold(client)
        if self.phase is Phase.BARRED:
            raise self._not_serving("barred", "")

    async def _hold(self, client: _Client) -> None:
        """Wait for the end of the push, within the limits. A client that leaves gives up its place."""
        if self.waiting >= self.hold_requests:
            raise self._not_serving("too_many", f", and {self.waiting} requests wait, the limit (--hold-requests)")
        self.counts["held"] += 1
        self.waiting += 1
        gone = asyncio.ensure_future(client.left())
        try:
            async with asyncio.timeout(self.hold_s):
                while self.phase is Phase.HELD and not gone.done():
                    moved = asyncio.ensure_future(self._moved.wait())
                    await asyncio.wait({gone, moved}, return_when=asyncio.FIRST_COMPLETED)
                    moved.cancel()
        except TimeoutError:
            raise self._not_serving("too_long", f"; waited {self.hold_s:g} s, the limit (--hold-s)") from None
        finally:
            self.waiting -= 1
            gone.cancel()  # it waits for the next message, and takes none with it
        if gone.done() and self.phase is Phase.HELD:
            raise self._not_serving("left", "; the client left")

    def _not_serving(self, kind: str, why: str) -> Refused:
        self.counts[kind] += 1
        return Refused(503, f"not serving: {self.reason}{why}")

    def check_caller(self, scope: Scope) -> None:
        """`Refused` unless the caller has the token, or is on this host where that is enough."""
        if self.bearer is None or not self.strict:
            host = (scope.get("client") or ("",))[0]
            if host.startswith("127.") or host in ("::1", "::ffff:127.0.0.1"):
                return
        if self.bearer is None:
            raise Refused(401, "start the engine with RL360_TOKEN_FILE to serve other hosts")
        for name, value in scope["headers"]:
            if name == b"authorization" and hmac.compare_digest(value, self.bearer):
                return
        raise Refused(401, "send Authorization: Bearer <token> of this deployment ($RL360_HOME/token)")


class _Client:
    """What a client sends. `left` reads ahead, for the engine, until the client has gone."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._ahead: deque[MutableMapping[str, Any]] = deque()

    async def left(self) -> None:
        while not self._ahead or not self._ahead[-1]["type"].endswith(".disconnect"):
            self._ahead.append(await self._receive())

    async def receive(self) -> MutableMapping[str, Any]:
        return self._ahead.popleft() if self._ahead else await self._receive()


class Door:
    """The middleware. A path is open, generation, or a control call; one not known here has to pass as both."""

    def __init__(self, app: App, keeper: Doorkeeper) -> None:
        self.app, self.keeper = app, keeper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply, client = None, _Client(receive)
        if scope["type"] != "lifespan" and scope["path"] not in OPEN:
            path = scope["path"]
            generates = path in _GENERATES or path.startswith("/v1/")
            try:
                self.keeper.check_caller(scope)
                if not (generates and self.keeper.phase is Phase.SERVING):
                    reply = await self._pass(scope, client, generates)
            except Refused as refused:
                await _answer(scope, send, refused.status, {"error": str(refused)})
                return
        if reply is None:
            await self.app(scope, client.receive, send)
        else:
            await _answer(scope, send, 200, reply)

    async def _pass(self, scope: Scope, client: _Client, generates: bool) -> dict[str, Any] | None:
        """None: SGLang is to answer. Else the door's own answer."""
        path, keeper = scope["path"], self.keeper
        if path.startswith("/rl360/"):
            return await self._own(scope.get("method", ""), path, client.receive)
        if not generates:
            epoch = _epoch_of(scope)
            if epoch is not None:
                keeper.enter(path, epoch)
            elif keeper.strict:
                raise Refused(409, f"{path} is an act of a push: send its {EPOCH_HEADER}")
        if path not in CONTROL:
            await keeper.may_generate(client)
        return None

    async def _own(self, method: str, path: str, receive: Receive) -> dict[str, Any]:
        keeper = self.keeper
        if (method, path) == ("GET", "/rl360/door"):
            return keeper.facts()
        if method != "POST" or path not in ("/rl360/admit", "/rl360/bar", "/rl360/pull"):
            raise Refused(404, f"no such call: {method} {path}")
        data = await _read(receive)
        try:
            if path == "/rl360/admit":
                keeper.admit(AdmitBody.model_validate_json(data))
            elif path == "/rl360/bar":
                keeper.bar(BarBody.model_validate_json(data))
            else:
                return await self._pull(PullBody.model_validate_json(data))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "body"
            raise Refused(400, f"{path}: {where}: {first['msg']}") from None
        return keeper.facts()

    async def _pull(self, body: PullBody) -> dict[str, Any]:
        self.keeper.enter("/rl360/pull", body.epoch)
        keep = {version for version in (self.keeper.admitted_version, body.base_version) if version}
        try:
            pulled = await self.keeper.puller.pull(body.folder, body.version, body.base_version, keep)
        except Rl360Error as error:
            kinds = ((WrongBase, 409), (BadInput, 400), (CorruptObject, 422), (StoreUnavailable, 503))
            raise Refused(
                next((status for kind, status in kinds if isinstance(error, kind)), 500), str(error)
            ) from None
        return {"dir": pulled.dir, "bytes": pulled.bytes, "seconds": pulled.seconds}


def _epoch_of(scope: Scope) -> int | None:
    given = next((value for name, value in scope["headers"] if name == _EPOCH), None)
    if given is None:
        return None
    if not given.isdigit() or len(given) > 15 or int(given) < 1:
        raise Refused(400, f"{EPOCH_HEADER} {given[:40].decode('latin-1')!r} is not an epoch: a number from 1")
    return int(given)


async def _read(receive: Receive) -> bytes:
    data, more = b"", True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise Refused(400, "the connection closed inside the body")
        data += message.get("body", b"")
        more = message.get("more_body", False)
        if len(data) > _BODY_BYTES:
            raise Refused(413, f"body over the limit of {_BODY_BYTES} bytes")
    return data


async def _answer(scope: Scope, send: Send, status: int, value: dict[str, Any]) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1013, "reason": str(value.get("error", ""))[:120]})
        return
    body = orjson.dumps(value)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"retry-after", str(_RETRY_AFTER_S).encode())] if status == 503 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def install(server_args: Any, keeper: Doorkeeper) -> None:
    """Put the door around SGLang's app; `ServiceError` when this SGLang, started this way, would serve past it."""
    import sglang

    version = getattr(sglang, "__version__", "?")
    try:
        from sglang.srt.arg_groups.overrides import resolving_view
        from sglang.srt.entrypoints.http_server import app
        from sglang.srt.environ import envs

        server_args.resolve_once()
        told = resolving_view(server_args)
        names = ("grpc_mode", "smg_grpc_mode", "grpc_port", "encoder_only", "use_ray", "fastapi_root_path")
        past = [name for name in names if getattr(told, name)]
        past += ["tokenizer_worker_num"] if told.tokenizer_worker_num != 1 else []
        past += ["SGLANG_RUST_SERVER"] if envs.SGLANG_RUST_SERVER.get() else []
        paths = {getattr(route, "path", "") for route in app.routes}
        built = app.middleware_stack is not None
    except (ImportError, AttributeError) as error:
        raise ServiceError(f"no door for SGLang {version}: {error}; rl360's door is made for 0.5.23") from None
    if past:
        raise ServiceError(
            f"SGLang with {', '.join(past)} serves past the engine's door; start it without, as one HTTP process"
        )
    missing = sorted((CONTROL | {"/generate"}) - paths)
    if missing or built:
        why = f"has no {missing[0]}" if missing else "has built its app already"
        raise ServiceError(f"no door for SGLang {version}: it {why}; rl360's door is made for 0.5.23")
    app.add_middleware(Door, keeper=keeper)
