"""Pushes to real SGLang engines behind a real gateway: both confirmed, really other weights, a killed engine fenced.

The weights come from this process over the real transport, so that a push can carry weights that differ from the
engines' without training; the last contract test pushes from the real trainer.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import torch
from safetensors.torch import load_file

from rl360.config.run import PushConfig, RunConfig
from rl360.config.services import Services
from rl360.engines.client import EngineClient, deployment_token, open_http
from rl360.engines.fleet import EngineState, Probe, probe_fleet
from rl360.engines.gateway import GatewayClient
from rl360.engines.health import headers_for
from rl360.engines.processes import proof_of_end
from rl360.store.layout import run_config_key, step_key
from rl360.store.object_store import ObjectStore
from rl360.training.client import TrainerClient
from rl360.weights import fence
from rl360.weights.checksum import expected_checksums, tensor_specs
from rl360.weights.messages import Bucket, ChecksumReply, PushPlan, PushRecord, PushStatus, TransferReport
from rl360.weights.push import ensure_weights, push
from rl360.weights.transports import Senders
from rl360.weights.transports.broadcast import BroadcastTransport

pytestmark = pytest.mark.contract

CONFIG = PushConfig(call_deadline_s=20, bucket_bytes=256 << 10)
SMALL_BUCKETS = CONFIG.model_copy(update={"bucket_bytes": 16 << 10})
PROMPT = [11, 12, 13, 14, 15, 16]


class HeldWeights:
    """The engines' model with noise on it, sent from this process."""

    def __init__(self, model_dir: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        for path in sorted(Path(model_dir).glob("*.safetensors")):
            self.tensors.update({name: t.to(torch.bfloat16) for name, t in load_file(path).items()})
        self.senders = Senders()

    def change(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {
            name: (t.float() + 0.1 * torch.randn(t.shape, generator=generator)).to(torch.bfloat16)
            for name, t in self.tensors.items()
        }

    async def checksums(self, run: str, version: str, deadline_s: float | None = None) -> ChecksumReply:
        return ChecksumReply(
            run=run,
            version=version,
            tensors=tuple(tensor_specs(self.tensors)),
            checksums=expected_checksums(self.tensors),
        )

    async def transfer(self, plan: PushPlan, deadline_s: float | None = None) -> TransferReport:
        return await asyncio.to_thread(self.senders.transfer, plan, self.tensors)

    async def prepare(self, plan: PushPlan, deadline_s: float | None = None) -> None:
        await asyncio.to_thread(self.senders.prepare, plan, self.tensors)


class Rig:
    """One run against the session's services."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.store = ObjectStore.from_services(services)
        self.run = f"push-{uuid.uuid4().hex[:8]}"
        self.weights = HeldWeights(services.model_dir)

    def push(self, step: int, transport: str = "broadcast", config: PushConfig = CONFIG) -> PushRecord:
        self.weights.change(step)
        config = config.model_copy(update={"transport": transport})
        version = f"{self.run}:{step + 1}"
        return asyncio.run(push(self.store, self.services, self.run, step, version, self.weights, config))

    def again(self, step: int) -> PushRecord:
        version = f"{self.run}:{step + 1}"
        return asyncio.run(push(self.store, self.services, self.run, step, version, self.weights, CONFIG))

    def probes(self) -> list[Probe]:
        async def look() -> list[Probe]:
            async with open_http() as http:
                return await probe_fleet([EngineClient(u, http, 20) for u in self.services.engine_urls], 20)

        return asyncio.run(look())

    def usable(self) -> list[str]:
        async def look() -> list[str]:
            async with open_http() as http:
                workers = await GatewayClient(self.services.gateway_url, http).workers()
            return sorted(worker.url for worker in workers if worker.usable)

        return asyncio.run(look())

    def checksums(self, url: str) -> dict[str, str]:
        async def ask() -> dict[str, str]:
            async with open_http() as http:
                epoch = fence.next_epoch(self.store) - 1  # the newest: strict doors answer a push alone
                return await EngineClient(url, http, 20, epoch, deployment_token()).checksums()

        return asyncio.run(ask())

    def wait_for_all(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while not all(probe.identity for probe in self.probes()):
            assert time.monotonic() < until, "the supervisor did not bring the engine back"
            time.sleep(2)


def generate(url: str, tokens: int = 16) -> tuple[list[int], str]:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    }
    headers = {"X-SMG-Routing-Key": uuid.uuid4().hex} | headers_for(url)
    reply = httpx.post(f"{url}/generate", json=body, headers=headers, timeout=60)
    reply.raise_for_status()
    return reply.json()["output_ids"], reply.json()["meta_info"]["weight_version"]


@pytest.fixture(scope="module")
def rig(services: Services) -> Iterator[Rig]:
    made = Rig(services)
    made.wait_for_all(180)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RL360_HOME", services.home)  # this process pushes, and writes files, as one of it
        yield made
        # other tests sample from these engines: with the model they were started with, not with noise
        made.weights.tensors = HeldWeights(services.model_dir).tensors
        made.wait_for_all(180)
        version = f"{made.run}:100"
        asyncio.run(push(made.store, services, made.run, 99, version, made.weights, CONFIG))


@pytest.mark.timeout(900)  # the first that needs the services has them started in its set-up
def test_both_confirmed_and_generation_differs(rig: Rig) -> None:
    first = rig.push(0)
    before = {url: generate(url)[0] for url in rig.services.engine_urls}
    second = rig.push(1)
    after = {url: generate(url) for url in rig.services.engine_urls}
    assert second.status is PushStatus.CONFIRMED
    assert [engine.state for engine in second.engines] == [EngineState.SERVING] * len(rig.services.engine_urls)
    assert not first.group_reused and second.group_reused
    assert second.bytes == sum(t.nbytes for t in rig.weights.tensors.values())
    for url, (tokens, version) in after.items():
        assert version == second.version
        assert tokens != before[url]
        assert rig.checksums(url) == expected_checksums(rig.weights.tensors)
    assert len({tuple(tokens) for tokens, _ in after.values()}) == 1
    assert rig.usable() == sorted(rig.services.engine_urls)
    assert generate(rig.services.gateway_url) == next(iter(after.values()))
    stored = rig.store.get(step_key(rig.run, 1, "push.json"))
    assert PushRecord.model_validate_json(stored) == second


def test_again_sends_nothing(rig: Rig) -> None:
    rig.push(2)
    epochs = rig.store.list("_fleet/push/")
    assert rig.again(2).version == f"{rig.run}:3"
    assert asyncio.run(
        ensure_weights(rig.store, rig.services, rig.run, f"{rig.run}:3", rig.weights, CONFIG)
    ) is None  # fmt: skip
    assert rig.store.list("_fleet/push/") == epochs


def test_requests_in_flight_go_on_under_the_new_weights(rig: Rig) -> None:
    replies: list[tuple[list[int], str]] = []
    threads = [
        threading.Thread(target=lambda u=url: replies.append(generate(u, 400))) for url in rig.services.engine_urls
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    record = rig.push(3)
    for thread in threads:
        thread.join(60)
    assert record.flushed
    assert [len(tokens) for tokens, _ in replies] == [400] * len(threads)
    assert all("#loading" not in version for _, version in replies)


def push_and_die(services: Services, run: str) -> None:
    """Push step 4 and die by SIGKILL when the second bucket is about to be sent."""
    sent = []

    class Dying(BroadcastTransport):
        def _send(self, bucket: Bucket, *args: Any) -> None:
            sent.append(bucket)
            if len(sent) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            super()._send(bucket, *args)

    weights = HeldWeights(services.model_dir)
    weights.senders = cast(Any, Dying())
    asyncio.run(push(ObjectStore.from_services(services), services, run, 4, f"{run}:5", weights, SMALL_BUCKETS))


def test_push_killed_by_its_process_is_taken_over(rig: Rig) -> None:
    """A pusher that dies between two buckets leaves engines paused, half written, in a session and a group."""
    rig.weights.change(4)
    child = multiprocessing.get_context("spawn").Process(target=push_and_die, args=(rig.services, rig.run))
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    assert len(fence.open_intents(rig.store)) == 1
    record = rig.again(4)
    assert record.status is PushStatus.CONFIRMED
    assert fence.open_intents(rig.store) == []
    assert rig.usable() == sorted(rig.services.engine_urls)


def test_every_transport_that_a_dense_model_has_brings_a_version(rig: Rig) -> None:
    """One after another on the same engines; a delta whose base nobody holds would be a full one, and say so."""
    rig.wait_for_all(180)
    sent: dict[str, int] = {}
    for step, transport in enumerate(["p2p", "colocated", "disk_full", "disk_delta", "broadcast"], start=5):
        record = rig.push(step, transport)
        assert (record.status, record.path) == (PushStatus.CONFIRMED, transport)
        assert {generate(url)[1] for url in rig.services.engine_urls} == {record.version}
        assert len({tuple(generate(url)[0]) for url in rig.services.engine_urls}) == 1
        assert ("prepare" in record.phases_s) == transport.startswith("disk")
        sent[transport] = record.bytes
    assert fence.open_intents(rig.store) == []
    assert sent["disk_delta"] < sent["disk_full"]


@pytest.mark.parametrize("transport", ["broadcast", "p2p", "disk_full"])
def test_push_from_the_real_trainer(rig: Rig, transport: str) -> None:
    run = f"push-{uuid.uuid4().hex[:8]}"
    config = RunConfig.model_validate({"run": run})
    rig.store.put_once(run_config_key(run), config.to_json())

    async def go() -> PushRecord | None:
        async with open_http() as http:
            trainer = TrainerClient(rig.services.trainer_url, http, rig.services.auth_headers(), deadline_s=120)
            await trainer.open_run(run)
            config = CONFIG.model_copy(update={"transport": transport})
            return await ensure_weights(rig.store, rig.services, run, f"{run}:0", trainer, config)

    record = asyncio.run(go())
    assert record is not None and (record.status, record.path) == (PushStatus.CONFIRMED, transport)
    assert {generate(url)[1] for url in rig.services.engine_urls} == {f"{run}:0"}


@pytest.mark.chaos
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_engine_lost_in_mid_push_is_fenced_and_the_rest_completes(
    rig: Rig, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.wait_for_all(180)
    step = 10 + int(how)
    rig.push(step)
    bad = rig.probes()[0].identity
    assert bad is not None and bad.process is not None
    members = bad.process.members
    original, sent = BroadcastTransport._send, []

    def send(self: BroadcastTransport, bucket: Bucket, *args: Any) -> None:
        sent.append(bucket)
        if len(sent) == 2:  # one is in the engines
            for member in members:
                os.kill(member.pid, how)
        original(self, bucket, *args)

    monkeypatch.setattr(BroadcastTransport, "_send", send)
    record = rig.push(step + 1, config=SMALL_BUCKETS)
    lost, *rest = record.engines
    assert (lost.identity.url, lost.state) == (bad.url, EngineState.GONE)
    assert proof_of_end(bad.process).gone
    assert record.rounds >= 2
    for engine in rest:
        assert engine.state is EngineState.SERVING
        assert rig.checksums(engine.identity.url) == expected_checksums(rig.weights.tensors)
    assert rig.usable() == sorted(engine.identity.url for engine in rest)
    rig.wait_for_all(240)
    version = f"{rig.run}:{step + 2}"
    back = asyncio.run(ensure_weights(rig.store, rig.services, rig.run, version, rig.weights, CONFIG))
    assert back is not None and len(back.serving) == len(rig.services.engine_urls)
