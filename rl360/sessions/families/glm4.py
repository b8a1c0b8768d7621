"""Family `glm4`: GLM-4.5 and GLM-4.6 checkpoints, whose messages have no end token at all.

A turn ends when the model samples a token that could open the next message: `<|user|>`, or `<|observation|>` after a
call. That sampled token *is* the next message's role token and is not written again; when the model named the wrong
one, or `<|endoftext|>`, the sampled id stays and the right role token follows. Their own template is not append-only:
it drops the thinking of turns before the last user message. Here every turn keeps it. With thinking off, `/nothink`
closes each user message and the empty thinking block belongs to the prompt.

An argument is text where the tool's schema says string; elsewhere it is JSON, and text when it is not JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from rl360.sessions.families.base import CALL_CLOSE, CALL_OPEN, Family, ParsedCall, Piece, Pieces, find, plain
from rl360.sessions.messages import Message, Tool, written_back

USER, OBSERVATION, SYSTEM, ASSISTANT = "<|user|>", "<|observation|>", "<|system|>", "<|assistant|>"
THINK, UNTHINK = "<think>", "</think>"
_ARGUMENT = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def read_call(inside: Sequence[Piece], tools: dict[str, Tool]) -> ParsedCall | None:
    """`name`, then pairs of `<arg_key>…</arg_key>` and `<arg_value>…</arg_value>`, line breaks between them."""
    first = find(inside, _ARGUMENT[0])
    name = plain(inside[: first if first >= 0 else len(inside)])
    tool = tools.get((name or "").strip())
    if tool is None:
        return None
    kinds = dict(tool.parameters)
    arguments: dict[str, Any] = {}
    rest = [] if first < 0 else inside[first:]
    while not _blank(rest):
        texts = []
        for token in _ARGUMENT:
            at = find(rest, token)
            text = plain(rest[:at]) if at >= 0 else None
            if text is None:
                return None
            texts.append(text)
            rest = rest[at + 1 :]
        before, key, between, value = texts
        if before.strip() or between.strip() or key in arguments:
            return None
        arguments[key] = _value(value, kinds.get(key, ""))
    return ParsedCall(tool.name, arguments)


def _blank(pieces: Sequence[Piece]) -> bool:
    text = plain(pieces)
    return text is not None and not text.strip()


def _value(text: str, kind: str) -> Any:
    if kind == "string":
        return text
    try:
        value = orjson.loads(text)
        return value if written_back(value) == value else text
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return text


def split_reasoning(pieces: Pieces) -> tuple[str | None, Pieces] | None:
    """`\\n<think>…</think>` at the start of a turn; an empty block is no reasoning."""
    opened = find(pieces, THINK)
    if opened < 0:
        return None, pieces
    close = find(pieces, UNTHINK)
    before, text = plain(pieces[:opened]), plain(pieces[opened + 1 : close]) if close > opened else None
    if before is None or before.strip() or text is None:
        return None
    return text or None, pieces[close + 1 :]


def trim(content: str, called: bool) -> str:
    """Without the line break before the content, and the one before the first call."""
    content = content.removeprefix("\n")
    return content.removesuffix("\n") if called else content


def stop_for(message: Message, followed_by: str | None) -> str:
    """The role token a model samples after `message`."""
    if followed_by is None:
        return OBSERVATION if message.tool_calls else USER
    return OBSERVATION if followed_by == "tool" else USER


FAMILY = Family(
    name="glm4",
    about="no end token: the next role token ends a turn; calls as name, arg_key, arg_value; thinking on or off",
    template_file="glm4.jinja",
    model_types=frozenset({"glm4_moe"}),
    stock_marks=("/nothink", "<arg_key>", "<tool_response>"),
    tokens=(
        *("<|endoftext|>", "[gMASK]", "<sop>", SYSTEM, USER, ASSISTANT, OBSERVATION),
        *(THINK, UNTHINK, CALL_OPEN, CALL_CLOSE, "<tool_response>", "</tool_response>", *_ARGUMENT),
    ),
    stops=(USER, OBSERVATION, "<|endoftext|>"),
    read_call=read_call,
    end=None,
    stop_for=stop_for,
    split_reasoning=split_reasoning,
    trim=trim,
    between_calls="\n",
)
