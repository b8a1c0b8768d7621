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
# rows that are measured with another and come after it
WITH = {
    "coordinator_cpu_orjson": "coordinator_cpu",
    "routing_bytes_mb_engine": "routing_bytes_mb",
    "routing_bytes_mb_store": "routing_bytes_mb",
    "turn61_vs_turn2_routing": "turn61_vs_turn2",
    "rss_growth_per_1k_sessions": "turns_per_s",
    "collection_coordinator": "collection",
}
ON_REQUEST = frozenset({"collection"})  # minutes to an hour, and writes to the store
DEFAULT = tuple(name for name in MODULES if name not in ON_REQUEST)


def chosen(text: str | None) -> tuple[str, ...]:
    """Names from `a,b`, where a row that comes with another means both; None means the default ones."""
    named = chosen_rows(text, (*MODULES, *WITH), DEFAULT)
    return tuple(dict.fromkeys(WITH.get(name, name) for name in named))


def measure(names: tuple[str, ...], options: Options) -> Iterator[Row]:
    """Each row as soon as it is measured; one name may give several."""
    for name in names:
        module = importlib.import_module(f"rl360.bench.{MODULES[name]}")
        yield from getattr(module, name)(options)
