"""The sample and the record of an attempt: what is written comes back, and what does not fit together is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rl360.errors import CorruptObject
from rl360.ledger.outcomes import HAS_VERDICT, Outcome
from rl360.sessions.sample import AttemptRecord, MergedSample
from rl360.store.codec import pack, unpack
from tests.unit.objective_data import attempt, sample_of

KEY = "r1/steps/000000/attempts/0000/a.msgpack"
GOOD = sample_of("a", "g", trained=6, prompt=4, observed=3, after_cut=2, prefix_break=1)


def stored(wire: dict[str, Any]) -> Any:
    return unpack(pack(wire), KEY)


def test_a_sample_comes_back_bit_for_bit() -> None:
    found = MergedSample.from_wire(stored(GOOD.to_wire()), KEY)
    for name in ("tokens", "loss_mask", "logprobs"):
        one, other = getattr(GOOD, name), getattr(found, name)
        assert one.dtype == other.dtype and one.tobytes() == other.tobytes()
    assert {**found.__dict__, **dict.fromkeys(("tokens", "loss_mask", "logprobs"))} == {
        **GOOD.__dict__,
        **dict.fromkeys(("tokens", "loss_mask", "logprobs")),
    }


def changed_array(name: str, index: int, value: float) -> Callable[[dict[str, Any]], None]:
    def change(wire: dict[str, Any]) -> None:
        wire[name] = wire[name].copy()
        wire[name][index] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.update(schema_version=2), "schema version 2, this rl360 reads 1"),
        (lambda w: w.pop("schema_version"), "schema version None"),
        (lambda w: w.pop("turns"), r"lacks \['turns'\]"),
        (lambda w: w.update(extra=1), r"unknown \['extra'\]"),
        (lambda w: w.update(tokens=[1, 2]), "tokens is of type list, expected ndarray"),
        (lambda w: w.update(tokens=w["tokens"].astype(np.int64)), "tokens is int64"),
        (lambda w: w.update(tokens=w["tokens"].reshape(1, -1)), "tokens is int32"),
        (lambda w: w.update(logprobs=w["logprobs"].astype(np.float64)), "logprobs is float64"),
        (lambda w: w.update(loss_mask=w["loss_mask"][:-1]), "loss_mask is uint8 \\(12,\\), expected uint8 \\(13,\\)"),
        (lambda w: w.update(logprobs=w["logprobs"][1:]), "logprobs is float32 \\(12,\\)"),
        (changed_array("loss_mask", 5, 2), "loss_mask holds 2"),
        (changed_array("logprobs", 5, np.nan), "not finite"),
        (changed_array("logprobs", 5, -np.inf), "not finite"),
        (changed_array("logprobs", 0, -0.5), "logprobs is not 0 on an id that was not sampled"),
        (changed_array("loss_mask", 0, 1), "is not the 9 sampled"),
        (lambda w: w.update(sampled_tokens=8), "kept 6 \\+ dropped 3 tokens is not the 8 sampled"),
        (lambda w: w.update(after_truncation_tokens=4, prefix_break_tokens=-1), "a count is at least 0"),
        (lambda w: w.update(sampled_tokens="9"), "sampled_tokens is of type str, expected int"),
        (lambda w: w.update(truncated=1), "truncated is of type int, expected bool"),
        (lambda w: w.update(turns=True), "turns is of type bool, expected int"),
        (lambda w: w.update(attempt_id=None), "attempt_id is of type NoneType, expected str"),
        (lambda w: w.update(version_spans=[[4, 7, "run:0"]]), "do not cover exactly"),
        (lambda w: w.update(version_spans=[[3, 7, "run:0"], [10, 13, "run:0"]]), "do not cover exactly"),
        (lambda w: w.update(version_spans=[[4, 7, "run:0"], [6, 13, "run:0"]]), "overlaps"),
        (lambda w: w.update(version_spans=[[4, 7, "run:0"], [10, 14, "run:0"]]), "outside"),
        (lambda w: w.update(version_spans=[[-9, 7, "run:0"]]), "outside"),
        (lambda w: w.update(version_spans=[[7, 4, "run:0"]]), "outside"),
        (lambda w: w.update(version_spans=[[4, 7]]), "not a list of"),
        (lambda w: w.update(version_spans=7), "not a list of"),
    ],
)
def test_a_sample_that_does_not_hold_is_refused(change: Callable[[dict[str, Any]], None], words: str) -> None:
    wire = GOOD.to_wire()
    change(wire)
    with pytest.raises(CorruptObject, match=words) as error:
        MergedSample.from_wire(stored(wire), KEY)
    assert str(error.value).startswith(f"object {KEY}: ") and "\n" not in str(error.value)


def test_two_versions_in_one_turn_are_two_spans() -> None:
    spans = [(4, 6, "run:0"), (6, 7, "run:1"), (10, 13, "run:1")]
    assert MergedSample.from_wire(stored(replace(GOOD, version_spans=spans).to_wire()), KEY).version_spans == spans


@pytest.mark.parametrize("record", [attempt(0, 0, 1.0), attempt(0, 1, None), attempt(0, 2, 0.0, sample=False)])
def test_a_record_comes_back(record: AttemptRecord) -> None:
    found = AttemptRecord.from_wire(stored(record.to_wire()), KEY)
    assert replace(found, sample=None) == replace(record, sample=None)
    assert (found.sample is None) == (record.sample is None)
    assert found.sampled_tokens == record.sampled_tokens


@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_verdict_exactly_where_the_outcome_has_one(outcome: Outcome) -> None:
    with_verdict, without = attempt(0, 0, 1.0).to_wire(), attempt(0, 0, None).to_wire()
    for wire, has in ((with_verdict, True), (without, False)):
        wire["outcome"] = str(outcome)
        if (outcome in HAS_VERDICT) == has:
            assert AttemptRecord.from_wire(stored(wire), KEY).outcome is outcome
            continue
        with pytest.raises(CorruptObject, match="only a verified attempt has one"):
            AttemptRecord.from_wire(stored(wire), KEY)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.update(schema_version=3), "schema version 3"),
        (lambda w: w.update(outcome="great"), "bad outcome .'great'"),
        (
            lambda w: w["verdict"].update(reward=float("nan")),
            "bad verdict .reward: a reward is a finite number, got nan",
        ),
        (lambda w: w["verdict"].update(reward=True), "bad verdict"),
        (lambda w: w["verdict"].update(written_by_verifier=False), "bad verdict"),
        (lambda w: w["verdict"].update(attempt_id="other"), "verdict of other on attempt"),
        (lambda w: w["verdict"].update(task_id="other"), "verdict of "),
        (lambda w: w["sample"].update(attempt_id="other"), "sample of other on attempt"),
        (lambda w: w["sample"].update(group_id="other"), "sample of "),
        (lambda w: w.update(try_index="0"), "try_index is of type str"),
        (lambda w: w.update(phases_s=None), "phases_s is of type NoneType"),
        (lambda w: w.pop("task_id"), r"lacks \['task_id'\]"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(change: Callable[[dict[str, Any]], None], words: str) -> None:
    wire = attempt(0, 0, 1.0).to_wire()
    change(wire)
    with pytest.raises(CorruptObject, match=words) as error:
        AttemptRecord.from_wire(stored(wire), KEY)
    assert KEY in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("wire", [None, [], "x", 7])
def test_what_is_no_map_is_refused(wire: Any) -> None:
    for kind in (MergedSample, AttemptRecord):
        with pytest.raises(CorruptObject, match="expected a map"):
            kind.from_wire(wire, KEY)
