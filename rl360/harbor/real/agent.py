"""Our side of real Harbor: its agents `terminus-2` and `mini-swe-agent` as agents of this server.

Harbor's process is started once with the server. An attempt is a connection to it: an order goes there, the commands
that Harbor's agent wants run come back and run in the attempt's sandbox, and how it ended. Everything else is as for
any agent here: the relay to the attempt's session, which counts turns and names what was refused
(rl360.agents.harness), the clock, the proof that the sandbox is gone, the verifier. So no exception of Harbor's is a
reward: a command that ran out of its time is exit 124 to Harbor's agent; a sandbox that is lost ends the attempt here,
whatever Harbor would call it; and the agent's deadline is kept here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl360.agents import harness_entry
from rl360.agents.base import Agent, AgentContext, AgentEnd, AgentFailure
from rl360.agents.harness import INSIDE, PORT, Relay, ended, listening, listening_here
from rl360.errors import Rl360Error
from rl360.harbor.outcome import ExitStatus
from rl360.harbor.real.place import require_ready

ROOT = Path(__file__).resolve().parents[3]
LINE_BYTES = 16 << 20
OUTPUT_BYTES = 256 << 10
HAND_OVER_S = 30.0  # for the process to take a trial, its imports included
PATH = "/usr/local/bin:/usr/bin:/bin"
ON_HOST, INSTALLED = "terminus-2", "mini-swe-agent"  # where the agent's own loop runs: Harbor's process, or the sandbox
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HARBOR_TELEMETRY": "off", "OPENAI_API_KEY": "rl360"}


class Worker:
    """Harbor's process, started again when it is found ended. It ends with this one: it reads our socket's end."""

    def __init__(self, folder: Path) -> None:
        require_ready(folder)
        self.folder = folder.absolute()
        self._start()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        env = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
        argv = [str(self.folder / "bin" / "python"), "-m", "rl360.harbor.real.worker"]
        with theirs:
            self._process = subprocess.Popen(
                argv,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                cwd=ROOT,
                env={**env, **QUIET, "PYTHONPATH": str(ROOT)},
            )

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A trial's connection. While the process still imports Harbor it waits there. Raises `Rl360Error` when the
        process takes none."""
        if self._process.poll() is not None:
            self._control.close()
            self._start()
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack:
            stack.enter_context(ours)  # until it is the streams'
            with theirs:
                await self._hand_over(theirs.fileno())
            streams = await asyncio.open_unix_connection(sock=ours, limit=LINE_BYTES)
            stack.pop_all()
        return streams

    async def _hand_over(self, descriptor: int) -> None:
        """Never blocking: a process that hangs with a full socket would hold up every attempt of this server."""
        until = asyncio.get_running_loop().time() + HAND_OVER_S
        while True:
            try:
                socket.send_fds(self._control, [b"t"], [descriptor])
                return
            except BlockingIOError:
                if asyncio.get_running_loop().time() > until:
                    raise Rl360Error(f"Harbor's process took no trial within {HAND_OVER_S:g} s") from None
            except OSError as error:  # it ended between our look and this
                raise Rl360Error(f"Harbor's process takes no trial: {error}") from None
            await asyncio.sleep(0.05)

    def close(self) -> None:
        """End it and see that."""
        self._control.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=5)


@dataclass(frozen=True)
class HarborAgent:
    """An agent of Harbor's, by its name there."""

    name: str
    worker: Worker

    def mounts(self, folder: Path) -> Mapping[str, Path]:
        shutil.copyfile(harness_entry.__file__, folder / "entry.py")
        (folder / "entry.py").chmod(0o644)
        home = self.worker.folder
        base = (home / "bin" / "python").resolve().parents[1]
        installed = {str(home): home, str(base): base} if self.name == INSTALLED else {}
        return {INSIDE: folder, **{name: path for name, path in installed.items() if path != Path("/usr")}}

    async def __call__(self, context: AgentContext) -> AgentEnd:
        assert context.folder is not None, "the runner gives an agent with mounts its folder"
        relay = Relay(context)
        inside = self.name == INSTALLED  # then alone what runs in the sandbox has a way to the session
        async with listening(relay, context.folder) if inside else listening_here(relay) as base_url:
            if base_url is None:
                base_url = f"http://127.0.0.1:{PORT}/v1"
                await context.exec(_RELAY_INSIDE, 20.0)
            reader, writer = await self.worker.connect()
            try:
                await _send(writer, self._order(context, base_url))
                async with asyncio.timeout(relay.left()) as clock:
                    end = await _carry(context, reader, writer)
            except TimeoutError:
                if not clock.expired():
                    raise
                said = "Harbor's agent ran to the deadline"
                raise AgentFailure(ExitStatus.AGENT_TIMEOUT, said, retryable=False) from None
            finally:
                writer.close()  # which ends the trial there, wherever it is
            if end is None:
                return AgentEnd(ExitStatus.AGENT_ERROR, "Harbor's process ended during the trial")
            raised, message = end.get("exception"), " ".join(str(end.get("message")).split())[-300:]
            return await ended(relay, self.name, 1 if raised else 0, f"{raised}: {message}" if raised else "")

    def _order(self, context: AgentContext, base_url: str) -> dict[str, Any]:
        kwargs: dict[str, Any] = {"skip_install": True}
        env = {**QUIET, "MSWEA_SILENT_STARTUP": "1", "PATH": f"{PATH}:{self.worker.folder / 'bin'}"}
        if self.name == ON_HOST:
            # one more turn than there are: what is over is refused by the relay, and named
            kwargs = {"max_turns": context.max_turns + 1, "enable_summarize": False, "record_terminal_session": False}
            kwargs |= {"api_base": base_url}
        return {
            "agent": self.name,
            "instruction": context.instruction,
            "model": context.model,
            "base_url": base_url,
            "kwargs": kwargs,
            "env": env,
        }


# the sandbox's way to the session, beside the agent; up before the agent asks
_ENTRY = shlex.join(["python3", f"{INSIDE}/entry.py", str(PORT), f"{INSIDE}/session.sock", "0", "--", "sleep", "86400"])
_RELAY_INSIDE = (
    f"setsid {_ENTRY} >/dev/null 2>&1 </dev/null & for i in $(seq 100); do "
    f"(: > /dev/tcp/127.0.0.1/{PORT}) 2>/dev/null && exit 0; sleep 0.1; done; exit 1"
)


async def _carry(
    context: AgentContext, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> dict[str, Any] | None:
    """Run what the trial asks for until it ends: how it did, or None when Harbor's process is gone."""
    with contextlib.suppress(ConnectionError):
        while line := await reader.readline():
            message = json.loads(line)
            if "end" in message:
                return message["end"]
            context.metrics.tool_calls += 1
            left = max(0.1, context.deadline - asyncio.get_running_loop().time())
            result = await context.exec(message["exec"], min(float(message["timeout_s"]), left), OUTPUT_BYTES)
            context.metrics.env_execution_time_sum += result.seconds
            answer = {"id": message["id"], "exit_code": result.exit_code, "timed_out": result.timed_out}
            await _send(writer, {**answer, "output": result.output.decode("utf-8", "replace")})
    return None


async def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


def harbor_agents(folder: Path) -> dict[str, Agent]:
    """Harbor's agents from the environment at `folder`; starts its process."""
    worker = Worker(folder)
    return {name: HarborAgent(name, worker) for name in (ON_HOST, INSTALLED)}
