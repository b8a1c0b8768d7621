"""Manifests: the commit of a task.

A task writes its objects first and its manifest last, by conditional put. A task whose manifest exists is done; a
second run of it returns that manifest and does nothing. Of two writers the first wins and both return the winner.
"""

from __future__ import annotations

import time
from typing import Any

import orjson
from pydantic import Field

from rl360.errors import CorruptObject
from rl360.store.codec import sha256_hex
from rl360.store.data import Data, commit, read
from rl360.store.layout import manifest_key
from rl360.store.object_store import ObjectStore

SCHEMA_VERSION = 1


class ObjectRef(Data):
    """A small reference to a payload: where it is and what its bytes must hash to."""

    key: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size_bytes: int = Field(ge=0)


class Manifest(Data):
    """What one task of one step produced. `counts` and `info` are small: what a person or the next task needs."""

    schema_version: int = SCHEMA_VERSION
    run: str
    step: int
    task: str
    objects: list[ObjectRef] = Field(default_factory=list)
    counts: dict[str, int] = Field(default_factory=dict)
    info: dict[str, Any] = Field(default_factory=dict)
    started_at: float = 0.0
    finished_at: float = 0.0


def put_object(store: ObjectStore, key: str, data: bytes) -> ObjectRef:
    """Write a payload once and return its reference.

    When the key is already taken (an earlier, killed try of the same task), the bytes there win: they are what any
    reader that already saw them relies on.
    """
    if not store.put_once(key, data):
        data = store.get_required(key)
    return ObjectRef(key=key, sha256=sha256_hex(data), size_bytes=len(data))


def get_object(store: ObjectStore, ref: ObjectRef) -> bytes:
    """Read a payload and check it against its reference (`CorruptObject` when it differs)."""
    return checked(store.get_required(ref.key), ref)


def checked(data: bytes, ref: ObjectRef) -> bytes:
    """`data`, which is what the reference says (else `CorruptObject`)."""
    if len(data) != ref.size_bytes or sha256_hex(data) != ref.sha256:
        raise CorruptObject(
            ref.key,
            f"is not what its manifest committed ({len(data)} bytes, sha256 {sha256_hex(data)[:12]}, "
            f"expected {ref.size_bytes} bytes, {ref.sha256[:12]})",
        )
    return data


def read_manifest(store: ObjectStore, run: str, step: int, task: str) -> Manifest | None:
    """The task's manifest, or None when the task has not committed."""
    key = manifest_key(run, step, task)
    manifest = read(store, key, Manifest, "is not a manifest")
    if manifest is not None and manifest.schema_version != SCHEMA_VERSION:
        raise CorruptObject(key, f"has schema version {manifest.schema_version}, this rl360 reads {SCHEMA_VERSION}")
    return manifest


def commit_manifest(store: ObjectStore, manifest: Manifest) -> Manifest:
    """Commit by conditional put; returns the committed manifest (an earlier one, when there is one)."""
    manifest = manifest.model_copy(update={"finished_at": manifest.finished_at or time.time()})
    data = orjson.dumps(manifest.model_dump(mode="json"), option=orjson.OPT_SORT_KEYS)
    of = manifest.run, manifest.step, manifest.task
    return commit(store, manifest_key(*of), manifest, data, lambda: read_manifest(store, *of))
