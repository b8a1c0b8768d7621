"""Remote sandboxes under drawn faults: whatever a provider's system does, nothing is left and nothing is claimed.

A system in memory instead of HTTP: creates that are refused, that fail after the fact, that are carried out late; ends
and lists without an answer; sandboxes that vanish. Then the server is killed, or not, and a reaper comes.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.errors import ServiceError
from rl360.harbor.protocol import SandboxLimits
from rl360.http_api import NoAnswer, Refused
from rl360.sandboxes import leases
from rl360.sandboxes.provider import SandboxGone, SandboxNeeds, SandboxSpec, SandboxStartError
from rl360.sandboxes.providers import remote
from rl360.sandboxes.providers.remote import Box, Lost, Order, Output, RemoteProvider
from rl360.sandboxes.providers.tars import Part

CREATES = ("fine", "refused", "made-and-lost", "late", "hangs", "never-made", "garbage")
CALLS = ("fine", "fine", "fine", "no-answer", "lost", "refused")


class Memory:
    """A system whose faults are given in order; when they are used up it works."""

    kind, image = "memory", "i"

    def __init__(self, creates: list[str], calls: list[str]) -> None:
        self.boxes: dict[str, Mapping[str, str]] = {}
        self.creates, self.calls = list(creates), list(calls)
        self.late: list[asyncio.Task[None]] = []

    def refusal(self, needs: SandboxNeeds) -> str | None:
        return None

    async def _make_later(self, order: Order) -> None:
        await asyncio.sleep(0.02)
        self.boxes[order.name] = order.labels

    async def start(self, order: Order, deadline_s: float) -> Box:
        what = self.creates.pop(0) if self.creates else "fine"
        if what == "refused":
            raise Refused("quota", 403)
        if what in ("fine", "made-and-lost", "garbage"):
            self.boxes[order.name] = order.labels
        if what == "late":
            self.late.append(asyncio.ensure_future(self._make_later(order)))
        if what in ("made-and-lost", "late", "never-made"):
            raise NoAnswer("no answer")
        if what == "garbage":
            raise ServiceError("not a JSON object")
        if what == "hangs":
            self.late.append(asyncio.ensure_future(self._make_later(order)))
            await asyncio.Event().wait()
        return Box(order.name, order.spec)

    async def _fault(self, ident: str | None = None) -> None:
        what = self.calls.pop(0) if self.calls else "fine"
        await asyncio.sleep(0)
        if what == "no-answer":
            raise NoAnswer("no answer")
        if what == "refused":
            raise Refused("rate", 429)
        if what == "lost" and ident is not None:
            self.boxes.pop(ident, None)
        if ident is not None and ident not in self.boxes:
            raise Lost("404")

    async def fill(self, box: Box, parts: list[Part], scratch: IO[bytes], deadline_s: float) -> None:
        await self._fault(box.ident)

    async def run(self, box: Box, command: str, output: Output, deadline_s: float) -> int:
        await self._fault(box.ident)
        return 0

    async def quiet(self, box: Box, deadline_s: float) -> None:
        await self._fault(box.ident)

    async def fetch(self, box: Box, path: str, into: IO[bytes], limit_bytes: int, deadline_s: float) -> None:
        await self._fault(box.ident)
        raise NoAnswer("cut off")

    async def end(self, ident: str, deadline_s: float) -> None:
        await self._fault()
        self.boxes.pop(ident, None)

    async def missing(self, ident: str, deadline_s: float) -> str | None:
        await self._fault()
        return None if ident in self.boxes else "404"

    async def listed(self, wanted: Mapping[str, str], deadline_s: float) -> list[leases.Lease]:
        await self._fault()
        found = [name for name, labels in self.boxes.items() if wanted.items() <= labels.items()]
        return [leases.Lease(self.kind, name, self.boxes[name]) for name in found]

    async def close(self) -> None:
        pass


async def attempt(provider: RemoteProvider, memory: Memory, number: int) -> None:
    workspace = await provider.new_workspace(f"n{number}", None)
    (workspace.files / "f").write_text("given")
    limits = SandboxLimits()
    try:
        spec = SandboxSpec(f"n{number}", {"run": "r"}, limits, workspace, start_timeout_s=0.05)
        sandbox = await provider.create(spec)
    except SandboxStartError as error:
        assert error.proof is not None  # noqa: PT017
        if error.proof.confirmed:
            assert not [name for name in memory.boxes if name not in provider.held]
        return
    try:
        await sandbox.exec("true", 0.5)
        await sandbox.carry(0.5)
        raise AssertionError("files that never came were taken for carried over")
    except SandboxGone as gone:
        assert not gone.by_contents, "a fault of the system's was put on the policy"  # noqa: PT017
    for _ in range(20):
        proof = await sandbox.stop(0.2)
        assert proof.confirmed is (sandbox._box.ident not in memory.boxes) or not proof.confirmed
        if proof.confirmed:
            break
    assert proof.confirmed


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(CREATES), max_size=6), st.lists(st.sampled_from(CALLS), max_size=30), st.booleans())
def test_nothing_is_left_whatever_fails(creates: list[str], calls: list[str], killed: bool) -> None:
    async def go(root: Path) -> None:
        memory = Memory(creates, calls)
        provider = RemoteProvider(memory, root, "d")
        await asyncio.gather(*(attempt(provider, memory, number) for number in range(6)))
        if killed:  # its watches die with it, and its creates go on
            for watch in list(provider._watches.values()):
                watch.cancel()
            provider.held.clear()
        else:
            while provider._watches:
                await asyncio.wait(list(provider._watches.values()))
        await asyncio.gather(*memory.late)
        memory.calls.clear()
        lines = await provider.reap()
        assert memory.boxes == {} and not [line for line in lines if "NOT" in line]
        assert provider.held == set()
        provider.close()

    real = asyncio.sleep
    quick: dict[str, Any] = {"UNDO_S": 0.2, "POLL_S": 0.001, "LATE_S": 0.3}

    async def soon(seconds: float) -> None:
        await real(min(seconds, 0.01))

    with (
        tempfile.TemporaryDirectory() as folder,
        patch.multiple(remote, **quick),
        patch.object(remote.asyncio, "sleep", soon),
    ):
        asyncio.run(go(Path(folder)))
