"""Engines and a gateway as asyncio HTTP servers with faults, cheap enough for hundreds of pushes in one process.

An engine keeps what a real one keeps (tensors by name, version, pause, update session, groups, KV cache, running
requests) and stands for a real `sleep` process, so that fencing has something to end and to prove. The real ones are
used in tests/contract and tests/chaos. What they see is told to their `World` (push_world.py), which checks it.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import random
import socket
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl360.engines.door import OPEN, AdmitBody, BarBody, Doorkeeper, Phase, Refused
from rl360.engines.fleet import incarnation_of
from rl360.engines.processes import ProcessTree, boot_id, host_id, identify
from rl360.engines.pull import Puller
from rl360.weights.messages import TensorSpec
from rl360.weights.plan import engine_name

if TYPE_CHECKING:
    from tests.unit.push_world import World

RUN = "demo"
TOKEN = "token-of-the-fake-fleet"
LAYER = "model.layers.0"
TENSORS = tuple(
    TensorSpec(name=name, shape=(16, 8))
    for name in (
        "model.embed_tokens.weight",
        *(f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkv"),
        *(f"{LAYER}.mlp.experts.{n}.{part}_proj.weight" for n in range(2) for part in ("gate", "up", "down")),
    )
)
BASE = "base"  # what a freshly started engine holds
CHANGES = frozenset(
    (
        "/pause_generation",
        "/continue_generation",
        "/update_weight_version",
        "/flush_cache",
        "/abort_request",
        "/begin_weight_update",
        "/end_weight_update",
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/update_weights_from_distributed",
        "/rl360/admit",
        "/rl360/bar",
    )
)


_ports: dict[int, socket.socket] = {}  # those of this process; the name that each holds keeps other processes off


class Dropped(Exception):
    """The connection breaks without an answer."""


@functools.cache
def digest(parts: tuple[tuple[str, str], ...]) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def checksums_of(tensors: dict[str, str]) -> dict[str, str]:
    """Parameter -> checksum of an engine that holds these tensors (name -> content)."""
    parts: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(tensors):
        parts.setdefault(engine_name(name), []).append((name, tensors[name]))
    return {name: digest(tuple(held)) for name, held in parts.items()}


def whole(content: str) -> dict[str, str]:
    return {spec.name: content for spec in TENSORS}


def _unused_port() -> int:
    """Below those that the system gives to clients: it stays free while nobody listens there."""
    while True:
        port, held = random.randrange(18_000, 31_000), socket.socket(socket.AF_UNIX)
        try:
            held.bind(f"\0rl360-push-fakes-{port}")
        except OSError:
            held.close()
        else:
            _ports[port] = held
            return port


def _sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "600"], start_new_session=True)


class _Connection(asyncio.Protocol):
    """One keep-alive HTTP/1.1 connection with Content-Length bodies, as our own clients make them."""

    def __init__(self, owner: Server) -> None:
        self.owner, self.data = owner, bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.owner.connections.add(transport)

    def connection_lost(self, _error: Exception | None) -> None:
        self.owner.connections.discard(self.transport)

    def data_received(self, data: bytes) -> None:
        self.data += data
        while (end := self.data.find(b"\r\n\r\n")) >= 0:
            lines = bytes(self.data[:end]).decode("latin-1").split("\r\n")
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
            size = int(headers.get("content-length", "0"))
            if len(self.data) < end + 4 + size:
                return
            body = json.loads(self.data[end + 4 : end + 4 + size] or b"{}")
            del self.data[: end + 4 + size]
            method, path, _ = lines[0].split(" ", 2)
            self.owner.spawn(self.serve(method, path.partition("?")[0], headers, body))

    async def serve(self, method: str, path: str, headers: dict[str, str], body: dict[str, Any]) -> None:
        try:
            status, reply = await self.owner.answer(method, path, headers, body)
        except Dropped:
            self.transport.abort()
            return
        except Exception as error:  # a fake that breaks would look like an engine that does
            self.owner.world.violate(f"the fake itself failed: {error!r}")
            raise
        data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        head = f"HTTP/1.1 {abs(status)} X\r\ncontent-length: {len(data)}\r\n\r\n".encode()
        if status < 0:  # byte by byte, slower than anybody should wait, quicker than a read's deadline
            for byte in head:
                if self.transport.is_closing():
                    return
                self.transport.write(bytes([byte]))
                await asyncio.sleep(self.owner.world.deadline_s * 0.4)
        if not self.transport.is_closing():
            self.transport.write(head + data)


class Server:
    """Something that listens on a port of its own, and keeps the port over restarts."""

    world: World
    port: int = 0

    def __post_init__(self) -> None:
        self.connections: set[Any] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.listener: asyncio.Server | None = None
        self.kept = False  # its port is its own for good

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def listen(self) -> None:
        bound = None
        while bound is None:
            self.port = self.port or _unused_port()
            try:
                bound = socket.create_server(("127.0.0.1", self.port))
            except OSError:
                if self.kept:
                    raise
                self.port = 0
        self.kept = True
        self.listener = await asyncio.get_running_loop().create_server(lambda: _Connection(self), sock=bound)

    def hang_up(self) -> None:
        """Refuse connections and break those there are."""
        if self.listener is not None:
            self.listener.close()
            self.listener = None
        for transport in list(self.connections):
            transport.abort()

    async def answer(
        self, method: str, path: str, headers: dict[str, str], body: dict[str, Any]
    ) -> tuple[int, dict[str, Any] | bytes]:
        raise NotImplementedError


@dataclass(frozen=True)
class Fault:
    """The `nth` call of `path` to `target` goes wrong as `kind` says. `attempt`: only in that try of a push."""

    target: str
    path: str
    kind: str
    nth: int = 1
    attempt: int = 0


@dataclass
class Request:
    """A generation the gateway placed: `salt` is the version its session is opened for, `kv` what made its KV."""

    salt: str
    left: int
    kv: str = ""
    begun: bool = False


@dataclass
class Engine(Server):
    """`local`: its process can be seen and ended from here. `has_door`: it refuses calls of epochs that are over, and
    generates nothing before it is admitted; engines that somebody else started have none."""

    world: World
    name: str
    local: bool = True
    has_door: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.process: subprocess.Popen[bytes] | None = None
        self.lifecycle = asyncio.Lock()
        self.fresh()

    def fresh(self) -> None:
        """The state of a new incarnation."""
        self.startup, self.began, self.looked_at = uuid.uuid4().hex, self.world.events, False
        self.tensors = whole(BASE)
        self.version = "default"
        self.paused = self.session = self.read_back = self.lied = False
        self.groups: set[str] = set()
        self.cache: dict[str, str] = {}
        self.requests: list[Request] = []
        self.order = asyncio.Lock()
        self.awake = asyncio.Event()
        self.awake.set()
        self.carried = 0
        self.door = Doorkeeper(Puller(Path("/nonexistent"), Path("/nonexistent")), strict=True, token=TOKEN)

    async def start(self) -> None:
        async with self.lifecycle:
            if self.listener is not None:
                self.die()
            self.fresh()
            self.world.say(f"{self.name} starts")
            self.process = _sleeper()
            self.root = identify(self.process.pid)
            await self.listen()

    async def restart(self) -> None:
        """It takes a real one half a minute; here, longer than one call after another. In slices: a machine that stands
        still makes everybody wait."""
        self.die()
        ended = self.process
        for _ in range(20):
            await asyncio.sleep(self.world.deadline_s / 20)
        if self.process is ended:  # else somebody mended it meanwhile
            await self.start()

    @property
    def content(self) -> str:
        """The one version whose tensors it holds, else `mixed`."""
        held = set(self.tensors.values())
        return held.pop() if len(held) == 1 else "mixed"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def well(self) -> bool:
        """Alive, and it would answer."""
        return self.alive and self.awake.is_set()

    @property
    def incarnation(self) -> str:
        return incarnation_of(self.info())

    def info(self) -> dict[str, Any]:
        return {"startup_time": {"load": self.startup}, "launch_command": self.name}

    def tree(self) -> ProcessTree | None:
        if not self.local or not self.alive or self.root is None:
            return None
        pid = self.root.pid
        return ProcessTree(host=host_id(), boot_id=boot_id(), root=self.root, members=(self.root,), group=pid)

    def die(self) -> None:
        """Its process ends; the supervisor takes it out of the gateway, as it does when a real one dies."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        if self.listener is not None:
            self.world.say(f"{self.name} is dead")
        self.hang_up()
        for task in self.tasks - {asyncio.current_task()}:  # type: ignore[operator]
            task.cancel()  # what it was doing ends with it
        self.requests.clear()
        self.awake.set()
        self.world.gateway.forget(self.url)

    def stop(self) -> None:
        """SIGSTOP: connections are taken, nothing is answered."""
        self.awake.clear()

    def wake(self) -> None:
        """SIGCONT: what was asked meanwhile is done now."""
        self.awake.set()

    def buried(self) -> None:
        """Notice that somebody ended the process: the port closes with it."""
        if self.listener is not None and not self.alive:
            self.die()

    async def answer(
        self, method: str, path: str, headers: dict[str, str], body: dict[str, Any]
    ) -> tuple[int, dict[str, Any] | bytes]:
        started = self.startup
        said = body.get("new_version") or body.get("mode") or ""
        self.world.event(f"{self.name} {path} {said}".rstrip())
        fault = self.world.fault(self.name, path)
        if path in CHANGES and "x-trainer" not in headers:
            self.world.check_touch(self, path, int(headers.get("x-rl360-epoch", "0")))
        if fault == "stop":
            self.stop()
        if not self.awake.is_set():
            await self.awake.wait()
        if self.startup != started or not self.alive:
            raise Dropped
        if fault in ("die", "restart"):
            self.die()
            if fault == "restart":
                await self.restart()
            raise Dropped
        if fault == "hang":
            await self.world.over.wait()
            raise Dropped
        if fault == "500":
            return 500, {"error": "broken on purpose"}
        if self.has_door and path not in OPEN and (refused := self.stranger(headers)):
            self.world.violate(f"{self.name} {path} by a caller without the token")
            return 401, {"error": refused}
        control = path in CHANGES or path == "/weights_checker"
        if self.has_door and control and (refused := self.at_door(path, headers)):
            return 409, {"error": refused}
        if path in CHANGES:  # one after the other, as a scheduler takes them
            async with self.order:
                await self.delay(fault)
                status, reply = await self.apply(path, body, headers, fault)
        else:
            await self.delay(fault)
            status, reply = self.read(path, fault)
        self.world.event()
        return await self.damaged(fault, status, reply)

    def stranger(self, headers: dict[str, str]) -> str:
        """Why its caller, of another host, is refused, if it is."""
        shown = [(b"authorization", headers.get("authorization", "").encode())]
        try:
            self.door.check_caller({"client": ("10.0.0.9", 1), "headers": shown})
        except Refused as refused:
            return str(refused)
        return ""

    def at_door(self, path: str, headers: dict[str, str]) -> str:
        """Why a control call is refused, if it is."""
        try:
            if not path.startswith("/rl360/"):
                self.door.enter(path, int(headers.get("x-rl360-epoch", "0")))
        except Refused as refused:
            return str(refused)
        return ""

    async def delay(self, fault: str) -> None:
        if fault in ("slow", "late"):
            await asyncio.sleep(self.world.deadline_s * (0.5 if fault == "slow" else 1.3))

    async def damaged(self, fault: str, status: int, reply: Any) -> tuple[int, Any]:
        """The answer as the fault leaves it: the work was done."""
        if fault == "hang_done":
            await self.world.over.wait()
            raise Dropped
        if fault == "die_done":
            self.die()
        if fault in ("die_done", "cut"):
            raise Dropped
        spoilt = {
            "500_done": (500, {"error": "broken on purpose"}),
            "html": (200, b"<html>busy</html>"),
            "list": (200, b"[]"),
            "no": (200, {"success": False, "message": "refused on purpose"}),
            "trickle": (-200, reply),
        }
        return spoilt.get(fault, (status, reply))

    def read(self, path: str, fault: str) -> tuple[int, dict[str, Any]]:
        if path == "/server_info":
            self.looked_at = self.looked_at or fault != "lie"
            return 200, {} if fault == "lie" else self.info()
        if path == "/model_info":
            return 200, {"weight_version": "demo:999" if fault == "lie" else self.version}
        if path == "/rl360/door" and self.has_door:
            return 200, self.door.facts()
        if path == "/weights_checker":
            sums = checksums_of(self.tensors)
            self.read_back = self.read_back or fault not in ("lie", "fewer")
            if fault == "lie":
                sums[next(iter(sums))] = "b" * 16
            if fault == "fewer":
                sums.pop(next(iter(sums)))
            return 200, {"success": True, "ranks": [{"checksums": sums}]}
        return 404, {"error": f"no {path}"}

    async def apply(
        self, path: str, body: dict[str, Any], headers: dict[str, str], fault: str
    ) -> tuple[int, dict[str, Any]]:
        ok = {"success": True, "message": "ok"}
        if fault == "lie":
            self.lied = self.lied or path == "/pause_generation"
            return 200, ok
        if path == "/pause_generation":
            self.paused = True
            if body["mode"] == "abort":
                self.requests.clear()
            if body["mode"] == "retract":
                for request in self.requests:
                    request.kv = ""  # computed again when it goes on
        elif path == "/continue_generation":
            self.paused = False
        elif path == "/abort_request":
            self.requests.clear()
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/flush_cache":
            if any(request.kv for request in self.requests):
                return 400, {"error": "requests are running"}
            self.cache.clear()
        elif path.startswith("/rl360/"):
            if not self.has_door:
                return 404, {"error": "Not Found"}
            try:
                if path == "/rl360/admit":
                    self.door.admit(AdmitBody.model_validate(body))
                else:
                    self.door.bar(BarBody.model_validate(body))
            except Refused as refused:
                return 409, {"error": str(refused)}
            if self.door.phase is Phase.BARRED:  # what waited at the door is refused
                self.requests = [request for request in self.requests if request.begun]
        elif path == "/init_weights_update_group":
            self.groups.add(body["group_name"])
        elif path == "/destroy_weights_update_group":
            if body["group_name"] not in self.groups:
                return 400, {"success": False, "message": "The group to be destroyed does not exist."}
            self.groups.remove(body["group_name"])
        elif path == "/begin_weight_update":
            if self.session:
                return 400, {"success": False, "message": "a weight-update session is already open"}
            self.session = True
        elif path == "/end_weight_update":
            if not self.session:
                return 400, {"success": False, "message": "no weight-update session is open"}
            self.session = False
        elif path == "/update_weights_from_distributed":
            return await self.receive(body)
        return 200, ok

    async def receive(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Wait for the broadcast, take the tensors. Unknown names are accepted in silence, as SGLang does."""
        if not self.session or body["group_name"] not in self.groups:
            return 400, {"success": False, "message": "no session or no such group"}
        if unknown := set(body["names"]) - {spec.name for spec in TENSORS}:
            self.world.violate(f"{self.name} was sent unknown tensors {sorted(unknown)}")
        content = await self.world.trainer.arrive(self, body["group_name"])
        self.read_back = False
        self.carried += 1
        for name in body["names"] if content is not None else ():
            self.tensors[name] = content or f"torn-{self.world.events}"
        if content is None:
            return 200, {"success": True, "message": "ok"}
        if not content:
            return 400, {"success": False, "message": "the broadcast broke"}
        return 200, {"success": True, "message": "ok"}

    def generate(self) -> None:
        """One token of each running request, when it runs at all."""
        if not self.well or self.paused:
            return
        content = self.content
        for request in list(self.requests):
            if self.has_door and not request.begun and self.door.phase is not Phase.SERVING:
                if self.door.phase is Phase.BARRED:
                    self.requests.remove(request)  # 503
                continue
            request.begun = True
            # one that only says that it paused goes on under a name that no session accepts
            named = not (self.lied and "#" in self.version)
            if named and (not self.read_back or self.version != content):
                self.world.violate(f"{self.name} served a token of {content} called {self.version}, not confirmed")
            namespace = request.salt if self.world.salted else ""
            if not request.kv:  # it begins, or begins again: its prefix is looked up
                request.kv = self.cache.get(namespace, content)
                if request.kv != content and request.salt == self.version:
                    self.world.violate(f"{self.name}: a request of {request.salt} used KV that {request.kv} made")
            request.left -= 1
            if request.left <= 0:
                self.requests.remove(request)
                self.cache[namespace] = request.kv


@dataclass
class Gateway(Server):
    """Workers by id; removal drains for a moment as the real one does. `lost`: calls that it does not answer now."""

    world: World
    port: int = 0
    drain_s: float = 0.03

    def __post_init__(self) -> None:
        super().__post_init__()
        self.workers: dict[str, dict[str, Any]] = {}

    def urls(self) -> list[str]:
        return sorted(row["url"] for row in self.workers.values() if row["status"] == "ready")

    def forget(self, url: str) -> None:
        for key in [key for key, row in self.workers.items() if row["url"] == url]:
            del self.workers[key]

    async def answer(
        self, method: str, path: str, headers: dict[str, str], body: dict[str, Any]
    ) -> tuple[int, dict[str, Any] | bytes]:
        self.world.event(f"gateway {method} {body.get('url', '')}".rstrip())
        fault = self.world.fault("gateway", "/workers")
        if fault == "hang":
            await self.world.over.wait()
            raise Dropped
        if fault == "forget":
            self.workers.clear()
        if fault == "die":  # and comes back by itself, knowing nobody
            self.workers.clear()
            self.hang_up()
            asyncio.get_running_loop().call_later(self.world.deadline_s, lambda: self.spawn(self.listen()))
            raise Dropped
        if fault == "500":
            return 500, {"error": "broken on purpose"}
        if fault in ("html", "list"):
            return 200, b"<html>busy</html>" if fault == "html" else b"[]"
        status, reply = self.change(method, path, body)
        self.world.event()
        return status, reply

    def change(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        now = asyncio.get_running_loop().time()
        for key in [k for k, row in self.workers.items() if row["status"] == "draining" and now > row["until"]]:
            del self.workers[key]
        if method == "POST" and body.get("api_key") != TOKEN:
            self.world.violate(f"{body['url']} registered without what it asks agents for")
        if method == "POST":
            if any(row["url"] == body["url"] for row in self.workers.values()):
                return 409, {"error": "exists"}
            key = uuid.uuid4().hex
            self.workers[key] = {"id": key, "url": body["url"], "status": "ready", "is_healthy": True}
            return 202, {"worker_id": key}
        if method == "DELETE":
            row = self.workers.get(path.rpartition("/")[2])
            if row is None:
                return 404, {"error": "unknown"}
            row.update(status="draining", until=now + self.drain_s)
            return 202, {}
        return 200, {"workers": list(self.workers.values())}
