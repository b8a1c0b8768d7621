"""What a sandbox provider is: create, exec, upload, download, stop with proof. No provider is imported here.

A workspace (one attempt's files on the host) outlives a sandbox: the agent's sandbox is stopped and proven gone,
then a second one is put over the same workspace for the verifier. Everything that comes back out of a sandbox
(output, tars, files) is hostile: capped, never followed, never executed outside.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rl360.errors import Rl360Error
from rl360.harbor.dockerfile import Files
from rl360.harbor.protocol import SandboxLimits


class SandboxStartError(Rl360Error):
    """A sandbox did not become ready in time. `proof`: how its end was seen; None when nothing had been started.
    `refused`: by an outside system that is asked too much (a quota, a rate)."""

    def __init__(self, message: str, proof: StopProof | None = None, *, refused: bool = False) -> None:
        super().__init__(message)
        self.proof, self.refused = proof, refused


class SandboxGone(Rl360Error):
    """The sandbox ended under a command. `by_contents`: what ran inside ended it (exhausted a limit, or told it to)."""

    def __init__(self, message: str, *, by_contents: bool) -> None:
        super().__init__(message)
        self.by_contents = by_contents


class StorageFull(Exception):
    """What runs in a sandbox filled its workspace."""


@dataclass(frozen=True)
class ExecResult:
    """One command's end. `output`: stdout and stderr as they were written, first `cap` bytes only."""

    exit_code: int
    output: bytes
    output_bytes: int
    seconds: float
    timed_out: bool = False


@dataclass(frozen=True)
class StopProof:
    """Whether every process of a sandbox is proven gone, how that was seen, and how long it took."""

    confirmed: bool
    evidence: str
    seconds: float


@dataclass(frozen=True)
class Workspace:
    """One attempt's host directory: `files` becomes the working directory, `logs` only the verifier sees. `deleting`:
    the end of each removal, whose disk is free only then."""

    path: Path
    deleting: list[Future[str | None]] = field(default_factory=list, compare=False)

    @property
    def files(self) -> Path:
        return self.path / "work"

    @property
    def logs(self) -> Path:
        return self.path / "logs"


@dataclass(frozen=True)
class SandboxSpec:
    """A sandbox to create. `labels` (run, step, attempt) say whose it is; `read_only`: inside path -> host path.

    `lifetime_s` is the lease: providers that can end a sandbox by themselves do so then. `stops` is given the proof of
    a start that ended otherwise than by `SandboxStartError`, as by a cancellation. `image`, `network`,
    `disk_mb` are for providers that have images, networks and quotas.
    """

    name: str
    labels: Mapping[str, str]
    limits: SandboxLimits
    workspace: Workspace
    workdir: str = "/app"
    read_only: Mapping[str, Path] = field(default_factory=dict)
    with_logs: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 20.0
    image: str | None = None
    network: str = "no-network"
    disk_mb: int = 1024
    lifetime_s: float = 3600.0
    stops: list[StopProof] = field(default_factory=list, compare=False)


class Sandbox(Protocol):
    """A running sandbox; one command at a time."""

    spec: SandboxSpec

    async def exec(self, command: str, timeout_s: float, cap_bytes: int | None = None) -> ExecResult:
        """Run `bash -c command` in the working directory. Never longer than `timeout_s` plus a short kill."""

    async def upload(self, tar: bytes, into: str, timeout_s: float) -> None:
        """Unpack a tar inside the sandbox, under its limits."""

    async def download(self, path: str, timeout_s: float, cap_bytes: int) -> bytes:
        """A tar of `path` made inside the sandbox; refused when larger than `cap_bytes`."""

    async def carry(self, deadline_s: float) -> None:
        """End what runs in it and bring its files to the workspace: `logs` of a sandbox that has them, else `files`.

        Nothing to do where the workspace is mounted. Raises `SandboxGone`; when `by_contents`, the workspace is empty:
        what is over its limits is not carried over. Otherwise the workspace holds nothing to judge.
        """

    async def stop(self, deadline_s: float = 10.0) -> StopProof:
        """End everything in it and prove that. Safe to call twice."""

    def pids(self) -> list[int] | None:
        """What runs in it, as this host sees it; None when it is elsewhere, and its files too."""


class Meter(Protocol):
    """What an attempt's sandboxes use of this host's disk. `over`: more than was theirs; `full`: the host had none left
    meanwhile, and that was not their doing."""

    over: bool
    full: bool

    async def exec(
        self, sandbox: Sandbox, command: str, timeout_s: float, cap_bytes: int | None = None, *, ends: bool = True
    ) -> ExecResult:
        """Run it; raises `StorageFull`, also while it runs, when over. `ends` false: what there is already does not
        count, only what this command adds."""

    def close(self) -> None:
        """Its sandboxes are gone."""


class SandboxProvider(Protocol):
    """Makes workspaces and sandboxes; removes what a dead server left. `image`: of tasks that name none."""

    image: str | None  # none where there are no images

    def refusal(self, needs: SandboxNeeds) -> str | None:
        """Why this provider cannot carry such a task, in one line; None when it can."""

    async def new_workspace(self, name: str, files: Files | None) -> Workspace:
        """A fresh workspace holding copies of `files`."""

    async def remove_workspace(self, workspace: Workspace) -> str | None:
        """Have it gone from its place; the reason when it is not. It is deleted in the background."""

    def meter(self, workspace: Workspace, storage_mb: int) -> Meter:
        """Measure what is used over this workspace until it is closed."""

    async def publish(self, source: Path, digest: str) -> Path:
        """A read-only copy of a trusted tree that sandboxes may mount, made once per digest."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox; raises `SandboxStartError` with nothing left behind."""

    async def reap(self) -> list[str]:
        """End and remove what an earlier server left; one line per thing found."""


@dataclass(frozen=True)
class SandboxNeeds:
    """What a task asks of a provider beyond files and limits."""

    network_mode: str
    docker_image: str | None


async def stop_surely(sandbox: Sandbox, stops: list[StopProof], deadline_s: float = 10.0) -> StopProof:
    """Stop `sandbox` and append the proof to `stops`; a cancellation waits for the stop to end and goes on then."""
    job = asyncio.ensure_future(_stop(sandbox, deadline_s))
    try:
        return await asyncio.shield(job)
    finally:
        if not job.done():
            await asyncio.wait({job})
        stops.append(job.result())


async def _stop(sandbox: Sandbox, deadline_s: float) -> StopProof:
    try:
        return await sandbox.stop(deadline_s)
    except Exception as error:  # an adapter may raise anything: a stop that failed is unproven, and spoils no verdict
        return StopProof(False, f"sandbox {sandbox.spec.name}: stop failed: {type(error).__name__}: {error}"[:500], 0.0)
