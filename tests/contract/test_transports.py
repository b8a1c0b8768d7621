"""Every transport of tensors into real SGLang engines with a tiny mixture of experts: what they hold afterwards equals
what was sent, by their own checksums; the same path and calls after an engine was replaced; a stopped engine holds up
nobody beyond the deadline. The weights come from this process; three engines are started for this file, with strict
doors, and called at an address of this host that is not loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rl360.engines.client import EngineClient, deployment_token, open_http
from rl360.engines.fleet import probe_engine
from rl360.engines.processes import tree_of_url
from rl360.weights.checksum import expected_checksums, tensor_specs
from rl360.weights.messages import EngineSet, PushPlan, TransferReport, Transport
from rl360.weights.plan import plan_push
from rl360.weights.transports import Senders, common
from tests.contract.session_rig import far_address, free_port, process
from tests.contract.test_routed_experts import EXPERTS, write_moe
from tests.unit.fake_engines import show_token

pytestmark = [pytest.mark.contract, pytest.mark.timeout(900)]

TRANSPORTS = [Transport.BROADCAST, Transport.DIRECT_EXPERTS, Transport.P2P, Transport.COLOCATED]
EACH = pytest.mark.parametrize("transport", TRANSPORTS)
BUCKET_BYTES, DEADLINE_S = 128 << 10, 20.0


@dataclass
class Fleet:
    """Engines of this file, and the sender that keeps its groups with them from test to test."""

    folder: Path
    model: Path
    urls: list[str] = field(default_factory=list)
    running: dict[str, Any] = field(default_factory=dict)
    senders: Senders = field(default_factory=Senders)
    epoch: int = 0
    seed: int = 0
    calls: dict[Transport, int] = field(default_factory=dict)

    def start(self, count: int) -> list[str]:
        urls = [f"http://{far_address()}:{free_port()}" for _ in range(count)]

        def one(url: str) -> None:
            argv = [sys.executable, "-m", "rl360.engines.launch", "--model", str(self.model)]
            argv += ["--port", url.rsplit(":", 1)[1], "--max-total-tokens", "4096", "--host", "0.0.0.0"]
            log, env = self.folder / f"engine-{url[-5:]}.log", {"RL360_TOKEN_FILE": os.environ["RL360_TOKEN_FILE"]}
            self.running[url] = process([*argv, "--door", "strict"], f"{url}/ping", log, env, ready_s=600)
            self.running[url].__enter__()

        with ThreadPoolExecutor(count) as pool:
            list(pool.map(one, urls))
        return urls

    def end(self, url: str) -> None:
        self.running.pop(url).__exit__(None, None, None)

    def weights(self) -> dict[str, torch.Tensor]:
        """Others than ever before."""
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        held: dict[str, torch.Tensor] = {}
        for path in sorted(self.model.glob("*.safetensors")):
            for name, tensor in load_file(path).items():
                noise = 0.1 * torch.randn(tensor.shape, generator=generator)
                held[name] = (tensor.float() + noise).to(torch.bfloat16)
        return held

    def ask(self, call: Callable[[EngineClient], Any], deadline_s: float = DEADLINE_S) -> list[Any]:
        """What every engine answers, all asked at once."""

        async def everyone() -> list[Any]:
            async with open_http() as http:
                clients = [
                    EngineClient(url, http, deadline_s, self.epoch or None, deployment_token()) for url in self.urls
                ]
                return list(await asyncio.gather(*(call(client) for client in clients)))

        return asyncio.run(everyone())

    def plan(self, transport: Transport, tensors: dict[str, torch.Tensor], **more: Any) -> PushPlan:
        self.epoch += 1
        probes = self.ask(lambda client: probe_engine(client, DEADLINE_S))
        engines = EngineSet(epoch=self.epoch, engines=tuple(probe.identity for probe in probes))
        fields = {"bucket_bytes": BUCKET_BYTES, "call_deadline_s": DEADLINE_S} | more
        return plan_push(
            tensor_specs(tensors), engines, run="r1", version=f"r1:{self.epoch}", transport=transport, **fields
        )

    def push(self, transport: Transport, **more: Any) -> tuple[PushPlan, TransferReport]:
        """Other weights to all engines, read back from each."""
        tensors = self.weights()
        plan = self.plan(transport, tensors, **more)
        report = self.senders.transfer(plan, tensors)
        assert report.ok, report
        assert self.ask(EngineClient.checksums) == [expected_checksums(tensors)] * len(self.urls)
        assert [told.calls for told in report.engines] == [plan.calls_per_engine] * len(self.urls)
        assert report.sent_bytes == plan.total_bytes
        return plan, report


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("transports")
    write_moe(folder / "model")
    made = Fleet(folder, folder / "model")
    with contextlib.ExitStack() as stack:
        show_token(stack.enter_context(pytest.MonkeyPatch.context()), folder)
        try:
            made.urls = made.start(3)
            yield made
        finally:
            made.senders.close()
            for url in list(made.running):
                stack.callback(made.end, url)


@EACH
def test_engines_hold_what_was_sent(fleet: Fleet, transport: Transport) -> None:
    plan, _ = fleet.push(transport)
    _, second = fleet.push(transport)
    fleet.calls[transport] = plan.calls_per_engine
    assert second.group_reused
    assert [told.control_calls for told in second.engines] == [2, 2, 2], "begin and end"


def test_experts_go_in_one_call_however_many_buckets_they_would_fill(fleet: Fleet) -> None:
    tensors = fleet.weights()
    assert sum(".experts." in name for name in tensors) == 2 * EXPERTS * 3
    direct, broadcast = (
        fleet.plan(transport, tensors, bucket_bytes=16 << 10)
        for transport in (Transport.DIRECT_EXPERTS, Transport.BROADCAST)
    )
    assert direct.calls_per_engine == len(direct.buckets) + 1 < broadcast.calls_per_engine
    fleet.push(Transport.DIRECT_EXPERTS, bucket_bytes=16 << 10)


def test_after_an_engine_was_replaced_path_and_calls_are_the_same(fleet: Fleet) -> None:
    gone = fleet.urls[1]
    fleet.end(gone)
    fleet.urls[1] = fleet.start(1)[0]
    joins = {Transport.P2P: [0, 2, 0], Transport.BROADCAST: [3, 3, 3], Transport.COLOCATED: [0, 0, 0]}
    for transport in (Transport.P2P, Transport.BROADCAST, Transport.COLOCATED):
        plan, report = fleet.push(transport)
        assert plan.transport is transport
        assert plan.calls_per_engine == fleet.calls[transport]
        assert not report.group_reused or transport is Transport.COLOCATED
        # leave and join; in the group of all its old name is left too. Groups of two: the newcomer alone
        assert [told.control_calls - 2 for told in report.engines] == joins[transport]
        assert fleet.push(transport)[1].group_reused
    plan, report = fleet.push(Transport.DIRECT_EXPERTS)
    assert plan.calls_per_engine == fleet.calls[Transport.DIRECT_EXPERTS]
    assert report.group_reused, "on the groups that the others made"


@pytest.mark.parametrize("at", ["first", "last"])
@EACH
def test_a_stopped_engine_holds_up_nobody_beyond_the_deadline(
    fleet: Fleet, transport: Transport, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped when a bucket is about to leave; the others are whole, or free to answer, when the report is there.
    Woken up, it answers again, and the next push brings it along by the same path."""
    tree = tree_of_url(fleet.urls[2])
    assert tree is not None
    plain, buckets = common.flatten, 0

    def flatten(bucket: Any, tensors: Any) -> torch.Tensor:
        nonlocal buckets
        buckets += 1
        if buckets == (1 if at == "first" else plan.calls_per_engine):
            for member in tree.members:
                os.kill(member.pid, signal.SIGSTOP)
        return plain(bucket, tensors)

    deadline_s, tensors = 5.0, fleet.weights()
    plan = fleet.plan(transport, tensors, call_deadline_s=deadline_s)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(common, "flatten", flatten)
            began = time.monotonic()
            report = fleet.senders.transfer(plan, tensors)
            took_s = time.monotonic() - began
        assert not report.ok
        *others, stopped = report.engines
        assert stopped.error and not stopped.answered
        assert took_s < 2 * deadline_s + 3
        held = asyncio.run(_checksums(fleet.urls[:2], fleet.epoch, deadline_s))
        if transport in (Transport.P2P, Transport.COLOCATED):
            assert [told.error for told in others] == ["", ""]
            assert held == [expected_checksums(tensors)] * 2
        assert all(told.answered for told in others)
    finally:
        for member in tree.members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGCONT)
    fleet.ask(lambda client: client.server_info(60), 60)
    plan, _ = fleet.push(transport)
    assert plan.calls_per_engine == fleet.calls[transport]


async def _checksums(urls: list[str], epoch: int, deadline_s: float) -> list[dict[str, str]]:
    async with open_http() as http:
        clients = [EngineClient(url, http, deadline_s, epoch, deployment_token()) for url in urls]
        return list(await asyncio.gather(*(client.checksums() for client in clients)))
