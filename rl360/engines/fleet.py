"""The engines as a fleet: what an engine is, the states it may be in, and who may move it between them.

A push owns its receivers while it runs, the keeper what it mends between pushes (fleet_log.py remembers both). An
engine is an *incarnation*: one start of one process tree at one URL. SGLang has no id of its own start, so the
incarnation is a digest of what its launch measured about itself (`/server_info`, `startup_time` and command line),
which a restart changes; the process tree adds proof on this host.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import orjson
from pydantic import Field

from rl360.engines.client import EngineClient, EngineRefused, EngineSilent
from rl360.engines.processes import ProcessTree, tree_of_url
from rl360.errors import Rl360Error, ServiceError
from rl360.store.data import Data


class EngineState(StrEnum):
    """DESIGN, "Weight push: a state machine". Only `serving` engines get traffic."""

    JOINING = "joining"
    LOADING = "loading"
    CONFIRMED = "confirmed"
    SERVING = "serving"
    DRAINING = "draining"
    SUSPECT = "suspect"
    FENCED = "fenced"
    GONE = "gone"


_NEXT = {
    EngineState.JOINING: {EngineState.LOADING, EngineState.SUSPECT, EngineState.DRAINING},
    EngineState.LOADING: {EngineState.CONFIRMED, EngineState.SUSPECT, EngineState.DRAINING},
    EngineState.CONFIRMED: {EngineState.SERVING, EngineState.SUSPECT, EngineState.DRAINING},
    EngineState.SERVING: {EngineState.LOADING, EngineState.DRAINING, EngineState.SUSPECT},
    EngineState.DRAINING: {EngineState.JOINING, EngineState.GONE, EngineState.SUSPECT},
    EngineState.SUSPECT: {EngineState.FENCED, EngineState.LOADING, EngineState.JOINING},
    EngineState.FENCED: {EngineState.GONE},
    EngineState.GONE: set(),
}


def advance(state: EngineState, to: EngineState) -> EngineState:
    """The new state; a move the machine doesn't have is a bug and is refused."""
    if to not in _NEXT[state]:
        raise Rl360Error(
            f"engine state {state} cannot become {to}; allowed: {', '.join(sorted(_NEXT[state])) or 'none'}"
        )
    return to


class EngineIdentity(Data):
    """One incarnation of one engine. `process` is null when it runs on another host."""

    url: str
    incarnation: str
    process: ProcessTree | None = None
    external: bool = Field(False, description="somebody else started it: our token is not shown to it")


@dataclass(frozen=True)
class Probe:
    """What an engine URL answered. `silent`: something accepts connections there but doesn't answer in time."""

    url: str
    identity: EngineIdentity | None
    weight_version: str | None
    silent: bool
    reason: str


def incarnation_of(server_info: dict[str, object]) -> str:
    """16 hex digits that change with every start of an engine."""
    startup = server_info.get("startup_time")
    if not isinstance(startup, dict) or not startup:
        raise ServiceError(f"/server_info names no startup_time (got {startup!r}); rl360 needs SGLang 0.5.23")
    mark = orjson.dumps([server_info.get("launch_command"), startup], option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(mark).hexdigest()[:16]


async def probe_engine(client: EngineClient, deadline_s: float) -> Probe:
    """Ask one engine who it is. `/server_info` passes through the scheduler, so an answer means it isn't stuck."""
    try:
        info = await client.server_info(deadline_s)
        model = await client.model_info(deadline_s)
        process = await asyncio.to_thread(tree_of_url, client.url)
        identity = EngineIdentity(
            url=client.url, incarnation=incarnation_of(info), process=process, external=client.external
        )
    except ServiceError as error:
        silent = isinstance(error, EngineSilent) and error.connected
        return Probe(client.url, None, None, silent, str(error))
    return Probe(client.url, identity, str(model.get("weight_version")), False, "")


async def probe_fleet(clients: Iterable[EngineClient], deadline_s: float) -> list[Probe]:
    """Probe all engines at once, in the given order."""
    return list(await asyncio.gather(*(probe_engine(client, deadline_s) for client in clients)))


async def require_access(clients: Iterable[EngineClient]) -> None:
    """`ServiceError` when a door does not take what we show: met inside a push, that would cost its engine its life."""

    async def refused(client: EngineClient) -> str:
        try:
            await client.door(min(client.deadline_s, 5.0))
        except ServiceError as error:  # whatever else is wrong, the push meets it and judges
            return str(error) if isinstance(error, EngineRefused) and error.status == 401 else ""
        return ""

    for reason in filter(None, await asyncio.gather(*(refused(client) for client in clients))):
        raise ServiceError(
            f"{reason}; name the file of its token in RL360_TOKEN_FILE, or take an engine of another deployment out of "
            "the fleet (`rl360 fleet remove`)"
        )
