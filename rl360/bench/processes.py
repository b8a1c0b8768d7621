"""Processes a benchmark starts on free loopback ports, and what they use: CPU in nanoseconds, resident memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil

from rl360.errors import Rl360Error

LOOPBACK = "127.0.0.1"
_START_S = 60.0


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


@dataclass(frozen=True)
class Running:
    """A process that answers at `url`."""

    pid: int
    port: int

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def cpu_s(self) -> float:
        """CPU seconds of all its threads so far, to the nanosecond (`/proc` counts in hundredths)."""
        return time.clock_gettime((~self.pid << 3) | 2)  # the clock id that clock_getcpuclockid(3) makes of a pid

    def rss_mib(self) -> float:
        return psutil.Process(self.pid).memory_info().rss / (1 << 20)


@contextlib.contextmanager
def running(argv: list[str], port: int, probe: str, env: dict[str, str] | None = None) -> Iterator[Running]:
    """Start a process, wait until `probe` answers 200, and end it; its output is shown when it does not come up."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})})
        try:
            give_up_at = time.monotonic() + _START_S
            while not _answers(f"http://{LOOPBACK}:{port}{probe}"):
                if process.poll() is not None or time.monotonic() > give_up_at:
                    log.seek(0)
                    said = " ".join(log.read().decode(errors="replace").split())[-500:]
                    raise Rl360Error(f"{' '.join(argv[:4])} ... did not come up on port {port}: {said or 'silent'}")
                time.sleep(0.05)
            yield Running(process.pid, port)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@contextlib.contextmanager
def instant_engine(script: Path, routing: Path | None = None) -> Iterator[Running]:
    port = free_port()
    argv = [sys.executable, "-m", "rl360.bench.engine", "--port", str(port), "--script", str(script)]
    with running(argv if routing is None else [*argv, "--routing", str(routing)], port, "/ping") as engine:
        yield engine


@contextlib.contextmanager
def instant_peers(home: Path, reference: dict[str, Any]) -> Iterator[Running]:
    """Session server, sandbox server and object store in one process."""
    port, file = free_port(), home / "reference.json"
    file.write_bytes(orjson.dumps(reference))
    argv = [sys.executable, "-m", "rl360.bench.peers", "--port", str(port), "--reference", str(file)]
    with running(argv, port, "/health") as peers:
        yield peers


@contextlib.contextmanager
def session_server(upstream: str, model: Path, routing: bool) -> Iterator[tuple[Running, dict[str, str]]]:
    """A session server of its own, and the headers it wants."""
    port, token = free_port(), secrets.token_hex(16)
    token_file = model / "token"
    token_file.touch(0o600)
    token_file.write_text(token)
    argv = [sys.executable, "-m", "rl360.cli", "sessions", "serve", "--host", LOOPBACK, "--port", str(port)]
    argv += ["--upstream", upstream, "--model", str(model), "--drain-s", "0"]
    argv += ["--return-routed-experts"] if routing else []
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    env = threads | {"RL360_TOKEN_FILE": str(token_file), "TOKENIZERS_PARALLELISM": "false"}
    with running(argv, port, "/health", env) as server:
        yield server, {"Authorization": f"Bearer {token}"}


class Connection:
    """One keep-alive HTTP/1.1 connection: a client light enough to keep a session server busy from one core."""

    def __init__(self, port: int, headers: dict[str, str]) -> None:
        self._port = port
        lines = {"Host": f"{LOOPBACK}:{port}", "Content-Type": "application/json", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())

    async def __aenter__(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection(LOOPBACK, self._port, limit=1 << 20)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def call(self, method: str, path: str, body: bytes = b"") -> Any:
        """The decoded JSON of a reply below 300 (None when it is empty); anything else ends the benchmark."""
        self._writer.write(
            f"{method} {path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        )
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        _, named, rest = head.partition(b"content-length:")
        data = await self._reader.readexactly(int(rest.split(b"\r\n", 1)[0])) if named else b""
        status = int(head.split(b" ", 2)[1])
        if status >= 300:
            raise Rl360Error(f"{method} {path[:60]} answered {status}: {data[:300].decode(errors='replace')}")
        return orjson.loads(data) if data else None
