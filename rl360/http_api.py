"""Calls to an outside system's HTTP API, each under a deadline: what may pass is tried again, the rest is named.

Tried again until the deadline: 429 (nothing was done; `Retry-After` is kept to) and one fresh token (401); 5xx and no
answer where the caller says that a repeat is harmless. Everything else is `Refused` at once.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from rl360.errors import Rl360Error, ServiceError

CALL_S = 10.0  # one try of one call
TRIES = 1000
JSON = "application/json"


class Refused(Rl360Error):
    """The server's last word: `status`, its message, and what would mend it when the caller knows."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class NoAnswer(ServiceError):
    """No last word in time. What was asked may have been done, or may still be."""


@dataclass(frozen=True)
class Endpoint:
    """Where an API is and who we are there. `headers` are made for each call (tokens rotate); `socket`: a unix socket
    to speak to instead of the host in `url`; `hints`: by status, what would mend a refusal; `absent`: whether a
    404's body is this API's own word that there is no such object. A proxy's must not prove an end."""

    name: str
    url: str
    headers: Callable[[], Mapping[str, str]] = dict
    ca_path: str | None = None
    socket: str | None = None
    hints: Mapping[int, str] = field(default_factory=dict)
    absent: Callable[[Mapping[str, Any]], bool] = bool

    def client(self) -> httpx.AsyncClient:
        verify: Any = httpx.create_ssl_context(verify=self.ca_path) if self.ca_path else self.socket is None
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
        transport = httpx.AsyncHTTPTransport(uds=self.socket, limits=limits, verify=verify)
        return httpx.AsyncClient(transport=transport, trust_env=False)


class Api:
    """One client of an endpoint, for one event loop. Close it, or use it as a context."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._http = endpoint.client()

    async def __aenter__(self) -> Api:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def call(
        self,
        method: str,
        path: str,
        deadline_s: float,
        body: Any = None,
        *,
        params: Mapping[str, str] | None = None,
        also: tuple[int, ...] = (),
        repeat: bool = True,
        try_s: float = CALL_S,
        content: Callable[[], AsyncIterator[bytes]] | None = None,
        files: Callable[[], Mapping[str, Any]] | None = None,
    ) -> httpx.Response:
        """The reply when it is 2xx or one of `also`. `repeat=False`: not asked twice when it may have been done.
        `content` and `files` are made anew for each try. Raises `Refused` and `NoAnswer`."""
        until = time.monotonic() + deadline_s
        denied, problem, status = 0, "not asked", 0
        for number in range(1, TRIES):
            wait_s = min(5.0, 0.2 * 2**number) * random.uniform(0.75, 1.0)
            limit_s = max(0.1, min(try_s, until - time.monotonic()))
            try:
                async with asyncio.timeout(limit_s + 0.5):  # an answer byte by byte misses no read's deadline
                    reply = await self._http.request(
                        method,
                        self._url(path),
                        params=params,
                        content=content() if content else None if body is None else orjson.dumps(body),
                        files=files() if files else None,
                        headers={**self.endpoint.headers(), **({} if body is None else {"content-type": JSON})},
                        timeout=limit_s,
                    )
            except (httpx.HTTPError, TimeoutError) as error:
                status, problem = 0, f"no answer ({type(error).__name__})"
                if not (repeat or isinstance(error, httpx.ConnectError)):
                    break
            else:
                status = reply.status_code
                self._check_absent(method, path, reply)
                if reply.is_success or status in also:
                    return reply
                problem = f"answered {status}: {message_of(reply)}"
                denied += status == 401
                if status >= 500 and not repeat:
                    break
                if not (status == 429 or status >= 500 or (status == 401 and denied < 2)):
                    raise Refused(f"{self.endpoint.name}: {method} {path} {problem}{self._hint(status)}", status)
                wait_s = retry_after_s(reply, wait_s)
            if time.monotonic() + wait_s > until:
                break
            await asyncio.sleep(wait_s)
        text = f"{self.endpoint.name}: {method} {path} {problem}; gave up after {deadline_s:g} s"
        raise Refused(text, status) if status == 429 else NoAnswer(text)

    def _check_absent(self, method: str, path: str, reply: httpx.Response) -> None:
        if reply.status_code == 404:
            try:
                body = orjson.loads(reply.content)
            except orjson.JSONDecodeError:
                body = None
            if not isinstance(body, dict) or not self.endpoint.absent(body):
                said = f"answered 404 and not as this API does: {reply.text[:80]!r}"
                raise ServiceError(f"{self.endpoint.name}: {method} {path} {said}")

    async def json(self, method: str, path: str, deadline_s: float, body: Any = None, **options: Any) -> Any:
        """`call` and the JSON object or list it answered, None for 204. `ServiceError` when it is neither."""
        reply = await self.call(method, path, deadline_s, body, **options)
        return None if reply.status_code == 204 else self.document(reply)

    def document(self, reply: httpx.Response) -> Any:
        try:
            found = orjson.loads(reply.content)
        except orjson.JSONDecodeError:
            found = None
        if not isinstance(found, dict | list):
            raise ServiceError(f"{self.endpoint.name}: reply is not a JSON object: {reply.text[:80]!r}")
        return found

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, deadline_s: float, body: Any = None, **options: Any
    ) -> AsyncIterator[httpx.Response]:
        """A 2xx reply as it comes, never asked twice; the caller bounds how long it reads."""
        headers = {**self.endpoint.headers(), **({} if body is None else {"content-type": JSON})}
        timeout = httpx.Timeout(deadline_s, connect=min(CALL_S, deadline_s))
        content = None if body is None else orjson.dumps(body)
        try:
            async with self._http.stream(
                method, self._url(path), content=content, headers=headers, timeout=timeout, **options
            ) as reply:
                if not reply.is_success:
                    await reply.aread()
                    self._check_absent(method, path, reply)
                    status, said = reply.status_code, message_of(reply)
                    text = f"{self.endpoint.name}: {method} {path} answered {status}: {said}{self._hint(status)}"
                    raise Refused(text, status)
                yield reply
        except httpx.HTTPError as error:
            text = f"{self.endpoint.name}: {method} {path} no answer ({type(error).__name__})"
            raise NoAnswer(text) from None

    def _url(self, path: str) -> str:
        """A path of this API, or an address that it gave us."""
        return self.endpoint.url + path if path.startswith("/") else path

    def _hint(self, status: int) -> str:
        hint = self.endpoint.hints.get(status)
        return f"; {hint}" if hint else ""


def message_of(reply: httpx.Response) -> str:
    try:
        body = orjson.loads(reply.content)
    except orjson.JSONDecodeError:
        body = None
    return str(body.get("message") or body.get("reason") if isinstance(body, dict) else reply.text)[:200]


def retry_after_s(reply: httpx.Response, default_s: float) -> float:
    """Seconds the server asks us to wait, when it does so in seconds."""
    given = reply.headers.get("retry-after", "")
    return float(given) if given.isdecimal() else default_s
