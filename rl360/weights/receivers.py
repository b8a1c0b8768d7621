"""The engines during one push: each slot's state, and the calls that move it. Owned by the push that made it.

Nothing here decides about other pushes; `push.py` does. Every method ends within its deadlines, and an engine that
can't be brought along is fenced: out of the gateway, its processes ended, their end proven, or `CleanupUnconfirmed`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from rl360.engines.client import EngineClient, EngineRefused, EngineSilent
from rl360.engines.fleet import EngineIdentity, EngineState, advance, incarnation_of, probe_engine
from rl360.engines.gateway import GatewayClient
from rl360.errors import CleanupUnconfirmed, EngineChurn, Rl360Error, ServiceError, StoreUnavailable
from rl360.weights import fence
from rl360.weights.ends import Ends
from rl360.weights.messages import EngineOutcome

GATEWAY_DEADLINE_S = 20.0
T = TypeVar("T")


def with_slack_s(call_deadline_s: float) -> float:
    """How long a call may take behind another one that runs into its own deadline."""
    return call_deadline_s + min(5.0, call_deadline_s)


@dataclass
class Slot:
    """One receiver."""

    identity: EngineIdentity
    client: EngineClient
    state: EngineState
    calls: int = 0
    control_calls: int = 0
    strikes: int = 0
    reason: str = ""
    note: str = ""
    groups: set[str] = field(default_factory=set)  # that this push had it join, or wanted to
    was_serving: bool = False
    paused_at: float | None = None
    resumed_at: float | None = None
    answered_at: float = field(default_factory=time.time)  # it answered the probe that made it a receiver

    @property
    def url(self) -> str:
        return self.identity.url

    @property
    def paused_s(self) -> float:
        if self.paused_at is None:
            return 0.0
        return round((self.resumed_at or time.monotonic()) - self.paused_at, 6)

    def move(self, to: EngineState) -> None:
        self.state = advance(self.state, to)

    def taken_over(self, group: str) -> None:
        """A push that left no end had it: paused and half written, for all that is known. Ours to let go from here."""
        self.paused_at = time.monotonic()
        self.groups.add(group)

    async def ask(self, call: Awaitable[T]) -> T:
        """A control call of this push; it is counted, and its answer is noted."""
        self.control_calls += 1
        answer = await call
        self.answered_at = time.time()
        return answer

    def outcome(self) -> EngineOutcome:
        return EngineOutcome(
            identity=self.identity,
            state=self.state,
            calls=self.calls,
            control_calls=self.control_calls,
            paused_s=self.paused_s if self.was_serving else 0.0,
            reason=self.reason,
            note=self.note,
        )


@dataclass
class Receivers:
    """All slots of a push."""

    store: fence.Store
    gateway: GatewayClient
    ends: Ends
    intent: fence.Intent
    slots: list[Slot]
    min_engines: int
    call_deadline_s: float
    probe_deadline_s: float
    notes: list[str] = field(default_factory=list)

    def in_state(self, state: EngineState) -> list[Slot]:
        return [slot for slot in self.slots if slot.state is state]

    def require(self, state: EngineState, doing: str) -> list[Slot]:
        """Those in `state`; `ServiceError` when fewer than the push needs are left."""
        left = self.in_state(state)
        if len(left) < self.min_engines:
            lost = "; ".join(f"{slot.url}: {slot.reason}" for slot in self.slots if slot.reason)
            raise ServiceError(
                f"push of {self.intent.version}: {len(left)} engines left while {doing}, min_engines is "
                f"{self.min_engines} ({lost or 'none lost'})"
            )
        return left

    async def each(self, slots: list[Slot], call: Callable[[Slot], Awaitable[None]]) -> list[tuple[Slot, ServiceError]]:
        """Run `call` on all slots at once; those that failed, with why. `EngineChurn` when a door says that a later
        epoch has begun: its engines are not ours to judge. Returns and raises only once every call has ended."""

        async def one(slot: Slot) -> ServiceError | None:
            try:
                await call(slot)
            except ServiceError as error:
                if isinstance(error, EngineRefused) and error.status == 409:
                    raise EngineChurn(f"push epoch {self.intent.epoch} was taken over: {error}") from None
                return error
            return None

        results = await asyncio.gather(*(one(slot) for slot in slots), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ServiceError):
                raise result
        return [(slot, error) for slot, error in zip(slots, results, strict=True) if isinstance(error, ServiceError)]

    async def is_over(self) -> bool:
        """Whether another push took or closed this epoch: the engines are its business. An unreachable store counts
        as no: no push gets far without one, and engines left paused would outlast its outage."""
        try:
            return await asyncio.to_thread(fence.is_over, self.store, self.intent)
        except StoreUnavailable as error:
            self.notes.append(str(error))
            return False

    async def require_mine(self) -> None:
        if await self.is_over():
            raise EngineChurn(f"push epoch {self.intent.epoch} was taken over by a later push")

    async def fence_failed(self, failed: list[tuple[Slot, ServiceError]], asked: list[Slot], doing: str) -> None:
        """Fence those that failed. When all that were asked refuse alike, the fault is not theirs, and ending the whole
        fleet would mend nothing: `ServiceError`."""
        if failed and len(failed) == len(asked) and all(isinstance(error, EngineRefused) for _, error in failed):
            raise ServiceError(f"push of {self.intent.version}: every engine refuses while {doing}: {failed[0][1]}")
        for slot, error in failed:
            await self.fence_off(slot, str(error))

    async def pause(self, mode: str) -> None:
        """joining or serving -> loading; no engine generates from here on. First each is looked at again: who began at
        its URL since the set was frozen would stay paused."""
        again = await self.each(self.slots, self.require_same)
        await self.fence_failed(again, self.slots, "being looked at again")
        ready = [slot for slot in self.slots if slot.state is not EngineState.GONE]

        async def one(slot: Slot) -> None:
            slot.paused_at = time.monotonic()
            await slot.ask(slot.client.pause(mode, self.call_deadline_s))
            slot.move(EngineState.LOADING)

        await self.fence_failed(await self.each(ready, one), ready, "pausing")
        self.require(EngineState.LOADING, "pausing")

    async def rename(self, version: str) -> None:
        """Name the weights of all loading engines, so that what they hold is never called more than it is."""

        async def one(slot: Slot) -> None:
            await slot.ask(slot.client.set_weight_version(version, self.call_deadline_s))

        await self.require_mine()  # engines without a door refuse no push that stood still meanwhile
        loading = self.in_state(EngineState.LOADING)
        await self.fence_failed(await self.each(loading, one), loading, "naming the weights")
        self.require(EngineState.LOADING, "naming the weights")

    async def confirm(self, expected: dict[str, str]) -> None:
        """loading -> confirmed by reading every parameter's checksum back."""
        wrong: list[tuple[Slot, str]] = []

        async def one(slot: Slot) -> None:
            held = await slot.ask(slot.client.checksums(self.call_deadline_s))
            different = sorted(n for n in held.keys() | expected.keys() if held.get(n) != expected.get(n))
            if different:
                name = different[0]
                reason = (
                    f"{len(different)} of {len(expected)} parameters differ from the trainer's, first {name}: "
                    f"holds {held.get(name)}, expected {expected.get(name)}"
                )
                wrong.append((slot, reason))
            else:
                slot.move(EngineState.CONFIRMED)

        loading = self.in_state(EngineState.LOADING)
        silent = await self.each(loading, one)
        if wrong and len(wrong) == len(loading):
            # every engine alike: the fault is not theirs, and ending the whole fleet would mend nothing
            raise ServiceError(f"push of {self.intent.version}: no engine holds what was sent; {wrong[0][1]}")
        await self.fence_failed(silent, loading, "reading checksums back")
        for slot, reason in wrong:
            await self.fence_off(slot, reason)
        self.require(EngineState.CONFIRMED, "confirming")

    async def serve(self, version: str, flush: bool) -> None:
        """confirmed -> serving: name the version and read it back, drop old KV, open the door, resume, open the
        gateway. The door comes before the resume: an engine that is resumed unadmitted refuses what waits in it."""

        async def one(slot: Slot) -> None:
            client, deadline_s = slot.client, self.call_deadline_s
            await self.require_same(slot)  # who began while a stuck neighbour kept the push waiting confirmed nothing
            await slot.ask(client.set_weight_version(version, deadline_s))
            if (held := await slot.ask(client.weight_version(deadline_s))) != version:
                raise EngineRefused(f"engine {slot.url}: says it holds {held!r} after being told {version!r}")
            if flush:
                await slot.ask(client.flush_cache(deadline_s))
            await slot.ask(client.admit(version, deadline_s))
            await slot.ask(client.resume(deadline_s))
            slot.resumed_at = time.monotonic()

        confirmed = self.in_state(EngineState.CONFIRMED)
        await self.fence_failed(await self.each(confirmed, one), confirmed, "resuming")
        ready = self.require(EngineState.CONFIRMED, "resuming")

        async def open_gateway(slot: Slot) -> None:
            await self.require_same(slot)
            await self.gateway.add(slot.url, GATEWAY_DEADLINE_S, slot.client.token)
            await self.require_same(slot)
            slot.move(EngineState.SERVING)

        unreached: ServiceError | None = None
        for slot, error in await self.each(ready, open_gateway):
            if isinstance(error, (EngineRefused, EngineSilent)):
                await self.fence_off(slot, str(error))
            else:
                unreached = error
        if unreached is not None:
            raise unreached  # the engines are well; without the gateway nobody reaches them
        self.require(EngineState.SERVING, "opening the gateway")

    async def require_same(self, slot: Slot) -> None:
        """Whoever restarted at this URL holds other weights: it must not get the traffic of the one that confirmed."""
        info = await slot.client.server_info(self.probe_deadline_s)
        if incarnation_of(info) != slot.identity.incarnation:
            raise EngineRefused(f"engine {slot.url}: restarted during the push")

    async def fence_off(self, slot: Slot, reason: str) -> None:
        """-> suspect -> fenced -> gone: out of the gateway, processes ended, end proven."""
        await self.require_mine()
        slot.reason = reason
        slot.move(EngineState.SUSPECT)
        await self.finish_fence(slot)

    async def finish_fence(self, slot: Slot) -> None:
        """suspect or fenced -> gone; `CleanupUnconfirmed` without proof."""
        gateway_error = ""
        try:
            await self.gateway.remove(slot.url, GATEWAY_DEADLINE_S)
        except ServiceError as error:
            gateway_error = str(error)  # a gateway that is down sends no traffic; the end of the process decides
        if slot.state is EngineState.SUSPECT:
            slot.move(EngineState.FENCED)
        proof = await self.ends.end(slot.identity)
        if not proof.gone:
            seen = "; ".join(part for part in (slot.reason, proof.evidence, gateway_error) if part)
            note = await asyncio.to_thread(
                fence.note_unconfirmed, self.store, self.intent, slot.identity, seen, slot.answered_at
            )
            raise CleanupUnconfirmed(unconfirmed_text([note]))
        slot.move(EngineState.GONE)
        slot.reason = f"{slot.reason}; ended: {proof.evidence}" + (f"; {gateway_error}" if gateway_error else "")

    async def fence_silent(self, suspects: list[Slot], in_order: bool) -> None:
        """Fence those that don't answer, all asked at once. `in_order`: they share a group, where a receiver that only
        waited for a dead neighbour answers as soon as the neighbour's connections close. So the first that is silent is
        fenced, and the others are asked again."""
        while suspects:
            # a whole probe's time although it missed a deadline: a busy machine is slow, and a fence is for good
            probes = await asyncio.gather(*(probe_engine(slot.client, self.probe_deadline_s) for slot in suspects))
            silent = [
                (slot, probe.reason or "restarted during the push")
                for slot, probe in zip(suspects, probes, strict=True)
                if probe.identity is None or probe.identity.incarnation != slot.identity.incarnation
            ]
            for slot, reason in silent[:1] if in_order else silent:
                await self.fence_off(slot, reason)
            suspects = [slot for slot, _ in silent[1:]] if in_order else []

    async def release(self) -> bool:
        """After a failed push: no engine stays paused, half written and serving, or in a group. True: all are clean.

        Engines that were confirmed and resumed are left alone. The others go out of the gateway, drop their requests
        and run again under the loading mark's name; one that doesn't answer is fenced. Failures here are noted, not
        raised: the push already fails for a reason of its own.
        """

        async def one(slot: Slot) -> None:
            client, deadline_s = slot.client, with_slack_s(self.call_deadline_s)
            barred = await slot.ask(client.bar("a push failed and left it half written", deadline_s))
            try:
                await self.gateway.remove(slot.url, GATEWAY_DEADLINE_S)
            except ServiceError as error:
                if not barred:
                    raise
                self.notes.append(str(error))  # whatever the gateway sends, the door refuses it
            await slot.ask(client.abort_all(deadline_s))
            for name in sorted({self.intent.group_name, *slot.groups}):
                await slot.ask(client.destroy_group(name, deadline_s))
            try:
                await slot.ask(client.end_weight_update(deadline_s))
            except EngineRefused as error:
                if "no weight-update session" not in str(error):
                    raise
            await slot.ask(client.resume(deadline_s))
            slot.resumed_at = time.monotonic()

        left_alone = (EngineState.SUSPECT, EngineState.FENCED, EngineState.GONE)
        held = [s for s in self.slots if s.paused_at and not s.resumed_at and s.state not in left_alone]
        failed = {slot.url: error for slot, error in await self.each(held, one)}
        for slot in held:
            if slot.url not in failed:
                slot.move(EngineState.DRAINING)
        clean = True
        for slot in self.slots:
            try:
                if slot.state in left_alone[:2]:
                    await self.finish_fence(slot)  # what was cancelled in the middle, and once more what had no proof
                elif slot.url in failed:
                    await self.fence_off(slot, str(failed[slot.url]))
            except Rl360Error as error:  # one that could not be accounted for keeps none of the others waiting
                clean = False
                self.notes.append(str(error))
        return clean


def unconfirmed_text(notes: list[fence.Unconfirmed]) -> str:
    """One line: who, what was seen, how to go on."""
    parts = [f"engine {note.identity.url} (incarnation {note.identity.incarnation}): {note.evidence}" for note in notes]
    commands = " && ".join(note.command for note in notes)
    return (
        f"push epoch {notes[0].epoch}: not proven gone: {'; '.join(parts)}. "
        f"When you know that it is gone: {commands}; then resume the step"
    )
