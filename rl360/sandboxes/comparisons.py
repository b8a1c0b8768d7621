"""Three comparisons of one world with and without a policy: waves, admission, placement.

`waves`: every attempt has an image of its own and nothing is cached, so all of them pull. `admission`: images are
small; few attempts are heavy builds that use many cpus. `placement`: the same images step after step, then a node is
lost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rl360.errors import BadInput
from rl360.sandboxes.admission import Room
from rl360.sandboxes.simulate import Cluster, Load, Policy, Told, World, summary
from rl360.sandboxes.waves import Pace

NAMES = ("waves", "admission", "placement")
LIGHT_CPUS = 0.5


@dataclass(frozen=True)
class Setting:
    """What the command line can change."""

    seed: int = 0
    starts: int = 8192
    nodes: int = 64
    pulls_per_s: float = 50.0
    pulls_at_once: int = 256
    wave_size: int = 64
    wave_interval_s: float = 0.5
    ready_goal_s: float = 6.0
    heavy_share: float = 0.05
    heavy_cpus: float = 16.0
    images: int = 512
    rounds: int = 6
    lose_at: int = 4
    cache_mb: float = 100_000
    image_sigma: float = 0.4

    def world(self, **more: Any) -> World:
        same = ("nodes", "pulls_per_s", "pulls_at_once", "seed", "cache_mb", "image_sigma")
        return World(**{name: getattr(self, name) for name in same} | more)

    def pace(self, max_concurrent: int) -> Pace:
        return Pace(self.wave_size, self.wave_interval_s, max_concurrent, max_concurrent, self.ready_goal_s)


@dataclass(frozen=True)
class Compared:
    """`figures`: one entry a side; `series`: arrays for the picture, by side and name; `lose_at`: of placement."""

    name: str
    figures: dict[str, dict[str, Any]]
    series: dict[str, dict[str, Any]]
    lose_at: int = 0


def compare(name: str, setting: Setting) -> Compared:
    """One of `NAMES`."""
    if name not in NAMES:
        raise BadInput(f"no comparison {name!r}; choose among {', '.join(NAMES)}")
    return {"waves": waves, "admission": admission, "placement": placement}[name](setting)


def waves(setting: Setting) -> Compared:
    """All at once against waves, every start with a pull: the bound is starts / pulls_per_s."""
    count = setting.starts
    # room for all of them: what is compared is how they start
    room = Room(1000 * count, 1024 * count, 128 * count, 2048 * count)
    world = setting.world(room=room, work_s=600.0)
    load = Load(np.arange(count), np.full(count, LIGHT_CPUS))
    bound_s = count / setting.pulls_per_s
    sides = {
        "all at once": Cluster(world, Policy(pace=None)).play(load),
        "waves": Cluster(world, Policy(pace=setting.pace(count))).play(load),
    }
    figures = {side: {**summary(told), "bound_s": bound_s} for side, told in sides.items()}
    series = {side: {"ready_s": np.sort(told.ready_s), "refused_s": told.refused_s} for side, told in sides.items()}
    return Compared("waves", figures, series)


def admission(setting: Setting) -> Compared:
    """Attempts placed by their number alone against attempts that reserve what they use."""
    random = np.random.default_rng(setting.seed)
    count = setting.starts
    heavy = random.random(count) < setting.heavy_share
    cpus = np.where(heavy, setting.heavy_cpus, LIGHT_CPUS)
    world = setting.world(image_mb=1.0, image_sigma=0.0)
    if setting.heavy_cpus * 1000 > world.room.milli_cpus:
        most = world.room.milli_cpus // 1000
        raise BadInput(f"--heavy-cpus {setting.heavy_cpus:g}: more than the {most} of a node; give at most {most}")
    if heavy.all():
        share = f"--heavy-share {setting.heavy_share:g} of {count} starts"
        raise BadInput(f"{share}: all of them are heavy, and no neighbour is left; give a smaller share or more starts")
    load = Load(np.zeros(count, np.int64) + np.arange(count) % setting.images, cpus)
    # by number alone: as many as would fit if all were light
    at_once = int(setting.nodes * world.room.milli_cpus / 1000 / LIGHT_CPUS)
    pace = replace(setting.pace(at_once), size=at_once, ready_goal_s=1e9)
    figures, series = {}, {}
    for side, reserved in (("no reservations", False), ("reservations", True)):
        told = Cluster(world, Policy(pace=pace, reserved=reserved)).play(load)
        slow = told.slowdown[~heavy]
        figures[side] = {
            "neighbours_slowdown_mean": round(float(slow.mean()), 4),
            "neighbours_slowdown_p95": round(float(np.quantile(slow, 0.95)), 4),
            "neighbours_slowdown_max": round(float(slow.max()), 4),
            "heavy_ready_p95_s": round(float(np.quantile(told.ready_s[heavy], 0.95)), 1) if heavy.any() else None,
            "light_ready_p95_s": round(float(np.quantile(told.ready_s[~heavy], 0.95)), 1),
            "ended_last_s": round(float(told.ended_s.max()), 1),
            "heavy": int(heavy.sum()),
        }
        series[side] = {"slowdown": np.sort(slow)}
    return Compared("admission", figures, series)


def placement(setting: Setting) -> Compared:
    """Anywhere against pinned, step after step with the same images; one node is lost before step `lose_at`."""
    figures: dict[str, dict[str, Any]] = {}
    series: dict[str, dict[str, Any]] = {}
    for side, pinned in (("anywhere", False), ("pinned", True)):
        told = rounds(setting, pinned=pinned)
        shares = [float(one.warm.mean()) for one in told]
        figures[side] = {
            "warm_share": [round(share, 4) for share in shares],
            "pulls": [one.pulls for one in told],
            "pulls_total": sum(one.pulls for one in told),
            "ready_last_s": [round(one.makespan_s, 1) for one in told],
        }
        series[side] = {"warm_share": shares, "pulls": [one.pulls for one in told]}
    return Compared("placement", figures, series, setting.lose_at)


def rounds(setting: Setting, *, pinned: bool, lost: int = 0) -> list[Told]:
    """Each step's `starts` attempts over `images` in random order; node number `lost` is lost before `lose_at`."""
    random = np.random.default_rng(setting.seed)
    cluster = Cluster(setting.world(work_s=30.0), Policy(pace=setting.pace(setting.starts), pinned=pinned))
    told = []
    for step in range(setting.rounds):
        if step == setting.lose_at:
            cluster.lose(sorted(cluster.nodes)[lost])
        images = random.permutation(np.arange(setting.starts) % setting.images)
        told.append(cluster.play(Load(images, np.full(setting.starts, LIGHT_CPUS))))
    return told
