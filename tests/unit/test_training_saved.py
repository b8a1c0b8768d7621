"""Which checkpoints stay, and what a fork starts from: over a store that may stop in the middle of a pruning."""

from __future__ import annotations

from typing import Any, cast

import pytest

from rl360.config.run import RunConfig
from rl360.errors import BadInput, CorruptObject, StoreUnavailable
from rl360.store.layout import checkpoint_prefix
from rl360.training import saved
from tests.unit.memory_store import MemoryStore


def store_with(*steps: int, run: str = "r1") -> Any:
    store = MemoryStore()
    for step in steps:
        put(store, step, run)
    return cast(Any, store)


def put(store: MemoryStore, step: int, run: str = "r1", version: int | None = None) -> None:
    manifest = saved.CheckpointManifest(
        run=run, step=step, next_step=step + 1, version=step + 1 if version is None else version,
        weights_digest=f"{step:064x}", layout="dp1", objects={},
    )  # fmt: skip
    store.put(checkpoint_prefix(run, step) + "weights-0.safetensors", b"w")
    store.put(saved.manifest_key(run, step), manifest.model_dump_json().encode())


def left(store: Any) -> list[int]:
    return sorted({int(key.split("/")[2]) for key in store.objects})


def test_the_newest_and_every_tenth_stay() -> None:
    store = store_with(*range(4, 130, 5))
    gone = saved.prune(store, "r1", keep=3, every=5)
    assert left(store) == [49, 99, 119, 124, 129]
    assert sorted([*gone, *left(store)]) == list(range(4, 130, 5))
    assert saved.prune(store, "r1", keep=3, every=5) == []


@pytest.mark.parametrize("keep", [0, 3, 4])
def test_nothing_goes_before_there_are_more_than_stay(keep: int) -> None:
    store = store_with(0, 1, 2)
    assert saved.prune(store, "r1", keep, every=1) == []
    assert left(store) == [0, 1, 2]


def test_one_whose_writing_was_cut_off_does_not_count_as_kept() -> None:
    """Without it the only whole checkpoint would be deleted."""
    store = store_with(0, 1)
    store.delete(saved.manifest_key("r1", 1))
    assert saved.prune(store, "r1", 1, every=1) == []
    put(store, 2)
    assert sorted(saved.prune(store, "r1", 1, every=1)) == [0, 1]
    assert left(store) == [2]


def test_what_a_fork_starts_from_stays_and_what_is_being_deleted_is_no_start() -> None:
    store = store_with(0, 1, 2, 3)
    saved.keep_for_fork(store, "r1", 1)
    saved.keep_for_fork(store, "r1", 1)
    deleted: list[str] = []
    whole_delete = store.delete

    def cut_off(key: str) -> None:
        if deleted:
            raise StoreUnavailable("away")
        deleted.append(key)
        whole_delete(key)

    store.delete = cut_off
    with pytest.raises(StoreUnavailable):
        saved.prune(store, "r1", 1, every=1)
    assert deleted == [saved.manifest_key("r1", 2)]  # never a manifest whose tensors are gone
    with pytest.raises(BadInput, match="checkpoint 2 of r1 is deleted or being deleted"):
        saved.keep_for_fork(store, "r1", 2)
    store.delete = whole_delete
    assert saved.prune(store, "r1", 1, every=1) == [2, 0]
    assert left(store) == [1, 3]


def test_a_checkpoint_that_is_gone_cannot_be_kept_and_no_claim_stays() -> None:
    """Looked at, pruned, and then claimed: the claim would keep an empty folder for ever, and stand for a start."""
    store = store_with(0, 1, 2)
    saved.prune(store, "r1", 1, every=1)
    with pytest.raises(BadInput, match="checkpoint 0 of r1 is deleted or being deleted"):
        saved.keep_for_fork(store, "r1", 0)
    assert left(store) == [2]
    held = store.put_once

    def taken_and_let_go(key: str, data: bytes) -> bool:
        """Another's claim, gone before it can be read."""
        return False if key.endswith("claim") else held(key, data)

    store.put_once = taken_and_let_go
    with pytest.raises(BadInput, match="checkpoint 2 of r1 is deleted or being deleted"):
        saved.keep_for_fork(store, "r1", 2)
    put(store, 3)
    assert saved.prune(store, "r1", 1, every=1) == [] and left(store) == [2, 3]


def test_a_parent_is_the_newest_checkpoint_at_or_before_a_step() -> None:
    store = store_with(4, 9, 14)
    config = RunConfig(run="r1")
    assert saved.parent_at(store, config, None).step == 14
    found = saved.parent_at(store, config, 13)
    assert (found.step, found.steps_before, found.updates_before) == (9, 10, 10)
    grandchild = saved.parent_at(store, RunConfig(run="r1", parent=found), 4)
    assert (grandchild.steps_before, grandchild.updates_before) == (15, 15)
    with pytest.raises(BadInput, match="run r1 has no checkpoint at or before step 3; it has those after 4, 9, 14"):
        saved.parent_at(store, config, 3)
    with pytest.raises(BadInput, match="run r2 has no checkpoint; it has those after no step"):
        saved.parent_at(store, RunConfig(run="r2"), None)


def test_a_fork_starts_from_exactly_what_it_names() -> None:
    store = store_with(4)
    assert saved.start_of_fork(store, RunConfig(run="r1")) is None
    fork = RunConfig(run="f1", parent=saved.parent_at(store, RunConfig(run="r1"), None))
    start = saved.start_of_fork(store, fork)
    assert start is not None and (start.run, start.step, start.next_step, start.version) == ("r1", 4, 0, 0)
    other = fork.model_copy(update={"parent": fork.parent.model_copy(update={"weights_digest": "e" * 64})})
    with pytest.raises(CorruptObject, match=r"r1/checkpoints/000004/manifest\.json: holds weights 0000"):
        saved.start_of_fork(store, other)
    store.delete(saved.manifest_key("r1", 4))
    with pytest.raises(CorruptObject, match="is missing, and run f1 starts from it"):
        saved.start_of_fork(store, fork)
