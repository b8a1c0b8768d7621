"""Matchers compare one message, `locate` a history: what is the same, how loosely, and where it stands."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from rl360.errors import BadInput
from rl360.sessions.history import MATCHERS, Match
from rl360.sessions.messages import Message, ToolCall
from rl360.sessions.server import load_matcher
from rl360.sessions.turns import SessionMode
from tests.unit.sessions_data import OPENING, completion, new_session, raw_request, request


def called(arguments: dict[str, Any], call_id: str = "c1", content: str = "", **changes: Any) -> Message:
    return Message("assistant", content, (ToolCall.make(call_id, "edit", arguments),), **changes)


HELD = called({"path": "p", "line": 1})
PAIRS: list[tuple[Message, Message, Match | None, Match | None, Match | None]] = [
    # stored, sent, strict, loose_tool_calls, role_content
    (HELD, called({"path": "p", "line": 1}), Match.EXACT, Match.EXACT, Match.EXACT),
    (HELD, called({"line": 1, "path": "p"}), Match.EXACT, Match.EXACT, Match.EXACT),
    (HELD, called({"path": "p", "line": 1}, "c2"), None, Match.TOOL_CALL_JSON, Match.TOOL_CALL_JSON),
    (HELD, called({"line": 1, "path": "p"}, "c2"), None, Match.TOOL_CALL_JSON, Match.TOOL_CALL_JSON),
    *((HELD, called({"path": "p", "line": other}), None, None, Match.ROLE_CONTENT) for other in (1.0, "1", True, 2)),
    (HELD, called({"path": "p"}), None, None, Match.ROLE_CONTENT),
    (HELD, Message("assistant", "", (replace(HELD.tool_calls[0], name="write"),)), None, None, Match.ROLE_CONTENT),
    (HELD, Message("assistant", ""), None, None, Match.ROLE_CONTENT),
    (HELD, called({"path": "p", "line": 1}, content="x"), None, None, None),
    (HELD, Message("user", ""), None, None, None),
    (called({"a": [1, {"b": None}]}), called({"a": [1, {"b": None}]}, "z"), None, *(Match.TOOL_CALL_JSON,) * 2),
    (called({"a": [1, 2]}), called({"a": [2, 1]}), None, None, Match.ROLE_CONTENT),
    (Message("tool", "x", tool_call_id="c1"), Message("tool", "x"), None, *(Match.TOOL_CALL_JSON,) * 2),
    # reasoning a client does not echo is unstated; reasoning it states must be the stored one
    (Message("assistant", "x", reasoning="r"), Message("assistant", "x"), *(Match.EXACT,) * 3),
    (Message("assistant", "x", reasoning="r"), Message("assistant", "x", reasoning="r"), *(Match.EXACT,) * 3),
    (
        Message("assistant", "x", reasoning="r"),
        Message("assistant", "x", reasoning="s"),
        None,
        None,
        Match.ROLE_CONTENT,
    ),
    (Message("assistant", "x"), Message("assistant", "x", reasoning="s"), None, None, Match.ROLE_CONTENT),
]


@pytest.mark.parametrize(("stored", "sent", "strict", "loose", "role"), PAIRS)
def test_matchers_report_the_tightest_match(stored: Message, sent: Message, strict: Any, loose: Any, role: Any) -> None:
    found = [MATCHERS[name](stored, sent) for name in ("strict", "loose_tool_calls", "role_content")]
    assert found == [strict, loose, role]


def case_blind(stored: Message, sent: Message) -> bool:
    return stored.content.lower() == sent.content.lower()


NOT_CALLABLE = 7


def test_a_matcher_of_ones_own() -> None:
    matcher = load_matcher(f"{__name__}:case_blind")
    assert matcher(Message("user", "a"), Message("user", "a")) is Match.EXACT
    assert matcher(Message("user", "a"), Message("user", "A")) is Match.CUSTOM
    assert matcher(Message("user", "a"), Message("user", "b")) is None
    assert load_matcher("role_content") is MATCHERS["role_content"]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("fuzzy", "is none of strict, loose_tool_calls, role_content"),
        (":f", "not of the form module:function"),
        ("no_such_module_here:f", "cannot be imported: No module"),
        (f"{__name__}:missing", "cannot be imported: module"),
        (f"{__name__}:NOT_CALLABLE", "is int, not a function"),
        ("..x:f", "cannot be imported"),
    ],
)
def test_a_matcher_that_is_none_is_refused(name: str, match: str) -> None:
    with pytest.raises(BadInput, match=match):
        load_matcher(name)


def test_the_deepest_place_wins_then_the_latest() -> None:
    session = new_session(mode=SessionMode.TREE)
    told: list[tuple[Message, ...]] = [OPENING]
    for _ in range(3):
        for _twice in range(2):
            turn = session.commit(session.prepare(request(told[-1])), completion())
        told.append((*told[-1], turn.reply, Message("tool", "same")))
    # every level holds two turns of one text: a request continues the later one of the deepest level
    assert [turn.parent for turn in session.turns] == [None, None, 1, 1, 3, 3]
    for depth, messages in enumerate(told):
        plan = session.plan(request(messages))
        repeats = None if depth == 3 else session.turns[2 * depth + 1]
        base = session.turns[2 * depth - 1] if depth else None
        assert (plan.base, plan.repeats) == (base, repeats)


def test_a_request_is_found_from_its_bytes_as_from_its_text() -> None:
    """Whatever was remembered, the place is the one a search of the whole tree finds."""
    session = new_session(mode=SessionMode.TREE)
    texts = ("a", "b")
    for first, second in itertools.product(texts, texts):
        history = (OPENING[0], Message("user", first))
        for text in (second, first):
            turn = session.commit(session.prepare(request(history)), completion())
            history = (*history, turn.reply, Message("tool", text))
        fresh = tuple(Message(m.role, m.content) for m in history)
        one, other = session.plan(request(history)), session.plan(request(fresh))
        assert one.base is other.base is turn
        assert one.messages == other.messages


def test_a_turn_that_was_seen_long_ago_is_found() -> None:
    """What was remembered last is only where the search begins: here a twin of the root, which also fits."""
    session = new_session(mode=SessionMode.TREE)
    messages: tuple[Message, ...] = OPENING
    for text in ("a", "b"):
        turn = session.commit(session.prepare(raw_request(session, messages)), completion())
        messages = (*messages, turn.reply, Message("tool", text))
    for number in range(8):
        other = (OPENING[0], Message("user", f"part {number}"))
        session.commit(session.prepare(raw_request(session, other)), completion())
    session.commit(session.prepare(raw_request(session, OPENING)), completion())
    assert session.plan(raw_request(session, messages)).base is turn
