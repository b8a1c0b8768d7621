"""Messages to ids, sampled ids to a turn: what every model family has in common.

A `Family` states a format: its Jinja file, its tokens, how a turn ends and how a sampled turn is read. A `ChatTemplate`
is a family with one model's tokenizer. Three rules hold for every family and every input:
- *append-only*: prompt ids + `render_reply(reply)` + `render_delta(last id, new)` are the ids of the longer prompt;
- *no injection*: ids of added tokens come from the template alone. The same characters inside a message, a tool or an
  argument are encoded as plain text;
- *one truth*: the wording is the Jinja file, which transformers' `apply_chat_template` renders to the same ids (where
  no message spells an added token and no assistant text starts with white space).

What is sampled is never rendered again: a session keeps the sampled ids and appends deltas to them.
Uses `tokenizers` and jinja2 only: no torch, no transformers in a session server.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import orjson
from jinja2 import Environment, TemplateError
from tokenizers import Tokenizer

from rl360.errors import BadInput
from rl360.sessions.messages import Message, Tool, ToolCall, parse_tools
from rl360.sessions.refusals import Refusal, SessionRefusal

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
# a Unicode noncharacter splits added tokens inside message text while Jinja runs; `0` keeps one that was there before
_MARK = "\ufdd0"
_SHORT = 24  # characters
# characters; the tokenizer takes 200 bytes of memory for each and its threads keep them: so few such texts at once, in
# few threads
_LONG = 256 << 10
_MOST_IDS = 1 << 20  # of one long text; a list of more stops every thread for too long while it is made
_STEP = 1 << 16  # ids that become an array, characters that are searched, in one go: other threads run in between
_long_encoder = ThreadPoolExecutor(2, "encode")
_ASKED = (Message("user", ""),)
_SPOKEN = (*_ASKED, Message("assistant", ""))


@dataclass(frozen=True)
class ParsedCall:
    """One well-formed call of a sampled turn."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ParsedTurn:
    """What the agent is told. Anything malformed makes the turn plain content and counts in `format_errors`.
    `reasoning` is None where the turn has no thinking of its own."""

    content: str
    tool_calls: tuple[ParsedCall, ...]
    format_errors: int
    reasoning: str | None = None

    def message(self, call_id: str = "call") -> Message:
        """The turn as a message; its calls are `call_id`_0, `call_id`_1, ..."""
        calls = [ToolCall.make(f"{call_id}_{i}", call.name, call.arguments) for i, call in enumerate(self.tool_calls)]
        return Message("assistant", self.content, tuple(calls), reasoning=self.reasoning)


@dataclass(frozen=True)
class Piece:
    """A stretch of a sampled turn: one of the family's tokens (`token` true, `text` its name), or the text between."""

    token: bool
    text: str


Pieces = list[Piece]


def plain(pieces: Sequence[Piece]) -> str | None:
    """The text of pieces that hold no token; None when one does."""
    return None if any(piece.token for piece in pieces) else "".join(piece.text for piece in pieces)


def find(pieces: Sequence[Piece], token: str, start: int = 0) -> int:
    """Index of the next `token`, or -1."""
    return next((i for i in range(start, len(pieces)) if pieces[i].token and pieces[i].text == token), -1)


@dataclass(frozen=True)
class Family:
    """A format, stated once.

    `end` is the token after every message; None where the next message's role token is what ends a turn: then a sampled
    role token is not written again, and `stop_for` names the token a reply ends with. `openers` are texts between a
    token and what is sampled: they are tokenised apart, because what follows may start with anything. `read_call` gets
    the pieces between CALL_OPEN and CALL_CLOSE and the tools by name; `split_reasoning` gets a turn's pieces and
    returns (reasoning, the rest), or None when malformed; `trim` undoes what the template writes around content.
    """

    name: str
    about: str
    template_file: str
    model_types: frozenset[str]  # of config.json
    stock_marks: tuple[str, ...]  # what the model's own template says when it writes this format
    tokens: tuple[str, ...]  # added tokens the format needs
    stops: tuple[str, ...]  # tokens that end a turn, the canonical one first
    read_call: Callable[[Sequence[Piece], dict[str, Tool]], ParsedCall | None]
    end: str | None = "<|im_end|>"
    stop_for: Callable[[Message, str | None], str] | None = None
    appended_roles: frozenset[str] = frozenset({"user", "tool"})
    openers: tuple[tuple[str, str], ...] = ()
    split_reasoning: Callable[[Pieces], tuple[str | None, Pieces] | None] | None = None  # None: no thinking at all
    trim: Callable[[str, bool], str] = lambda content, called: content
    between_calls: str = ""  # characters that may stand between and after calls

    def template_text(self) -> str:
        """The packaged Jinja file."""
        return resources.files("rl360.sessions.families").joinpath(self.template_file).read_text("utf-8")


