"""Merged samples, references to stored ones, and the record of an attempt: what travels from a rollout to the trainer.

The samples of one session are one object (`encode_samples`): a msgpack map whose last value is all arrays, raw,
little-endian and back to back, so that writing copies each array once and reading copies none. Readers refuse unknown
schema versions, wrong lengths, types and counts (`CorruptObject` naming the object) and never repair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
from pydantic import ValidationError

from rl360.config.run import explain
from rl360.errors import BadInput, CorruptObject
from rl360.harbor.verdict import Verdict
from rl360.ledger.outcomes import DROPPED, HAS_VERDICT, Outcome
from rl360.sessions.routing import RowForward
from rl360.store.codec import pack

SAMPLE_SCHEMA = 2
ATTEMPT_SCHEMA = 3
_ALIGN = 16  # arrays start at multiples of this in the object


def _plain_kinds(record: type[Any]) -> dict[str, str]:
    """The fields of a record that are plain values, with the type that each is stated with."""
    stated = {name: str(each.type).partition("[")[0] for name, each in record.__dataclass_fields__.items()}
    return {name: kind for name, kind in stated.items() if kind in ("str", "int", "bool", "dict")}


@dataclass(frozen=True)
class MergedSample:
    """One trajectory (the path to one kept leaf of a session) as the engine saw and sampled it.

    tokens `[T]` int32: prompt, sampled and observation ids in order.
    loss_mask `[T]` uint8: 1 exactly on the sampled ids that train here; a turn shared by several leaves does in one.
    logprobs `[T]` float32: the engine's log-probability of each id under the mask (natural log, at the sampling
    temperature, before top-p and top-k), 0 elsewhere.
    version_spans: (start, end, weight version) over `tokens`, half-open, in order, exactly the ids under the mask.
    routing_pieces: consecutive pieces `[rows, layers, top_k]`, uint8 or uint16, T-1 rows in all; none for a dense
    model. `routing` is their concatenation. row_forward `[T-1]` uint8: `RowForward` of each row.

    dropped: sampled tokens that train nowhere, by the name of their bucket (one of `DROPPED`), zero counts left out:
    `mask.sum() + sum(dropped) == sampled_tokens`. The first sample of a session carries the counts of what no kept leaf
    holds, so sums over its samples are the session's own.
    sampling_differs: turns that train here and were sampled with other parameters than the session's.
    canonical, matches: turns by how they were spelled, echoed messages by how loosely they matched.
    """

    attempt_id: str
    group_id: str
    task_id: str
    session_id: str
    tokens: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    version_spans: list[tuple[int, int, str]]
    sampled_tokens: int
    truncated: bool
    turns: int
    leaf: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    cached_tokens: int = 0
    prompt_tokens: int = 0
    reprefilled_rows: int = 0
    sampling_differs: int = 0
    routing_pieces: tuple[np.ndarray, ...] = ()
    row_forward: np.ndarray | None = None
    canonical: dict[str, int] = field(default_factory=dict)
    matches: dict[str, int] = field(default_factory=dict)

    @property
    def routing(self) -> np.ndarray | None:
        """Routed experts `[T-1, layers, top_k]`; None for a dense model. Copies unless there is one piece."""
        if len(self.routing_pieces) > 1:
            return np.concatenate(self.routing_pieces)
        return self.routing_pieces[0] if self.routing_pieces else None

    def check(self, key: str) -> MergedSample:
        """Return self when every length, dtype and count agrees; else `CorruptObject` naming `key`."""
        length = self.tokens.shape[0] if self.tokens.ndim == 1 else -1
        for name, dtype in (("tokens", np.int32), ("loss_mask", np.uint8), ("logprobs", np.float32)):
            _require_array(key, name, getattr(self, name), dtype, length)
        if self.loss_mask.size and int(self.loss_mask.max()) > 1:
            raise CorruptObject(key, f"loss_mask holds {int(self.loss_mask.max())}, expected 0 or 1")
        if not np.isfinite(self.logprobs).all():
            raise CorruptObject(key, "logprobs holds a value that is not finite")
        if np.any(self.logprobs[self.loss_mask == 0] != 0.0):
            raise CorruptObject(key, "logprobs is not 0 on an id that was not sampled")
        _check_sampled(key, int(np.count_nonzero(self.loss_mask)), self.dropped, self.sampled_tokens)
        edge = 0
        for start, end, _version in self.version_spans:
            if not edge <= start < end <= length:
                raise CorruptObject(
                    key, f"version span [{start}, {end}) is outside [{edge}, {length}) or overlaps another"
                )
            edge = end
        bounds = np.array([span[:2] for span in self.version_spans], dtype=np.int64).reshape(-1, 2)
        steps = np.zeros(length + 1, dtype=np.int8)
        steps[bounds[:, 0]] += 1
        steps[bounds[:, 1]] -= 1
        if not np.array_equal(np.cumsum(steps[:-1], dtype=np.int8), self.loss_mask):
            raise CorruptObject(key, "version spans do not cover exactly the sampled ids")
        self._check_routing(key, length - 1)
        return self

    def _check_routing(self, key: str, rows: int) -> None:
        if not self.routing_pieces:
            if self.row_forward is not None:
                raise CorruptObject(key, "row_forward without routing")
            return
        if self.row_forward is None:
            raise CorruptObject(key, "routing without row_forward")
        _require_array(key, "row_forward", self.row_forward, np.uint8, rows)
        if self.row_forward.size and int(self.row_forward.max()) > max(RowForward):
            raise CorruptObject(
                key, f"row_forward holds {int(self.row_forward.max())}, expected 0 to {max(RowForward)}"
            )
        first = self.routing_pieces[0]
        if first.ndim != 3 or first.dtype not in (np.uint8, np.uint16):
            raise CorruptObject(
                key, f"routing is {first.dtype} {first.shape}, expected uint8 or uint16 in 3 dimensions"
            )
        if any((piece.dtype, piece.shape[1:]) != (first.dtype, first.shape[1:]) for piece in self.routing_pieces):
            raise CorruptObject(key, "routing pieces differ in type or layout")
        found = sum(len(piece) for piece in self.routing_pieces)
        if found != rows:
            raise CorruptObject(key, f"routing has {found} rows, {rows + 1} tokens have {rows}")

    def to_wire(self) -> dict[str, Any]:
        """A plain dict, arrays as arrays: for msgpack of one's own, or JSON."""
        wire = {name: getattr(self, name) for name in _SAMPLE_FIELDS if name != "routing_pieces"}
        return {"schema_version": SAMPLE_SCHEMA, **wire, "routing": self.routing}

    def _pieces(self, name: str) -> tuple[np.ndarray, ...]:
        if name == "routing":
            return self.routing_pieces
        array = getattr(self, name)
        return () if array is None else (array,)


