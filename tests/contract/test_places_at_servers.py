"""A flow that launches more attempts than a real sandbox server runs: they wait in the flow, and none is lost to the
server's queue clock."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rl360.agents.places import Places
from rl360.agents.records import RecordLog
from rl360.agents.rollout import AttemptSpec
from rl360.config.run import RunConfig
from rl360.config.services import Services
from rl360.harbor.outcome import ExitStatus
from rl360.ledger.outcomes import HAS_VERDICT, Outcome
from rl360.sessions.sample import AttemptRecord
from tasks import roll_out as roll_out_task
from tests.contract.test_judge import Sessions
from tests.contract.test_sandboxes import TOKEN, Server, free_port, make_task, why_not
from tests.scripted_session import Bash, Say, ScriptedSessions
from tests.unit.memory_store import MemoryStore

pytestmark = [pytest.mark.contract, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

QUEUE_S, AGENT_S = 2.5, 3.0  # whoever waits for one that runs is too late


def play(home: Path, server: Server, waves: int = 2, size: int = 3, queue_s: float = QUEUE_S) -> list[AttemptRecord]:
    """The records of waves that run at once, each in its thread, as the flow runs them."""
    (home / "secrets.json").write_text(json.dumps({"token": TOKEN, "s3_access_key": "a", "s3_secret_key": "b"}))
    (home / "secrets.json").chmod(0o600)
    gone = "http://127.0.0.1:9"
    urls = dict.fromkeys(("prefect_api_url", "prefect_ui_url", "s3_endpoint", "gateway_url", "trainer_url"), gone)
    task = str(make_task(home / "task"))
    plan = [
        [AttemptSpec(f"s000000-g{wave:03}-a{n:02}", f"s000000-g{wave:03}", "t/answer", task, "d") for n in range(size)]
        for wave in range(waves)
    ]
    acts = [Bash(f"sleep {AGENT_S}"), Say("done")]
    scripted = ScriptedSessions()
    scripted.start()
    front = Sessions(scripted, {spec.slot_id: acts for specs in plan for spec in specs})
    services = Services(
        home=str(home), s3_bucket="b", engine_urls=[gone], session_urls=[front.url], sandbox_urls=[server.url],
        model_dir="m", **urls,
    )  # fmt: skip
    config = RunConfig.parse(
        {
            "run": "demo",
            "deadlines": {"queue_s": queue_s},
            "rollout": {"infra_retries": 0, "max_infra_rate": 1.0, "max_concurrent": 16},
            "sandbox": {"memory_mb": 400},
        }
    )
    store = cast(Any, MemoryStore())
    job = cast(
        Any,
        SimpleNamespace(
            config=config, run="demo", step=0, store=store, services=services, log=logging.getLogger("test")
        ),
    )
    logs = [RecordLog(store, "demo", 0, wave) for wave in range(waves)]
    roll_out_task._shares.cache_clear()
    try:
        with ThreadPoolExecutor(waves) as threads:
            jobs = [
                threads.submit(asyncio.run, roll_out_task._run_wave(job, wave, plan, "demo:0", logs[wave]))
                for wave in range(waves)
            ]
        for done in jobs:
            done.result()
    finally:
        roll_out_task._shares.cache_clear()
        front.stop()
        scripted.stop()
    return [record for log in logs for record in log.stored.values()]


@pytest.mark.parametrize(
    ("max_concurrent", "options"),
    [(2, ()), (8, ("--promise", "cpus=1,memory_mb=1000,pids=500,disk_mb=20000"))],
    ids=["places", "memory"],
)
def test_no_attempt_is_lost_because_the_flow_asked_for_more_than_the_server_runs(
    max_concurrent: int, options: tuple[str, ...], tmp_path: Path
) -> None:
    server = Server(tmp_path / "home", free_port(), max_concurrent=max_concurrent, options=options)
    server.start()
    try:
        records = play(tmp_path, server)
    finally:
        server.stop()
    assert len(records) == 6
    assert {record.outcome for record in records} <= HAS_VERDICT, [record.detail for record in records]
    spans = [(record.started_at, record.finished_at) for record in records]
    assert max(sum(begun <= at < ended for begun, ended in spans) for at, _ in spans) == 2, "no more, and no fewer"


def test_without_that_the_queue_clock_loses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(*_: Any) -> str:
        return "anywhere"

    monkeypatch.setattr(Places, "take", at_once)
    server = Server(tmp_path / "home", free_port(), max_concurrent=2)
    server.start()
    try:
        records = play(tmp_path, server)
    finally:
        server.stop()
    assert sum(record.exit_status == ExitStatus.QUEUE_TIMEOUT for record in records) >= 3


def test_a_restart_of_the_server_loses_no_attempt_that_waits(tmp_path: Path) -> None:
    """Two run when it is killed: these are lost. The other eight would take 12 s in its queue."""
    server = Server(tmp_path / "home", free_port(), max_concurrent=2)
    server.start()

    def restart() -> None:
        server.until(running=2)
        server.stop(signal.SIGKILL)
        time.sleep(1.0)
        server.start()

    try:
        with ThreadPoolExecutor(1) as thread:
            restarted = thread.submit(restart)
            records = play(tmp_path, server, size=5, queue_s=6.0)
            restarted.result()
    finally:
        server.stop()
    lost = [record for record in records if record.outcome not in HAS_VERDICT]
    assert len(records) == 10 and not [record for record in records if record.exit_status == ExitStatus.QUEUE_TIMEOUT]
    assert {record.outcome for record in lost} == {Outcome.SANDBOX_LOST} and len(lost) == 2, [r.detail for r in lost]
