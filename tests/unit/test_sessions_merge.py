"""Merging: the sample is what was sent and sampled, every sampled token is counted once, and doubt refuses."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rl360.sessions.merge import SessionSnapshot, merge, snapshot
from rl360.sessions.messages import Message
from rl360.sessions.refusals import Refusal, SessionRefusal
from rl360.sessions.sample import MergedSample
from rl360.store.codec import pack, unpack
from tests.unit.sessions_data import BASH, OPENING, call_turn, completion, new_session


def _snapshot(turns: int = 3) -> SessionSnapshot:
    session = new_session()
    history: tuple[Message, ...] = OPENING
    for number in range(turns):
        turn = session.commit(session.prepare(history, BASH), completion(call_turn(f"cat {number}")))
        history = (*history, turn.reply, Message("tool", f"line {number}"))
    return snapshot(session)


def _refused(held: SessionSnapshot, match: str) -> None:
    with pytest.raises(SessionRefusal, match=match) as caught:
        merge(held)
    assert caught.value.code is Refusal.CANNOT_MERGE


def test_mask_and_logprobs_sit_on_the_sampled_ids() -> None:
    held = _snapshot()
    sample = merge(held)
    assert (sample.turns, sample.truncated, sample.after_truncation_tokens) == (3, False, 0)
    for turn, (start, end, version) in zip(held.turns, sample.version_spans, strict=True):
        assert (turn.prompt_end, turn.end, version) == (start, end, "run:0")
        assert sample.logprobs[start:end].tolist() == [-float(i + 1) for i in range(end - start)]
        assert sample.tokens[end - 1] == 2  # the end of turn is sampled and trained
    assert int(sample.loss_mask.sum()) == sample.sampled_tokens == sum(turn.sampled for turn in held.turns)
    assert sample.tokens.dtype == np.int32 and sample.loss_mask.dtype == np.uint8


def test_it_travels() -> None:
    sample = merge(_snapshot())
    back = MergedSample.from_wire(unpack(pack(sample.to_wire()), "key"), "key")
    assert back.tokens.tolist() == sample.tokens.tolist()
    assert back.version_spans == sample.version_spans


def test_sampled_ids_after_a_cut_are_dropped_and_counted() -> None:
    held = _snapshot()
    cut = dataclasses.replace(held.turns[1], finish_reason="length")
    sample = merge(dataclasses.replace(held, turns=(held.turns[0], cut, held.turns[2])))
    assert sample.truncated
    assert sample.turns == 2
    assert len(sample.tokens) == held.turns[1].end
    assert sample.after_truncation_tokens == held.turns[2].sampled
    assert sample.sampled_tokens == int(sample.loss_mask.sum()) + sample.after_truncation_tokens


def test_the_snapshot_is_detached() -> None:
    session = new_session()
    turn = session.commit(session.prepare(OPENING, BASH), completion())
    held = snapshot(session)
    session.commit(session.prepare(OPENING, BASH), completion("ok<|im_end|>"))
    sample = merge(held)
    assert sample.tokens[turn.prompt_end : turn.end].tolist() == completion().output_ids.tolist()


def test_doubt_refuses() -> None:
    held = _snapshot()
    _refused(snapshot(new_session()), "has no recorded turn")
    for where, match in (
        (0, "turn 1: the first"),
        (held.turns[1].prompt_end, "turn 2: ids"),
        (held.turns[1].end, "turn 3"),
    ):
        tokens = held.tokens.copy()
        tokens[where] += 1
        _refused(dataclasses.replace(held, tokens=tokens), match)
    mask = held.mask.copy()
    mask[0] = 1
    _refused(dataclasses.replace(held, mask=mask), "the loss mask")
    _refused(dataclasses.replace(held, turns=held.turns[:2]), "the loss mask")
    _refused(dataclasses.replace(held, turns=held.turns[1:]), "turn 2: the loss mask")
    _refused(dataclasses.replace(held, turns=(held.turns[1], held.turns[0], held.turns[2])), "turn 2: covers")
    _refused(dataclasses.replace(held, sampled_tokens=held.sampled_tokens + 1), "is not the")
    logprobs = held.logprobs.copy()
    logprobs[0] = -1
    _refused(dataclasses.replace(held, logprobs=logprobs), "logprobs is not 0")
