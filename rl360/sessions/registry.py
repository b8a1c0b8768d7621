"""The sessions one server holds: ids nobody can guess, an idle limit, a byte budget.

Owned by the server's event loop. A session with a request in flight is never evicted; an evicted or deleted one is
closed first, so that nothing that is still on its way can be recorded into it.

Creating is idempotent: the spec of an attempt that already has a session here returns that session, so a task that was
killed and starts again finds what its agent has sampled so far. A spec without a weight version names no run and
always makes a new session.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rl360.sessions.core import Session, SessionSpec
from rl360.sessions.families.base import ChatTemplate
from rl360.sessions.refusals import Refusal, SessionRefusal


@dataclass(frozen=True)
class Limits:
    """What one server process accepts."""

    idle_ttl_s: float = 2 * 3600.0
    session_bytes: int = 64 << 20
    total_bytes: int = 4 << 30
    body_bytes: int = 8 << 20


@dataclass
class _Held:
    session: Session
    last_used_s: float
    in_flight: int = 0
    counted_bytes: int = 0


class Registry:
    """id -> session, with idle eviction and the byte budget over all of them."""

    def __init__(self, template: ChatTemplate, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._template = template
        self.limits = limits
        self._clock = clock
        self._held: dict[str, _Held] = {}
        self._by_spec: dict[SessionSpec, str] = {}
        self.total_bytes = 0
        self.evicted = 0
        self.created = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def in_flight(self) -> int:
        return sum(held.in_flight for held in self._held.values())

    def create(self, spec: SessionSpec) -> Session:
        """The session of this spec, else a new one under a 192-bit random id; refuses over the byte budget."""
        if spec in self._by_spec:
            return self.get(self._by_spec[spec])
        if self.total_bytes >= self.limits.total_bytes:
            raise SessionRefusal(
                Refusal.OVER_BUDGET,
                f"{len(self._held)} sessions hold {self.total_bytes} bytes, the server's budget is "
                f"{self.limits.total_bytes}; delete sessions or add a session server",
            )
        session = Session(secrets.token_urlsafe(24), spec, self._template, self.limits.session_bytes)
        self._held[session.session_id] = _Held(session, self._clock())
        if spec.expected_weight_version is not None:
            self._by_spec[spec] = session.session_id
        self._account(session.session_id)
        self.created += 1
        return session

    def get(self, session_id: str) -> Session:
        """The session, marked as used now."""
        held = self._held.get(session_id)
        if held is None:
            raise SessionRefusal(Refusal.NOT_FOUND, "no such session here: never created, deleted or expired")
        held.last_used_s = self._clock()
        return held.session

    @contextmanager
    def using(self, session_id: str) -> Iterator[Session]:
        """Hold a session through a request: it is not evicted meanwhile, and its bytes are counted after."""
        session = self.get(session_id)
        held = self._held[session_id]
        held.in_flight += 1
        try:
            yield session
        finally:
            held.in_flight -= 1
            held.last_used_s = self._clock()
            self._account(session_id)

    def delete(self, session_id: str) -> None:
        """Close and forget; requests in flight on it are refused when they come to record."""
        self.get(session_id).close()
        self._forget(session_id)

    def evict_idle(self) -> int:
        """Drop what was not used for the idle limit; returns how many."""
        limit = self._clock() - self.limits.idle_ttl_s
        idle = [key for key, held in self._held.items() if not held.in_flight and held.last_used_s <= limit]
        for session_id in idle:
            self.delete(session_id)
        self.evicted += len(idle)
        return len(idle)

    def _account(self, session_id: str) -> None:
        held = self._held.get(session_id)
        if held is not None:
            self.total_bytes += held.session.held_bytes - held.counted_bytes
            held.counted_bytes = held.session.held_bytes

    def _forget(self, session_id: str) -> None:
        held = self._held.pop(session_id)
        self.total_bytes -= held.counted_bytes
        self._by_spec.pop(held.session.spec, None)
