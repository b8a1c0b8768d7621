"""Placement: which node an attempt goes to, so that it finds its image there. Pure; the same calls give the same nodes.

Each image group has `homes` nodes, the first of its own ranking (rendezvous hashing): whoever knows the nodes and what
is to be placed knows them. An attempt goes to the home with fewer attempts; a home that has `SLACK` times its share of
all is passed by, so no node is overrun by a popular image. Two homes cost two pulls an image and mean that a lost node
leaves one warm: its groups stay with their other home, and only one that has none left gets another. A group that fills
more nodes than these has as many homes as it fills, and passes by whoever has a full share: no node idles beside a task
set of few images. What was on the lost node moves, nothing else does; when it is back, it is a home of the same groups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from hashlib import blake2b

from rl360.errors import BadInput

SLACK = 1.25


class Placement:
    """`expected`: attempts that are to be placed, by group; a share is of these, or of those placed when they are more.
    `lost`: of `nodes`, those that are away."""

    def __init__(
        self, nodes: Iterable[str], expected: Mapping[str, int], *, homes: int = 2, lost: Iterable[str] = ()
    ) -> None:
        self._nodes, self._lost = set(nodes), set(lost)
        if not self._nodes - self._lost:
            raise BadInput("there is no node to place anything on")
        self._expected, self._total, self._homes = expected, sum(expected.values()), homes
        self._rankings: dict[str, list[str]] = {}
        self._at: dict[str, tuple[str, str]] = {}  # key -> group, node
        self._load: Counter[str] = Counter()

    def _ranking(self, group: str) -> list[str]:
        if group not in self._rankings:
            self._rankings[group] = sorted(self._nodes, key=lambda node: _weight(node, group))
        return self._rankings[group]

    def _fills(self, group: str) -> float:
        """How many nodes."""
        return len(self._nodes) * self._expected.get(group, 0) / max(1, self._total)

    def homes(self, group: str) -> list[str]:
        """Of its homes those that are there, else the next node of its ranking."""
        ranking = self._ranking(group)
        there = [node for node in ranking[: max(self._homes, math.ceil(self._fills(group)))] if node not in self._lost]
        return there or [next(node for node in ranking if node not in self._lost)]

    def limit(self, group: str) -> int:
        """Attempts that a node may have when the next one of this group is placed."""
        slack, nodes = 1.0 if self._fills(group) >= self._homes else SLACK, len(self._nodes) - len(self._lost)
        return math.ceil(slack * max(self._total, len(self._at) + 1) / nodes)

    def place(self, key: str, group: str) -> str:
        """The node of a new attempt."""
        if key in self._at:
            raise ValueError(f"{key} is placed")
        homes, limit = self.homes(group), self.limit(group)
        homes.sort(key=self._load.__getitem__)  # stable: the first home among equals
        further = (node for node in self._ranking(group) if node not in self._lost)
        node = next(node for nodes in (homes, further) for node in nodes if self._load[node] < limit)
        self._at[key] = group, node
        self._load[node] += 1
        return node

    def node_of(self, key: str, tries: int = 0) -> str:
        """Where a placed attempt is; where it goes when so many tries of it were lost: on along its group's ranking."""
        group, node = self._at[key]
        there = [node, *(n for n in self._ranking(group) if n != node and n not in self._lost)]
        return there[tries % len(there)]

    def __contains__(self, key: str) -> bool:
        return key in self._at

    def lose(self, node: str) -> dict[str, str]:
        """The node is away: attempts that were on it, with their new nodes."""
        if node not in self._nodes - self._lost:
            raise ValueError(f"{node} is not there")
        if self._nodes - self._lost == {node}:
            raise BadInput(f"{node} is lost and there is no other node")
        self._lost.add(node)
        moved = {key: group for key, (group, at) in self._at.items() if at == node}
        for key in moved:
            del self._at[key]
        return {key: self.place(key, group) for key, group in moved.items()}


def _weight(node: str, group: str) -> bytes:
    return blake2b(f"{node}\n{group}".encode(), digest_size=8).digest()
