"""The session server as a process of its own: it drains and ends as told, and the benchmark's turns go through it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from rl360.bench import http_rows
from tests.contract.trainer_rig import free_ports
from tests.unit.sessions_data import write_model_dir
from tests.unit.sessions_server import BEARER, CREATE
from tests.unit.test_bench import TINY
from tests.unit.test_sessions_command import write_token

pytestmark = pytest.mark.contract


def test_the_process_serves_with_the_token_of_its_home_drains_and_ends_with_zero(tmp_path: Path) -> None:
    write_token(tmp_path / ".rl360" / "token")
    model = write_model_dir(tmp_path / "model")
    (port,) = free_ports(1)
    argv = [sys.executable, "-m", "rl360.cli", "sessions", "serve", "--upstream", "http://127.0.0.1:9"]
    argv += ["--model", str(model), "--port", str(port), "--drain-s", "30"]
    env = {name: value for name, value in os.environ.items() if name not in ("RL360_HOME", "RL360_TOKEN_FILE")}
    with httpx.Client(timeout=5, trust_env=False) as http, (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(argv, cwd=tmp_path, env=env, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + 60
            while True:
                try:
                    assert http.get(f"{url}/health").json()["status"] == "ok"
                    break
                except httpx.TransportError:
                    assert process.poll() is None and time.monotonic() < deadline
                    time.sleep(0.05)
            session_id = http.post(f"{url}/sessions", json=CREATE, headers=BEARER).json()["session_id"]
            process.send_signal(signal.SIGTERM)
            while http.get(f"{url}/health").json()["status"] == "ok":
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert process.poll() is None
            assert http.delete(f"{url}/sessions/{session_id}", headers=BEARER).status_code == 204
            assert process.wait(timeout=30) == 0
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    first = (tmp_path / "log").read_text().splitlines()[0]
    for said in (url, "rl360-chat", str(model), "http://127.0.0.1:9", "store none", "/docs"):
        assert said in first


def test_turns_through_a_real_server_process() -> None:
    """Routing included: the engine answers 400 to a prompt of another length than planned, which would end this."""
    with http_rows.rig(TINY) as rig:
        costs = asyncio.run(http_rows._turn_costs(rig, 1))
        health = asyncio.run(_health(rig))
    assert costs.shape == (1, TINY.turns) and (costs > 0).all()
    assert health["turns"] == 2 * TINY.turns and health["sessions"] == 0 and health["routing"] == [3, 2, 128]


async def _health(rig: http_rows.Rig) -> Any:
    async with rig.connect() as connection:
        return await connection.call("GET", "/health")
