"""`collection`: the end of a wave of thousands of trajectories, against the real object store.

Session server processes hold finished synthetic sessions; this process, the coordinator, asks for each to be stored,
and handles references only: the reply, the attempt record, the wave's table, collect, filter and the batch, all with
the code of the flow and against the store. That is the row. What a rollout does once an attempt beside it, while other
attempts still run, is measured apart and told in the detail: the put of the attempt's own record, closing its session.
8,192 trajectories are 236 GB, so they go into one bucket a shard: every object's size is checked and some are read back
whole (digest, decode) before the bucket is deleted, which gives the disk back.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import botocore.exceptions

from rl360.agents.records import put_table, read_table
from rl360.agents.rollout import AttemptSpec, RolloutClient
from rl360.bench.collector import bucket
from rl360.bench.local_rows import GROUP, record_of
from rl360.bench.processes import Running, free_port, running
from rl360.bench.rows import Options, Row, at_most
from rl360.bench.shape import FULL
from rl360.bench.trajectory import VERSION
from rl360.config.run import ObjectiveConfig, RunConfig
from rl360.config.services import Services, load_services
from rl360.errors import Rl360Error
from rl360.objective.filters import filter_groups
from rl360.sessions.sample import AttemptRecord, SampleRef, decode_samples
from rl360.store.codec import pack, sha256_hex
from rl360.store.layout import attempt_key, step_key, wave_key
from rl360.store.manifest import put_object
from rl360.store.object_store import ObjectStore

GOAL_S, GOAL_COUNT = 10.0, 8192
FIXED_S = 0.5  # clients, first connections: what a few trajectories cannot share
ASIDE = ("attempt records", "closing")
WORKERS = 2
IN_FLIGHT = 4
READ_BACK_EVERY = 16
OBJECT_BYTES = 30 << 20
SPARE_BYTES = 8 << 30


@dataclass
class Spent:
    """CPU seconds of this process by part, and what was moved."""

    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    stored_bytes: int = 0
    wall_s: float = 0.0
    read_back: int = 0

    def timed(self, name: str, work: Callable[[], Any]) -> Any:
        before, started = time.process_time(), time.monotonic()
        result = work()
        self.parts[name] += time.process_time() - before
        self.wall_s += time.monotonic() - started
        return result


def collection(options: Options) -> Iterator[Row]:
    services = load_services()
    shard = min(options.shard, options.count)
    free = shutil.disk_usage(services.home).free
    if free < shard * OBJECT_BYTES + SPARE_BYTES:
        raise Rl360Error(
            f"collection: a shard of {shard} needs {(shard * OBJECT_BYTES + SPARE_BYTES) >> 30} GiB of disk, "
            f"{free >> 30} are free; choose a smaller --shard"
        )
    spent = Spent()
    with ExitStack() as stack:
        options.say(f"collection: {options.count} trajectories, {shard} a shard, {WORKERS} session servers")
        urls = [stack.enter_context(_worker(services)).url for _ in range(WORKERS)]
        away = services.model_copy(update={"session_urls": urls})
        token = secrets.token_hex(3)
        for number, start in enumerate(range(0, options.count, shard)):
            count = min(shard, options.count - start)
            _shard(away, f"bench-{token}-{number:04}", count, spent)
            rate = spent.stored_bytes / spent.wall_s / 1e6
            options.say(f"collection: {start + count} of {options.count}, {rate:.0f} MB/s")
    limit = max(FIXED_S, GOAL_S * options.count / GOAL_COUNT)
    aside = {name: spent.parts.pop(name) for name in ASIDE}
    counted, apart = (
        ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items()) for parts in (spent.parts, aside)
    )
    rate, speed = options.count / spent.wall_s, spent.stored_bytes / spent.wall_s / 1e6
    yield at_most(
        "collection_coordinator",
        ours=sum(spent.parts.values()),
        unit="s of CPU",
        limit=limit,
        detail=f"{options.count} trajectories, {spent.stored_bytes / 1e9:.1f} GB stored in {spent.wall_s:.0f} s "
        f"({rate:.2f}/s, {speed:.0f} MB/s); {counted} s; apart: {apart} s; all sizes checked, {spent.read_back} read "
        "back whole",
    )


def _worker(services: Services) -> AbstractContextManager[Running]:
    port = free_port()
    argv = [sys.executable, "-m", "rl360.bench.collector", "--port", str(port)]
    env = {"RL360_HOME": services.home, "RL360_TOKEN_FILE": os.path.join(services.home, "token")}
    return running(argv, port, "/health", env)


def _shard(services: Services, run: str, count: int, spent: Spent) -> None:
    """Collect `count` trajectories into a bucket of their own, check them, delete them."""
    store = bucket(services, run)
    store._s3.create_bucket(Bucket=run)
    try:
        records = asyncio.run(_collect(services, store, run, count, spent))
        wave = spent.timed("wave table", lambda: put_table(store, wave_key(run, 0, 0), records))
        found = spent.timed("collect", lambda: read_table(store, wave))
        step = spent.timed("step table", lambda: put_table(store, step_key(run, 0, "records.msgpack"), found))
        found = spent.timed("filter reads", lambda: read_table(store, step))
        result = spent.timed(
            "filter", lambda: filter_groups(found, ObjectiveConfig(), expected_version=VERSION, max_seq_len=1 << 20)
        )
        batch = spent.timed("batch", lambda: pack(result.to_wire(run, 0)))
        spent.timed("batch", lambda: put_object(store, step_key(run, 0, "filter.msgpack"), batch))
        _check(store, found, spent)
    finally:
        with suppress(botocore.exceptions.ClientError):
            store._s3.delete_bucket(Bucket=run)  # SeaweedFS drops the bucket's volumes, full or not


async def _collect(services: Services, store: ObjectStore, run: str, count: int, spent: Spent) -> list[AttemptRecord]:
    """The records of all attempts, each stored; sessions are made before the clock runs."""
    ids = [f"s000000-g{i // GROUP:04}-a{i % GROUP:02}-t0" for i in range(count)]
    config = RunConfig(run=run)
    gate = asyncio.Semaphore(IN_FLIGHT)
    async with RolloutClient(services, config, 0, 0, VERSION) as client:

        async def opened(name: str) -> str:
            slot, group = name.removesuffix("-t0"), name.rsplit("-a", 1)[0]
            spec = AttemptSpec(slot_id=slot, group_id=group, task_id="bench", task_dir="", domain="bench")
            async with gate:
                return (await client._open_session(spec, name))[0]

        async def stored(name: str, session_id: str) -> SampleRef:
            async with gate:
                return await client._store(name, session_id)

        async def closed(name: str, session_id: str) -> None:
            async with gate:
                await client.close_session(name, session_id)

        async def all_of(part: str, what: Callable[[str, str], Awaitable[Any]]) -> list[Any]:
            before = time.process_time()
            results = await asyncio.gather(*(what(name, session) for name, session in zip(ids, sessions, strict=True)))
            spent.parts[part] += time.process_time() - before
            return results

        sessions = await asyncio.gather(*(opened(name) for name in ids))
        started = time.monotonic()
        refs = await all_of("replies", stored)
        spent.wall_s += time.monotonic() - started
        await all_of("closing", closed)
    spent.stored_bytes += sum(ref.size_bytes for ref in refs)
    records: list[AttemptRecord] = spent.timed(
        "records",
        lambda: [record_of(ref, name, float(i % 2)) for i, (name, ref) in enumerate(zip(ids, refs, strict=True))],
    )

    def keep() -> None:
        for record in records:
            put_object(store, attempt_key(run, 0, 0, record.attempt_id), pack(record.to_wire()))

    spent.timed("attempt records", keep)
    return records


def _check(store: ObjectStore, records: list[AttemptRecord], spent: Spent) -> None:
    """Every object has its size, some are whole and decode to what their reference says."""
    sizes = _sizes(store)
    for number, record in enumerate(records):
        ref = record.stored
        if ref is None or sizes.get(ref.key) != ref.size_bytes:
            raise Rl360Error(f"attempt {record.attempt_id} is not stored as its reference says: {ref}")
        if number % READ_BACK_EVERY == 0:
            data = store.get_required(ref.key)
            sample = decode_samples(data, ref.key)[0]
            rows = 0 if sample.routing is None else len(sample.routing)
            if sha256_hex(data) != ref.sha256 or sample.attempt_id != record.attempt_id or rows < FULL.tokens // 2:
                raise Rl360Error(f"object {ref.key} is not what was stored")
            spent.read_back += 1


def _sizes(store: ObjectStore) -> dict[str, int]:
    pages = store._s3.get_paginator("list_objects_v2").paginate(Bucket=store.bucket)
    return {entry["Key"]: entry["Size"] for page in pages for entry in page.get("Contents", [])}
