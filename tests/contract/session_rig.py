"""A gateway and a session server of a test's own, over engines that run already, and a client of the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil
import pytest

from rl360.engines.client import EngineClient, open_http
from rl360.engines.gateway import GatewayClient
from rl360.sessions.families.base import ChatTemplate
from rl360.sessions.families.registry import load_template
from rl360.sessions.sample import MergedSample, decode_samples

TOKEN = "token-of-the-session-contract-tests"
BASH = {
    "type": "function",
    "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Use bash."},
    {"role": "user", "content": "Create the file hello.txt with the line hello."},
]
READY_S = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def far_address() -> str:
    """An address of this host that is not loopback: who calls it comes from there too, as from another host."""
    found = [row.address for rows in psutil.net_if_addrs().values() for row in rows if row.family == socket.AF_INET]
    far = [address for address in found if not address.startswith("127.")]
    if not far:
        pytest.skip("this host has no address but loopback")
    return far[0]


@contextlib.contextmanager
def process(
    argv: list[str], ready_url: str, log: Path, env: dict[str, str] | None = None, ready_s: float = READY_S
) -> Iterator[int]:
    """Run a server until it answers 200 at `ready_url`; its pid. Ended, and its end awaited, at the exit."""
    with log.open("wb") as output:
        running = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})})
        try:
            deadline = time.monotonic() + ready_s
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(ready_url, timeout=2).status_code == 200:
                        break
                assert running.poll() is None, f"{argv[0]} ended: {log.read_text()[-1000:]}"
                assert time.monotonic() < deadline, f"{argv[0]} not ready in {ready_s} s: {log.read_text()[-1000:]}"
                time.sleep(0.1)
            yield running.pid
        finally:
            running.terminate()
            try:
                running.wait(timeout=15)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


@dataclass
class Rig:
    """One engine, a gateway in front of it, and a session server process on top."""

    engine_url: str
    url: str
    template: ChatTemplate
    http: httpx.Client

    @property
    def version(self) -> str:
        return httpx.get(f"{self.engine_url}/model_info", timeout=30).json()["weight_version"]

    def create(self, **changes: Any) -> tuple[str, str]:
        body = {
            "attempt_id": "s000000-g000-a00-t0",
            "group_id": "s000000-g000",
            "task_id": "hello",
            "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 32},
            "max_seq_len": 512,
            "expected_weight_version": None,
        }
        reply = self.http.post("/sessions", json={**body, **changes})
        assert reply.status_code == 200, reply.text
        return reply.json()["session_id"], reply.json()["base_url"]

    def chat(self, session_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> httpx.Response:
        body = orjson.dumps({"model": "policy", "messages": messages, "tools": [BASH]})
        return self.http.post(f"/sessions/{session_id}/v1/chat/completions", content=body, **kwargs)

    def told(self, session_id: str) -> dict[str, Any]:
        return self.http.get(f"/sessions/{session_id}").json()

    def samples(self, session_id: str, pick: str = "last") -> tuple[MergedSample, ...]:
        reply = self.http.get(f"/sessions/{session_id}/merged", params={"pick": pick})
        assert reply.status_code == 200, reply.text
        return decode_samples(reply.content, "merged")

    def sample(self, session_id: str) -> MergedSample:
        (sample,) = self.samples(session_id)
        return sample

    def attempt(self, turns: int, **changes: Any) -> tuple[str, list[str]]:
        """Take up to `turns` turns in a new session; its id and the finish reasons."""
        session_id, _ = self.create(**changes)
        messages, reasons = list(MESSAGES), []
        for _ in range(turns):
            reply = self.chat(session_id, messages)
            assert reply.status_code == 200, reply.text
            choice = reply.json()["choices"][0]
            reasons.append(choice["finish_reason"])
            if choice["finish_reason"] == "length":
                break
            messages += [choice["message"], {"role": "tool", "content": "ok"}]
        return session_id, reasons


@contextlib.contextmanager
def session_rig(
    engine_url: str, model_dir: str, folder: Path, *flags: str, engine_token: str | None = None
) -> Iterator[Rig]:
    """A gateway over this engine alone and a session server with `flags` over that. `engine_token`: what the engine's
    door asks for; the gateway is told it."""
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    gateway_url, url = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    binaries = Path(sys.executable).parent
    smg = [str(binaries / "smg"), "launch", "--host", "127.0.0.1", "--port", gateway_url.rsplit(":", 1)[1]]
    smg += ["--policy", "manual", "--prometheus-port", str(free_port()), "--enable-rl"]
    smg += ["--disable-tokenizer-autoload", "--health-check-endpoint", "/ping"]
    server = [str(binaries / "rl360"), "sessions", "serve", "--port", url.rsplit(":", 1)[1], "--upstream", gateway_url]
    server += ["--model", model_dir, "--deadline-s", "120", "--drain-s", "0", *flags]
    with (
        process(smg, f"{gateway_url}/liveness", folder / "smg.log"),
        process(server, f"{url}/health", folder / "sessions.log", {"RL360_TOKEN_FILE": str(token)}),
        httpx.Client(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=120, trust_env=False) as http,
    ):
        asyncio.run(_register(gateway_url, engine_url, engine_token))
        yield Rig(engine_url, url, load_template(model_dir), http)


async def _register(gateway_url: str, engine_url: str, token: str | None) -> None:
    async with open_http() as http:
        await GatewayClient(gateway_url, http).add(engine_url, 60.0, token)


def admit_if_new(engine_url: str, token: str) -> None:
    """Let an engine generate that no push has come to yet, with the weights that it was started with."""

    async def ask() -> None:
        async with open_http() as http:
            door = await EngineClient(engine_url, http, 30, token=token).door() or {}
            if door["phase"] != "serving":
                await EngineClient(engine_url, http, 30, max(1, door["epoch"]), token).admit("as started")

    asyncio.run(ask())
