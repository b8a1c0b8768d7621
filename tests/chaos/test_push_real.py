"""Seeded SIGKILL and SIGSTOP on three real engines behind a real gateway while weights are pushed, seen from outside.

The gate runs a few schedules; `RL360_PUSH_SCHEDULES=30` as many as it says (each replaces what it killed, a minute or
so an engine). A traffic thread asks the gateway all the time and notes what came back; what an engine says, holds and
serves is read from the engine itself. A schedule's seed is its number.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from rl360.bench.push_fleet import EngineProcess, Fleet, SentWeights, answers, fleet, generate
from rl360.engines.client import EngineClient, open_http
from rl360.engines.fleet import EngineState
from rl360.errors import EngineChurn, ServiceError
from rl360.weights import fence
from rl360.weights.messages import PushPlan, PushRecord, PushStatus
from rl360.weights.push import push

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)]

SCHEDULES = int(os.environ.get("RL360_PUSH_SCHEDULES", "3"))
CALL_DEADLINE_S = 6.0  # a stopped engine costs the others as much pause


@dataclass
class Traffic(threading.Thread):
    """Requests through the gateway, one after the other; `seen`: (version, ids) of every reply."""

    gateway_url: str
    seen: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    failed: int = 0
    stopping: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        while not self.stopping.wait(0.05):
            try:
                reply = generate(self.gateway_url, tokens=6)
            except httpx.HTTPError:
                self.failed += 1
                continue
            spans = reply["meta_info"].get("weight_versions") or []
            versions = {span["version"] for span in spans} or {reply["meta_info"]["weight_version"]}
            if len(versions) == 1:  # one that went on over a push has two, and a session refuses it
                self.seen.append((versions.pop(), tuple(reply["output_ids"])))


class Rig:
    """The fleet, its traffic, and what each confirmed version answers."""

    def __init__(self, running: Fleet) -> None:
        self.fleet = running
        self.fleet.run = "chaos"
        self.fleet.config = running.config.model_copy(update={"call_deadline_s": CALL_DEADLINE_S})
        self.answers: dict[str, tuple[int, ...]] = {}
        self.traffic = Traffic(running.gateway_url)
        self.epoch = 0
        self.strikes: list[threading.Timer] = []

    def strike_after(self, delay_s: float, strike: Callable[..., None], *args: object) -> None:
        timer = threading.Timer(delay_s, strike, args)
        self.strikes.append(timer)
        timer.start()

    def wait_for_strikes(self) -> None:
        """Some hit after the push is over."""
        while self.strikes:
            self.strikes.pop(0).join()

    def push_until_done(self) -> PushRecord:
        """As the task does."""
        for _ in range(5):
            try:
                record, _ = self.fleet.push_again()
                return record
            except (ServiceError, EngineChurn):
                self.check_nothing_paused()
                time.sleep(0.5)
        raise AssertionError("five tries of a push failed")

    def note_answers(self, record: PushRecord) -> None:
        """What a confirmed version answers, the same on each engine that serves it."""
        well = {engine.url for engine in self.engines()}  # some were struck since
        told = {tuple(generate(url, tokens=6)["output_ids"]) for e in record.serving for url in {e.identity.url} & well}
        assert len(told) == 1, f"{record.version} differs by engine: {told}"
        self.answers[record.version] = told.pop()

    def engines(self) -> list[EngineProcess]:
        return [engine for engine in self.fleet.engines if engine.alive and answers(f"{engine.url}/ping")]

    def check_nothing_paused(self) -> None:
        """An engine that answers also generates, or refuses to because no push admitted it."""
        for engine in self.engines():
            body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}
            reply = httpx.post(f"{engine.url}/generate", json=body, timeout=CALL_DEADLINE_S)
            assert reply.status_code in (200, 503), reply.text

    def check(self, record: PushRecord) -> None:
        """From outside: names, checksums, traffic, epochs, the path."""
        assert record.status is PushStatus.CONFIRMED
        assert record.epoch > self.epoch
        self.epoch = record.epoch
        assert fence.open_intents(self.fleet.store) == []
        serving = {engine.identity.url for engine in record.serving}
        assert set(self.fleet.usable()) <= serving
        for url in serving & {engine.url for engine in self.engines()}:
            held, version = asyncio.run(_read(url))
            assert version == record.version
            assert held == self.fleet.weights.expected()
        for outcome in record.fenced:
            assert outcome.identity.process is not None and outcome.reason
        self.check_nothing_paused()

    def check_traffic(self) -> None:
        """Every reply of one real version is what that version answers."""
        assert self.traffic.is_alive()
        for version, ids in self.traffic.seen:
            assert "#" not in version and version in self.answers, f"a reply of {version}, never confirmed"
            assert ids == self.answers[version], f"a reply called {version} of other weights"
        self.traffic.seen.clear()

    def replace_the_dead(self) -> None:
        for engine in self.fleet.engines:
            if not engine.alive or not answers(f"{engine.url}/ping"):
                engine.end()
                engine.start()
        for engine in self.fleet.engines:
            engine.wait()


async def _read(url: str) -> tuple[dict[str, str], str]:
    async with open_http() as http:
        client = EngineClient(url, http, 20)
        return await client.checksums(), await client.weight_version()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with fleet(tmp_path_factory.mktemp("fleet"), bucket_bytes=64 << 10) as running:
        made = Rig(running)
        record, _ = running.next_push()
        made.note_answers(record)
        made.check(record)
        made.traffic.start()
        yield made
        made.traffic.stopping.set()
        made.traffic.join(timeout=60)


def _push_and_die(running: dict[str, Any], after_buckets: int) -> None:
    """A pusher of its own that SIGKILLs itself inside the transfer."""
    from rl360.weights.transports.broadcast import BroadcastTransport

    original, sent = BroadcastTransport._send, []

    def send(self: Any, *args: Any) -> None:
        sent.append(args)
        if len(sent) > after_buckets:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, *args)

    BroadcastTransport._send = send  # type: ignore[method-assign]
    weights = SentWeights(Path(running["services"].model_dir))
    weights.tensors = running["tensors"]
    asyncio.run(
        push(
            running["store"],
            running["services"],
            running["run"],
            running["step"],
            running["version"],
            weights,
            running["config"],
        )
    )


def _strike(rig: Rig, rng: random.Random) -> str:
    """Arrange what goes wrong under the next push."""
    how = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
    victims = rng.sample(rig.fleet.engines, rng.choice((1, 1, 1, 2)))
    delay_s = rng.choice((0.0, 0.01, 0.05, 0.2))
    when = rng.choice(("before", "asked", "transfer", "confirmed"))
    weights, store = rig.fleet.weights, rig.fleet.store

    def strike(*_: object) -> None:
        weights.before = weights.asked = store.asked = None
        for number, victim in enumerate(victims):
            rig.strike_after(delay_s * number, victim.strike, how)

    if when == "before":
        strike()
    elif when == "asked":
        weights.asked = strike
    elif when == "transfer":

        def later(_plan: PushPlan) -> None:
            rig.strike_after(delay_s, strike)

        weights.before = later
    else:
        own = fence.end_key(fence.next_epoch(store))
        store.asked = lambda key: strike() if key == own else None
    return f"{how.name} to {[rig.fleet.engines.index(v) for v in victims]} {when} +{delay_s}"


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_killed_and_stopped_engines(rig: Rig, seed: int) -> None:
    rng = random.Random(seed)
    rig.fleet.step += 1
    rig.fleet.weights.change(rig.fleet.step)
    story = _strike(rig, rng)
    record = rig.push_until_done()
    rig.wait_for_strikes()
    rig.note_answers(record)
    rig.check(record)
    rig.replace_the_dead()
    # the next push finds the whole set again by the way of the first
    first = rig.fleet.records[0]
    rig.fleet.step += 1
    rig.fleet.weights.change(rig.fleet.step)
    last = rig.push_until_done()
    rig.note_answers(last)
    rig.check(last)
    assert len(last.serving) == len(rig.fleet.engines), story
    assert last.way == first.way, story
    rig.check_traffic()


def test_kv_of_old_weights_serves_no_new_request(rig: Rig) -> None:
    """Paused in place a request goes on with the KV it has, and nothing can be flushed; a new one finds none of it."""
    rig.replace_the_dead()
    config = rig.fleet.config
    engine, prompt = rig.fleet.engines[0].url, tuple(range(20, 84))
    try:
        rig.fleet.config = config.model_copy(update={"pause_mode": "in_place"})
        old = rig.fleet.version
        long = threading.Thread(target=generate, args=(engine, 200, prompt), kwargs={"cache_salt": old}, daemon=True)
        long.start()
        time.sleep(0.3)
        record, _ = rig.fleet.next_push()
        long.join(60)
    finally:
        rig.fleet.config = config
    rig.note_answers(record)
    rig.check(record)
    assert not record.flushed
    fresh = generate(engine, 8, prompt, cache_salt=record.version)
    assert fresh["meta_info"]["cached_tokens"] == 0
    assert fresh["output_ids"] == generate(rig.fleet.engines[1].url, 8, prompt)["output_ids"]
    # the KV is there, for whom it was made; and through the gateway the salt arrives
    assert generate(engine, 8, prompt, cache_salt=old)["meta_info"]["cached_tokens"] > 0
    through = [generate(rig.fleet.gateway_url, 8, prompt, "one session", cache_salt=salt) for salt in "aab"]
    cached = [reply["meta_info"]["cached_tokens"] for reply in through]
    assert cached[0] == cached[2] == 0 < cached[1]


def test_killed_pusher_is_taken_over(rig: Rig) -> None:
    """Its receivers live, half written and paused: the retry counts them as its own before it touches any."""
    rig.replace_the_dead()
    rig.fleet.step += 1
    rig.fleet.weights.change(rig.fleet.step)
    told = {
        "services": rig.fleet.services,
        "store": rig.fleet.store,
        "run": rig.fleet.run,
        "step": rig.fleet.step,
        "version": rig.fleet.version,
        "config": rig.fleet.config,
        "tensors": rig.fleet.weights.tensors,
    }
    child = multiprocessing.get_context("spawn").Process(target=_push_and_die, args=(told, 2))
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    (intent,) = fence.open_intents(rig.fleet.store)
    record = rig.push_until_done()
    rig.note_answers(record)
    rig.check(record)
    assert record.epoch > intent.epoch
    assert fence.read_end(rig.fleet.store, intent.epoch).status is PushStatus.SUPERSEDED  # type: ignore[union-attr]
    assert {e.state for e in record.engines} == {EngineState.SERVING}
