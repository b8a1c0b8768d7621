"""The keeper: the one process that looks after engines between pushes (`rl360 fleet keep`).

Each round it asks every engine of the fleet how it is and does at most the next safe thing for each. An engine that
misses `suspect_after` rounds is suspect and gets no traffic; one that misses `fence_after`, or whose process is gone,
is fenced: out of the gateway first, then its processes ended, then their end proven; then its launcher starts another.
A suspect that answers again is joining. Who joins gets traffic from the next push that confirms it, never from here.

A suspect whose door lets it generate has to sample a token before it joins; one that lost its traffic `flaps` times
within `flaps_s` is fenced. A start has `start_s` from when its launcher first calls it running: one that waits in a
queue is waited for.

The keeper owns what it mends by a claim in the fleet's log, so a push leaves it alone; it leaves alone what a push
owns, and while a push is open it only watches. It acts while it holds its lease (rl360/engines/keeper_lease.py).
Killed at any point, its successor goes on where the log says it was.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from rl360.config.services import Services
from rl360.engines import health
from rl360.engines.client import EngineClient, EngineRefused, EngineSilent, deployment_token
from rl360.engines.fleet import EngineIdentity, EngineState
from rl360.engines.fleet_log import (
    Event,
    FleetLog,
    FleetState,
    Slot,
    arrival,
    change,
    claim_is_over,
    taking,
    walk,
)
from rl360.engines.gateway import GatewayClient, Worker
from rl360.engines.keeper_lease import Lease, LeaseLost, Store, other_keepers
from rl360.engines.launchers import open_launcher
from rl360.engines.launchers.base import Handle, Launcher, Start, handle_of
from rl360.engines.members import SUPERVISED, holders, is_external, members, settle
from rl360.engines.patience import KeepOptions
from rl360.engines.processes import EndProof
from rl360.errors import Rl360Error
from rl360.weights import fence

S = EngineState
GATEWAY_S = 20.0
STRAYS_EVERY_S = 60.0
STOP_S = 5.0  # what is under way has so long to notice that the keeper stops
RUNNING, STATE = "running_since", "state"  # what a slot's `ref` tells of its start, beside its launcher's names
BACKOFF_S, BACKOFF_MAX_S = 5.0, 300.0
PROBE_IDS = (1, 2)
OUT = "out of the gateway"
LEFTOVERS = "leftovers"  # no engine's name


@dataclass
class Watch:
    """What the keeper remembers of one engine between rounds; lost with it, and only costs patience."""

    misses: int = 0
    epoch: int | None = None
    asked_at: float = 0.0
    starts: int = 0
    not_before: float = 0.0
    twin: str = ""
    failed: str = ""  # the error that was said last


@dataclass
class Keeper:
    """One keeper of one fleet. `say` gets one line for whatever it does."""

    store: Store
    services: Services
    options: KeepOptions
    http: httpx.AsyncClient
    say: Callable[[str], None]
    launchers: dict[str, Launcher] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lease = Lease(self.store, self.options.lease_s)
        self.me = self.lease.me
        self.log = FleetLog(self.store)
        self.gateway = GatewayClient(self.services.gateway_url, self.http)
        self.token = deployment_token()
        self.vocabulary = health.vocabulary_of(self.services.model_dir)
        self.watches: dict[str, Watch] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.notes: dict[str, str] = {}  # what is seen of engines that start, told with each renewal of the lease
        self.renewing: asyncio.Task[None] | None = None
        self.strays_at = 0.0

    async def run(self, stop: asyncio.Event, beat: Callable[[], None], once: bool = False) -> None:
        """Rounds until `stop`, which also ends one under way, or one alone; an error when another keeper took over.
        `beat` after each. A round that fails is said and the next one tries again."""
        stopping = asyncio.create_task(stop.wait())
        try:
            await self._until(stopping, self.open(beat))
            while not stopping.done():
                await self._until(stopping, self.round())
                beat()
                if once:
                    break
                await asyncio.wait({stopping}, timeout=self.options.every_s)
        finally:
            stopping.cancel()
            await self.close()

    async def _until(self, stopping: asyncio.Task[Any], work: Coroutine[Any, Any, None]) -> None:
        """Do it, but for no longer than until `stopping` is done. What a round raises is said."""
        opening = self.renewing is None
        doing = asyncio.create_task(work)
        await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            doing.cancel()
            await asyncio.wait({doing}, timeout=STOP_S)
        error = None if not doing.done() or doing.cancelled() else doing.exception()
        if error is not None and (opening or self.lease.taken_by or not isinstance(error, Rl360Error)):
            raise error
        if error is not None:
            self.say(f"round failed: {error}")

    async def open(self, beat: Callable[[], None] = lambda: None) -> None:
        """Wait for the end of others, take the lease, look again: of two that begin at once at most one stays, the one
        whose token is first. `beat` while it waits."""
        await self.lease.wait_for_others(self.say, beat)
        await asyncio.to_thread(self.lease.begin)
        self.renewing = asyncio.create_task(self.lease.keep(lambda: dict(self.notes), self.say))
        give_up = time.monotonic() + 2 * self.options.lease_s
        while others := await asyncio.to_thread(other_keepers, self.store, self.lease.token):
            if min(others) < self.me or time.monotonic() > give_up:
                await self.close()
                raise Rl360Error(f"another keeper began at the same time: {'; '.join(others)}")
            beat()
            await asyncio.sleep(min(1.0, self.options.lease_s / 10))

    async def close(self) -> None:
        """What it was about to do is left to its successor, as a claim in the log."""
        begun = self.renewing is not None
        left = {task for task in (*self.tasks.values(), self.renewing) if task is not None}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=STOP_S)
        if begun:
            await asyncio.to_thread(self.lease.end)

    async def round(self) -> None:
        """Look at every engine, then mend each; `LeaseLost` while this keeper may not act."""
        if self.renewing is not None and self.renewing.done() and not self.renewing.cancelled():
            self.renewing.result()  # a defect in it is not a lease that ran out
        self.lease.check()
        before = state = await asyncio.to_thread(self.log.refresh)
        urls = {name: slot.url for name, slot in state.slots.items() if slot.url} | members(
            state, self.services.engine_urls
        )
        kept = holders(state, self.services.engine_urls)
        looks = (self.look(state, kept, name, url) for name, url in urls.items())
        seen = dict(zip(urls, await asyncio.gather(*looks), strict=True))
        try:
            workers = {worker.url: worker for worker in await self.gateway.workers()}
        except Rl360Error as error:
            self.say(f"gateway: {error}")
            workers = {}
        # in this order: a push that is over has written its end before it gives its engines back
        if await asyncio.to_thread(fence.open_intents, self.store):
            for watch in self.watches.values():
                watch.misses = 0  # engines are paused and busy: what they missed says nothing
            return
        state = await asyncio.to_thread(self.log.refresh)
        kept = holders(state, self.services.engine_urls)
        if LEFTOVERS not in self.tasks:  # a launcher that does not answer keeps nobody from being mended
            self.tasks[LEFTOVERS] = asyncio.create_task(self.end_strays(state))
        for name in {**urls, **state.slots}:
            slot = state.slots.get(name)
            if slot != before.slots.get(name):
                self.watch(name).misses = 0  # looked at before a push or a person moved it: that look is worth nothing
            elif slot is not None and slot.state is not S.GONE and kept.get(slot.incarnation, name) != name:
                self.leave(name, kept[slot.incarnation])
            elif name not in self.tasks:
                found = seen.get(name, health.Seen(reason="its URL is not known yet"))
                mending = self.mend(name, slot, found, workers)
                self.tasks[name] = asyncio.create_task(mending, name=name)
        # ending one engine takes a while: the others are looked at meanwhile
        if self.tasks:
            await asyncio.wait(self.tasks.values(), timeout=self.options.every_s)
        self.reap()
        self.lease.check()

    def reap(self) -> None:
        """Say what finished tasks met; a defect stops the keeper."""
        for name, task in list(self.tasks.items()):
            if task.done():
                del self.tasks[name]
                error = task.exception()
                if isinstance(error, Rl360Error):
                    self.failed(name, str(error))
                elif error is not None:
                    raise error

    def failed(self, name: str, error: str) -> None:
        """An error goes to the log when it is another one than before, and to `rl360 fleet status` while it lasts."""
        if self.watch(name).failed != error:
            self.say(f"{name}: {error}")
        self.watch(name).failed = self.notes[name] = error

    def leave(self, name: str, other: str) -> None:
        """Two slots hold one engine: it is looked after, and ended, as the other one's only."""
        if self.watch(name).twin != other:
            self.say(f"{name}: is the same engine as {other}, which has it; this one is left alone")
        self.watch(name).twin = other

    async def look(self, state: FleetState, kept: Mapping[str, str], name: str, url: str) -> health.Seen:
        slot = state.slots.get(name)
        known = EngineIdentity(url=url, incarnation=slot.incarnation, process=slot.process) if slot else None
        seen = await health.look(self.client(url, slot), known, self.options.ping_s, self.options.look_s)
        other = kept.get(seen.identity.incarnation, name) if seen.identity is not None else name
        if other == name:
            return seen
        return health.Seen(reason=f"{other} answers at {url}: both have the same address or port")

    def client(self, url: str, slot: Slot | None) -> EngineClient:
        external = is_external(slot, self.services.engine_urls)
        return EngineClient(url, self.http, self.options.look_s, token=self.token, external=external)

    def watch(self, name: str) -> Watch:
        return self.watches.setdefault(name, Watch())

    def launcher(self, slot: Slot) -> Launcher:
        if slot.launcher not in self.launchers:
            self.launchers[slot.launcher] = open_launcher(slot.launcher, self.services)
        return self.launchers[slot.launcher]

    async def write(self, slot: Slot | None, events: Sequence[Event]) -> Slot | None:
        """Write the events if the slot is still as it was seen; the slot after them, or None when somebody moved it."""
        name, won = events[0].engine, list[Event]()

        def decide(state: FleetState) -> list[Event]:
            won.clear()
            now = state.slots.get(name)
            if now != slot or not self.lease.held:
                return []
            over = claim_is_over(self.store, now.owner) if now and now.owner not in (None, self.me) else ""
            if now is not None and now.owner not in (None, self.me) and not over:
                return []
            won[:] = taking(list(events), now, self.me, over)
            return won

        state = await asyncio.to_thread(self.log.append, self.me, decide)
        if not won:
            return None
        for event in events:
            self.say(
                f"{name}: {event.was or 'new'} -> {event.to}: {event.reason}"
                + (f" ({event.evidence})" if event.evidence else "")
            )
        return state.slots[name]

    async def mend(self, name: str, slot: Slot | None, seen: health.Seen, workers: dict[str, Worker]) -> None:
        """The next safe thing for one engine."""
        self.notes.pop(name, None)
        if slot is None:
            if seen.identity is not None:
                await self.write(None, arrival(None, name, seen.identity, SUPERVISED, "answers for the first time"))
            return
        if slot.owner not in (None, self.me):
            if not await asyncio.to_thread(claim_is_over, self.store, slot.owner or ""):
                return
            if await self.settled(slot):
                return  # as its push left it: the next round looks again
        watch = self.watch(name)
        if watch.epoch != slot.epoch:  # a push has confirmed it since: what it missed before that is forgiven
            watch.epoch, watch.misses = slot.epoch, 0
        if slot.state is S.GONE:
            await self.replace(slot, seen)
        elif slot.state is S.FENCED:
            await self.finish(slot, seen, workers.get(slot.url))
        elif slot.state is S.DRAINING and slot.member is False:
            await self.drain(slot, seen)
        elif slot.state is S.SUSPECT:
            await self.judge(slot, seen)
        elif not slot.incarnation and seen.identity is None:
            await self.starting(slot)
        else:
            await self.check(slot, seen, workers.get(slot.url))

    async def settled(self, slot: Slot) -> bool:
        """Write for a push what it could not write any more, when its record says what became of this engine."""
        kind, _, epoch = (slot.owner or "").partition(":")
        record = await asyncio.to_thread(fence.read_end, self.store, int(epoch)) if kind == "push" else None
        if record is None or not any(o.identity.incarnation == slot.incarnation for o in record.engines):
            return False
        await asyncio.to_thread(settle, self.log, record)
        return True

    async def check(self, slot: Slot, seen: health.Seen, worker: Worker | None) -> None:
        """joining, loading, confirmed, serving: alive, the same, and in the gateway only when it serves."""
        watch = self.watch(slot.name)
        if seen.identity is None:
            watch.misses += 1
            proof = await self.proof(slot)
            if proof.gone:
                await self.fence(slot, f"its processes ended: {seen.reason}")
            elif watch.misses >= self.options.suspect_after:
                await self.suspect(slot, f"{watch.misses} misses in a row: {seen.reason}")
            return
        if seen.identity.incarnation != slot.incarnation:
            await self.arrived(slot, seen.identity)
            return
        problem = await self.idle_sample(slot, watch) if slot.state is S.SERVING else ""
        watch.misses = watch.misses + 1 if problem else 0
        if problem and watch.misses >= self.options.suspect_after:
            await self.suspect(slot, f"{watch.misses} misses in a row: {problem}")
        elif slot.state in (S.LOADING, S.CONFIRMED):
            await self.write(slot, walk(slot, [S.SUSPECT, S.JOINING], "its push is over", version=""))
        elif slot.state is S.DRAINING:
            await self.write(slot, walk(slot, [S.JOINING], "released by a failed push; traffic after the next one"))
        elif slot.state is S.JOINING and worker is not None and worker.usable:
            self.say(f"{slot.name}: got traffic while joining; {await self.out_of_gateway(slot)}")

    async def idle_sample(self, slot: Slot, watch: Watch) -> str:
        """`sample` when it is idle and none was asked for a while."""
        due = time.monotonic() - watch.asked_at > self.options.generate_every_s
        if self.vocabulary is None or not (due or watch.misses):
            return ""
        if await health.in_flight(slot.url, self.http, self.options.ping_s) != 0:
            return ""
        watch.asked_at = time.monotonic()
        return await self.sample(slot)

    async def sample(self, slot: Slot) -> str:
        """One sampled token; what was wrong, else empty."""
        assert self.vocabulary is not None  # asked by both callers
        ids = tuple(item % self.vocabulary for item in PROBE_IDS)
        token = None if is_external(slot, self.services.engine_urls) else self.token
        problem = await health.generate(slot.url, self.http, ids, self.vocabulary, self.options.generate_s, token)
        paused = bool(problem and await asyncio.to_thread(fence.open_intents, self.store))
        return "" if paused else problem

    async def arrived(self, slot: Slot, identity: EngineIdentity) -> None:
        """Another incarnation answers in its place: the old one is fenced, then the new one joins."""
        held: Slot | None = slot
        if slot.incarnation and slot.state not in (S.FENCED, S.GONE):
            held = await self.fence(slot, f"another incarnation answers at {identity.url}")
        if held is None or (held.incarnation and self.launcher(slot).starts):
            return  # its launcher starts another, in a place of its own
        reason = "traffic after the next push" if slot.incarnation else "answers for the first time"
        if await self.write(held, arrival(held, held.name, identity, held.launcher, reason)):
            self.watches.pop(slot.name, None)

    async def suspect(self, slot: Slot, reason: str) -> Slot | None:
        """No traffic from here on; it may still answer again."""
        held = await self.write(slot, walk(slot, [S.SUSPECT], reason, holds=True))
        if held is not None:
            await self.out_of_gateway(slot)
        return held

    async def judge(self, slot: Slot, seen: health.Seen) -> None:
        """A suspect: removed by a person, silent for good, unable to generate or back too often it is fenced; else one
        that answers again joins."""
        watch = self.watch(slot.name)
        problem = seen.reason
        await self.out_of_gateway(slot)  # also when it was out: the keeper before may have died over it
        if slot.member is False:
            await self.fence(slot, slot.reason)
            return
        if seen.identity is not None and seen.identity.incarnation != slot.incarnation:
            await self.arrived(slot, seen.identity)
            return
        if seen.identity is not None:
            now = time.time()
            flaps = [at for at in slot.flaps if now - at < self.options.flaps_s]
            if len(flaps) >= self.options.flaps:
                often = f"lost its traffic {len(flaps)} times in {now - flaps[0]:.0f} s"
                await self.fence(slot, f"{often}, the last time: {slot.reason}")
                return
            problem = await self.disproved(slot)
        if not problem:
            if await self.write(
                slot, walk(slot, [S.JOINING], "answers again; traffic after the next push", version="")
            ):
                self.watches.pop(slot.name, None)
            return
        watch.misses = max(watch.misses, self.options.suspect_after) + 1
        proof = await self.proof(slot)
        if proof.gone or watch.misses >= self.options.fence_after:
            await self.fence(slot, f"{watch.misses} misses in a row: {problem}")

    async def disproved(self, slot: Slot) -> str:
        """What is wrong with a suspect that answers: it has to sample a token, where its door lets it. A door that
        refuses all generation until a push has brought weights leaves nothing to be asked."""
        try:
            door = await self.client(slot.url, slot).door(self.options.ping_s)
        except EngineSilent as error:
            return str(error)
        except EngineRefused as error:
            return "" if error.status in (401, 403) else str(error)  # who isn't let in can't say anything about it
        admits = door is None or door.get("phase") == "serving"
        return await self.sample(slot) if admits and self.vocabulary is not None else ""

    async def fence(self, slot: Slot, reason: str) -> Slot | None:
        """suspect -> fenced -> gone: out of the gateway, ended, proven; unproven it stays fenced for a person."""
        held: Slot | None = slot
        if slot.state is not S.SUSPECT:
            held = await self.suspect(slot, reason)
        elif slot.owner != self.me:
            held = await self.write(slot, walk(slot, [S.SUSPECT], reason, holds=True))
        if held is None:
            return None
        out = await self.out_of_gateway(held)
        held = await self.write(held, walk(held, [S.FENCED], reason, evidence=out, holds=True))
        return None if held is None else await self.bury(held, await self.ended(held), out)

    async def bury(self, slot: Slot, proof: EndProof, out: str = "") -> Slot | None:
        """fenced -> gone with the proof, or fenced with what is missing, given back so that a person may confirm."""
        evidence = "; ".join(part for part in (out, proof.evidence) if part)
        told = f"{evidence}; not proven gone, then: rl360 fleet confirm-gone {slot.name} --reason '...'"
        if proof.gone:
            return await self.write(slot, walk(slot, [S.GONE], slot.reason, evidence=evidence))
        if slot.owner is not None or slot.evidence != told:
            return await self.write(slot, walk(slot, [S.FENCED], slot.reason, evidence=told))
        return slot

    async def finish(self, slot: Slot, seen: health.Seen, worker: Worker | None) -> None:
        """fenced: ended when its keeper died over it, looked at again when its end was not proven, or replaced. Out of
        the gateway again when that did not answer, or somebody put it back."""
        if seen.identity is not None and seen.identity.incarnation != slot.incarnation and slot.member is not False:
            await self.arrived(slot, seen.identity)
        elif slot.owner is not None:
            out = await self.out_of_gateway(slot)
            await self.bury(slot, await self.ended(slot), out)
        else:
            if worker is not None and worker.status != "draining" and await self.out_of_gateway(slot) == OUT:
                self.say(f"{slot.name}: got traffic while fenced; {OUT}")
            proof = await self.proof(slot)
            if proof.gone:
                await self.bury(slot, proof)

    async def replace(self, slot: Slot, seen: health.Seen) -> None:
        """gone: the launcher starts another, or something outside has."""
        watch = self.watch(slot.name)
        if slot.member is False:
            return
        if not self.launcher(slot).starts:
            if seen.identity is not None and seen.identity.incarnation != slot.incarnation:
                await self.arrived(slot, seen.identity)
            return
        if time.monotonic() < watch.not_before:
            return
        watch.starts += 1
        watch.not_before = time.monotonic() + min(BACKOFF_MAX_S, BACKOFF_S * 2**watch.starts)
        fresh: dict[str, Any] = {"incarnation": "", "process": None, "ref": {}, "epoch": None, "version": ""}
        url = slot.url if slot.launcher == "local" else ""
        reason = f"replaces incarnation {slot.incarnation or 'that never answered'}"
        await self.write(slot, [change(slot, S.JOINING, reason, url=url, **fresh)])

    async def starting(self, slot: Slot) -> None:
        """joining, never seen: have it started, find its URL, give up `start_s` after it was first seen running."""
        launcher, watch, handle = self.launcher(slot), self.watch(slot.name), handle_of(slot)
        if not launcher.starts:
            return
        if slot.process is None and not slot.ref:
            if time.monotonic() < watch.not_before and watch.misses:
                if watch.failed:
                    self.notes[slot.name] = watch.failed
                return
            watch.misses += 1
            watch.not_before = time.monotonic() + min(BACKOFF_MAX_S, BACKOFF_S * 2**watch.misses)
            self.lease.check()
            made = await launcher.start(self.start_of(slot), self.options.end_s)
            await self.write(slot, [self.told(slot, made, f"{slot.launcher} started {made.mark}")])
            watch.misses, watch.failed = 0, ""
            return
        proof = await self.proof(slot)
        if proof.gone:
            await self.fence(slot, f"ended before it answered: {proof.evidence}")
            return
        found = await launcher.locate(handle, self.options.look_s)
        if found.failed:
            await self.fence(slot, f"failed before it answered: {found.failed}")
            return
        since = float(slot.ref.get(RUNNING, 0)) or (time.time() if found.running else 0.0)
        told = {**found.ref, STATE: found.state} | ({RUNNING: f"{since:.1f}"} if since else {})
        age_s, now_s = max(0.0, time.time() - slot.since), max(0.0, time.time() - since)
        ahead = f"runs for {now_s:.0f} of {self.options.start_s:g} s" if since else f"waits to run for {age_s:.0f} s"
        self.notes[slot.name] = "; ".join(part for part in (ahead, found.detail or found.state) if part)
        if since and now_s > self.options.start_s:
            late = f"did not answer within {self.options.start_s:g} s of running (--start-s)"
            await self.fence(slot, f"{late}: {found.detail or found.state}")
        elif told != slot.ref or (found.url and found.url != slot.url):
            at = f" at {found.url}" if found.url else ""
            how = f"runs{at}, not answering yet" if since else "waits to run"
            made = found.model_copy(update={"ref": told})
            await self.write(slot, [self.told(slot, made, f"{how}: {found.state}" if found.state else how)])

    def start_of(self, slot: Slot) -> Start:
        number = int(slot.name.rpartition("-")[2])
        port = urlsplit(slot.url).port or self.launcher(slot).port_of(number)
        return Start(
            name=slot.name, number=slot.starts, model_dir=self.services.model_dir, port=port, seed=1000 + number
        )

    def told(self, slot: Slot, handle: Handle, reason: str) -> Event:
        return change(
            slot,
            S.JOINING,
            reason,
            url=handle.url or slot.url,
            process=handle.process or slot.process,
            ref=dict(handle.ref),
        )

    async def drain(self, slot: Slot, seen: health.Seen) -> None:
        """draining for good: no new requests, those in flight may end, then it is ended."""
        out = await self.out_of_gateway(slot)
        late = time.time() - slot.since > self.options.drain_s
        left = await health.in_flight(slot.url, self.http, self.options.ping_s) if seen.identity else 0
        if left != 0 and not late:  # None: it did not say
            return
        cut = f"{left} requests were" if left else "whatever was in flight, which it did not say, was"
        how = "nothing was in flight" if left == 0 else f"{cut} cut off after {self.options.drain_s:g} s"
        held = await self.write(slot, walk(slot, [S.DRAINING], slot.reason, holds=True))
        if held is None:  # a person has taken it back just now
            return
        proof = await self.ended(held)
        evidence = f"{out}; {how}; {proof.evidence}"
        after = [S.GONE] if proof.gone else [S.SUSPECT, S.FENCED]
        await self.write(held, walk(held, after, slot.reason, evidence=evidence))

    async def proof(self, slot: Slot) -> EndProof:
        """Whether it is gone, by its launcher or by a person's word."""
        return await self._proven(slot, await self.launcher(slot).proof(handle_of(slot), self.options.look_s))

    async def ended(self, slot: Slot) -> EndProof:
        self.lease.check()
        return await self._proven(slot, await self.launcher(slot).end(handle_of(slot), self.options.end_s))

    async def _proven(self, slot: Slot, proof: EndProof) -> EndProof:
        if proof.gone or not slot.incarnation:
            return proof
        identity = EngineIdentity(url=slot.url, incarnation=slot.incarnation)
        if await asyncio.to_thread(fence.is_gone_confirmed, self.store, identity):
            return EndProof(gone=True, evidence=f"a person confirmed that it is gone; {proof.evidence}")
        return proof

    async def out_of_gateway(self, slot: Slot) -> str:
        """Take it out; evidence of it, also when the gateway is down: then nobody gets there through it. A URL that
        another slot's engine has by now stays in."""
        if not slot.url:
            return "was never in the gateway"
        self.lease.check()
        for other in (await asyncio.to_thread(self.log.refresh)).slots.values():
            if other.url == slot.url and other.name != slot.name and other.state in (S.LOADING, S.CONFIRMED, S.SERVING):
                return f"{other.name} has its URL in the gateway now"
        try:
            await self.gateway.remove(slot.url, GATEWAY_S, self.lease.check)
        except LeaseLost:
            raise
        except Rl360Error as error:
            return f"gateway did not answer: {error}"
        return OUT

    async def end_strays(self, state: FleetState) -> None:
        """End what a launcher of ours started and the log doesn't know: its keeper died, or its start came late."""
        if time.monotonic() - self.strays_at < STRAYS_EVERY_S:
            return
        self.strays_at = time.monotonic()
        for kind, slot in sorted({slot.launcher: slot for slot in state.slots.values()}.items()):
            try:
                await self._end_strays_of(self.launcher(slot))
            except Rl360Error as error:  # the other launchers' are looked for all the same
                self.say(f"{LEFTOVERS} of {kind}: {error}")

    async def _end_strays_of(self, launcher: Launcher) -> None:
        found = await launcher.find(self.options.look_s)
        state = await asyncio.to_thread(self.log.refresh)  # after the look: a start is in the log before it is made
        known = {f"{s.name}-{s.starts}": s.ref for s in state.slots.values() if s.state is not S.GONE}
        for handle in found:
            ref = known.get(handle.mark)  # a second job or pod of one start has other names than the log's
            if ref is None or any(ref.get(key, value) != value for key, value in handle.ref.items()):
                self.lease.check()
                proof = await launcher.end(handle, self.options.end_s)
                self.say(f"{handle.mark}: {launcher.kind} runs it and the log does not know it; {proof.evidence}")
