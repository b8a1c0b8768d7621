"""Merging: a sample is what was sent and sampled, every sampled token is counted once, and doubt refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rl360.ledger.outcomes import DROPPED
from rl360.sessions.core import Session
from rl360.sessions.merge import MAX_LEAVES, Pick, SessionSnapshot, merge, snapshot
from rl360.sessions.messages import Message
from rl360.sessions.refusals import Refusal, SessionRefusal
from rl360.sessions.routing import RowForward
from rl360.sessions.sample import LeafCounts, MergedSample, SampleRef
from rl360.sessions.turns import SessionMode, Turn
from rl360.store.codec import pack
from tests.unit.sessions_data import (
    OPENING,
    SHAPE,
    call_turn,
    completion,
    encode_turn,
    new_session,
    request,
    routed,
    rows_of,
)


def held_after(turns: int = 3, first: str = "abc") -> SessionSnapshot:
    session = new_session()
    history: tuple[Message, ...] = OPENING
    for number in range(turns):
        command = f"cat {number}" if number else first
        turn = session.commit(session.prepare(request(history)), completion(call_turn(command)))
        history = (*history, turn.reply, Message("tool", f"line {number}"))
    return snapshot(session)


def refused(held: SessionSnapshot, match: str, pick: Pick = Pick.LAST) -> None:
    with pytest.raises(SessionRefusal, match=match) as caught:
        merge(held, pick)
    assert (caught.value.code, caught.value.sampled) == (Refusal.CANNOT_MERGE, held.sampled_tokens)


def test_mask_and_logprobs_sit_on_the_sampled_ids() -> None:
    held = held_after()
    (sample,) = merge(held)
    assert (sample.turns, sample.truncated, sample.dropped) == (3, False, {})
    for turn, (start, end, version) in zip(held.turns, sample.version_spans, strict=True):
        assert (turn.prompt_end, turn.end, version) == (start, end, "run:0")
        assert sample.logprobs[start:end].tolist() == [-float(i + 1) for i in range(end - start)]
        assert sample.tokens[end - 1] == 2  # the end of turn is sampled and trained
    assert int(sample.loss_mask.sum()) == sample.sampled_tokens == sum(turn.sampled for turn in held.turns)
    assert sample.tokens.dtype == np.int32 and sample.loss_mask.dtype == np.uint8


def test_the_snapshot_is_detached() -> None:
    session = new_session()
    session.commit(session.prepare(request(OPENING)), completion())
    held = snapshot(session)
    session.commit(session.prepare(request(OPENING)), completion("ok<|im_end|>"))
    (sample,) = merge(held)
    assert sample.tokens[-3:].tolist() == completion().output_ids[-3:].tolist()


def changed(held: SessionSnapshot, index: int, **changes: Any) -> SessionSnapshot:
    turns = list(held.turns)
    turns[index] = replace(turns[index], **changes)
    return replace(held, turns=tuple(turns))


def other_ids(turn: Turn, where: int) -> np.ndarray:
    ids = turn.ids.copy()
    ids[where] += 1
    return ids


def test_doubt_refuses() -> None:
    held = held_after()
    refused(snapshot(new_session()), "has no recorded turn")
    for index, turn in enumerate(held.turns):
        sent = turn.prompt_end - turn.start
        for where, match in ((0, "are not the ids it sent"), (sent - 1, "it sent"), (sent, "not the ids it sampled")):
            refused(changed(held, index, ids=other_ids(turn, where)), f"turn {index + 1}: .*{match}")
        refused(changed(held, index, prompt_digest=bytes(16)), f"turn {index + 1}: .*it sent")
        refused(changed(held, index, ids=turn.ids[:-1]), f"turn {index + 1}: holds {len(turn.ids) - 1} ids")
        refused(changed(held, index, prompt_end=turn.end), f"turn {index + 1}: holds")
        refused(changed(held, index, start=turn.start + 1), f"turn {index + 1}: holds")
    refused(changed(held, 2, parent=0), f"turn 3: holds .* after {held.turns[0].end}")
    refused(changed(held, 1, finish_reason="length"), "turn 3: follows turn 2, which was cut by length")
    refused(replace(held, sampled_tokens=held.sampled_tokens + 1), "account for .* tokens of the")
    refused(changed(held, 1, spans=()), "version spans do not cover")
    refused(changed(held, 1, logprobs=held.turns[1].logprobs * np.nan), "not finite")


def test_a_turn_sampled_after_another_prefix_refuses() -> None:
    """Its own ids and digests agree and its length fits; only the chain shows that it does not belong here."""
    one, other = held_after(), held_after(first="pwd")
    assert one.turns[0].end == other.turns[0].end and one.turns[0].end_digest != other.turns[0].end_digest
    refused(replace(one, turns=(one.turns[0], other.turns[1])), f"first {one.turns[1].prompt_end} ids are not the ids")


def grown_tree() -> tuple[Session, dict[str, Turn]]:
    """root ─ a ─ b ─ c(cut)
             └ retry of b
    root2"""
    session = new_session(mode=SessionMode.TREE, routing=SHAPE)
    made: dict[str, Turn] = {}

    def grow(name: str, messages: Sequence[Message], text: str, **changes: Any) -> tuple[Message, ...]:
        prepared = session.prepare(request(messages))
        made[name] = session.commit(prepared, routed(prepared, completion(text, **changes), len(made)))
        return (*messages, made[name].reply)

    root = grow("root", OPENING, call_turn("ls"))
    a = grow("a", (*root, Message("tool", "x")), call_turn("cat"))
    b = grow("b", (*a, Message("tool", "y")), "done<|im_end|>")
    grow("c", (*b, Message("user", "more")), "ok", finish="length", cached_tokens=5)
    grow("retry", (*a, Message("tool", "y")), "ok<|im_end|>", cached_tokens=7)
    grow("root2", (OPENING[0], Message("user", "summary")), "done done<|im_end|>")
    return session, made


def counts(samples: Sequence[MergedSample]) -> list[LeafCounts]:
    return [LeafCounts.of(sample).check("k") for sample in samples]


def test_every_leaf_is_a_sample_and_each_completion_trains_once() -> None:
    session, made = grown_tree()
    samples = merge(snapshot(session), Pick.ALL)
    lines = [["root", "a", "b", "c"], ["root", "a", "retry"], ["root2"]]
    trained: list[str] = []
    for number, (sample, line) in enumerate(zip(samples, lines, strict=True)):
        turns = [made[name] for name in line]
        assert (sample.leaf, sample.turns, sample.truncated) == (number, len(line), line[-1] == "c")
        assert sample.tokens.tolist() == [i for turn in turns for i in turn.ids.tolist()]
        mine = [name for name in line if name not in trained]
        trained += mine
        spans = [(made[name].prompt_end, made[name].end, "run:0") for name in mine]
        assert sample.version_spans == spans
        assert np.flatnonzero(sample.loss_mask).tolist() == [i for a, b, _v in spans for i in range(a, b)]
    assert sorted(trained) == sorted(made)
    assert sum(sample.sampled_tokens for sample in samples) == session.sampled_tokens
    assert [sample.dropped for sample in samples] == [{}, {}, {}]


def test_a_reference_stays_small_however_often_an_agent_tries_again() -> None:
    session = new_session(mode=SessionMode.TREE)
    for _ in range(MAX_LEAVES + 5):
        session.commit(session.prepare(request(OPENING)), completion("done<|im_end|>"))
    samples = merge(snapshot(session), Pick.ALL)
    assert len(samples) == MAX_LEAVES
    assert sum(sample.sampled_tokens for sample in samples) == session.sampled_tokens
    assert samples[0].dropped == {"prefix_break": 5 * session.turns[0].sampled}
    everything = dict.fromkeys(map(str, DROPPED), 1_000_000)
    leaves = [replace(leaf, sampled_tokens=leaf.trainable) for leaf in counts(samples)]
    leaves[0] = replace(leaves[0], dropped=everything, sampled_tokens=leaves[0].trainable + sum(everything.values()))
    key = f"{'r' * 41}/steps/000123/merged/0007/s000123-g4711-a15-t10.msgpack"
    assert len(pack(SampleRef(key, "0" * 64, 28_000_000, tuple(leaves)).to_wire())) < 2048


def test_every_leaf_is_checked_over_its_whole_prefix() -> None:
    session, made = grown_tree()
    held = snapshot(session)
    for name, turn in made.items():
        where = f"turn {turn.index + 1}: .* are not the ids"
        refused(changed(held, turn.index, ids=other_ids(turn, 0)), where, Pick.ALL)
        if name != "root2":
            merge(changed(held, turn.index, ids=other_ids(turn, 0)), Pick.LAST)


def test_what_is_not_picked_is_counted_in_the_first_sample() -> None:
    session, made = grown_tree()
    for code, sampled in ((Refusal.BAD_UPSTREAM, 3), (Refusal.WRONG_VERSION, 5), (Refusal.BAD_UPSTREAM, 1)):
        session.count_refused(SessionRefusal(code, "x", sampled))
    for pick, leaves, lost in (
        (Pick.LAST, ["root2"], ["root", "a", "b", "c", "retry"]),
        (Pick.ROOTS, ["retry", "root2"], ["b", "c"]),
        (Pick.ALL, ["c", "retry", "root2"], []),
    ):
        samples = merge(snapshot(session), pick)
        assert [len(sample.tokens) for sample in samples] == [made[name].end for name in leaves]
        left = sum(made[name].sampled for name in lost)
        told = {"prefix_break": left, "stale": 5, "infra": 4}
        assert list(samples[0].dropped.items()) == [(name, count) for name, count in told.items() if count]
        assert all(not sample.dropped for sample in samples[1:])
        found = counts(samples)
        assert sum(leaf.sampled_tokens for leaf in found) == session.sampled_tokens
        assert sum(leaf.prompt_tokens for leaf in found) == sum(turn.prompt_end for turn in session.turns)
        assert sum(leaf.cached_tokens for leaf in found) == 12
        held = sum(max(turn.routing_from - turn.cached_tokens, 0) for turn in session.turns)
        assert sum(leaf.reprefilled_rows for leaf in found) == held
        assert sum(sum(sample.canonical.values()) for sample in samples) == len(session.turns)


def test_routing_rows_follow_the_path() -> None:
    session, made = grown_tree()
    for sample, line in zip(
        merge(snapshot(session), Pick.ALL),
        (["root", "a", "b", "c"], ["root", "a", "retry"], ["root2"]),
        strict=True,
    ):
        expected, start = [], 0
        for name in line:
            end = made[name].end - 1
            expected += rows_of(start, end, list(made).index(name)).tolist()
            start = end
        assert sample.routing is not None and sample.row_forward is not None
        assert sample.routing.tolist() == expected and len(sample.routing) == len(sample.tokens) - 1
        decoded = [p for name in line for p in range(made[name].prompt_end, made[name].end - 1)]
        assert np.flatnonzero(sample.row_forward == RowForward.DECODE).tolist() == decoded
        assert LeafCounts.of(sample).decode_rows == len(decoded)


def test_a_missing_piece_of_routing_refuses() -> None:
    session, _made = grown_tree()
    held = snapshot(session)
    refused(changed(held, len(held.turns) - 1, routing=held.turns[-1].routing[:-1]), "routing has")  # type: ignore[index]
    session = new_session(routing=SHAPE)
    for text in ("a", "b"):
        prepared = session.prepare(request((*OPENING, *(m for t in session.turns for m in (t.reply, OPENING[1])))))
        session.commit(prepared, routed(prepared, completion(f"{text}<|im_end|>")))
    refused(changed(snapshot(session), 1, routing=None), "routing has")


def test_a_linear_session_has_one_sample_whatever_is_picked() -> None:
    session = new_session()
    for text in ("done<|im_end|>", "ok<|im_end|>"):
        session.commit(session.prepare(request(OPENING)), completion(text))
    for pick in Pick:
        (sample,) = merge(snapshot(session), pick)
        assert sample.tokens[-len(encode_turn("ok<|im_end|>")) :].tolist() == encode_turn("ok<|im_end|>")
        assert sample.dropped == {"prefix_break": session.turns[0].sampled} == session.describe()["dropped"]
