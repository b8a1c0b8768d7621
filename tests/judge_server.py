"""A judge over real HTTP that answers as it is told: chat completions, refusals, delays, broken connections.

No model grades anything here. `grade` turns the request into a score by a rule, so that what a judge is shown and what
becomes of its answers is tested against a service that speaks OpenAI's protocol, and the same work gets the same score.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Answer:
    """A status, headers, and a body (JSON unless bytes). `wait_s` before it; `cut`: the connection breaks instead."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    wait_s: float = 0.0
    cut: bool = False


def completion(content: Any, finish: Any = "stop", **more: Any) -> dict[str, Any]:
    """A chat completion whose one choice says `content`."""
    message = {"role": "assistant", "content": content}
    return {
        "id": "chatcmpl-1",
        "model": "judge-1-0301",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": 812, "completion_tokens": 9, "total_tokens": 821},
        **more,
    }


def score(value: Any) -> Answer:
    return Answer(completion(json.dumps({"score": value})))


@dataclass
class JudgeServer:
    """`answers` are given in turn, the last again and again; `grade(body)` instead where it is set."""

    answers: list[Answer] = field(default_factory=lambda: [score(1)])
    grade: Callable[[dict[str, Any]], Answer] | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    now: int = 0
    most: int = 0
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, data: bytes, path: str, key: str | None) -> Answer:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.raw.append(data)
            self.bodies.append(json.loads(data))
            self.paths.append(path)
            self.keys.append(key)
            given = self.answers[min(len(self.bodies), len(self.answers)) - 1]
        if self.grade is not None:
            given = self.grade(self.bodies[-1])
        if given.wait_s:
            time.sleep(given.wait_s)
        with self.lock:
            self.now -= 1
        return given

    def shown(self, index: int = -1) -> str:
        """All that the judge was told in one call."""
        return "\n".join(message["content"] for message in self.bodies[index]["messages"])


@contextmanager
def judging(*answers: Answer, grade: Callable[[dict[str, Any]], Answer] | None = None) -> Iterator[JudgeServer]:
    judge = JudgeServer(list(answers) or [score(1)], grade)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            given = judge.take(data, self.path, self.headers.get("authorization"))
            body = given.body if isinstance(given.body, bytes) else json.dumps(given.body).encode()
            try:
                if given.cut:
                    self.close_connection = True
                    return
                self.send_response(given.status)
                for name, value in ({"content-type": "application/json"} | given.headers).items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                self.wfile.flush()
            except OSError:
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            return

    class Server(ThreadingHTTPServer):
        daemon_threads = True

    http = Server(("127.0.0.1", 0), Handler)
    judge.url = f"http://127.0.0.1:{http.server_port}/v1"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield judge
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
