"""The agent's path in the OpenAI format: chat request in, reply (whole or as SSE chunks) out.

`cut` and `split` read any agent's body without parsing its messages: each stays the bytes it came as, and those that
the session was sent before are only compared. What a body may cost is bounded by its size and by how many values it
has. A reply carries text and tool calls only: no ids, no log-probabilities.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from rl360.sessions.core import Session
from rl360.sessions.messages import MAX_MESSAGES, MAX_VALUES, Tool, openai_message, parse_tools, too_many_values
from rl360.sessions.refusals import Refusal, SessionRefusal
from rl360.sessions.turns import Parse, Turn

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
# a number or a boolean says something, but for the protocol's own defaults
_DEFAULTS = {"frequency_penalty": 0, "presence_penalty": 0, "logprobs": False, "top_logprobs": 0}
BEAT = b": keep-alive\n\n"
Raws = tuple[bytes, ...]
MAX_FIELDS = 256
_CUT_BYTES = 32 << 10  # a shorter body is read as quickly as it is cut
_LEAD_BYTES = 256 << 10  # in which the list of messages begins, or the body is read as a whole
_OPENING, _COMMA = re.compile(rb'"messages"\s*:\s*\[\s*'), re.compile(rb"\s*,\s*")
_CUT = secrets.token_hex(16)  # names the list of messages in a body that `cut` shortened: no body can have it
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(frozen=True)
class AgentRequest:
    """A checked request of either format. `raws` are the messages as JSON, `parse` reads one of them, `parse_tools` all
    tools; `asked` are the sampling parameters it names, under their names in `Sampling`; `ignored` names fields that
    have no effect here."""

    raws: list[bytes]
    tools_raw: bytes | None
    parse: Parse
    parse_tools: Callable[[Any], tuple[Tool, ...]]
    asked: dict[str, Any]
    ignored: tuple[str, ...]
    stream: bool
    model: str
    include_usage: bool = False


def refuse(message: str) -> SessionRefusal:
    """A body that no session takes."""
    return SessionRefusal(Refusal.BAD_BODY, message)


def cut(data: bytes, held: Raws) -> tuple[Raws, bytes]:
    """(the first of the messages `held` that a body begins with, the body without them); its last one always stays.

    Compares bytes instead of parsing them: a history is sent again every turn.
    """
    opening = _OPENING.search(data, 0, _LEAD_BYTES) if held and len(data) > _CUT_BYTES else None
    if opening is None:
        return (), data
    start = end = opening.end()
    first = 0 if data.startswith(held[0], start) else 1  # an Anthropic body has its system prompt elsewhere
    after = first
    while after < len(held) and data.startswith(held[after], end):
        comma = _COMMA.match(data, end + len(held[after]))
        if comma is None:
            break
        end, after = comma.end(), after + 1
    lead = data[: opening.start()] + b'"%b":[' % _CUT.encode()
    if after == first or _CUT not in _fields(lead + b"]}"):  # nothing known, or another list of that name
        return (), data
    return held[first:after], lead + data[end:]


def _fields(data: bytes) -> dict[str, msgspec.Raw]:
    """The fields of an object, none when it is none."""
    try:
        return _fields_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return {}


def split(data: bytes, known: Raws = ()) -> tuple[list[bytes], bytes | None, dict[str, Any]]:
    """(messages, tools, every other field decoded) of a body; messages and tools stay JSON. `data` is what `cut` left,
    `known` what it cut."""
    if too_many_values(data):
        raise refuse(f"body of {len(data)} bytes has over {MAX_VALUES} values (commas, lists, objects), the limit")
    try:
        raws = _fields_decoder.decode(data)
        if len(raws) > MAX_FIELDS:
            raise refuse(f"body has {len(raws)} fields, at most {MAX_FIELDS}")
        messages = _list_decoder.decode(raws.pop(_CUT if known else "messages", b"[]"))
        tools = raws.pop("tools", None)
        fields = {name: orjson.loads(memoryview(raw)) for name, raw in raws.items()}
    except (msgspec.DecodeError, orjson.JSONDecodeError, RecursionError) as error:
        raise refuse(f"body is not a JSON object with a list of messages: {str(error)[:120]}") from None
    if not messages or "messages" in fields:
        raise refuse("messages is given twice" if messages else "messages is absent or empty")
    if len(known) + len(messages) > MAX_MESSAGES:
        raise refuse(f"messages: {len(known) + len(messages)} of them, at most {MAX_MESSAGES}")
    return [*known, *map(bytes, messages)], None if tools is None else bytes(tools), fields


def read_chat(data: bytes, known: Raws = ()) -> AgentRequest:
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


def require(fields: dict[str, Any], name: str, allowed: tuple[Any, ...], why: str) -> None:
    """Refuse a field that is none of `allowed`."""
    value = fields.get(name)
    if isinstance(value, bool) or value not in allowed:
        raise refuse(f"{name} {str(value)[:60]!r} is not supported: {why}")


def read_stream(fields: dict[str, Any]) -> bool:
    stream = fields.get("stream")
    if stream not in (None, False, True):
        raise refuse(f"stream is {str(stream)[:40]!r}, use true or false")
    return bool(stream)


def read_model(fields: dict[str, Any]) -> str:
    """The name the reply repeats: a session has one model, whatever it is called."""
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise refuse(f"model is {type(model).__name__}, expected a string")
    return (model or "policy")[:200]


def named_params(
    fields: dict[str, Any], sampling: dict[str, str], neutral: frozenset[str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(sampling parameters asked for, names of other fields that say something and have no effect)."""
    asked, ignored = {}, []
    for name, value in fields.items():
        if name in sampling:
            if value is not None:
                asked[sampling[name]] = value
        elif name not in neutral and value not in (None, "", [], {}) and value != _DEFAULTS.get(name):
            ignored.append(name[:64])
    return asked, tuple(ignored)


def reply_id(session: Session, turn: Turn) -> str:
    """Unique per recorded turn; not derived from the session id, which is the key to the session."""
    return f"{session.spec.attempt_id}-{turn.index + 1}"


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


def reply_body(session: Session, turn: Turn, asked: AgentRequest) -> bytes:
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


def reply_sse(session: Session, turn: Turn, asked: AgentRequest) -> bytes:
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


def error_body(code: str, message: str, status: int, **more: int) -> bytes:
    """`{"error": {message, type, code}}`, as the OpenAI clients read it, and `more` of it."""
    kind = "upstream_error" if status >= 500 else "invalid_request_error"
    return orjson.dumps({"error": {"message": message, "type": kind, "code": code, "param": None, **more}})


def models_body(model: str) -> bytes:
    """The one model of a session, readable as an OpenAI and as an Anthropic list."""
    entry = {"id": model, "object": "model", "created": 0, "owned_by": "rl360"}
    entry |= {"type": "model", "display_name": model, "created_at": "1970-01-01T00:00:00Z"}
    return orjson.dumps({"object": "list", "data": [entry], "has_more": False, "first_id": model, "last_id": model})
