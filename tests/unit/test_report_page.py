"""The report page, its pictures and the step artifact, from synthetic but balanced ledgers."""

from __future__ import annotations

import base64
import re
import struct
from pathlib import Path

import pytest

from rl360.errors import BadInput
from rl360.ledger.metrics import step_json
from rl360.ledger.step import StepLedger
from rl360.report.figures import run_figures
from rl360.report.markdown import ARTIFACT_DPI, PICTURE_BUDGET_BYTES, step_markdown
from rl360.report.page import duration, key_figures, render_run, run_page, step_row
from rl360.report.waste import waste
from tests.unit.ledger_data import ledger_of, made_up_run
from tests.unit.objective_data import attempt


@pytest.fixture(scope="module")
def ledgers() -> list[StepLedger]:
    return made_up_run(6, groups=8, size=4)


@pytest.fixture(scope="module")
def small_figures(ledgers: list[StepLedger]) -> dict[str, bytes]:
    return run_figures([step_json(ledger) for ledger in ledgers], dpi=ARTIFACT_DPI)


def png_size(data: bytes) -> tuple[int, int]:
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_report_is_one_page_that_loads_nothing(ledgers: list[StepLedger], tmp_path: Path) -> None:
    paths = render_run(ledgers, tmp_path / "new" / "report")
    html = paths.html.read_text()
    sources = re.findall(r'(?:src|href)\s*=\s*"([^"]{0,40})', html)
    assert len(sources) == 4 and all(source.startswith("data:image/png;base64,") for source in sources)
    assert "<script" not in html and "url(" not in html and "@import" not in html
    assert "sums of the ledgers hold" in html
    assert "pass@4" in html and "Kept and wasted" in html
    kept = sum(row.trains for ledger in ledgers for row in ledger.attempts)
    assert f"<td>kept</td><td>{kept:,}</td>" in html
    assert html.count('<td class="bar"') == 6
    assert set(paths.pngs) == {"reward", "attempts", "tokens", "anatomy"}
    for path in paths.pngs.values():
        assert png_size(path.read_bytes())[0] > 1000
        assert base64.b64encode(path.read_bytes()).decode() in html


def test_names_are_escaped() -> None:
    ledger = ledger_of([attempt(0, 0, 1.0, domain="<b>x</b>"), attempt(0, 1, 0.0, domain="<b>x</b>")])
    html = run_page("demo", [step_json(ledger)], [], {}, waste([ledger]))
    assert "<b>x</b>" not in html and "&lt;b&gt;x&lt;/b&gt;" in html
    assert "domain \\<b\\>x\\</b\\>" in step_markdown(ledger, {})


def test_a_run_of_empty_and_lost_steps_still_renders(tmp_path: Path) -> None:
    empty = ledger_of([attempt(0, 0, 1.0), attempt(0, 1, 1.0)])
    lost = ledger_of([attempt(0, 0, None, step=1, sample=False), attempt(0, 1, None, step=1, sample=False)], step=1)
    paths = render_run([empty, lost], tmp_path)
    assert "2 of them without an optimizer step" in paths.html.read_text()
    row = step_row(step_json(lost))
    assert (row["reward"], row["loss"], row["trained"], row["push"]) == ("-", "-", "-", "-")
    assert (row["pass_at_k"], row["dlogp"], row["stale"]) == ("-", "-", "-")
    assert "Nothing to train" in step_markdown(lost, {}) and "No push." in step_markdown(lost, {})


def test_no_ledgers_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nothing to report"):
        render_run([], tmp_path)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(BadInput, match=r"cannot write the report to .*; give another --out"):
        render_run([ledger_of([attempt(0, 0, 1.0), attempt(0, 1, 0.0)])], blocked / "sub")


def test_key_figures(ledgers: list[StepLedger]) -> None:
    figures = {label: (value, note) for label, value, note in key_figures([step_json(ledger) for ledger in ledgers])}
    assert figures["steps"] == ("6", "an optimizer step each")
    assert figures["attempts"][0] == "192"
    assert re.fullmatch(r"0\.\d\d → 0\.\d\d", figures["reward"][0])


def test_step_markdown_says_everything_within_the_budget(
    ledgers: list[StepLedger], small_figures: dict[str, bytes]
) -> None:
    text = step_markdown(ledgers[2], small_figures)
    step = step_json(ledgers[2])
    for heading in ("Reward", "Attempts", "Sampled tokens", "Training and push", "Phases", "Run so far"):
        assert f"## {heading}\n" in text
    assert f"| passed | {step['outcomes']['passed']} |" in text
    assert f"| pass@4 ({step['pass_at_k']['4']['groups']} groups) | {step['pass_at_k']['4']['mean']:.3f} |" in text
    assert "importance weight 1.000, |dlogp| 4e-07, staleness 0.00 (at most 0)." in text
    assert "Of the groups that could disagree" in text
    assert f"| trained | {step['tokens']['trained']:,} |" in text
    assert "by broadcast to 2 engines: 1 calls per engine, 3,600,000 bytes, paused 0.21 s" in text
    assert sum(len(data) for data in re.findall(r"base64,([^)]*)\)", text)) <= PICTURE_BUDGET_BYTES
    assert "Left out for size" not in text


def test_pictures_over_the_budget_are_named_not_inlined() -> None:
    ledger = ledger_of([attempt(0, 0, 1.0), attempt(0, 1, 0.0)])
    text = step_markdown(ledger, {"big": b"x" * PICTURE_BUDGET_BYTES, "small": b"y" * 10})
    assert "Left out for size (see the run's report): big." in text
    assert "![small](data:image/png;base64," in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (42.2, "42 s"), (425, "7 min 05 s"), (12_000, "3 h 20 min"), (59.7, "1 min 00 s")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
