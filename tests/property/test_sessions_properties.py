"""Random agents against a session, judged by an oracle of plain lists that shares no code with it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rl360.sessions.core import Completion, PreparedTurn, Session
from rl360.sessions.families.rl360_chat import SPECIALS
from rl360.sessions.merge import merge
from rl360.sessions.messages import Message, ToolCall, parse_messages
from rl360.sessions.refusals import Refusal, SessionRefusal
from tests.unit.sessions_data import BASH, TOOLS, build_tokenizer, new_session, state_of, template

END = 2
MAX_SEQ_LEN = 160
TEXT = st.text(st.sampled_from("ab \n\té漢🙂<|>_/"), max_size=12) | st.sampled_from(SPECIALS)


@functools.cache
def _stock() -> Tokenizer:
    return build_tokenizer()


@functools.cache
def _plain() -> Tokenizer:
    tokenizer = build_tokenizer()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _text(text: str) -> list[int]:
    return _plain().encode(text, add_special_tokens=False).ids


@dataclass
class Oracle:
    """What a session must hold, as lists written out by hand."""

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    history: list[Message] = field(default_factory=list)
    last_request: list[Message] = field(default_factory=list)
    last_sampled: int = 0
    sampled: int = 0
    dropped: int = 0
    lost: int = 0
    cut: bool = False

    def expected_prompt(self, new: list[Message]) -> list[int]:
        ids = list(self.ids)
        if not ids:
            ids += [1, *_text("system\nUse bash.\n# bash(command)"), 2]
            new = new[1:]
        for message in new:
            ids += [1, *_text(f"{message.role}\n{message.content}"), 2]
        return [*ids, 1, *_text("assistant\n")]

    def roll_back(self) -> None:
        self.dropped += self.last_sampled
        for held in (self.ids, self.mask, self.logprobs):
            del held[len(held) - self.last_sampled :]
        self.history = list(self.last_request)

    def take(self, prompt: list[int], sampled: list[int], logprobs: list[float], request: list[Message]) -> None:
        grown = len(prompt) - len(self.ids)
        self.ids = prompt + sampled
        self.mask += [0] * grown + [1] * len(sampled)
        self.logprobs += [0.0] * grown + logprobs
        self.last_request, self.last_sampled = list(request), len(sampled)
        self.sampled += len(sampled)


def _check(session: Session, oracle: Oracle) -> None:
    assert session.tokens.view.tolist() == oracle.ids
    assert session.mask.view.tolist() == oracle.mask
    assert session.logprobs.view.tolist() == oracle.logprobs
    assert session.messages == oracle.history
    assert session.sampled_tokens == oracle.sampled
    if not oracle.ids:
        return
    sample = merge(session)
    assert sample.tokens.tolist() == oracle.ids
    assert sample.loss_mask.tolist() == oracle.mask
    assert sample.logprobs.tolist() == oracle.logprobs
    assert sample.sampled_tokens == oracle.sampled + oracle.lost
    assert sample.prefix_break_tokens == oracle.dropped + oracle.lost
    assert sample.truncated == oracle.cut
    assert sum(oracle.mask) + oracle.dropped == oracle.sampled
    spans = [i for start, end, _version in sample.version_spans for i in range(start, end)]
    assert spans == [i for i, bit in enumerate(oracle.mask) if bit]


def _refuses(session: Session, code: Refusal, call: Any) -> None:
    before = state_of(session)
    with pytest.raises(SessionRefusal) as caught:
        call()
    assert caught.value.code is code
    assert state_of(session) == before


class RandomAgent:
    """Draws one action after another and applies it to the session and to the oracle."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.session = new_session(max_seq_len=MAX_SEQ_LEN)
        self.oracle = Oracle()

    def draw(self, strategy: st.SearchStrategy) -> Any:
        return self.data.draw(strategy)

    def request(self) -> list[Message]:
        if not self.oracle.history:
            return [Message("system", "Use bash."), Message("user", self.draw(TEXT))]
        roles = self.draw(st.lists(st.sampled_from(["tool", "user"]), min_size=1, max_size=2))
        return [*self.oracle.history, *(Message(role, self.draw(TEXT)) for role in roles)]

    def engine(self, prepared: PreparedTurn) -> Completion:
        """Any ids an engine may sample, special tokens and ids without text included."""
        body = self.draw(st.lists(st.integers(0, 511).filter(lambda i: i != END), max_size=prepared.max_new_tokens))
        shaped = self.draw(st.sampled_from(["any", "call", "done"]))
        if shaped != "any":
            text = "done" if shaped == "done" else "<tool_call>bash\nls</tool_call>"
            body = _stock().encode(text, add_special_tokens=False).ids[: prepared.max_new_tokens]
        cut = len(body) == prepared.max_new_tokens or (bool(body) and self.draw(st.integers(0, 9)) == 0)
        ids = body if cut else [*body, END]
        logprobs = np.array([-self.draw(st.floats(0, 20, width=32)) for _ in range(min(len(ids), 3))], dtype=np.float32)
        padded = np.resize(logprobs, len(ids)).astype(np.float32)
        reason = "length" if cut else "stop"
        return Completion(np.array(ids, dtype=np.int32), padded, reason, ((0, len(ids), "run:0"),))

    def record(self, prepared: PreparedTurn, request: list[Message], new: list[Message], rollback: bool) -> None:
        if rollback:
            self.oracle.roll_back()
            expected = list(self.oracle.ids)
        else:
            expected = self.oracle.expected_prompt(new)
        assert prepared.input_ids.tolist() == expected
        assert prepared.max_new_tokens == min(48, MAX_SEQ_LEN - len(expected))
        answer = self.engine(prepared)
        turn = self.session.commit(prepared, answer)
        self.oracle.take(expected, answer.output_ids.tolist(), answer.logprobs.tolist(), request)
        self.oracle.history = [*request, turn.reply]
        self.oracle.cut = answer.finish_reason == "length"

    def extend(self) -> None:
        request = self.request()
        new = request[len(self.oracle.history) :]
        if self.oracle.cut:
            _refuses(self.session, Refusal.CUT_TURN, lambda: self.session.prepare(tuple(request), BASH))
        elif len(self.oracle.expected_prompt(new)) >= MAX_SEQ_LEN:
            _refuses(self.session, Refusal.LENGTH, lambda: self.session.prepare(tuple(request), BASH))
        else:
            self.record(self.session.prepare(tuple(request), BASH), request, new, rollback=False)

    def resend(self) -> None:
        if self.oracle.history and not self.oracle.cut:
            request = list(self.oracle.last_request)
            self.record(self.session.prepare(tuple(request), BASH), request, [], rollback=True)

    def diverge(self) -> None:
        if not self.oracle.history or self.oracle.cut:
            return
        request = self.request()
        where = self.draw(st.integers(0, len(self.oracle.history) - 1))
        how = self.draw(st.sampled_from(["content", "call", "drop", "repeat"]))
        old = request[where]
        if how == "content":
            request[where] = Message(old.role, old.content + "!", old.tool_calls, old.tool_call_id)
        elif how == "call":
            call = ToolCall.make("call_x", "bash", {"command": "rm"})
            request[where] = Message("assistant", old.content, (*old.tool_calls, call))
        elif how == "drop":
            del request[where:-1]
        else:
            request.insert(where, Message("assistant", "never said"))
        _refuses(self.session, Refusal.BAD_HISTORY, lambda: self.session.prepare(tuple(request), BASH))

    def change_tools(self) -> None:
        if self.oracle.history:
            request = tuple(self.request())
            tools = self.draw(st.sampled_from([(), TOOLS]))
            _refuses(self.session, Refusal.TOOLS_CHANGED, lambda: self.session.prepare(request, tools))

    def race(self) -> None:
        request = self.request()
        new = request[len(self.oracle.history) :]
        if self.oracle.cut or len(self.oracle.expected_prompt(new)) >= MAX_SEQ_LEN:
            return
        winner, loser = (self.session.prepare(tuple(request), BASH) for _ in range(2))
        self.record(winner, request, new, rollback=False)
        late = self.engine(loser)
        _refuses(self.session, Refusal.LOST_RACE, lambda: self.session.commit(loser, late))
        self.oracle.lost += len(late.output_ids)

    def lose_upstream(self) -> None:
        request = self.request()
        new = request[len(self.oracle.history) :]
        if self.oracle.cut or len(self.oracle.expected_prompt(new)) >= MAX_SEQ_LEN:
            return
        prepared = self.session.prepare(tuple(request), BASH)
        good = self.engine(prepared)
        if self.draw(st.booleans()):
            spans = ((0, len(good.output_ids), "run:9"),)
            wrong = Completion(good.output_ids, good.logprobs, good.finish_reason, spans)
            _refuses(self.session, Refusal.WRONG_VERSION, lambda: self.session.commit(prepared, wrong))
        else:
            wrong = Completion(good.output_ids, good.logprobs, "abort", good.spans)
            _refuses(self.session, Refusal.BAD_UPSTREAM, lambda: self.session.commit(prepared, wrong))


