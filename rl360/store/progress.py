"""How far a run is, read from its manifests alone: they, not any process's memory, say what is done."""

from __future__ import annotations

from rl360.errors import BadInput
from rl360.store.layout import check_run, manifest_key
from rl360.store.manifest import read_manifest
from rl360.store.object_store import ObjectStore

LAST_TASK = "report"


def step_folders(store: ObjectStore, run: str) -> list[int]:
    """Steps of which anything is stored, ascending."""
    return [int(name) for name in store.list_folders(f"{check_run(run)}/steps/") if name.isdigit()]


def next_step(store: ObjectStore, run: str) -> int:
    """The first step that is not finished: where a run starts or goes on."""
    for step in reversed(step_folders(store, run)):
        if store.exists(manifest_key(run, step, LAST_TASK)):
            return step + 1
    return 0


def refuse_nonfinite(store: ObjectStore, run: str, step: int, limit: int) -> None:
    """`BadInput` when the `limit` steps right before `step` all trained on nothing finite: one more would be the same,
    at the price of its sampling."""
    earlier = range(max(0, step - limit), step)
    found = [read_manifest(store, run, each, "train") for each in reversed(earlier)]
    if len(found) == limit and all(each is not None and each.info.get("status") == "nonfinite" for each in found):
        raise BadInput(
            f"run {run}: loss or gradient of steps {earlier[0]} to {earlier[-1]} was not finite, they changed nothing; "
            f"a run stops after {limit} in a row (trainer.max_nonfinite_steps). Raise that to go on as it is, or fork "
            "the run with another objective or learning rate"
        )


def weight_version(store: ObjectStore, run: str, step: int) -> str:
    """The version `step` samples from: `run:k` with k optimizer steps applied before it.

    `BadInput` when the step before it has not trained: there is no such version.
    """
    if step == 0:
        return f"{run}:0"
    trained = read_manifest(store, run, step - 1, "train")
    if trained is None:
        raise BadInput(
            f"step {step} of {run} cannot start: step {step - 1} has not trained; start it without a step number, or "
            f"at step {next_step(store, run)}"
        )
    return f"{run}:{trained.info['version_after']}"
