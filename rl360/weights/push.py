"""Bring one weight version to every engine, or say exactly why not. The only writer of engines' weights and versions.

`push` is safe to run again at any point: a confirmed version that every engine still holds is returned as recorded; an
earlier push that left no end is settled first (docs/weights.md: no retry over the living). Afterwards every engine that
serves holds the version, read back by name and by checksum; an engine that could not follow is proven gone; a failed
push leaves no engine paused, none half written in the gateway, and no version name ahead of the weights.
`ensure_weights` is the first act of a step: it pushes unless every engine holds the version and gets traffic.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
from safetensors import safe_open

from rl360.config.run import PushConfig
from rl360.config.services import Services
from rl360.engines import members as fleet_members
from rl360.engines.client import EngineClient, deployment_token, open_http
from rl360.engines.fleet import EngineIdentity, EngineState, Probe, probe_fleet, require_access
from rl360.engines.fleet_log import FleetLog, push_owner
from rl360.engines.fleet_log import Slot as FleetSlot
from rl360.engines.gateway import GatewayClient
from rl360.engines.processes import end_tree, tree_of_url
from rl360.errors import BadInput, CleanupUnconfirmed, CorruptObject, EngineChurn, ServiceError
from rl360.store.data import read
from rl360.store.layout import step_key
from rl360.weights import fence
from rl360.weights.ends import END_DEADLINE_S, Ends
from rl360.weights.messages import (
    ChecksumReply,
    EngineSet,
    PushPlan,
    PushRecord,
    PushStatus,
    TransferReport,
    Transport,
    loading_mark,
    parse_version,
)
from rl360.weights.plan import engine_name, group_name, plan_push
from rl360.weights.receivers import GATEWAY_DEADLINE_S, Receivers, Slot, unconfirmed_text, with_slack_s

_STRIKES = 2  # transfers an engine may refuse before it is fenced


class WeightSource(Protocol):
    """Who holds the new weights and sends them: the trainer's client."""

    async def checksums(self, run: str, version: str, deadline_s: float | None = None) -> ChecksumReply: ...
    async def prepare(self, plan: PushPlan, deadline_s: float | None = None) -> None: ...
    async def transfer(self, plan: PushPlan, deadline_s: float | None = None) -> TransferReport: ...


async def push(
    store: fence.Store,
    services: Services,
    run: str,
    step: int,
    version: str,
    trainer: WeightSource,
    config: PushConfig,
) -> PushRecord:
    """Push `version`, the result of `step`, and record it in the step's `push.json`."""
    async with open_http() as http:
        return await _Push(store, services, run, step, version, trainer, config, http).run_once()


async def ensure_weights(
    store: fence.Store, services: Services, run: str, version: str, trainer: WeightSource, config: PushConfig
) -> PushRecord | None:
    """Push `version` unless every engine already holds it and gets traffic; None when there was nothing to do."""
    async with open_http() as http:
        job = _Push(store, services, run, None, version, trainer, config, http)
        record = await job.io(fence.last_record)
        # engines of an unfinished push may be paused under the old name: whatever they say, it is settled first
        settled = record is not None and record.version == version and not await job.io(fence.open_intents)
        if record is not None and settled and await job.still_holds(record):
            return None
        return await job.run_once()


def model_shapes(model_dir: str | Path) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape of the model the engines were started with, from its safetensors headers."""
    files = sorted(Path(model_dir).glob("*.safetensors"))
    if not files:
        raise BadInput(f"model {model_dir}: no safetensors file there")
    shapes = {}
    for path in files:
        with safe_open(path, framework="numpy") as tensors:
            shapes.update({name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()})  # noqa: SIM118
    return shapes


def check_against_model(held: ChecksumReply, shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse a trainer whose tensors are not the engines' model: extra names vanish silently, wrong shapes kill."""
    offered = {tensor.name: tensor.shape for tensor in held.tensors}
    for name in sorted(offered.keys() | shapes.keys()):
        if offered.get(name) != shapes.get(name):
            raise BadInput(
                f"tensor {name}: the trainer has shape {offered.get(name)}, the engines' model {shapes.get(name)}; "
                "trainer and engines must be started with the same model"
            )
    missing = {engine_name(name) for name in offered} ^ held.checksums.keys()
    if missing:
        raise BadInput(f"the trainer's checksums and tensors disagree about {sorted(missing)[0]}")


