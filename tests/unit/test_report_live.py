"""The terminal view: a line per step, aligned under the header, with or without a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from rl360.ledger.metrics import step_json
from rl360.report.live import COLUMNS, LiveTable, step_line
from tests.unit.ledger_data import ledger_of, made_up_run
from tests.unit.objective_data import attempt


def show(terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, color_system=None, highlight=False)
    with LiveTable("demo", 3, console) as table:
        for ledger in made_up_run(3, groups=4, size=4):
            table.update_phase("step: rollouts [3/16]")
            table.add_step(step_json(ledger))
    return out.getvalue()


def test_plain_output_is_a_header_and_one_line_per_step() -> None:
    lines = show(terminal=False).splitlines()
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == [name for name, _ in COLUMNS]
    assert [line.split()[0] for line in lines[1:]] == ["0", "1", "2"]


def test_what_keeps_a_run_from_beginning_is_a_line_once() -> None:
    out = io.StringIO()
    with LiveTable("demo", 3, Console(file=out, force_terminal=False, width=80, color_system=None)) as table:
        for text in ("queued behind a", "queued behind a", "queued behind b"):
            table.wait(text)
    assert out.getvalue().splitlines()[1:] == ["queued behind a", "queued behind b"]


def test_a_terminal_also_gets_the_bar() -> None:
    assert "rollouts [3/16]" in show(terminal=True)


def test_a_step_without_reward_or_push() -> None:
    lost = step_json(ledger_of([attempt(0, 0, None, sample=False), attempt(0, 1, None, sample=False)]))
    cells = step_line(lost).plain.split()
    assert cells[:4] == ["0", "-", "-", "100.0%"]
    assert cells[8:10] == ["-", "-"]
