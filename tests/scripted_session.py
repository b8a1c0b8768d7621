"""A policy of fixed turns behind real HTTP, for tests of what stands between a policy and its sandbox.

`/sessions/{name}/v1/chat/completions` plays the turns of `scripts[name]`. It refuses a request whose history is not
exactly what it said before, as a session server does.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Bash:
    command: str


@dataclass(frozen=True)
class Say:
    text: str
    finish_reason: str = "stop"


@dataclass(frozen=True)
class Call:
    """A tool call as it stands, well-formed or not."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Fail:
    status: int
    code: str
    retry: bool = True


@dataclass(frozen=True)
class Hang:
    seconds: float


@dataclass
class ScriptedSessions:
    """A running server; `seen[name]` holds the bodies that were asked for."""

    scripts: dict[str, list[Any]] = field(default_factory=dict)
    seen: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    said: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    server: ThreadingHTTPServer | None = None

    def add(self, name: str, *turns: Any) -> str:
        """Script a session; its base_url."""
        self.scripts[name], self.seen[name], self.said[name] = list(turns), [], []
        return self.url(name)

    def url(self, name: str) -> str:
        assert self.server is not None
        return f"http://127.0.0.1:{self.server.server_address[1]}/sessions/{name}/v1"

    def start(self) -> None:
        sessions = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                status, reply = sessions.answer(self.path.split("/")[2], body)
                retry = reply.pop("retry", True)
                data = json.dumps(reply).encode()
                try:
                    self.send_response(status)
                    self.send_header("content-type", "application/json")
                    self.send_header("content-length", str(len(data)))
                    if not retry:
                        self.send_header("x-should-retry", "false")
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    self.close_connection = True

            def log_message(self, *_: object) -> None:
                return

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 1024

        self.server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        assert self.server is not None
        self.server.shutdown()
        self.server.server_close()

    def answer(self, name: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if name not in self.scripts:
            return 404, error("not_found")
        self.seen[name].append(body)
        if [item for item in body["messages"] if item["role"] == "assistant"] != self.said[name]:
            return 400, error("bad_history")
        turn = self.scripts[name].pop(0) if self.scripts[name] else Say("done")
        if isinstance(turn, Hang):
            time.sleep(turn.seconds)
            turn = Say("late")
        if isinstance(turn, Fail):
            return turn.status, {**error(turn.code), "retry": turn.retry}
        message, finish = message_of(turn, len(self.said[name]))
        self.said[name].append(message)
        return 200, {"choices": [{"index": 0, "message": message, "finish_reason": finish}]}


def message_of(turn: Any, number: int) -> tuple[dict[str, Any], str]:
    if isinstance(turn, Say):
        return {"role": "assistant", "content": turn.text}, turn.finish_reason
    if isinstance(turn, Bash):
        turn = Call("bash", json.dumps({"command": turn.command}))
    function = {"name": turn.name, "arguments": turn.arguments}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"


def error(code: str) -> dict[str, Any]:
    return {"error": {"message": f"scripted {code}", "code": code, "type": "x"}}
