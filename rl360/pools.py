"""HTTP connection pools for many requests at once, in one place.

httpx polls every idle connection of its pool at each request, so a pool with hundreds of idle connections costs more
than opening new ones: with 256 idle connections it was the largest single cost of a wave in the flow's process.
"""

from __future__ import annotations

import httpx

IDLE_CONNECTIONS = 8


def busy_pool(max_connections: int | None = None) -> httpx.Limits:
    """Limits of a client that has up to `max_connections` (None: no limit) requests in flight and keeps few idle."""
    return httpx.Limits(max_connections=max_connections, max_keepalive_connections=IDLE_CONNECTIONS)
