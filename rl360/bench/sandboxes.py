"""`rl360 bench sandboxes`: what the policies for sandboxes reach, and what real ones cost (sandbox_starts.py).

`sim_refusals`, `sim_makespan`: 8,192 simulated starts that all pull from one registry, in waves against all at once.
`warm_share`: 64 simulated starts a step on 4 nodes with 8 images, pinned against anywhere, a node lost on the way.
`oracle_sweep`: every task of the folder given by `--tasks` discriminates in real sandboxes; nothing is left of them.
`soak`, `soak_memory`: `--count` attempts on a real sandbox server of which a share is struck (soak.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from rl360.bench import sandbox_starts as real
from rl360.bench.rows import Options, Row, at_least, at_most, chosen_rows

SIM = ("sim_refusals", "sim_makespan")
WARM = "warm_share"
ORACLE = "oracle_sweep"
SOAK = ("soak", "soak_memory")
KNOWN = (*SIM, WARM, ORACLE, *real.ROWS)  # the soak takes ten minutes and an object store: when it is asked for
MAKESPAN = 1.05
WARM_GOAL = 0.85
SOAK_CONCURRENT = 16  # attempts at once
CACHED = 5  # images that a node's cache takes


def chosen(text: str | None) -> tuple[str, ...]:
    return chosen_rows(text, (*KNOWN, *SOAK), KNOWN)


def measure(names: tuple[str, ...], options: Options) -> Iterator[Row]:
    """The rows; those of one measurement come together."""
    parts: list[tuple[tuple[str, ...], Callable[[Options], Iterator[Row]]]] = [
        (SIM, sim_rows),
        ((WARM,), warm_rows),
        (real.STARTS, real.starts_rows),
        ((real.CPU,), real.cpu_rows),
        ((real.NEIGHBOUR,), real.neighbour_rows),
        ((ORACLE,), oracle),
        (SOAK, soak_rows),
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


def warm_rows(options: Options) -> Iterator[Row]:
    """Three seeds, in each of them every node lost once; a node caches five of the eight images."""
    from rl360.sandboxes.comparisons import Setting, rounds
    from rl360.sandboxes.simulate import World

    mb = World().image_mb
    few = Setting(starts=64, nodes=4, images=8, rounds=4, lose_at=2, image_sigma=0.0, cache_mb=CACHED * mb)
    settings = [replace(few, seed=seed) for seed in range(1 if options.quick else 3)]
    shares = {
        pinned: [
            [float(one.warm.mean()) for one in rounds(setting, pinned=pinned, lost=lost)]
            for setting in settings
            for lost in range(few.nodes)
        ]
        for pinned in (False, True)
    }
    anywhere, ours = (min(min(steps[1:]) for steps in shares[pinned]) for pinned in (False, True))
    after = min(steps[few.lose_at] for steps in shares[True])
    detail = f"the worst step of {len(shares[True])} runs but their first; {after:.3f} right after a node was lost"
    yield at_least(WARM, baseline=anywhere, ours=ours, unit="share", limit=WARM_GOAL, detail=detail)


def oracle(options: Options) -> Iterator[Row]:
    from rl360.bench.oracle import oracle_rows

    yield from oracle_rows(options)


def soak_rows(options: Options) -> Iterator[Row]:
    from rl360.bench.soak import soak

    yield from soak(options.count, SOAK_CONCURRENT, options.say)
