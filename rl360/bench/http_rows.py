"""Rows that drive a real session server process over HTTP, in front of an engine process that answers at once.

`turn61_vs_turn2`: CPU of the server process for the last turn of a trajectory against its second turn, which add the
same tokens. Median over sessions; everything the process does counts, threads included. Dense, because the decoding of
routing rows costs the same in both turns and would only flatter the ratio; `_routing` is the same with them.
`turns_per_s`: turns per CPU second of the server process, at contexts of 2K tokens (sessions of eight turns from 1.2K
to 2.8K), sixteen in flight, sessions made and deleted along the way.
`rss_growth_per_1k_sessions`: slope of the server's resident memory over thousands of two-turn sessions, made and
deleted, after the first fifth.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rl360.bench.engine import write_script
from rl360.bench.processes import Connection, Running, instant_engine, session_server
from rl360.bench.rows import Options, Row, at_least, at_most, ratio_at_most
from rl360.bench.shape import Shape
from rl360.bench.trajectory import SAMPLING, TOOLS, VERSION, Script, draw, model_dir, new_session, play
from rl360.sessions.families.registry import load_template

CONTEXT_2K = Shape(turns=8, tokens=2_900, opening=1_150, sampled=640, layers=0)
SHORT = Shape(turns=2, tokens=600, opening=350, sampled=100, layers=0)
IN_FLIGHT = 16
_SETTLE_S = 0.003  # what a server does after it answered belongs to the turn it answered


@dataclass(frozen=True)
class Rig:
    """A session server, its engine's script, and what a session costs to create."""

    server: Running
    headers: dict[str, str]
    shape: Shape
    script: Script
    _serial: Iterator[int]

    def connect(self) -> Connection:
        return Connection(self.server.port, self.headers)

    def spec(self) -> bytes:
        number = next(self._serial)
        sampling = {name: getattr(SAMPLING, name) for name in ("temperature", "top_p", "top_k", "max_new_tokens")}
        return orjson.dumps(
            {
                "attempt_id": f"s000000-g{number:06}-a00-t0",
                "group_id": f"s000000-g{number:06}",
                "task_id": "bench",
                "sampling": sampling,
                "max_seq_len": 2 * self.shape.tokens + 4096,
                "expected_weight_version": VERSION,
            }
        )


@contextlib.contextmanager
def rig(shape: Shape) -> Iterator[Rig]:
    """Plays the trajectory here first, for the engine's script, then starts the two processes."""
    script = draw(shape)
    with model_dir(shape) as model, tempfile.TemporaryDirectory(prefix="rl360-bench-") as name:
        played = play(shape, script, new_session(shape, load_template(model)))
        cached = [0, *(end - 1 for _prompt_end, end in played.edges)]
        turns = {
            prompt_end: (ids.tolist(), logprobs.tolist(), held)
            for (prompt_end, _), ids, logprobs, held in zip(
                played.edges, script.outputs, script.logprobs, cached, strict=False
            )
        }
        path, routing = Path(name) / "script.msgpack", None
        write_script(path, turns)
        if played.routing is not None:
            routing = Path(name) / "routing.npy"
            np.save(routing, played.routing)
        with (
            instant_engine(path, routing) as engine,
            session_server(engine.url, model, routing is not None) as (server, headers),
        ):
            yield Rig(server, headers, shape, script, itertools.count())


async def _session(
    rig: Rig, connection: Connection, around: Callable[[int, Awaitable[Any]], Awaitable[Any]] | None = None
) -> None:
    """One session from its creation to its deletion, as an agent would hold it: the whole history in every request."""
    session_id = (await connection.call("POST", "/sessions", rig.spec()))["session_id"]
    path, tail = f"/sessions/{session_id}/v1/chat/completions", b'],"tools":' + orjson.dumps(TOOLS) + b"}"
    parts: list[bytes] = []
    reply = None
    for turn in range(rig.shape.turns):
        parts += [orjson.dumps(message) for message in rig.script.messages(turn, reply)]
        body = b'{"model":"bench","messages":[' + b",".join(parts) + tail
        call = connection.call("POST", path, body)
        answer = await (call if around is None else around(turn, call))
        reply = answer["choices"][0]["message"]
    await connection.call("DELETE", f"/sessions/{session_id}")