_ARRAYS = {
    "tokens": ("<i4",),
    "logprobs": ("<f4",),
    "loss_mask": ("|u1",),
    "row_forward": ("|u1",),
    "routing": ("|u1", "<u2"),
}
_OPTIONAL_ARRAYS = frozenset({"row_forward", "routing"})
_SAMPLE_FIELDS = tuple(MergedSample.__dataclass_fields__)
_WIRE_FIELDS = tuple("routing" if name == "routing_pieces" else name for name in _SAMPLE_FIELDS)
_SAMPLE_KINDS = _plain_kinds(MergedSample)


def encode_samples(samples: Sequence[MergedSample]) -> bytes:
    """The object of one session's samples: msgpack `{"schema_version", "samples": [...], "arrays": bin}`.

    In `samples` an array is `[dtype, shape]`; the bytes follow in `arrays` in that order, aligned, each copied once.
    """
    heads: list[dict[str, Any]] = []
    chunks: list[Any] = []
    size = 0
    for sample in samples:
        head = {name: getattr(sample, name) for name in _SAMPLE_FIELDS if name != "routing_pieces"}
        for name, dtypes in _ARRAYS.items():
            pieces = sample._pieces(name)
            head[name] = None
            if not pieces:
                continue
            stored = [np.ascontiguousarray(piece, piece.dtype.newbyteorder("<")) for piece in pieces]
            dtype = stored[0].dtype.str
            if dtype not in dtypes:
                raise BadInput(f"cannot store {name} of dtype {pieces[0].dtype}, use one of {dtypes}")
            head[name] = [dtype, [sum(len(piece) for piece in pieces), *pieces[0].shape[1:]]]
            nbytes = sum(piece.nbytes for piece in stored)
            chunks += [*stored, b"\0" * (-nbytes % _ALIGN)]
            size += nbytes + -nbytes % _ALIGN
        heads.append(head)
    head_bytes = b"\x83" + pack("schema_version") + pack(SAMPLE_SCHEMA) + pack("samples") + pack(heads) + pack("arrays")
    gap = -(len(head_bytes) + 5) % _ALIGN
    if gap + size >= 1 << 32:
        raise BadInput(f"samples of {size} bytes, an object holds less than 4 GiB")
    # one allocation, one copy: join takes the arrays' own buffers
    return b"".join([head_bytes, b"\xc6", (gap + size).to_bytes(4, "big"), b"\0" * gap, *chunks])


