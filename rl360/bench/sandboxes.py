"""`rl360 bench sandboxes`: what the policies for sandboxes reach, and what real ones cost (sandbox_starts.py).

`sim_refusals`, `sim_makespan`: 8,192 simulated starts that all pull from one registry, in waves against all at once.
`warm_share`: 64 simulated starts a step on 4 nodes with 8 images, pinned against anywhere; the worst step after the
  first, over every node that may be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rl360.bench import sandbox_starts as real
from rl360.bench.rows import Options, Row, at_least, at_most, chosen_rows

SIM = ("sim_refusals", "sim_makespan")
WARM = "warm_share"
KNOWN = (*SIM, WARM, *real.ROWS)
MAKESPAN = 1.05
WARM_GOAL = 0.85


def chosen(text: str | None) -> tuple[str, ...]:
    return chosen_rows(text, KNOWN, KNOWN)


def measure(names: tuple[str, ...], options: Options) -> Iterator[Row]:
    """The rows; those of one measurement come together."""
    parts: list[tuple[tuple[str, ...], Callable[[Options], Iterator[Row]]]] = [
        (SIM, sim_rows),
        ((WARM,), warm_rows),
        (real.STARTS, real.starts_rows),
        ((real.CPU,), real.cpu_rows),
        ((real.NEIGHBOUR,), real.neighbour_rows),
    ]
    for rows, make in parts:
        if set(rows) & set(names):
            yield from (row for row in make(options) if row.row in names)


def sim_rows(options: Options) -> Iterator[Row]:
    """The worst of three seeds."""
    from rl360.sandboxes.comparisons import Setting, waves

    found = [waves(Setting(seed=seed)).figures for seed in range(1 if options.quick else 3)]
    worst = max(found, key=lambda figures: (figures["waves"]["refusals"], figures["waves"]["ready_last_s"]))
    all_at_once, ours = worst["all at once"], worst["waves"]
    bound_s = ours["bound_s"]
    detail = f"first ready after {ours['ready_first_s']:.1f} s against {all_at_once['ready_first_s']:.1f} s"
    yield at_most(
        "sim_refusals",
        baseline=all_at_once["refusals"],
        ours=ours["refusals"],
        unit="pulls",
        limit=0,
        detail=f"{ours['pulls']:,} pulls; {detail}",
    )
    yield Row(
        "sim_makespan",
        all_at_once["ready_last_s"],
        ours["ready_last_s"],
        "s",
        f"<= {MAKESPAN:g} x pulls / rate",
        ours["ready_last_s"] <= MAKESPAN * bound_s,
        f"pulls / rate is {bound_s:.1f} s: {ours['ready_last_s'] / bound_s:.3f} x, all at once "
        f"{all_at_once['ready_last_s'] / bound_s:.2f} x",
    )


def warm_rows(_options: Options) -> Iterator[Row]:
    """Every node is lost once, each time in a new cluster."""
    from rl360.sandboxes.comparisons import Setting, rounds

    setting = Setting(starts=64, nodes=4, images=8, rounds=4, lose_at=2)
    anywhere, ours = (
        min(float(one.warm.mean()) for lost in range(4) for one in rounds(setting, pinned=pinned, lost=lost)[1:])
        for pinned in (False, True)
    )
    detail = "worst step after the first, a node lost before the third; share of starts whose image was on their node"
    yield at_least(WARM, baseline=anywhere, ours=ours, unit="share", limit=WARM_GOAL, detail=detail)
