"""Async client of the gateway (SMG): which engines get traffic. It queues adding and removing, so both are awaited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import httpx
import orjson

from rl360.engines.client import TRICKLE_S
from rl360.errors import ServiceError

_POLL_S = 0.05


@dataclass(frozen=True)
class Worker:
    """An engine the gateway knows. Only `usable` ones get new requests."""

    worker_id: str
    url: str
    status: str
    healthy: bool

    @property
    def usable(self) -> bool:
        return self.healthy and self.status == "ready"


class GatewayClient:
    """Workers of one gateway. Every call has a deadline; waiting is bounded by the caller's."""

    def __init__(self, url: str, http: httpx.AsyncClient, deadline_s: float = 10.0) -> None:
        self.url = url.rstrip("/")
        self.deadline_s = deadline_s
        self._http = http

    async def _call(
        self, method: str, path: str, body: object = None, doing: str = "", fine: Collection[int] = ()
    ) -> httpx.Response:
        """The answer; `ServiceError` when there is none, or one that is not `fine` for `doing` this (empty: any is)."""
        try:
            content = None if body is None else orjson.dumps(body)
            async with asyncio.timeout(self.deadline_s + TRICKLE_S):
                reply = await self._http.request(
                    method,
                    self.url + path,
                    content=content,
                    headers={"content-type": "application/json"},
                    timeout=self.deadline_s,
                )
        except (httpx.HTTPError, TimeoutError) as error:
            raise ServiceError(
                f"gateway {self.url}{path}: no answer within {self.deadline_s:g} s ({type(error).__name__}); "
                "is it up? try `rl360 status`"
            ) from None
        if fine and reply.status_code not in fine:
            raise ServiceError(f"gateway {self.url}: {doing} answered {reply.status_code}: {reply.text[:200]}")
        return reply

    async def workers(self) -> list[Worker]:
        """All workers, those being removed included."""
        reply = await self._call("GET", "/workers")
        try:
            rows = orjson.loads(reply.content)["workers"]
            return [
                Worker(str(row["id"]), str(row["url"]).rstrip("/"), str(row["status"]), bool(row["is_healthy"]))
                for row in rows
            ]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise ServiceError(f"gateway {self.url}/workers: unexpected reply {reply.text[:200]!r}") from None

    async def find(self, engine_url: str) -> Worker | None:
        return next((worker for worker in await self.workers() if worker.url == engine_url.rstrip("/")), None)

    async def add(self, engine_url: str, deadline_s: float, token: str | None = None) -> Worker:
        """Register an engine and wait until it gets traffic. Fine when it already does. `token`: what the gateway is
        to show at its door, for callers that show none."""
        key = {} if token is None else {"api_key": token}
        until = time.monotonic() + deadline_s
        asked_at = 0.0
        while True:
            worker = await self.find(engine_url)
            if worker is not None and worker.usable:
                return worker
            if time.monotonic() > until:
                state = "not listed" if worker is None else f"{worker.status}, healthy={worker.healthy}"
                raise ServiceError(f"gateway {self.url}: {engine_url} not usable within {deadline_s:g} s ({state})")
            # a worker still draining from an earlier removal keeps its URL taken (409): ask again once it is gone
            if worker is None and time.monotonic() - asked_at > 1.0:
                asked_at = time.monotonic()
                await self._call(
                    "POST", "/workers", {"url": engine_url} | key, f"adding {engine_url}", (200, 201, 202, 409)
                )
            await asyncio.sleep(_POLL_S)

    async def keep_only(self, engine_urls: Collection[str], deadline_s: float) -> list[str]:
        """Take every other engine out, those nobody configured any more included. Returns the removed."""
        others = [worker.url for worker in await self.workers() if worker.url not in engine_urls]
        for url in others:
            await self.remove(url, deadline_s)
        return others

    async def remove(self, engine_url: str, deadline_s: float, may: Callable[[], None] = lambda: None) -> bool:
        """Take an engine out and wait until it gets no new requests. False when it was not in. `may` raises when the
        caller may not any more; it is asked before each removal."""
        until = time.monotonic() + deadline_s
        found = False
        while True:
            worker = await self.find(engine_url)
            if worker is None or worker.status == "draining":
                return found or worker is not None
            if time.monotonic() > until:
                raise ServiceError(f"gateway {self.url}: {engine_url} still {worker.status} after {deadline_s:g} s")
            may()
            found = True
            path = f"/workers/{worker.worker_id}"
            await self._call("DELETE", path, None, f"removing {engine_url}", (200, 202, 204, 404))
            await asyncio.sleep(_POLL_S)
