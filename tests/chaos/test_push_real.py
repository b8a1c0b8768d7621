"""Seeded SIGKILL and SIGSTOP on three real engines behind a real gateway while weights are pushed, seen from outside.

The gate runs a few schedules; `RL360_PUSH_SCHEDULES=30` as many as it says. A schedule's seed is its number; its
transport, when it strikes, whom, how, and how what was lost is replaced follow from it. Clients ask the gateway all the
time: each reply is kept, in each phase some must come, and no token may be of weights that were not confirmed. What an
engine says, holds and serves is read from the engine itself.
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
from dataclasses import dataclass
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
TRANSPORTS = ("broadcast", "direct_experts")
CALL_DEADLINE_S = 6.0  # a stopped engine costs the others as much pause
CLIENTS, ANSWER, ALIKE = 2, 12, 4  # tokens of an answer; rounding in other batches may part greedy ones after some
LEAST = 5  # whole replies of a version that the gateway's clients must get after its push


@dataclass(frozen=True)
class Reply:
    """`spans`: version, first token, past the last."""

    spans: tuple[tuple[str, int, int], ...]
    ids: tuple[int, ...]

    def is_of(self, version: str) -> bool:
        return self.spans == ((version, 0, ANSWER),)


class Traffic:
    """Clients of the gateway, one request after the other each; every reply is kept."""

    def __init__(self, gateway_url: str) -> None:
        self.gateway_url = gateway_url
        self.replies: list[Reply] = []
        self.failed = 0
        self.stopping = threading.Event()
        self.clients = [threading.Thread(target=self._ask, daemon=True) for _ in range(CLIENTS)]
        for client in self.clients:
            client.start()

    def _ask(self) -> None:
        while not self.stopping.wait(0.05):
            try:
                told = generate(self.gateway_url, tokens=ANSWER)
            except httpx.HTTPError:
                self.failed += 1
                continue
            ids = tuple(told["output_ids"])
            spans = told["meta_info"].get("weight_versions") or [
                {"version": told["meta_info"]["weight_version"], "start": 0, "end": len(ids)}
            ]
            self.replies.append(Reply(tuple((s["version"], s["start"], s["end"]) for s in spans), ids))

    def stop(self) -> None:
        self.stopping.set()
        for client in self.clients:
            client.join(timeout=60)


class Rig:
    """The fleet, its traffic, and what each confirmed version answers."""

    def __init__(self, running: Fleet) -> None:
        self.fleet = running
        self.fleet.run = "chaos"
        self.fleet.config = running.config.model_copy(update={"call_deadline_s": CALL_DEADLINE_S})
        self.answers: dict[str, tuple[int, ...]] = {}
        self.ways: dict[str, str] = {}
        self.epoch = self.checked = 0
        self.strikes: list[threading.Timer] = []
        for transport in TRANSPORTS:
            self.use(transport)
            record, _ = running.next_push()
            self.check(record)
            self.ways[transport] = record.way
        self.traffic = Traffic(running.gateway_url)

    def use(self, transport: str) -> None:
        self.fleet.config = self.fleet.config.model_copy(update={"transport": transport})

    def strike_after(self, delay_s: float, strike: Callable[..., None], *args: object) -> None:
        timer = threading.Timer(delay_s, strike, args)
        self.strikes.append(timer)
        timer.start()

    def wait_for_strikes(self) -> None:
        """Some hit after the push is over."""
        while self.strikes:
            self.strikes.pop(0).join()

    def push_new(self) -> PushRecord:
        self.fleet.step += 1
        self.fleet.weights.change(self.fleet.step)
        return self.push_until_done()

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

    def engines(self) -> list[EngineProcess]:
        return [engine for engine in self.fleet.engines if engine.alive and answers(f"{engine.url}/ping")]

    def check_nothing_paused(self) -> None:
        """An engine that answers also generates, or refuses to because no push admitted it."""
        for engine in self.engines():
            body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}
            reply = httpx.post(f"{engine.url}/generate", json=body, timeout=CALL_DEADLINE_S)
            assert reply.status_code in (200, 503), reply.text

    def check(self, record: PushRecord) -> None:
        """From outside: answers, names, checksums, the gateway, epochs."""
        assert record.status is PushStatus.CONFIRMED
        assert record.epoch > self.epoch
        self.epoch = record.epoch
        assert fence.open_intents(self.fleet.store) == []
        serving = {engine.identity.url for engine in record.serving}
        assert set(self.fleet.usable()) <= serving
        well = serving & {engine.url for engine in self.engines()}  # some were struck since
        for url in well:
            held, version = asyncio.run(_read(url))
            assert version == record.version
            assert held == self.fleet.weights.expected()
        told = {tuple(generate(url, tokens=ANSWER)["output_ids"][:ALIKE]) for url in well}
        assert len(told) == 1, f"{record.version} differs by engine: {told}"
        answer = told.pop()
        # or an engine that kept the weights before would answer as this version
        assert answer not in [told for version, told in self.answers.items() if version != record.version]
        self.answers[record.version] = answer
        for outcome in record.fenced:
            assert outcome.identity.process is not None and outcome.reason
        self.check_nothing_paused()

    def check_served(self, record: PushRecord) -> None:
        """The gateway's clients get this version's replies from now on."""
        until, seen = time.monotonic() + 60, len(self.traffic.replies)
        while sum(reply.is_of(record.version) for reply in self.traffic.replies[seen:]) < LEAST:
            assert time.monotonic() < until, f"no traffic of {record.version}: {self.traffic.replies[seen:][-3:]}"
            time.sleep(0.05)

    def check_traffic(self) -> None:
        """Traffic flowed; every token of every reply is of a confirmed version, and is what that version answers."""
        assert all(client.is_alive() for client in self.traffic.clients)
        replies = self.traffic.replies[self.checked :]
        assert len(replies) >= LEAST
        self.checked += len(replies)
        for reply in replies:
            spans = [span for span in reply.spans if span[1] < span[2]]  # an aborted request may have no token
            edges = [0, *(end for _, _, end in spans)]
            assert [start for _, start, _ in spans] == edges[:-1] and edges[-1] == len(reply.ids), reply
            for version, start, end in spans:
                assert version in self.answers, f"tokens {start} to {end} of {version}, never confirmed"
            for version, _, end in spans[:1]:
                first = min(end, ALIKE)
                assert reply.ids[:first] == self.answers[version][:first], f"{version} answers other than its weights"

    def replace_the_dead(self, joining: str = "before") -> None:
        """`joining`: `before` the next push, `during` pushes that don't know it yet, or `twice` before the next one."""
        self.fleet.weights.before = self.fleet.weights.asked = self.fleet.store.asked = None
        dead = [engine for engine in self.fleet.engines if engine not in self.engines()]
        for engine in dead * (2 if joining == "twice" else 1):
            engine.end()
            engine.start()
            while joining == "during" and engine.alive and not answers(f"{engine.url}/ping"):
                self.check(self.push_new())
            if joining == "twice":
                engine.wait()
        for engine in self.fleet.engines:
            engine.wait()


