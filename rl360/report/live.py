"""A run in the terminal: one printed line per finished step, and below it a bar with what the step at work is doing.

Finished lines are ordinary output, so they stay in the scrollback and in a log file; only the bar is redrawn. When the
output is no terminal there is no bar.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from rl360.report.numbers import fixed, percent

COLUMNS = (
    ("step", 5),
    ("reward", 7),
    ("kept", 6),
    ("infra", 6),
    ("attempts", 8),
    ("groups", 9),
    ("tokens", 9),
    ("trained", 7),
    ("loss", 8),
    ("push", 16),
    ("seconds", 7),
)


class LiveTable:
    """Context manager; `add_step` takes one entry of `rl360 ledger --json`, `update_phase` a short text."""

    def __init__(self, run: str, steps: int, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._progress = Progress(
            TextColumn("[bold]{task.fields[run]}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[phase]}"),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("run", total=steps, run=run, phase="")
        self._done = 0
        self._waits = ""

    def __enter__(self) -> LiveTable:
        header = "  ".join(name.rjust(width) for name, width in COLUMNS)
        self.console.print(Text(header, style="bold"), soft_wrap=True)
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def add_step(self, step: Mapping[str, Any]) -> None:
        """Print the line of a finished step and move the bar."""
        self._done += 1
        self.console.print(step_line(step), soft_wrap=True)
        self._progress.update(self._task, completed=self._done)

    def update_phase(self, text: str) -> None:
        """Say what the step at work is doing."""
        self._progress.update(self._task, phase=Text(text).plain)

    def wait(self, text: str) -> None:
        """Say what keeps the run from beginning; without a bar in a line of its own, once."""
        self.update_phase(text)
        if text != self._waits and not self.console.is_terminal:
            self.console.print(Text(text), soft_wrap=True)
        self._waits = text


def step_line(step: Mapping[str, Any]) -> Text:
    """One step as a line under `COLUMNS`; groups are trained/all passed/all failed."""
    reward, groups, push = step["reward"], step["groups"], step["push"]
    sampled = step["sampled_tokens"]
    trained = step["tokens"].get("trained", 0)
    cells = {
        "step": (str(step["step"]), "bold"),
        "reward": (fixed(reward["unfiltered_mean_valid"], 3), "green"),
        "kept": (fixed(reward["kept_mean"], 3), ""),
        "infra": (percent(reward["infra_rate"]), "red" if reward["infra_rate"] else "dim"),
        "attempts": (f"{step['attempts']:,}", ""),
        "groups": (f"{groups['trained']}/{groups['all_pass']}/{groups['all_fail']}", ""),
        "tokens": (f"{sampled:,}", ""),
        "trained": (percent(trained / sampled if sampled else None), ""),
        "loss": (fixed(step["loss"], 4), ""),
        "push": ("-" if push is None else f"{push['path']} {push['paused_s']:.2f}s"[:16], "dim"),
        "seconds": (f"{sum(step['phases_s'].values()):.1f}", ""),
    }
    line = Text()
    for index, (name, width) in enumerate(COLUMNS):
        text, style = cells[name]
        line.append(("  " if index else "") + text.rjust(width), style=style)
    return line
