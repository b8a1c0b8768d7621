"""Ledgers of an older schema, in a run that was resumed since: read, checked where they say enough, nothing made up.

`run_of_schema3.msgpack.gz` is every object of step 0 of `tests/unit/ledger_run.py`, by key, as the last rl360 of that
schema wrote them.
"""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from rl360.commands.ledger_page import page
from rl360.commands.ledger_tables import ledger_tables
from rl360.errors import CorruptObject
from rl360.harbor.verdict import run_key
from rl360.ledger.checks import check_ledger
from rl360.ledger.metrics import step_json
from rl360.ledger.read import audit_run, list_runs, read_run, read_step
from rl360.ledger.step import LEDGER_SCHEMA, StepLedger
from rl360.report.attempt import Told, attempt_life
from rl360.report.export import COLUMNS, table_rows
from rl360.report.page import render_run
from rl360.report.waste import waste
from rl360.report.why import allowed, reason, why
from rl360.store.codec import pack, sha256_hex, unpack
from rl360.store.layout import manifest_key, step_key
from tests.unit.ledger_run import finished_run
from tests.unit.memory_store import MemoryStore
from tests.unit.verdict_data import TOKEN

WRITTEN = gzip.decompress((Path(__file__).parent / "run_of_schema3.msgpack.gz").read_bytes())
OLD_RUN: dict[str, bytes] = unpack(WRITTEN, "run_of_schema3")
OLD = OLD_RUN[step_key("demo", 0, "ledger.msgpack")]
OVER_VERSIONS = {
    "one version on",
    "a weight version of every trained token",
    "sampled before it trained",
    "weights as the step before left them",
}


def run_with(data: bytes, step: int = 0) -> MemoryStore:
    """A run of two steps, one of which has this ledger."""
    store = finished_run(2)
    key, where = step_key("demo", step, "ledger.msgpack"), manifest_key("demo", step, "report")
    store.objects[key] = data
    manifest = orjson.loads(store.objects[where])
    manifest["objects"][0].update(sha256=sha256_hex(data), size_bytes=len(data))
    store.objects[where] = orjson.dumps(manifest)
    return store


def test_a_step_of_schema_3_reads_and_says_nothing_it_did_not_know() -> None:
    wire = unpack(OLD, "k")
    assert wire["schema_version"] == 3 and "version_before" not in wire
    old = read_step(cast(Any, run_with(OLD)), "demo", 0)
    new = read_step(cast(Any, finished_run(1)), "demo", 0)
    assert old.version_before is None
    assert {(row.versions, row.trained_versions) for row in old.attempts} == {(None, None)}
    known = [replace(row, versions=None, trained_versions=None) for row in new.attempts]
    assert [each.attempt_id for each in old.attempts] == [each.attempt_id for each in known]
    assert list(old.attempts) == known, "all else is what today's rl360 books of the same attempts"
    told = step_json(old)
    assert (told["version_before"], told["staleness"]) == (None, {"mean": None, "max": None})
    assert told.keys() == step_json(new).keys() and told["tokens"] == step_json(new)["tokens"]


def test_its_sums_hold_but_for_those_over_what_it_does_not_say() -> None:
    old, new = StepLedger.from_wire(unpack(OLD, "k"), "k"), read_step(cast(Any, finished_run(1)), "demo", 0)
    checks = [*check_ledger(old)]
    assert all(check.holds for check in checks)
    assert {check.name for check in check_ledger(new)} - {check.name for check in checks} == OVER_VERSIONS - {
        "weights as the step before left them"
    }
    first = replace(old.attempts[0], sampled_tokens=old.attempts[0].sampled_tokens + 1)
    broken = replace(old, attempts=(first, *old.attempts[1:]))
    assert [check.name for check in check_ledger(broken) if not check.holds] == ["every sampled token in one bucket"]


def test_all_that_is_looked_at_of_an_old_run_can_be() -> None:
    """The list, the ledger, each attempt's whole life, from the very objects of that time: config, plan, records."""
    store = MemoryStore()
    store.objects |= OLD_RUN
    s3 = cast(Any, store)
    assert [(row["run"], row["steps"], row["state"]) for row in list_runs(s3)] == [("demo", 1, "open")]
    (ledger,) = read_run(s3, "demo")
    assert unpack(OLD_RUN[step_key("demo", 0, "records.msgpack")], "k")["attempts"][0]["schema_version"] == 2
    told = Told(run_key(TOKEN, "demo"))
    for row in ledger.attempts:
        found = attempt_life(s3, "demo", row.attempt_id, told)
        (each,) = found["tries"]
        assert (each["outcome"], each["tokens"]) == (row.outcome.value, {str(b): n for b, n in row.tokens.items()})
        assert each["sandbox"]["cleanup_evidence"] == "" and "cleanup       " in page(found)
        assert (each["verdict"] is None) == (row.reward is None)
        assert each["verdict"] is None or (each["verdict"]["reward"], each["verdict"]["verifies"]) == (row.reward, True)
    assert store.objects == OLD_RUN


@pytest.mark.parametrize("step", [0, 1])
def test_a_run_of_both_is_read_whole(step: int, tmp_path: Path) -> None:
    wire = unpack(OLD, "k")
    if step == 1:
        wire = orjson.loads(orjson.dumps(wire).replace(b"s000000-", b"s000001-")) | {"step": 1}
        wire["train"]["version_after"] = 2
    store = cast(Any, run_with(pack(wire), step))
    audited = list(audit_run(read_run(store, "demo")))
    assert [ledger.version_before for ledger, _ in audited] == [None if at == step else at for at in range(2)]
    assert all(check.holds for _, checks in audited for check in checks)
    between = {check.name for check in audited[1][1]}
    assert ("weights as the step before left them" in between) == (step == 0)
    ledgers = [ledger for ledger, _ in audited]
    assert ledger_tables("demo", [step_json(each) for each in ledgers])
    for name in (each for names in allowed().values() for each in names):
        assert why(ledgers, reason(name))["why"] == name
    assert waste(ledgers)["steps"] == 2
    for table, row in (pair for each in ledgers for pair in table_rows(each)):
        assert row.keys() == COLUMNS[table].keys()
    assert render_run(ledgers, tmp_path).html.exists()
    assert [row["steps"] for row in list_runs(store)] == [2]
    told = Told(run_key(TOKEN, "demo"))
    text = page(attempt_life(store, "demo", f"s{step:06}-g000-a00", told))
    assert f"version - to {step + 1}" in text


@pytest.mark.parametrize("schema", [1, 2, 5, "3", 3.0, True, None])
def test_any_other_schema_is_refused_by_name_with_a_way_on(schema: Any) -> None:
    store = cast(Any, run_with(pack(unpack(OLD, "k") | {"schema_version": schema}), 1))
    with pytest.raises(CorruptObject, match=r"ledger schema .*, this rl360 reads 3 and 4; .* other steps with --step"):
        read_run(store, "demo")
    assert read_step(store, "demo", 0).step == 0


@pytest.mark.parametrize("field", ["version_before", "versions", "trained_versions"])
def test_a_ledger_of_today_that_lacks_what_schema_3_lacked_is_no_ledger(field: str) -> None:
    wire = read_step(cast(Any, finished_run(1)), "demo", 0).to_wire()
    assert wire["schema_version"] == LEDGER_SCHEMA
    for place in (wire, *wire["attempts"]):
        place.pop(field, None)
    with pytest.raises(CorruptObject, match="is not a ledger"):
        StepLedger.from_wire(wire, "k")
