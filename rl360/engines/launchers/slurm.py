"""Engines as Slurm jobs, over sbatch, squeue, scancel and sacct. Not run on a real cluster.

The job is `infra/slurm/engine.sh` (or `slurm/engine.sh` in the home); the engine's arguments are the script's, so that
nothing is pasted into shell text. One start is one job with a name of its own that is not requeued. Proof of an end:
squeue lists the job no more (one whose processes still end is COMPLETING and listed) and sacct calls it ended: by
itself, by scancel or by a limit. A start whose number nobody learned and whose name neither knows is not proven gone.
NODE_FAIL and its like say that Slurm lost sight of the node, not that the processes are gone. Jobs may share a node, so
each engine of the fleet has a port of its own.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from rl360.config.services import Services
from rl360.engines.launchers.base import Handle, Start, fleet_id, last_line
from rl360.engines.processes import EndProof
from rl360.errors import Rl360Error, ServiceError

SCRIPT = Path(__file__).resolve().parents[3] / "infra" / "slurm" / "engine.sh"
CALL_S = 20.0
POLL_S = 2.0
# slurmd saw all processes of the job end
ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE"})


class SlurmLauncher:
    """Jobs of one fleet, of this user."""

    kind = "slurm"
    starts = True

    def __init__(self, services: Services) -> None:
        self.home = Path(services.home)
        self.fleet = fleet_id(services)
        own = self.home / "slurm" / "engine.sh"
        self.script = own if own.is_file() else SCRIPT

    def port_of(self, number: int) -> int:
        """Ten apart, below the ports that hosts give to outgoing connections."""
        return 13_000 + 10 * (number % 1900)

    def _job(self, mark: str) -> str:
        return f"rl360-{self.fleet}-{mark}"

    def submission(self, start: Start) -> list[str]:
        """The command line that submits one start."""
        log = self.home / "logs" / f"{start.name}-%j.log"
        flags = ["--parsable", f"--job-name={self._job(start.mark)}", f"--output={log}", "--export=ALL"]
        return ["sbatch", *flags, str(self.script), *start.argv("0.0.0.0")]

    async def start(self, start: Start, deadline_s: float) -> Handle:
        known = [handle for handle in await self.find(deadline_s) if handle.mark == start.mark]
        if known:
            return known[0].model_copy(update={"ref": {**known[0].ref, "port": str(start.port)}})
        text = await self._run(self.submission(start), deadline_s)
        job = text.strip().partition(";")[0]
        if not job.isdecimal():
            raise ServiceError(f"sbatch answered {text[:100]!r}, expected the number of a job")
        return Handle(mark=start.mark, ref={"job": job, "port": str(start.port)})

    async def find(self, deadline_s: float) -> list[Handle]:
        text = await self._run(["squeue", "--noheader", "--me", "--format=%i|%j"], deadline_s)
        found = []
        for line in text.splitlines():
            job, _, name = line.strip().partition("|")
            if name.startswith(self._job("")):
                found.append(Handle(mark=name.removeprefix(self._job("")), ref={"job": job}))
        return found

    async def locate(self, handle: Handle, deadline_s: float) -> Handle:
        """Running on a node: its URL. `detail` is the last line of its log, while it waits the controller's reason."""
        job, port = handle.ref.get("job"), handle.ref.get("port")
        if not job:
            return handle
        flags = ["--noheader", f"--jobs={job}", "--format=%T|%N|%r"]
        text = await self._run(["squeue", *flags], deadline_s, unknown_ok=True)
        state, node, why = [*text.strip().split("|"), "", ""][:3]
        if not state:
            return handle.model_copy(update={"failed": f"squeue lists job {job} no more"})
        told: dict[str, object] = {"state": state, "detail": f"{state} ({why})" if why not in ("", "None") else state}
        if state == "RUNNING":
            told["running"] = True
            log = self.home / "logs" / f"{handle.mark.rpartition('-')[0]}-{job}.log"
            told["detail"] = await asyncio.to_thread(last_line, log)
            if port and node and not any(mark in node for mark in ",["):
                told["url"] = f"http://{node}:{port}"
        return handle.model_copy(update=told)

    async def _number(self, handle: Handle, deadline_s: float) -> str:
        """The job's number; by its name when the answer of sbatch was lost. Empty when Slurm knows no such job."""
        if job := handle.ref.get("job"):
            return job
        if listed := [found.ref["job"] for found in await self.find(deadline_s) if found.mark == handle.mark]:
            return listed[0]
        flags = ["--noheader", "--parsable2", "--allocations", "--starttime=now-30days", "--format=JobIDRaw"]
        text = await self._run(["sacct", f"--name={self._job(handle.mark)}", *flags], deadline_s)
        return (text.strip().splitlines() or [""])[-1]

    async def proof(self, handle: Handle, deadline_s: float) -> EndProof:
        job = await self._number(handle, deadline_s)
        if not job:
            unknown = f"neither squeue nor sacct knows a job {self._job(handle.mark)}"
            return EndProof(gone=False, evidence=f"{unknown}; sbatch may have queued one whose number was lost")
        flags = ["--noheader", f"--jobs={job}", "--format=%T|%N"]
        listed = (await self._run(["squeue", *flags], deadline_s, unknown_ok=True)).strip()
        if listed:
            state, _, node = listed.partition("|")
            return EndProof(gone=False, evidence=f"squeue lists job {job}: {state} on {node or 'no node yet'}")
        flags = ["--noheader", "--parsable2", "--allocations", "--format=State,End,NodeList"]
        lines = (await self._run(["sacct", f"--jobs={job}", *flags], deadline_s)).strip().splitlines()
        state, end, node = [*lines[-1].split("|"), "", ""][:3] if lines else ("not known", "", "")
        unlisted = f"squeue lists job {job} no more"
        if state.partition(" ")[0] in ENDED and end not in ("", "Unknown"):  # "CANCELLED by 1000"
            return EndProof(gone=True, evidence=f"{unlisted}; sacct: {state} at {end} on {node}")
        return EndProof(
            gone=False, evidence=f"{unlisted}, but sacct calls it {state}: processes may run on {node or '?'}"
        )

    async def end(self, handle: Handle, deadline_s: float) -> EndProof:
        until = time.monotonic() + deadline_s
        job = await self._number(handle, deadline_s)
        if job:
            handle = handle.model_copy(update={"ref": {**handle.ref, "job": job}})
            await self._run(["scancel", job], deadline_s, unknown_ok=True)
        while True:
            proof = await self.proof(handle, max(1.0, until - time.monotonic()))
            if proof.gone or time.monotonic() > until:
                return proof
            await asyncio.sleep(min(POLL_S, max(0.1, until - time.monotonic())))

    async def _run(self, argv: list[str], deadline_s: float, *, unknown_ok: bool = False) -> str:
        """What one of Slurm's programs prints. `unknown_ok`: that a job is unknown or over is an empty answer."""
        limit_s = min(CALL_S, deadline_s)
        env = {**os.environ, "RL360_HOME": str(self.home), "RL360_PYTHON": sys.executable, "LC_ALL": "C"}
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except FileNotFoundError:
            raise Rl360Error(
                f"launcher slurm: no program {argv[0]} on PATH; run `rl360 fleet keep` on a login node"
            ) from None
        try:
            out, err = await asyncio.wait_for(process.communicate(), limit_s)
        except TimeoutError:
            raise ServiceError(f"{argv[0]} did not end within {limit_s:g} s; is Slurm's controller up?") from None
        finally:
            if process.returncode is None:  # past its time, or the keeper stops
                process.kill()
                await process.wait()
        if process.returncode:
            said = err.decode(errors="replace").strip()
            if unknown_ok and ("Invalid job id" in said or "already completing or completed" in said):
                return ""
            raise ServiceError(f"{argv[0]} ended with exit code {process.returncode}: {said[:200]}")
        return out.decode(errors="replace")
