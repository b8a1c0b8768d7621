"""The record of attempts in the store: one is claimed before it runs, and its reply is written before it is answered.

Both are written once. So of several servers that are asked for an attempt one runs it, and of several replies one
counts, whoever is killed when. A server that finds the claim of another waits for that one's reply, for as long as the
attempt may take. An attempt whose server is gone ends as `sandbox_lost`, a reply like any other; one that still waited
for its turn is run by the server's next life. While the store is away nothing is claimed and nothing is answered
(`StoreUnavailable`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from uuid import uuid4

import orjson
from pydantic import ValidationError

from rl360.errors import CorruptObject, Rl360Error
from rl360.harbor.outcome import ExitStatus
from rl360.harbor.protocol import Cleanup, RunReply, RunRequest
from rl360.ledger.outcomes import Outcome
from rl360.store.layout import reply_key
from rl360.store.object_store import ObjectStore

SCHEMA = 1
IDENTITY = ("instance_id", "task_dir", "agent_name", "base_url", "model", "sampling_params", "max_seq_len", "max_turns")
CLAIM = ("server", "life", "until", "request")
POLL_S = 0.5
CLOCKS_S = 60.0  # how far the clocks of two hosts may be apart
THREADS = 8
_Result = TypeVar("_Result")


class OtherRequest(Rl360Error):
    """The attempt id was used before with another request."""


def identity(request: RunRequest) -> dict[str, Any]:
    """What a repeat must have in common with the first. It may come with other clocks and limits, not with another
    task, session or agent: the recorded reply would then be paired with tokens it never saw."""
    return request.model_dump(mode="json", include=set(IDENTITY))


def refuse_another(known: Mapping[str, Any], request: RunRequest) -> None:
    """Raise `OtherRequest` unless `request` repeats the one whose identity is `known`."""
    asked = identity(request)
    names = [name for name in IDENTITY if known.get(name) != asked[name]]
    if names:
        raise OtherRequest(f"attempt {request.attempt_id} ran with another {', '.join(names)}; use a new attempt_id")


def lost_reply(why: str) -> RunReply:
    """The reply of an attempt that began and of which nobody knows how it ended."""
    return RunReply(
        trial_id=uuid4().hex,
        outcome=Outcome.SANDBOX_LOST,
        exit_status=ExitStatus.SANDBOX_LOST,
        retryable=True,
        cleanup=Cleanup(confirmed=False, evidence=f"{why}; its next start ends what is left"),
        detail=why,
    )


class Replies:
    """Claims and replies of one server's life. `server` names the server: never two lives of that name at once."""

    def __init__(self, store: ObjectStore, server: str) -> None:
        self.store, self._server, self._life = store, server, uuid4().hex
        self._begun: set[str] = set()  # of this life, without a reply in the store
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="replies")

    async def claim(self, request: RunRequest) -> RunReply | None:
        """The attempt's reply; None when this process is the one to run it. Raises `OtherRequest`."""
        key = reply_key(request.run, request.attempt_id)
        mine = self._claim(request, turn=False)
        if await self._call(self.store.put_once, f"{key}.claim", mine):
            self._begun.add(key)
            return None
        while True:
            held = _decoded(await self._call(self.store.get_required, f"{key}.claim"), f"{key}.claim", CLAIM)
            refuse_another(held["request"], request)
            if (reply := await self._recorded(key)) is not None:
                return reply
            idle = held["server"] == self._server and not held.get("turn", True)  # an earlier life died before its turn
            # of this life: the answer to its first writing was lost, or it was cancelled before it began
            if key not in self._begun and (idle or held["life"] == self._life):
                await self._call(self.store.put, f"{key}.claim", mine)
                self._begun.add(key)
                return None
            if held["server"] == self._server:
                return await self.keep(request, lost_reply(f"the sandbox server {self._server} ended under it"))
            if time.time() > held["until"]:
                why = f"no word of the sandbox server {held['server']} for as long as the attempt could take"
                return await self.keep(request, lost_reply(why))
            await asyncio.sleep(POLL_S)

    async def begin(self, request: RunRequest) -> None:
        """Its turn came: from here on a kill loses it. Where that cannot be said it has not begun."""
        key = reply_key(request.run, request.attempt_id)
        self._begun.discard(key)
        await self._call(self.store.put, f"{key}.claim", self._claim(request, turn=True))
        self._begun.add(key)

    def _claim(self, request: RunRequest, turn: bool) -> bytes:
        until = time.time() + request.deadline_s + CLOCKS_S
        whose = {"server": self._server, "life": self._life, "until": until, "turn": turn}
        return orjson.dumps({"schema_version": SCHEMA, "request": identity(request), **whose})

    async def keep(self, request: RunRequest, reply: RunReply) -> RunReply:
        """The reply that counts, which is in the store then: this one, or the one that was there before."""
        key = reply_key(request.run, request.attempt_id)
        wire = {"schema_version": SCHEMA, "request": identity(request), "reply": reply.model_dump(mode="json")}
        if not await self._call(self.store.put_once, key, orjson.dumps(wire)):
            reply = await self._recorded(key) or reply
        self._begun.discard(key)
        return reply

    async def _recorded(self, key: str) -> RunReply | None:
        try:
            data = await self._call(self.store.get, key)
        except KeyError:
            return None
        try:
            return RunReply.model_validate(_decoded(data, key, ("reply",))["reply"])
        except ValidationError as error:
            raise CorruptObject(key, f"is not a reply ({error.errors()[0]['msg']})") from None

    async def _call(self, work: Callable[..., _Result], *args: Any) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _decoded(data: bytes, key: str, names: Any) -> dict[str, Any]:
    """The object `key`, which has these names and our schema."""
    try:
        wire = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise CorruptObject(key, f"is not JSON ({error})") from None
    if not isinstance(wire, dict) or wire.get("schema_version") != SCHEMA or not set(names) <= wire.keys():
        raise CorruptObject(key, f"is not a record of an attempt of schema {SCHEMA}")
    return wire
