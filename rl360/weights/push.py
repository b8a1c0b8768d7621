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
import time
from collections.abc import Callable, Coroutine, Iterator
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
from rl360.engines.fleet_log import FleetLog
from rl360.engines.gateway import GatewayClient
from rl360.engines.processes import end_tree, tree_of_url
from rl360.errors import BadInput, CleanupUnconfirmed, CorruptObject, EngineChurn, ServiceError
from rl360.store.layout import step_key
from rl360.weights import fence
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
from rl360.weights.receivers import END_DEADLINE_S, GATEWAY_DEADLINE_S, Receivers, Slot, unconfirmed_text, with_slack_s

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
        self.members: dict[str, str] = {}
        self.external: set[str] = set()  # URLs of engines that somebody else started
        self.token = deployment_token()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.phases_s[name] = round(self.phases_s.get(name, 0.0) + time.monotonic() - began, 6)

    def client(self, url: str, epoch: int | None = None) -> EngineClient:
        return EngineClient(url, self.http, self.config.call_deadline_s, epoch, self.token, url in self.external)

    async def probe_members(self, deadline_s: float) -> list[Probe]:
        """Ask every engine that is the fleet's now: the configured and the added ones, without the removed."""
        state = await asyncio.to_thread(self.log.refresh)
        self.members = fleet_members.members(state, self.services.engine_urls)
        others = {slot.url for slot in state.slots.values() if slot.launcher == "external"}
        self.external = others - {url.rstrip("/") for url in self.services.engine_urls}
        # an engine that is named twice is one engine
        return await probe_fleet([self.client(url) for url in dict.fromkeys(self.members.values())], deadline_s)

    async def io(self, call: Callable[..., Any], *args: Any) -> Any:
        """The store blocks; keep it off the event loop."""
        return await asyncio.to_thread(call, self.store, *args)

    async def run_once(self) -> PushRecord:
        await self.io(fence.check_version_advances, self.run, self.version)
        intents: list[fence.Intent] = await self.io(fence.open_intents)
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
                # a step that trained nothing makes no new version: what engines hold already is its result
                return await self.keep(self.already_held(last))
        with self.phase("settle"):
            # a receiver may sit in a broadcast of the unfinished push until that one's deadline
            patience_s = max([self.probe_deadline_s, *(with_slack_s(i.call_deadline_s) for i in intents)])
            probes = await self.probe_members(patience_s)
            await require_access([self.client(probe.url) for probe in probes if probe.identity is not None])
            reclaimed = await self.settle(intents, probes)
        with self.phase("freeze"):
            members = await self.freeze(probes)
            lost = reclaimed - {(member.url, member.incarnation) for member in members}
            if lost:
                raise EngineChurn(f"engine {min(lost)[0]} of an unfinished push stopped answering just now; retry")
        with self.phase("expect"):
            held = await self.trainer.checksums(self.run, self.version, self.config.call_deadline_s)
            check_against_model(held, await asyncio.to_thread(model_shapes, self.services.model_dir))
        return await self.carry(members, held, intents)

    async def recorded(self) -> PushRecord | None:
        """What this step's push left, when it finished before."""
        if self.step is None:
            return None
        key = step_key(self.run, self.step, "push.json")
        try:
            record = PushRecord.model_validate_json(await asyncio.to_thread(self.store.get, key))
        except KeyError:
            return None
        if record.version != self.version:
            raise CorruptObject(key, f"records version {record.version}, this step makes {self.version}")
        return record

    async def still_holds(self, record: PushRecord) -> bool:
        """Whether every reachable engine is one the record confirmed, holds it now, and gets traffic."""
        confirmed = {engine.identity.url: engine.identity for engine in record.serving}
        probes = await self.probe_members(self.probe_deadline_s)
        holding: set[str] = set()
        for probe in probes:
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
            if not await asyncio.to_thread(fleet_members.serves_again, self.log, self.members, probe.identity, record):
                continue  # another owner is at it
            await self.gateway.add(probe.url, GATEWAY_DEADLINE_S, client.token)
            holding.add(probe.url)
        await self.gateway.keep_only(holding, GATEWAY_DEADLINE_S)
        return len(holding) >= self.config.min_engines

    async def settle(self, intents: list[fence.Intent], probes: list[Probe]) -> set[tuple[str, str]]:
        """Account for every receiver of every unfinished push: gone, or answering as the same incarnation: those."""
        answering = {(p.identity.url, p.identity.incarnation) for p in probes if p.identity is not None}
        notes: list[fence.Unconfirmed] = []
        reclaimed: set[tuple[str, str]] = set()
        for intent in intents:
            for engine in intent.engines:
                if await self.io(fence.is_gone_confirmed, engine):
                    continue
                if (engine.url, engine.incarnation) in answering:
                    reclaimed.add((engine.url, engine.incarnation))
                    continue
                proof = await end_tree(engine.process, END_DEADLINE_S)
                if not proof.gone:
                    seen = f"does not answer as that incarnation; {proof.evidence}"
                    notes.append(await self.io(fence.note_unconfirmed, intent, engine, seen))
        for note in notes:
            await self.gateway.remove(note.identity.url, GATEWAY_DEADLINE_S)
        if notes:
            raise CleanupUnconfirmed(unconfirmed_text(notes))
        return reclaimed

    async def freeze(self, probes: list[Probe]) -> list[EngineIdentity]:
        """The receivers: every engine that answers. The others lose their traffic now; a stuck one is ended."""
        until = time.monotonic() + self.config.call_deadline_s
        while True:
            members = [p.identity for p in probes if p.identity is not None and not await self.barred(p.identity)]
            if len(members) >= self.config.min_engines:
                break
            if time.monotonic() > until:
                reasons = "; ".join(p.reason for p in probes if p.reason)
                need = self.config.min_engines
                raise ServiceError(
                    f"push of {self.version}: {len(members)} engines answer, min_engines is {need} ({reasons})"
                )
            await asyncio.sleep(1.0)
            probes = await self.probe_members(self.probe_deadline_s)
        inside = {member.url for member in members}
        await self.gateway.keep_only(inside, GATEWAY_DEADLINE_S)
        for probe in probes:
            if probe.url in inside:
                continue
            self.absent.append(probe.url)
            if probe.silent or probe.identity is not None:
                # stuck, or declared gone by a person; no receiver of an open push, so its end needs no proof
                await end_tree(await asyncio.to_thread(tree_of_url, probe.url), END_DEADLINE_S)
        return members

    async def barred(self, engine: EngineIdentity) -> bool:
        """An incarnation that a person declared gone and that answers all the same never gets weights again."""
        return bool(await self.io(fence.is_gone_confirmed, engine))

    async def carry(
        self, members: list[EngineIdentity], held: ChecksumReply, intents: list[fence.Intent]
    ) -> PushRecord:
        """From the intent to the record. Whatever ends it, engines are left running and accounted for."""
        epoch = await self.io(fence.next_epoch)
        owner = fence.new_owner()
        intent = fence.Intent(
            epoch=epoch,
            run=self.run,
            step=self.step,
            version=self.version,
            engines=tuple(members),
            group_name=group_name(EngineSet(epoch=epoch, engines=tuple(members))),
            call_deadline_s=self.config.call_deadline_s,
            owner=owner,
            written_at=time.time(),
        )
        receivers = await self.receivers(intent)
        last = await self.io(fence.last_confirmed, self.run)
        self.choose_transport(last)
        await self.io(fence.write_intent, intent)
        fence.mark_running(owner, True)
        record = None
        try:
            for old in intents:
                await self.io(fence.write_end, self.superseded(old, epoch))
            refused = await asyncio.to_thread(fleet_members.claim, self.log, self.members, intent)
            receivers.slots = [slot for slot in receivers.slots if slot.url not in refused]
            self.absent += refused
            report = await self.deliver(receivers, held, [old.group_name for old in intents])
            record = self.record(receivers, held, report).compared(last)
            kept = await self.publish(record)
        finally:
            try:
                if record is None:
                    await _to_its_end(self.give_up(receivers))
            finally:
                fence.mark_running(owner, False)
        return kept

    async def receivers(self, intent: fence.Intent) -> Receivers:
        serving = {worker.url for worker in await self.gateway.workers() if worker.usable}
        slots = [
            Slot(
                engine,
                self.client(engine.url, intent.epoch),
                EngineState.SERVING if engine.url in serving else EngineState.JOINING,
                was_serving=engine.url in serving,
            )
            for engine in intent.engines
        ]
        return Receivers(
            self.store,
            self.gateway,
            intent,
            slots,
            self.config.min_engines,
            self.config.call_deadline_s,
            self.probe_deadline_s,
        )

    async def deliver(self, receivers: Receivers, held: ChecksumReply, stale: list[str]) -> _Delivery:
        """prepare -> pause -> transfer -> confirm -> serve."""
        epoch = receivers.intent.epoch
        if self.transport.on_disk:
            with self.phase("prepare"):
                await self.trainer.prepare(self.plan(receivers.slots, epoch, held, stale))
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
        return _Delivery(report, rounds)

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
            report = await self.trainer.transfer(plan)
            for slot, result in zip(loading, report.engines, strict=True):
                slot.calls += result.calls
                slot.control_calls += result.control_calls
            if report.ok:
                return report, attempt
            await self.judge(receivers, loading, report)
        raise ServiceError(f"push of {self.version}: still failing after {attempt} transfers: {report.error}")

    async def judge(self, receivers: Receivers, loading: list[Slot], report: TransferReport) -> None:
        """After a failed transfer: fence the engines that don't answer, and those that refused again and again."""
        results = dict(zip((slot.url for slot in loading), report.engines, strict=True))
        suspects = [slot for slot in loading if results[slot.url].error]
        await receivers.fence_silent(suspects or loading)
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
            return  # a later push took the receivers over: they are its business now
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
        """Write the confirmation: the step's record, the version, the end of the epoch. Returns the step's record."""
        kept = await self.keep(record)
        await self.io(fence.note_version, self.run, self.version)
        if not await self.io(fence.write_end, record):
            raise EngineChurn(f"push epoch {record.epoch} was taken over by a later push")
        await asyncio.to_thread(fleet_members.settle, self.log, record)
        return kept

    def already_held(self, last: PushRecord) -> PushRecord:
        """The record of a push that had nothing to send."""
        idle = {"calls_per_engine": 0, "bytes": 0, "paused_s": 0.0, "rounds": 0, "phases_s": {}}
        reason = f"held since epoch {last.epoch}"
        return last.model_copy(update={**idle, "run": self.run, "step": self.step, "reason": reason})

    def record(self, receivers: Receivers, held: ChecksumReply, delivery: _Delivery) -> PushRecord:
        serving = receivers.in_state(EngineState.SERVING)
        return self._record(
            receivers,
            PushStatus.CONFIRMED,
            calls_per_engine=max(engine.calls for engine in delivery.report.engines),
            control_calls=max(slot.control_calls for slot in serving),
            bytes=delivery.report.sent_bytes,
            paused_s=max(slot.outcome().paused_s for slot in serving),
            rounds=delivery.rounds,
            flushed=self.config.pause_mode != "in_place",
            group_reused=delivery.report.group_reused,
            checksum=checksum_digest(held.checksums),
        )

    def failed(self, receivers: Receivers) -> PushRecord:
        reason = "; ".join(receivers.notes) or "failed; its receivers were released or are proven gone"
        return self._record(receivers, PushStatus.FAILED, reason=reason)

    def _record(self, receivers: Receivers, status: PushStatus, **more: Any) -> PushRecord:
        return PushRecord(
            run=self.run,
            step=self.step,
            version=self.version,
            epoch=receivers.intent.epoch,
            status=status,
            path=self.transport,
            engines=tuple(slot.outcome() for slot in receivers.slots),
            absent=tuple(self.absent),
            phases_s=dict(self.phases_s),
            **more,
        )

    def superseded(self, old: fence.Intent, epoch: int) -> PushRecord:
        return PushRecord(
            run=old.run,
            step=old.step,
            version=old.version,
            epoch=old.epoch,
            status=PushStatus.SUPERSEDED,
            path=self.config.transport,
            engines=(),
            reason=f"unfinished; its receivers are gone or were taken over by epoch {epoch}",
        )


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """A cancellation meanwhile counts once the work is done: half let go, engines would stay paused. Each of its calls
    has a deadline."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None and not task.exception():
        raise cancelled
    task.result()


@dataclass(frozen=True)
class _Delivery:
    """How the weights travelled."""

    report: TransferReport
    rounds: int
