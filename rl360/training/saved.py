"""Which checkpoints a run has: their manifests, which of them stay, and the one that a forked run starts from.

Needs no torch: flows and the command line ask here. Of a fork that starts from a checkpoint and the pruning that
deletes it, whoever writes the checkpoint's claim first goes on, and the other gives way.
"""

from __future__ import annotations

from typing import Literal

from rl360.config.run import ParentConfig, RunConfig
from rl360.errors import BadInput, CorruptObject
from rl360.store.data import Data, read
from rl360.store.layout import check_run, checkpoint_prefix
from rl360.store.manifest import ObjectRef
from rl360.store.object_store import ObjectStore

_KEPT, _DELETED = b"kept: a run was forked from here", b"being deleted"
_TENTH = 10


class CheckpointManifest(Data):
    """A whole checkpoint: where its tensors are and where in the run it stands."""

    schema_version: Literal[1] = 1
    run: str
    step: int
    next_step: int
    version: int
    weights_digest: str
    withheld_updates: int = 0  # of the versions so far, those in a critic's warm-up, which left the policy as it was
    critic_digest: str | None = None
    critic_updates: int = 0
    layout: str
    objects: dict[str, ObjectRef]


def manifest_key(run: str, step: int) -> str:
    return checkpoint_prefix(run, step) + "manifest.json"


def read_manifest(store: ObjectStore, run: str, step: int) -> CheckpointManifest | None:
    return read(store, manifest_key(run, step), CheckpointManifest, "is no checkpoint manifest")


def _steps(store: ObjectStore, run: str) -> list[int]:
    """Steps of which anything of a checkpoint is stored, newest first. By objects: a store may list emptied folders."""
    prefix = f"{check_run(run)}/checkpoints/"
    names = {key.removeprefix(prefix).partition("/")[0] for key in store.list(prefix)}
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def latest(store: ObjectStore, run: str, up_to: int | None = None) -> CheckpointManifest | None:
    """The newest committed checkpoint (of step `up_to` at most); one whose writing was cut off has no manifest and does
    not count."""
    for step in _steps(store, run):
        if (up_to is None or step <= up_to) and (found := read_manifest(store, run, step)) is not None:
            return found
    return None


def start_of_fork(store: ObjectStore, config: RunConfig) -> CheckpointManifest | None:
    """The checkpoint that a forked run starts from, as the state before its step 0; None when it has no parent."""
    if (parent := config.parent) is None:
        return None
    key, found = manifest_key(parent.run, parent.step), read_manifest(store, parent.run, parent.step)
    if found is None:
        raise CorruptObject(key, f"is missing, and run {config.run} starts from it")
    if found.weights_digest != parent.weights_digest:
        raise CorruptObject(key, f"holds weights {found.weights_digest[:12]}, {config.run} names others as its start")
    return found.model_copy(update={"next_step": 0, "version": 0})


def parent_at(store: ObjectStore, config: RunConfig, from_step: int | None) -> ParentConfig:
    """The run of `config` as a parent: its newest checkpoint, or the newest of step `from_step` at most."""
    found = latest(store, config.run, from_step)
    if found is None:
        steps = [str(step) for step in reversed(_steps(store, config.run)) if read_manifest(store, config.run, step)]
        where = "" if from_step is None else f" at or before step {from_step}"
        raise BadInput(f"run {config.run} has no checkpoint{where}; it has those after {', '.join(steps) or 'no step'}")
    before = (config.parent.steps_before, config.parent.updates_before) if config.parent else (0, 0)
    return ParentConfig(
        run=config.run,
        step=found.step,
        weights_digest=found.weights_digest,
        steps_before=found.next_step + before[0],
        updates_before=found.version + before[1],
    )


def _claim_key(run: str, step: int) -> str:
    return checkpoint_prefix(run, step) + "claim"


def _claim(store: ObjectStore, run: str, step: int, wish: bytes) -> bool:
    key = _claim_key(run, step)
    try:
        return store.put_once(key, wish) or store.get(key) == wish
    except KeyError:  # another's, who is done with it
        return False


def keep_for_fork(store: ObjectStore, run: str, step: int) -> None:
    """From now on the checkpoint is never pruned. `BadInput`, and no claim, when it is being deleted or is gone."""
    there = _claim(store, run, step, _KEPT)
    if there and not store.exists(manifest_key(run, step)):  # pruned, its claim too, since it was looked at
        store.delete(_claim_key(run, step))
        there = False
    if not there:
        raise BadInput(
            f"checkpoint {step} of {run} is deleted or being deleted (trainer.keep_checkpoints); fork from another one"
        )


def prune(store: ObjectStore, run: str, keep: int, every: int) -> list[int]:
    """Delete what is older than the newest `keep` whole checkpoints (0: nothing), but every tenth (a multiple of
    10 * `every` steps) and what forks start from; returns the steps. What was cut off is finished by the next pruning.
    """
    steps = _steps(store, run)
    whole = [step for step in steps if keep and store.exists(manifest_key(run, step))][:keep]
    old = [step for step in steps if len(whole) == keep > 0 and step < whole[-1] and (step + 1) % (_TENTH * every)]
    gone = [step for step in old if _claim(store, run, step, _DELETED)]
    for step in gone:
        first, last = manifest_key(run, step), _claim_key(run, step)
        # a manifest's tensors are there; a claim outlives all else
        for key in (first, *(set(store.list(checkpoint_prefix(run, step))) - {first, last}), last):
            store.delete(key)
    return gone
