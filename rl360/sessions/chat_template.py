"""The chat template: messages to ids, sampled ids to a turn. Family `rl360-chat`.

Three rules hold for every input:
- *append-only*: rendering more messages only appends ids, and `render_delta(new)` is exactly what is appended;
- *no injection*: the ids of special tokens come from the template alone. The same characters inside a message are
  encoded as plain text;
- *one truth*: the wording is the Jinja file in the model directory, which transformers' `apply_chat_template` renders
  to the same ids (for messages without special tokens in their text, and assistant text not starting with white space:
  there transformers would merge the white space into the header, which is not append-only).

Uses `tokenizers` and jinja2 only: no torch, no transformers in a session server.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from rl360.errors import BadInput
from rl360.sessions.messages import Message, Tool, json_object

FAMILY = "rl360-chat"
TEMPLATE_FILE = "chat_template.jinja"
PAD, START, END, CALL_OPEN, CALL_CLOSE = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"
SPECIALS = (PAD, START, END, CALL_OPEN, CALL_CLOSE)
_HEADER = "assistant\n"
# a Unicode noncharacter splits special tokens inside message text while Jinja runs; `0` keeps one that was there before
_MARK = "\ufdd0"


@dataclass(frozen=True)
class ParsedCall:
    """One well-formed call of a sampled turn."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ParsedTurn:
    """What the agent is told. A malformed call makes the whole turn plain content and counts in `format_errors`."""

    content: str
    tool_calls: tuple[ParsedCall, ...]
    format_errors: int


def template_text() -> str:
    """The packaged `chat_template.jinja` of the family; a model directory ships the same bytes."""
    return resources.files("rl360.sessions").joinpath("templates/rl360_chat.jinja").read_text("utf-8")


def _tojson(value: Any, separators: tuple[str, str] | None = None) -> str:
    """As in transformers: Jinja's own filter escapes HTML, which would change the text."""
    return json.dumps(value, ensure_ascii=False, separators=separators)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


