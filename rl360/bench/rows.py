"""What a benchmark prints: rows with a goal, each measured beside its baseline in the same run.

`to_json` is the fixed format `{"row","baseline","ours","ratio","unit","goal","holds"}`; ratio = ours / baseline, and
both are null where a row has only an absolute goal. `detail` is for people only.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl360.bench.shape import FULL, Shape
from rl360.errors import BadInput


@dataclass(frozen=True)
class Options:
    """How much is measured. `quick` is for a look, not for figures; `shape` is the trajectory of all rows; `count` and
    `shard` are the collection row's, `tasks` the folder of `oracle_sweep`; `say` tells a person what goes on."""

    quick: bool = False
    shape: Shape = FULL
    count: int = 8192
    shard: int = 512
    tasks: Path | None = None
    say: Callable[[str], None] = lambda _line: None


@dataclass(frozen=True)
class Row:
    """One figure. `goal` is the condition in words, `holds` whether it is met."""

    row: str
    baseline: float | None
    ours: float
    unit: str
    goal: str
    holds: bool
    detail: str = ""

    @property
    def ratio(self) -> float | None:
        return None if not self.baseline else self.ours / self.baseline

    def to_json(self) -> dict[str, Any]:
        return {
            "row": self.row,
            "baseline": _rounded(self.baseline),
            "ours": _rounded(self.ours),
            "ratio": _rounded(self.ratio),
            "unit": self.unit,
            "goal": self.goal,
            "holds": self.holds,
        }


def ratio_at_most(
    name: str, *, baseline: float, ours: float, unit: str, limit: float, goal: str = "", detail: str = ""
) -> Row:
    return Row(name, baseline, ours, unit, goal or f"ratio <= {limit:g}", ours <= limit * baseline, detail)


def at_most(name: str, *, ours: float, unit: str, limit: float, baseline: float | None = None, detail: str = "") -> Row:
    return Row(name, baseline, ours, unit, f"<= {limit:g} {unit}", ours <= limit, detail)


def at_least(
    name: str, *, ours: float, unit: str, limit: float, baseline: float | None = None, detail: str = ""
) -> Row:
    return Row(name, baseline, ours, unit, f">= {limit:g} {unit}", ours >= limit, detail)


def chosen_rows(text: str | None, known: tuple[str, ...], default: tuple[str, ...]) -> tuple[str, ...]:
    """Names of rows from `a,b`; None means `default`."""
    if text is None:
        return default
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise BadInput(f"--rows {unknown[0] if unknown else text!r}: no such row; choose among {', '.join(known)}")
    return names


def median_of(measure: Callable[[], float], times: int) -> float:
    """The median of a repeated measurement."""
    return statistics.median(measure() for _ in range(times))


def machine() -> str:
    """What the figures were measured on, in one line."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass  # not Linux, or a processor without a name
    return f"{len(os.sched_getaffinity(0))} cores ({name}), Python {platform.python_version()}, {sys.platform}"


def table(rows: Iterable[Row]) -> str:
    """The rows as columns, details below them."""
    rows = list(rows)
    head = ("row", "baseline", "ours", "ratio", "unit", "goal", "")
    cells = [
        (r.row, _shown(r.baseline), _shown(r.ours), _shown(r.ratio), r.unit, r.goal, "ok" if r.holds else "MISSED")
        for r in rows
    ]
    widths = [max(len(line[i]) for line in [head, *cells]) for i in range(len(head))]
    lines = ["  ".join(f"{text:<{width}}" for text, width in zip(line, widths, strict=True)) for line in [head, *cells]]
    notes = [f"{r.row}: {r.detail}" for r in rows if r.detail]
    return "\n".join([*(line.rstrip() for line in lines), *([""] if notes else []), *notes])


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
