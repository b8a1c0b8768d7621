"""The batch object and the samples it refers to: read exactly, refused by name when anything about them is off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rl360.errors import CorruptObject, StoreUnavailable
from rl360.sessions.routing import RoutingShape
from rl360.sessions.sample import encode_samples
from rl360.store.codec import sha256_hex
from rl360.store.layout import merged_key
from rl360.training.packing import TrainSequence
from rl360.training.results import Batch, parse_batch, read_samples
from tests.unit.memory_store import MemoryStore
from tests.unit.training_data import EXPERTS, LAYERS, VOCAB, batch, merged, routed, sample, samples_of, stored_row

A = stored_row(MemoryStore(), "r1", 3, sample(0, "a"))
B = stored_row(MemoryStore(), "r1", 3, sample(1, "b"))
KEY = merged_key("r1", 3, 0, "a")


def parse(data: bytes, digest: str | None = None, run: str = "r1", step: int = 3) -> Batch:
    return parse_batch(data, "key", digest or sha256_hex(data), run, step)


def read(store: MemoryStore, rows: list[dict[str, Any]]) -> list[TrainSequence]:
    return read_samples(store, parse(batch("r1", 3, rows)).rows, VOCAB)  # type: ignore[arg-type]


def same(held: TrainSequence, row: dict[str, Any]) -> bool:
    arrays = ("tokens", "loss_mask", "logprobs")
    return held.advantage == row["advantage"] and all(np.array_equal(getattr(held, n), row[n]) for n in arrays)


def test_a_good_batch_is_read_exactly() -> None:
    store, samples = MemoryStore(), samples_of(3)
    rows = [stored_row(store, "r1", 3, row) for row in samples]
    found = parse(batch("r1", 3, rows))
    assert store.read == [], "rows are read without their samples"
    assert found.trained_tokens == sum(int(row["loss_mask"].sum()) for row in samples)
    assert found.trained_samples == len(samples)
    held = read_samples(store, found.rows, VOCAB)  # type: ignore[arg-type]
    assert [s.name for s in held] == [f"{row['attempt_id']} leaf 0" for row in samples]
    assert all(same(one, row) for one, row in zip(held, samples, strict=True))
    assert all(one.tokens.base is None for one in held), "a view would keep the whole object in memory"
    assert sorted(store.read) == sorted(row["key"] for row in rows)
    part = read_samples(store, found.rows[5:3:-1], VOCAB)  # type: ignore[arg-type]
    assert all(same(one, row) for one, row in zip(part, samples[5:3:-1], strict=True))


def test_the_leaves_of_an_attempt_share_an_object_that_is_read_once() -> None:
    store = MemoryStore()
    leaves = [sample(i, "a", advantage=0.5) for i in range(3)]
    data = encode_samples([merged(row, leaf) for leaf, row in enumerate(leaves)])
    store.put(KEY, data)
    shared = {"key": KEY, "sha256": sha256_hex(data)}
    rows = [stored_row(MemoryStore(), "r1", 3, row, leaf=leaf, **shared) for leaf, row in enumerate(leaves)]
    held = read(store, [rows[2], rows[0]])
    assert same(held[0], leaves[2]) and same(held[1], leaves[0])
    assert store.read == [KEY]


def test_no_samples_is_a_batch() -> None:
    assert parse(batch("r1", 3, [])).trained_tokens == 0
    assert read(MemoryStore(), []) == []


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"junk", "does not decode"),
        (batch("r1", 3, [], schema_version=9), "schema 9 is unknown"),
        (batch("r1", 3, [], schema_version=1), "schema 1 is unknown; this trainer reads 4"),
        (batch("r2", 3, []), "is the batch of r2/3"),
        (batch("r1", 4, []), "is the batch of r1/4"),
        (batch("r1", 3, [], samples=None), "has no list of samples"),
        (batch("r1", 3, [], decisions=True), "has no list of decisions"),
        (batch("r1", 3, [], decisions=["a"]), "has no list of decisions"),
        (batch("r1", 3, [A, B, A]), "a leaf 0 appears twice"),
        (
            batch("r1", 3, [A], decisions=[{"attempt_id": "a", "group_id": "other", "score": 1.0}]),
            "sample a leaf 0 is of .*, decided in other",
        ),
        (batch("r1", 3, [A | {"advantage": float("nan")}]), "advantage nan is not a finite number"),
        (batch("r1", 3, [A | {"advantage": None}]), "advantage None is not of type float"),
        (batch("r1", 3, [A | {"weight": float("inf")}]), "weight inf is not a finite number above 0"),
        (batch("r1", 3, [A | {"weight": 0.0}]), "weight 0.0 is not a finite number above 0"),
        (batch("r1", 3, [{name: value for name, value in A.items() if name != "weight"}]), "no row of a batch"),
        (batch("r1", 3, [{"tokens": 3}]), "sample 0 has no attempt_id"),
        (batch("r1", 3, [{"attempt_id": "a"}]), "sample a is no row of a batch"),
        (batch("r1", 3, [A | {"logprobs": 1}]), "sample a is no row of a batch .*logprobs"),
        (batch("r1", 3, [A | {"leaf": True}]), "leaf True is not of type int"),
        (batch("r1", 3, [A | {"tokens": "3"}]), "tokens '3' is not of type int"),
        (batch("r1", 3, [A | {"key": 7}]), "key 7 is not of type str"),
        (batch("r1", 3, [A | {"leaf": -1}]), "a leaf -1: "),
        (batch("r1", 3, [A | {"trained": -1}]), "-1 of them to train"),
        (batch("r1", 3, [A | {"tokens": 1}]), "a leaf 0: 1 tokens"),
    ],
)
def test_bad_batches_are_refused(data: bytes, match: str) -> None:
    with pytest.raises(CorruptObject, match=match) as error:
        parse(data)
    assert str(error.value).startswith("object key: ")


def test_wrong_digest_is_refused() -> None:
    with pytest.raises(CorruptObject, match="the step asked for 0000"):
        parse(batch("r1", 3, []), digest="0" * 64)


def changed(**fields: Any) -> Callable[[MemoryStore], list[dict[str, Any]]]:
    """The sample is stored with these fields, and the row is honest about it."""
    return lambda store: [stored_row(store, "r1", 3, sample(0, "a", **fields))]


def claimed(**fields: Any) -> Callable[[MemoryStore], list[dict[str, Any]]]:
    """The sample is a good one, the row says something else of it."""
    return lambda store: [stored_row(store, "r1", 3, sample(0, "a"), **fields)]


def replaced(change: Callable[[bytes], bytes], digest: bool) -> Callable[[MemoryStore], list[dict[str, Any]]]:
    """The object's bytes are changed after it was stored; `digest`: and the row names the new ones."""

    def put(store: MemoryStore) -> list[dict[str, Any]]:
        row = stored_row(store, "r1", 3, sample(0, "a"))
        store.put(KEY, change(store.objects[KEY]))
        return [row | {"sha256": sha256_hex(store.objects[KEY])} if digest else row]

    return put


