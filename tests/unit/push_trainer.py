"""The trainer of the fake fleet: it sends by the HTTP calls of a broadcast, and outlives its pusher as services do."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from rl360.engines.client import EngineClient, EngineRefused, EngineSilent, deployment_token
from rl360.errors import EngineChurn, ServiceError
from rl360.weights.messages import Bucket, ChecksumReply, EngineTransfer, PushPlan, TensorSpec, TransferReport
from tests.unit.push_fakes import RUN, TENSORS, Engine, checksums_of, whole

if TYPE_CHECKING:
    from tests.unit.push_world import World


@dataclass
class _Round:
    """One bucket on its way: it arrives once every receiver waits for it."""

    waiting: set[str]
    content: str
    done: asyncio.Future[str]
    skipped: str = ""  # an engine that is told all is well and gets nothing


class Trainer:
    """Holds the step's weights and sends them. A transfer goes on when its pusher is gone."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.version = f"{RUN}:0"
        self.rounds: dict[str, _Round] = {}
        self.lock = asyncio.Lock()
        self.epoch = 0
        self.group = ""
        self.plans: list[PushPlan] = []
        self.on_transfer: Callable[[], Any] = lambda: None
        self.tasks: set[asyncio.Task[TransferReport]] = set()

    def held(self) -> dict[str, str]:
        return checksums_of(whole(self.version))

    async def checksums(self, run: str, version: str, deadline_s: float | None = None) -> ChecksumReply:
        self.world.event("trainer /push/checksums")
        if self.world.fault("trainer", "/push/checksums"):
            raise ServiceError("trainer: no answer")
        return ChecksumReply(run=run, version=version, tensors=TENSORS, checksums=self.held())

    async def prepare(self, plan: PushPlan, deadline_s: float | None = None) -> None:
        return

    async def transfer(self, plan: PushPlan, deadline_s: float | None = None) -> TransferReport:
        self.world.event("trainer /push/transfer")
        self.plans.append(plan)
        self.on_transfer()
        task = asyncio.get_running_loop().create_task(self.send(plan))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return await asyncio.shield(task)

    async def arrive(self, engine: Engine, group: str) -> str | None:
        """What came for the bucket this engine waits for: content, "" for a broken broadcast, None for nothing."""
        current = self.rounds.get(group)
        if current is None:
            return ""
        current.waiting.discard(engine.url)
        if not current.waiting and not current.done.done():
            current.done.set_result(current.content)
        came = await asyncio.shield(current.done)
        return None if engine.url == current.skipped else came

    def drop(self) -> None:
        """Leave the group: whoever waits in it gets an error."""
        current = self.rounds.pop(self.group, None)
        if current is not None and not current.done.done():
            current.done.set_result("")
        self.group = ""

    async def send(self, plan: PushPlan) -> TransferReport:
        async with self.lock, httpx.AsyncClient(headers={"x-trainer": "1"}, verify=False) as http:
            if plan.engine_set.epoch < self.epoch:
                raise EngineChurn(f"push epoch {plan.engine_set.epoch} is over: epoch {self.epoch} has begun")
            alone = plan.engine_set.epoch <= self.epoch + 1
            self.epoch = plan.engine_set.epoch
            epoch, deadline_s = plan.engine_set.epoch, plan.call_deadline_s
            told = (epoch, deployment_token())
            clients = [EngineClient(e.url, http, deadline_s, *told) for e in plan.engine_set.engines]
            sender = _Sender(self, plan, clients)
            reused = alone and not plan.stale_groups and self.group == plan.group_name
            try:
                await sender.run(reused)
            finally:
                if sender.error:
                    self.drop()
            return sender.report(reused)


class _Sender:
    """One transfer."""

    def __init__(self, trainer: Trainer, plan: PushPlan, clients: list[EngineClient]) -> None:
        self.trainer, self.plan, self.clients = trainer, plan, clients
        self.errors: dict[str, str] = {}
        self.calls: Counter[str] = Counter()
        self.silent: set[str] = set()
        self.late: set[str] = set()
        self.error = ""

    async def everywhere(self, call: Callable[[EngineClient], Any], stopped: bool = False) -> None:
        async def one(client: EngineClient) -> None:
            try:
                await call(client)
            except ServiceError as error:
                self.errors.setdefault(client.url, str(error))
                if isinstance(error, EngineSilent):
                    self.silent.add(client.url)
                if self.error:
                    self.late.add(client.url)
                self.error = self.error or str(error)
                self.trainer.drop()

        await asyncio.gather(*map(one, self.clients))

    async def begin(self, client: EngineClient) -> None:
        try:
            await client.begin_weight_update()
        except EngineRefused as error:
            if "already open" not in str(error):
                raise
            await client.end_weight_update()
            await client.begin_weight_update()

    async def run(self, reused: bool) -> None:
        plan = self.plan
        steps: list[Callable[[EngineClient], Any]] = []
        if not reused:
            self.trainer.drop()
            old = sorted({*plan.stale_groups, plan.group_name})
            steps += [functools.partial(_leave, name=name) for name in old]
            steps.append(functools.partial(_join, plan=plan))
        for step in [*steps, self.begin]:
            await self.everywhere(step)
            if self.error:
                return
        self.trainer.group = plan.group_name
        known = {spec.name: spec for spec in TENSORS}
        for bucket in plan.buckets:
            await self.bucket(bucket, known, self.trainer.world.fault("trainer", "/bucket"))
            if self.error:
                return
        await self.everywhere(lambda client: client.end_weight_update())

    async def bucket(self, bucket: Bucket, known: dict[str, TensorSpec], fault: str) -> None:
        """`die`: the rank dies before it sends; `mid`: while engines wait; `skip`: it sends nothing to one of them."""
        group, waiting = self.plan.group_name, {client.url for client in self.clients}
        if fault == "die":
            self.error = "trainer rank died"
            raise ServiceError("trainer: connection lost")
        loop = asyncio.get_running_loop()
        skipped = self.clients[-1].url if fault == "skip" else ""
        self.trainer.rounds[group] = _Round(waiting, self.plan.version, loop.create_future(), skipped)
        if fault == "mid":
            waiting.add("nobody")
            loop.call_later(0.01, self.trainer.drop)

        async def one(client: EngineClient) -> None:
            self.calls[client.url] += 1
            await client.update_from_distributed(bucket.tensors, known, group, self.plan.call_deadline_s)

        await self.everywhere(one)
        if fault == "mid":
            raise ServiceError("trainer: connection lost")

    def report(self, reused: bool) -> TransferReport:
        return TransferReport(
            ok=not self.error,
            engines=tuple(
                EngineTransfer(
                    url=client.url,
                    calls=self.calls[client.url],
                    error=self.errors.get(client.url, ""),
                    answered=client.url not in self.silent,
                    after_stop=client.url in self.late and client.url not in self.silent,
                )
                for client in self.clients
            ),
            sent_bytes=self.plan.total_bytes if not self.error else 0,
            seconds=0.0,
            group_name=self.plan.group_name,
            group_reused=reused,
            error=self.error,
        )


async def _leave(client: EngineClient, name: str) -> None:
    await client.destroy_group(name)


async def _join(client: EngineClient, plan: PushPlan) -> None:
    await client.init_group(
        plan.group_name,
        address="127.0.0.1",
        port=1,
        rank=1,
        world_size=2,
        backend="gloo",
        deadline_s=plan.call_deadline_s,
    )
