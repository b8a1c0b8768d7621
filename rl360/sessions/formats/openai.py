"""OpenAI chat completions: request in, reply (whole or as SSE chunks) out."""

from __future__ import annotations

import time
from typing import Any

import orjson

from rl360.sessions.core import Session
from rl360.sessions.messages import openai_message, parse_tools
from rl360.sessions.turns import Turn
from rl360.sessions.wire import (
    AgentRequest,
    Raws,
    named_params,
    read_model,
    read_stream,
    refuse,
    reply_id,
    require,
    split,
)

# understood elsewhere, or without any influence on what is sampled
_NEUTRAL = frozenset(
    {"stream", "stream_options", "model", "n", "tool_choice", "response_format"}
    | {"user", "metadata", "store", "parallel_tool_calls"}
)
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
}
BEAT = b": keep-alive\n\n"


def read(data: bytes, known: Raws = ()) -> AgentRequest:
    """Decode and check an OpenAI chat body; every refusal is `bad_body` and names the field."""
    raws, tools_raw, fields = split(data, known)
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict):
        raise refuse("stream_options is not an object")
    require(fields, "n", (None, 1), "a session has one continuation; use 1")
    require(fields, "tool_choice", (None, "auto"), "the policy decides; use auto")
    require(fields, "response_format", (None, {"type": "text"}), "replies are not constrained; use text")
    asked, ignored = named_params(fields, _SAMPLING, _NEUTRAL)
    return AgentRequest(
        raws=raws,
        tools_raw=tools_raw,
        parse=openai_message,
        parse_tools=parse_tools,
        asked=asked,
        ignored=ignored,
        stream=read_stream(fields),
        model=read_model(fields),
        include_usage=bool(options.get("include_usage")),
    )


def _usage(turn: Turn) -> dict[str, Any]:
    return {
        "prompt_tokens": turn.prompt_end,
        "completion_tokens": turn.sampled,
        "total_tokens": turn.end,
        "prompt_tokens_details": {} if turn.cached_tokens is None else {"cached_tokens": turn.cached_tokens},
    }


def _finish_reason(turn: Turn) -> str:
    if turn.cut:
        return "length"
    return "tool_calls" if turn.reply.tool_calls else "stop"


def body(session: Session, turn: Turn, asked: AgentRequest) -> bytes:
    """The `chat.completion` object of a recorded turn."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.reply.content or None}
    if turn.reply.reasoning is not None:
        message["reasoning_content"] = turn.reply.reasoning
    if turn.reply.tool_calls:
        message["tool_calls"] = [call.to_openai() for call in turn.reply.tool_calls]
    elif message["content"] is None:
        message["content"] = ""
    return orjson.dumps(
        {
            "id": f"chatcmpl-{reply_id(session, turn)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": asked.model,
            "choices": [{"index": 0, "message": message, "finish_reason": _finish_reason(turn), "logprobs": None}],
            "usage": _usage(turn),
        }
    )


def events(session: Session, turn: Turn, asked: AgentRequest) -> bytes:
    """The same reply as the server-sent events of a streaming request, ending in [DONE]."""
    head = {
        "id": f"chatcmpl-{reply_id(session, turn)}",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": asked.model,
    }
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if turn.reply.reasoning:
        deltas.append({"reasoning_content": turn.reply.reasoning})
    if turn.reply.content:
        deltas.append({"content": turn.reply.content})
    deltas.extend({"tool_calls": [{"index": i, **call.to_openai()}]} for i, call in enumerate(turn.reply.tool_calls))
    chunks: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": _finish_reason(turn)}]})
    if asked.include_usage:
        chunks.append({**head, "choices": [], "usage": _usage(turn)})
    return b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def error_body(code: str, message: str, status: int, **more: int | None) -> bytes:
    """`{"error": {message, type, code}}`, as the OpenAI clients read it, and `more` of it."""
    kind = "upstream_error" if status >= 500 else "invalid_request_error"
    return orjson.dumps({"error": {"message": message, "type": kind, "code": code, "param": None, **more}})


def models_body(model: str) -> bytes:
    """The one model of a session, readable as an OpenAI and as an Anthropic list."""
    entry = {"id": model, "object": "model", "created": 0, "owned_by": "rl360"}
    entry |= {"type": "model", "display_name": model, "created_at": "1970-01-01T00:00:00Z"}
    return orjson.dumps({"object": "list", "data": [entry], "has_more": False, "first_id": model, "last_id": model})
