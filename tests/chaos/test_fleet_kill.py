"""SIGKILL one of two engines between pushes: fenced, proven gone, replaced, no request before a push confirmed it."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable

import httpx
import pytest

from rl360.config.services import Services
from rl360.engines.fleet import EngineState
from rl360.engines.fleet_log import Event, FleetLog, Slot
from rl360.engines.processes import proof_of_end
from rl360.store.object_store import ObjectStore
from tests.conftest import Cli
from tests.contract.test_push import Rig

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


def eventually(holds: Callable[[], bool], timeout_s: float) -> None:
    give_up_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < give_up_s, "did not happen in time"
        time.sleep(0.3)


def ever_prefilled(url: str) -> int:
    """Tokens that this engine has computed since it started, as it counts them itself."""
    loads = httpx.get(f"{url}/v1/loads?include=core", timeout=20).json()["loads"]
    return sum(load["total_prefill_uncached_tokens"] for load in loads)


def ask_gateway(services: Services, count: int) -> None:
    """New sessions: the gateway places each on the engine with the least load."""
    body = {"input_ids": [11, 12, 13], "sampling_params": {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}}
    for _ in range(count):
        headers = {"X-SMG-Routing-Key": uuid.uuid4().hex}
        reply = httpx.post(f"{services.gateway_url}/generate", json=body, headers=headers, timeout=60)
        assert reply.status_code == 200, reply.text


def test_a_killed_engine_is_fenced_replaced_and_silent_until_a_push(
    services: Services, store: ObjectStore, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL360_HOME", services.home)  # this process pushes, as one of the deployment
    log = FleetLog(store)

    def slot(number: int = 0) -> Slot:
        return log.refresh().slots[f"engine-{number}"]

    def events(since: int) -> list[Event]:
        told = [entry for entry in log.recent(200) if entry.seq > since]
        return [event for entry in told for event in entry.events if event.engine == "engine-0"]

    rig = Rig(services)
    rig.wait_for_all(180)
    rig.push(0)
    assert [slot(0).state, slot(1).state] == [EngineState.SERVING] * 2
    assert cli("fleet", "status").returncode == 0
    before, since, url = slot(), log.refresh().seq, services.engine_urls[0]
    assert before.process is not None
    os.kill(before.process.root.pid, signal.SIGKILL)
    eventually(lambda: any(event.to is EngineState.GONE for event in events(since)), 120)
    gone = next(event for event in events(since) if event.to is EngineState.GONE)
    assert [str(event.to) for event in events(since)][:3] == ["suspect", "fenced", "gone"]
    assert gone.incarnation == before.incarnation and gone.reason
    assert "none alive of pids" in gone.evidence and str(before.process.root.pid) in gone.evidence
    assert proof_of_end(before.process).gone
    assert url not in rig.usable()
    assert cli("fleet", "status").returncode == 1

    # replaced by its supervisor: another incarnation, which joins and is asked for nothing
    eventually(lambda: slot().incarnation not in ("", before.incarnation), 300)
    assert slot().state is EngineState.JOINING and slot().starts == before.starts + 1
    ask_gateway(services, 12)
    time.sleep(12)  # rounds of the keeper
    assert url not in rig.usable()
    assert ever_prefilled(url) == 0
    assert slot().state is EngineState.JOINING

    record = rig.push(1)
    assert sorted(outcome.identity.url for outcome in record.serving) == sorted(services.engine_urls)
    assert slot().state is EngineState.SERVING and slot().version == record.version
    assert rig.usable() == sorted(services.engine_urls)
    ask_gateway(services, 12)
    assert ever_prefilled(url) > 0
    shown = cli("fleet", "events", "--engine", "engine-0", "-n", "30").stdout
    assert "suspect" in shown and "none alive of pids" in shown
