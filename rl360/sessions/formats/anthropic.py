"""Anthropic Messages: request in, message (whole or as SSE events) out.

Blocks become the same messages an OpenAI request would give: tool_use is a tool call, tool_result a tool message,
thinking the reasoning of a turn. What a session holds does not depend on the format its agent speaks.
"""

from __future__ import annotations

from typing import Any

import orjson

from rl360.sessions.core import Session
from rl360.sessions.messages import Message, Tool, openai_message, parse_tools
from rl360.sessions.refusals import Refusal, SessionRefusal
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

_NEUTRAL = frozenset({"stream", "model", "system", "tool_choice", "metadata", "service_tier", "cache_control"})
BEAT = b'event: ping\ndata: {"type": "ping"}\n\n'
_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "max_tokens": "max_new_tokens"}
_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    501: "api_error",
    502: "api_error",
    503: "overloaded_error",
}


def read(data: bytes, known: Raws = ()) -> AgentRequest:
    """Decode and check a Messages body (`max_tokens` may be absent); every refusal is `bad_body`, naming the field."""
    raws, tools_raw, fields = split(data, known)
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "auto":
        fields["tool_choice"] = None  # {"type": "auto", "disable_parallel_tool_use": ...}
    require(fields, "tool_choice", (None,), 'the policy decides; use {"type": "auto"}')
    if fields.get("thread") is not None:
        raise SessionRefusal(Refusal.THREADS, "thread is not supported: send the whole history every time")
    if fields.get("system") not in (None, "", []):
        system = {"role": "system", "content": _text(fields["system"], "system")}
        raws = [orjson.dumps(system), *raws]
    asked, ignored = named_params(fields, _SAMPLING, _NEUTRAL)
    return AgentRequest(
        raws=raws,
        tools_raw=tools_raw,
        parse=_message,
        parse_tools=_tools,
        asked=asked,
        ignored=ignored,
        stream=read_stream(fields),
        model=read_model(fields),
    )


def _tools(raw: Any) -> tuple[Tool, ...]:
    if raw is not None and not isinstance(raw, list):
        raise refuse("tools is not a list")
    functions = []
    for i, tool in enumerate(raw or []):
        if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
            raise refuse(f"tools[{i}] is not a tool of the client's; use {{name, description, input_schema}}")
        described = {"description": tool["description"]} if tool.get("description") is not None else {}
        function = {"name": tool.get("name"), **described, "parameters": tool.get("input_schema")}
        functions.append({"type": "function", "function": function})
    return parse_tools(functions)


def _message(raw: Any, where: str) -> tuple[Message, ...]:
    """One element of `messages`: an assistant turn, or a user turn with its tool results as messages of their own."""
    role = raw.get("role") if isinstance(raw, dict) else None
    if role == "system" and where == "messages[0]":
        return openai_message(raw, "system")
    if role not in ("user", "assistant"):
        raise refuse(f"{where}: role {str(role)[:40]!r} is not user or assistant")
    content = raw.get("content")
    if isinstance(content, str):
        return openai_message({"role": role, "content": content}, where)
    if not isinstance(content, list):
        raise refuse(f"{where}: content is {type(content).__name__}, use a string or a list of blocks")
    return _assistant(content, where) if role == "assistant" else _user(content, where)


def _user(blocks: list[Any], where: str) -> tuple[Message, ...]:
    messages: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        place = f"{where}.content[{i}]"
        kind = _kind(block)
        if kind == "tool_result":
            content = block.get("content")
            text = "" if content is None else _text(content, place)
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind == "text":
            part = {"type": "text", "text": _text([block], place)}
            if messages and messages[-1]["role"] == "user":
                messages[-1]["content"].append(part)
            else:
                messages.append({"role": "user", "content": [part]})
        else:
            raise refuse(f"{place}: {_a(kind)} block is not supported in a user message; use text and tool_result")
    if not messages:
        raise refuse(f"{where}: content is empty")
    return tuple(message for item in messages for message in openai_message(item, where))