def decode_samples(data: bytes | bytearray | memoryview, key: str) -> tuple[MergedSample, ...]:
    """Read what `encode_samples` wrote. Arrays are read-only views of `data`: nothing is copied but the small fields.

    `CorruptObject` naming `key` when it is anything else.
    """
    heads, offset = _read_heads(data, key)
    offset += -offset % _ALIGN
    samples = []
    for head in heads:
        fields = _fields(head, key, "sample", None, _WIRE_FIELDS)
        for name, dtypes in _ARRAYS.items():
            if fields[name] is None and name in _OPTIONAL_ARRAYS:
                continue
            fields[name], offset = _view(data, offset, fields[name], f"{name} of a sample", dtypes, key)
        samples.append(_sample(fields, key))
    if offset != len(data):
        raise CorruptObject(key, f"arrays end at byte {offset}, the object has {len(data)}")
    return tuple(samples)


def _read_heads(data: bytes | bytearray | memoryview, key: str) -> tuple[list[Any], int]:
    """The `samples` of the object and the offset of its array bytes. Reads (and copies) only what precedes these."""
    view = memoryview(data)
    fed = 1 << 16
    while True:
        unpacker = msgpack.Unpacker(max_buffer_size=0, raw=False, strict_map_key=False)
        unpacker.feed(view[:fed])
        try:
            found = [unpacker.read_map_header(), *(unpacker.unpack() for _ in range(5))]
            break
        except msgpack.OutOfData:
            if fed >= len(view):
                raise CorruptObject(key, f"is cut short: {len(view)} bytes") from None
            fed *= 2
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise CorruptObject(key, f"is not an object of samples ({error})") from None
    size, named, version, samples, heads, arrays = found
    if named != "schema_version" or version != SAMPLE_SCHEMA or type(version) is not int:
        raise CorruptObject(key, f"{named!r} is {version!r}, this rl360 reads schema_version {SAMPLE_SCHEMA}")
    if (size, samples, arrays) != (3, "samples", "arrays") or not isinstance(heads, list):
        raise CorruptObject(key, "is not a map of schema_version, samples and arrays")
    start = unpacker.tell() + 5
    if bytes(view[start - 5 : start - 4]) != b"\xc6" or int.from_bytes(view[start - 4 : start]) != len(view) - start:
        raise CorruptObject(key, f"its arrays do not fill the {len(view)} bytes exactly")
    return heads, start


def _view(
    data: Any, offset: int, described: Any, what: str, dtypes: tuple[str, ...], key: str
) -> tuple[np.ndarray, int]:
    """The array `[dtype, shape]` at `offset` as a read-only view, and the offset of the next one."""
    dtype, shape = described if isinstance(described, list) and len(described) == 2 else (None, None)
    if dtype not in dtypes:
        raise CorruptObject(key, f"{what} is {str(dtype)[:20]!r}, expected {' or '.join(dtypes)}")
    if not isinstance(shape, list) or not shape or not all(type(n) is int and n >= 0 for n in shape):
        raise CorruptObject(key, f"{what} has shape {shape!r}")
    count, kind = math.prod(shape), np.dtype(dtype)
    end = offset + count * kind.itemsize
    if end > len(data):
        raise CorruptObject(key, f"{what} ends at byte {end}, the object has {len(data)}")
    array = np.frombuffer(data, kind, count, offset).reshape(shape)
    array.flags.writeable = False
    return array, end + -end % _ALIGN


