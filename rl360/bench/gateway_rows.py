"""`hit_rate`: the prefix cache of real engines, sessions kept on one engine against turns spread over all.

Needs running engines that a push has admitted, two at least (`rl360 up`, and a run of one step). Two gateways are
started beside the running one, over the same engines: `manual` as rl360 runs it, and `round_robin`. The same sessions
go through each, by the session server's own upstream client, engines' caches emptied before. Sessions run side by side
and pause between turns as agents do, so that turns come in no fixed order (in lockstep, round robin would keep every
session where it was).
Possible for a turn is its predecessor's whole context but the last sampled token, which no forward has read yet; a
session's first turn is not counted. The rate is cached tokens over possible ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import orjson

from rl360.bench.processes import LOOPBACK, free_port, running
from rl360.bench.rows import Options, Row, at_least
from rl360.config.services import Services, load_services
from rl360.engines.client import EngineClient, deployment_token, open_http
from rl360.engines.gateway import GatewayClient
from rl360.errors import Rl360Error
from rl360.sessions.core import PreparedTurn, Sampling
from rl360.sessions.upstream import Upstream

TURNS = 12
OPENING, OBSERVED, SAMPLED = 160, 60, 40
PAUSE_S = 0.5  # at most, between two turns
_DEADLINE_S = 300.0


def hit_rate(options: Options) -> Iterator[Row]:
    services = load_services()
    engines = asyncio.run(_ready(services))
    sessions = 4 if options.quick else 12
    rates: dict[str, tuple[int, int]] = {}
    for policy in ("round_robin", "manual"):
        options.say(f"hit_rate: {sessions} sessions of {TURNS} turns on {len(engines)} engines, {policy}")
        with _gateway(policy, engines) as url:
            rates[policy] = asyncio.run(_sessions(url, engines, services, sessions))
    kept, spread = (cached / possible for cached, possible in (rates["manual"], rates["round_robin"]))
    detail = f"{rates['manual'][0]} of {rates['manual'][1]} possible tokens; " + " ".join(
        f"{policy} {cached} of {possible}" for policy, (cached, possible) in rates.items() if policy != "manual"
    )
    yield at_least("hit_rate", baseline=spread, ours=kept, unit="of the possible", limit=0.95, detail=detail)


async def _ready(services: Services) -> list[str]:
    """URLs of the running engines; refuses with what to start."""
    async with httpx.AsyncClient(timeout=5.0, trust_env=False) as http:
        alive = []
        for url in services.engine_urls:
            with contextlib.suppress(httpx.HTTPError):
                if (await http.get(f"{url}/ping")).status_code == 200:
                    alive.append(url)
    if len(alive) < 2:
        raise Rl360Error(
            f"hit_rate needs two running engines, {len(alive)} answer; start them with `rl360 up --engines 2`"
        )
    return alive


@contextlib.contextmanager
def _gateway(policy: str, engines: list[str]) -> Iterator[str]:
    port, prometheus = free_port(), free_port()
    argv = [str(Path(sys.executable).parent / "smg"), "launch", "--host", LOOPBACK, "--port", str(port)]
    argv += ["--policy", policy, "--prometheus-host", LOOPBACK]
    argv += ["--prometheus-port", str(prometheus), "--disable-tokenizer-autoload", "--enable-rl"]
    argv += ["--health-check-endpoint", "/ping", "--log-level", "warn"]
    if policy == "manual":
        argv += ["--assignment-mode", "min_load"]
    with running(argv, port, "/liveness", {"PATH": os.environ.get("PATH", os.defpath)}) as gateway:
        asyncio.run(_register(gateway.url, engines))
        yield gateway.url


async def _register(gateway_url: str, engines: list[str]) -> None:
    async with open_http() as http:
        for url in engines:
            await GatewayClient(gateway_url, http).add(url, 60.0, deployment_token())


async def _flush(engines: list[str]) -> None:
    """Empty the caches; refuses engines that would generate nothing."""
    async with open_http() as http:
        for url in engines:
            door = await EngineClient(url, http, 30.0, token=deployment_token()).door() or {}
            if door.get("phase", "serving") != "serving":
                raise Rl360Error(f"hit_rate: {url} is {door['phase']} ({door['reason']}); run one step first")
            await EngineClient(url, http, 30.0, door.get("epoch") or None, deployment_token()).flush_cache()


async def _sessions(url: str, engines: list[str], services: Services, sessions: int) -> tuple[int, int]:
    """(cached, possible) tokens of all sessions through one gateway."""
    config = orjson.loads((Path(services.model_dir) / "config.json").read_bytes())
    await _flush(engines)
    upstream = Upstream(url, int(config["vocab_size"]), (), _DEADLINE_S, None)
    try:
        found = await asyncio.gather(
            *(_session(upstream, number, int(config["vocab_size"])) for number in range(sessions))
        )
    finally:
        await upstream.aclose()
    return sum(cached for cached, _ in found), sum(possible for _, possible in found)


async def _session(upstream: Upstream, number: int, vocab_size: int) -> tuple[int, int]:
    """One session of random text: its cached and its possible tokens."""
    rng = np.random.default_rng([number, TURNS])
    ids = rng.integers(0, vocab_size, OPENING).astype(np.int32)
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=SAMPLED)
    cached = possible = held = 0
    for turn in range(TURNS):
        prepared = PreparedTurn(turn, ids, SAMPLED, sampling, None, plan=None)  # type: ignore[arg-type]
        completion = await upstream.generate(f"bench-{number:04}", prepared)
        if turn:
            possible += held
            cached += min(held, completion.cached_tokens or 0)
        await asyncio.sleep(PAUSE_S * rng.random())
        held = len(ids) + len(completion.output_ids) - 1
        ids = np.concatenate([ids, completion.output_ids, rng.integers(0, vocab_size, OBSERVED).astype(np.int32)])
    return cached, possible
