"""Harbor's process, ours to start: one that hangs holds nobody up, and nothing of its trials stays when it ends."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rl360.errors import Rl360Error
from rl360.harbor.real import agent
from rl360.harbor.real.agent import ROOT, Worker

# as much of Harbor as the process imports; its agent writes a file and never ends
HARBOR = {
    "agents/factory.py": """import asyncio
class AgentFactory:
    @staticmethod
    def create_agent_from_config(config, logs_dir):
        return Agent()
class Agent:
    async def setup(self, environment): pass
    async def run(self, instruction, environment, context):
        open(environment.given["environment_dir"] / "file", "w").close()
        await asyncio.sleep(60)
""",
    "environments/base.py": """class ExecResult: pass
class BaseEnvironment:
    def __init__(self, *args, **given): self.given = given
    async def start(self, force_build): pass
""",
    "environments/capabilities.py": "class EnvironmentCapabilities: pass\n",
    "models/agent/context.py": "class AgentContext: pass\n",
    "models/task/config.py": """class EnvironmentConfig: pass
class NetworkMode: NO_NETWORK = 0
class NetworkPolicy:
    def __init__(self, **given): pass
""",
    "models/trial/config.py": "class AgentConfig:\n    def __init__(self, **given): pass\n",
    "models/trial/paths.py": """class TrialPaths:
    def __init__(self, trial_dir): self.agent_dir = trial_dir
    def mkdir(self): self.agent_dir.mkdir()
""",
}


def test_a_process_that_hangs_is_said_in_time_and_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "HAND_OVER_S", 0.1)
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    ours.setblocking(False)
    worker = Worker.__new__(Worker)
    worker._control, worker._process = ours, cast(Any, SimpleNamespace(poll=lambda: None))

    async def go() -> None:
        kept = []

        async def fill() -> None:
            while True:
                kept.append(await worker.connect())

        with pytest.raises(Rl360Error, match="took no trial within"):
            await asyncio.wait_for(fill(), 5)
        for _, writer in kept:
            writer.close()
        theirs.close()
        with pytest.raises(Rl360Error, match="takes no trial"):
            await worker.connect()

    with ours:
        asyncio.run(go())


def test_nothing_of_its_trials_stays_when_it_ends(tmp_path: Path) -> None:
    for name, text in HARBOR.items():
        path = tmp_path / "stub" / "harbor" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path / 'stub'}", "TMPDIR": str(temporary)}
    control, theirs = socket.socketpair()
    argv = [sys.executable, "-m", "rl360.harbor.real.worker"]
    with subprocess.Popen(argv, stdin=theirs.fileno(), env=env) as process:
        theirs.close()
        mine, its = socket.socketpair()
        order = {"agent": "a", "model": "m", "base_url": "", "kwargs": {}, "env": {}, "instruction": "Do."}
        mine.sendall(json.dumps(order).encode() + b"\n")
        socket.send_fds(control, [b"t"], [its.fileno()])
        its.close()
        mine.settimeout(5)
        with mine.makefile("rb") as lines:
            asked = json.loads(lines.readline())
        mine.sendall(json.dumps({"id": asked["id"], "exit_code": 0, "timed_out": False, "output": ""}).encode() + b"\n")
        give_up_at = time.monotonic() + 5
        while not list(temporary.glob("**/file")) and time.monotonic() < give_up_at:
            time.sleep(0.02)
        made = list(temporary.glob("**/file"))
        control.close()
        mine.close()
        assert made and process.wait(10) == 0
    assert not list(temporary.iterdir())
