"""An attempt that nobody waits for any more is ended where it runs, whichever server that is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rl360.agents.rollout import RolloutClient
from rl360.config.run import RunConfig
from tests.unit.test_rollout import GONE, services_at


class SandboxServer:
    """Answers `/flush` as one that runs these attempts does, or with the body it is given."""

    def __init__(self, runs: tuple[str, ...] = (), said: Any = None) -> None:
        self.runs, self.said, self.asked = runs, said, 0

    async def flush(self, request: web.Request) -> web.Response:
        self.asked += 1
        ids = (await request.json())["attempt_ids"]
        elsewhere = [one for one in ids if one not in self.runs]
        return web.json_response({"cancelled": 1, "elsewhere": elsewhere} if self.said is None else self.said)


@pytest.mark.parametrize(
    ("first", "others_asked"),
    [
        (SandboxServer(("a",)), 0),
        (SandboxServer(("b",)), 1),
        (SandboxServer(said={"error": {"code": 503}}), 1),
        (SandboxServer(said=["odd"]), 1),
        (None, 1),
    ],
    ids=["runs there", "runs elsewhere", "refuses", "odd", "gone"],
)
def test_who_is_asked_to_end_an_attempt(tmp_path: Path, first: SandboxServer | None, others_asked: int) -> None:
    async def go() -> None:
        others = [SandboxServer(("a",)), SandboxServer()]
        urls, runners = [], []
        for one in [*([first] if first else []), *others]:
            app = web.Application()
            app.router.add_post("/flush", one.flush)
            runners.append(web.AppRunner(app))
            await runners[-1].setup()
            site = web.TCPSite(runners[-1], "127.0.0.1", 0)
            await site.start()
            urls.append(f"http://127.0.0.1:{runners[-1].addresses[0][1]}")
        urls = urls if first else [GONE, *urls]
        services = services_at(tmp_path, urls[0], GONE).model_copy(update={"sandbox_urls": urls})
        async with RolloutClient(services, RunConfig.parse({}), 0, 0, "demo:0") as client:
            await client._flush("a", urls[0])
        assert [one.asked for one in others] == [others_asked] * 2 and (first is None or first.asked == 1)
        for runner in runners:
            await runner.cleanup()

    asyncio.run(go())
