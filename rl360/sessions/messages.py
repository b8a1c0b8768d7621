"""Chat messages and tools, checked and brought to one comparable form.

`openai_message` and `parse_tools` take decoded JSON from an untrusted agent and either return frozen values or raise
`SessionRefusal(bad_body)` naming the place (`messages[3].tool_calls[0]`), the value and what is allowed. Two messages
are equal exactly when they mean the same to the chat template and to the agent: null content is empty content, tool
arguments compare as JSON values with their types, whatever their spacing and key order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from rl360.sessions.refusals import Refusal, SessionRefusal

MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_VALUES = 100_000  # of a long JSON text: parsing more would stop every thread for too long
_STEP = 256 << 10  # a longer text is a long one; bytes that are looked at in one go, other threads run in between
_STRUCTURE = np.zeros(256, dtype=bool)
_STRUCTURE[list(b",[{")] = True
ROLES = ("system", "user", "assistant", "tool")
_KNOWN = {
    "system": frozenset({"role", "content", "name"}),
    "user": frozenset({"role", "content", "name"}),
    "assistant": frozenset({"role", "content", "name", "tool_calls", "reasoning_content"}),
    "tool": frozenset({"role", "content", "name", "tool_call_id"}),
}
_REPLY_LEVELS = 8  # at least those around the arguments of a call, in any format
_OBJECT_BYTES = 256  # of one message or call without its text


@dataclass(frozen=True)
class ToolCall:
    """One call. `arguments` is compact JSON in the order given; equality looks at `arguments_key` (sorted)."""

    id: str
    name: str
    arguments: str = field(compare=False)
    arguments_key: str

    @classmethod
    def make(cls, call_id: str, name: str, arguments: dict[str, Any]) -> ToolCall:
        return cls(
            id=call_id,
            name=name,
            arguments=orjson.dumps(arguments).decode(),
            arguments_key=orjson.dumps(arguments, option=orjson.OPT_SORT_KEYS).decode(),
        )

    def to_openai(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Message:
    """One message of a conversation. `tool_calls` and `reasoning` (the wire's `reasoning_content`) only on assistant
    messages, `tool_call_id` only on tool messages. `reasoning` None is unstated; a matcher decides what that means."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None

    def to_template(self) -> dict[str, Any]:
        """The shape chat templates expect: tool arguments as objects, not JSON text."""
        rendered: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning is not None:
            rendered["reasoning_content"] = self.reasoning
        if self.tool_calls:
            rendered["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": orjson.loads(call.arguments)}}
                for call in self.tool_calls
            ]
        return rendered

    def held_bytes(self) -> int:
        """What keeping this message costs, in bytes, roughly and from above."""
        size = _OBJECT_BYTES + sys.getsizeof(self.content) + sys.getsizeof(self.reasoning)
        size += sys.getsizeof(self.tool_call_id)
        for call in self.tool_calls:
            size += (
                _OBJECT_BYTES + sys.getsizeof(call.id) + sys.getsizeof(call.name) + 2 * sys.getsizeof(call.arguments)
            )
        return size


@dataclass(frozen=True)
class Tool:
    """One callable tool. `definition` is the compact JSON of the whole tool as given, and what equality means;
    `parameters` (name, JSON type) in schema order and `required` are read from it."""

    name: str = field(compare=False)
    parameters: tuple[tuple[str, str], ...] = field(compare=False)
    required: frozenset[str] = field(compare=False)
    definition: str

    @property
    def raw_parameter(self) -> str | None:
        """The parameter whose raw text is the whole call: the only one, and a string."""
        if len(self.parameters) == 1 and self.parameters[0][1] == "string":
            return self.parameters[0][0]
        return None

    def to_template(self) -> dict[str, Any]:
        return orjson.loads(self.definition)

    def held_bytes(self) -> int:
        """What keeping this tool costs, in bytes, roughly and from above: every name in it is in its definition."""
        return 3 * sys.getsizeof(self.definition) + _OBJECT_BYTES * (1 + len(self.parameters))


