"""Pictures of the simulator's comparisons, as PNG bytes. No display, no global state."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from rl360.sandboxes.comparisons import Compared

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e4e8ec"
COLOURS = ("#d9822b", "#1b7f6b")  # without the policy, with it


def picture(compared: Compared, dpi: int = 144) -> bytes:
    """Two panels: what is gained, and what it is gained from."""
    figure = Figure(figsize=(9.6, 3.6), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.tick_params(colors=MUTED, labelsize=9, length=0)
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
    {"waves": _waves, "admission": _admission, "placement": _placement}[compared.name](left, right, compared)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None}, pil_kwargs={"optimize": True})
    return out.getvalue()


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", color=INK, fontsize=10, fontweight="bold")
    axes.set_xlabel(x, color=MUTED, fontsize=9)
    axes.set_ylabel(y, color=MUTED, fontsize=9)


def _sides(compared: Compared) -> list[tuple[str, dict[str, Any], str]]:
    return [(side, found, colour) for (side, found), colour in zip(compared.series.items(), COLOURS, strict=True)]


def _waves(left: Axes, right: Axes, compared: Compared) -> None:
    bound = 0.0
    for side, found, colour in _sides(compared):
        ready, bound = found["ready_s"], compared.figures[side]["bound_s"]
        left.plot(ready, np.arange(1, len(ready) + 1), color=colour, label=f"{side}: last after {ready[-1]:,.0f} s")
        refused = np.sort(found["refused_s"])
        right.plot(
            np.concatenate([[0.0], refused, [ready[-1]]]),
            [*range(len(refused) + 1), len(refused)],
            color=colour,
            label=f"{side}: {len(refused):,}",
        )
    left.axvline(bound, color=MUTED, linestyle=":", label=f"pulls / rate: {bound:,.0f} s")
    for axes in (left, right):
        axes.set_xlim(left=0)
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    _label(left, "Sandboxes ready", "seconds", "sandboxes")
    _label(right, "Pulls that the registry refused", "seconds", "refusals so far")


def _admission(left: Axes, right: Axes, compared: Compared) -> None:
    for side, found, colour in _sides(compared):
        slow = found["slowdown"]
        p95 = compared.figures[side]["neighbours_slowdown_p95"]
        left.plot(slow, np.arange(1, len(slow) + 1) / len(slow), color=colour, label=f"{side}: p95 {p95:.2f} x")
    left.legend(frameon=False, fontsize=8, labelcolor=INK, loc="lower right")
    _label(left, "Neighbours of heavy builds", "times as long as alone", "share of attempts")
    waits = ("light_ready_p95_s", "heavy_ready_p95_s", "ended_last_s")
    at = np.arange(len(waits))
    for index, (side, _found, colour) in enumerate(_sides(compared)):
        values = [compared.figures[side][name] or 0.0 for name in waits]
        right.bar(at + 0.4 * index - 0.2, values, 0.38, color=colour, label=side)
    right.set_xticks(at, ["light ready, p95", "heavy ready, p95", "all done"])
    right.legend(frameon=False, fontsize=8, labelcolor=INK)
    _label(right, "What waiting costs", "", "seconds")


def _placement(left: Axes, right: Axes, compared: Compared) -> None:
    for side, found, colour in _sides(compared):
        steps = np.arange(len(found["warm_share"]))
        left.plot(steps, found["warm_share"], color=colour, marker="o", markersize=4, label=side)
        total = compared.figures[side]["pulls_total"]
        right.plot(steps, found["pulls"], color=colour, marker="o", markersize=4, label=f"{side}: {total:,} in all")
    left.set_ylim(-0.02, 1.05)
    left.axvline(compared.lose_at, color=MUTED, linestyle=":", label="a node was lost")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    _label(left, "Starts whose image was on the node", "step", "share")
    _label(right, "Pulls", "step", "pulls a step")
