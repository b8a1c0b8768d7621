"""Sessions as trees, and requests recognised by their bytes: what is shared, what is parsed, what is counted."""

from __future__ import annotations

from typing import Any

import pytest

from rl360.sessions.merge import merge, snapshot
from rl360.sessions.messages import Message, ToolCall, openai_message
from rl360.sessions.refusals import Refusal
from rl360.sessions.turns import SessionMode, Turn
from tests.unit.sessions_data import (
    BASH,
    OPENING,
    TOOLS,
    History,
    call_turn,
    completion,
    context,
    new_session,
    raw_request,
    refused,
    request,
    take,
    template,
    to_raw,
    told,
    two_turns,
)


def test_a_tree_grows_wherever_a_request_fits() -> None:
    session, history = two_turns(mode=SessionMode.TREE)
    root, second = session.turns

    def grow(messages: History, text: str) -> tuple[Turn, list[int]]:
        prepared = session.prepare(request(messages))
        return session.commit(prepared, completion(text)), prepared.input_ids.tolist()

    retry, sent = grow(history[:-1], "ok<|im_end|>")
    assert (retry.parent, sent) == (0, context(session, second)[: second.prompt_end])
    deeper, sent = grow(told(history, "b"), "ok<|im_end|>")
    assert deeper.parent == second.index and sent[: second.end] == context(session, second)
    other, sent = grow((*history[:3], Message("tool", "b.txt")), "ok<|im_end|>")
    assert other.parent == 0 and sent[: root.end] == context(session, root)
    edited = (OPENING[0], Message("user", "summary of what was done"), Message("assistant", "x"), Message("user", "go"))
    fresh, sent = grow(edited, "ok<|im_end|>")
    assert fresh.parent is None and fresh.start == 0
    assert sent == template().render_prompt(edited, BASH).tolist()
    again, _sent = grow(OPENING, "ok<|im_end|>")
    assert again.parent is None and again.delta.tolist() == root.delta.tolist()
    assert [turn.parent for turn in session.turns] == [None, 0, 0, 1, 0, None, None]


def test_other_tools_share_nothing() -> None:
    session, history = two_turns(mode=SessionMode.TREE)
    prepared = session.prepare(request(told(history), TOOLS))
    assert prepared.plan.base is None
    assert prepared.input_ids.tolist() == template().render_prompt(told(history), TOOLS).tolist()
    session.commit(prepared, completion())
    assert session.prepare(request(told(history), BASH)).plan.base is session.turns[1]


def test_a_cut_turn_of_a_tree_has_siblings_and_no_children() -> None:
    session = new_session(mode=SessionMode.TREE)
    history = take(session, OPENING, "ok", finish="length")
    refused(
        session,
        Refusal.CUT_TURN,
        "turn 1 was cut by length after 1 tokens: nothing adds to it; repeat its request",
        lambda: session.prepare(request(told(history))),
        requests_after_cut=1,
    )
    take(session, OPENING, "ok<|im_end|>")
    take(session, OPENING, "ok", finish="length")
    for asked in (request(told(history)), raw_request(session, told(history))):
        assert session.prepare(asked).plan.base is session.turns[1]  # the one of these replies that was not cut


def test_concurrent_turns_of_a_tree_are_all_recorded() -> None:
    session = new_session(mode=SessionMode.TREE)
    history = take(session, OPENING, call_turn("ls"))
    both = [session.prepare(request(told(history, text))) for text in ("a", "b")]
    twin = session.prepare(request(told(history, "a")))
    turns = [session.commit(prepared, completion(f"{i}<|im_end|>")) for i, prepared in enumerate((*both, twin))]
    assert [turn.parent for turn in turns] == [0, 0, 0]
    assert len({turn.reply.content for turn in turns}) == 3
    assert session.turns[0].reply.tool_calls[0].id != "call_0_1"


# --- reading raw requests ---


def test_only_new_messages_are_parsed() -> None:
    session = new_session()
    parsed: list[str] = []

    def parse(raw: Any, where: str) -> tuple[Message, ...]:
        parsed.append(where)
        return openai_message(raw, where)

    def read(messages: History) -> Any:
        parsed.clear()
        return session.read([to_raw(m) for m in messages], None, parse)

    history: History = OPENING
    for number in range(4):
        asked = read(history)
        assert parsed == [f"messages[{i}]" for i in range(len(history) - 2 if number else 0, len(history))]
        turn = session.commit(session.prepare(asked), completion(f"{number}<|im_end|>"))
        history = told((*history, turn.reply))
    plan = session.plan(read(history))
    assert all(held is sent for held, sent in zip(session.turns[0].new_messages, plan.messages, strict=False))
    assert plan.messages[2] is session.turns[0].reply  # the stored spelling, also where the client echoed it
    changed = (history[0], Message("user", "else"), *history[2:])
    read(changed)
    assert parsed[0] == "messages[1]" and len(parsed) == len(history) - 1
    otherwise = session.read([to_raw(m) for m in history], None)  # another parser: nothing is taken from the first
    assert otherwise.messages[0] is not session.turns[0].new_messages[0]


def test_branches_of_a_tree_are_recognised_by_their_bytes() -> None:
    session = new_session(mode=SessionMode.TREE)
    branches = [(OPENING[0], Message("user", f"part {i}")) for i in range(3)]
    grown = []
    for branch in branches:
        turn = session.commit(session.prepare(raw_request(session, branch)), completion())
        grown.append(told((*branch, turn.reply)))
    for branch, history in zip(branches, grown, strict=True):
        asked = raw_request(session, history)
        root = next(turn for turn in session.turns if turn.new_messages[1] == branch[1])
        assert asked.messages[1] is root.new_messages[1]
        assert asked.tools is session.turns[0].tools
        assert session.plan(asked).base is root


def test_a_looser_match_is_counted_and_the_stored_spelling_stays() -> None:
    session = new_session(matcher="loose_tool_calls")
    turn = session.commit(session.prepare(raw_request(session, OPENING)), completion(call_turn("ls")))
    renamed = Message("assistant", "", (ToolCall.make("toolu_9", "bash", {"command": "ls"}),))
    prepared = session.prepare(raw_request(session, (*OPENING, renamed, Message("tool", "a.txt"))))
    assert prepared.plan.messages[2] is turn.reply
    second = session.commit(prepared, completion())
    history = (*OPENING, renamed, Message("tool", "a.txt"), second.reply, Message("user", "x"))
    session.commit(session.prepare(raw_request(session, history)), completion())  # the same bytes are not counted twice
    assert session.describe()["loose_matches"] == {"tool_call_json": 1}
    (sample,) = merge(snapshot(session))
    assert sample.matches == {"tool_call_json": 1}
    strict = new_session()
    take(strict, OPENING, call_turn("ls"))
    refused(
        strict, Refusal.BAD_HISTORY, r"\[2\].tool_calls", lambda: strict.prepare(request(told((*OPENING, renamed))))
    )


@pytest.mark.parametrize(
    ("raws", "tools", "match"),
    [
        ([b"{"], None, r"messages\[0\]: is not JSON"),
        ([b'{"role":"user","content":"x"}'], b"[", "tools: is not JSON"),
        ([b'{"role":"assistant","content":"x"}'], None, "the last message is assistant"),
        ([], None, "messages: is empty"),
    ],
)
def test_what_is_no_request_is_refused(raws: list[bytes], tools: bytes | None, match: str) -> None:
    session = new_session()
    refused(session, Refusal.BAD_BODY, match, lambda: session.read(raws, tools))