def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **style: Any) -> str:
    """As in transformers: Jinja's own filter escapes HTML, which would change the text."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **style)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def jinja_environment(kind: type[Environment] = Environment) -> Environment:
    """Renders templates the way transformers does. A model's own template is a stranger's code: give it a sandbox,
    which packaged ones need not pay for."""
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


class ChatTemplate:
    """A family with a model's tokenizer. Immutable; safe to use from several threads."""

    def __init__(self, family: Family, tokenizer_json: str, vocab_size: int, jinja_text: str | None = None) -> None:
        self._family = family
        self.family = family.name
        self.vocab_size = vocab_size
        self.tokens = family.tokens
        self.appended_roles = family.appended_roles
        self.thinking_modes = (False, True) if family.split_reasoning else (False,)
        self._tokenizer = _plain_tokenizer(tokenizer_json)
        added = self._tokenizer.get_added_tokens_decoder()
        self._ids_of = {token.content: index for index, token in added.items()}
        missing = [name for name in family.tokens if name not in self._ids_of]
        if missing:
            raise BadInput(f"tokenizer lacks the tokens {missing} of family {family.name}; add them as special tokens")
        short = [name for name in self._ids_of if len(name) < 2]
        if short:
            raise BadInput(f"tokenizer has added tokens of one character, {short}: text could not be told from them")
        self._names = {self._ids_of[name]: name for name in family.tokens}  # what a sampled turn is read by
        self.stop_ids = tuple(self._ids_of[name] for name in family.stops)
        pattern = "|".join(re.escape(name) for name in sorted(self._ids_of, key=len, reverse=True))
        self._tokens = re.compile(f"({pattern})")
        self._token_starts = re.compile(f"(?=(?:{pattern}))(.)", re.DOTALL)
        self._longest = max(map(len, self._ids_of))
        self.jinja_text = jinja_text or family.template_text()
        self._jinja = jinja_environment().from_string(self.jinja_text)
        self._encode_short = functools.lru_cache(1024)(self.encode)
        self._openers = {token: (text, self.encode(text)) for token, text in family.openers}
        self._asked = {mode: self._text(_ASKED, (), mode, generation=True) for mode in self.thinking_modes}
        self._spoken = {mode: self._text(_SPOKEN, (), mode, generation=False) for mode in self.thinking_modes}
        self._check_tokenizer(Tokenizer.from_str(tokenizer_json))

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Tool], thinking: bool = False) -> np.ndarray:
        """Ids int32 `[tokens]` of a whole conversation, ending where the assistant speaks."""
        return self._ids(self._text(messages, tools, thinking, generation=True))

    def render_delta(self, last_id: int, new_messages: Sequence[Message], thinking: bool = False) -> np.ndarray:
        """Ids int32 `[tokens]` that follow a turn whose last sampled id is `last_id`, up to where the assistant
        speaks again."""
        wrong = [message.role for message in new_messages if message.role not in self.appended_roles]
        if wrong or not new_messages:
            allowed = " and ".join(sorted(self.appended_roles))
            raise BadInput(f"a delta holds {allowed} messages only, got {wrong or 'none'}")
        if last_id not in self.stop_ids:
            raise BadInput(f"the turn ends with id {last_id}, which is none of its stop ids {list(self.stop_ids)}")
        text = self._text((*_SPOKEN, *new_messages), (), thinking, generation=True)
        ids = self._ids(_after(text, self._spoken[thinking]))
        if self._family.end is None:
            return ids[1:] if ids[0] == last_id else ids
        end_id = self._ids_of[self._family.end]
        return ids if last_id == end_id else np.concatenate([np.array([end_id], np.int32), ids])

    def render_reply(self, message: Message, thinking: bool = False, followed_by: str | None = None) -> np.ndarray:
        """Ids int32 `[tokens]` a model samples when it says `message` in the family's own spelling, its stop id
        included. `followed_by` is the role of the next message, where that decides the stop id."""
        spoken = self._text((*_ASKED, message), (), thinking, generation=False)
        ids = self._ids(_after(spoken, self._asked[thinking]))
        if self._family.stop_for is None:
            return ids
        return np.append(ids, np.int32(self._ids_of[self._family.stop_for(message, followed_by)]))

    def parse_assistant(self, ids: np.ndarray | list[int], tools: Sequence[Tool], thinking: bool = False) -> ParsedTurn:
        """Turn sampled ids `[tokens]` (with or without their stop id) into reasoning, content and calls."""
        self._require_mode(thinking)
        body = np.asarray(ids, dtype=np.int64).tolist()
        if body and body[-1] in self.stop_ids:
            body.pop()
        pieces = self._pieces(body)
        reasoning = None
        if thinking and self._family.split_reasoning is not None:
            split = self._family.split_reasoning(pieces)
            if split is None:
                return ParsedTurn(self.decode(body), (), 1)
            reasoning, pieces = split
        content, calls, errors = self._calls(pieces, {tool.name: tool for tool in tools})
        return ParsedTurn(content, calls, errors, reasoning)

    def encode(self, text: str) -> list[int]:
        """Ids of text; names of added tokens are characters like any other. Other threads go on meanwhile: `encode` of
        the tokenizer itself would hold the GIL, for seconds over a few megabytes."""
        if len(text) > _LONG:
            return _long_encoder.submit(self._encode, text).result()
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        found = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
        if len(found) > _MOST_IDS:
            raise SessionRefusal(Refusal.LENGTH, f"a text of {len(found)} tokens, at most {_MOST_IDS}")
        return found.ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of ids, added tokens by their names."""
        return self._tokenizer.decode(np.asarray(ids, dtype=np.int64).tolist(), skip_special_tokens=False)

    def textless(self, ids: Sequence[int]) -> int:
        """How many ids the tokenizer has no text for: a vocabulary is often padded beyond its tokenizer."""
        return sum(self._tokenizer.id_to_token(i) is None for i in ids)

    def _require_mode(self, thinking: bool) -> None:
        if thinking and self._family.split_reasoning is None:
            raise BadInput(f"family {self.family} has no thinking; use thinking false")

    def _calls(self, pieces: Pieces, tools: dict[str, Tool]) -> tuple[str, tuple[ParsedCall, ...], int]:
        """(content, calls, malformed parts). Grammar: content (OPEN call CLOSE)*."""
        position = find(pieces, CALL_OPEN)
        called = position >= 0
        content = plain(pieces[:position] if called else pieces)
        errors = int(content is None)
        calls: list[ParsedCall] = []
        while called and position < len(pieces):
            if not (pieces[position].token and pieces[position].text == CALL_OPEN):
                gap = pieces[position]
                errors += int(gap.token or bool(gap.text.strip(self._family.between_calls)))
                position += 1
                continue
            close = find(pieces, CALL_CLOSE, position)
            call = None if close < 0 else self._family.read_call(pieces[position + 1 : close], tools)
            if call is None:
                errors += 1
            else:
                calls.append(call)
            position = len(pieces) if close < 0 else close + 1
        if errors or content is None:
            return "".join(piece.text for piece in pieces), (), errors
        return self._family.trim(content, called), tuple(calls), 0

    def _pieces(self, body: list[int]) -> Pieces:
        pieces: Pieces = []
        run: list[int] = []
        for index in body:
            name = self._names.get(index)
            if name is None:
                run.append(index)
                continue
            if run:
                pieces.append(Piece(False, self.decode(run)))
                run = []
            pieces.append(Piece(True, name))
        if run:
            pieces.append(Piece(False, self.decode(run)))
        return pieces

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool], thinking: bool, generation: bool) -> str:
        self._require_mode(thinking)
        guarded = [self._guard(message.to_template()) for message in messages]
        guarded_tools = [self._guard(tool.to_template()) for tool in tools] or None
        try:
            return self._jinja.render(
                messages=guarded, tools=guarded_tools, add_generation_prompt=generation, enable_thinking=thinking
            )
        except TemplateError as error:
            raise BadInput(f"the chat template refuses these messages: {error}") from None

    def _guard(self, value: Any) -> Any:
        """Every string with its added tokens split by a mark, so that only the template's own survive Jinja."""
        if isinstance(value, str):
            if _MARK in value:
                value = value.replace(_MARK, _MARK + "0")
            if next(self._found(self._tokens, value), None) is None:
                return value
            parts, last = [], 0
            for found in self._found(self._token_starts, value):
                parts += [value[last : found.end()], f"{_MARK}1"]
                last = found.end()
            return "".join([*parts, value[last:]])
        if isinstance(value, dict):
            return {self._guard(key): self._guard(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._guard(item) for item in value]
        return value

    def _found(self, pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
        """What `pattern` matches of added tokens, in order."""
        at = 0
        while at < len(text):
            end = at + _STEP
            for found in pattern.finditer(text, at, end + self._longest):
                if found.start() >= end:
                    break
                at = found.end()
                yield found
            at = max(at, end)

    def _ids(self, text: str) -> np.ndarray:
        ids: list[int] = []
        opener: tuple[str, list[int]] | None = None
        pieces, last = [], 0
        for found in self._found(self._tokens, text):
            pieces += [text[last : found.start()], found[0]]
            last = found.end()
        for index, piece in enumerate([*pieces, text[last:]]):
            if index % 2:
                ids.append(self._ids_of[piece])
                opener = self._openers.get(piece)
                continue
            if _MARK in piece:
                piece = piece.replace(_MARK + "1", "").replace(_MARK + "0", _MARK)
            if opener is not None and piece.startswith(opener[0]):
                ids.extend(opener[1])
                piece = piece[len(opener[0]) :]
            if piece:  # the template's own pieces are short and always the same
                ids.extend(self._encode_short(piece) if len(piece) <= _SHORT else self.encode(piece))
        if len(ids) <= _STEP:
            return np.array(ids, dtype=np.int32)
        return np.concatenate([np.array(ids[at : at + _STEP], np.int32) for at in range(0, len(ids), _STEP)])

    def _check_tokenizer(self, stock: Tokenizer) -> None:
        """One conversation both ways: a prefix space, stripping tokens or a rewriting normalizer would show here."""
        schema = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
        tools = parse_tools([{"type": "function", "function": {"name": "bash", "parameters": schema}}])
        messages = (Message("system", "Use bash."), Message("user", " Say  hi.\n"), Message("tool", "ok\n"))
        text = self._text(messages, tools, False, generation=True)
        if stock.encode(text, add_special_tokens=False).ids != self._ids(text).tolist():
            raise BadInput("tokenizer encodes around special tokens differently than apart (prefix space, stripping?)")
        spelled = "".join(self._ids_of) + " A  b\n\tC "
        ids = self.encode(spelled)
        if not set(self._ids_of.values()).isdisjoint(ids) or self.decode(ids) != spelled:
            raise BadInput(
                "tokenizer cannot write special tokens as plain text; use a byte-level BPE without a normalizer"
            )


def _after(text: str, prefix: str) -> str:
    """What a longer conversation adds; a template that rewrites what stood there is refused here."""
    if not text.startswith(prefix):
        raise BadInput(f"the template is not append-only: after {prefix[-60:]!r} more messages change what stood there")
    return text[len(prefix) :]


def _plain_tokenizer(tokenizer_json: str) -> Tokenizer:
    """A tokenizer that reads no added token out of text, whether the file calls it special or not."""
    raw = orjson.loads(tokenizer_json)
    for token in raw.get("added_tokens") or []:
        token["special"] = True
    tokenizer = Tokenizer.from_str(orjson.dumps(raw).decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer
