"""The sessions one server holds: ids nobody can guess, an idle limit, a byte budget, draining.

Owned by the server's event loop. A session with a request in flight is never evicted; an evicted or deleted one is
closed first, so that nothing that is still on its way can be recorded into it. Sessions are kept in the order of their
last use, so looking for dead ones touches only those.

Creating is idempotent: the spec of an attempt that already has a session here returns that session, so a task that was
killed and starts again finds what its agent has sampled so far. A spec without a weight version names no run and
always makes a new session.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rl360.sessions.core import Session
from rl360.sessions.families.base import ChatTemplate
from rl360.sessions.history import MATCHERS, Matcher
from rl360.sessions.merge import Pick
from rl360.sessions.refusals import Refusal, SessionRefusal
from rl360.sessions.routing import RoutingShape
from rl360.sessions.sample import SampleRef
from rl360.sessions.turns import SessionSpec, Turn


@dataclass(frozen=True)
class Limits:
    """What one server process accepts. Over `total_bytes`, sessions unused for `dead_s` are given up first."""

    idle_ttl_s: float = 2 * 3600.0
    dead_s: float = 600.0
    session_bytes: int = 256 << 20
    total_bytes: int = 4 << 30
    body_bytes: int = 8 << 20
    session_requests: int = 64


@dataclass
class Held:
    """A session in this server. `body_bytes` are the bodies of its requests in flight, `turns` those being answered,
    `turnstile` lets its long work through one at a time; `store_as` is the (key, pick) its samples are being or were
    written as, `stored` where they are, once they are."""

    session: Session
    last_used_s: float
    in_flight: int = 0
    body_bytes: int = 0
    counted_bytes: int = 0
    turns: set[asyncio.Task[Turn]] = field(default_factory=set)
    turnstile: asyncio.Lock = field(default_factory=asyncio.Lock)
    store_as: tuple[str, Pick] | None = None
    stored: SampleRef | None = None


@dataclass
class Registry:
    """id -> session, with eviction, the byte budget over all of them and over all bodies in flight, and draining."""

    template: ChatTemplate
    limits: Limits
    matchers: Mapping[str, Matcher] = field(default_factory=lambda: MATCHERS)
    routing: RoutingShape | None = None
    clock: Callable[[], float] = time.monotonic
    total_bytes: int = 0
    body_bytes: int = 0
    in_flight: int = 0
    created: int = 0
    evicted_idle: int = 0
    evicted_for_room: int = 0
    draining: bool = False
    _held: OrderedDict[str, Held] = field(default_factory=OrderedDict)
    _by_spec: dict[SessionSpec, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Held]:
        return iter(self._held.values())

    @property
    def unfinished(self) -> int:
        """Sessions whose samples are nowhere but here."""
        return sum(held.stored is None or held.in_flight > 0 for held in self)

    def create(self, spec: SessionSpec) -> Session:
        """The session of this spec, else a new one under a 192-bit random id."""
        if spec in self._by_spec:
            return self.get(self._by_spec[spec]).session
        if self.draining:
            raise SessionRefusal(Refusal.DRAINING, "this server takes no new sessions; use another session server")
        if spec.matcher not in self.matchers:
            known = ", ".join(self.matchers)
            raise SessionRefusal(Refusal.BAD_BODY, f"matcher {spec.matcher[:80]!r} is not allowed here: {known}")
        self.make_room()
        session = Session(
            secrets.token_urlsafe(24),
            spec,
            self.template,
            self.limits.session_bytes,
            matcher=self.matchers[spec.matcher],
            routing=self.routing,
        )
        self._held[session.session_id] = Held(session, self.clock())
        if spec.expected_weight_version is not None:
            self._by_spec[spec] = session.session_id
        self._account(session.session_id)
        self.created += 1
        return session

    def get(self, session_id: str) -> Held:
        """The session, marked as used now."""
        held = self._held.get(session_id)
        if held is None:
            raise SessionRefusal(Refusal.NOT_FOUND, "no such session here: never created, deleted or expired")
        held.last_used_s = self.clock()
        self._held.move_to_end(session_id)
        return held

    @contextmanager
    def using(self, session_id: str) -> Iterator[Held]:
        """Hold a session through a request: it is not evicted meanwhile, and its bytes are counted after."""
        held = self.get(session_id)
        held.in_flight += 1
        self.in_flight += 1
        try:
            yield held
        finally:
            held.in_flight -= 1
            self.in_flight -= 1
            if session_id in self._held:
                self.get(session_id)
                self._account(session_id)

    def make_room(self) -> None:
        """Refuse when the budget is reached and no dead session is left to give up. Not with what a session over its
        own budget gets: agents take that for the end of their sequence, and are judged."""
        over = self.total_bytes + self.body_bytes - self.limits.total_bytes
        if over < 0:
            return
        gone = self._evict(self.limits.dead_s, over + 1)
        self.evicted_for_room += gone
        if not gone:
            raise SessionRefusal(
                Refusal.SERVER_FULL,
                f"{len(self)} sessions hold {self.total_bytes} bytes, bodies in flight {self.body_bytes}, the server's "
                f"budget is {self.limits.total_bytes}; delete sessions or add a session server",
            )

    def delete(self, session_id: str) -> None:
        """Close and forget; requests in flight on it are refused when they come to record."""
        self.get(session_id).session.close()
        held = self._held.pop(session_id)
        self.total_bytes -= held.counted_bytes
        self._by_spec.pop(held.session.spec, None)

    def evict_idle(self) -> int:
        """Drop what was not used for the idle limit; returns how many."""
        gone = self._evict(self.limits.idle_ttl_s)
        self.evicted_idle += gone
        return gone

    def _evict(self, idle_s: float, need_bytes: int | None = None) -> int:
        """Forget the longest unused sessions, none used since `idle_s`: as many as `need_bytes` takes (None: all), or
        none when all of them are not enough."""
        limit = self.clock() - idle_s
        gone, freed = [], 0
        for session_id, held in self._held.items():
            if held.last_used_s > limit or (need_bytes is not None and freed >= need_bytes):
                break
            if not held.in_flight:
                gone.append(session_id)
                freed += held.counted_bytes
        if need_bytes is not None and freed < need_bytes:
            return 0
        for session_id in gone:
            self.delete(session_id)
        return len(gone)

    def _account(self, session_id: str) -> None:
        held = self._held[session_id]
        self.total_bytes += held.session.held_bytes - held.counted_bytes
        held.counted_bytes = held.session.held_bytes
