"""Files of weight versions: every tensor (full), or what changed since a base version (delta), and how to apply them.

A version's folder (shared, or a prefix of the object store) holds shards and, written last, `manifest.json`: without it
there is nothing there. Written once; the same weights again change nothing, others under the same name are refused.
`apply` makes a new Hugging Face directory beside the old one and renames it into place: base and content of every
tensor are checked by sha256 before that, and whatever ends the process earlier leaves the old directory as it was.
A tensor is encoded by whichever is smaller after zstd: `xor` (new xor base) or `overwrite` (a bit an element, and the
elements that differ); `full` where there is no base. Bytes of equal significance lie together, which packs better.
numpy only; hashing, packing and files run in threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
import orjson
import zstandard
from pydantic import Field

from rl360.errors import BadInput, CorruptObject, Rl360Error, StoreUnavailable
from rl360.store.data import Data, parse
from rl360.weights.messages import TensorSpec

if TYPE_CHECKING:
    from rl360.store.object_store import ObjectStore

A = TypeVar("A")
B = TypeVar("B")
MANIFEST, MARKER = "manifest.json", "rl360-version.json"
SHARD_BYTES = 1 << 30  # of content: a shard becomes one safetensors file
_LEVEL = 1  # zstd: higher ones gain little on weights and cost much
_THREADS = min(16, os.cpu_count() or 1)
_WIDTH: dict[str, type[np.unsignedinteger[Any]]] = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}
_SAFETENSORS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_FROM_SAFETENSORS = {short: name for name, short in _SAFETENSORS.items()}
_HEADER_LIMIT_BYTES = 100 << 20


class WrongBase(Rl360Error):
    """What is held is not what the delta was made against. Nothing was changed; the full version still applies."""


class Files(Protocol):
    """One folder of files, shared or in the object store."""

    where: str

    def get(self, name: str) -> bytes: ...
    def put(self, name: str, data: bytes) -> None: ...
    def put_once(self, name: str, data: bytes) -> bool: ...
    def delete_all(self) -> None: ...


class SharedFolder:
    """A directory that trainer and engines both see. A file is there whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path, self.where = path, str(path)

    def get(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            raise KeyError(name) from None
        except OSError as error:
            raise self._unusable("read", name, error) from None

    @contextlib.contextmanager
    def _written(self, name: str, data: bytes) -> Iterator[Path]:
        temporary = self.path / f".{name}.{uuid.uuid4().hex}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                with temporary.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                yield temporary
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise self._unusable("written", name, error) from None

    def _unusable(self, act: str, name: str, error: OSError) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self.path / name} cannot be {act} ({error.strerror or error}): push.folder must be a directory that the "
            "trainer can write and every engine can read"
        )

    def put(self, name: str, data: bytes) -> None:
        with self._written(name, data) as temporary:
            temporary.replace(self.path / name)

    def put_once(self, name: str, data: bytes) -> bool:
        with self._written(name, data) as temporary:
            try:
                (self.path / name).hardlink_to(temporary)
            except FileExistsError:
                return False
        return True

    def delete_all(self) -> None:
        """The manifest first: a half deleted version is none."""
        (self.path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)


class StoreFolder:
    """A prefix of the object store."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self.store, self.prefix = store, prefix.rstrip("/") + "/"
        self.where = f"s3://{store.bucket}/{prefix.rstrip('/')}"

    def get(self, name: str) -> bytes:
        return self.store.get(self.prefix + name)

    def put(self, name: str, data: bytes) -> None:
        self.store.put(self.prefix + name, data)

    def put_once(self, name: str, data: bytes) -> bool:
        return self.store.put_once(self.prefix + name, data)

    def delete_all(self) -> None:
        for key in (self.prefix + MANIFEST, *self.store.list(self.prefix)):
            self.store.delete(key)


def open_folder(url: str) -> Files:
    """An absolute path, or `s3://bucket/prefix` of this deployment's object store."""
    if url.startswith("/"):
        return SharedFolder(Path(url))
    from rl360.config.services import load_services  # an engine that pulls from a shared folder needs none of these
    from rl360.store.folders import split_url
    from rl360.store.object_store import ObjectStore

    bucket, prefix = split_url(url)
    services = load_services()
    secrets = services.secrets()
    return StoreFolder(
        ObjectStore(services.s3_endpoint, bucket, secrets.s3_access_key, secrets.s3_secret_key, timeout_s=60.0), prefix
    )


