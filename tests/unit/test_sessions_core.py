"""One session without HTTP: what continues it, what is refused, and that a refusal changes nothing."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from rl360.sessions.core import Session
from rl360.sessions.families.base import ChatTemplate
from rl360.sessions.families.rl360_chat import FAMILY, SPECIALS
from rl360.sessions.merge import merge, snapshot
from rl360.sessions.messages import Message, ToolCall
from rl360.sessions.refusals import Refusal
from rl360.sessions.routing import RoutingShape
from rl360.sessions.turns import Canonical, Sampling, SamplingPolicy, SessionMode
from tests.unit.sessions_data import (
    OPENING,
    SHAPE,
    TOOLS,
    build_tokenizer,
    call_turn,
    completion,
    context,
    encode_turn,
    new_session,
    refused,
    request,
    routed,
    rows_of,
    spec,
    take,
    to_raw,
    told,
    two_turns,
)

# --- linear sessions ---


def test_the_engine_sees_the_ids_it_sampled() -> None:
    session = new_session()
    history = take(session, OPENING, call_turn("ls"))
    first = context(session)
    prepared = session.prepare(request(told(history)))
    tail = encode_turn("<|im_start|>tool\na.txt<|im_end|><|im_start|>assistant\n")
    assert prepared.input_ids.tolist() == first + tail
    assert history[-1].tool_calls[0].arguments == '{"command":"ls"}'


def test_ids_are_kept_even_where_text_would_encode_otherwise() -> None:
    session = new_session()
    split = [*(encode_turn(c)[0] for c in "done"), 2]  # four byte tokens where the tokenizer has one for `done`
    assert len(encode_turn("done")) < 4
    ids = np.array(split, dtype=np.int32)
    odd = completion(output_ids=ids, logprobs=-np.ones(5, dtype=np.float32), spans=((0, 5, "run:0"),))
    turn = session.commit(session.prepare(request(OPENING, ())), odd)
    again = session.prepare(request((*OPENING, turn.reply, Message("user", "more")), ()))
    assert again.input_ids[turn.prompt_end : turn.end].tolist() == split
    assert turn.canonical is Canonical.RETOKENISED


def test_what_is_held_cannot_be_written_to() -> None:
    session, history = two_turns()
    answer = completion()
    prepared = session.prepare(request(told(history)))
    turn = session.commit(prepared, answer)
    for array in (turn.ids, turn.logprobs, prepared.input_ids):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
    answer.output_ids[:], answer.logprobs[:] = 0, -9  # the caller's arrays are its own
    assert turn.ids[turn.prompt_end - turn.start :].tolist() == encode_turn("done<|im_end|>")
    assert turn.logprobs[0] == -1


def test_history_compares_by_meaning() -> None:
    session = new_session()
    history = take(session, OPENING, call_turn('echo "é" > a'))
    call = history[-1].tool_calls[0]
    echoed = Message("assistant", "", (ToolCall.make(call.id, "bash", {"command": 'echo "é" > a'}),))
    assert session.plan(request(told((*OPENING, echoed)))).base is session.turns[-1]


def test_divergence_names_the_place() -> None:
    session, history = two_turns()
    more = Message("user", "again")
    cases = [
        ((Message("system", "Use sh."), *history[1:], more), r"messages\[0\].content \(system\) differs"),
        ((*history[:2], Message("assistant", "x"), *history[3:], more), r"messages\[2\].content"),
        ((*history[:3], Message("tool", "b.txt"), history[4], more), r"messages\[3\].content"),
        ((*history[:3], Message("user", "a.txt"), history[4], more), r"messages\[3\].role"),
        ((*history[:2], Message("assistant", "", ()), *history[3:], more), r"messages\[2\].tool_calls"),
        (OPENING, "history ends after 2 messages, the session holds 5 and can only go back to 4"),
        ((*history, Message("assistant", "x"), more), r"messages\[5\] is a new assistant message"),
        ((*history[:4], more, Message("assistant", "x"), more), r"messages\[4\].role \(user\) differs"),
    ]
    for messages, match in cases:
        refused(session, Refusal.BAD_HISTORY, match, lambda m=messages: session.prepare(request(m)))


def test_resending_the_last_request_samples_it_again() -> None:
    session, history = two_turns()
    gone = session.turns[-1]
    prepared = session.prepare(request(history[:-1]))
    assert prepared.plan.repeats is gone
    assert prepared.input_ids.tolist() == context(session)[: gone.prompt_end]
    turn = session.commit(prepared, completion("ok<|im_end|>"))
    assert (turn.parent, turn.reply.content) == (gone.parent, "ok")
    (sample,) = merge(snapshot(session))
    assert (sample.dropped, sample.turns) == ({"prefix_break": gone.sampled}, 2)
    assert sample.sampled_tokens == int(sample.loss_mask.sum()) + gone.sampled
    assert sample.tokens.tolist() == context(session)
    # the turn left behind is not continued, and nothing goes back two turns
    left = told(history, "more")
    refused(session, Refusal.BAD_HISTORY, r"messages\[4\].content", lambda: session.prepare(request(left)))
    refused(session, Refusal.BAD_HISTORY, "can only go back to 4", lambda: session.prepare(request(OPENING)))


def test_the_only_turn_may_be_sampled_again_but_not_asked_otherwise() -> None:
    session = new_session()
    take(session, OPENING, call_turn("ls"))
    other = (OPENING[0], Message("user", "Create b.txt"))
    refused(session, Refusal.BAD_HISTORY, r"messages\[1\].content", lambda: session.prepare(request(other)))
    prepared = session.prepare(request(OPENING))
    assert prepared.input_ids.tolist() == new_session().prepare(request(OPENING)).input_ids.tolist()
    session.commit(prepared, completion())
    (sample,) = merge(snapshot(session))
    assert (sample.turns, sample.dropped) == (1, {"prefix_break": session.turns[0].sampled})


def test_one_turn_back_with_another_message() -> None:
    session, history = two_turns()
    gone = session.turns[1]
    prepared = session.prepare(request((*history[:3], Message("tool", "b.txt"), Message("user", "hurry"))))
    assert (prepared.plan.base, prepared.plan.repeats) == (session.turns[0], None)
    tail = encode_turn("<|im_start|>tool\nb.txt<|im_end|><|im_start|>user\nhurry<|im_end|><|im_start|>assistant\n")
    assert prepared.input_ids.tolist() == context(session, session.turns[0]) + tail
    session.commit(prepared, completion("ok<|im_end|>"))
    (sample,) = merge(snapshot(session))
    assert sample.tokens.tolist() == context(session)
    assert sample.dropped == {"prefix_break": gone.sampled} == session.describe()["dropped"]


def test_tools_are_fixed_by_the_first_turn() -> None:
    session, history = two_turns()
    for tools in ((), TOOLS):
        refused(
            session,
            Refusal.TOOLS_CHANGED,
            "tools changed after turn 2",
            lambda t=tools: session.prepare(request(told(history), t)),
        )


def test_nothing_follows_a_cut_turn() -> None:
    session = new_session()
    history = take(session, OPENING, "<tool_call>bash\nls", finish="length")
    assert (session.turns[0].format_errors, session.turns[0].canonical) == (0, Canonical.CUT)
    for messages in ((*history, Message("user", "go on")), OPENING):
        refused(
            session,
            Refusal.CUT_TURN,
            "turn 1 was cut by length",
            lambda m=messages: session.prepare(request(m)),
            requests_after_cut=1,
        )
    (sample,) = merge(snapshot(session))
    assert sample.truncated
    assert int(sample.loss_mask.sum()) == sample.sampled_tokens == session.turns[0].sampled


def test_one_of_two_racing_turns_is_recorded() -> None:
    session = new_session()
    first, second = session.prepare(request(OPENING)), session.prepare(request(OPENING))
    session.commit(second, completion("ok<|im_end|>"))
    late = completion(call_turn("ls"))
    lost = len(late.output_ids)
    refused(
        session,
        Refusal.LOST_RACE,
        "epoch 1, this one was prepared on 0",
        lambda: session.commit(first, late),
        duplicate=lost,
    )
    (sample,) = merge(snapshot(session))
    assert (sample.dropped, sample.sampled_tokens) == ({"duplicate": lost}, session.turns[0].sampled + lost)
    plan = session.plan(request((*OPENING, session.turns[0].reply, Message("user", "x"))))
    session.commit(session.assemble(plan, session.render(plan)), completion())
    refused(session, Refusal.LOST_RACE, "recorded first", lambda: session.assemble(plan, session.render(plan)))


def test_what_loses_to_a_cut_turn_came_after_truncation() -> None:
    session = new_session()
    first, second = session.prepare(request(OPENING)), session.prepare(request(OPENING))
    session.commit(second, completion("ok", finish="length"))
    lost = len(completion().output_ids)
    refused(
        session,
        Refusal.LOST_RACE,
        "recorded first",
        lambda: session.commit(first, completion()),
        after_truncation=lost,
    )
    (sample,) = merge(snapshot(session))
    assert (sample.dropped, sample.truncated) == ({"after_truncation": lost}, True)


def test_a_malformed_reply_is_counted_as_such_even_when_it_comes_late() -> None:
    session = new_session()
    first, second = session.prepare(request(OPENING)), session.prepare(request(OPENING))
    session.commit(second, completion())
    bad = completion(finish="abort")
    lost = len(bad.output_ids)
    refused(session, Refusal.BAD_UPSTREAM, "abort", lambda: session.commit(first, bad), infra=lost)
    wrong = completion(version="run:1")
    refused(session, Refusal.WRONG_VERSION, "run:1", lambda: session.commit(first, wrong), stale=lost)
    (sample,) = merge(snapshot(session))
    assert sample.dropped == {"stale": lost, "infra": lost} == session.describe()["dropped"]
    assert sample.sampled_tokens == session.sampled_tokens == session.turns[0].sampled + 2 * lost


# --- limits ---


def test_the_length_limit_lowers_and_then_ends_generation() -> None:
    prompt = len(new_session().prepare(request(OPENING)).input_ids)
    assert new_session(max_seq_len=prompt + 5).prepare(request(OPENING)).max_new_tokens == 5
    assert new_session(max_seq_len=prompt + 999).prepare(request(OPENING)).max_new_tokens == 48
    full = new_session(max_seq_len=prompt)
    refused(
        full, Refusal.LENGTH, f"{prompt} tokens and max_seq_len is {prompt}", lambda: full.prepare(request(OPENING))
    )


def test_the_byte_budget_holds() -> None:
    session = new_session(budget_bytes=40_000, max_seq_len=1 << 20)
    history = take(session, OPENING, call_turn("ls"))
    big = told(history, "x" * 20_000)
    refused(session, Refusal.OVER_BUDGET, "the budget is 40000", lambda: session.prepare(request(big)))
    session.prepare(request(told(history)))
    moe = new_session(budget_bytes=12_000, routing=RoutingShape(layers=30, top_k=8, experts=64))
    refused(moe, Refusal.OVER_BUDGET, "the budget is 12000", lambda: moe.prepare(request(OPENING)))
    new_session(budget_bytes=12_000).prepare(request(OPENING))


_MIB = 1 << 20
_HELD_SOMEWHERE: dict[str, Callable[[int], tuple[list[dict[str, Any]], Any]]] = {
    "content": lambda i: ([{"role": "user", "content": f"{i}" + "x" * (_MIB // 64)}], None),
    "a field that is not rendered": lambda i: ([{"role": "user", "content": f"{i}", "name": "x" * _MIB}], None),
    "the id of a result": lambda i: ([{"role": "tool", "content": "", "tool_call_id": f"{i}" + "x" * _MIB}], None),
    "the id of a call": lambda i: (
        [_assistant(f"{i}" + "x" * _MIB), {"role": "user", "content": f"{i}"}],
        None,
    ),
    "a tool's description": lambda i: ([{"role": "user", "content": ""}], [_tool(f"{i}" + "x" * _MIB, {})]),
    "a tool's parameters": lambda i: (
        [{"role": "user", "content": ""}],
        [_tool(f"{i}", {"p": {"enum": ["x" * _MIB]}, **{f"{i}{n}": {} for n in range(300)}})],
    ),
}


def _assistant(call_id: str) -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _tool(description: str, properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": "bash", "description": description, "parameters": schema}}


@pytest.mark.parametrize("place", list(_HELD_SOMEWHERE))
def test_all_that_a_session_keeps_is_in_its_bytes(place: str) -> None:
    session = new_session(1 << 30, mode=SessionMode.TREE, max_seq_len=1 << 20)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(12):  # more than the requests that are remembered
            messages, tools = _HELD_SOMEWHERE[place](number)
            raws = [bytes(bytearray(orjson.dumps(message))) for message in messages]  # orjson's own are not cut to size
            asked = session.read(raws, bytes(bytearray(orjson.dumps(tools))))
            session.commit(session.prepare(asked), completion())
            del asked, raws, messages, tools
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept > (_MIB if place != "content" else _MIB // 64) and kept <= session.held_bytes * 1.1


def test_tools_that_are_the_same_are_kept_once() -> None:
    session = new_session(8 * _MIB)
    history = OPENING
    for number in range(6):  # other bytes, the same tools
        tools = orjson.dumps([_tool("x" * _MIB, {})]) + b" " * number
        asked = session.read([to_raw(message) for message in history], tools)
        session.commit(session.prepare(asked), completion())
        history = told((*history, session.turns[-1].reply))
    assert len({id(turn.tools) for turn in session.turns}) == 1 and session.held_bytes < 5 * _MIB


def test_nothing_is_recorded_after_close_or_seal() -> None:
    for end, code, match in (
        (Session.close, Refusal.NOT_FOUND, "deleted or has expired"),
        (Session.seal, Refusal.SEALED, "is sealed"),
    ):
        session = new_session()
        take(session, OPENING)
        prepared = session.prepare(request(OPENING))
        end(session)
        end(session) if code is Refusal.SEALED else None
        refused(session, code, match, lambda s=session, p=prepared: s.commit(p, completion()))
        refused(session, code, match, lambda s=session: s.prepare(request(OPENING)))
        refused(session, code, match, lambda s=session, p=prepared: s.assemble(p.plan, s.render(p.plan)))
        assert len(merge(snapshot(session))) == 1
    session.close()
    refused(session, Refusal.NOT_FOUND, "deleted", session.seal)


# --- what the engine answered ---


BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"output_ids": np.array([5, 2], dtype=np.int64)}, "int64"),
    ({"output_ids": np.array([2], dtype=np.int32)}, "do not pair"),
    ({"output_ids": np.zeros(0, np.int32), "logprobs": np.zeros(0, np.float32)}, "0 tokens sampled"),
    ({"output_ids": np.array([512, 2], dtype=np.int32)}, "ids span 2 to 512, the vocabulary has 512"),
    ({"output_ids": np.array([-1, 2], dtype=np.int32)}, "ids span -1"),
    ({"logprobs": np.array([-1, np.nan], dtype=np.float32)}, "is not finite"),
    ({"logprobs": np.array([-1, -np.inf], dtype=np.float32)}, "is not finite"),
    ({"logprobs": np.array([0.5, -1], dtype=np.float32)}, "at most 0"),
    ({"output_ids": np.array([2, 9], dtype=np.int32)}, r"last id 9, expected one end of turn \[2\] there"),
    ({"output_ids": np.array([2, 2], dtype=np.int32)}, "last id 2, expected one end of turn"),
    ({"finish_reason": "length"}, "finish_reason length but the end of turn 2 is at 1"),
    ({"finish_reason": "abort"}, "finish_reason 'abort'"),
    ({"spans": ()}, "cover 0 of 2"),
    ({"spans": ((0, 1, "run:0"),)}, "cover 1 of 2"),
    ({"spans": ((0, 3, "run:0"),)}, "cover 3 of 2"),
    ({"spans": ((1, 2, "run:0"),)}, r"span \[1, 2\) does not start at 0"),
    ({"spans": ((0, 2, "run:0"), (1, 2, "run:0"))}, "does not start at 2"),
    ({"spans": ((0, 0, "run:0"), (0, 2, "run:0"))}, "does not start at 0"),
]


@pytest.mark.parametrize("mode", list(SessionMode))
@pytest.mark.parametrize(("changes", "match"), BAD_COMPLETIONS)
def test_a_bad_completion_changes_nothing(changes: dict[str, Any], match: str, mode: SessionMode) -> None:
    good = {
        "output_ids": np.array([9, 2], dtype=np.int32),
        "logprobs": np.array([-1, -2], dtype=np.float32),
        "spans": ((0, 2, "run:0"),),
    }
    session, history = two_turns(mode=mode)
    prepared = session.prepare(request(told(history)))
    bad = completion(**{**good, **changes})
    code, bucket = (Refusal.NONFINITE,) * 2 if "not finite" in match else (Refusal.BAD_UPSTREAM, "infra")
    counted = {str(bucket): lost} if (lost := len(bad.output_ids)) else {}
    refused(session, code, match, lambda: session.commit(prepared, bad), **counted)
    session.commit(prepared, completion(**good))


def test_more_tokens_than_asked_for_are_refused() -> None:
    session = new_session(sampling=Sampling(1.0, 1.0, -1, max_new_tokens=1))
    prepared = session.prepare(request(OPENING))
    refused(
        session,
        Refusal.BAD_UPSTREAM,
        "expected 1 to 1",
        lambda: session.commit(prepared, completion("ok.<|im_end|>")),
        infra=len(encode_turn("ok.<|im_end|>")),
    )


def test_a_wrong_version_is_not_recorded() -> None:
    session = new_session()
    prepared = session.prepare(request(OPENING))
    wrong = completion(version="run:1")
    refused(
        session,
        Refusal.WRONG_VERSION,
        "'run:1', this session expects 'run:0'",
        lambda: session.commit(prepared, wrong),
        stale=len(wrong.output_ids),
    )
    anything = new_session(expected_weight_version=None)
    ids = encode_turn("ok<|im_end|>")
    spans = ((0, 1, "run:1"), (1, len(ids), "run:2"))
    anything.commit(anything.prepare(request(OPENING)), completion("ok<|im_end|>", spans=spans))
    start = anything.turns[0].prompt_end
    (sample,) = merge(snapshot(anything))
    assert sample.version_spans == [(start, start + 1, "run:1"), (start + 1, start + len(ids), "run:2")]


def test_rows_of_routed_experts_are_asked_for_once() -> None:
    session = new_session(routing=SHAPE)
    prepared = session.prepare(request(OPENING))
    assert prepared.routing_from == 0
    turn = session.commit(prepared, routed(prepared, completion(call_turn("ls"))))
    history = (*OPENING, turn.reply)
    later = session.prepare(request(told(history)))
    assert later.routing_from == turn.end - 1  # the last sampled token was not fed back yet
    end = len(later.input_ids) + len(completion().output_ids)
    for rows, match in (
        (None, f"no routed experts, {end - turn.end} rows are needed"),
        (rows_of(turn.end - 1, end), "expected uint8"),
        (rows_of(0, end - 1), "expected uint8"),
        (rows_of(turn.end - 1, end - 1).astype(np.uint16), "uint16"),
        (rows_of(turn.end - 1, end - 1)[:, :2], "expected uint8"),
    ):
        bad = replace(completion(), routing=rows)
        lost = len(bad.output_ids)
        refused(session, Refusal.BAD_ROUTING, match, lambda b=bad: session.commit(later, b), routing_misaligned=lost)
    second = session.commit(later, routed(later, completion(cached_tokens=3)))
    assert second.reprefilled_rows == turn.end - 1 - 3
    assert new_session().prepare(request(OPENING)).routing_from is None
    (sample,) = merge(snapshot(session))
    assert sample.routing is not None and sample.routing.tolist() == rows_of(0, end - 1).tolist()


def test_canonical_spelling_is_counted_and_nothing_replaced() -> None:
    session = new_session()
    history = OPENING
    loose = '<tool_call>edit\n{"path": "p", "text": "t"}</tool_call><|im_end|>'
    kinds = []
    for text in ("done<|im_end|>", loose, "<tool_call>nope\n</tool_call><|im_end|>"):
        turn = session.commit(session.prepare(request(history, TOOLS)), completion(text))
        assert turn.ids[turn.prompt_end - turn.start :].tolist() == encode_turn(text)
        history = (*history, turn.reply, Message("user", "more"))
        kinds.append(turn.canonical)
    assert kinds == [Canonical.EXACT, Canonical.RESPELLED, Canonical.UNPARSED]
    (sample,) = merge(snapshot(session))
    assert sample.canonical == {"exact": 1, "respelled": 1, "unparsed": 1}


def test_another_stop_id_is_kept_and_the_next_message_begins_as_it_must() -> None:
    family = replace(FAMILY, stops=("<|im_end|>", SPECIALS[0]))
    two_stops = ChatTemplate(family, build_tokenizer().to_str(), 512)
    session = Session("s", spec(), two_stops, 1 << 20)
    turn = session.commit(session.prepare(request(OPENING)), completion("done<|endoftext|>"))
    assert turn.canonical is Canonical.BOUNDARY
    prepared = session.prepare(request(told((*OPENING, turn.reply))))
    tail = encode_turn("done<|endoftext|><|im_end|><|im_start|>tool\na.txt<|im_end|><|im_start|>assistant\n")
    assert prepared.input_ids[turn.prompt_end :].tolist() == tail


# --- sampling parameters ---


def test_pinned_parameters_stay_and_what_was_asked_is_counted() -> None:
    session = new_session()
    prepared = session.prepare(request(OPENING), {"temperature": 0.2, "top_p": 1.0, "top_k": None})
    assert prepared.sampling == session.spec.sampling
    turn = session.commit(prepared, completion(), ("seed",))
    assert (turn.sampling_differs, dict(session.ignored_params)) == (False, {"temperature": 1, "seed": 1})


def test_recorded_parameters_are_used_within_bounds_and_mark_the_turn() -> None:
    session = new_session(sampling_policy=SamplingPolicy.RECORD)
    prepared = session.prepare(request(OPENING), {"temperature": 0, "top_k": 5, "max_new_tokens": 9})
    assert prepared.sampling == Sampling(0, 1.0, 5, 9) and prepared.max_new_tokens == 9
    assert session.prepare(request(OPENING), {"max_new_tokens": 4000}).max_new_tokens == 48
    turn = session.commit(prepared, completion())
    assert turn.sampling_differs
    shorter = session.prepare(request(told((*OPENING, turn.reply))), {"max_new_tokens": 9})
    assert not session.commit(shorter, completion()).sampling_differs  # it cuts a turn, it does not change its odds
    assert session.recorded_params == {"temperature": 1, "top_k": 1, "max_new_tokens": 2}
    (sample,) = merge(snapshot(session))
    assert sample.sampling_differs == 1
    for asked, match in (
        ({"temperature": "hot"}, "'hot' is not a number"),
        ({"temperature": False}, "not a number"),
        ({"temperature": float("nan")}, "temperature nan is out of range"),
        ({"temperature": 2.1}, "out of range"),
        ({"top_p": 0}, "out of range"),
        ({"top_k": 0}, "out of range"),
        ({"top_k": 2.0}, "not a number it can have"),
        ({"max_new_tokens": 0}, "out of range"),
    ):
        refused(session, Refusal.PARAMS, match, lambda a=asked: session.prepare(request(OPENING), a))


def test_other_parameters_may_be_refused() -> None:
    session = new_session(sampling_policy=SamplingPolicy.REFUSE)
    session.prepare(request(OPENING), {"temperature": 1, "top_k": -1, "max_new_tokens": None})
    refused(
        session,
        Refusal.PARAMS,
        r"fixed: temperature 0.5 \(it is 1.0\)",
        lambda: session.prepare(request(OPENING), {"temperature": 0.5, "top_p": 1.0}),
    )


# --- what is told ---


def test_description_holds_counts_and_no_ids() -> None:
    session, history = two_turns()
    session.commit(session.prepare(request((*history, Message("user", "x")))), completion(), ("temperature", "seed"))
    found = session.describe()
    assert [turn["finish_reason"] for turn in found["turns"]] == ["stop"] * 3
    assert found["ignored_params"] == {"temperature": 1, "seed": 1}
    assert found["turns"][0]["weight_versions"] == ["run:0"]
    assert found["sampled_tokens"] == sum(turn["sampled_tokens"] for turn in found["turns"])
    assert (found["leaves"], found["canonical"]) == (1, {"exact": 3})
    assert all(not isinstance(value, list) for turn in found["turns"] for key, value in turn.items() if "token" in key)


def test_ignored_parameter_names_are_bounded() -> None:
    session = new_session()
    session.commit(session.prepare(request(OPENING)), completion(), tuple(f"p{i}" for i in range(100)))
    assert len(session.ignored_params) == 33
    assert session.ignored_params["other"] == 68
