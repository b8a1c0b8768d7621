"""In Harbor's process: a Harbor environment whose sandbox is the attempt's own, held by rl360's sandbox server.

`rl360.harbor.real.sandbox:AttemptEnvironment`. It starts and stops nothing: the sandbox is there before the trial and
is proven gone after it by who made it. Commands and files go over the trial's channel, as requests that have their own
deadlines there. What ends the sandbox ends the channel, and with it the trial: no infrastructure error becomes an
exception that Harbor would take for the agent's.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import shlex
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

CHUNK_BYTES = 24_000  # of a file, in one command
MAX_FILE_BYTES = 8 << 20
FILE_S, COMMAND_S = 60.0, 600.0
TIMED_OUT = 124
LINE_BYTES = 16 << 20
LOGS = "/tmp/rl360-logs"


class Channel:
    """One trial's connection to the sandbox server: requests `{"id", "exec"}` out, answers `{"id", ...}` in."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._number = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def listen(self) -> None:
        """Until the other side closes: then the trial is over, whatever it waits for."""
        while line := await self._reader.readline():
            answer = json.loads(line)
            waiting = self._waiting.pop(answer["id"], None)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)

    async def exec(self, command: str, timeout_s: float) -> dict[str, Any]:
        self._number += 1
        answer = asyncio.get_running_loop().create_future()
        self._waiting[self._number] = answer
        await self.send({"id": self._number, "exec": command, "timeout_s": timeout_s})
        return await answer

    async def send(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")
        await self._writer.drain()


class AttemptEnvironment(BaseEnvironment):
    """See the module's head."""

    def __init__(self, *args: Any, channel: Channel, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._channel = channel

    @staticmethod
    def type() -> str:
        return "rl360"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        return

    async def start(self, force_build: bool) -> None:
        await self._do(f"mkdir -p {LOGS}/agent")

    async def stop(self, delete: bool) -> None:
        return

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """As the sandbox's one user, whoever `user` is. Both outputs come as stdout, 124 after `timeout_sec`."""
        given = self._merge_env(env) or {}
        variables = "".join(f"export {name}={shlex.quote(value)}; " for name, value in given.items())
        place = f"cd {shlex.quote(cwd)} && " if cwd else ""
        # Harbor's own folder for logs lies in a root that is read-only here
        said = re.sub(r"(?<![\w/])/logs/agent\b", f"{LOGS}/agent", command)
        answer = await self._channel.exec(f"{place}{{ {variables}{said}\n}}", float(timeout_sec or COMMAND_S))
        code = TIMED_OUT if answer["timed_out"] else answer["exit_code"]
        return ExecResult(stdout=answer["output"], stderr="", return_code=code)

    async def _do(self, command: str) -> str:
        answer = await self._channel.exec(command, FILE_S)
        if answer["exit_code"] != 0 or answer["timed_out"]:
            raise RuntimeError(f"{command[:80]}: exit {answer['exit_code']}: {answer['output'][-300:]}")
        return answer["output"]

    async def _put(self, data: bytes, into: str) -> None:
        """`data` as the file `into`."""
        if len(data) > MAX_FILE_BYTES:
            raise RuntimeError(f"{into}: {len(data)} bytes, limit {MAX_FILE_BYTES}")
        path = shlex.quote(into)
        await self._do(f"mkdir -p {shlex.quote(str(PurePosixPath(into).parent))} && : > {path}")
        for start in range(0, len(data), CHUNK_BYTES):
            part = base64.b64encode(data[start : start + CHUNK_BYTES]).decode()
            await self._do(f"printf %s {part} | base64 -d >> {path}")

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._put(await asyncio.to_thread(Path(source_path).read_bytes), target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            tar.add(source_dir, arcname=".")
        await self._put(packed.getvalue(), f"{LOGS}/upload.tgz")
        target = shlex.quote(target_dir)
        await self._do(f"mkdir -p {target} && tar -xzf {LOGS}/upload.tgz -C {target} && rm {LOGS}/upload.tgz")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        raise NotImplementedError("nothing is taken out of an attempt's sandbox: its logs are the session's")

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        raise NotImplementedError("nothing is taken out of an attempt's sandbox: its logs are the session's")
