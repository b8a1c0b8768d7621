"""The one call a session server makes: `POST {upstream}/generate`, token ids in, token ids out.

Every field that decides what is sampled is assigned here, outright. The reply is taken only when it answers exactly
what was asked: same prompt ids, one log-probability per sampled id, a finish reason, a weight version for every id,
and exactly the routing rows that were asked for. Anything else, an abort, an error status or a missed deadline is
`bad_upstream` and nothing is recorded, but the refusal says how many sampled ids the reply names; nobody there to ask
is `no_engine`. Only a connection that did not come about is tried again: once bytes were sent the engine may have
sampled.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import sys
from typing import Annotated, Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np
import orjson

from rl360.errors import BadInput
from rl360.sessions.refusals import Refusal, SessionRefusal
from rl360.sessions.routing import RoutingShape, decode_rows
from rl360.sessions.turns import MAX_VERSION, Completion, PreparedTurn

ROUTING_HEADER = "X-SMG-Routing-Key"
_WORKER_HEADER = "x-smg-routed-worker-id"
_GATEWAY_ERROR_HEADER = "x-smg-error-code"  # model_not_found: the gateway has no worker at all
_MAY_PASS = (408, 429)  # the error statuses below 500 that the same request may not meet again
_JOIN = "engines join the gateway when a run's first step has pushed its weights, see `rl360 fleet status`"
# an idle connection is not used again once the engine may be closing it: SGLang does after 5 s, of ours after 75 s
KEEP_S = 2.0
CONNECT_TRIES = 3
CONNECT_S = 5.0
_REPLY_BYTES = 1 << 20  # of a reply, beside what the question makes long
_SAMPLED_BYTES = 256  # id, log-probability and text of one sampled token
_ID_BYTES = 12
_READ_IN_THREAD_BYTES = 1 << 20
_PROMPT_KEY = b'"prompt_token_ids":'
_SHOWN = 300  # characters of what an engine said
# ids, log-probabilities, routed experts and session ids, which an engine may repeat when it complains
_UNTOLD = re.compile(r"\[[][\d\s,.eEnul+-]*\d[][\d\s,.eEnul+-]*|-?\d+(?:[,\s]+-?\d+){2,}|[\w+/=-]{32,}", re.ASCII)


class Upstream:
    """A pooled client of one SMG gateway (or one engine). One per server process, closed with `aclose`.

    `routing` makes it ask for the experts of every row that a session does not hold yet.
    """

    def __init__(
        self,
        url: str,
        vocab_size: int,
        stop_ids: tuple[int, ...],
        deadline_s: float,
        routing: RoutingShape | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadInput(f"upstream {url!r} is not an address; use http://HOST:PORT of the gateway")
        self.url = url.rstrip("/") + "/generate"
        self.routing = routing
        self._vocab_size = vocab_size
        self._stop_ids = stop_ids
        self._deadline_s = deadline_s
        self._client: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def generate(self, session_id: str, prepared: PreparedTurn) -> Completion:
        """Sample one turn. Raises `SessionRefusal`; cancelling it closes the connection."""
        ids = prepared.input_ids
        if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size:
            # an id outside the vocabulary ends the engine process: it must not leave this one
            told = f"not sent: {len(ids)} ids, all must lie in [0, {self._vocab_size})"
            raise SessionRefusal(Refusal.BAD_UPSTREAM, told, 0)
        prompt = orjson.dumps(np.ascontiguousarray(ids), option=orjson.OPT_SERIALIZE_NUMPY)
        body = request_body(prompt, prepared, self._stop_ids)
        headers = {ROUTING_HEADER: session_id, "Content-Type": "application/json"}
        try:
            async with asyncio.timeout(self._deadline_s):
                status, told, data = await self._post(body, headers, self._reply_limit(prepared))
        except aiohttp.ConnectionTimeoutError:
            raise _no_engine(f"{self.url} took none of {CONNECT_TRIES} connections within {CONNECT_S:g} s") from None
        except TimeoutError:
            raise _bad(f"no reply from {self.url} within {self._deadline_s:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise _no_engine(f"{self.url} refused {CONNECT_TRIES} connections ({error.strerror})") from None
        except aiohttp.ClientError as error:
            raise _bad(f"{self.url}: {type(error).__name__} {_shown(str(error))}") from None
        if status == 503 or told.get(_GATEWAY_ERROR_HEADER) == "model_not_found":
            raise _no_engine(f"{self.url} has no engine to ask: {_JOIN} ({status}: {_shown(data)})")
        if status != 200:
            hopeless = 400 <= status < 500 and status not in _MAY_PASS
            said = f"{self.url} answered {status}: {_shown(data)}"
            raise SessionRefusal(Refusal.BAD_UPSTREAM, said, hopeless=hopeless)
        worker = told.get(_WORKER_HEADER, "")[:200].encode(errors="replace").decode()  # bytes that are no text: ?
        if len(data) < _READ_IN_THREAD_BYTES:
            return read_reply(data, prompt, prepared, self.routing, worker)
        return await asyncio.to_thread(read_reply, data, prompt, prepared, self.routing, worker)

    def _reply_limit(self, prepared: PreparedTurn) -> int:
        """Above what any correct reply to this turn can have."""
        prompt, sampled = len(prepared.input_ids), prepared.max_new_tokens
        limit = _REPLY_BYTES + _ID_BYTES * prompt + _SAMPLED_BYTES * sampled
        if self.routing is not None and prepared.routing_from is not None:
            rows = prompt + sampled - prepared.routing_from
            limit += rows * self.routing.layers * self.routing.top_k * 4 * 4 // 3  # base64 of int32
        return limit

    async def _post(self, body: bytes, headers: dict[str, str], limit: int) -> tuple[int, Any, bytes]:
        for attempt in range(1, CONNECT_TRIES + 1):
            try:
                async with self._pool().post(self.url, data=body, headers=headers, allow_redirects=False) as reply:
                    return reply.status, reply.headers, await _read(reply.content, limit)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):  # late perhaps by our own business
                if attempt == CONNECT_TRIES:
                    raise
                await asyncio.sleep(random.uniform(0.05, 0.2) * attempt)
        raise AssertionError("the loop returns or raises")

    def _pool(self) -> aiohttp.ClientSession:
        if self._client is None:  # made on the event loop it is used on
            self._client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
                auto_decompress=False,
                read_bufsize=1 << 20,
            )
        return self._client


async def _read(content: aiohttp.StreamReader, limit: int) -> bytes:
    parts, size = [], 0
    async for part in content.iter_any():
        size += len(part)
        if size > limit:
            raise _bad(f"reply of more than {limit} bytes, the limit for this turn")
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def request_body(prompt: bytes, prepared: PreparedTurn, stop_ids: tuple[int, ...]) -> bytes:
    """The `/generate` body; `prompt` is the JSON of the ids. Penalties are stated because an engine may carry other
    defaults of its own."""
    sampling = prepared.sampling
    fields: dict[str, Any] = {
        "sampling_params": {
            "max_new_tokens": prepared.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": stop_ids,
            "ignore_eos": False,
            "no_stop_trim": False,
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "logprob_start_len": -1,
        "return_prompt_token_ids": True,
        "stream": False,
    }
    if prepared.routing_from is not None:
        fields |= {"return_routed_experts": True, "routed_experts_start_len": prepared.routing_from}
    if prepared.salt is not None:
        fields["cache_salt"] = prepared.salt
    return b'{"input_ids":' + prompt + b"," + orjson.dumps(fields)[1:]


_Version = Annotated[str, msgspec.Meta(max_length=MAX_VERSION)]


class _Finish(msgspec.Struct):
    type: str
    message: Any = None


class _Span(msgspec.Struct):
    start: int
    end: int
    version: _Version


class _Meta(msgspec.Struct):
    finish_reason: _Finish
    output_token_logprobs: list[tuple[float, int, Any]]
    weight_version: _Version | None = None
    weight_versions: list[_Span] | None = None
    cached_tokens: Any = None
    num_retractions: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] | None = 0
    routed_experts: msgspec.Raw = msgspec.Raw(b"null")


class _Reply(msgspec.Struct):
    output_ids: list[int]
    meta_info: _Meta
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"null")


_decoder = msgspec.json.Decoder(_Reply)
_ids_decoder = msgspec.json.Decoder(list[int])


def read_reply(
    data: bytes, prompt: bytes, prepared: PreparedTurn, routing: RoutingShape | None = None, worker: str = ""
) -> Completion:
    """Check a `/generate` reply against what was sent (`prompt`: the JSON of its ids) and take what a session keeps."""
    try:
        return _completion(data, prompt, prepared, routing, worker)
    except SessionRefusal as refusal:
        refusal.sampled, finite = _sampled(data)
        if refusal.code is Refusal.BAD_UPSTREAM and not finite:
            refusal.code = Refusal.NONFINITE
        raise


def _sampled(data: bytes) -> tuple[int | None, bool]:
    """How many ids a refused reply says were sampled, None when it does not say, and whether their log-probs are
    finite. Read as leniently as can be: NaN and Infinity are no JSON."""
    try:
        reply = json.loads(data)
        ids = reply["output_ids"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None, True
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        return None, True
    meta = reply.get("meta_info")
    rows = meta.get("output_token_logprobs") if isinstance(meta, dict) else None
    values = [row[0] for row in rows if isinstance(row, list) and row] if isinstance(rows, list) else []
    return len(ids), not any(value in (None, math.inf, -math.inf) or value != value for value in values)


def _completion(
    data: bytes, prompt: bytes, prepared: PreparedTurn, routing: RoutingShape | None, worker: str
) -> Completion:
    # an engine and a gateway that write JSON as compactly as this server give the very bytes back: not read again
    at = data.find(_PROMPT_KEY) + len(_PROMPT_KEY) if len(data) < _READ_IN_THREAD_BYTES else len(data)
    verbatim = data.startswith(prompt, at)
    try:
        reply = _decoder.decode(b"%b0%b" % (data[:at], data[at + len(prompt) :]) if verbatim else data)
        same = bytes(reply.prompt_token_ids) in ((b"0",) if verbatim else (prompt,))
        same = same or _ids_decoder.decode(reply.prompt_token_ids) == prepared.input_ids.tolist()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(f"reply: {str(error)[:200]}") from None
    meta = reply.meta_info
    if meta.finish_reason.type not in ("stop", "length"):
        told = _shown(f"{meta.finish_reason.type} {meta.finish_reason.message or ''}")
        raise _bad(f"finish_reason {told}, expected stop or length")
    if not same:
        raise _bad(f"the engine reports another prompt than the {len(prepared.input_ids)} ids sent")
    rows = meta.output_token_logprobs
    if len(rows) != len(reply.output_ids):
        raise _bad(f"{len(reply.output_ids)} output ids and {len(rows)} log-probabilities do not pair")
    if [row[1] for row in rows] != reply.output_ids:
        raise _bad("output_token_logprobs name other ids than output_ids")
    try:
        ids = np.array(reply.output_ids, dtype=np.int32)
    except OverflowError:
        raise _bad("output_ids holds a number of more than 32 bits") from None
    cached = meta.cached_tokens
    known = type(cached) is int and 0 <= cached <= len(prepared.input_ids)
    return Completion(
        output_ids=ids,
        logprobs=np.array([row[0] for row in rows], dtype=np.float32),
        finish_reason=meta.finish_reason.type,
        spans=_spans(meta, len(ids)),
        cached_tokens=cached if known else None,
        malformed=() if known or cached is None else ("cached_tokens",),
        routing=_routing(meta.routed_experts, prepared, len(ids), routing),
        retractions=meta.num_retractions or 0,
        worker=worker,
    )


def _spans(meta: _Meta, length: int) -> tuple[tuple[int, int, str], ...]:
    """Version spans over the sampled ids: the engine's own, or its single version for all of them."""
    if meta.weight_versions is not None:
        spans = tuple((span.start, span.end, sys.intern(span.version)) for span in meta.weight_versions)
    else:
        spans = ((0, length, sys.intern(meta.weight_version or "")),)
    if not all(version for _start, _end, version in spans):
        raise _bad("reply names no weight version")
    return spans


def _routing(raw: msgspec.Raw, prepared: PreparedTurn, sampled: int, shape: RoutingShape | None) -> np.ndarray | None:
    """The new rows `[rows, layers, top_k]`: the JSON string is base64, whose letters JSON need not escape."""
    if shape is None or prepared.routing_from is None:
        return None
    text = memoryview(raw)
    if len(text) < 2 or text[0] != ord('"'):
        raise SessionRefusal(Refusal.BAD_ROUTING, f"asked for routed_experts, got {_shown(bytes(text[:40]))}")
    return decode_rows(text[1:-1], shape, len(prepared.input_ids) + sampled - 1 - prepared.routing_from)


def _shown(told: bytes | str) -> str:
    """The start of what an engine says, on one line: both the agent and the log get it."""
    start = told[: 8 * _SHOWN]
    text = start if isinstance(start, str) else start.decode(errors="replace")
    return _UNTOLD.sub("...", " ".join(text.split()))[:_SHOWN]


def _no_engine(problem: str) -> SessionRefusal:
    return SessionRefusal(Refusal.NO_ENGINE, problem)


def _bad(problem: str) -> SessionRefusal:
    return SessionRefusal(Refusal.BAD_UPSTREAM, problem)
