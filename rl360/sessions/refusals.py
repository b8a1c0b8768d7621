"""Why a session refuses a request: one code a reason, with the HTTP status the server answers.

A refusal never changes what the session holds; it tells what was sampled for it (`sampled`), so that this can be
counted in the bucket of its reason (`BUCKETS`). `retry` tells the stock OpenAI client whether the same request could
succeed: it retries every 409 on its own, and a verbatim retry after a lost race would roll back the winner's turn.
"""

from __future__ import annotations

from enum import StrEnum

from rl360.errors import Rl360Error
from rl360.ledger.outcomes import Bucket


class Refusal(StrEnum):
    """Stable machine-readable codes (`error.code` in every reply)."""

    BAD_BODY = "bad_body"
    PARAMS = "sampling_params"
    THREADS = "thread_unsupported_request"
    BAD_HISTORY = "bad_history"
    TOOLS_CHANGED = "tools_changed"
    UNAUTHORIZED = "unauthorized"
    NOT_FOUND = "not_found"
    METHOD = "method_not_allowed"
    SLOW_BODY = "slow_body"
    CUT_TURN = "cut_turn"
    LOST_RACE = "lost_race"
    SEALED = "sealed"
    CONFLICT = "conflict"
    LENGTH = "length"
    OVER_BUDGET = "over_budget"
    CANNOT_MERGE = "cannot_merge"
    BAD_MATCHER = "bad_matcher"
    INTERNAL = "internal_error"
    TOO_MANY = "too_many_requests"
    NO_STORE = "no_store"
    BAD_UPSTREAM = "bad_upstream"
    NO_ENGINE = "no_engine"
    WRONG_VERSION = "wrong_version"
    BAD_ROUTING = "bad_routing"
    NONFINITE = "nonfinite"
    DRAINING = "draining"
    SERVER_FULL = "server_full"
    STORE_UNAVAILABLE = "store_unavailable"


_OF_STATUS = {
    400: (Refusal.BAD_BODY, Refusal.PARAMS, Refusal.THREADS, Refusal.BAD_HISTORY, Refusal.TOOLS_CHANGED),
    401: (Refusal.UNAUTHORIZED,),
    404: (Refusal.NOT_FOUND,),
    405: (Refusal.METHOD,),
    408: (Refusal.SLOW_BODY,),
    409: (Refusal.CUT_TURN, Refusal.LOST_RACE, Refusal.SEALED, Refusal.CONFLICT, Refusal.LENGTH),
    413: (Refusal.OVER_BUDGET,),
    422: (Refusal.CANNOT_MERGE,),
    429: (Refusal.TOO_MANY,),
    500: (Refusal.BAD_MATCHER, Refusal.INTERNAL),
    501: (Refusal.NO_STORE,),
    502: (Refusal.BAD_UPSTREAM, Refusal.NO_ENGINE, Refusal.WRONG_VERSION, Refusal.BAD_ROUTING, Refusal.NONFINITE),
    503: (Refusal.DRAINING, Refusal.SERVER_FULL, Refusal.STORE_UNAVAILABLE),
}
HTTP_STATUS = {code: status for status, codes in _OF_STATUS.items() for code in codes}

# Of replies that were sampled and refused for another reason: infra.
BUCKETS: dict[Refusal, Bucket] = {
    Refusal.LOST_RACE: Bucket.DUPLICATE,
    Refusal.WRONG_VERSION: Bucket.STALE,
    Refusal.BAD_ROUTING: Bucket.ROUTING_MISALIGNED,
    Refusal.NONFINITE: Bucket.NONFINITE,
}

_RETRY = frozenset(code for code, status in HTTP_STATUS.items() if status in (408, 429, 502, 503))


class SessionRefusal(Rl360Error):
    """A request that was refused, with its code; the message is one line. `sampled`: ids the engine sampled for it,
    None when nobody says; when a session cannot be merged, all it sampled. `hopeless`: what was refused is the request
    itself, whatever the code."""

    def __init__(self, code: Refusal, message: str, sampled: int | None = None, *, hopeless: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.sampled = sampled
        self.hopeless = hopeless

    @property
    def status(self) -> int:
        return HTTP_STATUS[self.code]

    @property
    def retry(self) -> bool:
        """Whether sending the same request again may succeed."""
        return self.code in _RETRY and not self.hopeless
