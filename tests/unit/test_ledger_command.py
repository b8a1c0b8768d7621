"""What `rl360 ledger` prints, and that a book that does not balance is seen."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from rl360.commands.ledger_tables import ledger_tables, print_checks
from rl360.errors import CorruptObject
from rl360.ledger.checks import Check
from rl360.ledger.metrics import step_json
from rl360.ledger.read import audit_run, read_step
from rl360.ledger.step import StepLedger, write_ledger
from rl360.report.numbers import DASH
from rl360.store.manifest import Manifest, commit_manifest
from tests.unit.ledger_data import made_up_run
from tests.unit.memory_store import MemoryStore

LEDGERS = made_up_run(3, groups=12, size=8)


def check_run(ledgers: list[StepLedger]) -> dict[int, list[Check]]:
    return {ledger.step: checks for ledger, checks in audit_run(ledgers)}


def test_tables_fit_a_terminal_and_hold_the_sums() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, color_system=None, highlight=False)
    for table in ledger_tables("demo", [step_json(ledger) for ledger in LEDGERS]):
        console.print(table)
    text = out.getvalue()
    assert "…" not in text
    total = sum(row.sampled_tokens for ledger in LEDGERS for row in ledger.attempts)
    assert ["all", f"{total:,}"] in [line.split()[:2] for line in text.splitlines()]
    assert "losses by cause" in text


def test_a_kl_and_a_critic_have_a_table_where_there_is_one() -> None:
    rows = [step_json(ledger) for ledger in LEDGERS]
    titles = [table.title for table in ledger_tables("demo", rows)]
    rows[1] |= {"kl_mean": 0.0213, "value_loss": 0.5, "explained_variance": -0.25}
    (added,) = [table for table in ledger_tables("demo", rows) if table.title not in titles]
    out = io.StringIO()
    Console(file=out, width=80, color_system=None, highlight=False).print(added)
    assert out.getvalue().split("\n")[1].split() == ["step", "KL", "value", "loss", "explained", "variance"]
    assert [line.split() for line in out.getvalue().splitlines()[2:]] == [
        ["0", DASH, DASH, DASH],
        ["1", "0.021", "0.5", "-0.25"],
        ["2", DASH, DASH, DASH],
    ]
    (narrow,) = [each for each in ledger_tables("demo", [rows[0] | {"kl_mean": 0.1}]) if each.title == added.title]
    out = io.StringIO()
    Console(file=out, width=80, color_system=None, highlight=False).print(narrow)
    assert out.getvalue().startswith("reference policy and critic"), "in one line"


def test_checks_are_one_line_for_a_run_and_one_each_for_a_step() -> None:
    out = io.StringIO()
    console = Console(file=out, width=200, color_system=None, highlight=False)
    print_checks(console, check_run(LEDGERS), in_full=False)
    assert out.getvalue().strip() == "44 of 44 sums hold over 3 steps"
    print_checks(console, {1: check_run(LEDGERS)[1]}, in_full=True)
    assert out.getvalue().count("holds ") == 15


def test_every_sum_has_its_row_in_the_page() -> None:
    witness = {"samples": 0, "tokens": 0, "digest": "", "cannot_tell": 1}
    seen = replace(LEDGERS[1], train=replace(LEDGERS[1].train, witness=witness))
    empty = replace(LEDGERS[2], train=replace(LEDGERS[2].train, status="empty"))
    names = {check.name for checks in check_run([LEDGERS[0], seen, empty]).values() for check in checks}
    page = (Path(__file__).resolve().parents[2] / "docs" / "ledger.md").read_text()
    table = page.split("## Sums that must hold")[1].split("\n\n")[2]
    rows = [line.split("|")[1].partition("(")[0].strip() for line in table.splitlines()[2:]]
    assert sorted(rows) == sorted(names)


def test_a_ledger_that_is_not_what_its_step_committed_is_refused() -> None:
    store, book = MemoryStore(), LEDGERS[0]
    ref = write_ledger(store, book)
    assert step_json(read_step(store, book.run, 0)) == step_json(book)  # not committed yet: nothing to compare
    commit_manifest(store, Manifest(run=book.run, step=0, task="report", objects=[ref]))
    assert step_json(read_step(store, book.run, 0)) == step_json(book)
    data = store.get(ref.key)
    store.put(ref.key, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptObject, match="is not what its manifest committed"):
        read_step(store, book.run, 0)


def test_a_sample_trained_in_two_steps_is_seen() -> None:
    first = LEDGERS[0]
    again = replace(LEDGERS[1], attempts=first.attempts, train=first.train)
    broken = [check for check in check_run([first, again])[1] if not check.holds]
    assert [check.name for check in broken] == [
        "attempts of this step",
        "one version on",
        "trained once",
    ]
    assert broken[0].left == len(first.attempts)
    assert broken[2].left == len(first.trained_ids)


def test_steps_whose_weights_do_not_follow_one_another_are_seen() -> None:
    first, second = LEDGERS[0], LEDGERS[1]
    skipped = replace(second, version_before=3, train=replace(second.train, version_after=4))
    broken = [check for check in check_run([first, skipped])[1] if not check.holds]
    assert [check.line() for check in broken] == ["version before 3 != version left 1"]
    assert all(check.holds for check in check_run([first, LEDGERS[2]])[2]), "a step between them has no ledger yet"