@dataclass(frozen=True)
class Held:
    """A tensor's bytes in row-major order, uint8 [size_bytes]."""

    spec: TensorSpec
    data: np.ndarray

    @property
    def elements(self) -> np.ndarray:
        """As unsigned integers of the element's width: uint16 or uint32 [elements]."""
        return self.data.view(_WIDTH[self.spec.dtype])


Weights = Mapping[str, Held]


class Encoding(StrEnum):
    FULL = "full"
    XOR = "xor"
    OVERWRITE = "overwrite"


class Entry(Data):
    """One tensor inside a shard. `carried`: elements in it. Digests are sha256 of a tensor's bytes."""

    tensor: TensorSpec
    offset: int = Field(ge=0)
    length: int = Field(ge=0)
    encoding: Encoding
    carried: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    base_sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")


class Shard(Data):
    name: str = Field(pattern=r"^shard-\d{5}\.zst$")
    size_bytes: int = Field(ge=0)
    entries: tuple[Entry, ...] = Field(min_length=1)


class VersionFiles(Data):
    """`manifest.json`: the version that the folder brings, and what it applies to (null: to nothing, it is whole)."""

    schema_version: Literal[1] = 1
    version: str = Field(min_length=1)
    base_version: str | None = None
    shards: tuple[Shard, ...] = Field(min_length=1)
    digest: str = Field("", description="sha256 of all the rest as it is written")

    @property
    def true_digest(self) -> str:
        return hashlib.sha256(self.model_dump_json(exclude={"digest"}).encode()).hexdigest()

    @property
    def size_bytes(self) -> int:
        """Of the shards: what travels."""
        return sum(shard.size_bytes for shard in self.shards)

    @property
    def entries(self) -> dict[str, Entry]:
        return {entry.tensor.name: entry for shard in self.shards for entry in shard.entries}


def _each(call: Callable[[A], B], items: Iterable[A]) -> list[B]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(call, items))


def sha256_of(data: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(data).data).hexdigest()


# -- encoding -------------------------------------------------------------------------------------------------------


def _planes(elements: np.ndarray) -> bytes:
    """First bytes of all elements, then second bytes, and so on."""
    return elements.view(np.uint8).reshape(-1, elements.itemsize).T.tobytes()


def _from_planes(data: bytes, dtype: type[np.unsignedinteger[Any]]) -> np.ndarray:
    width = np.dtype(dtype).itemsize
    planes = np.frombuffer(data, np.uint8).reshape(width, -1)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(-1)


def encode(new: Held, base: Held | None) -> tuple[Encoding, int, bytes]:
    """The smallest encoding: which, elements carried, packed bytes."""
    pack = zstandard.ZstdCompressor(level=_LEVEL).compress
    values = new.elements
    if base is None:
        return Encoding.FULL, values.size, pack(_planes(values))
    old = base.elements
    differs = values != old
    carried = int(np.count_nonzero(differs))
    xor = pack(_planes(values ^ old))
    overwrite = pack(np.packbits(differs).tobytes() + _planes(values[differs]))
    if len(overwrite) < len(xor):
        return Encoding.OVERWRITE, carried, overwrite
    return Encoding.XOR, values.size, xor


