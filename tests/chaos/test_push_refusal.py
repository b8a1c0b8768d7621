"""A run whose push may not be retried stops there, says what to check, and after a person's word goes on there.

The same run then pushes in other calls than before, which is an event.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from pathlib import Path

import pytest

from rl360.commands.prefect_api import PrefectApi
from rl360.config.run import RunConfig
from rl360.config.services import Services
from rl360.engines.fleet import EngineIdentity
from rl360.engines.processes import ProcessId
from rl360.store.layout import step_key
from rl360.store.object_store import ObjectStore
from rl360.weights import fence
from rl360.weights.messages import PushRecord
from tests.chaos.test_kill_flow import Driver, committed, config_of
from tests.conftest import Cli

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

ELSEWHERE = "http://192.0.2.1:30000"  # an address that nobody has: an engine of another host


def leave_intent(store: ObjectStore, run: str) -> fence.Intent:
    """What a push that was killed leaves, with a receiver whose end nothing here can prove."""
    dead = fence.new_owner().model_copy(update={"process": ProcessId(pid=2**22 + 1, start_ticks=1)})
    intent = fence.Intent(
        epoch=fence.next_epoch(store),
        run=run,
        step=0,
        version=f"{run}:1",
        engines=(EngineIdentity(url=ELSEWHERE, incarnation=uuid.uuid4().hex[:16]),),
        group_name="rl360-0123456789abcdef",
        call_deadline_s=5.0,
        owner=dead,
        written_at=time.time(),
    )
    fence.write_intent(store, intent)
    return intent


def _check_event(services: Services, store: ObjectStore, driver: Driver, config: RunConfig) -> None:
    """One more step, in smaller buckets."""
    smaller = config.push.model_copy(update={"bucket_bytes": 64 << 10})
    assert driver.run(config.model_copy(update={"steps": 2, "push": smaller})) == 0, driver.log.read_text()
    first, second = (
        PushRecord.model_validate_json(store.get(step_key(config.run, step, "push.json"))) for step in (0, 1)
    )
    assert second.changed == f"{first.way} -> {second.way}" and second.calls_per_engine > first.calls_per_engine
    asked = {"event": {"name": ["rl360.push.path-changed"]}, "resource": {"id": [f"rl360.run.{config.run}"]}}
    until = time.monotonic() + 30
    while True:  # Prefect takes events in when it comes to them
        api = PrefectApi(services.prefect_api_url, "")
        found = api._call("POST", "/events/filter", {"filter": asked})["events"]
        if found or time.monotonic() > until:
            break
        time.sleep(1)
    assert [event["payload"]["changed"] for event in found] == [second.changed]


def test_goes_on_at_the_push_after_a_persons_word(
    services: Services, store: ObjectStore, cli: Cli, tmp_path: Path
) -> None:
    run = f"refused-{uuid.uuid4().hex[:8]}"
    config, driver = config_of(run, 1), Driver(services, tmp_path)
    try:
        assert driver.run(config, "train:after") == -signal.SIGKILL, driver.log.read_text()
        intent = leave_intent(store, run)
        try:
            before = committed(store, run, 0)
            for _ in range(2):
                assert driver.run(config) == 1, driver.log.read_text()
                assert "state CleanupUnconfirmed" in driver.log.read_text()
            assert committed(store, run, 0) == before
            asked = {"artifacts": {"key": {"any_": [f"{run}-unconfirmed"]}}}
            found = PrefectApi(services.prefect_api_url, "")._call("POST", "/artifacts/filter", asked)
            for fact in (ELSEWHERE, intent.engines[0].incarnation, f"epoch {intent.epoch}", intent.group_name):
                assert fact in found[0]["data"]
            assert f"rl360 fleet confirm-gone {ELSEWHERE}" in found[0]["data"]
        finally:  # an open intent would stop every later push of this store
            said = cli("fleet", "confirm-gone", ELSEWHERE, "--reason", "the test made it up")
        assert said.returncode == 0, said.stdout + said.stderr
        assert driver.run(config) == 0, driver.log.read_text()
        after = committed(store, run, 0)
        assert before.items() <= after.items()
        new = {Path(key).stem for key in after.keys() - before.keys()}
        assert new == {"push_weights", "checkpoint", "report"} or new == {"push_weights", "report"}
        assert store.exists(step_key(run, 0, "push.json"))
        _check_event(services, store, driver, config)
    finally:
        os.killpg(driver.process.pid, signal.SIGKILL)
        driver.process.wait(10)