async def _turn_costs(rig: Rig, sessions: int) -> np.ndarray:
    """CPU milliseconds of the server by session and turn, `[sessions, turns]`; a first session warms up."""
    costs = np.zeros((sessions + 1, rig.shape.turns))
    async with rig.connect() as connection:
        for number in range(sessions + 1):

            async def around(turn: int, call: Awaitable[Any], number: int = number) -> Any:
                await asyncio.sleep(_SETTLE_S)
                before = rig.server.cpu_s()
                answer = await call
                await asyncio.sleep(_SETTLE_S)
                costs[number, turn] = 1e3 * (rig.server.cpu_s() - before)
                return answer

            await _session(rig, connection, around)
    return costs[1:]


def turn61_vs_turn2(options: Options) -> Iterator[Row]:
    sessions = 3 if options.quick else 15
    dense = replace(options.shape, layers=0)
    for name, shape in (("turn61_vs_turn2", dense), ("turn61_vs_turn2_routing", options.shape)):
        options.say(f"{name}: {sessions} sessions of {shape.turns} turns, {shape.tokens} tokens")
        with rig(shape) as held:
            costs = asyncio.run(_turn_costs(held, sessions if shape is dense else max(3, sessions // 3)))
        second, last = np.median(costs[:, 1]), np.median(costs[:, -1])
        yield ratio_at_most(
            name,
            baseline=float(second),
            ours=float(last),
            unit="ms of CPU, turn 2 and turn 61",
            limit=1.5,
            detail=f"whole session {costs.sum(axis=1).mean():.0f} ms; last turn spans {costs[:, -1].min():.2f} to "
            f"{costs[:, -1].max():.2f} ms, turn 2 {costs[:, 1].min():.2f} to {costs[:, 1].max():.2f} ms",
        )


async def _load(rig: Rig, sessions: int, each: Callable[[int], None] = lambda _done: None) -> None:
    """`sessions` sessions, `IN_FLIGHT` at a time, each worker on its own connection."""
    left, done = itertools.count(), itertools.count(1)

    async def worker() -> None:
        async with rig.connect() as connection:
            while next(left) < sessions:
                await _session(rig, connection)
                each(next(done))

    async with asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(worker())


def turns_per_s(options: Options) -> Iterator[Row]:
    sessions, rounds = (32, 3) if options.quick else (160, 7)
    options.say(f"turns_per_s: {rounds} x {sessions} sessions of {CONTEXT_2K.turns} turns")
    with rig(CONTEXT_2K) as held:
        asyncio.run(_load(held, IN_FLIGHT))
        rates = []
        for _ in range(rounds):
            before = held.server.cpu_s()
            asyncio.run(_load(held, sessions))
            rates.append(sessions * CONTEXT_2K.turns / (held.server.cpu_s() - before))
    rate = statistics.median(rates)
    detail = f"{1e3 / rate:.2f} ms of CPU a turn; rounds {min(rates):.0f} to {max(rates):.0f}"
    yield at_least("turns_per_s", ours=rate, unit="turns per CPU second", limit=300, detail=detail)
    yield _memory(options)


def _memory(options: Options) -> Row:
    sessions, every = (2_000, 100) if options.quick else (20_000, 500)
    options.say(f"rss_growth_per_1k_sessions: {sessions} sessions of {SHORT.turns} turns")
    points: list[tuple[int, float]] = []
    with rig(SHORT) as held:

        def note(done: int) -> None:
            if done % every == 0:
                points.append((done, held.server.rss_mib()))

        asyncio.run(_load(held, sessions, note))
    after = np.array([point for point in points if point[0] > sessions // 5], dtype=np.float64)
    slope = 1e3 * float(np.polyfit(after[:, 0], after[:, 1], 1)[0])
    detail = f"{sessions} sessions; {after[0, 1]:.1f} MiB after a fifth of them, {after[-1, 1]:.1f} MiB at the end"
    return at_most("rss_growth_per_1k_sessions", ours=slope, unit="MiB", limit=0.25, detail=detail)
