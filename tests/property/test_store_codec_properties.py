"""What is packed comes back bit for bit; what is damaged is refused, never another value of the same shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rl360.errors import CorruptObject
from rl360.store.codec import pack, sha256_hex, unpack

DTYPES = ("<i4", "<i8", "<u2", "<u4", "<f4", "<f8", "|u1", "|i1", "|b1", ">i4", ">f8")
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: arrays.arrays(np.dtype(dtype), arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
)
PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
VALUES = st.recursive(
    PLAIN | ARRAYS, lambda part: st.lists(part, max_size=4) | st.dictionaries(st.text(), part, max_size=4)
)


def same(one: Any, other: Any) -> bool:
    """Equal in type and in every bit (NaN equals NaN, 1 is not True)."""
    if isinstance(one, np.ndarray):
        little = one.astype(one.dtype.newbyteorder("<"))
        return (
            isinstance(other, np.ndarray)
            and other.dtype == little.dtype
            and other.shape == one.shape
            and other.tobytes() == little.tobytes()
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return one == other or (one != one and other != other)


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_what_is_packed_comes_back(value: Any) -> None:
    assert same(value, unpack(pack(value), "key"))


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_the_same_value_has_the_same_bytes(value: Any) -> None:
    """Digests of replayed tasks are compared: packing may not depend on anything but the value."""
    once = pack(value)
    assert once == pack(value) == pack(unpack(once, "key"))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_junk_is_a_value_or_a_corrupt_object(data: bytes) -> None:
    """Whatever the bytes are, nothing but `CorruptObject` comes out of a decode."""
    try:
        unpack(data, "key")
    except CorruptObject as error:
        refusal = str(error)
    else:
        return
    assert refusal.startswith("object key: ")


@settings(max_examples=100, deadline=None)
@given(ARRAYS.filter(lambda array: array.nbytes > 0), st.data())
def test_a_cut_object_is_refused(array: np.ndarray, data: st.DataObject) -> None:
    whole = pack({"tokens": array})
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(CorruptObject):
        unpack(whole[:cut], "key")


@settings(max_examples=60, deadline=None)
@given(ARRAYS, st.data())
def test_every_flipped_bit_changes_the_digest(array: np.ndarray, data: st.DataObject) -> None:
    whole = pack(array)
    at = data.draw(st.integers(0, len(whole) * 8 - 1))
    flipped = bytearray(whole)
    flipped[at // 8] ^= 1 << at % 8
    assert sha256_hex(bytes(flipped)) != sha256_hex(whole)
