"""Ledgers in the store: read a run's, audit and list runs. Reads refuse what does not decode (`CorruptObject`)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson

from rl360.errors import BadInput, CorruptObject
from rl360.ledger.checks import NO_STEP, Check, check_ledger, equal
from rl360.ledger.step import LEDGER_NAME, StepLedger
from rl360.store.codec import unpack
from rl360.store.layout import RUN_PATTERN, check_run, run_config_key, run_target_key, step_key
from rl360.store.manifest import checked, read_manifest
from rl360.store.object_store import ObjectStore
from rl360.store.progress import LAST_TASK

FIRST_TASK = "sample_groups"
_READERS = 8


def read_step(store: ObjectStore, run: str, step: int) -> StepLedger:
    """The ledger of one step; `BadInput` when that step has none, `CorruptObject` when it is not what was committed."""
    key = step_key(run, step, LEDGER_NAME)
    try:
        data = store.get(key)
    except KeyError:
        steps = ledger_steps(store, run)
        known = f"steps {steps[0]} to {steps[-1]} have one" if steps else "no step of it has one yet"
        raise BadInput(f"run {run} has no ledger for step {step}; {known}") from None
    closed = read_manifest(store, run, step, LAST_TASK)
    for ref in closed.objects if closed is not None else ():
        if ref.key == key:
            checked(data, ref)
    return _decode(data, key, run, step)


def iter_run(store: ObjectStore, run: str) -> Iterator[StepLedger]:
    """The ledgers of a run in step order, one in memory at a time; `BadInput` when there is no such run."""
    for step in ledger_steps(store, run):
        yield read_step(store, run, step)


def read_run(store: ObjectStore, run: str) -> list[StepLedger]:
    """All of `iter_run`, for runs that fit in memory."""
    return list(iter_run(store, run))


def audit_run(ledgers: Iterable[StepLedger]) -> Iterator[tuple[StepLedger, list[Check]]]:
    """Each ledger of a run, in step order, with all its checks and those across steps: nothing trained twice, each step
    trained the version that the one before it left, and one that took no optimizer step left its weights to the bit.

    Lazy: a long run's ledgers are gigabytes, so callers keep what they need of one before they take the next.
    """
    trained: set[str] = set()
    left = None
    for ledger in ledgers:
        checks = [*check_ledger(ledger, trained)]
        if left is not None and left[0] == ledger.step - 1:
            if ledger.version_before is not None:
                name = "weights as the step before left them"
                checks.append(equal(name, "version before", ledger.version_before, "version left", left[1]))
            if ledger.train.status in NO_STEP:
                moved = int(ledger.train.weights_digest != left[2])
                checks.append(equal("same weights where no step was taken", "digests that differ", moved, "allowed", 0))
        yield ledger, checks
        trained.update(ledger.trained_ids)
        left = ledger.step, ledger.train.version_after, ledger.train.weights_digest


def ledger_steps(store: ObjectStore, run: str) -> list[int]:
    """The steps of a run that have a ledger, ascending; `BadInput` naming the known runs when there is no such run."""
    if not store.exists(run_config_key(check_run(run))):
        known = run_names(store)
        raise BadInput(f"no run {run!r} in the store; known runs: {', '.join(known) or 'none yet'}")
    folders = [name for name in store.list_folders(f"{run}/steps/") if name.isdigit()]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="ledgers") as readers:
        present = list(readers.map(lambda name: store.exists(step_key(run, int(name), LEDGER_NAME)), folders))
    return [int(name) for name, there in zip(folders, present, strict=True) if there]


def run_names(store: ObjectStore) -> list[str]:
    """The runs in the store, by name."""
    return [
        name
        for name in store.list_folders("")
        if re.fullmatch(RUN_PATTERN, name) and store.exists(run_config_key(name))
    ]


def list_runs(store: ObjectStore) -> list[dict[str, Any]]:
    """The runs of the store, oldest first: `run`, `steps` (ledgers written), `state`, `target_steps`, `started_at`.

    `started_at` is when the first task of the first step began, unix seconds; None (sorted last) before that.
    `state` is what the store can prove: `new` (no step closed), `open` (fewer steps closed than the config asks for)
    or `done`. Whether a flow is at work right now only Prefect knows.
    """
    runs = [_describe(store, run) for run in run_names(store)]
    return sorted(runs, key=lambda entry: (entry["started_at"] or math.inf, entry["run"]))


def load_target(store: ObjectStore, run: str) -> int:
    """How many steps the run was last asked to reach. Reads that one number only, so that a run another version of
    rl360 wrote can still be listed."""
    for key in (run_target_key(run), run_config_key(run)):
        try:
            data = store.get(key)
        except KeyError:
            continue
        try:
            return int(orjson.loads(data)["steps"])
        except (KeyError, ValueError, TypeError):
            raise CorruptObject(key, "does not say the steps to reach") from None
    raise BadInput(f"no run {run!r} in bucket {store.bucket}; `rl360 run list` shows what there is")


def _describe(store: ObjectStore, run: str) -> dict[str, Any]:
    target = load_target(store, run)
    steps = ledger_steps(store, run)
    state = "new" if not steps else "open" if len(steps) < target else "done"
    folders = [name for name in store.list_folders(f"{run}/steps/") if name.isdigit()]
    first = read_manifest(store, run, int(folders[0]), FIRST_TASK) if folders else None
    started_at = None if first is None else first.started_at
    return {"run": run, "steps": len(steps), "state": state, "target_steps": target, "started_at": started_at}


def _decode(data: bytes, key: str, run: str, step: int) -> StepLedger:
    ledger = StepLedger.from_wire(unpack(data, key), key)
    if (ledger.run, ledger.step) != (run, step):
        raise CorruptObject(key, f"holds the ledger of {ledger.run} step {ledger.step}")
    return ledger
