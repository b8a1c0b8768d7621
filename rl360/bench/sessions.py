"""The rows of `rl360 bench sessions`, by name. A row's module is imported when the row is measured."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from rl360.bench.rows import Options, Row, chosen_rows

MODULES = {
    "coordinator_cpu": "coordinator",
    "merge_pipeline_ms": "local_rows",
    "routing_bytes_mb": "local_rows",
    "turn61_vs_turn2": "http_rows",
    "turns_per_s": "http_rows",
    "hit_rate": "gateway_rows",
    "collection": "collection",
}
ON_REQUEST = frozenset({"collection"})  # minutes to an hour, and writes to the store
DEFAULT = tuple(name for name in MODULES if name not in ON_REQUEST)


def chosen(text: str) -> tuple[str, ...]:
    """Names from `a,b`; empty means the default ones."""
    return chosen_rows(text, tuple(MODULES), DEFAULT)


def measure(names: tuple[str, ...], options: Options) -> Iterator[Row]:
    """Each row as soon as it is measured; one name may give several."""
    for name in names:
        module = importlib.import_module(f"rl360.bench.{MODULES[name]}")
        yield from getattr(module, name)(options)
