"""The exported tables hold what the ledgers hold, and every query printed in docs/ledger.md runs over them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, cast

import duckdb
import pytest

from rl360.errors import BadInput
from rl360.ledger.metrics import step_json, token_counts
from rl360.ledger.read import read_run
from rl360.ledger.step import StepLedger
from rl360.report.export import COLUMNS, export, table_rows
from tests.unit.ledger_data import ledger_of, made_up_run
from tests.unit.ledger_run import finished_run
from tests.unit.objective_data import attempt

ROOT = Path(__file__).resolve().parents[2]
QUERIES = re.findall(r"```sql\n(.*?)```", (ROOT / "docs" / "ledger.md").read_text(), re.DOTALL)
LEDGERS = made_up_run(3, groups=12, size=8)
REAL = read_run(cast(Any, finished_run(2)), "demo")
ROWS = [row for ledger in LEDGERS for row in ledger.attempts]


def opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(folder)
    connection = duckdb.connect()
    connection.execute((folder / "views.sql").read_text())
    return connection


@pytest.fixture
def sql(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    rows = export(iter(LEDGERS), tmp_path)
    assert rows["attempts"] == len(ROWS) and rows["steps"] == 3
    assert {path.name for path in tmp_path.iterdir()} == {"views.sql", *(f"{name}.jsonl" for name in COLUMNS)}
    return opened(tmp_path, monkeypatch)


def test_there_are_queries_in_the_page() -> None:
    assert len(QUERIES) >= 8


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: " ".join(query.split())[:48])
def test_every_query_of_the_page_runs(query: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a run with second tries and tasks that agree, so that all but the two that look for faults find something."""
    export(REAL, tmp_path)
    found = opened(tmp_path, monkeypatch).execute(query).fetchall()
    assert (found == []) == ("HAVING booked !=" in query or "HAVING abs(" in query), found[:3]


def test_a_book_that_does_not_balance_is_seen_by_the_queries_that_look_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(LEDGERS, tmp_path)
    lines = (tmp_path / "attempts.jsonl").read_text().splitlines()
    at = next(index for index, line in enumerate(lines) if json.loads(line)["class"] == "kept")
    row = json.loads(lines[at])
    lines[at] = json.dumps({**row, "sampled_tokens": row["sampled_tokens"] + 1, "loss_weight": 0.5})
    (tmp_path / "attempts.jsonl").write_text("\n".join(lines))
    connection = opened(tmp_path, monkeypatch)
    checks = [query for query in QUERIES if "HAVING booked !=" in query or "HAVING abs(" in query]
    assert [len(connection.execute(query).fetchall()) for query in checks] == [1, 1]


def test_the_tables_hold_what_the_ledgers_hold(sql: Any) -> None:
    for ledger in LEDGERS:
        found = sql.execute(
            "SELECT bucket, sum(tokens) FROM tokens WHERE step = ? AND sampled GROUP BY ALL", [ledger.step]
        )
        assert dict(found.fetchall()) == token_counts(ledger)
    columns = ", ".join(("attempt_id", "outcome", "bucket", "reward", "score", "advantage", "loss_weight", "seconds"))
    found = sql.execute(f"SELECT {columns}, versions, truncated FROM attempts ORDER BY step, attempt_id").fetchall()
    assert found == [
        (
            *(row.attempt_id, row.outcome, row.bucket, row.reward, row.score, row.advantage),
            *(row.loss_weight, row.seconds, list(row.versions), row.truncated),
        )
        for row in ROWS
    ]
    assert math.isclose(sql.execute("SELECT sum(seconds) FROM attempts").fetchone()[0], sum(r.seconds for r in ROWS))
    stored = sql.execute("SELECT metrics FROM steps ORDER BY step").fetchall()
    assert [json.loads(text) for (text,) in stored] == [json.loads(json.dumps(step_json(ledger))) for ledger in LEDGERS]


def test_rows_have_exactly_the_columns_of_their_table() -> None:
    for name, row in table_rows(LEDGERS[0]):
        assert set(row) == set(COLUMNS[name]), name


def test_tables_of_nothing_are_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kept attempt, no push, no reward at all: the types still hold, and so do the queries."""
    lost: list[StepLedger] = [ledger_of([attempt(0, 0, None, sample=False), attempt(0, 1, None, sample=False)])]
    for ledgers in (lost, []):
        export(ledgers, tmp_path)
        connection = opened(tmp_path, monkeypatch)
        assert connection.execute("SELECT count(*), avg(reward) FROM attempts").fetchone() == (2 * len(ledgers), None)
        for query in QUERIES:
            connection.execute(query).fetchall()


def test_an_export_replaces_an_earlier_one_and_says_where_it_cannot(tmp_path: Path) -> None:
    export(LEDGERS, tmp_path / "new" / "place")
    assert export(LEDGERS[:1], tmp_path / "new" / "place")["steps"] == 1
    assert len((tmp_path / "new" / "place" / "steps.jsonl").read_text().splitlines()) == 1
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(BadInput, match=r"cannot write the export to .*; give another folder"):
        export(LEDGERS, blocked / "sub")
