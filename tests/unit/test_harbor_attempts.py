"""The sandbox server's queue: what a flush leaves behind."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httpx

from rl360.agents import bash_agent
from rl360.harbor.protocol import RunRequest
from rl360.harbor.runner import Runner
from rl360.harbor.server import Attempts, FlushRequest
from rl360.sandboxes.provider import SandboxNeeds, SandboxProvider
from rl360.tasksets.harbor_files import BUILTIN_DIR


class NeverStarts:
    """A provider that is asked nothing but whether it can: the attempt ends before its sandbox."""

    def refusal(self, _: SandboxNeeds) -> str | None:
        return None


def test_an_attempt_flushed_before_it_began_frees_its_place() -> None:
    task = next(path for path in sorted(BUILTIN_DIR.iterdir()) if path.is_dir())
    request = RunRequest(instance_id="t", task_dir=str(task), attempt_id="a", run="r", base_url="http://h")

    async def go() -> tuple[Any, int]:
        async with httpx.AsyncClient() as http:
            attempts = Attempts(Runner(cast(SandboxProvider, NeverStarts()), http, "t" * 16), 1, 1)
            asked = asyncio.create_task(attempts.submit(request, "", {"bash": bash_agent.run}))
            while not attempts.running:  # noqa: ASYNC110  the moment between made and begun is what is tested
                await asyncio.sleep(0)
            assert attempts.flush(FlushRequest(run="r")) == 1
            ended = (await asyncio.gather(asked, return_exceptions=True))[0]
            return ended, attempts.running

    ended, running = asyncio.run(go())
    assert isinstance(ended, asyncio.CancelledError)
    assert running == 0
