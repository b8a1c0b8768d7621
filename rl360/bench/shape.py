"""How large a synthetic trajectory is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """`tokens` in all over `turns`, of which `opening` before the first turn and about `sampled` by the engine.
    `layers` 0 is a dense model: no routing."""

    turns: int = 61
    tokens: int = 58_000
    opening: int = 3_000
    sampled: int = 14_000
    layers: int = 61
    top_k: int = 8
    experts: int = 256


FULL = Shape()
