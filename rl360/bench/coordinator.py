"""`coordinator_cpu`: CPU per trajectory of the process that ends a step.

Baseline: the merged sample comes as JSON (stdlib `json` behind FastAPI's default response class) over HTTP and is
decoded with `json.loads`; `_orjson` is the same with orjson at both ends. Only the receiving side's CPU counts.
Ours: all that the flow does for an attempt from the moment its agent and verifier are done, with the code of the flow:
have it stored, make its record, write that, close the session, the wave's table, collect, filter, batch. The servers
and the store are a process of their own that answers at once; HTTP and the store's client are the real ones. Opening
the session and `/run` come before and are in the detail only.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import orjson
import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from rl360.agents.records import RecordLog, put_table, read_table, refuse_unplanned, refuse_unsigned
from rl360.agents.rollout import AttemptSpec, RolloutClient
from rl360.bench import baseline
from rl360.bench.local_rows import merged, ordinary_sample, record_of, same
from rl360.bench.peers import TOKEN, verdict_of
from rl360.bench.processes import LOOPBACK, instant_peers
from rl360.bench.rows import Options, Row, ratio_at_most
from rl360.bench.shape import Shape
from rl360.bench.trajectory import VERSION
from rl360.config.run import ObjectiveConfig, RunConfig
from rl360.config.services import Services
from rl360.errors import Rl360Error
from rl360.harbor.verdict import run_key
from rl360.objective.filters import filter_groups
from rl360.sessions.sample import AttemptRecord, LeafCounts, SampleRef, encode_samples
from rl360.store.codec import pack, sha256_hex
from rl360.store.layout import step_key, wave_key
from rl360.store.manifest import put_object
from rl360.store.object_store import ObjectStore

RUN = "bench"
GROUP = 8
BEFORE = ("opening", "running")  # what an attempt costs before there is anything to collect
TOGETHER = 16  # records in one write: what finishes between two at 3 attempts a second
IN_FLIGHT = 32
_T = TypeVar("_T")


class Spent:
    """CPU seconds of this process, all its threads, by part."""

    def __init__(self) -> None:
        self.parts: defaultdict[str, float] = defaultdict(float)

    def timed(self, name: str, work: Callable[[], _T]) -> _T:
        before = time.process_time()
        result = work()
        self.parts[name] += time.process_time() - before
        return result

    async def each(self, name: str, calls: Iterable[Awaitable[_T]], at_once: int) -> list[_T]:
        """The results of all, that many at a time."""
        gate = asyncio.Semaphore(at_once)

        async def one(call: Awaitable[_T]) -> _T:
            async with gate:
                return await call

        before = time.process_time()
        results = await asyncio.gather(*(one(call) for call in calls))
        self.parts[name] += time.process_time() - before
        return results


def specs_of(count: int) -> list[AttemptSpec]:
    groups = ((f"s000000-g{i // GROUP:04}", i % GROUP) for i in range(count))
    return [AttemptSpec(f"{group}-a{slot:02}", group, "bench", "/bench", "bench") for group, slot in groups]


def end_step(
    store: ObjectStore, run: str, specs: Sequence[AttemptSpec], records: Sequence[AttemptRecord], spent: Spent
) -> list[AttemptRecord]:
    """From the records of a wave to the batch, as the tasks do it; the records as the filter read them."""
    wave = spent.timed("wave table", lambda: put_table(store, wave_key(run, 0, 0), records))

    def collect() -> list[AttemptRecord]:
        found = read_table(store, wave)
        refuse_unplanned(found, specs, run=run, step=0, wave=0, key=wave.key)
        refuse_unsigned(found, run=run, verdict_key=run_key(TOKEN, run), key=wave.key)
        return found

    found = spent.timed("collect", collect)
    step = spent.timed("step table", lambda: put_table(store, step_key(run, 0, "records.msgpack"), found))
    found = spent.timed("filter reads", lambda: read_table(store, step))
    result = spent.timed(
        "filter", lambda: filter_groups(found, ObjectiveConfig(), expected_version=VERSION, max_seq_len=1 << 20)
    )
    spent.timed("batch", lambda: put_object(store, step_key(run, 0, "filter.msgpack"), pack(result.to_wire(run, 0))))
    if {r.attempt_id: r for r in found} != {r.attempt_id: r for r in records} or len(result.decisions) != len(records):
        raise Rl360Error("the coordinator's tables lost something on the way")
    return found


def coordinator_cpu(options: Options) -> Iterator[Row]:
    shape, times = options.shape, 1 if options.quick else 3
    count = 64 if options.quick else 512
    options.say(f"coordinator_cpu: {times} x JSON of one trajectory, then references of {count}")
    bodies = _bodies(shape)
    gc.collect()  # millions of lists are gone: a decoder must not pay for them
    with _serving(_app(bodies)) as url:
        costs = {
            "": [_receive(f"{url}/json", json.loads, shape) for _ in range(times)],
            "_orjson": [_receive(f"{url}/orjson", orjson.loads, shape) for _ in range(times)],
        }
    rounds = [_coordinate(shape, count) for _ in range(times)]
    by_part = {name: statistics.median(part[name] for part in rounds) for name in rounds[0]}
    before = ", ".join(f"{name} {by_part.pop(name):.3f}" for name in BEFORE)
    parts = ", ".join(f"{name} {part:.3f}" for name, part in by_part.items())
    for suffix, values in costs.items():
        yield ratio_at_most(
            f"coordinator_cpu{suffix}",
            baseline=statistics.median(values),
            ours=sum(by_part.values()),
            unit="ms of CPU a trajectory",
            limit=0.001,
            goal="ratio <= 1/1000",
            detail=f"{len(bodies['orjson' if suffix else 'json']) / 1e6:.0f} MB against "
            + ("the same references" if suffix else f"references: {parts} ms; before it {before} ms"),
        )


def _coordinate(shape: Shape, count: int) -> dict[str, float]:
    """CPU milliseconds per trajectory by part."""
    data = encode_samples((merged(shape),))
    ref = SampleRef("-", sha256_hex(data), len(data), (LeafCounts.of(merged(shape)),))
    spent = Spent()
    with tempfile.TemporaryDirectory() as home, instant_peers(Path(home), ref.to_wire()) as peers:
        services = _services(Path(home), peers.url)
        store, specs = ObjectStore.from_services(services), specs_of(count)
        log = RecordLog(store, RUN, 0, 0, every_s=0.0)
        records = asyncio.run(_attempts(services, log, specs, spent))
        if list(log.stored.values()) != records:
            raise Rl360Error("not every record was stored")
        end_step(store, RUN, specs, records, spent)
    return {name: 1e3 * seconds / count for name, seconds in spent.parts.items()}


async def _attempts(
    services: Services, log: RecordLog, specs: Sequence[AttemptSpec], spent: Spent
) -> list[AttemptRecord]:
    """The records of all attempts, each part done for all of them before the next."""
    names = [spec.attempt_id(0) for spec in specs]
    async with RolloutClient(services, RunConfig(run=RUN), 0, 0, VERSION) as client:
        named = list(zip(specs, names, strict=True))
        sessions = await spent.each("opening", (client._open_session(*each) for each in named), IN_FLIGHT)
        ids = list(zip(names, (session_id for session_id, _ in sessions), strict=True))
        runs = (
            (*each, url, client._sandbox_server(each[0], 0)) for each, (_, url) in zip(named, sessions, strict=True)
        )
        await spent.each("running", (client._run(*each) for each in runs), IN_FLIGHT)
        refs = await spent.each("storing", (client._store(*each) for each in ids), IN_FLIGHT)
        verdicts = [verdict_of(RUN, "bench", name, float(i % 2)) for i, name in enumerate(names)]
        records = spent.timed("record", lambda: [record_of(*each) for each in zip(refs, verdicts, strict=True)])
        for start in range(0, len(records), TOGETHER):
            together = records[start : start + TOGETHER]
            await spent.each("record writes", (log.keep(record) for record in together), TOGETHER)
        await spent.each("closing", (client.close_session(*each) for each in ids), IN_FLIGHT)
    return records


def _services(home: Path, url: str) -> Services:
    """One address for all of them."""
    secrets = home / "secrets.json"
    secrets.touch(0o600)
    secrets.write_bytes(orjson.dumps({"token": TOKEN, "s3_access_key": "none", "s3_secret_key": "none"}))
    one = ("prefect_api_url", "prefect_ui_url", "s3_endpoint", "gateway_url", "trainer_url")
    many = ("engine_urls", "session_urls", "sandbox_urls")
    return Services.model_validate(
        {"home": str(home), "s3_bucket": "bench", "model_dir": ""}
        | dict.fromkeys(one, url)
        | {name: [url] for name in many}
    )


# the baseline


@contextmanager
def _serving(app: FastAPI) -> Iterator[str]:
    """The app on a free loopback port, in a thread of this process."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://{LOOPBACK}:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=10)


def _app(bodies: dict[str, bytes]) -> FastAPI:
    """Answers with the sample in either JSON."""
    app = FastAPI(openapi_url=None)

    @app.get("/{name}")
    def whole(name: str) -> Response:
        return Response(bodies[name], media_type="application/json")

    return app


def _bodies(shape: Shape) -> dict[str, bytes]:
    """What FastAPI sends by default for the ordinary sample, and what it sends with orjson."""
    sample = baseline.json_ready(ordinary_sample(shape)[0])
    return {"json": bytes(JSONResponse(sample).body), "orjson": orjson.dumps(sample)}


def _receive(url: str, loads: Callable[[bytes], Any], shape: Shape) -> float:
    """CPU milliseconds of this thread to receive and decode one sample; the server has a thread of its own."""

    async def fetch() -> Any:
        async with httpx.AsyncClient(timeout=600, trust_env=False) as http:
            return loads((await http.get(url)).content)

    before = time.thread_time()
    sample = asyncio.run(fetch())
    cpu_ms = 1e3 * (time.thread_time() - before)
    same(merged(shape), sample)
    return cpu_ms