def _sample(fields: dict[str, Any], key: str) -> MergedSample:
    _refuse_other_kinds(fields, key, "sample", _SAMPLE_KINDS)
    for name, kind in _SAMPLE_KINDS.items():
        if kind == "int" and fields[name] < 0:
            raise CorruptObject(key, f"sample field {name} is {fields[name]}, a count is at least 0")
    for name in ("canonical", "matches"):
        if any(type(k) is not str or type(n) is not int for k, n in fields[name].items()):
            raise CorruptObject(key, f"sample field {name} is not a map of names to counts")
    try:
        fields["version_spans"] = [(int(a), int(b), str(v)) for a, b, v in fields["version_spans"]]
    except (TypeError, ValueError):
        raise CorruptObject(key, "sample field version_spans is not a list of (start, end, version)") from None
    routing = fields.pop("routing")
    return MergedSample(**fields, routing_pieces=() if routing is None else (routing,)).check(key)


@dataclass(frozen=True)
class LeafCounts:
    """One merged sample in numbers: all that filtering and the ledger need of it. Tokens unless named otherwise.

    tokens == prompt + observation + trainable (prompt: before the first trainable id; observation: between and after);
    trainable + sum(dropped) == sampled_tokens, `dropped` as in the sample.
    versions: the weight versions of the trainable ids, in the order they appear. decode_rows: of `routing_rows` those
    a decode step wrote; reprefilled_rows: held rows whose KV cache a later forward had to rebuild.
    """

    tokens: int
    trainable: int
    prompt: int
    observation: int
    sampled_tokens: int
    dropped: dict[str, int]
    versions: tuple[str, ...]
    truncated: bool
    turns: int
    cached_tokens: int
    prompt_tokens: int
    sampling_differs: int
    routing_rows: int
    decode_rows: int
    reprefilled_rows: int

    @classmethod
    def of(cls, sample: MergedSample) -> LeafCounts:
        """Count a checked sample."""
        trainable = int(np.count_nonzero(sample.loss_mask))
        prompt = int(sample.loss_mask.argmax()) if trainable else len(sample.tokens)
        forward = sample.row_forward
        return cls(
            tokens=len(sample.tokens),
            trainable=trainable,
            prompt=prompt,
            observation=len(sample.tokens) - prompt - trainable,
            sampled_tokens=sample.sampled_tokens,
            dropped=sample.dropped,
            versions=tuple(dict.fromkeys(version for _start, _end, version in sample.version_spans)),
            truncated=sample.truncated,
            turns=sample.turns,
            cached_tokens=sample.cached_tokens,
            prompt_tokens=sample.prompt_tokens,
            sampling_differs=sample.sampling_differs,
            routing_rows=0 if forward is None else len(forward),
            decode_rows=0 if forward is None else int(np.count_nonzero(forward == RowForward.DECODE)),
            reprefilled_rows=sample.reprefilled_rows,
        )

    def check(self, key: str) -> LeafCounts:
        """Return self when the sums hold; else `CorruptObject` naming `key`."""
        if self.prompt + self.observation + self.trainable != self.tokens:
            raise CorruptObject(key, f"prompt, observation and trainable tokens are not the {self.tokens} of the leaf")
        _check_sampled(key, self.trainable, self.dropped, self.sampled_tokens)
        return self


_LEAF_FIELDS = tuple(LeafCounts.__dataclass_fields__)
_LEAF_KINDS = _plain_kinds(LeafCounts)


