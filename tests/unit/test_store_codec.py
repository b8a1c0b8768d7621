"""The codec's edges: what it refuses, and that arrays arrive without a copy and cannot be changed in place."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest

from rl360.errors import BadInput, CorruptObject
from rl360.store.codec import ARRAY_EXT, pack, sha256_hex, unpack


def test_a_known_object_has_known_bytes() -> None:
    """The stored format may not drift: objects of old runs must stay readable."""
    data = pack({"tokens": np.array([1, 2], np.int32)})
    assert data.hex() == "81a6746f6b656e73c70f0192a33c693491020100000002000000"
    assert unpack(data, "key")["tokens"].tolist() == [1, 2]


def test_a_scalar_array_stays_one() -> None:
    found = unpack(pack(np.array(3.5)), "key")
    assert found.shape == () and found == 3.5


def test_arrays_are_read_only_views() -> None:
    found = unpack(pack(np.arange(4, dtype=np.int32)), "key")
    assert not found.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 9


def test_numpy_scalars_become_plain_values() -> None:
    value = {"n": np.int64(3), "x": np.float32(0.5), "yes": np.bool_(True)}
    assert unpack(pack(value), "key") == {"n": 3, "x": 0.5, "yes": True}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros(2, np.float16), "array of dtype float16"),
        (np.array(["a"]), "array of dtype <U1"),
        (np.array([object()]), "array of dtype object"),
        (np.zeros(2, np.complex64), "array of dtype complex64"),
        (object(), "value of type object"),
        ({1, 2}, "value of type set"),
        (2**64, "needs more than 64 bits"),
        ("\ud800", "cannot store this value"),
    ],
)
def test_what_cannot_be_stored_exactly_is_refused(value: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words) as error:
        pack({"x": value})
    assert "\n" not in str(error.value)


def _array(header: Any, body: bytes = b"") -> bytes:
    return msgpack.packb(msgpack.ExtType(ARRAY_EXT, msgpack.packb(header) + body))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "does not decode"),
        (pack([1, 2]) + b"\x00", "does not decode"),
        (msgpack.packb(msgpack.ExtType(9, b"x")), "unknown extension type 9"),
        (_array(["<f2", [1]], b"\0\0"), "bad array header"),
        (_array(["|O", [1]], b"\0" * 8), "bad array header"),
        (_array(["<i4", [-1]], b"\0" * 4), "bad array header"),
        (_array(["<i4", ["2"]], b"\0" * 8), "bad array header"),
        (_array(["<i4", [2]], b"\0" * 7), "needs 8 bytes, has 7"),
        (_array(["<i4", [2]], b"\0" * 9), "needs 8 bytes, has 9"),
        (_array(["<i4", [2**32, 2**32]]), "does not decode"),
        (_array("junk"), "does not decode"),
        (_array(7), "does not decode"),
        (msgpack.packb(msgpack.ExtType(ARRAY_EXT, b"\x92")), "does not decode"),
    ],
)
def test_what_does_not_decode_names_its_object(data: bytes, words: str) -> None:
    with pytest.raises(CorruptObject, match=words) as error:
        unpack(data, "r1/steps/000003/groups.msgpack")
    assert str(error.value).startswith("object r1/steps/000003/groups.msgpack: ")
    assert "\n" not in str(error.value)


def test_the_digest_is_sha256() -> None:
    assert sha256_hex(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
