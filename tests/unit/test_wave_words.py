"""What the flow's log says of a wave that ended: outcomes in words, and a warning of what infrastructure cost."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rl360.agents.records import put_table
from rl360.ledger.outcomes import HAS_VERDICT
from rl360.report.wave import in_words, losses
from rl360.sessions.sample import AttemptRecord
from rl360.step_work import read_records
from rl360.store.layout import attempts_key, wave_key
from tasks import roll_out as roll_out_task
from tests.unit.ledger_run import add_step, finished_run
from tests.unit.memory_store import MemoryStore

RECORDS = read_records(cast(Any, finished_run(1)), "demo", 0)


def test_a_wave_with_losses_warns_of_them_and_says_what_became_of_them_and_where_to_look(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    add_step(store, 0, until="sample_groups")
    put_table(cast(Any, store), attempts_key("demo", 0, 0, 0), RECORDS)
    put_table(cast(Any, store), wave_key("demo", 0, 0), RECORDS)  # its wave is closed: nothing is played
    job = cast(Any, SimpleNamespace(run="demo", step=0, store=store, log=logging.getLogger("wave")))
    with caplog.at_level(logging.INFO, "wave"):
        produced = roll_out_task._roll_out(job, 0, "demo:0")
    lost = [record for record in RECORDS if record.outcome not in HAS_VERDICT]
    assert lost and sum(produced.counts.values()) == len(RECORDS)
    info, warning = (record for record in caplog.records if "earlier try" not in record.message)
    assert (info.levelname, warning.levelname) == ("INFO", "WARNING")
    assert info.message.endswith(in_words(RECORDS)) and "{" not in info.message
    assert warning.message == f"wave 0: {losses(RECORDS, 'demo', 0)}"
    said = f"{len(lost)} of {len(RECORDS)} tries ({len(lost) / len(RECORDS):.0%}) were lost to infrastructure: "
    assert said in warning.message
    assert "sandbox lost (provider: " in warning.message and "no engine (model: " in warning.message
    assert f"`rl360 ledger demo --attempt {lost[-1].attempt_id}`" in warning.message
    assert "`rl360 ledger demo --why infra --step 0`" in warning.message


def test_a_try_that_was_tried_again_does_not_stay_lost() -> None:
    slot = RECORDS[0].attempt_id.rpartition("-t")[0]
    tries = [record for record in RECORDS if record.attempt_id.startswith(slot)]
    assert [record.outcome.value for record in tries] == ["sandbox_lost", "passed"]
    assert in_words(tries) == "1 attempts in 2 tries: 1 sandbox lost, 1 passed"
    assert "1 of 2 tries (50%)" in losses(tries, "demo", 0) and "1 of them were tried again, 0 stay" in losses(
        tries, "demo", 0
    )
    assert "0 of them were tried again, 1 stay lost" in losses(tries[:1], "demo", 0)


def test_a_wave_without_losses_warns_of_nothing() -> None:
    good = [record for record in RECORDS if record.outcome in HAS_VERDICT]
    assert losses(good, "demo", 0) == "" and losses([], "demo", 0) == ""
    nothing: list[AttemptRecord] = []
    assert in_words(nothing) == "0 attempts: nothing"