@dataclass(frozen=True)
class SampleRef:
    """Where the samples of one session are stored, and what is in them; under 2 KB packed for up to 8 leaves."""

    key: str
    sha256: str
    size_bytes: int
    leaves: tuple[LeafCounts, ...]

    @property
    def sampled_tokens(self) -> int:
        """Every id the engine sampled for the session, kept or not."""
        return sum(leaf.sampled_tokens for leaf in self.leaves)

    def to_wire(self) -> dict[str, Any]:
        """A msgpack- and JSON-ready dict: one list a count, one entry a leaf."""
        columns: dict[str, Any] = {name: [getattr(leaf, name) for leaf in self.leaves] for name in _LEAF_FIELDS}
        columns["versions"] = [list(versions) for versions in columns["versions"]]
        return {"key": self.key, "sha256": self.sha256, "size_bytes": self.size_bytes, "leaves": columns}

    @classmethod
    def from_wire(cls, wire: Any, key: str) -> SampleRef:
        """Rebuild and check; `key` names the object the reference stands in."""
        fields = _fields(wire, key, "sample reference", None, ("key", "sha256", "size_bytes", "leaves"))
        digest, size = fields["sha256"], fields["size_bytes"]
        if type(fields["key"]) is not str or not fields["key"]:
            raise CorruptObject(key, f"sample reference to {fields['key']!r}, expected an object's name")
        if type(digest) is not str or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise CorruptObject(key, f"sample reference with digest {digest!r}, expected 64 hex digits")
        if type(size) is not int or size <= 0:
            raise CorruptObject(key, f"sample reference of {size!r} bytes")
        columns = _fields(fields["leaves"], key, "leaves", None, _LEAF_FIELDS)
        count = len(columns["tokens"]) if isinstance(columns["tokens"], list) else 0
        for name, column in columns.items():
            if not isinstance(column, list) or len(column) != count or not all(_leaf_value(name, v) for v in column):
                raise CorruptObject(key, f"leaves field {name} is not one valid value for each of {count} leaves")
        if not count:
            raise CorruptObject(key, "sample reference without leaves")
        columns["versions"] = [tuple(versions) for versions in columns["versions"]]
        leaves = tuple(LeafCounts(*row).check(key) for row in zip(*columns.values(), strict=True))
        return cls(fields["key"], digest, size, leaves)


def _leaf_value(name: str, value: Any) -> bool:
    if name == "versions":
        return isinstance(value, list | tuple) and all(type(version) is str for version in value)
    return type(value).__name__ == _LEAF_KINDS[name] and (type(value) is not int or value >= 0)


@dataclass(frozen=True)
class AttemptRecord:
    """One try of one attempt: what the rollout task writes, and the only thing later tasks read.

    `verdict` is present exactly when `outcome` is passed, failed or truncated. `stored` refers to the merged samples;
    None when there are none: `unmerged_tokens` is then what the session server said it had sampled, 0 when it could not
    say. `phases_s` are seconds by phase. `cleanup_evidence` is how its processes were seen to be gone, or what is not.
    """

    attempt_id: str
    group_id: str
    task_id: str
    try_index: int
    outcome: Outcome
    verdict: Verdict | None
    exit_status: str
    session_id: str
    stored: SampleRef | None
    domain: str = ""
    detail: str = ""
    started_at: float = 0.0
    finished_at: float = 0.0
    phases_s: dict[str, float] = field(default_factory=dict)
    agent_metrics: dict[str, float] = field(default_factory=dict)
    cleanup_confirmed: bool = False
    cleanup_evidence: str = ""
    unmerged_tokens: int = 0

    @property
    def sampled_tokens(self) -> int:
        return self.stored.sampled_tokens if self.stored is not None else self.unmerged_tokens

    def check(self, key: str) -> AttemptRecord:
        """Return self when outcome, verdict and stored sample agree; else `CorruptObject`."""
        if (self.verdict is not None) != (self.outcome in HAS_VERDICT):
            raise CorruptObject(
                key, f"outcome {self.outcome} with verdict {self.verdict!r}: only a verified attempt has one"
            )
        if self.verdict is not None and (self.verdict.attempt_id, self.verdict.task_id) != (
            self.attempt_id,
            self.task_id,
        ):
            raise CorruptObject(key, f"verdict of {self.verdict.attempt_id} on attempt {self.attempt_id}")
        if self.stored is not None and self.attempt_id not in self.stored.key:
            raise CorruptObject(key, f"sample {self.stored.key} on attempt {self.attempt_id}")
        if self.unmerged_tokens < 0 or (self.unmerged_tokens and self.stored is not None):
            raise CorruptObject(
                key, f"{self.unmerged_tokens} unmerged tokens: a count, and only without stored samples"
            )
        return self

    def to_wire(self) -> dict[str, Any]:
        """A msgpack-ready dict."""
        wire: dict[str, Any] = {
            "schema_version": ATTEMPT_SCHEMA,
            **{name: getattr(self, name) for name in _ATTEMPT_FIELDS},
        }
        wire["outcome"] = str(self.outcome)
        wire["verdict"] = self.verdict.model_dump() if self.verdict is not None else None
        wire["stored"] = self.stored.to_wire() if self.stored is not None else None
        return wire

    @classmethod
    def from_wire(cls, wire: Any, key: str) -> AttemptRecord:
        """Rebuild and check; `key` names the object in errors. Records of schema 2 give no evidence of the cleanup."""
        old = isinstance(wire, dict) and wire.get("schema_version") == 2
        said = _ATTEMPT_FIELDS if not old else tuple(name for name in _ATTEMPT_FIELDS if name != "cleanup_evidence")
        fields = {"cleanup_evidence": "", **_fields(wire, key, "attempt", 2 if old else ATTEMPT_SCHEMA, said)}
        _refuse_other_kinds(fields, key, "attempt", _ATTEMPT_KINDS)
        for name in ("phases_s", "agent_metrics"):
            for of, value in fields[name].items():
                if type(of) is not str or type(value) not in (int, float):
                    raise CorruptObject(key, f"attempt field {name} holds {of!r}: {value!r}, expected numbers by name")
        try:
            fields["outcome"] = Outcome(fields["outcome"])
            verdict = fields["verdict"]
            fields["verdict"] = Verdict.model_validate(verdict) if verdict is not None else None
        except ValidationError as error:
            raise CorruptObject(key, f"bad verdict ({explain(error)})") from None
        except ValueError as error:
            raise CorruptObject(key, f"bad outcome ({error})") from None
        if fields["stored"] is not None:
            fields["stored"] = SampleRef.from_wire(fields["stored"], key)
        return cls(**fields).check(key)


