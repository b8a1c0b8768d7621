"""The one call a session server makes: `POST {upstream}/generate`, token ids in, token ids out.

Every field that decides what is sampled is assigned here, outright. The reply is taken only when it answers exactly
what was asked: same prompt ids, one log-probability per sampled id, a finish reason, a weight version for every id.
Anything else, an abort, an error status or a missed deadline is `bad_upstream` and nothing is recorded; nobody there to
ask is `no_engine`. Only a refused connection is tried again: once bytes were sent the engine may have sampled.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import numpy as np
import orjson

from rl360.pools import busy_pool
from rl360.sessions.core import Completion, PreparedTurn, Sampling
from rl360.sessions.refusals import Refusal, SessionRefusal

ROUTING_HEADER = "X-SMG-Routing-Key"
_GATEWAY_ERROR_HEADER = "x-smg-error-code"  # model_not_found: the gateway has no worker at all
CONNECT_TRIES = 3
MAX_CONCURRENT = 128
MAX_REPLY_BYTES = 64 << 20


class Upstream:
    """A pooled client of one SMG gateway (or one engine). One per server process, closed with `aclose`."""

    def __init__(self, url: str, vocab_size: int, end_id: int, deadline_s: float) -> None:
        self._url = httpx.URL(url.rstrip("/") + "/generate")
        self._vocab_size = vocab_size
        self._end_id = end_id
        self._deadline_s = deadline_s
        self._timeout = httpx.Timeout(deadline_s, connect=min(5.0, deadline_s)).as_dict()
        limits = busy_pool(2 * MAX_CONCURRENT)
        # the transport without the client around it: no cookies, redirects, auth or proxies, half the CPU of a call
        self._transport = httpx.AsyncHTTPTransport(limits=limits, trust_env=False)

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def generate(self, session_id: str, sampling: Sampling, prepared: PreparedTurn) -> Completion:
        """Sample one turn. Raises `SessionRefusal(bad_upstream)`; cancelling it closes the connection."""
        ids = prepared.input_ids
        if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size:
            # an id outside the vocabulary ends the engine process: it must not leave this one
            raise _bad(f"not sent: {len(ids)} ids, all must lie in [0, {self._vocab_size})")
        body = orjson.dumps(request_body(prepared, sampling, self._end_id), option=orjson.OPT_SERIALIZE_NUMPY)
        headers = {ROUTING_HEADER: session_id, "Content-Type": "application/json"}
        try:
            async with asyncio.timeout(self._deadline_s):
                response = await self._post(body, headers)
        except (TimeoutError, httpx.TimeoutException):
            raise _bad(f"no reply from {self._url} within {self._deadline_s:g} s") from None
        except httpx.ConnectError as error:
            raise _no_engine(f"{self._url} refused {CONNECT_TRIES} connections ({error})") from None
        except httpx.HTTPError as error:
            raise _bad(f"{self._url}: {type(error).__name__} {str(error)[:200]}") from None
        if response.status_code == 503 or response.headers.get(_GATEWAY_ERROR_HEADER) == "model_not_found":
            raise _no_engine(f"{self._url} has no engine to ask ({response.status_code}: {response.text[:200]})")
        if response.status_code != 200:
            raise _bad(f"{self._url} answered {response.status_code}: {response.text[:300]}")
        if len(response.content) > MAX_REPLY_BYTES:
            raise _bad(f"reply of {len(response.content)} bytes, the limit is {MAX_REPLY_BYTES}")
        try:
            reply = orjson.loads(response.content)
        except orjson.JSONDecodeError:
            raise _bad("reply is not JSON") from None
        return read_reply(reply, ids)

    async def _post(self, body: bytes, headers: dict[str, str]) -> httpx.Response:
        for attempt in range(1, CONNECT_TRIES + 1):
            try:
                request = httpx.Request(
                    "POST", self._url, content=body, headers=headers, extensions={"timeout": self._timeout}
                )
                response = await self._transport.handle_async_request(request)
                await response.aread()
                return response
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if attempt == CONNECT_TRIES:
                    raise
                await asyncio.sleep(random.uniform(0.05, 0.2) * attempt)
        raise AssertionError("the loop returns or raises")


def request_body(prepared: PreparedTurn, sampling: Sampling, end_id: int) -> dict[str, Any]:
    """The `/generate` body. Penalties are stated because an engine may carry other defaults of its own."""
    return {
        "input_ids": np.ascontiguousarray(prepared.input_ids),
        "sampling_params": {
            "max_new_tokens": prepared.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": [end_id],
            "ignore_eos": False,
            "no_stop_trim": False,
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "logprob_start_len": -1,
        "return_prompt_token_ids": True,
        "stream": False,
    }


def read_reply(reply: Any, sent_ids: np.ndarray) -> Completion:
    """Check a `/generate` reply against what was sent and take what a session keeps."""
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    if not isinstance(meta, dict):
        raise _bad(f"reply has no meta_info: {str(reply)[:200]}")
    finish = meta.get("finish_reason")
    reason = finish.get("type") if isinstance(finish, dict) else None
    if reason not in ("stop", "length"):
        raise _bad(f"finish_reason {str(finish)[:200]}, expected stop or length")
    prompt = reply.get("prompt_token_ids")
    if prompt != sent_ids.tolist():
        shown = f"{len(prompt)} ids" if isinstance(prompt, list) else repr(prompt)[:40]
        raise _bad(f"the engine reports another prompt ({shown}) than the {len(sent_ids)} ids sent")
    output_ids, rows = reply.get("output_ids"), meta.get("output_token_logprobs")
    if not isinstance(output_ids, list) or not isinstance(rows, list) or len(output_ids) != len(rows):
        raise _bad(f"{_length(output_ids)} output ids and {_length(rows)} log-probabilities do not pair")
    try:
        ids = np.array(output_ids, dtype=np.int32)
        logprobs = np.array([row[0] for row in rows], dtype=np.float32)
        named = [row[1] for row in rows]
    except (TypeError, ValueError, OverflowError, IndexError, KeyError):
        raise _bad("output_ids or output_token_logprobs hold something else than numbers") from None
    if named != output_ids or not all(type(i) is int for i in output_ids):
        raise _bad("output_token_logprobs name other ids than output_ids")
    cached = meta.get("cached_tokens", 0)
    return Completion(
        output_ids=ids,
        logprobs=logprobs,
        finish_reason=reason,
        spans=_spans(meta, len(output_ids)),
        cached_tokens=cached if type(cached) is int and 0 <= cached <= len(sent_ids) else 0,
    )


def _spans(meta: dict[str, Any], length: int) -> tuple[tuple[int, int, str], ...]:
    """Version spans over the sampled ids: the engine's own, or its single version for all of them."""
    raw = meta.get("weight_versions")
    if raw is None:
        version = meta.get("weight_version")
        if not isinstance(version, str) or not version:
            raise _bad(f"reply names no weight version ({version!r})")
        return ((0, length, version),)
    spans: list[tuple[int, int, str]] = []
    for item in raw if isinstance(raw, list) else [None]:
        named = item if isinstance(item, dict) else {}
        start, end, version = named.get("start"), named.get("end"), named.get("version")
        if type(start) is not int or type(end) is not int or not isinstance(version, str) or not version:
            raise _bad(f"weight_versions {str(raw)[:120]} is not a list of start, end, version")
        spans.append((start, end, version))
    return tuple(spans)


def _length(value: Any) -> str:
    return str(len(value)) if isinstance(value, list) else type(value).__name__


def _no_engine(problem: str) -> SessionRefusal:
    return SessionRefusal(Refusal.NO_ENGINE, problem)


def _bad(problem: str) -> SessionRefusal:
    return SessionRefusal(Refusal.BAD_UPSTREAM, problem)
