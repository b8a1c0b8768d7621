"""An answer that comes byte by byte, each within the limit of one read: the deadline of the call ends it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import httpx
import pytest

from rl360.engines import health
from rl360.errors import ServiceError
from rl360.training import client
from rl360.training.client import TrainerClient

DEADLINE_S = 0.1


async def _drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    for _ in range(300):  # longer than the test waits
        try:
            writer.write(b" ")
            await writer.drain()
        except ConnectionError:
            break
        await asyncio.sleep(0.02)
    writer.close()


async def in_flight(url: str, http: httpx.AsyncClient) -> None:
    assert await health.in_flight(url, http, DEADLINE_S) is None


async def generate(url: str, http: httpx.AsyncClient) -> None:
    assert "generated nothing within 0.1 s" in await health.generate(url, http, (1,), 10, DEADLINE_S)


async def trainer(url: str, http: httpx.AsyncClient) -> None:
    with pytest.raises(ServiceError, match=r"no answer within 0\.1 s"):
        await TrainerClient(url, http, {}).open_run("demo", DEADLINE_S)


@pytest.mark.parametrize("ask", [in_flight, generate, trainer])
def test_an_answer_that_drips_ends_with_the_deadline(
    ask: Callable[[str, httpx.AsyncClient], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "TRICKLE_S", 0.05)
    monkeypatch.setattr(client, "TRICKLE_S", 0.05)

    async def run() -> float:
        server = await asyncio.start_server(_drip, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with httpx.AsyncClient() as http:
            began = time.monotonic()
            await asyncio.wait_for(ask(url, http), 3.0)
        server.close()
        return time.monotonic() - began

    assert asyncio.run(run()) < 3.0
