"""A cluster's sandboxes in discrete events: the product's own `Waves`, `Gate` and `Placement` over a modelled world.

Modelled: a registry that serves `pulls_per_s` in the order of asking and refuses beyond `pulls_at_once`; the time an
image takes over a node's own line; one pull per node and image, however many wait for it; node caches that drop what
was used longest ago; starts that fail; attempts that share a node's cpus in proportion to what they use. Refused starts
come back after a pause that doubles, failed ones after a second. Not modelled: lines shared by pulls of a node, layers
that images share, the scheduler's own time, memory that runs out, engines. An attempt uses no more cpus than it says.
All that is random is drawn from `seed` before the first event.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl360.errors import Rl360Error
from rl360.sandboxes.admission import BOUNDLESS, Gate, Reservations, Room
from rl360.sandboxes.placement import Placement
from rl360.sandboxes.waves import Pace, Waves

NODE = Room(milli_cpus=64_000, memory_mb=256_000, pids=65_536, disk_mb=1 << 20)


@dataclass(frozen=True)
class World:
    """What there is. Medians of log-normal values where a `_sigma` says so."""

    nodes: int = 64
    room: Room = NODE
    cache_mb: float = 100_000
    pulls_per_s: float = 50
    pulls_at_once: int = 256
    line_mb_per_s: float = 1000
    image_mb: float = 600
    image_sigma: float = 0.4
    boot_s: float = 0.8
    boot_sigma: float = 0.2
    fail_share: float = 0.01
    work_s: float = 60
    work_sigma: float = 0.5
    backoff_s: tuple[float, float] = (10, 300)  # first and longest pause, as a kubelet's
    seed: int = 0


@dataclass(frozen=True)
class Policy:
    """How the world is used. No pace: all at once. Not reserved: as many as the pace allows, wherever they land."""

    pace: Pace | None = None
    reserved: bool = True
    pinned: bool = True


@dataclass(frozen=True)
class Load:
    """Attempts that are asked for together: image `[n]`, cpus each uses `[n]`."""

    images: NDArray[np.int64]
    cpus: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.images)


@dataclass
class Told:
    """What became of a load. Times from when it was asked for, `[n]`; warm: its image was there when it first began."""

    ready_s: NDArray[np.float64]
    ended_s: NDArray[np.float64]
    slowdown: NDArray[np.float64]
    warm: NDArray[np.bool_]
    refused_s: list[float] = field(default_factory=list)
    pulls: int = 0
    failures: int = 0
    most_live: int = 0

    @property
    def makespan_s(self) -> float:
        """Until the last sandbox was ready."""
        return float(self.ready_s.max())


class _Node:
    """One node: what its cpus do, in a clock that runs slower while they are asked for more than there is."""

    def __init__(self, world: World) -> None:
        self.cpus, self.cache_mb = world.room.milli_cpus / 1000, world.cache_mb
        self.images: OrderedDict[int, float] = OrderedDict()  # image -> MB, used longest ago first
        self.pulling: dict[int, list[int]] = {}  # image -> attempts that wait for it
        self.running: list[tuple[float, int]] = []  # heap of (own clock at its end, attempt)
        self.using = 0.0
        self.version = 0
        self._clock = self._at = 0.0

    @property
    def speed(self) -> float:
        return min(1.0, self.cpus / self.using) if self.using else 1.0

    def clock(self, now: float) -> float:
        self._clock += (now - self._at) * self.speed
        self._at = now
        return self._clock

    def next_end(self, now: float) -> float:
        return now + max(0.0, self.running[0][0] - self.clock(now)) / self.speed

    def keep(self, image: int, size_mb: float) -> None:
        self.images[image] = size_mb
        while len(self.images) > 1 and sum(self.images.values()) > self.cache_mb:
            self.images.popitem(last=False)


class Cluster:
    """One world under one policy; loads are played one after the other, caches stay."""

    def __init__(self, world: World, policy: Policy) -> None:
        self.world, self.policy = world, policy
        self.random = np.random.default_rng(world.seed)
        self.now = 0.0
        self.nodes = {f"node-{index:03}": _Node(world) for index in range(world.nodes)}
        self._sizes: dict[int, float] = {}
        self.lost: set[str] = set()
        self._registry_at, self._registry_holds = 0.0, 0

    def lose(self, name: str) -> None:
        """The node and its cache are away; between two loads."""
        self.lost.add(name)
        self.nodes[name] = _Node(self.world)

    def play(self, load: Load) -> Told:
        return _Play(self, load).run()

    def size_mb(self, image: int) -> float:
        """The same image has the same size under every policy."""
        if image not in self._sizes:
            draw = np.random.default_rng([self.world.seed, image]).normal()
            self._sizes[image] = self.world.image_mb * math.exp(self.world.image_sigma * draw)
        return self._sizes[image]

    def pull(self, image: int) -> float | None:
        """When the image is there; None when the registry refuses."""
        if self._registry_holds >= self.world.pulls_at_once:
            return None
        self._registry_holds += 1
        self._registry_at = max(self._registry_at, self.now) + 1 / self.world.pulls_per_s
        return self._registry_at + self.size_mb(image) / self.world.line_mb_per_s

    def pulled(self) -> None:
        self._registry_holds -= 1


class _Play:
    """One load. Events are (time, order, what, node, number): of an image, an attempt or a version."""

    def __init__(self, cluster: Cluster, load: Load) -> None:
        self.c, self.load, self.world = cluster, load, cluster.world
        count, world, random = len(load), cluster.world, cluster.random
        pace = cluster.policy.pace or Pace(count, 0.0, count, count, math.inf)
        self.waves = Waves(pace)
        room = world.room if cluster.policy.reserved else BOUNDLESS
        self.gates = {name: Gate(self.waves, Reservations(room)) for name in cluster.nodes}
        self.placement = Placement(cluster.nodes, Counter(map(str, load.images)), lost=cluster.lost)
        self.boot_s = world.boot_s * np.exp(world.boot_sigma * random.normal(size=count))
        self.work_s = world.work_s * np.exp(world.work_sigma * random.normal(size=count))
        self.fails = random.random(count) < world.fail_share  # its first try
        self.jitter = random.uniform(0.5, 1.5, size=count)
        self.anywhere = random.integers(len(cluster.nodes) - len(cluster.lost), size=count)
        self.tries = np.zeros(count, np.int64)
        self.node_of: list[str] = [""] * count
        self.began_own = np.zeros(count)
        self.told = Told(np.full(count, np.nan), np.full(count, np.nan), np.ones(count), np.zeros(count, bool))
        self.hopeful: deque[str] = deque()  # nodes where something may start
        self.events: list[tuple[float, int, str, str, int]] = []
        self.order = 0
        self.open = count
        self.began_at = cluster.now
        self.wake_at = -math.inf

    def at(self, when: float, what: str, node: str = "", number: int = 0) -> None:
        self.order += 1
        heapq.heappush(self.events, (when, self.order, what, node, number))

    def run(self) -> Told:
        names = [name for name in self.c.nodes if name not in self.c.lost]
        for index, image in enumerate(self.load.images):
            pinned = self.c.policy.pinned
            place = self.placement.place(str(index), str(image)) if pinned else names[self.anywhere[index]]
            self.node_of[index] = place
            self._ask(index)
        self._start()
        while self.open:
            if not self.events:
                raise Rl360Error(f"the simulation stands still with {self.open} attempts open")
            self.c.now, _, what, node, number = heapq.heappop(self.events)
            getattr(self, f"_{what}")(node, number)
            self._start()
        return self.told

    def need(self, index: int) -> Room:
        milli = math.ceil(1000 * self.load.cpus[index])
        return Room(milli, 512, 64, 1024)

    def _hope(self, names: Iterable[str]) -> None:
        self.hopeful.extend(name for name in names if self.gates[name].waiting and name not in self.hopeful)

    def _ask(self, index: int) -> None:
        node = self.node_of[index]
        self.gates[node].ask(str(index), str(self.load.images[index]), self.need(index))
        self._hope([node])

    def _start(self) -> None:
        """Begin what the policies let begin, nodes by turns."""
        while self.hopeful and self.waves.free(self.c.now):
            node = self.hopeful.popleft()
            keys = self.gates[node].due(self.c.now, most=1)
            for key in keys:
                self._begin(node, int(key))
            if keys and self.gates[node].waiting:
                self.hopeful.append(node)
        self.told.most_live = max(self.told.most_live, self.waves.live)
        later = self.waves.next_wave_at()
        if self.hopeful and later > self.c.now and later != self.wake_at:
            self.wake_at = later
            self.at(later, "wake")

    def _wake(self, _node: str, _number: int) -> None:
        """Only that time has come: `_start` follows every event."""

    def _begin(self, name: str, index: int) -> None:
        node, image = self.c.nodes[name], int(self.load.images[index])
        if image in node.images:
            node.images.move_to_end(image)
            self.told.warm[index] |= not self.tries[index]
            self._boot(name, index)
        elif image in node.pulling:
            node.pulling[image].append(index)
        elif (there := self.c.pull(image)) is None:
            self.told.refused_s.append(self.c.now - self.began_at)
            self._fail(name, index, refused=True)
        else:
            self.told.pulls += 1
            node.pulling[image] = [index]
            self.at(there, "pulled", name, image)

    def _pulled(self, name: str, image: int) -> None:
        node = self.c.nodes[name]
        self.c.pulled()
        node.keep(image, self.c.size_mb(image))
        for index in node.pulling.pop(image):
            self._boot(name, index)

    def _boot(self, name: str, index: int) -> None:
        self.at(self.c.now + self.boot_s[index] / self.c.nodes[name].speed, "booted", name, index)

    def _fail(self, name: str, index: int, *, refused: bool) -> None:
        """Without a pace nobody listens to refusals: all come back when their pause is over."""
        self.told.failures += not refused
        self.waves.settle(str(index), self.c.now, ok=False, refused=refused and self.c.policy.pace is not None)
        self._leave(name, index)
        first, longest = self.world.backoff_s
        pause = min(longest, first * 2.0 ** min(self.tries[index], 20)) if refused else 1.0
        self.tries[index] += 1
        self.at(self.c.now + pause * self.jitter[index], "again", name, index)

    def _again(self, _name: str, index: int) -> None:
        self._ask(index)

    def _leave(self, name: str, index: int) -> None:
        self.gates[name].leave(str(index))
        capped = self.waves.pace.per_group < len(self.load)  # then one of its group may wait at another node
        self._hope(self.gates if capped else [name])

    def _booted(self, name: str, index: int) -> None:
        if self.fails[index]:
            self.fails[index] = False
            return self._fail(name, index, refused=False)
        self.waves.settle(str(index), self.c.now, ok=True)
        self.told.ready_s[index] = self.c.now - self.began_at
        node = self.c.nodes[name]
        heapq.heappush(node.running, (node.clock(self.c.now) + self.work_s[index], index))
        node.using += self.load.cpus[index]
        return self._plan(name)

    def _plan(self, name: str) -> None:
        """The node's next end, at its present speed."""
        node = self.c.nodes[name]
        node.version += 1
        if node.running:
            self.at(node.next_end(self.c.now), "ended", name, node.version)

    def _ended(self, name: str, version: int) -> None:
        node = self.c.nodes[name]
        if version != node.version:
            return
        node.clock(self.c.now)
        _, index = heapq.heappop(node.running)
        node.using -= self.load.cpus[index]
        if not node.running:
            node.using = 0.0  # what adding and taking away left over
        told = self.told
        told.ended_s[index] = self.c.now - self.began_at
        told.slowdown[index] = (told.ended_s[index] - told.ready_s[index]) / self.work_s[index]
        self.open -= 1
        self._leave(name, index)
        self._plan(name)


def summary(told: Told) -> dict[str, Any]:
    """The figures that every comparison shows."""
    return {
        "ready_last_s": round(told.makespan_s, 3),
        "ready_first_s": round(float(told.ready_s.min()), 3),
        "ready_p95_s": round(float(np.quantile(told.ready_s, 0.95)), 3),
        "refusals": len(told.refused_s),
        "failures": told.failures,
        "pulls": told.pulls,
        "warm_share": round(float(told.warm.mean()), 4),
        "most_live": told.most_live,
    }
