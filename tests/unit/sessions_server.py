"""A session server on a real socket, in front of an engine whose replies a test writes.

The real engine cannot be made to answer wrongly, late or not at all; this one speaks the same `/generate` and does
what `Engine.script` says. The contract tests run the same paths against the real engine and gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
import uvicorn
from fastapi import FastAPI, Request, Response

from rl360.sessions.registry import Limits, Registry
from rl360.sessions.routes import Service, create_app
from rl360.sessions.routing import RoutingShape
from rl360.sessions.upstream import Upstream
from tests.unit.sessions_data import VERSION, encode_turn, template

TOKEN = "a-token-of-the-session-tests"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
CREATE = {
    "attempt_id": "s000000-g000-a00-t0",
    "group_id": "s000000-g000",
    "task_id": "hello",
    "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 48},
    "max_seq_len": 1024,
    "expected_weight_version": None,
}


def engine_reply(body: dict[str, Any], text: str = "done<|im_end|>", finish: str = "stop") -> dict[str, Any]:
    """A well-formed `/generate` reply to `body` that samples `text`."""
    ids = encode_turn(text)
    return {
        "text": "",
        "output_ids": ids,
        "prompt_token_ids": body["input_ids"],
        "meta_info": {
            "finish_reason": {"type": finish},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 3,
            "weight_version": VERSION,
            "weight_versions": [{"version": VERSION, "start": 0, "end": len(ids)}],
            "output_token_logprobs": [[-0.5 - i, token, None] for i, token in enumerate(ids)],
        },
    }


@dataclass
class Engine:
    """`script` maps a request body to what is answered: a reply, or (status, raw bytes). `gate` holds replies back;
    `headers` go with each, as a gateway's do."""

    script: Callable[[dict[str, Any]], Any] = engine_reply
    gate: threading.Event = field(default_factory=threading.Event)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    cancelled: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)

        @app.post("/generate")
        async def generate(request: Request) -> Response:
            body = orjson.loads(await request.body())
            self.bodies.append(body)
            self.keys.append(request.headers.get("x-smg-routing-key", ""))
            while not self.gate.is_set():
                await asyncio.sleep(0.005)
                if await request.is_disconnected():
                    self.cancelled.set()
                    return Response(status_code=499)
            answer = self.script(body)
            if isinstance(answer, tuple):
                return Response(answer[1], answer[0], self.headers)
            return Response(orjson.dumps(answer), 200, self.headers, media_type="application/json")

        return app


@contextlib.contextmanager
def serving(app: Any, make: Callable[[uvicorn.Config], uvicorn.Server] = uvicorn.Server) -> Iterator[str]:
    """Run an app on a free loopback port in a thread; its URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=1)
        config.timeout_keep_alive = 75  # as engines are started: in one busy process five seconds are soon over
        server = make(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for _ in range(500):
            if server.started:
                break
            threading.Event().wait(0.01)
        try:
            yield url
        finally:
            server.should_exit = True
            thread.join(timeout=10)


@dataclass
class Bench:
    """An engine, the session server in front of it, and a client of the latter."""

    engine: Engine
    service: Service
    url: str
    http: httpx.Client

    def create(self, **changes: Any) -> tuple[str, str]:
        reply = self.http.post("/sessions", json={**CREATE, **changes}, headers=BEARER)
        assert reply.status_code == 200, reply.text
        return reply.json()["session_id"], reply.json()["base_url"]

    def chat(self, session_id: str, body: Any, **kwargs: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        return self.http.post(f"/sessions/{session_id}/v1/chat/completions", content=content, **kwargs)

    def say(self, session_id: str, body: Any, **kwargs: Any) -> httpx.Response:
        """The same in the Anthropic format."""
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        return self.http.post(f"/sessions/{session_id}/v1/messages", content=content, **kwargs)

    def post(self, path: str, body: Any = None) -> httpx.Response:
        return self.http.post(path, json=body, headers=BEARER)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.http.get(path, headers={**BEARER, **headers})


@contextlib.contextmanager
def session_bench(
    limits: Limits | None = None, deadline_s: float = 20.0, routing: RoutingShape | None = None, store: Any = None
) -> Iterator[Bench]:
    """A fresh engine and session server; replies flow unless a test clears `engine.gate`."""
    engine = Engine()
    engine.gate.set()
    with serving(engine.app()) as engine_url:
        engine.url = engine_url
        registry = Registry(template(), limits or Limits(), routing=routing)
        upstream = Upstream(engine_url, template().vocab_size, template().stop_ids, deadline_s, routing)
        service = Service(template(), registry, upstream, TOKEN, store)
        with serving(create_app(service)) as url, httpx.Client(base_url=url, timeout=30, trust_env=False) as http:
            yield Bench(engine, service, url, http)
