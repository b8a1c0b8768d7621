"""Files of a weight version: written once, applied once; what is wrong with them is named before anything changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson
import pytest
from memory_store import MemoryStore
from safetensors.numpy import save_file

from rl360.errors import BadInput, CorruptObject, StoreUnavailable
from rl360.weights import delta
from rl360.weights.delta import Encoding, Files, Held, SharedFolder, StoreFolder, Weights, WrongBase
from rl360.weights.messages import TensorSpec

SHARD = 3000  # bytes: several shards


def weights(seed: int, count: int = 6) -> dict[str, Held]:
    rng = np.random.default_rng(seed)
    made = {}
    for number in range(count):
        values = (rng.normal(0, 0.08, 512).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        made[f"t{number}"] = Held(TensorSpec(name=f"t{number}", shape=(16, 32)), values.view(np.uint8))
    norm = rng.normal(1, 0.1, 48).astype(np.float32)
    return made | {"norm": Held(TensorSpec(name="norm", shape=(48,), dtype="float32"), norm.view(np.uint8))}


def moved(base: Weights, seed: int, share: float = 0.1) -> dict[str, Held]:
    """`base` after a small step: a share of the elements differ in their lowest bit."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, held in base.items():
        values = held.elements.copy()
        values[rng.random(values.size) < share] ^= 1
        made[name] = Held(held.spec, values.view(np.uint8))
    return made


def same(folder: Path, expected: Weights) -> bool:
    found = delta.open_tensors(folder)
    return {n: (h.spec, h.data.tobytes()) for n, h in found.items()} == {
        n: (h.spec, h.data.tobytes()) for n, h in expected.items()
    }