async def _read(url: str) -> tuple[dict[str, str], str]:
    async with open_http() as http:
        client = EngineClient(url, http, 20)
        return await client.checksums(), await client.weight_version()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    began = time.monotonic()
    with fleet(tmp_path_factory.mktemp("fleet"), bucket_bytes=64 << 10) as running:
        made = Rig(running)
        yield made
        made.traffic.stop()
        lost = [outcome.reason for record in running.records for outcome in record.fenced]
        print(
            f"\n{len(running.records)} pushes, {len(lost)} engines lost in one, {made.checked} replies checked, "
            f"{made.traffic.failed} requests failed, {time.monotonic() - began:.0f} s"
        )


def _push_and_die(running: dict[str, Any], after_buckets: int) -> None:
    """A pusher of its own that SIGKILLs itself inside the transfer."""
    from rl360.weights.transports.broadcast import BroadcastTransport

    original, sent = BroadcastTransport._send, []

    def send(self: Any, *args: Any) -> None:
        sent.append(args)
        if len(sent) > after_buckets:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, *args)

    BroadcastTransport._send = send  # type: ignore[method-assign, assignment]
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
    """Arrange what goes wrong under the next push. A nap is a SIGSTOP that ends by itself, within a call's deadline or
    after it."""
    how = rng.choice(("SIGKILL", "SIGKILL", "SIGSTOP", "nap"))
    victims = rng.sample(rig.fleet.engines, rng.choice((1, 1, 1, 2)))
    delay_s, nap_s = rng.choice((0.0, 0.01, 0.05, 0.2)), rng.choice((0.5, 2.0, CALL_DEADLINE_S + 2))
    when = rng.choice(("before", "asked", "transfer", "confirmed"))
    weights, store = rig.fleet.weights, rig.fleet.store

    def strike(*_: object) -> None:
        weights.before = weights.asked = store.asked = None
        for number, victim in enumerate(victims):
            rig.strike_after(delay_s * number, victim.strike, signal.SIGKILL if how == "SIGKILL" else signal.SIGSTOP)
            if how == "nap":
                rig.strike_after(delay_s * number + nap_s, victim.strike, signal.SIGCONT)

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
    slept = f" of {nap_s:g} s" if how == "nap" else ""
    return f"{how}{slept} to {[rig.fleet.engines.index(v) for v in victims]} {when} +{delay_s}"


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_killed_and_stopped_engines(rig: Rig, seed: int) -> None:
    rng = random.Random(seed)
    transport = TRANSPORTS[seed % len(TRANSPORTS)]
    rig.use(transport)
    story = f"{transport}, {_strike(rig, rng)}"
    joining = rng.choice(("before", "during", "twice"))
    print(f"{story}; joins {joining}")
    record = rig.push_new()
    rig.wait_for_strikes()
    rig.check(record)
    rig.check_served(record)
    rig.replace_the_dead(joining)
    # the next push finds the whole set again by the way of the first
    last = rig.push_new()
    rig.check(last)
    rig.check_served(last)
    assert len(last.serving) == len(rig.fleet.engines), story
    assert last.way == rig.ways[transport], story
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
    rig.check(record)
    rig.check_served(record)
    rig.check_traffic()
    assert not record.flushed
    fresh = generate(engine, 8, prompt, cache_salt=record.version)
    assert fresh["meta_info"]["cached_tokens"] == 0
    assert fresh["output_ids"] == generate(rig.fleet.engines[1].url, 8, prompt)["output_ids"]
    # the KV is there, for whom it was made; and through the gateway the salt arrives
    assert generate(engine, 8, prompt, cache_salt=old)["meta_info"]["cached_tokens"] > 0
    through = [generate(rig.fleet.gateway_url, 8, prompt, "one session", cache_salt=salt) for salt in "aab"]
    cached = [reply["meta_info"]["cached_tokens"] for reply in through]
    assert cached[0] == cached[2] == 0 < cached[1]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed_pusher_is_taken_over(rig: Rig, transport: str) -> None:
    """Its receivers live, half written and paused: the retry counts them as its own before it touches any."""
    rig.replace_the_dead()
    rig.use(transport)
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
    rig.check(record)
    rig.check_served(record)
    rig.check_traffic()
    assert record.epoch > intent.epoch
    assert fence.read_end(rig.fleet.store, intent.epoch).status is PushStatus.SUPERSEDED  # type: ignore[union-attr]
    assert {e.state for e in record.engines} == {EngineState.SERVING}
