"""What a session is made of: its spec, a request on its way to the engine and back, and the turns it records.

All of it is frozen; arrays inside a `Turn` are read-only.
"""

from __future__ import annotations

import hashlib
import sys
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from rl360.sessions.history import Match
from rl360.sessions.messages import Message, Tool, openai_message

TURN_BYTES = 1024  # of a turn without its arrays, messages and spans
_SPAN_BYTES = 160  # of a span without its version
MAX_VERSION = 200  # characters of a weight version

Parse = Callable[[Any, str], tuple[Message, ...]]


class SessionMode(StrEnum):
    """What a request may continue."""

    LINEAR = "linear"
    TREE = "tree"


class SamplingPolicy(StrEnum):
    """What happens to sampling parameters a request asks for: not used; used and counted; refused when they differ."""

    PIN = "pin"
    RECORD = "record"
    REFUSE = "refuse"


class Canonical(StrEnum):
    """How a sampled turn relates to the template's own spelling of what was said. Only counted: sampled ids stay."""

    EXACT = "exact"
    RETOKENISED = "retokenised"  # the same text in other ids
    RESPELLED = "respelled"  # another text (spacing, key order) that reads the same
    BOUNDARY = "boundary"  # another of the stop ids
    UNPARSED = "unparsed"  # a malformed call: there is no other spelling of it
    CUT = "cut"


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a session, fixed when it is created."""

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int


@dataclass(frozen=True)
class SessionSpec:
    """What a session is created with. `expected_weight_version` None accepts (and records) any version."""

    attempt_id: str
    group_id: str
    task_id: str
    sampling: Sampling
    max_seq_len: int
    expected_weight_version: str | None = None
    mode: SessionMode = SessionMode.LINEAR
    matcher: str = "strict"
    sampling_policy: SamplingPolicy = SamplingPolicy.PIN
    thinking: bool = False


@dataclass(frozen=True)
class Request:
    """A parsed request. `raws` are the bytes of its messages, `ends[i]` how many messages raws[:i+1] gave; without raws
    it is not remembered."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    raws: tuple[bytes, ...] = ()
    ends: tuple[int, ...] = ()
    tools_raw: bytes | None = None
    parse: Parse = openai_message

    @property
    def raw_bytes(self) -> int:
        return sum(map(len, self.raws)) + len(self.tools_raw or b"")


@dataclass(frozen=True, eq=False)
class Plan:
    """A request that fits. It adds `new_messages` to the history of `base` (None: a new root), or has the engine answer
    once more what `repeats` answered. `messages` are the request's in their stored spelling."""

    epoch: int
    base: Turn | None
    repeats: Turn | None
    request: Request
    messages: tuple[Message, ...]
    new_messages: tuple[Message, ...]
    sampling: Sampling
    asked: tuple[str, ...]  # parameters the request asked for that are not the session's
    loose: tuple[Match, ...]

    @property
    def held(self) -> int:
        """Tokens of the context that stay."""
        return 0 if self.base is None else self.base.end

    @property
    def new_bytes(self) -> int:
        """JSON of the request that is to be rendered: what rendering costs, whatever it holds."""
        if self.repeats is not None:
            return 0
        first = bisect_right(self.request.ends, len(self.messages) - len(self.new_messages))
        tools = self.request.tools_raw if self.base is None else None
        return sum(map(len, self.request.raws[first:])) + len(tools or b"")


@dataclass(frozen=True, eq=False)
class PreparedTurn:
    """What to send: `input_ids` int32 `[tokens]`, at most `max_new_tokens` to sample with `sampling`. `routing_from` is
    the first row of routed experts to ask for; None when none are wanted. `salt` is the weight version the session is
    opened for: KV that other weights made is never used for it."""

    epoch: int
    input_ids: np.ndarray
    max_new_tokens: int
    sampling: Sampling
    routing_from: int | None
    plan: Plan
    salt: str | None = None


@dataclass(frozen=True, eq=False)
class Completion:
    """What the engine answered. `output_ids` int32 and `logprobs` float32 `[sampled]`, the end token included; `spans`
    are (start, end, weight version) over `output_ids`; `finish_reason` is stop or length; `routing` are the rows from
    `routing_from` to the last but one token, `[rows, layers, top_k]`. `cached_tokens` of the prompt were in its cache,
    None when it does not say; `malformed` names statistics that made no sense and are taken as not said."""

    output_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    spans: tuple[tuple[int, int, str], ...]
    cached_tokens: int | None = None
    routing: np.ndarray | None = None
    retractions: int = 0
    worker: str = ""
    malformed: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Turn:
    """One recorded completion: a node of the tree. Positions count from the start of its path: ids [start, prompt_end)
    were added by its request, [prompt_end, end) sampled.

    ids int32 `[end - start]`, logprobs float32 `[end - prompt_end]`, routing `[end - 1 - routing_from, layers, top_k]`,
    all read-only; spans are over path positions. Its digests chain over the path: of everything sent, and of that
    plus what was sampled. `request_end` messages were in the request, `new_messages` of them after the parent's.
    """

    index: int
    parent: int | None
    start: int
    prompt_end: int
    end: int
    ids: np.ndarray
    logprobs: np.ndarray
    spans: tuple[tuple[int, int, str], ...]
    finish_reason: str
    prompt_digest: bytes
    end_digest: bytes
    request_end: int
    new_messages: tuple[Message, ...]
    reply: Message
    tools: tuple[Tool, ...]
    format_errors: int
    canonical: Canonical
    cached_tokens: int | None
    routing: np.ndarray | None
    retractions: int
    sampling_differs: bool
    loose: tuple[Match, ...]
    worker: str

    @property
    def sampled(self) -> int:
        return self.end - self.prompt_end

    @property
    def cut(self) -> bool:
        return self.finish_reason == "length"

    @property
    def delta(self) -> np.ndarray:
        """Ids `[prompt_end - start]` its request added."""
        return self.ids[: self.prompt_end - self.start]

    @property
    def routing_from(self) -> int:
        """First row of routed experts that belongs to this turn: its parent's last token was not fed back before."""
        return max(self.start - 1, 0)

    @property
    def reprefilled_rows(self) -> int:
        """Held rows of routed experts behind the cached prefix: the engine computed their KV cache anew. 0 where it
        does not say what it found cached."""
        if self.routing is None or self.cached_tokens is None:
            return 0
        return max(self.routing_from - self.cached_tokens, 0)

    @property
    def routing_bytes(self) -> int:
        return 0 if self.routing is None else self.routing.nbytes

    def held_bytes(self) -> int:
        """Without its tools, which turns share."""
        size = TURN_BYTES + self.ids.nbytes + self.logprobs.nbytes + self.reply.held_bytes() + 8 * len(self.loose)
        size += sum(_SPAN_BYTES + sys.getsizeof(version) for _start, _end, version in self.spans)
        return size + self.routing_bytes + sum(message.held_bytes() for message in self.new_messages)


def chain_digest(before: bytes, ids: np.ndarray) -> bytes:
    """Digest of a context that had digest `before` and grew by int32 `ids`."""
    hasher = hashlib.blake2b(before, digest_size=16)
    hasher.update(np.ascontiguousarray(ids, dtype="<i4").data)
    return hasher.digest()
