"""One session without HTTP: what extends it, what is refused, and that a refusal changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rl360.sessions.core import GrowBuffer, Sampling, Session
from rl360.sessions.merge import merge
from rl360.sessions.messages import Message, ToolCall
from rl360.sessions.refusals import Refusal, SessionRefusal
from tests.unit.sessions_data import BASH, OPENING, TOOLS, call_turn, completion, encode_turn, new_session, state_of


def _refused(session: Session, code: Refusal, match: str, call: Any) -> None:
    before = state_of(session)
    with pytest.raises(SessionRefusal, match=match) as caught:
        call()
    assert caught.value.code is code
    assert state_of(session) == before


def _turn(session: Session, messages: tuple[Message, ...], text: str, **changes: Any) -> tuple[Message, ...]:
    """Run one turn; returns the history the agent now holds."""
    turn = session.commit(session.prepare(messages, BASH), completion(text, **changes))
    return (*messages, turn.reply)


def _two_turns() -> tuple[Session, tuple[Message, ...]]:
    session = new_session()
    history = _turn(session, OPENING, call_turn("ls"))
    return session, _turn(session, (*history, Message("tool", "a.txt")), "done<|im_end|>")


def test_the_engine_sees_the_ids_it_sampled() -> None:
    session = new_session()
    history = _turn(session, OPENING, call_turn("ls"))
    first = session.tokens.view.tolist()
    prepared = session.prepare((*history, Message("tool", "a.txt")), BASH)
    assert prepared.input_ids[: len(first)].tolist() == first
    tail = encode_turn("<|im_start|>tool\na.txt<|im_end|><|im_start|>assistant\n")
    assert prepared.input_ids[len(first) :].tolist() == tail
    assert history[-1].tool_calls[0].arguments == '{"command":"ls"}'


def test_ids_are_kept_even_where_text_would_encode_otherwise() -> None:
    session = new_session()
    split = [*(encode_turn(c)[0] for c in "done"), 2]  # four byte tokens where the tokenizer has one for `done`
    assert len(encode_turn("done")) < 4
    ids = np.array(split, dtype=np.int32)
    odd = completion(output_ids=ids, logprobs=-np.ones(5, dtype=np.float32), spans=((0, 5, "run:0"),))
    turn = session.commit(session.prepare(OPENING, ()), odd)
    again = session.prepare((*OPENING, turn.reply, Message("user", "more")), ())
    assert again.input_ids[turn.prompt_end : turn.end].tolist() == split


def test_history_compares_by_meaning() -> None:
    session = new_session()
    history = _turn(session, OPENING, call_turn('echo "é" > a'))
    call = history[-1].tool_calls[0]
    echoed = Message("assistant", "", (ToolCall.make(call.id, "bash", {"command": 'echo "é" > a'}),))
    assert session.plan((*OPENING, echoed, Message("tool", "ok")), BASH).base == session.turns[-1].end


def test_tool_arguments_compare_as_values() -> None:
    one = ToolCall.make("c", "edit", {"path": "p", "text": "t"})
    assert one == ToolCall.make("c", "edit", {"text": "t", "path": "p"})
    assert one != ToolCall.make("c", "edit", {"text": "t", "path": "q"})


def test_divergence_names_the_place() -> None:
    session, history = _two_turns()
    more = Message("user", "again")
    cases = [
        ((Message("system", "Use sh."), *history[1:], more), r"messages\[0\].content \(system\) differs"),
        ((*history[:2], Message("assistant", "x"), *history[3:], more), r"messages\[2\].content"),
        ((*history[:3], Message("tool", "b.txt"), history[4], more), r"messages\[3\].content"),
        ((*history[:3], Message("user", "a.txt"), history[4], more), r"messages\[3\].role"),
        ((*history[:2], Message("assistant", "", ()), *history[3:], more), r"messages\[2\].tool_calls"),
        (OPENING, "history ends after 2 messages, the session holds 5 and can only go back to 4"),
        ((*history, Message("assistant", "x"), more), r"messages\[5\] is a new assistant message"),
    ]
    for messages, match in cases:
        _refused(session, Refusal.BAD_HISTORY, match, lambda m=messages: session.prepare(m, BASH))


def test_resending_the_last_request_regenerates_one_turn() -> None:
    session, history = _two_turns()
    length, gone = session.tokens.length, session.turns[-1].sampled
    prepared = session.prepare(history[:-1], BASH)
    assert prepared.plan.rollback
    assert prepared.input_ids.tolist() == session.tokens.view[: session.turns[-1].prompt_end].tolist()
    session.commit(prepared, completion("ok<|im_end|>"))
    assert (len(session.turns), session.rollbacks, session.prefix_break_tokens) == (2, 1, gone)
    assert session.messages[-1].content == "ok"
    sample = merge(session)
    assert sample.sampled_tokens == int(sample.loss_mask.sum()) + gone
    assert sample.prefix_break_tokens == gone
    assert len(sample.tokens) == length - gone + session.turns[-1].sampled
    # one turn back, not two: the request before the last one is refused
    _refused(session, Refusal.BAD_HISTORY, "can only go back to 4", lambda: session.prepare(OPENING, BASH))


def test_tools_are_fixed_by_the_first_turn() -> None:
    session, history = _two_turns()
    for tools in ((), TOOLS):
        _refused(
            session,
            Refusal.TOOLS_CHANGED,
            "tools changed after turn 2",
            lambda t=tools: session.prepare((*history, Message("user", "x")), t),
        )


def test_nothing_follows_a_cut_turn() -> None:
    session = new_session()
    history = _turn(session, OPENING, "<tool_call>bash\nls", finish="length")
    assert session.turns[-1].format_errors == 0  # the limit's fault, not the policy's
    for messages in ((*history, Message("user", "go on")), OPENING):
        _refused(session, Refusal.CUT_TURN, "was cut by length", lambda m=messages: session.prepare(m, BASH))
    sample = merge(session)
    assert sample.truncated
    assert int(sample.loss_mask.sum()) == sample.sampled_tokens == session.turns[0].sampled


def test_the_length_limit_lowers_and_then_ends_generation() -> None:
    prompt = len(new_session().prepare(OPENING, BASH).input_ids)
    assert new_session(max_seq_len=prompt + 5).prepare(OPENING, BASH).max_new_tokens == 5
    assert new_session(max_seq_len=prompt + 999).prepare(OPENING, BASH).max_new_tokens == 48
    full = new_session(max_seq_len=prompt)
    _refused(full, Refusal.LENGTH, f"{prompt} tokens and max_seq_len is {prompt}", lambda: full.prepare(OPENING, BASH))


def test_the_byte_budget_holds() -> None:
    session = new_session(budget_bytes=40_000, max_seq_len=1 << 20)
    history = _turn(session, OPENING, call_turn("ls"))
    big = Message("tool", "x" * 20_000)
    _refused(session, Refusal.OVER_BUDGET, "the budget is 40000", lambda: session.prepare((*history, big), BASH))
    session.prepare((*history, Message("tool", "x")), BASH)


def test_one_of_two_racing_turns_is_recorded() -> None:
    session = new_session()
    first, second = session.prepare(OPENING, BASH), session.prepare(OPENING, BASH)
    session.commit(second, completion("ok<|im_end|>"))
    late = completion(call_turn("ls"))
    _refused(session, Refusal.LOST_RACE, "epoch 1, this one was prepared on 0", lambda: session.commit(first, late))
    assert session.lost_race_tokens == len(late.output_ids)
    sample = merge(session)
    assert sample.sampled_tokens == session.turns[0].sampled + len(late.output_ids)
    assert sample.prefix_break_tokens == len(late.output_ids)
    plan = session.plan((*OPENING, session.turns[0].reply, Message("user", "x")), BASH)
    session.commit(session.assemble(plan, session.render(plan)), completion())
    _refused(session, Refusal.LOST_RACE, "recorded first", lambda: session.assemble(plan, session.render(plan)))


def test_nothing_is_recorded_after_close() -> None:
    session = new_session()
    prepared = session.prepare(OPENING, BASH)
    session.close()
    _refused(session, Refusal.NOT_FOUND, "deleted or has expired", lambda: session.commit(prepared, completion()))
    _refused(session, Refusal.NOT_FOUND, "deleted or has expired", lambda: session.prepare(OPENING, BASH))


BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"output_ids": np.array([5, 2], dtype=np.int64)}, "int64"),
    ({"output_ids": np.array([2], dtype=np.int32)}, "do not pair"),
    ({"output_ids": np.zeros(0, np.int32), "logprobs": np.zeros(0, np.float32)}, "0 tokens sampled"),
    ({"output_ids": np.array([512, 2], dtype=np.int32)}, "ids span 2 to 512, the vocabulary has 512"),
    ({"output_ids": np.array([-1, 2], dtype=np.int32)}, "ids span -1"),
    ({"logprobs": np.array([-1, np.nan], dtype=np.float32)}, "expected finite"),
    ({"logprobs": np.array([-1, -np.inf], dtype=np.float32)}, "expected finite"),
    ({"logprobs": np.array([0.5, -1], dtype=np.float32)}, "at most 0"),
    ({"output_ids": np.array([2, 9], dtype=np.int32)}, "expected end of turn 2 once"),
    ({"output_ids": np.array([2, 2], dtype=np.int32)}, "expected end of turn 2 once"),
    ({"finish_reason": "length"}, "finish_reason length but the end of turn 2 is at 1"),
    ({"finish_reason": "abort"}, "finish_reason 'abort'"),
    ({"spans": ()}, "cover 0 of 2"),
    ({"spans": ((0, 1, "run:0"),)}, "cover 1 of 2"),
    ({"spans": ((0, 3, "run:0"),)}, "cover 3 of 2"),
    ({"spans": ((1, 2, "run:0"),)}, r"span \[1, 2\) does not start at 0"),
    ({"spans": ((0, 2, "run:0"), (1, 2, "run:0"))}, "does not start at 2"),
    ({"spans": ((0, 0, "run:0"), (0, 2, "run:0"))}, "does not start at 0"),
]


@pytest.mark.parametrize(("changes", "match"), BAD_COMPLETIONS)
def test_a_bad_completion_changes_nothing(changes: dict[str, Any], match: str) -> None:
    good = {
        "output_ids": np.array([9, 2], dtype=np.int32),
        "logprobs": np.array([-1, -2], dtype=np.float32),
        "spans": ((0, 2, "run:0"),),
    }
    session, history = _two_turns()
    prepared = session.prepare((*history, Message("user", "x")), BASH)
    bad = completion(**{**good, **changes})
    _refused(session, Refusal.BAD_UPSTREAM, match, lambda: session.commit(prepared, bad))
    session.commit(prepared, completion(**good))


def test_more_tokens_than_asked_for_are_refused() -> None:
    session = new_session(sampling=Sampling(1.0, 1.0, -1, max_new_tokens=1))
    prepared = session.prepare(OPENING, BASH)
    _refused(
        session, Refusal.BAD_UPSTREAM, "expected 1 to 1", lambda: session.commit(prepared, completion("ok.<|im_end|>"))
    )


def test_a_wrong_version_is_not_recorded() -> None:
    session = new_session()
    prepared = session.prepare(OPENING, BASH)
    wrong = completion(version="run:1")
    _refused(
        session, Refusal.WRONG_VERSION, "'run:1', this session expects 'run:0'", lambda: session.commit(prepared, wrong)
    )
    anything = new_session(expected_weight_version=None)
    ids = encode_turn("ok<|im_end|>")
    spans = ((0, 1, "run:1"), (1, len(ids), "run:2"))
    anything.commit(anything.prepare(OPENING, BASH), completion("ok<|im_end|>", spans=spans))
    start = anything.turns[0].prompt_end
    assert merge(anything).version_spans == [(start, start + 1, "run:1"), (start + 1, start + len(ids), "run:2")]


def test_description_holds_counts_and_no_ids() -> None:
    session, _history = _two_turns()
    session.commit(session.prepare((*_history, Message("user", "x")), BASH), completion(), ("temperature", "seed"))
    told = session.describe()
    assert [turn["finish_reason"] for turn in told["turns"]] == ["stop"] * 3
    assert told["ignored_params"] == {"temperature": 1, "seed": 1}
    assert told["turns"][0]["weight_versions"] == ["run:0"]
    assert told["sampled_tokens"] == sum(turn["sampled_tokens"] for turn in told["turns"])
    assert all(not isinstance(value, list) for turn in told["turns"] for key, value in turn.items() if "token" in key)


def test_ignored_parameter_names_are_bounded() -> None:
    session = new_session()
    session.commit(session.prepare(OPENING, BASH), completion(), tuple(f"p{i}" for i in range(100)))
    assert len(session.ignored_params) == 33
    assert session.ignored_params["other"] == 68


def test_grow_buffer_keeps_everything() -> None:
    buffer = GrowBuffer(np.int32, capacity=2)
    expected: list[int] = []
    for size in (1, 0, 3, 100, 1):
        part = np.arange(size, dtype=np.int32) + len(expected)
        buffer.append(part)
        expected.extend(part.tolist())
    assert buffer.view.tolist() == expected
    buffer.truncate(2)
    buffer.append(np.array([9], dtype=np.int32))
    assert buffer.view.tolist() == [0, 1, 9]
