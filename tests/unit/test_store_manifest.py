"""The manifest is the commit: written once, the first writer wins, and what it commits is checked byte for byte."""

from __future__ import annotations

import orjson
import pytest

from rl360.errors import CorruptObject
from rl360.store.layout import manifest_key
from rl360.store.manifest import Manifest, commit_manifest, get_object, put_object, read_manifest
from tests.unit.memory_store import MemoryStore

KEY = manifest_key("r1", 3, "train")


def manifest(**changes: object) -> Manifest:
    return Manifest(run="r1", step=3, task="train", **changes)  # type: ignore[arg-type]


def test_nothing_is_committed_before_the_manifest() -> None:
    store = MemoryStore()
    put_object(store, "r1/steps/000003/x.msgpack", b"data")
    assert read_manifest(store, "r1", 3, "train") is None


def test_the_first_writer_wins_and_both_return_it() -> None:
    store = MemoryStore()
    first = commit_manifest(store, manifest(counts={"kept": 1}, info={"loss": 0.25}))
    second = commit_manifest(store, manifest(counts={"kept": 2}))
    assert first == second == read_manifest(store, "r1", 3, "train")
    assert first.counts == {"kept": 1} and first.info == {"loss": 0.25}
    assert first.finished_at > 0
    assert list(store.objects) == [KEY]


def test_an_object_that_is_there_already_is_what_gets_referenced() -> None:
    store = MemoryStore()
    first = put_object(store, "k", b"first")
    again = put_object(store, "k", b"second try")
    assert first == again
    assert get_object(store, again) == b"first"


@pytest.mark.parametrize("found", [b"other", b"datA", b"data+", b""])
def test_an_object_that_changed_is_refused(found: bytes) -> None:
    store = MemoryStore()
    ref = put_object(store, "k", b"data")
    store.objects["k"] = found
    with pytest.raises(CorruptObject, match="object k: is not what its manifest committed"):
        get_object(store, ref)


def test_an_object_that_is_gone_is_corruption_not_absence() -> None:
    store = MemoryStore()
    ref = put_object(store, "k", b"data")
    del store.objects["k"]
    with pytest.raises(CorruptObject, match="is missing though a committed object refers to it"):
        get_object(store, ref)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{", "is not a manifest"),
        (b"[]", "is not a manifest"),
        (orjson.dumps({"run": "r1", "step": 3}), "task: Field required"),
        (orjson.dumps({"run": "r1", "step": 3, "task": "train", "surprise": 1}), "surprise: Extra"),
        (orjson.dumps({"run": "r1", "step": 3, "task": "train", "schema_version": 2}), "schema version 2"),
        (
            orjson.dumps(
                {"run": "r1", "step": 3, "task": "t", "objects": [{"key": "k", "sha256": "0", "size_bytes": 1}]}
            ),
            "is not a manifest",
        ),
    ],
)
def test_a_manifest_that_is_none_is_refused(data: bytes, words: str) -> None:
    store = MemoryStore()
    store.objects[KEY] = data
    with pytest.raises(CorruptObject, match=words) as error:
        read_manifest(store, "r1", 3, "train")
    assert KEY in str(error.value) and "\n" not in str(error.value)
