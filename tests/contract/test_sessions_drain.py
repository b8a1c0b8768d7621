"""A session server process that is told to end while its store hangs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import orjson
import pytest

from rl360.bench.processes import free_port
from rl360.config.services import Services
from rl360.store.layout import merged_key
from tests.unit.sessions_data import write_model_dir
from tests.unit.sessions_server import BEARER, CREATE, TOKEN, Engine, serving

pytestmark = pytest.mark.contract

KEY = merged_key("run-1", 3, 0, CREATE["attempt_id"])
CHAT = {"messages": [{"role": "user", "content": "Create hello.txt"}]}


def test_a_drain_ends_when_it_must_though_the_store_hangs(tmp_path: Path) -> None:
    """The real process: a store that takes connections and never answers holds nothing up beyond the deadline."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    engine = Engine()
    engine.gate.set()
    with contextlib.ExitStack() as open_:
        hung = open_.enter_context(socket.create_server(("127.0.0.1", 0), backlog=16))
        nowhere = dict.fromkeys(
            ("prefect_api_url", "prefect_ui_url", "gateway_url", "trainer_url"), "http://127.0.0.1:9"
        )
        services = Services(
            home=str(tmp_path), s3_bucket="b", engine_urls=["http://h"], session_urls=["http://h"],
                sandbox_urls=["http://h"], model_dir="m",
            s3_endpoint=f"http://127.0.0.1:{hung.getsockname()[1]}", **nowhere,
        )  # fmt: skip
        (tmp_path / "services.json").write_text(services.model_dump_json())
        (tmp_path / "secrets.json").write_text(
            orjson.dumps({"token": TOKEN, "s3_access_key": "a", "s3_secret_key": "b"}).decode()
        )
        (tmp_path / "secrets.json").chmod(0o600)
        upstream = open_.enter_context(serving(engine.app()))
        port = free_port()
        argv = [sys.executable, "-m", "rl360.cli", "sessions", "serve", "--port", str(port), "--upstream", upstream]
        argv += ["--model", str(write_model_dir(tmp_path / "model")), "--token-file", str(token)]
        argv += ["--store", "--drain-s", "6"]
        process = subprocess.Popen(argv, env={**os.environ, "RL360_HOME": str(tmp_path)}, stderr=subprocess.DEVNULL)
        open_.callback(process.kill)
        http = open_.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False))
        give_up_at = time.monotonic() + 30
        while True:
            with contextlib.suppress(httpx.ConnectError):
                session_id = http.post("/sessions", json=CREATE, headers=BEARER).json()["session_id"]
                break
            assert process.poll() is None and time.monotonic() < give_up_at
            time.sleep(0.05)
        assert http.post(f"/sessions/{session_id}/v1/chat/completions", json=CHAT).status_code == 200
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            url = f"/sessions/{session_id}/store"
            storing = pool.submit(lambda: http.post(url, json={"key": KEY}, headers=BEARER))
            hung.accept()
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
            assert time.monotonic() - began < 9
            reply = storing.result()
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "draining")
