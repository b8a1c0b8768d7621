"""Pushes from a real trainer of two ranks, each holding half of the experts: both send, each to its own engines.

The engines are fakes that join gloo groups and keep the bytes they get; what they hold must give the checksums that the
trainer announced. Real engines: test_transports.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rl360.weights.checksum import expected_checksums
from rl360.weights.messages import ChecksumReply, PushPlan, TransferReport, Transport
from rl360.weights.plan import plan_push
from tests.contract.trainer_rig import REPO, TOKEN, Rig, free_ports
from tests.unit.gloo_engines import GlooEngine, engine_set
from tests.unit.training_data import EXPERTS, write_model

pytestmark = [pytest.mark.contract, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = Rig(tmp_path_factory.mktemp("trainer"), ranks=2, experts=EXPERTS, options=("--ep", "2"))
    yield made
    made.close()


@pytest.fixture
def engines() -> Iterator[list[GlooEngine]]:
    made = [GlooEngine(door_token=TOKEN) for _ in range(3)]
    yield made
    for engine in made:
        engine.close()


def held_by(rig: Rig, run: str) -> ChecksumReply:
    reply = rig.ask("POST", "/push/checksums", {"run": run, "version": f"{run}:0"})
    assert reply.status_code == 200, reply.text
    return ChecksumReply.model_validate(reply.json())


def sent(rig: Rig, plan: PushPlan) -> TransferReport:
    reply = rig.ask("POST", "/push/transfer", plan.model_dump(mode="json"))
    assert reply.status_code == 200, reply.text
    return TransferReport.model_validate(reply.json())


def plan_of(held: ChecksumReply, engines: list[GlooEngine], transport: Transport, epoch: int, **more: Any) -> PushPlan:
    fields = {"bucket_bytes": 64 << 10, "call_deadline_s": 10.0, "sources": held.sources} | more
    receivers = engine_set(engines, epoch)
    return plan_push(held.tensors, receivers, run=held.run, version=held.version, transport=transport, **fields)


def checksums_of(engine: GlooEngine, held: ChecksumReply) -> dict[str, str]:
    """What an engine would answer that holds these bytes."""
    return expected_checksums(
        {
            spec.name: torch.frombuffer(bytearray(engine.held[spec.name]), dtype=torch.bfloat16).reshape(spec.shape)
            for spec in held.tensors
        }
    )


def listening_pid(port: int) -> int:
    return next(row.pid for row in psutil.net_connections("tcp") if row.laddr.port == port and row.status == "LISTEN")


@pytest.mark.parametrize("transport", [Transport.P2P, Transport.DIRECT_EXPERTS])
def test_each_rank_sends_to_its_own_engines(rig: Rig, engines: list[GlooEngine], transport: Transport) -> None:
    run = rig.new_run(f"push-{transport.replace('_', '-')}")
    held = held_by(rig, run)
    assert held.sources == 2
    epoch = 10 if transport is Transport.P2P else 20
    plan = plan_of(held, engines, transport, epoch)
    assert {delivery.source for delivery in plan.deliveries} == {0, 1}
    report = sent(rig, plan)
    assert report.ok and report.sent_bytes == plan.total_bytes
    assert [told.url for told in report.engines] == [engine.url for engine in engines]
    assert [told.calls for told in report.engines] == [plan.calls_per_engine] * 3
    by_source: dict[int, set[int]] = {}
    for engine, delivery in zip(engines, plan.deliveries, strict=True):
        assert checksums_of(engine, held) == held.checksums
        joins = {body["group_name"]: body["master_port"] for path, body in engine.calls if "init_weights" in path}
        by_source.setdefault(delivery.source, set()).add(listening_pid(joins[delivery.group_name]))
    assert len(by_source[0]) == len(by_source[1]) == 1 and by_source[0] != by_source[1], "each from its own process"
    again = sent(rig, plan_of(held, engines, transport, epoch + 1))
    assert again.ok and again.group_reused


def test_what_one_rank_cannot_deliver_stops_nothing_else(rig: Rig, engines: list[GlooEngine]) -> None:
    run = rig.new_run("push-failing")
    held = held_by(rig, run)
    engines[1].faults["/update_weights_from_distributed"] = "500"  # served by rank 1
    report = sent(rig, plan_of(held, engines, Transport.P2P, 100))
    assert [bool(told.error) for told in report.engines] == [False, True, False]
    assert [checksums_of(engine, held) == held.checksums for engine in (engines[0], engines[2])] == [True, True]
    assert rig.ask("GET", f"/runs/{run}").status_code == 200, "both ranks go on"


def test_plans_that_do_not_fit_this_trainer_are_refused_on_all_ranks(rig: Rig, engines: list[GlooEngine]) -> None:
    run = rig.new_run("push-refused")
    held = held_by(rig, run)
    more = plan_of(held, engines, Transport.P2P, 110, sources=3)
    norm = next(spec for spec in held.tensors if spec.name == "model.norm.weight")
    wrong = norm.model_copy(update={"shape": (1, 1)})
    tensors = tuple(wrong if spec.name == wrong.name else spec for spec in held.tensors)
    for plan, said in (
        (more, "the plan has 3 sources, the trainer 2 ranks"),
        (plan_of(held.model_copy(update={"tensors": tensors}), engines, Transport.P2P, 111), "the trainer holds"),
    ):
        reply = rig.ask("POST", "/push/transfer", plan.model_dump(mode="json"))
        assert reply.status_code == 400 and said in reply.json()["error"], reply.text
    assert not any(engine.calls for engine in engines)
    assert sent(rig, plan_of(held, engines, Transport.P2P, 112)).ok


def test_prepare_refuses_what_transfer_would_and_touches_no_engine(rig: Rig, engines: list[GlooEngine]) -> None:
    run = rig.new_run("push-prepared")
    held = held_by(rig, run)
    plan = plan_of(held, engines, Transport.BROADCAST, 120)
    assert rig.ask("POST", "/push/prepare", plan.model_dump(mode="json")).json() == {}
    other = plan.model_copy(update={"version": f"{run}:7"})
    assert rig.ask("POST", "/push/prepare", other.model_dump(mode="json")).status_code == 409
    assert not any(engine.calls for engine in engines)


def test_each_rank_gets_what_it_is_to_send_under_every_layout(tmp_path: Path) -> None:
    write_model(tmp_path / "dense")
    write_model(tmp_path / "moe", experts=EXPERTS)
    cases = ["dense:1:1:1", "dense:2:1:1", "dense:1:2:1", "moe:1:1:2", "moe:2:1:1"]
    command = [sys.executable, "-m", "rl360.training.torchrun", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    command += ["--master-port", str(free_ports(1)[0]), "-m", "tests.contract.place_ranks", str(tmp_path), *cases]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(REPO)}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=REPO, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