ACTIONS = ["extend", "extend", "extend", "resend", "diverge", "change_tools", "race", "lose_upstream"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_session_holds_what_the_oracle_holds(data: st.DataObject) -> None:
    agent = RandomAgent(data)
    for name in data.draw(st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=9)):
        getattr(agent, name)()
        _check(agent.session, agent.oracle)


CALLS = st.lists(TEXT, max_size=2).map(
    lambda texts: tuple(ToolCall.make(f"c{i}", "bash", {"command": text}) for i, text in enumerate(texts))
)
ASSISTANT = st.builds(lambda content, calls: Message("assistant", content, calls), TEXT, CALLS)
OTHER = st.builds(Message, st.sampled_from(["user", "tool"]), TEXT)
ROUNDS = st.lists(st.tuples(ASSISTANT, st.lists(OTHER, min_size=1, max_size=2)), min_size=1, max_size=3)


@settings(max_examples=80, deadline=None)
@given(st.booleans(), ROUNDS, TEXT)
def test_rendering_is_append_only(system: bool, rounds: list, first: str) -> None:
    messages: tuple[Message, ...] = (Message("user", first),)
    if system:
        messages = (Message("system", first), *messages)
    rendered = template().render_prompt(messages, BASH).tolist()
    for assistant, others in rounds:
        spoken = template().render_conversation((*messages, assistant), BASH).tolist()
        messages = (*messages, assistant, *others)
        longer = template().render_prompt(messages, BASH).tolist()
        assert spoken[: len(rendered)] == rendered
        assert longer[: len(spoken)] == spoken
        assert longer[len(spoken) :] == template().render_delta(END, tuple(others)).tolist()
        rendered = longer