def _assistant(blocks: list[Any], where: str) -> tuple[Message, ...]:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        place = f"{where}.content[{i}]"
        kind = _kind(block)
        if kind == "text":
            texts.append(_text([block], place))
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            if not isinstance(block.get("input"), dict):
                raise refuse(f"{place}: input of a tool_use block is not an object")
            function = {"name": block.get("name"), "arguments": _json(block["input"], place)}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        else:
            raise refuse(f"{place}: {_a(kind)} block is not supported in an assistant message")
    reasoning = "".join(thoughts) or None
    message = {"role": "assistant", "content": "".join(texts), "reasoning_content": reasoning, "tool_calls": calls}
    return openai_message(message, where)


def _json(value: Any, where: str) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise refuse(f"{where}: {error}") from None


def _kind(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    return kind[:40] if isinstance(kind, str) else type(block).__name__


def _a(kind: str) -> str:
    return f"{'an' if kind[:1] in tuple('aeiou') else 'a'} {kind}"


def _text(content: Any, where: str) -> str:
    """The text of a string or of text blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refuse(f"{where} is {type(content).__name__}, use a string or a list of text blocks")
    for block in content:
        if _kind(block) != "text" or not isinstance(block.get("text"), str):
            raise refuse(f"{where}: {_a(_kind(block))} block is not supported here; use text")
    return "".join(block["text"] for block in content)


def _stop_reason(turn: Turn) -> str:
    if turn.cut:
        return "max_tokens"
    return "tool_use" if turn.reply.tool_calls else "end_turn"


def _head(session: Session, turn: Turn, model: str) -> dict[str, Any]:
    return {
        "id": f"msg_{reply_id(session, turn)}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": turn.prompt_end - (turn.cached_tokens or 0),
            "cache_read_input_tokens": turn.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": 0,
        },
    }


def _blocks(turn: Turn) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if turn.reply.reasoning:
        blocks.append({"type": "thinking", "thinking": turn.reply.reasoning, "signature": ""})
    if turn.reply.content:
        blocks.append({"type": "text", "text": turn.reply.content})
    return blocks + [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": orjson.loads(call.arguments)}
        for call in turn.reply.tool_calls
    ]


def body(session: Session, turn: Turn, asked: AgentRequest) -> bytes:
    """The `message` object of a recorded turn."""
    message = _head(session, turn, asked.model)
    message |= {"content": _blocks(turn), "stop_reason": _stop_reason(turn)}
    message["usage"]["output_tokens"] = turn.sampled
    return orjson.dumps(message)


def events(session: Session, turn: Turn, asked: AgentRequest) -> bytes:
    """The same reply as the events of a streaming request: every block in one delta."""
    sent: list[dict[str, Any]] = [{"type": "message_start", "message": _head(session, turn, asked.model)}]
    for index, block in enumerate(_blocks(turn)):
        if block["type"] == "tool_use":
            empty: dict[str, Any] = {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": orjson.dumps(block["input"]).decode()}
        else:  # text or thinking, the field is called like the block
            empty = {block["type"]: ""}
            delta = {"type": f"{block['type']}_delta", block["type"]: block[block["type"]]}
        sent.append({"type": "content_block_start", "index": index, "content_block": block | empty})
        sent.append({"type": "content_block_delta", "index": index, "delta": delta})
        sent.append({"type": "content_block_stop", "index": index})
    end = {"stop_reason": _stop_reason(turn), "stop_sequence": None}
    sent.append({"type": "message_delta", "delta": end, "usage": {"output_tokens": turn.sampled}})
    sent.append({"type": "message_stop"})
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in sent)


def error_body(code: str, message: str, status: int, **more: int | None) -> bytes:
    """`{"type": "error", "error": {type, message}}`, as the Anthropic clients read it; `code` is rl360's own."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": message, "code": code, **more}
    if code == Refusal.THREADS:  # told so, the library's agent loop goes on without a thread
        error["details"] = {"error_code": code, "unsupported": ["thread"]}
    return orjson.dumps({"type": "error", "error": error})
