"""The agent's path: what its formats (`formats/`) have in common.

`cut` and `split` read any agent's body without parsing its messages: each stays the bytes it came as, and those that
the session was sent before are only compared. What a body may cost is bounded by its size and by how many values it
has. A reply carries text and tool calls only: no ids, no log-probabilities.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import orjson

from rl360.sessions.core import Session
from rl360.sessions.messages import MAX_MESSAGES, MAX_VALUES, Tool, too_many_values
from rl360.sessions.refusals import Refusal, SessionRefusal
from rl360.sessions.turns import Parse, Turn

# a number or a boolean says something, but for the protocol's own defaults
_DEFAULTS = {"frequency_penalty": 0, "presence_penalty": 0, "logprobs": False, "top_logprobs": 0}
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


class Format(Protocol):
    """What an agent speaks: a module of `formats/`. `BEAT` is the event that keeps the client of a stream waiting."""

    BEAT: bytes

    def read(self, data: bytes, known: Raws = ()) -> AgentRequest:
        """Decode and check a body; every refusal is `bad_body` and names the field."""

    def body(self, session: Session, turn: Turn, asked: AgentRequest) -> bytes:
        """The reply of a recorded turn."""

    def events(self, session: Session, turn: Turn, asked: AgentRequest) -> bytes:
        """The same reply as the server-sent events of a streaming request."""

    def error_body(self, code: str, message: str, status: int, **more: int | None) -> bytes:
        """As the format's clients read it; `code` is rl360's own."""


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
