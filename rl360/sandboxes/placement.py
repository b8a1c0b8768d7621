"""Placement: which node an attempt goes to, so that it finds its image there. Pure; the same calls give the same nodes.

Each image group has `homes` nodes, the first of its own ranking (rendezvous hashing): whoever knows the nodes knows
them. An attempt goes to the home with fewer attempts; homes that hold `slack` times their share of all are passed by, so
no node is overrun by a popular image. Two homes cost two pulls an image and mean that a lost node leaves one warm.
When a node is lost only what was on it moves, and only groups that had it as a home get another; a node that joins
becomes a home of the groups that rank it first, and moves nothing that runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b

from rl360.errors import BadInput


class Placement:
    """`expected`: attempts that are to be placed; a share is of these, or of those placed when they are more."""

    def __init__(self, nodes: Iterable[str], expected: int, homes: int = 2, slack: float = 1.25) -> None:
        self._nodes = sorted(set(nodes))
        if not self._nodes:
            raise BadInput("there is no node to place anything on")
        self.expected, self.homes, self.slack = expected, homes, slack
        self._rankings: dict[str, list[str]] = {}
        self._at: dict[str, tuple[str, str]] = {}  # key -> group, node
        self._load: Counter[str] = Counter()

    def ranking(self, group: str) -> list[str]:
        """All nodes in the group's order."""
        if group not in self._rankings:
            self._rankings[group] = sorted(self._nodes, key=lambda node: _weight(node, group))
        return self._rankings[group]

    def limit(self) -> int:
        """Attempts that a node may have when the next one is placed."""
        return math.ceil(self.slack * max(self.expected, len(self._at) + 1) / len(self._nodes))

    def place(self, key: str, group: str) -> str:
        """The node of a new attempt."""
        if key in self._at:
            raise ValueError(f"{key} is placed")
        ranking, limit = self.ranking(group), self.limit()
        homes = sorted(ranking[: self.homes], key=self._load.__getitem__)  # stable: the first home among equals
        node = next(node for node in (*homes, *ranking[self.homes :]) if self._load[node] < limit)
        self._at[key] = group, node
        self._load[node] += 1
        return node

    def node_of(self, key: str, lost: int = 0) -> str:
        """Where a placed attempt is; where it goes when it was lost so many times: on along its group's ranking."""
        group, node = self._at[key]
        ranking = self.ranking(group)
        return [node, *(other for other in ranking if other != node)][lost % len(ranking)]

    def __contains__(self, key: str) -> bool:
        return key in self._at

    def release(self, key: str) -> None:
        """It ended; a second time is a `KeyError`."""
        _, node = self._at.pop(key)
        self._load[node] -= 1

    def lose(self, node: str) -> dict[str, str]:
        """The node is gone: attempts that were on it, with their new nodes."""
        if self._nodes == [node]:
            raise BadInput(f"{node} is lost and there is no other node")
        self._change(node, there=False)
        moved = {key: group for key, (group, at) in self._at.items() if at == node}
        for key in moved:
            del self._at[key]
        del self._load[node]
        return {key: self.place(key, group) for key, group in moved.items()}

    def join(self, node: str) -> None:
        self._change(node, there=True)

    def _change(self, node: str, *, there: bool) -> None:
        if (node in self._nodes) == there:
            raise ValueError(f"{node} is {'already' if there else 'not'} there")
        self._nodes = sorted({*self._nodes, node} if there else {*self._nodes} - {node})
        self._rankings.clear()


def _weight(node: str, group: str) -> bytes:
    return blake2b(f"{node}\n{group}".encode(), digest_size=8).digest()