def too_many_values(data: bytes) -> bool:
    """Whether a JSON text is long and has more than `MAX_VALUES` commas and openings of lists and objects outside its
    strings."""
    if len(data) <= _STEP or sum(data.count(mark) for mark in (b",", b"[", b"{")) <= MAX_VALUES:
        return False
    found, quoted, slashes = 0, 0, 0  # in a string; backslashes before this step
    at = np.arange(_STEP)
    for start in range(0, len(data), _STEP):
        block = np.frombuffer(data, np.uint8, min(_STEP, len(data) - start), start)
        here = at[: len(block)]
        last_other = np.maximum.accumulate(np.where(block == 0x5C, -1 - slashes, here))
        run = here - last_other  # backslashes up to and with this one
        before = np.concatenate([[slashes], run[:-1]])
        quotes = (block == 0x22) & (before % 2 == 0)
        inside = (np.cumsum(quotes) + quoted) % 2
        found += int(np.count_nonzero(_STRUCTURE[block] & (inside == 0)))
        quoted, slashes = int(inside[-1]), int(run[-1]) % 2
    return found > MAX_VALUES


def written_back(value: Any) -> Any:
    """`value` as it reads once it was written as JSON, where it fits into a reply: `JSONEncodeError` if it is nested
    deeper than that (orjson writes 254 levels, `_REPLY_LEVELS` of them are the reply's)."""
    nested = value
    for _ in range(_REPLY_LEVELS):
        nested = [nested]
    return orjson.loads(orjson.dumps(nested)[_REPLY_LEVELS:-_REPLY_LEVELS])


def json_object(text: Any) -> dict[str, Any] | None:
    """The object `text` is the JSON of; None when it is not, when it cannot be written back exactly (1e999, 300
    levels), or when it has too many values."""
    if not isinstance(text, str) or (len(text) > _STEP and too_many_values(text.encode(errors="replace"))):
        return None
    try:
        value = orjson.loads(text)
        exact = written_back(value) == value
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return None
    return value if exact and isinstance(value, dict) else None


def _refuse(where: str, problem: str) -> SessionRefusal:
    return SessionRefusal(Refusal.BAD_BODY, f"{where}: {problem}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _content(raw: Any, where: str) -> str:
    if raw is None:
        return ""
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, list):
        raise _refuse(where, f"content is {type(raw).__name__}, use a string or a list of text parts")
    parts = []
    for index, part in enumerate(raw):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _refuse(f"{where}.content[{index}]", 'only {"type": "text", "text": string} parts are supported')
        parts.append(part["text"])
    return "".join(parts)


def _tool_call(raw: Any, where: str) -> ToolCall:
    function = raw.get("function") if isinstance(raw, dict) else None
    if not isinstance(function, dict) or raw.get("type", "function") != "function":
        raise _refuse(where, "is not a function call; use {id, type: function, function: {name, arguments}}")
    name, arguments, call_id = function.get("name"), function.get("arguments"), raw.get("id")
    if not isinstance(name, str) or not name or not isinstance(call_id, str):
        raise _refuse(where, f"needs a string id and name, has id {_shown(call_id)} and name {_shown(name)}")
    value = json_object(arguments)
    if value is None:
        raise _refuse(where, f"arguments {_shown(arguments)} is not the JSON text of an object")
    return ToolCall.make(call_id, name, value)


def _optional_text(raw: dict[str, Any], name: str, where: str) -> str | None:
    value = raw.get(name)
    if value is not None and not isinstance(value, str):
        raise _refuse(where, f"{name} {_shown(value)} is not a string")
    return value