class ChatTemplate:
    """Immutable after `load`; safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, jinja_text: str, vocab_size: int) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # text that looks like a special token stays text
        self._tokenizer = tokenizer
        self.family = FAMILY
        self.vocab_size = vocab_size
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        self._jinja = environment.from_string(jinja_text)
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = {token.content: index for index, token in added.items() if token.special}
        missing = [name for name in SPECIALS if name not in self._special_ids]
        if missing:
            raise BadInput(
                f"tokenizer lacks the special tokens {missing} of family {FAMILY}; add them as special tokens"
            )
        self.end_id = self._special_ids[END]
        self._open_id, self._close_id = self._special_ids[CALL_OPEN], self._special_ids[CALL_CLOSE]
        self._special_id_set = frozenset(self._special_ids.values())
        pattern = "|".join(re.escape(name) for name in sorted(self._special_ids, key=len, reverse=True))
        self._specials = re.compile(f"({pattern})")
        self._header_ids = self._encode(_HEADER)
        self._generation_ids = np.array([self._special_ids[START], *self._header_ids], dtype=np.int32)

    @classmethod
    def load(cls, model_dir: str | Path) -> ChatTemplate:
        """Read tokenizer.json, config.json and chat_template.jinja; refuse what is not this family, with the reason."""
        folder = Path(model_dir)
        try:
            text = (folder / TEMPLATE_FILE).read_text("utf-8")
            vocab_size = orjson.loads((folder / "config.json").read_bytes())["vocab_size"]
        except (OSError, KeyError, ValueError, TypeError) as error:
            raise BadInput(f"{folder}: needs {TEMPLATE_FILE} and config.json with vocab_size ({error!r})") from None
        if text.strip() != template_text().strip():
            named = re.match(r"\{#-? family: ([\w-]+)", text)
            what = f"names family {named[1]}" if named else "names no family"
            raise BadInput(
                f"{folder / TEMPLATE_FILE} {what} and is not the {FAMILY} template of this rl360; copy that one"
            )
        tokenizer = _read_tokenizer(folder / "tokenizer.json")
        if not isinstance(vocab_size, int) or tokenizer.get_vocab_size() > vocab_size:
            raise BadInput(f"{folder}: vocab_size {vocab_size!r} is below the tokenizer's {tokenizer.get_vocab_size()}")
        template = cls(tokenizer, text, vocab_size)
        template._self_check(_read_tokenizer(folder / "tokenizer.json"))
        return template

    def render_prompt(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> np.ndarray:
        """Ids int32 `[tokens]` of a whole conversation, ending where the assistant speaks."""
        return self._ids(self._text(messages, tools, generation=True))

    def render_delta(self, new_messages: tuple[Message, ...]) -> np.ndarray:
        """Ids int32 `[tokens]` that follow a finished assistant turn: new tool and user messages, then the header."""
        wrong = [message.role for message in new_messages if message.role not in ("user", "tool")]
        if wrong or not new_messages:
            raise BadInput(f"a delta holds user and tool messages only, got {wrong or 'none'}")
        return self._ids(self._text(new_messages, (), generation=True))

    def render_conversation(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> np.ndarray:
        """Ids int32 `[tokens]` of a finished conversation, without a generation header (demonstrations, tests)."""
        return self._ids(self._text(messages, tools, generation=False))

    def parse_assistant(self, ids: np.ndarray | list[int], tools: tuple[Tool, ...]) -> ParsedTurn:
        """Turn sampled ids `[tokens]` (with or without their end token) into content and calls."""
        body = [int(i) for i in ids]
        if body and body[-1] == self.end_id:
            body.pop()
        if self._special_id_set.isdisjoint(body):
            return ParsedTurn(self._decode(body), (), 0)
        calls, content_ids, errors = self._split_calls(body, {tool.name: tool for tool in tools})
        if errors:
            return ParsedTurn(self._decode(body), (), errors)
        return ParsedTurn(self._decode(content_ids), calls, 0)

    def _split_calls(self, body: list[int], tools: dict[str, Tool]) -> tuple[tuple[ParsedCall, ...], list[int], int]:
        """(calls, content ids, number of malformed parts). Grammar: content (OPEN name newline args CLOSE)*."""
        position = body.index(self._open_id) if self._open_id in body else len(body)
        content = body[:position]
        errors = 0 if self._special_id_set.isdisjoint(content) else 1
        calls: list[ParsedCall] = []
        while position < len(body):
            try:
                close = body.index(self._close_id, position)
            except ValueError:
                return (), content, errors + 1
            inside = body[position + 1 : close]
            call = None
            if body[position] == self._open_id and self._special_id_set.isdisjoint(inside):
                call = _read_call(self._decode(inside), tools)
            if call is None:
                errors += 1
            else:
                calls.append(call)
            position = close + 1
        return tuple(calls), content, errors

    def _text(self, messages: tuple[Message, ...], tools: tuple[Tool, ...], generation: bool) -> str:
        guarded = [self._guard(message.to_template()) for message in messages]
        guarded_tools = [self._guard(tool.to_template()) for tool in tools] or None
        try:
            return self._jinja.render(messages=guarded, tools=guarded_tools, add_generation_prompt=generation)
        except TemplateError as error:
            raise BadInput(f"the chat template refuses these messages: {error}") from None

    def _guard(self, value: Any) -> Any:
        """Every string with its special tokens split by a mark, so that only the template's own survive Jinja."""
        if isinstance(value, str):
            if _MARK in value:
                value = value.replace(_MARK, _MARK + "0")
            return self._specials.sub(lambda m: m[0][0] + _MARK + "1" + m[0][1:], value)
        if isinstance(value, dict):
            return {self._guard(key): self._guard(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._guard(item) for item in value]
        return value

    def _ids(self, text: str) -> np.ndarray:
        ids: list[int] = []
        after_start = False
        for index, piece in enumerate(self._specials.split(text)):
            if index % 2:
                ids.append(self._special_ids[piece])
                after_start = piece == START
                continue
            if _MARK in piece:
                piece = piece.replace(_MARK + "1", "").replace(_MARK + "0", _MARK)
            if after_start and piece.startswith(_HEADER):
                # the header is its own piece: what the policy samples after it may start with anything
                ids.extend(self._header_ids)
                piece = piece[len(_HEADER) :]
            if piece:
                ids.extend(self._encode(piece))
        return np.array(ids, dtype=np.int32)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _self_check(self, stock: Tokenizer) -> None:
        """One conversation both ways: a normalizer, a prefix space or stripping specials would show here."""
        tool = Tool("bash", (("command", "string"),), frozenset({"command"}))
        messages = (Message("system", "Use bash."), Message("user", " Say  hi.\n"), Message("tool", "ok\n"))
        text = self._text(messages, (tool,), generation=True)
        if stock.encode(text, add_special_tokens=False).ids != self._ids(text).tolist():
            raise BadInput("tokenizer encodes around special tokens differently than apart (prefix space, stripping?)")
        plain = "".join(SPECIALS) + " A  b\n\tC "
        if not self._special_id_set.isdisjoint(self._encode(plain)) or self._decode(self._encode(plain)) != plain:
            raise BadInput(
                "tokenizer cannot write special tokens as plain text; use a byte-level BPE without a normalizer"
            )


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise BadInput(f"{path} does not exist; save the tokenizer there")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exception for every malformed file
        raise BadInput(f"{path} is not a tokenizers file: {error}") from None


def _read_call(text: str, tools: dict[str, Tool]) -> ParsedCall | None:
    """`name newline args` to a call; None when malformed: unknown tool, not JSON, unknown or missing parameter."""
    name, newline, rest = text.partition("\n")
    tool = tools.get(name)
    if not newline or tool is None:
        return None
    if tool.raw_parameter is not None:
        return ParsedCall(name, {tool.raw_parameter: rest})
    arguments = json_object(rest)
    allowed = {parameter for parameter, _kind in tool.parameters}
    if arguments is None or not tool.required <= set(arguments) <= allowed:
        return None
    return ParsedCall(name, arguments)
