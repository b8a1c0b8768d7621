"""SIGKILL a service while a step samples: the run goes on by itself; what was lost is in the books and in no mean."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import uuid

import pytest

from rl360.agents.rollout import spread
from rl360.config.services import Services
from rl360.ledger.outcomes import HAS_VERDICT, INFRA
from rl360.ledger.read import read_step
from rl360.store.layout import step_key
from rl360.store.object_store import ObjectStore
from tests.conftest import Cli

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

GROUPS, SIZE = 6, 4


@pytest.mark.parametrize("names", ["gateway", "sessions-0", "sandbox-0", "engine-0 engine-1"])
def test_killed_while_a_step_samples(services: Services, store: ObjectStore, cli: Cli, names: str) -> None:
    run = f"loss-{uuid.uuid4().hex[:8]}"
    rows = json.loads(cli("status", "--json").stdout)["services"]
    pids = [rows[name]["pid"] for name in names.split()]
    killer = threading.Thread(target=_kill_when_sampling, args=(store, run, pids), daemon=True)
    killer.start()
    fields = ("-s", f"taskset.groups_per_step={GROUPS}", "-s", f"taskset.attempts_per_group={SIZE}")
    done = cli("run", "start", "--name", run, "--steps", "1", *fields, "-s", "rollout.wave_size=8")
    killer.join(timeout=5)
    assert not killer.is_alive(), "the step never sampled"
    assert done.returncode == 0, done.stdout + done.stderr
    ledger = read_step(store, run, 0)
    slots = {row.attempt_id.rsplit("-t", 1)[0] for row in ledger.attempts}
    verified = {row.attempt_id.rsplit("-t", 1)[0] for row in ledger.attempts if row.outcome in HAS_VERDICT}
    assert len(slots) == GROUPS * SIZE
    assert verified == slots, f"not made good: {sorted(slots - verified)}"
    assert all(row.reward is None for row in ledger.attempts if row.outcome in INFRA)
    assert cli("ledger", run).returncode == 0
    if names == "sessions-0":  # a session server that dies costs its own attempts and no other
        lost = {row.attempt_id for row in ledger.attempts if row.outcome in INFRA}
        assert {spread(services.session_urls, attempt_id) for attempt_id in lost} <= {services.session_urls[0]}


def _kill_when_sampling(store: ObjectStore, run: str, pids: list[int]) -> None:
    """SIGKILL once the first record of the step is stored: others are in flight then."""
    give_up_at = time.monotonic() + 300
    while time.monotonic() < give_up_at:
        if store.list(step_key(run, 0, "attempts/")):
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.05)
