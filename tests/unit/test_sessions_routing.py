"""Rows of routed experts: decoded once and exactly, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pybase64
import pytest

from rl360.errors import BadInput
from rl360.sessions.refusals import Refusal, SessionRefusal
from rl360.sessions.routing import RoutingShape, RowForward, check_rows, decode_rows, rows_written

SHAPE = RoutingShape(layers=3, top_k=2, experts=60)


def encoded(rows: Any) -> bytes:
    return pybase64.b64encode(np.asarray(rows, dtype="<i4").tobytes())


def test_rows_come_back_narrow_and_read_only() -> None:
    rows = np.arange(5 * 3 * 2).reshape(5, 3, 2)
    for data in (encoded(rows), encoded(rows).decode()):
        found = decode_rows(data, SHAPE, 5)
        assert found.dtype == np.uint8 and found.tolist() == rows.tolist()
        assert not found.flags.writeable
    assert decode_rows(b"", SHAPE, 0).shape == (0, 3, 2)


@pytest.mark.parametrize(("experts", "dtype"), [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16")])
def test_the_smallest_type_that_holds_an_expert(experts: int, dtype: str) -> None:
    shape = RoutingShape(1, 1, experts)
    assert shape.dtype == dtype and shape.row_bytes == np.dtype(dtype).itemsize
    assert decode_rows(encoded([experts - 1]), shape, 1).tolist() == [[[experts - 1]]]
    with pytest.raises(SessionRefusal, match=f"name expert {experts}, the model has {experts}"):
        decode_rows(encoded([experts]), shape, 1)


@pytest.mark.parametrize(
    ("data", "rows", "match"),
    [
        (encoded(np.zeros(6)), 2, "are 24 bytes; 2 rows of 3 layers, 2 experts each, as int32 are 48"),
        (encoded(np.zeros(7)), 1, "are 28 bytes"),
        (encoded(np.zeros(6))[:-4], 1, "bytes"),
        (b"!!!!", 1, "not base64"),
        ("é", 1, "not base64"),
        (encoded([0, 0, -1, 0, 0, 0]), 1, "expert -1"),
        (encoded([0, 0, 60, 0, 0, 0]), 1, "expert 60, the model has 60"),
        (encoded([0, 0, 2**31 - 1, 0, 0, 0]), 1, "expert 2147483647"),
    ],
)
def test_rows_that_do_not_line_up_are_refused(data: Any, rows: int, match: str) -> None:
    with pytest.raises(SessionRefusal, match=match) as caught:
        decode_rows(data, SHAPE, rows)
    assert caught.value.code is Refusal.BAD_ROUTING and caught.value.retry


def test_decoded_rows_are_checked_against_what_a_turn_needs() -> None:
    check_rows(np.zeros((4, 3, 2), np.uint8), SHAPE, 4)
    for rows in (None, np.zeros((3, 3, 2), np.uint8), np.zeros((4, 2, 2), np.uint8), np.zeros((4, 3, 2), np.int32)):
        with pytest.raises(SessionRefusal, match="routed experts"):
            check_rows(rows, SHAPE, 4)


P, D, R, U = RowForward


@pytest.mark.parametrize(
    ("held", "prompt_end", "end", "spans", "retractions", "expected"),
    [
        (0, 3, 6, [(3, 6, "1")], 0, [P, P, P, D, D]),
        (5, 8, 9, [(8, 9, "1")], 0, [P, P, P]),  # one sampled token: it is never fed back
        (5, 6, 9, [(6, 9, "1")], 0, [P, D, D]),
        (5, 6, 9, [(6, 9, "1")], 2, [P, U, U]),
        (5, 6, 10, [(6, 8, "1"), (8, 10, "2")], 1, [P, R, R, D]),
        (5, 6, 10, [(6, 8, "1"), (8, 10, "2")], 0, [P, D, D, D]),  # an update without a retraction keeps the cache
        (5, 6, 12, [(6, 7, "1"), (7, 9, "2"), (9, 12, "3")], 2, [P, R, R, R, D, D]),
    ],
)
def test_which_forward_wrote_a_row(
    held: int, prompt_end: int, end: int, spans: list[Any], retractions: int, expected: list[int]
) -> None:
    assert rows_written(held, prompt_end, end, tuple(spans), retractions).tolist() == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_hidden_layers": 2}, None),
        ({"num_hidden_layers": 2, "num_experts": None, "num_experts_per_tok": 8}, None),
        ({"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}, RoutingShape(2, 2, 8)),
        ({"num_hidden_layers": 4, "n_routed_experts": 160, "num_experts_per_tok": 8}, RoutingShape(4, 8, 160)),
        ({"num_hidden_layers": 4, "num_local_experts": 8, "num_experts_per_tok": 2}, RoutingShape(4, 2, 8)),
        (
            {"text_config": {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}},
            RoutingShape(2, 2, 8),
        ),
    ],
)
def test_the_shape_is_read_from_a_model(tmp_path: Path, config: dict[str, Any], expected: RoutingShape | None) -> None:
    (tmp_path / "config.json").write_bytes(orjson.dumps(config))
    assert RoutingShape.from_model_dir(tmp_path) == expected


@pytest.mark.parametrize(
    "text", ["", "[]", '{"num_experts":8}', '{"num_experts":8,"num_hidden_layers":2,"num_experts_per_tok":9}']
)
def test_a_model_without_a_shape_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInput, match=r"config\.json"):
        RoutingShape.from_model_dir(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadInput, match=r"config\.json"):
        RoutingShape.from_model_dir(tmp_path)
