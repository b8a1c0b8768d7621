"""`collection`: the end of a wave of thousands of trajectories, against the real object store.

Session server processes hold finished synthetic sessions; this process, the coordinator, does with each what the flow
does once an attempt has ended, with the flow's own code: has it stored, makes and writes its record (as they come, with
the flow's pause between two writes), closes its session, and ends the step on the records: tables, collect, filter,
batch. It handles references only. The row is its CPU for all of that.
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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field

import botocore.exceptions

from rl360.agents.records import RecordLog
from rl360.agents.rollout import RolloutClient
from rl360.bench.collector import bucket
from rl360.bench.coordinator import Spent, end_step, specs_of
from rl360.bench.local_rows import record_of
from rl360.bench.peers import verdict_of
from rl360.bench.processes import Running, free_port, running
from rl360.bench.rows import Options, Row, at_most
from rl360.bench.shape import FULL
from rl360.bench.trajectory import VERSION
from rl360.config.run import RunConfig
from rl360.config.services import Services, load_services
from rl360.errors import Rl360Error
from rl360.sessions.sample import AttemptRecord, decode_samples
from rl360.store.codec import sha256_hex
from rl360.store.object_store import ObjectStore

GOAL_S, GOAL_COUNT = 10.0, 8192
FIXED_S = 0.5  # clients, first connections: what a few trajectories cannot share
WORKERS = 2
IN_FLIGHT = 32  # ended and not stored yet: the store is what all wait for
READ_BACK_EVERY = 16
OBJECT_BYTES = 30 << 20
SPARE_BYTES = 8 << 30


@dataclass
class Moved:
    """What was moved, in how long, and the coordinator's CPU for it."""

    spent: Spent = field(default_factory=Spent)
    stored_bytes: int = 0
    record_objects: int = 0
    wall_s: float = 0.0
    read_back: int = 0


class TimedLog(RecordLog):
    """Knows what its writes cost: each is in a thread."""

    write_s = 0.0
    writes = 0

    def _write(self, batch: Sequence[AttemptRecord]) -> None:
        before = time.thread_time()
        super()._write(batch)
        self.write_s += time.thread_time() - before
        self.writes += 1


def collection(options: Options) -> Iterator[Row]:
    services = load_services()
    shard = min(options.shard, options.count)
    free = shutil.disk_usage(services.home).free
    if free < shard * OBJECT_BYTES + SPARE_BYTES:
        raise Rl360Error(
            f"collection: a shard of {shard} needs {(shard * OBJECT_BYTES + SPARE_BYTES) >> 30} GiB of disk, "
            f"{free >> 30} are free; choose a smaller --shard"
        )
    moved = Moved()
    with ExitStack() as stack:
        options.say(f"collection: {options.count} trajectories, {shard} a shard, {WORKERS} session servers")
        urls = [stack.enter_context(_worker(services)).url for _ in range(WORKERS)]
        away = services.model_copy(update={"session_urls": urls})
        token = secrets.token_hex(3)
        for number, start in enumerate(range(0, options.count, shard)):
            count = min(shard, options.count - start)
            _shard(away, f"bench-{token}-{number:04}", count, moved)
            rate = moved.stored_bytes / moved.wall_s / 1e6
            options.say(f"collection: {start + count} of {options.count}, {rate:.0f} MB/s")
    limit = max(FIXED_S, GOAL_S * options.count / GOAL_COUNT)
    parts = moved.spent.parts
    rate, speed = options.count / moved.wall_s, moved.stored_bytes / moved.wall_s / 1e6
    yield at_most(
        "collection_coordinator",
        ours=sum(parts.values()),
        unit="s of CPU",
        limit=limit,
        detail=f"{options.count} trajectories, {moved.stored_bytes / 1e9:.1f} GB stored in {moved.wall_s:.0f} s "
        f"({rate:.2f}/s, {speed:.0f} MB/s), records in {moved.record_objects} objects; "
        f"{', '.join(f'{name} {seconds:.2f}' for name, seconds in parts.items())} s; all sizes checked, "
        f"{moved.read_back} read back whole",
    )


def _worker(services: Services) -> AbstractContextManager[Running]:
    port = free_port()
    argv = [sys.executable, "-m", "rl360.bench.collector", "--port", str(port)]
    env = {"RL360_HOME": services.home, "RL360_TOKEN_FILE": os.path.join(services.home, "token")}
    return running(argv, port, "/health", env)


def _shard(services: Services, run: str, count: int, moved: Moved) -> None:
    """Collect `count` trajectories into a bucket of their own, check them, delete them."""
    store = bucket(services, run)
    store._s3.create_bucket(Bucket=run)
    try:
        records = asyncio.run(_collect(services, store, run, count, moved))
        _check(store, end_step(store, run, specs_of(count), records, moved.spent), moved)
    finally:
        with suppress(botocore.exceptions.ClientError):
            store._s3.delete_bucket(Bucket=run)  # SeaweedFS drops the bucket's volumes, full or not


async def _collect(services: Services, store: ObjectStore, run: str, count: int, moved: Moved) -> list[AttemptRecord]:
    """The records of all attempts, each stored; sessions are made before the clock runs."""
    specs, log, parts = specs_of(count), TimedLog(store, run, 0, 0), moved.spent.parts
    async with RolloutClient(services, RunConfig(run=run), 0, 0, VERSION) as client:
        opened = await Spent().each("", (client._open_session(spec, spec.attempt_id(0)) for spec in specs), IN_FLIGHT)
        ids = [(spec.attempt_id(0), session_id) for spec, (session_id, _) in zip(specs, opened, strict=True)]
        gate = asyncio.Semaphore(IN_FLIGHT)
        # the sandbox server's work, as the agents' is
        verdicts = [verdict_of(run, "bench", name, float(i % 2)) for i, (name, _) in enumerate(ids)]

        async def store_and_keep(index: int) -> None:
            name, session_id = ids[index]
            with log.writer():
                async with gate:
                    ref = await client._store(name, session_id)
                await log.keep(record_of(ref, verdicts[index]))

        started = time.monotonic()
        with client._stores.player():  # as in a wave: others play on while these end
            await moved.spent.each("storing", (store_and_keep(i) for i in range(count)), count)
        moved.wall_s += time.monotonic() - started
        parts["storing"] -= log.write_s
        parts["record writes"] += log.write_s
        await moved.spent.each("closing", (client.close_session(*each) for each in ids), IN_FLIGHT)
    moved.record_objects += log.writes
    moved.stored_bytes += sum(record.stored.size_bytes for record in log.stored.values() if record.stored)
    return list(log.stored.values())


def _check(store: ObjectStore, records: list[AttemptRecord], moved: Moved) -> None:
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
            moved.read_back += 1


def _sizes(store: ObjectStore) -> dict[str, int]:
    pages = store._s3.get_paginator("list_objects_v2").paginate(Bucket=store.bucket)
    return {entry["Key"]: entry["Size"] for page in pages for entry in page.get("Contents", [])}