@settings(max_examples=80, deadline=None)
@given(ASSISTANT)
def test_parsing_what_was_rendered_gives_it_back(message: Message) -> None:
    before = template().render_prompt((Message("user", "x"),), BASH).tolist()
    ids = template().render_conversation((Message("user", "x"), message), BASH).tolist()[len(before) :]
    turn = template().parse_assistant(ids, BASH)
    assert (turn.content, turn.format_errors) == (message.content, 0)
    assert [call.arguments for call in turn.tool_calls] == [orjson.loads(call.arguments) for call in message.tool_calls]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 511), max_size=40))
def test_any_sampled_ids_parse(ids: list[int]) -> None:
    turn = template().parse_assistant(ids, TOOLS)
    assert turn.format_errors == 0 or turn.tool_calls == ()


KEYS = ["role", "content", "tool_calls", "tool_call_id", "function", "name", "arguments", "type", "text", "id"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda c: st.lists(c, max_size=3) | st.dictionaries(st.sampled_from(KEYS), c, max_size=4),
    max_leaves=12,
)
NEARLY = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
    optional={"content": JSON, "tool_calls": JSON, "tool_call_id": JSON, "name": JSON},
)


@settings(max_examples=150, deadline=None)
@given(JSON | st.lists(JSON | NEARLY, max_size=4))
def test_any_json_is_messages_or_a_refusal(raw: Any) -> None:
    code = None
    try:
        messages = parse_messages(raw)
    except SessionRefusal as refused:
        code = refused.code
    else:
        assert messages[-1].role in ("user", "tool")
        template().render_prompt(messages, BASH)
    assert code in (None, Refusal.BAD_BODY)