@pytest.fixture(params=["folder", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Files]:
    store = MemoryStore()

    def open_(name: str) -> Files:
        if request.param == "folder":
            return SharedFolder(tmp_path / "files" / name)
        return StoreFolder(store, f"run/{name}")  # type: ignore[arg-type]

    return open_


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What an engine was started with."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "tokenizer.json").write_text("{}")
    save_file({"t0": np.zeros((16, 32), np.float32)}, folder / "model.safetensors")
    return folder


def full_then_delta(place: Callable[[str], Files], model: Path, root: Path) -> tuple[Files, Path, dict[str, Held]]:
    """A directory of r1:1, and files of r1:2 that apply to it."""
    first = weights(1)
    second = moved(first, 2)
    delta.write_version(place("full"), first, "r1:1", shard_bytes=SHARD)
    delta.apply(model, place("full"), root / "one")
    files = place("delta")
    delta.write_version(files, second, "r1:2", first, "r1:1", shard_bytes=SHARD)
    return files, root / "one", second


def test_full_and_delta_make_directories_that_load(place: Callable[[str], Files], model: Path, tmp_path: Path) -> None:
    files, one, second = full_then_delta(place, model, tmp_path)
    told = delta.apply(one, files, tmp_path / "two")
    assert same(one, weights(1)) and same(tmp_path / "two", second)
    assert len(told.shards) > 2
    assert told.size_bytes < delta.read_version(place("full")).size_bytes / 2
    assert (tmp_path / "two" / "config.json").read_text() == '{"model_type": "qwen3"}'
    assert delta.version_of(tmp_path / "two") == "r1:2"
    index = orjson.loads((tmp_path / "two" / "model.safetensors.index.json").read_bytes())
    assert set(index["weight_map"]) == set(second)
    assert {path.name for path in (tmp_path / "two").glob("*.safetensors")} == set(index["weight_map"].values())
    assert delta.apply(one, files, tmp_path / "two") == told  # again: nothing to do


def test_other_programs_read_what_is_written(place: Callable[[str], Files], model: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    _, one, _ = full_then_delta(place, model, tmp_path)
    for path in one.glob("*.safetensors"):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                held = weights(1)[name]
                assert tuple(tensors.get_tensor(name).shape) == held.spec.shape
                raw = tensors.get_tensor(name).reshape(-1).view(__import__("torch").uint8).numpy()
                assert raw.tobytes() == held.data.tobytes()


def test_the_smaller_encoding_is_chosen(tmp_path: Path) -> None:
    base = weights(1)["t0"]
    unchanged = delta.encode(base, base)
    assert (unchanged[0], unchanged[1], len(unchanged[2]) < 60) == (Encoding.OVERWRITE, 0, True)
    few = base.elements.copy()
    few[::100] = 7
    assert delta.encode(Held(base.spec, few.view(np.uint8)), base)[0] is Encoding.OVERWRITE
    lowest_bits = moved({"t0": base}, 3, share=0.5)["t0"]
    assert delta.encode(lowest_bits, base)[0] is Encoding.XOR
    assert delta.encode(base, None)[0] is Encoding.FULL


def test_written_once(place: Callable[[str], Files], tmp_path: Path) -> None:
    files, first = place("v"), weights(1)
    told = delta.write_version(files, first, "r1:1", shard_bytes=SHARD)
    assert delta.write_version(files, first, "r1:1", shard_bytes=SHARD) == told
    for other, version in ((weights(2), "r1:1"), (first, "r1:2")):
        with pytest.raises(CorruptObject, match=r"not these weights of .*; use a new folder"):
            delta.write_version(files, other, version)
    files.delete_all()
    assert delta.find_version(files) is None
    with pytest.raises(CorruptObject, match="missing: the version was never written"):
        delta.read_version(files)


def test_a_base_of_other_tensors_is_refused(tmp_path: Path) -> None:
    files, first = SharedFolder(tmp_path), weights(1)
    fewer = {name: held for name, held in first.items() if name != "t3"}
    for new, base in ((first, fewer), (fewer, first)):
        with pytest.raises(BadInput, match=r"t3|tensors"):
            delta.write_version(files, new, "r1:2", base, "r1:1")
    with pytest.raises(BadInput, match="a base with its version or neither"):
        delta.write_version(files, first, "r1:2", base_version="r1:1")
    assert list(tmp_path.iterdir()) == []


def test_wrong_bases_and_double_application_are_named(
    place: Callable[[str], Files], model: Path, tmp_path: Path
) -> None:
    files, one, second = full_then_delta(place, model, tmp_path)
    into = tmp_path / "into"
    delta.apply(one, files, tmp_path / "two")
    delta.write_version(place("other"), weights(9), "r1:7", shard_bytes=SHARD)
    delta.apply(model, place("other"), tmp_path / "seven")
    unmarked = tmp_path / "two-unmarked"
    (tmp_path / "two").rename(unmarked)
    (unmarked / delta.MARKER).unlink()
    for base, complaint in (
        (tmp_path / "seven", "holds r1:7; r1:2 applies to r1:1"),
        (unmarked, r"tensor \w+ is what r1:2 brings already; a delta is applied once"),
        (model, r"tensor norm is not in both the base and r1:2"),
        (tmp_path / "none", "no safetensors file there"),
    ):
        with pytest.raises(WrongBase, match=complaint):
            delta.apply(base, files, into)
    (unmarked / delta.MARKER).write_text('{"version": "r1:2"}')
    with pytest.raises(WrongBase, match="holds r1:2 already; a delta is applied once"):
        delta.apply(unmarked, files, into)
    data = bytearray((path := sorted(one.glob("*.safetensors"))[1]).read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    with pytest.raises(WrongBase, match=r"tensor t\d has sha256 \w+, r1:1 has \w+"):
        delta.apply(one, files, into)
    path.write_bytes(data[:-9])
    with pytest.raises(WrongBase, match=r"is no safetensors file \(tensor t\d is not at"):
        delta.apply(one, files, into)
    assert not into.exists() and not list(tmp_path.glob(".into*"))
    assert same(unmarked, second)


@pytest.mark.parametrize(
    "kind", ["bit", "short", "long", "missing", "swapped", "manifest", "manifest name", "no manifest"]
)
def test_damaged_and_missing_files_are_named(kind: str, model: Path, tmp_path: Path) -> None:
    files, one, _ = full_then_delta(lambda name: SharedFolder(tmp_path / name), model, tmp_path)
    folder, into = tmp_path / "delta", tmp_path / "into"
    shards = sorted(folder.glob("shard-*"))
    data = shards[1].read_bytes()
    if kind == "bit":
        shards[1].write_bytes(data[:40] + bytes([data[40] ^ 16]) + data[41:])
    elif kind == "short":
        shards[1].write_bytes(data[:-1])
    elif kind == "long":
        shards[1].write_bytes(data + b"x")
    elif kind == "missing":
        shards[1].unlink()
    elif kind == "swapped":
        other = shards[2].read_bytes()
        shards[1].write_bytes((other * 2)[: len(data)])
    elif kind == "manifest name":
        text = (folder / delta.MANIFEST).read_text()
        (folder / delta.MANIFEST).write_text(text.replace('"t2"', '"t9"'))
    elif kind == "manifest":
        (folder / delta.MANIFEST).write_bytes((folder / delta.MANIFEST).read_bytes()[:-2])
    else:
        (folder / delta.MANIFEST).unlink()
    named = delta.MANIFEST if "manifest" in kind else shards[1].name
    with pytest.raises(CorruptObject, match=f"{folder}/{named}: "):
        delta.apply(one, files, into)
    assert not into.exists() and not list(tmp_path.glob(".into*"))
    assert same(one, weights(1))


def test_a_frame_that_claims_to_be_large_is_not_unpacked() -> None:
    import zstandard

    base = weights(1)["t0"]
    bomb = zstandard.compress(bytes(1 << 20))
    entry = delta.Entry(
        tensor=base.spec,
        offset=0,
        length=len(bomb),
        encoding=Encoding.XOR,
        carried=512,
        sha256=delta.sha256_of(base.data),
    )
    with pytest.raises(ValueError, match="does not unpack to 1024 bytes"):
        delta.decode(entry, memoryview(bomb), base)
    with pytest.raises(ValueError, match="carries 7 elements of 512"):
        delta.decode(entry.model_copy(update={"carried": 7}), memoryview(bomb), base)
    with pytest.raises(ValueError, match="encoding xor without a base"):
        delta.decode(entry, memoryview(bomb), None)


def test_a_directory_in_the_way_is_not_replaced(tmp_path: Path, model: Path) -> None:
    files, one, _ = full_then_delta(lambda name: SharedFolder(tmp_path / name), model, tmp_path)
    (tmp_path / "into").mkdir()
    (tmp_path / "into" / "precious").write_text("mine")
    with pytest.raises(BadInput, match=r"into exists and is not r1:2 whole; remove it"):
        delta.apply(one, files, tmp_path / "into")
    assert os.listdir(tmp_path / "into") == ["precious"]


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """Whatever the operating system says of it: the trainer goes on, and the push may be tried again."""
    (tmp_path / "file").write_bytes(b"")
    files = SharedFolder(tmp_path / "file" / "v1")
    with pytest.raises(StoreUnavailable, match=r"file/v1/a cannot be written \(Not a directory\): push.folder must be"):
        files.put("a", b"x")
    with pytest.raises(StoreUnavailable, match="cannot be read"):
        delta.write_version(files, weights(1), "r1:1")