def openai_message(raw: Any, where: str) -> tuple[Message, ...]:
    """One element of a request's `messages`, decoded; always one message. `where` names it in refusals."""
    if not isinstance(raw, dict):
        raise _refuse(where, f"is {type(raw).__name__}, expected an object")
    role = raw.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _refuse(where, f"role {_shown(role)} is not {', '.join(ROLES[:-1])} or {ROLES[-1]}")
    # clients echo a reply with all its empty fields (refusal, audio, function_call: null); a filled one means something
    known = _KNOWN[role]
    filled = sorted(str(key) for key, value in raw.items() if key not in known and value not in (None, [], ""))
    if filled:
        raise _refuse(
            where, f"a {role} message with {', '.join(filled)[:80]} is not supported; send text and tool calls"
        )
    if raw.get("content") is None and role != "assistant":
        raise _refuse(where, f"a {role} message needs content")
    content = _content(raw.get("content"), where)
    if role == "assistant":
        calls = raw.get("tool_calls") or []
        if not isinstance(calls, list):
            raise _refuse(where, f"tool_calls is {type(calls).__name__}, expected a list")
        parsed = tuple(_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls))
        reasoning = _optional_text(raw, "reasoning_content", where) or None
        return (Message(role, content, tool_calls=parsed, reasoning=reasoning),)
    if role == "tool":
        return (Message(role, content, tool_call_id=_optional_text(raw, "tool_call_id", where)),)
    return (Message(role, content),)


def check_sequence(messages: Sequence[Message]) -> None:
    """Refuse an order no conversation has: at most one system message, standing first; the last message leaves the
    turn to the assistant."""
    if not messages:
        raise _refuse("messages", "is empty")
    if len(messages) > MAX_MESSAGES:
        raise _refuse("messages", f"{len(messages)} messages, at most {MAX_MESSAGES}")
    for i, message in enumerate(messages):
        if i and message.role == "system":
            raise _refuse(f"messages[{i}]", "a system message stands only first")
    if messages[-1].role not in ("user", "tool"):
        raise _refuse(f"messages[{len(messages) - 1}]", f"the last message is {messages[-1].role}, not user or tool")


def _tool(raw: Any, where: str) -> Tool:
    function = raw.get("function") if isinstance(raw, dict) else None
    if not isinstance(function, dict) or raw.get("type", "function") != "function":
        raise _refuse(where, "is not a function tool; use {type: function, function: {name, parameters}}")
    name = function.get("name")
    if not isinstance(name, str) or not name or "\n" in name:
        raise _refuse(where, f"name {_shown(name)} is not a non-empty one-line string")
    schema = function.get("parameters")
    schema = {} if schema is None else schema
    properties = schema.get("properties", {}) if isinstance(schema, dict) else None
    required = schema.get("required", []) if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise _refuse(where, "parameters is not a JSON schema object with properties")
    if not all(isinstance(item, str) and item in properties for item in required):
        raise _refuse(where, f"required {_shown(required)} names a parameter that properties lacks")
    kinds = []
    for key, value in properties.items():
        if not isinstance(value, dict):
            raise _refuse(where, f"parameter {_shown(key)} has no schema object")
        kind = value.get("type", "")
        kinds.append((key, kind if isinstance(kind, str) else ""))
    try:
        definition = orjson.dumps(raw).decode()
    except orjson.JSONEncodeError as error:
        raise _refuse(where, f"cannot be written back as JSON: {error}") from None
    return Tool(name, tuple(kinds), frozenset(required), definition)


def parse_tools(raw: Any) -> tuple[Tool, ...]:
    """Check and normalise `tools` (absent, null and empty mean none). Equal tuples render and parse alike."""
    if raw is None:
        return ()
    if not isinstance(raw, list) or len(raw) > MAX_TOOLS:
        raise _refuse("tools", f"{_shown(raw)} is not a list of at most {MAX_TOOLS} tools")
    tools = tuple(_tool(item, f"tools[{i}]") for i, item in enumerate(raw))
    names = [tool.name for tool in tools]
    if len(set(names)) != len(names):
        raise _refuse("tools", f"names repeat: {_shown(sorted(names))}")
    return tools
