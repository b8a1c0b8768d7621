"""Any bytes survive any encoding; whichever single bit of a file flips, nothing wrong is made of it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.errors import CorruptObject
from rl360.weights import delta
from rl360.weights.delta import Held, SharedFolder
from rl360.weights.messages import TensorSpec

SPECS = st.tuples(
    st.sampled_from(["bfloat16", "float16", "float32"]),
    st.lists(st.integers(0, 9), min_size=0, max_size=3),
)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Held, Held]:
    """A tensor and the same one with anything from nothing to all of it changed."""
    dtype, shape = draw(SPECS)
    spec = TensorSpec.model_validate({"name": "t", "shape": tuple(shape), "dtype": dtype})
    seed, share = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([0.0, 0.05, 0.5, 1.0]))
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, spec.size_bytes, dtype=np.uint8)
    new = np.where(rng.random(old.size) < share, rng.integers(0, 256, old.size, dtype=np.uint8), old)
    return Held(spec, old), Held(spec, new)


@given(pairs(), st.booleans())
def test_what_is_encoded_comes_back(pair: tuple[Held, Held], whole: bool) -> None:
    base = None if whole else pair[0]
    encoding, carried, packed = delta.encode(pair[1], base)
    entry = delta.Entry(
        tensor=pair[1].spec,
        offset=0,
        length=len(packed),
        encoding=encoding,
        carried=carried,
        sha256=delta.sha256_of(pair[1].data),
    )
    assert delta.decode(entry, memoryview(packed), base).tobytes() == pair[1].data.tobytes()


@settings(max_examples=60, deadline=None)
@given(st.lists(pairs(), min_size=1, max_size=4), st.data())
def test_a_flipped_bit_is_found_or_harmless(made: list[tuple[Held, Held]], data: st.DataObject) -> None:
    def named(part: int) -> dict[str, Held]:
        return {
            f"t{i}": Held(pair[part].spec.model_copy(update={"name": f"t{i}"}), pair[part].data)
            for i, pair in enumerate(made)
        }

    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        (root / "model").mkdir()
        delta.write_version(SharedFolder(root / "v1"), named(0), "r1:1")
        delta.apply(root / "model", SharedFolder(root / "v1"), root / "one")
        told = delta.write_version(SharedFolder(root / "v2"), named(1), "r1:2", named(0), "r1:1", shard_bytes=64)
        shard = root / "v2" / data.draw(st.sampled_from([shard.name for shard in told.shards]))
        content = bytearray(shard.read_bytes())
        bit = data.draw(st.integers(0, 8 * len(content) - 1))
        content[bit // 8] ^= 1 << bit % 8
        shard.write_bytes(content)
        told_of = ""
        try:
            delta.apply(root / "one", SharedFolder(root / "v2"), root / "two")
        except CorruptObject as error:
            told_of = str(error)
        assert (root / "two").exists() == (not told_of)
        if told_of:
            assert shard.name in told_of
        else:  # a bit that zstd does not look at
            expected = {name: held.data.tobytes() for name, held in named(1).items()}
            assert {n: h.data.tobytes() for n, h in delta.open_tensors(root / "two").items()} == expected
        assert {n: h.data.tobytes() for n, h in delta.open_tensors(root / "one").items()} == {
            name: held.data.tobytes() for name, held in named(0).items()
        }
