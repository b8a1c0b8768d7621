"""A step's tasks that compute from what is stored, run again over a store that keeps their writes to itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import orjson

from rl360 import step_work
from rl360.config.run import RunConfig
from rl360.errors import BadInput, CorruptObject, Rl360Error, StoreUnavailable
from rl360.replay.compare import Compared, compared
from rl360.step_work import Produced
from rl360.store.codec import sha256_hex, unpack
from rl360.store.layout import manifest_key, step_prefix
from rl360.store.manifest import Manifest, read_manifest
from rl360.store.object_store import ObjectStore
from rl360.store.progress import LAST_TASK, step_folders, weight_version


def finished_steps(store: ObjectStore, run: str) -> list[int]:
    """Steps whose last task has committed, ascending."""
    return [step for step in step_folders(store, run) if store.exists(manifest_key(run, step, LAST_TASK))]


class Scratch:
    """Reads come from the store, writes stay here: a task run on it finds its inputs and changes nothing.

    remember: False for a trainer, whose kept actors are a whole model a step and are compared with nothing."""

    def __init__(self, store: ObjectStore, remember: bool = True) -> None:
        self._store, self._remember = store, remember
        self.written: dict[str, bytes] = {}

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def get_required(self, key: str) -> bytes:
        return self._store.get_required(key)

    def put_once(self, key: str, data: bytes) -> bool:
        if self._remember:
            self.written[key] = data
        return True


Work = Callable[[ObjectStore, RunConfig, int, bytes], Produced]  # the last: the run's verdict key


def _sample(store: ObjectStore, config: RunConfig, step: int, _key: bytes) -> Produced:
    """Under the wave size the step was planned with: a resume may have changed it since, or before."""
    planned = step_work.committed(store, config.run, step, "sample_groups").counts["wave_size"]
    rollout = config.rollout.model_copy(update={"wave_size": planned})
    return step_work.sample_groups(store, config.model_copy(update={"rollout": rollout}), step)


def _filter(store: ObjectStore, config: RunConfig, step: int, _key: bytes) -> Produced:
    return step_work.filter_groups(store, config, step, weight_version(store, config.run, step))


WORK: dict[str, Work] = {
    "sample_groups": _sample,
    "collect": step_work.collect,
    "filter_groups": _filter,
    "report": lambda store, config, step, _key: step_work.close_books(store, config, step)[0],
}


def manifest_of(store: ObjectStore, run: str, step: int, task: str) -> Manifest:
    """What is to be compared with; `BadInput` when the task has not committed."""
    found = read_manifest(store, run, step, task)
    if found is None:
        raise BadInput(
            f"task {task} of {run} step {step} has not committed: there is nothing to compare with; "
            f"{_committed(store, run, step)}"
        )
    return found


def _committed(store: ObjectStore, run: str, step: int) -> str:
    """What can be replayed instead."""
    found = [name for name in (*WORK, "train") if read_manifest(store, run, step, name) is not None]
    if found:
        return f"committed are {', '.join(found)}"
    steps = finished_steps(store, run)
    return f"the last committed step is {steps[-1]}" if steps else "no step of the run has committed"


def replay_task(store: ObjectStore, config: RunConfig, step: int, task: str, verdict_key: bytes) -> list[Compared]:
    """The task's objects and its manifest (what it says of them), stored and recomputed."""
    manifest = manifest_of(store, config.run, step, task)
    scratch = Scratch(store)
    try:
        produced = WORK[task](cast(Any, scratch), config, step, verdict_key)
    except StoreUnavailable:
        raise
    except Rl360Error as error:  # its inputs are not what was committed, or are refused now
        return [refused(task, f"manifests/{task}.json", error)]
    prefix = step_prefix(config.run, step)
    rows = [
        compare_bytes(task, key.removeprefix(prefix), _get(store, key), data) for key, data in scratch.written.items()
    ]
    said = manifest.model_dump(mode="json", include={"objects", "counts", "info"})
    objects = [ref.model_dump(mode="json") for ref in produced.objects]
    # through JSON, as the stored one went
    again = orjson.loads(orjson.dumps({"objects": objects, "counts": produced.counts, "info": produced.info}))
    return [*rows, compared(task, f"manifests/{task}.json", said, again)]


def refused(task: str, name: str, error: Rl360Error) -> Compared:
    """A result that is stored and cannot be computed again."""
    return Compared(task, name, "(whole)", "committed", f"refused: {error}")


def compare_bytes(task: str, name: str, stored: bytes | None, recomputed: bytes) -> Compared:
    """Two objects of the store, byte for byte; where they differ, the first value that does."""
    if stored == recomputed:
        return Compared(task, name)
    if stored is None:
        return Compared(task, name, "(whole)", "(absent)", f"{len(recomputed)} bytes")
    try:
        found = compared(task, name, _decoded(stored, name), _decoded(recomputed, name))
    except (CorruptObject, orjson.JSONDecodeError) as error:
        return Compared(task, name, "(whole)", f"undecodable: {error}", f"{len(recomputed)} bytes")
    if found.equal:  # the same values in another spelling
        return Compared(task, name, "(bytes)", f"sha256 {sha256_hex(stored)}", f"sha256 {sha256_hex(recomputed)}")
    return found


def _decoded(data: bytes, name: str) -> Any:
    return orjson.loads(data) if name.endswith(".json") else unpack(data, name)


def _get(store: ObjectStore, key: str) -> bytes | None:
    try:
        return store.get(key)
    except KeyError:
        return None
