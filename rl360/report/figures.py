"""The pictures of a run, as PNG bytes, drawn from the `step_json` of its ledgers alone.

Drawn with matplotlib's object interface on the Agg canvas: no display, no global state, safe in a worker thread.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from rl360.ledger.outcomes import SAMPLED
from rl360.report.numbers import rolling_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Step = Mapping[str, Any]

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e4e8ec"
PASS, PASS_PALE, FAIL, FAIL_PALE = "#1b7f6b", "#a8d5cb", "#d9822b", "#f3d3ae"
INFRA, OTHER = "#5b3a6e", "#c3c9d0"
PHASE_COLOURS = (
    "#9fb3c8",
    "#c3c9d0",
    "#486581",
    "#7fb2a8",
    "#8fa3b8",
    "#1b7f6b",
    "#d9822b",
    "#b08bc4",
    "#e0b7a0",
    "#6b7785",
)
BARS = {
    "trained_pass": ("trained, passed", PASS),
    "trained_fail": ("trained, failed", FAIL),
    "all_pass": ("in a group that all passed", PASS_PALE),
    "all_fail": ("in a group that all failed", FAIL_PALE),
    "other": ("dropped, other reason", OTHER),
    "timeout_scored": ("agent timeout, scored 0", "#6b7785"),
    "infra": ("lost to infrastructure", INFRA),
}
BUCKET_COLOURS = {
    "trained": PASS,
    "zero_disagreement": PASS_PALE,
    "insufficient_valid": FAIL_PALE,
    "infra": INFRA,
    "after_truncation": FAIL,
    "over_length": "#c0563d",
    "prefix_break": "#8c2f39",
    "stale": "#8fa3b8",
}
ROLLING_STEPS = 5
MIN_STEPS = 10
MANY_STEPS = 60
# One box for all pictures, so that step k stands at the same place in each of them on the page.
AXES_BOX = (0.055, 0.14, 0.70, 0.73)


def run_figures(steps: Sequence[Step], dpi: int = 144) -> dict[str, bytes]:
    """PNG bytes by name: reward, attempts, anatomy, tokens. `steps`: `metrics.step_json` of at least one ledger."""
    drawings = {"reward": _reward, "attempts": _attempts, "anatomy": _anatomy, "tokens": _tokens}
    return {name: _png(draw, steps, dpi) for name, draw in drawings.items()}


def _png(draw: Any, steps: Sequence[Step], dpi: int) -> bytes:
    figure = Figure(figsize=(9.6, 3.4), dpi=dpi)
    FigureCanvasAgg(figure)
    axes = figure.add_axes(AXES_BOX)
    _style(axes)
    draw(axes, steps)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None}, pil_kwargs={"optimize": True})
    return out.getvalue()


def _style(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_xlabel("step", color=MUTED, fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16, min_n_ticks=1))


def _title(axes: Axes, text: str) -> None:
    left_edge = -AXES_BOX[0] / AXES_BOX[2]  # of the picture, in axes coordinates
    axes.set_title(text, loc="left", x=left_edge, color=INK, fontsize=11, fontweight="bold", pad=12)


def _legend(axes: Axes, *, reverse: bool = False) -> None:
    axes.legend(
        loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9, labelcolor=INK, reverse=reverse
    )


def _numbers(steps: Sequence[Step]) -> np.ndarray:
    return np.array([step["step"] for step in steps], dtype=np.float64)


def _limit_steps(axes: Axes, at: np.ndarray) -> None:
    """Room for at least `MIN_STEPS`, so that the first steps of a run are bars and not walls."""
    axes.set_xlim(at[0] - 0.6, max(at[-1], at[0] + MIN_STEPS - 1) + 0.6)


def _stack(axes: Axes, at: np.ndarray, layers: Sequence[tuple[str, str, np.ndarray]]) -> None:
    """Stacked bars, one layer a (label, colour, values `[steps]`); layers that are zero everywhere are left out."""
    base = np.zeros(len(at))
    width = 0.82 if len(at) <= MANY_STEPS else 1.0
    for label, colour, values in layers:
        if values.any():
            axes.bar(at, values, width, bottom=base, color=colour, label=label, linewidth=0)
            base = base + values
    _limit_steps(axes, at)
    axes.set_ylim(0, float(base.max()) * 1.02 or 1.0)
    _legend(axes, reverse=True)


def _attempts(axes: Axes, steps: Sequence[Step]) -> None:
    bars = [step["attempt_bars"] for step in steps]
    layers = [
        (label, colour, np.array([bar.get(name, 0) for bar in bars], float)) for name, (label, colour) in BARS.items()
    ]
    _stack(axes, _numbers(steps), layers)
    _title(axes, "Attempts per step, by what became of them")


def _reward(axes: Axes, steps: Sequence[Step]) -> None:
    at = _numbers(steps)
    rewards = [step["reward"] for step in steps]
    unfiltered = [reward["unfiltered_mean_valid"] for reward in rewards]
    kept = [reward["kept_mean"] for reward in rewards]
    rolling = rolling_mean(unfiltered, ROLLING_STEPS)
    axes.plot(
        at,
        _floats(kept),
        color=FAIL,
        linewidth=1.2 if len(at) <= MANY_STEPS else 0.7,
        marker="o",
        markersize=2.5 if len(at) <= MANY_STEPS else 0,
        alpha=0.9,
        label="kept (trained) attempts",
    )
    axes.plot(
        at,
        _floats(unfiltered),
        color=PASS,
        linewidth=0,
        marker="o",
        markersize=3.5,
        alpha=0.55,
        label="all verified attempts",
    )
    axes.plot(at, _floats(rolling), color=PASS, linewidth=2.4, label=f"all verified, {ROLLING_STEPS}-step mean")
    infra = np.array([reward["infra_rate"] or 0.0 for reward in rewards])
    axes.bar(at, infra, 0.82, color=INFRA, alpha=0.75, linewidth=0, label="infra rate (not a reward)")
    _limit_steps(axes, at)
    values = [value for value in unfiltered + kept if value is not None]
    axes.set_ylim(min([0.0, *values]), max([1.0, *values]))
    _title(axes, "Reward before and after the filter")
    _legend(axes)


def _anatomy(axes: Axes, steps: Sequence[Step]) -> None:
    names = list(dict.fromkeys(name for step in steps for name in step["phases_s"]))
    layers = [
        (
            name.replace("_", " "),
            PHASE_COLOURS[i % len(PHASE_COLOURS)],
            np.array([step["phases_s"].get(name, 0.0) for step in steps]),
        )
        for i, name in enumerate(names)
    ]
    _stack(axes, _numbers(steps), layers)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))
    _title(axes, "Anatomy of a step: wall seconds per phase")


def _tokens(axes: Axes, steps: Sequence[Step]) -> None:
    counts = [step["tokens"] for step in steps]
    layers = [
        (
            bucket.value.replace("_", " "),
            BUCKET_COLOURS.get(bucket.value, OTHER),
            np.array([count.get(bucket.value, 0) for count in counts], float),
        )
        for bucket in SAMPLED
    ]
    _stack(axes, _numbers(steps), layers)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _thousands(value)))
    _title(axes, "Where every sampled token went")


def _thousands(value: float) -> str:
    return f"{value / 1e6:g}M" if value >= 1e6 else f"{value / 1e3:g}k" if value >= 1e3 else f"{value:g}"


def _floats(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values])
