"""msgpack with raw arrays: what every payload in the store is made of.

An array travels as msgpack extension type 1: a header (dtype, shape) and its little-endian C-order bytes. Unpacking
is zero-copy (`np.frombuffer`, read-only). No pickle, no object arrays, no JSON.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgpack
import numpy as np

from rl360.errors import BadInput, CorruptObject

ARRAY_EXT = 1
_DTYPES = {name: np.dtype(name) for name in ("<i4", "<i8", "<u2", "<u4", "<f4", "<f8", "|u1", "|i1", "|b1")}
_MAX_BYTES = 2**32 - 1


def _default(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        dtype = array.dtype.newbyteorder("<").str if array.dtype.itemsize > 1 else array.dtype.str
        if dtype not in _DTYPES:
            raise BadInput(f"cannot store an array of dtype {array.dtype}; use one of {sorted(_DTYPES)}")
        header = msgpack.packb([dtype, list(value.shape)])  # not array's: making it contiguous adds an axis to a scalar
        body = array.astype(_DTYPES[dtype], copy=False)
        return msgpack.ExtType(ARRAY_EXT, header + body.tobytes())
    if isinstance(value, np.integer | np.floating | np.bool_):
        return value.item()
    if isinstance(value, int):
        raise BadInput(f"cannot store the integer {value}: it needs more than 64 bits")
    raise BadInput(f"cannot store a value of type {type(value).__name__}")


def _ext_hook(code: int, data: bytes) -> Any:
    if code != ARRAY_EXT:
        raise ValueError(f"unknown extension type {code}")
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    unpacker.feed(data[:256])
    dtype, shape = unpacker.unpack()
    if dtype not in _DTYPES or not isinstance(shape, list) or any(not isinstance(n, int) or n < 0 for n in shape):
        raise ValueError(f"bad array header dtype={dtype!r} shape={shape!r}")
    body = memoryview(data)[unpacker.tell() :]
    kind = _DTYPES[dtype]
    count = int(np.prod(shape, dtype=np.int64))
    if len(body) != count * kind.itemsize:
        raise ValueError(f"array {dtype} {shape} needs {count * kind.itemsize} bytes, has {len(body)}")
    return np.frombuffer(body, dtype=kind).reshape(shape)


def pack(value: Any) -> bytes:
    """Encode plain values and numpy arrays. Refuses what it cannot store exactly (`BadInput`)."""
    try:
        return msgpack.packb(value, default=_default, use_bin_type=True)
    except ValueError as error:  # text that is no UTF-8, nesting without end
        raise BadInput(f"cannot store this value: {error}") from None


def unpack(data: bytes, key: str) -> Any:
    """Decode what `pack` wrote; anything else is `CorruptObject` naming `key`."""
    try:
        return msgpack.unpackb(
            data, ext_hook=_ext_hook, raw=False, strict_map_key=False, max_ext_len=_MAX_BYTES, max_bin_len=_MAX_BYTES
        )
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise CorruptObject(
            key, f"does not decode as msgpack ({error}); restore it or delete it and redo its task"
        ) from None


def sha256_hex(data: bytes) -> str:
    """Hex sha256 of the bytes: the digest manifests and references carry."""
    return hashlib.sha256(data).hexdigest()