def checksum_digest(checksums: dict[str, str]) -> str:
    """One digest for all parameters of an engine."""
    text = "\n".join(f"{name} {checksums[name]}" for name in sorted(checksums))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class _Push:
    """One call of `push`."""

    store: fence.Store
    services: Services
    run: str
    step: int | None
    version: str
    trainer: WeightSource
    config: PushConfig
    http: httpx.AsyncClient
    phases_s: dict[str, float] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gateway = GatewayClient(self.services.gateway_url, self.http, min(self.config.call_deadline_s, 10.0))
        self.probe_deadline_s = min(self.config.call_deadline_s, 30.0)
        self.log = FleetLog(self.store)
        self.ends = Ends(self.log, self.services)
        self.members: dict[str, str] = {}
        self.unfinished: set[str] = set()  # as the log calls the pushes that left no end
        self.now = ""
        self.external: set[str] = set()  # URLs of engines that somebody else started
        self.token = deployment_token()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.now, began = name, time.monotonic()
        try:
            yield
        finally:
            self.phases_s[name] = round(self.phases_s.get(name, 0.0) + time.monotonic() - began, 6)

    def client(self, url: str, epoch: int | None = None) -> EngineClient:
        return EngineClient(url, self.http, self.config.call_deadline_s, epoch, self.token, url in self.external)

    async def probe_members(self, deadline_s: float) -> list[Probe]:
        """Ask every engine that is the fleet's now: the configured and the added ones, without the removed."""
        state = await asyncio.to_thread(self.log.refresh)
        self.members = self.ends.names = fleet_members.members(state, self.services.engine_urls)
        configured = self.services.engine_urls
        self.external = {s.url for s in state.slots.values() if fleet_members.is_external(s, configured)}
        probes = await probe_fleet([self.client(url) for url in dict.fromkeys(self.members.values())], deadline_s)
        # an engine that is named twice, or by two URLs, is one engine: the first name's
        one = {probe.identity.incarnation if probe.identity else probe.url: probe for probe in reversed(probes)}
        return list(reversed(one.values()))

    async def io(self, call: Callable[..., Any], *args: Any) -> Any:
        """The store blocks; keep it off the event loop."""
        return await asyncio.to_thread(call, self.store, *args)

    async def run_once(self) -> PushRecord:
        await self.io(fence.check_version_advances, self.run, self.version)
        epoch, intents = await self.io(fence.look)
        for intent in intents:
            if fence.owner_runs(intent.owner):
                pid = intent.owner.process.pid
                raise ServiceError(
                    f"push epoch {intent.epoch} of {intent.version} still runs in pid {pid}; retry later"
                )
        recorded = await self.recorded()
        if not intents:
            if recorded is not None and await self.still_holds(recorded):
                return recorded
            last = await self.io(fence.last_record) if recorded is None and self.step is not None else None
            if last is not None and last.version == self.version and await self.still_holds(last):
                await self.io(fence.note_version, self.run, self.version)
                # a step that trained nothing makes no new version: what engines hold already is its result. So is a
                # push of this step that was killed after its epoch had ended, as it is
                return await self.keep(last if last.step == self.step else self.already_held(last))
        with self.phase("probe"):
            # a receiver may sit in a broadcast of the unfinished push until that one's deadline
            patience_s = max([self.probe_deadline_s, *(with_slack_s(i.call_deadline_s) for i in intents)])
            probes = await self.probe_members(patience_s)
        with self.phase("freeze"):
            frozen = await self.freeze(epoch, intents, probes)
            await require_access([self.client(engine.url) for engine in frozen.members])
        with self.phase("expect"):
            held = await self.trainer.checksums(self.run, self.version, self.config.call_deadline_s)
            check_against_model(held, await asyncio.to_thread(model_shapes, self.services.model_dir))
        return await self.carry(frozen, held)

    async def recorded(self) -> PushRecord | None:
        """What this step's push left, when it finished before."""
        if self.step is None:
            return None
        key = step_key(self.run, self.step, "push.json")
        record = await self.io(read, key, PushRecord, "is no record of a push")
        if record is not None and record.version != self.version:
            raise CorruptObject(key, f"records version {record.version}, this step makes {self.version}")
        return record

    async def still_holds(self, record: PushRecord) -> bool:
        """Whether every reachable engine is one the record confirmed, holds it now, and gets traffic."""
        confirmed = {engine.identity.url: engine.identity for engine in record.serving}
        found: list[tuple[EngineIdentity, EngineClient]] = []
        for probe in await self.probe_members(self.probe_deadline_s):
            if probe.identity is None and not probe.silent:
                continue  # down, or still starting: it joins at a later push
            known = confirmed.get(probe.url)
            if probe.identity is None or known is None or known.incarnation != probe.identity.incarnation:
                return False
            if probe.weight_version != record.version:
                return False
            try:
                client = self.client(probe.url, record.epoch)
                held, door = await client.checksums(), await client.door()
            except ServiceError:
                return False
            barred = door is not None and door.get("admitted_version") != record.version
            if barred or checksum_digest(held) != record.checksum:
                return False
            found.append((probe.identity, client))
        if await self.io(fence.open_intents):
            return False  # a push has begun meanwhile: who gets traffic is its business
        serving, theirs = set[str](), set[str]()
        for engine, client in found:
            if await asyncio.to_thread(fleet_members.serves_again, self.log, self.members, engine, record):
                await self.gateway.add(engine.url, GATEWAY_DEADLINE_S, client.token)
                serving.add(engine.url)
            elif await asyncio.to_thread(self.ends.held, self.ends.slot(engine.url)):
                theirs.add(engine.url)  # another owner is at it, and sees to its traffic
        if await self.io(fence.open_intents):
            return False  # again: adding takes time, and a push that began meanwhile was not met
        await self.gateway.keep_only(serving | theirs, GATEWAY_DEADLINE_S)
        return len(serving) >= self.config.min_engines

    async def freeze(self, epoch: int, intents: list[fence.Intent], probes: list[Probe]) -> _Frozen:
        """The receivers: every engine that answers and that this push may take. Touches nothing. Too few are waited
        for, unless a receiver of an unfinished push has to be ended first."""
        until = time.monotonic() + self.config.call_deadline_s
        self.unfinished = {push_owner(intent.epoch) for intent in intents}
        first = True
        while True:
            await asyncio.to_thread(self.log.refresh)
            answering = [probe.identity for probe in probes if probe.identity is not None]
            members = [e for e in answering if not await self.hands_off(e, self.ends.slot(e.url))]
            inside = {(member.url, member.incarnation) for member in members}
            left = [(intent, e) for intent in intents for e in intent.engines if (e.url, e.incarnation) not in inside]
            dark = [(i, e) for i, e in left if not await self.hands_off(e, self.ends.slot(e.url, e.incarnation))]
            if dark and not first:
                raise EngineChurn(f"engine {dark[0][1].url} of an unfinished push stopped answering just now; retry")
            if dark or len(members) >= self.config.min_engines:
                return _Frozen(epoch, intents, members, probes, dark)
            if time.monotonic() > until:
                raise self.too_few(members, probes)
            await asyncio.sleep(1.0)
            first, probes = False, await self.probe_members(self.probe_deadline_s)

    def too_few(self, members: Sequence[object], probes: list[Probe]) -> ServiceError:
        reasons = "; ".join(probe.reason for probe in probes if probe.reason)
        need = self.config.min_engines
        return ServiceError(f"push of {self.version}: {len(members)} engines answer, min_engines is {need} ({reasons})")

    async def hands_off(self, engine: EngineIdentity, slot: FleetSlot | None) -> bool:
        """Whether this incarnation is nobody's to push to: a person declared it gone, somebody else has its slot, or
        it is fenced."""
        if await self.io(fence.is_gone_confirmed, engine):
            return True
        if slot is None or slot.owner in self.unfinished:
            return False
        out = slot.state in (EngineState.FENCED, EngineState.GONE) and slot.incarnation == engine.incarnation
        return out or await asyncio.to_thread(self.ends.held, slot)

    async def settle(self, frozen: _Frozen, receivers: Receivers) -> None:
        """Every receiver of every unfinished push is ours now, or its end is proven; those pushes are over."""
        notes: list[fence.Unconfirmed] = []
        for old in frozen.intents:  # first: whatever ends this, those that answer are let go and stay out of traffic
            for slot in receivers.slots:
                if any((e.url, e.incarnation) == (slot.url, slot.identity.incarnation) for e in old.engines):
                    slot.taken_over(old.group_name)
        for intent, engine in frozen.dark:
            proof = await self.ends.end(engine)
            if not proof.gone:
                seen = f"does not answer as that incarnation; {proof.evidence}"
                notes.append(await self.io(fence.note_unconfirmed, intent, engine, seen))
        if notes:
            text = unconfirmed_text(notes)
            for note in notes:
                try:
                    await self.gateway.remove(note.identity.url, GATEWAY_DEADLINE_S)
                except ServiceError as error:
                    text += f" ({error})"
            raise CleanupUnconfirmed(text)
        for old in frozen.intents:
            await self.io(fence.write_end, self.superseded(old, frozen.epoch))

    async def clear_out(self, receivers: Receivers, probes: list[Probe]) -> None:
        """Whoever is no receiver loses its traffic; a stuck one is ended, and one that was declared gone and answers.
        Neither is a receiver of an open push, so its end needs no proof."""
        inside = {slot.url for slot in receivers.slots}
        await self.gateway.keep_only(inside, GATEWAY_DEADLINE_S)
        for probe in probes:
            if probe.url in inside:
                continue
            self.absent.append(probe.url)
            known, slot = probe.identity, self.ends.slot(probe.url)
            stuck = probe.silent or (known is not None and await self.io(fence.is_gone_confirmed, known))
            theirs = probe.url in self.external or await asyncio.to_thread(self.ends.held, slot)
            if stuck and not theirs:
                await end_tree(await asyncio.to_thread(tree_of_url, probe.url), END_DEADLINE_S)

    async def carry(self, frozen: _Frozen, held: ChecksumReply) -> PushRecord:
        """From the intent to the record. Whatever ends it, engines are left running and accounted for. Nothing is ended
        or loses its traffic before the intent: of two pushes at once, the later one has met the earlier one's."""
        owner, members = fence.new_owner(), tuple(frozen.members)
        intent = fence.Intent(
            epoch=frozen.epoch,
            run=self.run,
            step=self.step,
            version=self.version,
            engines=members,
            group_name=group_name(EngineSet(epoch=frozen.epoch, engines=members)) if members else "none",
            call_deadline_s=self.config.call_deadline_s,
            owner=owner,
            written_at=time.time(),
        )
        receivers = await self.receivers(intent)
        last = await self.io(fence.last_confirmed, self.run)
        self.choose_transport(last)
        stale, newest = [old.group_name for old in frozen.intents], await self.io(fence.last_record)
        if newest is not None and newest.status is PushStatus.FAILED and newest.engines:
            # its engines have left the group, which the trainer may still think that they are in
            was = EngineSet(epoch=newest.epoch, engines=tuple(engine.identity for engine in newest.engines))
            stale.append(group_name(was))
        fence.mark_running(owner, True)
        try:
            return await self.pushed(receivers, frozen, held, last, stale)
        finally:
            fence.mark_running(owner, False)

    async def pushed(
        self, receivers: Receivers, frozen: _Frozen, held: ChecksumReply, last: PushRecord | None, stale: list[str]
    ) -> PushRecord:
        """`carry`, from the writing of its intent on: one that may be written is closed, however this ends."""
        record = None
        try:
            if (refusal := await _to_its_end(self.io(fence.write_intent, receivers.intent))) is not None:
                raise refusal
            with self.phase("settle"):
                await self.settle(frozen, receivers)
                refused = await asyncio.to_thread(fleet_members.claim, self.log, self.members, receivers.intent)
                receivers.slots = [slot for slot in receivers.slots if slot.url not in refused]
                await self.clear_out(receivers, frozen.probes)
                if len(receivers.slots) < self.config.min_engines:
                    raise self.too_few(receivers.slots, frozen.probes)
            report, rounds = await self.deliver(receivers, held, stale)
            record = self.record(receivers, held, report, rounds).compared(last)
            return await self.publish(record)
        finally:
            if record is None:
                failed, ended_by = await _to_its_end(self.give_up(receivers)), sys.exc_info()[1]
                if failed is not None and ended_by is not None:
                    ended_by.add_note(f"and while its engines were let go: {failed!r}")

    async def receivers(self, intent: fence.Intent) -> Receivers:
        serving = {worker.url for worker in await self.gateway.workers() if worker.usable}
        least, call_s = self.config.min_engines, self.config.call_deadline_s

        def slot(engine: EngineIdentity) -> Slot:
            state = EngineState.SERVING if engine.url in serving else EngineState.JOINING
            return Slot(engine, self.client(engine.url, intent.epoch), state, was_serving=engine.url in serving)

        slots = [slot(engine) for engine in intent.engines]
        return Receivers(self.store, self.gateway, self.ends, intent, slots, least, call_s, self.probe_deadline_s)

    async def deliver(self, receivers: Receivers, held: ChecksumReply, stale: list[str]) -> tuple[TransferReport, int]:
        """prepare -> pause -> transfer -> confirm -> serve: the last report, and the transfers it took. From the pause
        on all of it has one deadline."""
        epoch = receivers.intent.epoch
        if self.transport.on_disk:
            with self.phase("prepare"):
                await self.trainer.prepare(self.plan(receivers.slots, epoch, held, stale))
        limit_s = self.config.paused_at_most_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                with self.phase("pause"):
                    await receivers.pause(self.config.pause_mode)
                    await receivers.rename(loading_mark(self.version, epoch))
                with self.phase("transfer"):
                    report, rounds = await self.transfer(receivers, held, stale)
                with self.phase("confirm"):
                    await receivers.confirm(held.checksums)
                with self.phase("resume"):
                    if await asyncio.to_thread(self.store.exists, fence.end_key(epoch)):
                        raise EngineChurn(f"push epoch {epoch} was taken over by a later push")
                    await receivers.serve(self.version, flush=self.config.pause_mode != "in_place")
        except TimeoutError:
            if not limit.expired():
                raise
            raise ServiceError(
                f"push of {self.version}: in its phase {self.now} engines had been paused for {limit_s:g} s, which is "
                "push.deadline_s; raise it if a push may take longer"
            ) from None
        return report, rounds

    def choose_transport(self, last: PushRecord | None) -> None:
        self.transport, self.base_version = Transport(self.config.transport), None
        if self.transport is Transport.DISK_DELTA:
            if last is None or last.version == self.version:
                self.transport = Transport.DISK_FULL
            else:
                self.base_version = last.version

    def plan(self, slots: list[Slot], epoch: int, held: ChecksumReply, stale: list[str]) -> PushPlan:
        """By the run's transport, but that a delta needs a version to differ from: without one all tensors travel."""
        run, number = parse_version(self.version)
        root = self.config.folder or f"s3://{self.services.s3_bucket}/_fleet/weights"
        return plan_push(
            held.tensors,
            EngineSet(epoch=epoch, engines=tuple(slot.identity for slot in slots)),
            run=self.run,
            version=self.version,
            bucket_bytes=self.config.bucket_bytes,
            call_deadline_s=self.config.call_deadline_s,
            transport=self.transport,
            stale_groups=stale,
            sources=held.sources if self.transport in (Transport.DIRECT_EXPERTS, Transport.P2P) else 1,
            folder=f"{root.rstrip('/')}/{run}/{number:08}" if self.transport.on_disk else None,
            base_version=self.base_version,
        )

    async def transfer(self, receivers: Receivers, held: ChecksumReply, stale: list[str]) -> tuple[TransferReport, int]:
        """Send to the loading engines; whoever fails is fenced and the plan is made again for the rest."""
        for attempt in range(1, len(receivers.slots) + _STRIKES + 1):
            loading = receivers.require(EngineState.LOADING, "transferring")
            plan = self.plan(loading, receivers.intent.epoch, held, stale)
            for number, slot in enumerate(loading):
                slot.groups |= plan.groups_of(number)
            report = await self.trainer.transfer(plan)
            for slot, result in zip(loading, report.engines, strict=True):
                slot.calls += result.calls
                slot.control_calls += result.control_calls
                slot.note = result.note
            if report.ok:
                return report, attempt
            await self.judge(receivers, loading, report, in_order=plan.group_name in plan.groups)
        raise ServiceError(f"push of {self.version}: still failing after {attempt} transfers: {report.error}")

    async def judge(self, receivers: Receivers, loading: list[Slot], report: TransferReport, in_order: bool) -> None:
        """After a failed transfer: fence the engines that don't answer, and those that refused again and again."""
        results = dict(zip((slot.url for slot in loading), report.engines, strict=True))
        suspects = [slot for slot in loading if results[slot.url].error]
        await receivers.fence_silent(suspects or loading, in_order)
        left = [slot for slot in loading if slot.state is EngineState.LOADING]
        for slot in left:
            if results[slot.url].error and not results[slot.url].after_stop:
                slot.strikes += 1
                slot.reason = results[slot.url].error
        out = [slot for slot in left if slot.strikes >= _STRIKES]
        if out and len(out) == len(loading):
            # all alike and nobody else to blame: not the engines' fault, ending them all would mend nothing
            raise ServiceError(f"push of {self.version}: every engine refuses: {out[0].reason}")
        for slot in out:
            await receivers.fence_off(slot, slot.reason)

    async def give_up(self, receivers: Receivers) -> None:
        """Release what the failed push holds, and close its intent when every receiver is accounted for."""
        if await receivers.is_over():
            return  # another push has the epoch, or took the receivers over: they are its business
        if await receivers.release():
            record = self.failed(receivers)
            await self.io(fence.write_end, record)
            await asyncio.to_thread(fleet_members.settle, self.log, record)

    async def keep(self, record: PushRecord) -> PushRecord:
        """The step's `push.json`: written once. A later push of the same step is in its own `end.json` only."""
        if self.step is None:
            return record
        key = step_key(self.run, self.step, "push.json")
        await asyncio.to_thread(self.store.put_once, key, record.model_dump_json().encode())
        return await self.recorded() or record

    async def publish(self, record: PushRecord) -> PushRecord:
        """Write the confirmation, the end first: who was taken over writes nothing. Returns the step's record."""
        if not await self.io(fence.write_end, record):
            raise EngineChurn(f"push epoch {record.epoch} was taken over by a later push")
        await self.io(fence.note_version, self.run, self.version)
        await asyncio.to_thread(fleet_members.settle, self.log, record)
        return await self.keep(record)

    def already_held(self, last: PushRecord) -> PushRecord:
        """The record of a push that had nothing to send."""
        idle = {"calls_per_engine": 0, "bytes": 0, "paused_s": 0.0, "rounds": 0, "phases_s": {}}
        reason = f"held since epoch {last.epoch}"
        return last.model_copy(update={**idle, "run": self.run, "step": self.step, "reason": reason})

    def record(self, receivers: Receivers, held: ChecksumReply, report: TransferReport, rounds: int) -> PushRecord:
        serving, taken = receivers.in_state(EngineState.SERVING), report.engines
        full = self.transport is Transport.DISK_DELTA and all(engine.whole for engine in taken)
        return self._record(
            receivers,
            PushStatus.CONFIRMED,
            path=Transport.DISK_FULL if full else self.transport,
            calls_per_engine=max(engine.calls for engine in taken),
            control_calls=max(slot.control_calls for slot in serving),
            bytes=report.sent_bytes,
            paused_s=max(slot.outcome().paused_s for slot in serving),
            rounds=rounds,
            flushed=self.config.pause_mode != "in_place",
            group_reused=report.group_reused,
            checksum=checksum_digest(held.checksums),
        )

    def failed(self, receivers: Receivers) -> PushRecord:
        reason = "; ".join(receivers.notes) or "failed; its receivers were released or are proven gone"
        return self._record(receivers, PushStatus.FAILED, path=self.transport, reason=reason)

    def _record(self, receivers: Receivers, status: PushStatus, **more: Any) -> PushRecord:
        return PushRecord(
            **_named(receivers.intent),
            status=status,
            engines=tuple(slot.outcome() for slot in receivers.slots),
            absent=tuple(self.absent),
            phases_s=dict(self.phases_s),
            **more,
        )

    def superseded(self, old: fence.Intent, epoch: int) -> PushRecord:
        reason = f"unfinished; its receivers are gone or were taken over by epoch {epoch}"
        told = {**_named(old), "status": PushStatus.SUPERSEDED, "path": self.config.transport, "reason": reason}
        return PushRecord(engines=(), **told)


def _named(intent: fence.Intent) -> dict[str, Any]:
    return intent.model_dump(include={"run", "step", "version", "epoch"})


async def _to_its_end(work: Coroutine[Any, Any, Any]) -> BaseException | None:
    """What `work` failed by. A cancellation meanwhile counts once it is done: half let go, engines would stay paused.
    Each of its calls has a deadline."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    failed = task.exception()
    if cancelled is not None:
        raise cancelled
    return failed


@dataclass(frozen=True)
class _Frozen:
    """What a push is about to do, before it has touched anything. `dark`: receivers of unfinished pushes that are to be
    proven gone first."""

    epoch: int
    intents: list[fence.Intent]
    members: list[EngineIdentity]
    probes: list[Probe]
    dark: list[tuple[fence.Intent, EngineIdentity]]
