"""Samples, references and records: what is written comes back, and what does not fit together is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rl360.errors import BadInput, CorruptObject
from rl360.ledger.outcomes import DROPPED, HAS_VERDICT, Outcome
from rl360.sessions.routing import RowForward
from rl360.sessions.sample import AttemptRecord, LeafCounts, MergedSample, SampleRef, decode_samples, encode_samples
from rl360.store.codec import pack, unpack
from tests.unit.verdict_data import verdict

KEY = "r1/steps/000000/merged/0000/s000000-g000-a00-t0.msgpack"
ATTEMPT = "s000000-g000-a00-t0"
MASK = [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1]


def sample(**changes: Any) -> MergedSample:
    """Prompt 4, sampled 3, observation 3, sampled 3; three more sampled tokens were dropped."""
    mask = np.array(MASK, dtype=np.uint8)
    fields: dict[str, Any] = {
        "attempt_id": ATTEMPT,
        "group_id": "s000000-g000",
        "task_id": "hello",
        "session_id": "session",
        "tokens": np.arange(13, dtype=np.int32) + 100_000,
        "loss_mask": mask,
        "logprobs": np.where(mask == 1, -0.5, 0.0).astype(np.float32),
        "version_spans": [(4, 7, "run:0"), (10, 13, "run:0")],
        "sampled_tokens": 9,
        "dropped": {"after_truncation": 1, "stale": 2},
        "truncated": False,
        "turns": 2,
        "cached_tokens": 4,
        "prompt_tokens": 14,
        "canonical": {"exact": 2},
        "matches": {"tool_call_json": 1},
    }
    return MergedSample(**{**fields, **changes}).check(KEY)


def routed(dtype: type[np.generic] = np.uint8) -> MergedSample:
    rows = np.arange(12 * 3 * 2).reshape(12, 3, 2).astype(dtype)
    forward = np.array([0] * 4 + [1] * 2 + [0] * 4 + [1] * 2, dtype=np.uint8)
    return sample(routing_pieces=(rows[:5], rows[5:5], rows[5:]), row_forward=forward, reprefilled_rows=3)


def reference(samples: tuple[MergedSample, ...] = (), **changes: Any) -> SampleRef:
    samples = samples or (sample(),)
    data = encode_samples(samples)
    fields = {"key": KEY, "sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
    return SampleRef(**{**fields, "leaves": tuple(LeafCounts.of(one) for one in samples), **changes})


def same(one: MergedSample, other: MergedSample) -> bool:
    for name, value in vars(one).items():
        found = getattr(other, name)
        if name == "routing_pieces":
            value, found = one.routing, other.routing
        if isinstance(value, np.ndarray):
            if (value.dtype, value.shape, value.tobytes()) != (found.dtype, found.shape, found.tobytes()):
                return False
        elif value != found:
            return False
    return True


# --- the object of a session's samples ---


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_samples_come_back_bit_for_bit(wrap: Any) -> None:
    samples = (sample(), routed(), replace(routed(np.uint16), leaf=2))
    found = decode_samples(wrap(encode_samples(samples)), KEY)
    assert len(found) == 3 and all(same(one, other) for one, other in zip(samples, found, strict=True))
    assert found[0].routing is None and found[2].routing is not None and found[2].routing.dtype == np.uint16


def test_reading_copies_no_array() -> None:
    data = encode_samples((routed(), sample()))
    buffer = np.frombuffer(data, np.uint8)
    for one in decode_samples(data, KEY):
        for array in (one.tokens, one.logprobs, one.loss_mask, *one.routing_pieces):
            assert np.shares_memory(array, buffer) and array.flags.aligned and not array.flags.writeable
        assert one.routing is None or one.routing is one.routing_pieces[0]


def test_any_msgpack_reader_finds_what_it_says() -> None:
    wire = unpack(encode_samples((routed(),)), KEY)
    assert wire["schema_version"] == 2 and list(wire) == ["schema_version", "samples", "arrays"]
    (head,) = wire["samples"]
    assert head["tokens"] == ["<i4", [13]] and head["routing"] == ["|u1", [12, 3, 2]]
    plain = routed().to_wire()
    assert plain["routing"].shape == (12, 3, 2) and "routing_pieces" not in plain


def test_many_spans_are_read_whatever_their_length() -> None:
    """The small fields may be larger than what is read of the object at first."""
    length = 60_000
    versions = [(i, i + 1, f"run:{i}") for i in range(length)]
    ones = np.ones(length, np.uint8)
    fields = {"tokens": np.zeros(length, np.int32), "loss_mask": ones, "logprobs": np.zeros(length, np.float32)}
    big = sample(**fields, version_spans=versions, sampled_tokens=length + 3)
    data = encode_samples((big,))
    assert data.index(b"arrays") > 1 << 16
    (found,) = decode_samples(data, KEY)
    assert found.version_spans == versions


def test_an_array_of_another_type_is_not_stored() -> None:
    wide = replace(routed(), routing_pieces=tuple(piece.astype(np.int32) for piece in routed().routing_pieces))
    with pytest.raises(BadInput, match="cannot store routing of dtype int32"):
        encode_samples((wide,))


GOOD = encode_samples((sample(), routed()))


def test_a_damaged_object_is_refused() -> None:
    assert len(decode_samples(GOOD, KEY)) == 2
    for end in (*range(0, len(GOOD), 7), len(GOOD) - 1):
        with pytest.raises(CorruptObject) as error:
            decode_samples(GOOD[:end], KEY)
        assert str(error.value).startswith(f"object {KEY}: ") and "\n" not in str(error.value)
    for data, match in (
        (GOOD + b"\0", "do not fill"),
        (pack({"schema_version": 1, "samples": [], "arrays": b""}), "'schema_version' is 1, this rl360 reads"),
        (pack({"schema_version": True, "samples": [], "arrays": b""}), "is True"),
        (pack({"schema_version": 2, "arrays": b"", "samples": []}), "not a map of schema_version, samples and arrays"),
        (pack({"schema_version": 2, "samples": {}, "arrays": b""}), "not a map of"),
        (pack({"schema_version": 2, "samples": [], "arrays": b""}), "do not fill"),  # bin 8: not what is written
        (pack([1, 2]), "is not an object of samples"),
        (b"\xc1", "is not an object of samples"),
    ):
        with pytest.raises(CorruptObject, match=match):
            decode_samples(data, KEY)


def rewritten(change: Callable[[dict[str, Any]], Any], arrays: Callable[[bytes], bytes] = bytes) -> bytes:
    """The good object with the fields of its first sample changed."""
    wire = unpack(GOOD, KEY)
    change(wire["samples"][0])
    head = pack({"schema_version": 2, "samples": wire["samples"], "arrays": b""})[:-2]
    body = wire["arrays"][-(len(GOOD) - GOOD.index(np.arange(100_000, 100_013, dtype="<i4").tobytes())) :]
    body = b"\0" * (-(len(head) + 5) % 16) + arrays(body)
    return head + b"\xc6" + len(body).to_bytes(4, "big") + body


def test_rewriting_changes_nothing_by_itself() -> None:
    assert rewritten(lambda head: None) == GOOD


def patched(offset: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda body: body[:offset] + value + body[offset + len(value) :]


TOKENS, LOGPROBS, LOSS_MASK = 0, 64, 128  # 13 x 4 bytes, each aligned to 16
NAN, HALF = np.float32(np.nan).tobytes(), np.float32(-0.5).tobytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("turns"), r"lacks \['turns'\]"),
        (lambda w: w.update(extra=1), r"unknown \['extra'\]"),
        (lambda w: w.update(tokens=[1, 2]), "tokens of a sample is '1', expected <i4"),
        (lambda w: w.update(tokens=None), "tokens of a sample is 'None'"),
        (lambda w: w.update(tokens=["<i8", [13]]), "tokens of a sample is '<i8'"),
        (lambda w: w.update(tokens=["<i4", [-1]]), r"has shape \[-1\]"),
        (lambda w: w.update(tokens=["<i4", []]), r"has shape \[\]"),
        (lambda w: w.update(tokens=["<i4", [True]]), r"has shape \[True\]"),
        (lambda w: w.update(tokens=["<i4", [1 << 40]]), "the object has"),
        (lambda w: w.update(tokens=["<i4", [1, 13]]), r"tokens is int32 \(1, 13\)"),
        (lambda w: w.update(tokens=["<i4", [12]]), r"expected uint8 \(12,\)|expected float32 \(12,\)"),
        (lambda w: w.update(sampled_tokens=8), "trainable 6 \\+ dropped 3 tokens is not the 8 sampled"),
        (lambda w: w["dropped"].update(duplicate=1), "dropped 4 tokens is not the 9"),
        (lambda w: w["dropped"].update(stale=3, infra=-1), "dropped holds 'infra': -1"),
        (lambda w: w["dropped"].update(infra=0), "dropped holds 'infra': 0"),
        (lambda w: w["dropped"].update(stale=True), "dropped holds 'stale': True"),
        (
            lambda w: w.update(dropped={"stale": 2, "trained": 1}),
            "dropped holds 'trained': 1, expected tokens in after_",
        ),
        (lambda w: w.update(dropped={"stale": 2, 7: 1}), "dropped holds 7: 1"),
        (lambda w: w.update(dropped=[3]), "dropped is of type list"),
        (lambda w: w.update(leaf=-1), "leaf is -1, a count is at least 0"),
        (lambda w: w.update(sampled_tokens="9"), "sampled_tokens is of type str, expected int"),
        (lambda w: w.update(truncated=1), "truncated is of type int, expected bool"),
        (lambda w: w.update(turns=True), "turns is of type bool, expected int"),
        (lambda w: w.update(attempt_id=None), "attempt_id is of type NoneType, expected str"),
        (lambda w: w.update(canonical=[]), "canonical is of type list"),
        (lambda w: w.update(matches={"x": "y"}), "matches is not a map of names to counts"),
        (lambda w: w.update(version_spans=[[4, 7, "run:0"]]), "do not cover exactly"),
        (lambda w: w.update(version_spans=[[3, 7, "run:0"], [10, 13, "run:0"]]), "do not cover exactly"),
        (lambda w: w.update(version_spans=[[4, 7, "run:0"], [6, 13, "run:0"]]), "overlaps"),
        (lambda w: w.update(version_spans=[[4, 7, "run:0"], [10, 14, "run:0"]]), "outside"),
        (lambda w: w.update(version_spans=[[-9, 7, "run:0"]]), "outside"),
        (lambda w: w.update(version_spans=[[7, 4, "run:0"]]), "outside"),
        (lambda w: w.update(version_spans=[[10, 13, "run:0"], [4, 7, "run:0"]]), r"outside \[13, 13\) or overlaps"),
        (lambda w: w.update(version_spans=[[4, 7]]), "not a list of"),
        (lambda w: w.update(version_spans=7), "not a list of"),
        (patched(LOSS_MASK + 5, b"\2"), "loss_mask holds 2"),
        (patched(LOGPROBS + 20, NAN), "not finite"),
        (patched(LOGPROBS, HALF), "logprobs is not 0 on an id that was not sampled"),
        (patched(LOSS_MASK, b"\1"), "is not the 9 sampled"),
    ],
)
def test_a_sample_that_does_not_hold_is_refused(change: Callable[[Any], Any], words: str) -> None:
    data = rewritten(lambda head: None, change) if "patched" in change.__qualname__ else rewritten(change)
    with pytest.raises(CorruptObject, match=words) as error:
        decode_samples(data, KEY)
    assert str(error.value).startswith(f"object {KEY}: ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"routing_pieces": ()}, "row_forward without routing"),
        ({"row_forward": None}, "routing without row_forward"),
        ({"row_forward": np.zeros(11, np.uint8)}, r"row_forward is uint8 \(11,\)"),
        ({"row_forward": np.full(12, 4, np.uint8)}, "row_forward holds 4, expected 0 to 3"),
        ({"routing_pieces": (np.zeros((11, 3, 2), np.uint8),)}, "routing has 11 rows, 13 tokens have 12"),
        ({"routing_pieces": (np.zeros((12, 6), np.uint8),)}, "expected uint8 or uint16 in 3 dimensions"),
        ({"routing_pieces": (np.zeros((12, 3, 2), np.int32),)}, "expected uint8 or uint16"),
        (
            {"routing_pieces": (np.zeros((6, 3, 2), np.uint8), np.zeros((6, 3, 2), np.uint16))},
            "routing pieces differ",
        ),
        (
            {"routing_pieces": (np.zeros((6, 3, 2), np.uint8), np.zeros((6, 2, 2), np.uint8))},
            "routing pieces differ",
        ),
    ],
)
def test_routing_that_does_not_line_up_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CorruptObject, match=words):
        replace(routed(), **changes).check(KEY)


def test_two_versions_in_one_turn_are_two_spans() -> None:
    spans = [(4, 6, "run:0"), (6, 7, "run:1"), (10, 13, "run:1")]
    (found,) = decode_samples(encode_samples((sample(version_spans=spans),)), KEY)
    assert found.version_spans == spans
    assert LeafCounts.of(found).versions == ("run:0", "run:1")


# --- counts and references ---


def test_counts_of_a_sample() -> None:
    assert LeafCounts.of(routed()) == LeafCounts(
        tokens=13,
        trainable=6,
        prompt=4,
        observation=3,
        sampled_tokens=9,
        dropped={"after_truncation": 1, "stale": 2},
        versions=("run:0",),
        truncated=False,
        turns=2,
        cached_tokens=4,
        prompt_tokens=14,
        sampling_differs=0,
        routing_rows=12,
        decode_rows=4,
        reprefilled_rows=3,
    )
    assert int(np.count_nonzero(routed().row_forward == RowForward.DECODE)) == 4
    assert LeafCounts.of(sample()).routing_rows == 0


def test_a_reference_is_small_and_comes_back() -> None:
    most = {str(bucket): 1 << 20 for bucket in DROPPED}
    one = replace(LeafCounts.of(routed()), tokens=120_000, observation=119_990, prompt_tokens=3_000_000)
    one = replace(one, dropped=most, sampled_tokens=6 + sum(most.values()))
    ref = reference(leaves=(one,) * 8, size_bytes=28_000_000)
    packed = pack(ref.to_wire())
    assert len(packed) < 2048
    assert SampleRef.from_wire(unpack(packed, KEY), KEY) == ref
    assert ref.sampled_tokens == 8 * one.sampled_tokens


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.update(sha256="AB" * 32), "expected 64 hex digits"),
        (lambda w: w.update(sha256="ab"), "expected 64 hex digits"),
        (lambda w: w.update(size_bytes=0), "of 0 bytes"),
        (lambda w: w.update(size_bytes=True), "of True bytes"),
        (lambda w: w.update(key=""), "reference to ''"),
        (lambda w: w.pop("leaves"), r"lacks \['leaves'\]"),
        (lambda w: w.update(leaves=[]), "leaves is list, expected a map"),
        (lambda w: w["leaves"].pop("turns"), r"lacks \['turns'\]"),
        (lambda w: w["leaves"].update(turns=[1, 2]), "leaves field turns"),
        (lambda w: w["leaves"].update(turns=[-1]), "leaves field turns"),
        (lambda w: w["leaves"].update(turns=["1"]), "leaves field turns"),
        (lambda w: w["leaves"].update(turns=3), "leaves field turns"),
        (lambda w: w["leaves"].update(truncated=[0]), "leaves field truncated"),
        (lambda w: w["leaves"].update(versions=["run:0"]), "leaves field versions"),
        (lambda w: w.update(leaves={name: [] for name in w["leaves"]}), "reference without leaves"),
        (lambda w: w["leaves"].update(trainable=[5]), "are not the 13 of the leaf"),
        (lambda w: w["leaves"].update(dropped=[{"stale": 2}]), r"trainable 6 \+ dropped 2 tokens is not the 9"),
        (lambda w: w["leaves"].update(dropped=[{}]), r"trainable 6 \+ dropped 0 tokens"),
        (lambda w: w["leaves"].update(dropped=[{"stale": 3, "duplicate": 0}]), "dropped holds 'duplicate': 0"),
        (lambda w: w["leaves"].update(dropped=[{"over_length": 3}]), "dropped holds 'over_length': 3"),
        (lambda w: w["leaves"].update(dropped=[3]), "leaves field dropped"),
    ],
)
def test_a_reference_that_does_not_hold_is_refused(change: Callable[[dict[str, Any]], Any], words: str) -> None:
    wire = unpack(pack(reference().to_wire()), KEY)
    change(wire)
    with pytest.raises(CorruptObject, match=words):
        SampleRef.from_wire(wire, KEY)


# --- the record of an attempt ---


def record(reward: float | None = 1.0, stored: SampleRef | None = None, **changes: Any) -> AttemptRecord:
    fields: dict[str, Any] = {
        "attempt_id": ATTEMPT,
        "group_id": "s000000-g000",
        "task_id": "hello",
        "try_index": 0,
        "outcome": Outcome.AGENT_TIMEOUT if reward is None else Outcome.PASSED,
        "verdict": None if reward is None else verdict(ATTEMPT, reward, task_id="hello"),
        "exit_status": "ok",
        "session_id": "session",
        "stored": stored,
        "phases_s": {"agent": 2.0},
    }
    return AttemptRecord(**{**fields, **changes}).check(KEY)


@pytest.mark.parametrize(
    "one", [record(stored=reference()), record(None, reference()), record(0.0), record(unmerged_tokens=7)]
)
def test_a_record_comes_back(one: AttemptRecord) -> None:
    found = AttemptRecord.from_wire(unpack(pack(one.to_wire()), KEY), KEY)
    assert found == one
    assert found.sampled_tokens == (9 if one.stored else one.unmerged_tokens)


@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_verdict_exactly_where_the_outcome_has_one(outcome: Outcome) -> None:
    for wire, has in ((record().to_wire(), True), (record(None).to_wire(), False)):
        wire["outcome"] = str(outcome)
        if (outcome in HAS_VERDICT) == has:
            assert AttemptRecord.from_wire(wire, KEY).outcome is outcome
            continue
        with pytest.raises(CorruptObject, match="only a verified attempt has one"):
            AttemptRecord.from_wire(wire, KEY)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.update(schema_version=1), "schema version 1, this rl360 reads 3"),
        (lambda w: w.update(schema_version=2), r"has unknown \['cleanup_evidence'\]"),
        (lambda w: w.update(outcome="great"), "bad outcome .'great'"),
        (
            lambda w: w["verdict"].update(reward=float("nan")),
            "bad verdict .reward: a reward is a finite number, got nan",
        ),
        (lambda w: w["verdict"].update(reward=True), "bad verdict"),
        (lambda w: w["verdict"].update(written_by_verifier=False), "bad verdict"),
        (lambda w: w["verdict"].update(attempt_id="other"), "verdict of other on attempt"),
        (lambda w: w["verdict"].update(task_id="other"), "verdict of "),
        (lambda w: w["stored"].update(key="r1/other.msgpack"), "sample r1/other.msgpack on attempt"),
        (lambda w: w["stored"].update(sha256=""), "64 hex digits"),
        (lambda w: w.update(stored=[]), "sample reference is list"),
        (lambda w: w.update(try_index="0"), "try_index is of type str"),
        (lambda w: w.update(unmerged_tokens=1), "1 unmerged tokens: a count, and only without stored samples"),
        (lambda w: w.update(stored=None, unmerged_tokens=-1), "-1 unmerged tokens"),
        (lambda w: w.update(unmerged_tokens=True), "unmerged_tokens is of type bool"),
        (lambda w: w.update(phases_s=None), "phases_s is of type NoneType"),
        (lambda w: w["phases_s"].update(agent=None), "phases_s holds 'agent': None, expected numbers by name"),
        (lambda w: w.update(agent_metrics={"format_errors": "1"}), "agent_metrics holds 'format_errors': '1'"),
        (lambda w: w.pop("task_id"), r"lacks \['task_id'\]"),
        (lambda w: w.update(sample=None), r"unknown \['sample'\]"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(change: Callable[[dict[str, Any]], None], words: str) -> None:
    wire = unpack(pack(record(stored=reference()).to_wire()), KEY)
    change(wire)
    with pytest.raises(CorruptObject, match=words) as error:
        AttemptRecord.from_wire(wire, KEY)
    assert KEY in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("wire", [None, [], "x", 7])
def test_what_is_no_map_is_refused(wire: Any) -> None:
    for kind in (SampleRef, AttemptRecord):
        with pytest.raises(CorruptObject, match="expected a map"):
            kind.from_wire(wire, KEY)
