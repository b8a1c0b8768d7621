"""Random conversations through every family: append-only, no injection, and reading back what was written."""

from __future__ import annotations

import unicodedata
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.sessions.families.check import TOOLS
from rl360.sessions.families.registry import FAMILIES
from rl360.sessions.messages import Message, ToolCall
from tests.unit.families_data import VOCAB_SIZE, family_template, stock_tokenizer

NAMES = sorted({name for family in FAMILIES.values() for name in family.tokens} | {"/nothink", "<|unused|>"})
PIECES = st.sampled_from([*NAMES, *(name[:-1] for name in NAMES), *(name[1:] for name in NAMES)])
PLAIN = st.text(st.sampled_from("ab3 \n\r\té漢🙂<|>_/{}[]\"'\\\ufdd0\u00a0"), max_size=8)
TEXT = st.lists(PLAIN | PIECES, max_size=3).map(lambda parts: unicodedata.normalize("NFC", "".join(parts)))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
EDIT = st.fixed_dictionaries(
    {"path": TEXT, "line": st.integers(-9, 9)},
    optional={"marks": st.lists(JSON, max_size=2), "deep": st.dictionaries(TEXT, JSON, max_size=2)},
)
CALL = TEXT.map(lambda text: ToolCall.make("c", "bash", {"command": text})) | EDIT.map(
    lambda arguments: ToolCall.make("c", "edit", arguments)
)
CALLS = st.lists(CALL, max_size=2).map(tuple)
ASSISTANT = st.builds(
    lambda content, calls, reasoning: Message("assistant", content, calls, reasoning=reasoning),
    *(TEXT, CALLS, st.none() | TEXT),
)
OTHERS = st.lists(st.builds(Message, st.sampled_from(["user", "tool"]), TEXT), min_size=1, max_size=3)
ROUNDS = st.lists(st.tuples(ASSISTANT, OTHERS), min_size=1, max_size=3)
each_family = pytest.mark.parametrize("family", FAMILIES)


def _thinks(family: str, drawn: bool) -> bool:
    return drawn and True in family_template(family).thinking_modes


@each_family
@settings(max_examples=350, deadline=None)
@given(st.none() | TEXT, OTHERS, ROUNDS, st.booleans(), st.booleans())
def test_what_a_session_holds_is_the_full_render(
    family: str, system: str | None, opening: list, rounds: list, tools: bool, thinking: bool
) -> None:
    template, thinking = family_template(family), _thinks(family, thinking)
    messages = [*([] if system is None else [Message("system", system)]), *opening]
    used = TOOLS if tools else ()
    held = template.render_prompt(messages, used, thinking).tolist()
    for reply, others in rounds:
        held += template.render_reply(reply, thinking, followed_by=others[0].role).tolist()
        held += template.render_delta(held[-1], others, thinking).tolist()
        messages += [reply, *others]
        assert held == template.render_prompt(messages, used, thinking).tolist()


@each_family
@settings(max_examples=250, deadline=None)
@given(ASSISTANT, st.booleans())
def test_reading_what_was_written_gives_it_back(family: str, said: Message, thinking: bool) -> None:
    template, thinking = family_template(family), _thinks(family, thinking)
    turn = template.parse_assistant(template.render_reply(said, thinking), TOOLS, thinking)
    assert (turn.content, turn.format_errors) == (said.content, 0)
    assert [(call.name, call.arguments) for call in turn.tool_calls] == [
        (call.name, orjson.loads(call.arguments)) for call in said.tool_calls
    ]
    if not thinking:
        assert turn.reasoning is None
    elif family == "glm4":  # it writes an empty block where there was no thinking
        assert turn.reasoning == (said.reasoning or None)
    else:
        assert turn.reasoning == said.reasoning


SHAPED = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", "<arg_key>", "bash\n", '{"name": "', "\n"]
)


@each_family
@settings(max_examples=250, deadline=None)
@given(st.lists(st.integers(0, VOCAB_SIZE - 1).map(lambda i: [i]) | SHAPED, max_size=30), st.booleans())
def test_any_sampled_ids_are_read(family: str, drawn: list, thinking: bool) -> None:
    template, thinking = family_template(family), _thinks(family, thinking)
    stock = stock_tokenizer(family)
    parts = [stock.encode(d, add_special_tokens=False).ids if isinstance(d, str) else d for d in drawn]
    turn = template.parse_assistant([i for part in parts for i in part], TOOLS, thinking)
    assert turn.format_errors == 0 or turn.tool_calls == ()
    template.render_reply(turn.message(), thinking)


def _neutral(value: Any) -> Any:
    """The same shape with harmless text; a text that is empty stays empty."""
    if isinstance(value, str):
        return "t" if value else ""
    if isinstance(value, dict):
        return {f"k{i}": _neutral(item) for i, item in enumerate(value.values())}
    return [_neutral(item) for item in value] if isinstance(value, list) else value


def _neutral_message(message: Message) -> Message:
    calls = [ToolCall.make("c", call.name, _neutral(orjson.loads(call.arguments))) for call in message.tool_calls]
    return Message(message.role, _neutral(message.content), tuple(calls), reasoning=_neutral(message.reasoning))


@each_family
@settings(max_examples=200, deadline=None)
@given(TEXT, ASSISTANT, OTHERS, st.booleans())
def test_no_text_becomes_a_token(family: str, system: str, said: Message, others: list, thinking: bool) -> None:
    template, thinking = family_template(family), _thinks(family, thinking)
    tokens = set(stock_tokenizer(family).get_added_tokens_decoder())

    def structure(messages: list[Message]) -> list[int]:
        return [i for i in template.render_prompt(messages, TOOLS, thinking).tolist() if i in tokens]

    messages = [Message("system", system), Message("user", system), said, *others]
    assert structure(messages) == structure([_neutral_message(message) for message in messages])
