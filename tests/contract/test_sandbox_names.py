"""Sandbox servers of a host run attempts of one name beside each other, and each ends its own alone."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from rl360.harbor.protocol import SandboxLimits
from rl360.sandboxes import cgroups
from rl360.sandboxes.bubblewrap import BubblewrapProvider, marked_pids
from rl360.sandboxes.provider import SandboxSpec, SandboxStartError
from tests.contract.test_sandboxes import REASON

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
    pytest.mark.skipif(not cgroups.planned("x").paths, reason="no cgroups here: names do not meet"),
]
LIMITS = SandboxLimits()


def test_what_a_killed_server_left_is_ended_and_what_another_runs_is_not(tmp_path: Path) -> None:
    """Not by its name, and not by a record of it either, as a copied home has."""

    async def go() -> None:
        first, second = (BubblewrapProvider(tmp_path / name) for name in ("first", "second"))
        work, other = [await provider.new_workspace("one", None) for provider in (first, second)]
        sandbox = await first.create(SandboxSpec("demo/one", {}, LIMITS, work))
        await second.create(SandboxSpec("demo/one", {}, LIMITS, other))
        (record,) = work.path.glob("*.json")
        shutil.copy(record, other.path)
        second.close()  # as a SIGKILL would
        again = BubblewrapProvider(tmp_path / "second")
        try:
            (line,) = await again.reap()
            named = [part for part in line.split() if part.strip(",:").endswith(record.stem)]
            assert line.startswith(f"{other.path.name}: none of its processes is left, ") and named
            assert "folder NOT removed: another server's /" in line
            assert not marked_pids(other.path) and marked_pids(work.path)
            assert (await sandbox.exec("echo here", 5.0)).output == b"here\n"
            (other.path / record.name).unlink()
            (line,) = await again.reap()
            assert line.startswith(f"{other.path.name}: gone: none of its processes is left, ") and "NOT" not in line
        finally:
            assert (await sandbox.stop()).confirmed
            await first.remove_workspace(work)

    asyncio.run(go())


def test_a_name_that_is_taken_on_one_server_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    async def go() -> None:
        provider = BubblewrapProvider(tmp_path / "sandboxes")
        work, other = [await provider.new_workspace(name, None) for name in ("one", "two")]
        sandbox = await provider.create(SandboxSpec("demo/one", {}, LIMITS, work))
        try:
            with pytest.raises(SandboxStartError, match="another sandbox of this name"):
                await provider.create(SandboxSpec("demo/one", {}, LIMITS, other))
            assert list(other.path.glob("*.json")) == []  # by which a reaper would end the first
            assert (await sandbox.exec("echo here", 5.0)).output == b"here\n"
        finally:
            assert (await sandbox.stop()).confirmed
            await provider.remove_workspace(work)

    asyncio.run(go())
