"""The HTTP bodies of the agent path: OpenAI chat request in, OpenAI reply (whole or as SSE chunks) out.

A reply carries text and tool calls only: no ids, no log-probabilities. Sampling parameters in a request are never
used; those that differ from the session's pinned ones are named so that they can be counted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import orjson

from rl360.sessions.core import Sampling, Session, Turn
from rl360.sessions.messages import Message, Tool, parse_messages, parse_tools
from rl360.sessions.refusals import Refusal, SessionRefusal

# understood elsewhere, or without any influence on what is sampled
_NEUTRAL = frozenset(
    {"messages", "tools", "stream", "stream_options", "model", "n", "tool_choice", "response_format"}
    | {"user", "metadata", "store", "parallel_tool_calls"}
)
_PINNED = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
}


@dataclass(frozen=True)
class ChatRequest:
    """A checked request. `ignored` names the parameters that asked for something else than what is pinned."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    stream: bool
    include_usage: bool
    model: str
    ignored: tuple[str, ...]


def _refuse(message: str) -> SessionRefusal:
    return SessionRefusal(Refusal.BAD_BODY, message)


def parse_chat_request(data: bytes, pinned: Sampling) -> ChatRequest:
    """Decode and check a request body; every refusal is `bad_body` and names the field."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise _refuse(f"body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise _refuse(f"body is {type(body).__name__}, expected an object")
    stream = body.get("stream")
    if stream not in (None, False, True):
        raise _refuse(f"stream is {str(stream)[:40]!r}, use true or false")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise _refuse("stream_options is not an object")
    _require(body, "n", (None, 1), "a session has one continuation; use 1")
    _require(body, "tool_choice", (None, "auto"), "the policy decides; use auto")
    _require(body, "response_format", (None, {"type": "text"}), "replies are not constrained; use text")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise _refuse(f"model is {type(model).__name__}, expected a string")
    return ChatRequest(
        messages=parse_messages(body.get("messages")),
        tools=parse_tools(body.get("tools")),
        stream=bool(stream),
        include_usage=bool(options.get("include_usage")),
        model=(model or "policy")[:200],
        ignored=_ignored(body, pinned),
    )


def _require(body: dict[str, Any], name: str, allowed: tuple[Any, ...], why: str) -> None:
    value = body.get(name)
    if isinstance(value, bool) or value not in allowed:
        raise _refuse(f"{name} {str(value)[:60]!r} is not supported: {why}")


def _ignored(body: dict[str, Any], pinned: Sampling) -> tuple[str, ...]:
    names = []
    for name, value in body.items():
        if name in _PINNED:
            differs = value is not None and value != getattr(pinned, _PINNED[name])
        else:
            differs = name not in _NEUTRAL and value not in (None, False, 0, "", [], {})
        if differs:
            names.append(name[:64])
    return tuple(names)


def _usage(turn: Turn) -> dict[str, Any]:
    return {
        "prompt_tokens": turn.prompt_end,
        "completion_tokens": turn.sampled,
        "total_tokens": turn.end,
        "prompt_tokens_details": {"cached_tokens": turn.cached_tokens},
    }


def _finish_reason(turn: Turn) -> str:
    if turn.cut:
        return "length"
    return "tool_calls" if turn.reply.tool_calls else "stop"


def _reply_id(session: Session) -> str:
    # not derived from the session id: that one is the key to the session
    return f"chatcmpl-{session.spec.attempt_id}-{session.epoch}"


def reply_body(session: Session, turn: Turn, model: str) -> bytes:
    """The `chat.completion` object of a recorded turn."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.reply.content or None}
    if turn.reply.tool_calls:
        message["tool_calls"] = [call.to_openai() for call in turn.reply.tool_calls]
    elif message["content"] is None:
        message["content"] = ""
    return orjson.dumps(
        {
            "id": _reply_id(session),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [{"index": 0, "message": message, "finish_reason": _finish_reason(turn), "logprobs": None}],
            "usage": _usage(turn),
        }
    )


def reply_sse(session: Session, turn: Turn, model: str, include_usage: bool) -> bytes:
    """The same reply as the server-sent events of a streaming request, ending in [DONE]."""
    head = {
        "id": _reply_id(session),
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": model,
    }
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if turn.reply.content:
        deltas.append({"content": turn.reply.content})
    deltas.extend({"tool_calls": [{"index": i, **call.to_openai()}]} for i, call in enumerate(turn.reply.tool_calls))
    chunks: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": _finish_reason(turn)}]})
    if include_usage:
        chunks.append({**head, "choices": [], "usage": _usage(turn)})
    return b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def error_body(code: str, message: str, status: int) -> bytes:
    """`{"error": {message, type, code}}`, as the OpenAI clients read it."""
    kind = "upstream_error" if status >= 500 else "invalid_request_error"
    return orjson.dumps({"error": {"message": message, "type": kind, "code": code, "param": None}})