def decode(entry: Entry, packed: memoryview, base: Held | None) -> np.ndarray:
    """The tensor's new bytes, uint8 [size_bytes]; `ValueError` says what is wrong with the packed ones."""
    dtype = _WIDTH[entry.tensor.dtype]
    width = np.dtype(dtype).itemsize
    count = entry.tensor.size_bytes // width
    bits = -(-count // 8) if entry.encoding is Encoding.OVERWRITE else 0
    expected = bits + entry.carried * width
    if (entry.encoding is not Encoding.OVERWRITE and entry.carried != count) or entry.carried > count:
        raise ValueError(f"carries {entry.carried} elements of {count}")
    if (base is None) != (entry.encoding is Encoding.FULL):
        raise ValueError(f"encoding {entry.encoding} {'without' if base is None else 'with'} a base")
    try:
        if zstandard.frame_content_size(packed) != expected:
            raise ValueError(f"does not unpack to {expected} bytes")
        data = zstandard.ZstdDecompressor().decompress(packed, max_output_size=expected)
    except zstandard.ZstdError as error:
        raise ValueError(f"does not unpack ({error})") from None
    if len(data) != expected:
        raise ValueError(f"does not unpack to {expected} bytes")
    if base is None:
        return _from_planes(data, dtype).view(np.uint8)
    if entry.encoding is Encoding.XOR:
        return (_from_planes(data, dtype) ^ base.elements).view(np.uint8)
    differs = np.unpackbits(np.frombuffer(data, np.uint8, bits), count=count).astype(bool)
    if int(np.count_nonzero(differs)) != entry.carried:
        raise ValueError(f"marks {int(np.count_nonzero(differs))} elements and carries {entry.carried}")
    values = base.elements.copy()
    values[differs] = _from_planes(data[bits:], dtype)
    return values.view(np.uint8)


# -- writing a version ----------------------------------------------------------------------------------------------


def _in_shards(weights: Weights, shard_bytes: int) -> list[list[Held]]:
    """Tensors in their order, filled up to `shard_bytes` of content; a larger tensor is a shard of its own."""
    shards: list[list[Held]] = [[]]
    filled = 0
    for held in weights.values():
        if shards[-1] and filled + held.data.size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(held)
        filled += held.data.size
    return shards


def write_version(
    files: Files,
    weights: Weights,
    version: str,
    base: Weights | None = None,
    base_version: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> VersionFiles:
    """Write the files of `version` once: all of it, or its difference to `base`. Returns what is committed there."""
    if not weights or (base is None) != (base_version is None):
        raise BadInput(f"version {version}: give tensors, and a base with its version or neither")
    for held in weights.values():
        other = held if base is None else base.get(held.spec.name)
        if other is None or other.spec != held.spec or held.data.size != held.spec.size_bytes or held.spec.part:
            raise BadInput(f"tensor {held.spec.name} of {version}: {held.spec}, in its base {other and other.spec}")
    if base is not None and len(base) != len(weights):
        raise BadInput(f"version {version} has {len(weights)} tensors, its base {base_version} {len(base)}")
    committed = find_version(files)
    if committed is not None:
        return _same_as(files, committed, weights, version, base_version)

    def packed(held: Held) -> tuple[Held, Encoding, int, bytes, str, str | None]:
        before = None if base is None else base[held.spec.name]
        digests = sha256_of(held.data), None if before is None else sha256_of(before.data)
        return held, *encode(held, before), *digests

    shards = []
    for number, members in enumerate(_in_shards(weights, shard_bytes)):
        entries, pieces, offset = [], [], 0
        for held, encoding, carried, piece, sha256, base_sha256 in _each(packed, members):
            entries.append(
                Entry(
                    tensor=held.spec,
                    offset=offset,
                    length=len(piece),
                    encoding=encoding,
                    carried=carried,
                    sha256=sha256,
                    base_sha256=base_sha256,
                )
            )
            pieces.append(piece)
            offset += len(piece)
        shard = Shard(name=f"shard-{number:05}.zst", size_bytes=offset, entries=tuple(entries))
        files.put(shard.name, b"".join(pieces))
        shards.append(shard)
    made = VersionFiles(version=version, base_version=base_version, shards=tuple(shards))
    made = made.model_copy(update={"digest": made.true_digest})
    if files.put_once(MANIFEST, made.model_dump_json().encode()):
        return made
    return _same_as(files, read_version(files), weights, version, base_version)


def _same_as(
    files: Files, committed: VersionFiles, weights: Weights, version: str, base_version: str | None
) -> VersionFiles:
    """What is committed, when it is these weights."""
    digests = dict(zip(weights, _each(lambda held: sha256_of(held.data), weights.values()), strict=True))
    there = {name: entry.sha256 for name, entry in committed.entries.items()}
    if (committed.version, committed.base_version, there) != (version, base_version, digests):
        raise CorruptObject(
            f"{files.where}/{MANIFEST}",
            f"is {committed.version} on {committed.base_version}, not these weights of {version} on {base_version}; "
            "use a new folder",
        )
    return committed


def find_version(files: Files) -> VersionFiles | None:
    """What is committed in the folder, if anything is."""
    try:
        data = files.get(MANIFEST)
    except KeyError:
        return None
    found = parse(data, f"{files.where}/{MANIFEST}", VersionFiles, "is no manifest")
    if found.digest != found.true_digest:
        raise CorruptObject(f"{files.where}/{MANIFEST}", f"is damaged: digest {found.true_digest[:16]} is not its own")
    return found


def read_version(files: Files) -> VersionFiles:
    """What is committed in the folder; `CorruptObject` when nothing is."""
    found = find_version(files)
    if found is None:
        raise CorruptObject(f"{files.where}/{MANIFEST}", "is missing: the version was never written, or not to its end")
    return found


# -- directories of safetensors -------------------------------------------------------------------------------------


def open_tensors(folder: Path) -> dict[str, Held]:
    """Every tensor of a directory of safetensors, mapped, not read."""
    found: dict[str, Held] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            data = np.memmap(path, np.uint8, "r")
            size = int.from_bytes(data[:8].tobytes(), "little")
            if not 0 < size <= min(data.size - 8, _HEADER_LIMIT_BYTES):
                raise ValueError(f"a header of {size} bytes in a file of {data.size}")
            header = orjson.loads(data[8 : 8 + size].tobytes())
            header.pop("__metadata__", None)
            for name, told in header.items():
                start, end = told["data_offsets"]
                spec = TensorSpec(name=name, shape=tuple(told["shape"]), dtype=_FROM_SAFETENSORS[told["dtype"]])
                if not 0 <= start <= end <= data.size - 8 - size or end - start != spec.size_bytes:
                    raise ValueError(f"tensor {name} is not at [{start}, {end})")
                found[name] = Held(spec, data[8 + size + start : 8 + size + end])
        except (KeyError, TypeError, ValueError) as error:  # ValueError: pydantic's and orjson's too
            raise CorruptObject(str(path), f"is no safetensors file ({' '.join(str(error).split())[:200]})") from None
    if not found:
        raise BadInput(f"{folder}: no safetensors file there")
    return found


def version_of(folder: Path) -> str | None:
    """The version that `apply` made this directory for; None when something else made it."""
    try:
        told = orjson.loads((folder / MARKER).read_bytes())
        return str(told["version"])
    except FileNotFoundError:
        return None
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise CorruptObject(str(folder / MARKER), "names no version") from None


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _put_file(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    _sync(path)


def _check_base(base_dir: Path, told: VersionFiles) -> dict[str, Held]:
    """The base's tensors, each of them what the delta was made against."""
    try:
        marked = version_of(base_dir)
        if marked == told.version:
            raise WrongBase(f"{base_dir} holds {told.version} already; a delta is applied once")
        if marked is not None and marked != told.base_version:
            raise WrongBase(f"{base_dir} holds {marked}; {told.version} applies to {told.base_version}")
        base = open_tensors(base_dir)
    except (CorruptObject, BadInput) as error:
        raise WrongBase(f"base {told.base_version} of {told.version}: {error}") from None
    entries = told.entries
    if base.keys() != entries.keys():
        name = min(base.keys() ^ entries.keys())
        raise WrongBase(f"{base_dir}: tensor {name} is not in both the base and {told.version}")

    def check(held: Held) -> str | None:
        entry = entries[held.spec.name]
        if held.spec != entry.tensor:
            return f"is {held.spec}, the delta has {entry.tensor}"
        found = sha256_of(held.data)
        if found == entry.base_sha256:
            return None
        if found == entry.sha256:
            return f"is what {told.version} brings already; a delta is applied once"
        return f"has sha256 {found[:16]}, {told.base_version} has {str(entry.base_sha256)[:16]}"

    for name, problem in zip(base, _each(check, base.values()), strict=True):
        if problem:
            raise WrongBase(f"{base_dir}: tensor {name} {problem}")
    return base


def _unpacked(files: Files, told: VersionFiles, shard: Shard, base: Weights | None) -> list[np.ndarray]:
    """Content of every tensor of a shard, checked."""
    where = f"{files.where}/{shard.name}"
    try:
        data = memoryview(files.get(shard.name))
    except KeyError:
        raise CorruptObject(where, f"is missing though {MANIFEST} refers to it") from None
    if len(data) != shard.size_bytes:
        raise CorruptObject(where, f"has {len(data)} bytes, {MANIFEST} says {shard.size_bytes}")

    def one(entry: Entry) -> np.ndarray:
        name = entry.tensor.name
        try:
            made = decode(entry, data[entry.offset : entry.offset + entry.length], None if base is None else base[name])
        except ValueError as error:
            raise CorruptObject(where, f"tensor {name} {error}") from None
        found = sha256_of(made)
        if found != entry.sha256:
            raise CorruptObject(where, f"tensor {name} has sha256 {found[:16]}, {told.version} has {entry.sha256[:16]}")
        return made

    return _each(one, shard.entries)


def _write_safetensors(path: Path, entries: Sequence[Entry], contents: Sequence[np.ndarray]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in entries:
        end = at + entry.tensor.size_bytes
        dtype = _SAFETENSORS[entry.tensor.dtype]
        header[entry.tensor.name] = {"dtype": dtype, "shape": list(entry.tensor.shape), "data_offsets": [at, end]}
        at = end
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for content in contents:
            file.write(content.data)
        file.flush()
        os.fsync(file.fileno())


def holds(folder: Path, told: VersionFiles) -> bool:
    """Whether the directory is whole and each of its tensors what `told` brings."""
    try:
        if version_of(folder) != told.version:
            return False
        tensors = open_tensors(folder)
    except (CorruptObject, BadInput):
        return False
    wanted = {name: entry.sha256 for name, entry in told.entries.items()}
    return tensors.keys() == wanted.keys() and all(
        _each(lambda held: sha256_of(held.data) == wanted[held.spec.name], tensors.values())
    )


def is_version(path: Path) -> bool:
    """Whether `apply` made this directory, whole."""
    return (path / MARKER).is_file()


def is_unfinished(path: Path) -> bool:
    """Whether `apply` began this directory and did not end: one version is made at a time."""
    return path.is_dir() and re.fullmatch(r"\..+\.[0-9]+-[0-9a-f]{8}", path.name) is not None


def apply(base_dir: Path, files: Files, into: Path) -> VersionFiles:
    """Make `into` of the folder's version and the base directory (of a full version: its config files alone).

    `WrongBase`, `CorruptObject` and `BadInput` come before `into` exists. An `into` that holds the version is left.
    """
    told = read_version(files)
    if into.exists():
        if holds(into, told):
            return told
        raise BadInput(f"{into} exists and is not {told.version} whole; remove it")
    base = None if told.base_version is None else _check_base(base_dir, told)
    into.parent.mkdir(parents=True, exist_ok=True)
    temporary = into.parent / f".{into.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}"
    temporary.mkdir()
    try:
        where: dict[str, str] = {}
        for number, shard in enumerate(told.shards, start=1):
            name = f"model-{number:05}-of-{len(told.shards):05}.safetensors"
            _write_safetensors(temporary / name, shard.entries, _unpacked(files, told, shard, base))
            where |= {entry.tensor.name: name for entry in shard.entries}
        size = sum(entry.tensor.size_bytes for entry in told.entries.values())
        index = {"metadata": {"total_size": size}, "weight_map": where}
        _put_file(temporary / "model.safetensors.index.json", orjson.dumps(index))
        for path in sorted(base_dir.iterdir()):
            if path.is_file() and ".safetensors" not in path.name and path.name != MARKER:
                _put_file(temporary / path.name, path.read_bytes())
        _put_file(temporary / MARKER, orjson.dumps({"version": told.version, "base_version": told.base_version}))
        _sync(temporary)
        temporary.rename(into)
        _sync(into.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return told
