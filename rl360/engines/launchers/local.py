"""Engines as processes of this host: `supervised` by `rl360 up`, or `local`, started by the fleet's keeper.

A local engine leads a process group of its own. Its environment carries the instance of `rl360 up` (so that
`rl360 down`, and the sweep after a killed supervisor, end it) and `RL360_ENGINE=HOME:MARK` (so that a new keeper finds
one whose record was not finished); it does not carry the keeper's own incarnation, with which the supervisor ends what
a dead service left. It outlives the keeper on purpose.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
from pydantic import ValidationError

from rl360.config.services import Services
from rl360.engines.launchers.base import Handle, Start, last_line
from rl360.engines.processes import EndProof, ProcessTree, boot_id, end_tree, proof_of_end, tree_of_pid
from rl360.errors import CorruptObject, Rl360Error, ServiceError
from rl360.store.data import Data

MARK_ENV = "RL360_ENGINE"
INSTANCE_ENV = "RL360_INSTANCE"
SERVICE_ENV = "RL360_SERVICE"
MEMORY_BYTES = 2400 << 20  # what one takes while it starts, and some room
ROOT = Path(__file__).resolve().parents[3]


class SupervisedLauncher:
    """The engines of `services.json`: the supervisor starts them again, the keeper ends them and proves it."""

    kind = "supervised"
    starts = False

    def port_of(self, number: int) -> int:
        return 13_000 + number  # not asked: whoever adds one looks for a free port

    async def start(self, start: Start, deadline_s: float) -> Handle:
        raise ServiceError(f"{start.name} is started by the supervisor of `rl360 up`, not by the fleet")

    async def locate(self, handle: Handle, deadline_s: float) -> Handle:
        return handle

    async def find(self, deadline_s: float) -> list[Handle]:
        return []

    async def proof(self, handle: Handle, deadline_s: float) -> EndProof:
        return await asyncio.to_thread(proof_of_end, handle.process)

    async def end(self, handle: Handle, deadline_s: float) -> EndProof:
        return await end_tree(handle.process, deadline_s)


class _Record(Data):
    """`HOME/engines/MARK.json`, written before the process is made and again with what it is."""

    port: int
    boot_id: str
    process: ProcessTree | None = None


class LocalLauncher(SupervisedLauncher):
    """Further engines on this host."""

    kind = "local"
    starts = True

    def __init__(
        self, services: Services, argv: tuple[str, ...] = (sys.executable, "-m", "rl360.engines.launch")
    ) -> None:
        self.home = Path(services.home)
        self.argv = argv
        self._children: list[subprocess.Popen[bytes]] = []

    def _path(self, mark: str) -> Path:
        return self.home / "engines" / f"{mark}.json"

    def _write(self, mark: str, record: _Record) -> None:
        path = self._path(mark)
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(record.model_dump_json())
        scratch.replace(path)

    def _read(self, mark: str) -> _Record | None:
        try:
            return _Record.model_validate_json(self._path(mark).read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise CorruptObject(
                str(self._path(mark)), f"not a local engine's record: {error.errors()[0]['msg']}"
            ) from None

    async def start(self, start: Start, deadline_s: float) -> Handle:
        known = await asyncio.to_thread(self._find, start.mark)
        if known is not None:
            return known
        free = psutil.virtual_memory().available
        if free < MEMORY_BYTES:
            raise ServiceError(
                f"{start.mark}: {free >> 20} MiB of memory are available, an engine needs {MEMORY_BYTES >> 20} MiB; "
                f"end something, or `rl360 fleet remove {start.name}`"
            )
        return await asyncio.to_thread(self._spawn, start)

    def _spawn(self, start: Start) -> Handle:
        env = {name: value for name, value in os.environ.items() if name != "RL360_INCARNATION"}
        env |= {MARK_ENV: f"{self.home}:{start.mark}", INSTANCE_ENV: self._instance(), SERVICE_ENV: start.name}
        env |= {"RL360_HOME": str(self.home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        log_path = self._log(start.name)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        record = _Record(port=start.port, boot_id=boot_id())
        self._write(start.mark, record)
        with log_path.open("ab") as log:
            log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} start {start.mark}\n".encode())
            log.flush()
            process = subprocess.Popen(
                [*self.argv, *start.model_copy(update={"routed_experts": self._routed()}).argv("127.0.0.1")],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._children = [child for child in [*self._children, process] if child.poll() is None]
        record = record.model_copy(update={"process": tree_of_pid(process.pid)})
        self._write(start.mark, record)
        return self._handle(start.mark, record)

    def _handle(self, mark: str, record: _Record) -> Handle:
        return Handle(mark=mark, url=f"http://127.0.0.1:{record.port}", process=record.process)

    def _instance(self) -> str:
        """The running `rl360 up` that will end this engine; without one nothing would."""
        if given := os.environ.get(INSTANCE_ENV):
            return given
        try:
            return str(json.loads((self.home / "state.json").read_text())["instance"])
        except (OSError, ValueError, KeyError):
            raise Rl360Error(
                f"no services are up in {self.home}, so nothing would end a local engine; run `rl360 up` first"
            ) from None

    def _routed(self) -> bool:
        """Whether the engines of `rl360 up` return routed experts; one that doesn't would cost all its samples."""
        try:
            return bool(json.loads((self.home / "up.json").read_text())["routed_experts"])
        except (OSError, ValueError, KeyError):
            return False

    def _find(self, mark: str) -> Handle | None:
        """One start that lives: by its record, else by the mark in a first environment."""
        record = self._read(mark)
        if record is None:
            return None
        if record.process is None:
            wanted = f"{MARK_ENV}={self.home}:{mark}"
            pids = [pid for pid in psutil.pids() if _has(pid, wanted)]
            leader = next((tree for pid in pids if (tree := tree_of_pid(pid)) and tree.group == pid), None)
            record = record.model_copy(update={"process": leader})
        return None if proof_of_end(record.process).gone else self._handle(mark, record)

    async def locate(self, handle: Handle, deadline_s: float) -> Handle:
        """Its processes run from the start on; `detail` is the last line of its log."""
        said = await asyncio.to_thread(last_line, self._log(handle.mark.rpartition("-")[0]))
        return handle.model_copy(update={"running": True, "state": "loading", "detail": said})

    def _log(self, name: str) -> Path:
        return self.home / "logs" / f"{name}.log"

    async def find(self, deadline_s: float) -> list[Handle]:
        def look() -> list[Handle]:
            marks = [path.stem for path in (self.home / "engines").glob("*.json")]
            return [handle for mark in marks if (handle := self._find(mark)) is not None]

        return await asyncio.to_thread(look)

    def _known(self, handle: Handle) -> Handle | EndProof:
        """The handle with its processes; or the proof, when it was never started or its host was started again."""
        if handle.process is not None:
            return handle
        record = self._read(handle.mark)
        if record is None:
            return EndProof(
                gone=True, evidence=f"{handle.mark} was never started: there is no {self._path(handle.mark)}"
            )
        if record.boot_id != boot_id():
            return EndProof(gone=True, evidence="host rebooted since it was started")
        found = self._find(handle.mark)
        if found is not None and found.process is not None:
            return found
        return handle.model_copy(update={"process": record.process})

    async def proof(self, handle: Handle, deadline_s: float) -> EndProof:
        for child in self._children:
            child.poll()  # one that ended is reaped
        known = await asyncio.to_thread(self._known, handle)
        return known if isinstance(known, EndProof) else await super().proof(known, deadline_s)

    async def end(self, handle: Handle, deadline_s: float) -> EndProof:
        """SIGKILL: what the engine holds is nobody's any more. Its record goes with the proof."""
        known = await asyncio.to_thread(self._known, handle)
        proof = known if isinstance(known, EndProof) else await super().end(known, deadline_s)
        for child in self._children:
            child.poll()
        if proof.gone:
            self._path(handle.mark).unlink(missing_ok=True)
        return proof


def _has(pid: int, entry: str) -> bool:
    """Whether the environment a process started with has this entry."""
    try:
        return entry in Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
