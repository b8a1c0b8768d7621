"""Two sandbox servers of a host run attempts of one name: the later one gives way, and ends nothing of the other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rl360.harbor.protocol import SandboxLimits
from rl360.sandboxes import cgroups
from rl360.sandboxes.bubblewrap import BubblewrapProvider
from rl360.sandboxes.provider import SandboxSpec, SandboxStartError
from tests.contract.test_sandboxes import REASON

pytestmark = [pytest.mark.contract, pytest.mark.skipif(REASON is not None, reason=REASON or "")]


@pytest.mark.skipif(not cgroups.planned("x").paths, reason="no cgroups here: names do not meet")
def test_what_a_killed_server_could_not_start_is_not_ended_where_it_runs(tmp_path: Path) -> None:
    async def go() -> None:
        first, second = (BubblewrapProvider(tmp_path / name) for name in ("first", "second"))
        work = await first.new_workspace("one", None)
        sandbox = await first.create(SandboxSpec("demo/one", {}, SandboxLimits(), work))
        try:
            other = await second.new_workspace("one", None)
            with pytest.raises(SandboxStartError, match="another sandbox of this name"):
                await second.create(SandboxSpec("demo/one", {}, SandboxLimits(), other))
            second.close()  # as a SIGKILL would
            assert await BubblewrapProvider(tmp_path / "second").reap() == [f"{other.path.name} {{}}: gone"]
            assert (await sandbox.exec("echo here", 5.0)).output == b"here\n"
        finally:
            assert (await sandbox.stop()).confirmed
            await first.remove_workspace(work)

    asyncio.run(go())