def nan_at_1(row: dict[str, Any]) -> np.ndarray:
    logprobs = row["logprobs"].copy()
    logprobs[1] = np.nan
    return logprobs


@pytest.mark.parametrize(
    ("put", "match"),
    [
        (lambda store: [A], "is missing though a committed object refers to it"),
        (replaced(lambda data: data[:-1] + bytes([data[-1] ^ 1]), digest=False), "has sha256 .* the batch asks for"),
        (replaced(lambda data: data[:-1], digest=False), "has sha256 .* the batch asks for"),
        (replaced(lambda data: data[:-1], digest=True), "do not fill the"),
        (replaced(lambda data: data.replace(b"version\2", b"version\1"), digest=True), "reads schema_version 2"),
        (replaced(lambda data: data.replace(b"<i4", b"<i8"), digest=True), "tokens of a sample is '<i8', expected <i4"),
        (replaced(lambda _: encode_samples([merged(sample(0, "b"))]), digest=True), r"'b', .* the batch says \('a', "),
        (claimed(group_id="s000000-g009"), "the batch says .*s000000-g009"),
        (claimed(tokens=A["tokens"] + 1), f"the batch says .*{A['tokens'] + 1}, {A['trained']}"),
        (claimed(trained=A["trained"] + 1), f"the batch says .*{A['tokens']}, {A['trained'] + 1}"),
        (claimed(leaf=1), "holds 1 samples, the batch asks for leaf 1"),
        (changed(tokens=np.full(A["tokens"], VOCAB, np.int32)), "512 is outside the vocabulary of 512"),
        (changed(tokens=np.full(A["tokens"], -7, np.int32)), "-7 is outside the vocabulary"),
        (changed(loss_mask=np.ones(3, np.uint8)), r"loss_mask is uint8 \(3,\)"),
        (changed(loss_mask=np.full(A["tokens"], 2, np.uint8)), "loss_mask holds 2"),
        (changed(loss_mask=np.ones(A["tokens"], np.uint8)), "loss_mask is set on the first token"),
        (changed(logprobs=nan_at_1(sample(0, "a"))), "logprobs holds a value that is not finite"),
        (changed(logprobs=np.ones(A["tokens"], np.float32)), "logprobs is not 0 on an id that was not sampled"),
    ],
)
def test_a_sample_that_is_not_what_its_row_says_is_refused(
    put: Callable[[MemoryStore], list[dict[str, Any]]], match: str
) -> None:
    store = MemoryStore()
    good = stored_row(store, "r1", 3, sample(1, "b"))
    with pytest.raises(CorruptObject, match=match) as error:
        read(store, [good, *put(store)])
    assert str(error.value).startswith(f"object {KEY}: ") and "\n" not in str(error.value)


