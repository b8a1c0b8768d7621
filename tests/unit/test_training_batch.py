"""The batch object: read exactly, refused by name when anything about it is off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rl360.errors import CorruptObject
from rl360.store.codec import sha256_hex
from rl360.training.results import parse_batch
from tests.unit.training_data import VOCAB, batch, sample, samples_of


def parse(data: bytes, digest: str | None = None, run: str = "r1", step: int = 3) -> Any:
    return parse_batch(data, "key", digest or sha256_hex(data), run, step, VOCAB)


def test_a_good_batch_is_read_exactly() -> None:
    rows = samples_of(3)
    found = parse(batch("r1", 3, rows))
    assert [s.name for s in found.samples] == [row["attempt_id"] for row in rows]
    for held, row in zip(found.samples, rows, strict=True):
        assert np.array_equal(held.tokens, row["tokens"])
        assert np.array_equal(held.loss_mask, row["loss_mask"])
        assert np.array_equal(held.logprobs, row["logprobs"])
        assert held.advantage == row["advantage"]
    assert found.trained_tokens == sum(int(row["loss_mask"].sum()) for row in rows)
    assert found.trained_samples == len(rows)


def test_no_samples_is_a_batch() -> None:
    assert parse(batch("r1", 3, [])).trained_tokens == 0


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"junk", "does not decode"),
        (batch("r1", 3, [], schema_version=9), "schema 9 is unknown"),
        (batch("r2", 3, []), "is the batch of r2/3"),
        (batch("r1", 4, []), "is the batch of r1/4"),
        (batch("r1", 3, [sample(0, "a"), sample(1, "a")]), "a appears twice"),
        (batch("r1", 3, [sample(0, "a", tokens=np.array([1, VOCAB], np.int32))]), "512 is outside the vocabulary"),
        (batch("r1", 3, [sample(0, "a", tokens=np.array([-7, 2], np.int32))]), "-7 is outside the vocabulary"),
        (batch("r1", 3, [sample(0, "a", tokens=np.zeros(4, np.int64))]), "tokens is not a one-dimensional int32"),
        (batch("r1", 3, [sample(0, "a", loss_mask=np.zeros(3, np.uint8))]), "differ in length"),
        (batch("r1", 3, [sample(0, "a", advantage=float("nan"))]), "advantage nan is not a finite number"),
        (batch("r1", 3, [sample(0, "a", advantage=None)]), "advantage None"),
        (batch("r1", 3, [{"tokens": 3}]), "sample 0 has no attempt_id"),
    ],
)
def test_bad_batches_are_refused(data: bytes, match: str) -> None:
    with pytest.raises(CorruptObject, match=match):
        parse(data)


def test_wrong_digest_is_refused() -> None:
    with pytest.raises(CorruptObject, match="the step asked for 0000"):
        parse(batch("r1", 3, []), digest="0" * 64)
