"""What one engine answers when it is asked how it is. Every question has its deadline; nothing here changes an engine.

`look` asks `/ping` (the HTTP server lives) and `/server_info` (who it is; passes through the scheduler, so an answer
means that it isn't stuck). `generate` samples one token after ids inside the vocabulary, the only question whose
answer needs the model; an id outside would end the process.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

import httpx
import orjson

from rl360.config.services import home_dir, load_services
from rl360.engines.client import TRICKLE_S, EngineClient, EngineSilent, deployment_token
from rl360.engines.fleet import EngineIdentity, incarnation_of
from rl360.engines.processes import tree_of_url
from rl360.errors import BadInput, ServiceError


def headers_for(url: str) -> dict[str, str]:
    """What a command shows at the engine that a person named: the token, when the services name it as one of ours."""
    if not (home_dir() / "services.json").exists():
        return {}
    ours = {engine.rstrip("/") for engine in load_services().engine_urls}
    token = deployment_token() if url.rstrip("/") in ours else None
    return {} if token is None else {"authorization": f"Bearer {token}"}


@dataclass(frozen=True)
class Seen:
    """One look at one URL. `identity` when it answered; `silent`: something accepts connections and says nothing."""

    identity: EngineIdentity | None = None
    silent: bool = False
    reason: str = ""


async def look(client: EngineClient, known: EngineIdentity | None, ping_s: float, deadline_s: float) -> Seen:
    """Whether it lives and who it is. The process tree of a `known` incarnation is not looked up again."""
    try:
        await client.ping(ping_s)
        incarnation = incarnation_of(await client.server_info(deadline_s))
    except ServiceError as error:
        return Seen(silent=isinstance(error, EngineSilent) and error.connected, reason=str(error))
    if known is not None and known.incarnation == incarnation and known.process is not None:
        return Seen(known)
    process = await asyncio.to_thread(tree_of_url, client.url)
    return Seen(EngineIdentity(url=client.url, incarnation=incarnation, process=process))


async def in_flight(url: str, http: httpx.AsyncClient, deadline_s: float) -> int | None:
    """Requests that run or wait in it; None when it doesn't say."""
    try:
        async with asyncio.timeout(deadline_s + TRICKLE_S):
            reply = await http.get(f"{url}/v1/loads?include=core", timeout=deadline_s)
        loads = orjson.loads(reply.content)["loads"]
        return sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in loads)
    except (httpx.HTTPError, TimeoutError, orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return None


async def generate(
    url: str,
    http: httpx.AsyncClient,
    ids: tuple[int, ...],
    vocabulary: int,
    deadline_s: float,
    token: str | None = None,
) -> str:
    """What is wrong with one sampled token; empty when nothing is. `token`: of the deployment, for the engine's door;
    `ServiceError` when that lets us not in, which says nothing about the engine."""
    if not ids or not all(0 <= item < vocabulary for item in ids):
        raise BadInput(f"probe ids {ids} are outside the vocabulary of {vocabulary}; the engine would die of them")
    body = {"input_ids": list(ids), "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    try:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        async with asyncio.timeout(deadline_s + TRICKLE_S):
            reply = await http.post(f"{url}/generate", json=body, headers=headers, timeout=deadline_s)
    except (httpx.HTTPError, TimeoutError) as error:
        return f"generated nothing within {deadline_s:g} s ({type(error).__name__})"
    if reply.status_code in (401, 403):
        raise ServiceError(
            f"engine {url}: its door answers {reply.status_code} to the keeper; set RL360_TOKEN_FILE to its token"
        )
    if reply.status_code != 200:
        return f"generation answered {reply.status_code}: {reply.text[:120].strip()}"
    try:
        (token,) = orjson.loads(reply.content)["output_ids"]
        return "" if 0 <= int(token) < vocabulary else f"generated id {token}, outside the vocabulary of {vocabulary}"
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return f"generation answered no single id: {reply.text[:120].strip()}"


def vocabulary_of(model_dir: str | Path) -> int | None:
    """Number of ids of the engines' model; None when its config can't be read here."""
    try:
        config = json.loads((Path(model_dir) / "config.json").read_text())
        return int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
