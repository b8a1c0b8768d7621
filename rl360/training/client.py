"""Async client of the trainer service. Every request may be sent again: the trainer answers by what it already did.

Connection errors and deadlines are `ServiceError` (retry safe); 400, 401, 404 and 422 say that the same request can
never work and are `BadInput`, or the kind that the answer names, as `ReplayMismatch` (none is retried); 409
means that the trainer is elsewhere (another run, another version) and is `TrainerConflict`.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import httpx
import orjson
from pydantic import BaseModel, ValidationError

from rl360.engines.client import TRICKLE_S
from rl360.errors import BadInput, CorruptObject, ReplayMismatch, Rl360Error, ServiceError, WitnessDisagrees
from rl360.weights.messages import ChecksumReply, ChecksumRequest, PushPlan, TransferReport

Reply = TypeVar("Reply", bound=BaseModel)
_NEVER_WORKS = frozenset({400, 401, 404, 422})
_NAMED: dict[str, type[Rl360Error]] = {each.__name__: each for each in (ReplayMismatch, WitnessDisagrees)}


class TrainerConflict(ServiceError):
    """The trainer's state does not allow it now: the version or the run is not the one it holds."""


def _refusal(message: str, reply: httpx.Response) -> Rl360Error:
    """The error that the trainer named, where the type says more than that the request is wrong."""
    try:
        told = orjson.loads(reply.content)
        kind, error = told["type"], str(told["error"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return BadInput(message)
    if kind == CorruptObject.__name__ and error.startswith("object "):
        return CorruptObject(*error.removeprefix("object ").split(": ", 1))
    return _NAMED[kind](error) if kind in _NAMED else BadInput(message)


class TrainerClient:
    """One trainer, rank 0's HTTP. `headers` carry the bearer token; `deadline_s` is the default of every call."""

    def __init__(self, url: str, http: httpx.AsyncClient, headers: dict[str, str], deadline_s: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self.deadline_s = deadline_s
        self._http = http
        self._headers = {**headers, "content-type": "application/json"}

    async def _ask(self, method: str, path: str, body: bytes | None, deadline_s: float | None) -> dict[str, Any]:
        deadline = self.deadline_s if deadline_s is None else deadline_s
        where = f"trainer {self.url}{path}"
        try:
            timeout = httpx.Timeout(deadline, connect=min(deadline, 5.0))
            async with asyncio.timeout(deadline + TRICKLE_S):
                reply = await self._http.request(
                    method, self.url + path, content=body, headers=self._headers, timeout=timeout
                )
        except (httpx.TimeoutException, TimeoutError):
            raise ServiceError(f"{where}: no answer within {deadline:g} s") from None
        except httpx.HTTPError as error:
            raise ServiceError(
                f"{where}: no connection ({type(error).__name__}); is it up? try `rl360 status`"
            ) from None
        message = f"{where}: answered {reply.status_code}: {reply.text[:300].strip()}"
        if reply.status_code in _NEVER_WORKS:
            raise _refusal(message, reply)
        if reply.status_code == 409:
            raise TrainerConflict(message)
        if reply.status_code != 200:
            raise ServiceError(message)
        try:
            value = orjson.loads(reply.content)
        except orjson.JSONDecodeError:
            raise ServiceError(f"{where}: reply is not JSON: {reply.text[:80]!r}") from None
        if not isinstance(value, dict):
            raise ServiceError(f"{where}: reply is a {type(value).__name__}, expected an object")
        return value

    async def _post_as(self, model: type[Reply], path: str, body: BaseModel, deadline_s: float | None) -> Reply:
        value = await self._ask("POST", path, body.model_dump_json().encode(), deadline_s)
        try:
            return model.model_validate(value)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise ServiceError(f"trainer {self.url}{path}: reply field {key or '(whole)'}: {first['msg']}") from None

    async def open_run(self, run: str, deadline_s: float | None = None) -> dict[str, Any]:
        """State of the run, restored and replayed first: run, applied_steps, weights_digest, incarnation."""
        return await self._ask("GET", f"/runs/{run}", None, deadline_s)

    async def put_step(
        self, run: str, step: int, batch_key: str, batch_digest: str, deadline_s: float | None = None
    ) -> dict[str, Any]:
        """Train step `step` on a stored batch, at most once; the recorded result when it was done before."""
        body = orjson.dumps({"run": run, "batch_key": batch_key, "batch_digest": batch_digest})
        return await self._ask("PUT", f"/steps/{step}", body, deadline_s)

    async def checkpoint(self, run: str, step: int, deadline_s: float | None = None) -> dict[str, Any]:
        """Save the state after step `step`; nothing when it is saved already."""
        return await self._ask("POST", f"/runs/{run}/checkpoints/{step}", b"{}", deadline_s)

    async def export(self, run: str, target: str, dtype: str, deadline_s: float | None = None) -> dict[str, Any]:
        """Write the run's newest weights as a Hugging Face directory: an absolute path or s3://bucket/prefix, new."""
        body = orjson.dumps({"dir": target, "dtype": dtype})
        return await self._ask("POST", f"/runs/{run}/export", body, deadline_s)

    async def checksums(self, run: str, version: str, deadline_s: float | None = None) -> ChecksumReply:
        """What would travel as `version`, and what an engine that holds it must answer."""
        body = ChecksumRequest(run=run, version=version)
        return await self._post_as(ChecksumReply, "/push/checksums", body, deadline_s)

    async def prepare(self, plan: PushPlan, deadline_s: float | None = None) -> None:
        """Have the trainer do for this plan what can be done before the engines pause."""
        deadline = plan.deadline_s if deadline_s is None else deadline_s
        await self._ask("POST", "/push/prepare", plan.model_dump_json().encode(), deadline)

    async def transfer(self, plan: PushPlan, deadline_s: float | None = None) -> TransferReport:
        """Send the plan's tensors to its engines; engines that failed are in the report."""
        deadline = plan.deadline_s if deadline_s is None else deadline_s
        return await self._post_as(TransferReport, "/push/transfer", plan, deadline)
