"""In-test HTTP servers with faults: an SGLang engine's control calls, and the gateway's worker list.

They keep the state the real ones keep (paused, version, open session, groups, checksums) and can be told to misbehave;
the real ones are used in tests/contract. As at a strict door, only who shows the token gets in. An engine's process
tree is a real `sleep` process, so that fencing has something to kill and to prove.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
import uuid
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rl360.engines.door import OPEN
from rl360.weights.messages import ChecksumReply, EngineTransfer, PushPlan, TensorSpec, TransferReport
from rl360.weights.plan import engine_name

TOKEN = "token-of-the-fake-engines"
TENSORS = tuple(
    TensorSpec(name=name, shape=(16, 8))
    for name in (
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    )
)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: the second would wait 40 ms for an acknowledgement

    def _do(self) -> None:
        size = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(size) or b"{}")
        owner = self.server.owner  # type: ignore[attr-defined]
        if owner.lets_in(self.path, self.headers.get("authorization")):
            status, reply = owner.answer(self.command, self.path, body)
        else:
            status, reply = 401, {"error": "send Authorization: Bearer <token> of this deployment"}
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = _do

    def log_message(self, *_: Any) -> None:
        pass


def show_token(patch: pytest.MonkeyPatch, folder: Path, token: str = TOKEN) -> None:
    """What this process calls engines as from now on: a part of their deployment."""
    path = folder / "token"
    path.write_text(token)
    path.chmod(0o600)
    patch.setenv("RL360_TOKEN_FILE", str(path))


class _Server:
    def lets_in(self, path: str, authorization: str | None) -> bool:
        return True

    def start(self) -> None:
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self.http.daemon_threads = True
        self.http.owner = self  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@dataclass
class FakeEngine(_Server):
    """`faults`: path -> "hang", "500", or a callable(body) -> (status, reply)."""

    version: str = "default"
    checksums: dict[str, str] = field(default_factory=lambda: {engine_name(t.name): "0" * 16 for t in TENSORS})
    paused: bool = False
    session: bool = False
    groups: set[str] = field(default_factory=set)
    faults: dict[str, Any] = field(default_factory=dict)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    startup: str = field(default_factory=lambda: uuid.uuid4().hex)
    door_token: str = TOKEN

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        self.released = threading.Event()
        self.start()

    def close(self) -> None:
        self.released.set()
        self.process.kill()
        self.process.wait()
        self.stop()

    def lets_in(self, path: str, authorization: str | None) -> bool:
        return path.partition("?")[0] in OPEN or authorization == f"Bearer {self.door_token}"

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.calls.append((path, body))
        fault = self.faults.get(path) or self.faults.get("*")
        if fault == "hang" or self.process.poll() is not None:
            self.released.wait(30)
            return 500, {}
        if fault == "500":
            return 500, {"error": "broken on purpose"}
        if callable(fault):
            return fault(body)
        ok = {"success": True, "message": "ok"}
        if path.startswith("/rl360/"):
            return 404, {"detail": "Not Found"}  # it has no door
        if path == "/server_info":
            return 200, {"startup_time": {"load": self.startup}, "launch_command": "fake"}
        if path == "/model_info":
            return 200, {"weight_version": self.version}
        if path == "/pause_generation":
            self.paused = True
        elif path == "/continue_generation":
            self.paused = False
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/weights_checker":
            return 200, {**ok, "ranks": [{"checksums": dict(self.checksums)}]}
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
        return 200, ok


@dataclass
class FakeGateway(_Server):
    """Workers by id; removal drains for a moment as the real one does."""

    workers: dict[str, dict[str, Any]] = field(default_factory=dict)
    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    keys: dict[str, str | None] = field(default_factory=dict)  # engine URL -> what it is to show there
    drain_s: float = 0.15

    def __post_init__(self) -> None:
        self.start()

    def urls(self) -> list[str]:
        return sorted(row["url"] for row in self.workers.values() if row["status"] == "ready")

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        for key, row in list(self.workers.items()):
            if row["status"] == "draining" and time.monotonic() > row["until"]:
                del self.workers[key]
        if method == "POST":
            if any(row["url"] == body["url"] for row in self.workers.values()):
                return 409, {"error": "exists"}
            key = uuid.uuid4().hex
            self.workers[key] = {"id": key, "url": body["url"], "status": "ready", "is_healthy": True}
            self.added.append(body["url"])
            self.keys[body["url"]] = body.get("api_key")
            return 202, {"worker_id": key}
        if method == "DELETE":
            row = self.workers.get(path.rpartition("/")[2])
            if row is None:
                return 404, {"error": "unknown"}
            row.update(status="draining", until=time.monotonic() + self.drain_s)
            self.removed.append(row["url"])
            return 202, {}
        return 200, {"workers": list(self.workers.values())}


class FakeTrainer:
    """Sends by setting the engines' checksums. `before`: called with each plan; may raise or break engines."""

    def __init__(self, engines: list[FakeEngine]) -> None:
        self.engines = {engine.url: engine for engine in engines}
        self.step = 0
        self.plans: list[PushPlan] = []
        self.before: Any = None
        self.refusing: set[str] = set()  # engine URLs whose update call answers no

    def held(self) -> dict[str, str]:
        return {engine_name(t.name): f"{self.step:016x}" for t in TENSORS}

    async def checksums(self, run: str, version: str, deadline_s: float | None = None) -> ChecksumReply:
        return ChecksumReply(run=run, version=version, tensors=TENSORS, checksums=self.held())

    async def prepare(self, plan: PushPlan, deadline_s: float | None = None) -> None:
        return

    async def transfer(self, plan: PushPlan, deadline_s: float | None = None) -> TransferReport:
        self.plans.append(plan)
        if self.before is not None:
            self.before(plan)
        results = []
        for target in plan.engine_set.engines:
            engine = self.engines[target.url]
            engine.groups -= set(plan.stale_groups)
            stuck = engine.faults.get("*") == "hang" or engine.process.poll() is not None
            error = "no answer" if stuck else "refused" if target.url in self.refusing else ""
            results.append(EngineTransfer(url=target.url, calls=plan.calls_per_engine, error=error, answered=not stuck))
        ok = not any(result.error for result in results)
        for target in plan.engine_set.engines:
            engine = self.engines[target.url]
            engine.groups.add(plan.group_name)
            # a transfer that failed half way leaves something that is neither old nor new
            engine.checksums = self.held() if ok else dict.fromkeys(engine.checksums, "f" * 16)
        return TransferReport(
            ok=ok,
            engines=tuple(results),
            sent_bytes=plan.total_bytes,
            seconds=0.01,
            group_name=plan.group_name,
            group_reused=False,
            error="" if ok else "an engine failed",
        )