REPLAY = RoutingShape(LAYERS, 2, EXPERTS)


def test_routing_is_read_for_replay_and_left_aside_without() -> None:
    store, row = MemoryStore(), routed(sample(0, "a"))
    rows = parse(batch("r1", 3, [stored_row(store, "r1", 3, row)])).rows
    assert read_samples(store, rows, VOCAB)[0].routing is None  # type: ignore[arg-type]
    held = read_samples(store, rows, VOCAB, REPLAY)[0].routing  # type: ignore[arg-type]
    assert held is not None and held.dtype == np.uint8 and held.base is None
    np.testing.assert_array_equal(held, row["routing"])


def twice(row: dict[str, Any]) -> dict[str, Any]:
    """Of the row at position 3, the second layer names one expert two times."""
    routing = row["routing"].copy()
    routing[3, 1] = 2
    return row | {"routing": routing}


@pytest.mark.parametrize(
    ("row", "match"),
    [
        (sample(0, "a"), "has no routed experts, trainer.routing_replay needs them"),
        (routed(sample(0, "a"), layers=3), r"routed experts are \(\d+, 3, 2\), the model replays \(\d+, 2, 2\)"),
        (routed(sample(0, "a"), top_k=1), r"routed experts are \(\d+, 2, 1\), the model replays \(\d+, 2, 2\)"),
        (routed(sample(0, "a"), experts=5), "name expert 4, the model has 4"),
        (twice(routed(sample(0, "a"))), r"position 3, layer 1 names an expert twice: \[2 2\]"),
    ],
)
def test_routing_that_the_model_cannot_replay_is_refused(row: dict[str, Any], match: str) -> None:
    store = MemoryStore()
    rows = [stored_row(store, "r1", 3, each) for each in (routed(sample(1, "b")), row)]
    with pytest.raises(CorruptObject, match=match) as error:
        read_samples(store, parse(batch("r1", 3, rows)).rows, VOCAB, REPLAY)  # type: ignore[arg-type]
    assert str(error.value).startswith(f"object {KEY}: sample a leaf 0") and "\n" not in str(error.value)


def test_a_store_that_is_away_is_not_a_bad_sample() -> None:
    store = MemoryStore()
    rows = parse(batch("r1", 3, [stored_row(store, "r1", 3, sample(0, "a"))])).rows
    store.down = True
    with pytest.raises(StoreUnavailable):
        read_samples(store, rows, VOCAB)  # type: ignore[arg-type]