_ATTEMPT_FIELDS = tuple(AttemptRecord.__dataclass_fields__)
_ATTEMPT_KINDS = _plain_kinds(AttemptRecord)


def _require_array(key: str, name: str, array: np.ndarray, dtype: type[np.generic], length: int) -> None:
    if array.dtype != dtype or array.shape != (length,):
        raise CorruptObject(key, f"{name} is {array.dtype} {array.shape}, expected {np.dtype(dtype)} ({length},)")


def _check_sampled(key: str, trainable: int, dropped: dict[str, int], sampled: int) -> None:
    """Every sampled token is under the mask or in one bucket of `dropped`, which names only those that took some."""
    for name, count in dropped.items():
        if name not in DROPPED or type(count) is not int or count <= 0:
            raise CorruptObject(key, f"dropped holds {name!r}: {count!r}, expected tokens in {', '.join(DROPPED)}")
    total = sum(dropped.values())
    if trainable + total != sampled:
        raise CorruptObject(key, f"trainable {trainable} + dropped {total} tokens is not the {sampled} sampled")


def _refuse_other_kinds(fields: dict[str, Any], key: str, what: str, kinds: dict[str, str]) -> None:
    for name, kind in kinds.items():
        found = type(fields[name]).__name__
        if found != kind:
            raise CorruptObject(key, f"{what} field {name} is of type {found}, expected {kind}")


def _fields(wire: Any, key: str, what: str, schema: int | None, names: tuple[str, ...]) -> dict[str, Any]:
    """Exactly the fields `names` of a map, and its `schema_version` where one is given."""
    if not isinstance(wire, dict):
        raise CorruptObject(key, f"{what} is {type(wire).__name__}, expected a map")
    if schema is not None and wire.get("schema_version") != schema:
        raise CorruptObject(key, f"{what} schema version {wire.get('schema_version')!r}, this rl360 reads {schema}")
    missing = [name for name in names if name not in wire]
    unknown = sorted(map(str, set(wire) - set(names) - ({"schema_version"} if schema is not None else set())))
    if missing or unknown:
        raise CorruptObject(key, f"{what} lacks {missing} and has unknown {unknown}")
    return {name: wire[name] for name in names}
