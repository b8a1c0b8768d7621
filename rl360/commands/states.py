"""What state a run is in, from the store (what is done) and Prefect (what is at work), and what to do about an end.

A flow run that an error of rl360 ended has the error's type as its state's name; advice goes by that name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl360.commands.prefect_api import FlowRun, PrefectApi
from rl360.errors import ServiceError, StoreUnavailable
from rl360.ledger.read import list_runs
from rl360.store.layout import run_config_key, step_prefix
from rl360.store.manifest import read_manifest
from rl360.store.object_store import ObjectStore
from rl360.store.progress import next_step, step_folders
from rl360.training import saved

_PREFIX = "Flow run encountered an exception: "
_TASKS = ("filter_groups", "train", "push_weights", "checkpoint", "report")
_ENDED = {"FAILED": "failed", "CRASHED": "failed", "CANCELLED": "cancelled"}
_ALIVE = {
    "RUNNING": "running",
    "CANCELLING": "cancelling",
    "SCHEDULED": "waiting",
    "PENDING": "waiting",
    "PAUSED": "waiting",
}
_AT_WORK = ("RUNNING", "CANCELLING")


@dataclass(frozen=True)
class RunState:
    """`state` is new, waiting, running, cancelling, failed, cancelled, stopped (nothing at work, steps left) or done;
    `detail` says in one line where it is or why it ended."""

    state: str
    detail: str = ""
    flow_run: FlowRun | None = None


def judge(
    store: ObjectStore, run: str, done: int, target: int, newest: FlowRun | None, others: Sequence[FlowRun] = ()
) -> RunState:
    """The state of a run with `done` of `target` steps whose newest flow run is `newest`, beside `others`. A flow run
    that was to go on past the target, and was refused before it could raise it, has failed, however many steps there
    are."""
    kind = newest.state if newest is not None else ""
    if newest is not None and kind in _ALIVE:
        begun = kind in _AT_WORK
        detail = step_at_work(store, run, done) if begun else waiting_for(newest, others)
        return RunState(_ALIVE[kind], detail, newest)
    if done >= max(target, newest.steps if newest is not None and _ENDED.get(kind) == "failed" else 0):
        return RunState("done", "", newest)
    if newest is not None and kind in _ENDED:
        step, why = cause(newest)
        step = done if step is None and kind == "CRASHED" else step
        detail = f"{'' if step is None else f'step {step}: '}{newest.state_name}: {why}"
        return RunState(_ENDED[kind], detail if _ENDED[kind] == "failed" else "", newest)
    begun = newest is not None or bool(step_folders(store, run))
    return RunState("stopped" if begun else "new", "", newest)


def list_states(store: ObjectStore, api: PrefectApi) -> tuple[list[dict[str, Any]], str]:
    """The rows of `rl360 run list`, oldest first, and a warning (empty when Prefect answered).

    Runs whose flow never got as far as the store are there too, unless they ended as done or cancelled.
    """
    warning, newest = "", {}
    try:
        newest = api.newest_by_run()
    except ServiceError as error:
        warning = f"states are what the store alone can say, for {error}"
    rows, others = [], list(newest.values())
    for row in list_runs(store):
        found = judge(store, row["run"], row["steps"], row["target_steps"], newest.pop(row["run"], None), others)
        rows.append(row | _shown(found))
    for run, flow_run in newest.items():
        if flow_run.state not in ("COMPLETED", "CANCELLED"):
            head = {"run": run, "steps": 0, "state": "", "target_steps": flow_run.steps, "started_at": None}
            rows.append(head | _shown(judge(store, run, 0, flow_run.steps, flow_run, others)))
    return rows, warning


def _shown(found: RunState) -> dict[str, Any]:
    ended = found.flow_run if found.state in ("failed", "cancelled") else None
    return {"state": found.state, "detail": found.detail, "ended_as": ended.state_name if ended else None}


def cause(ended: FlowRun) -> tuple[int | None, str]:
    """Step (None: none had begun, or it is not told) and one-line cause of a flow run that failed."""
    text = " ".join(ended.message.split()).removeprefix(_PREFIX)
    found = re.fullmatch(r"(?:step (\d+): )?(.*)", text)
    assert found is not None
    return None if found[1] is None else int(found[1]), found[2].removeprefix(_PREFIX)


def waiting_for(flow_run: FlowRun, others: Sequence[FlowRun] = ()) -> str:
    """What a flow run that has not begun waits for; `others`: flow runs of any run, newest first."""
    ahead = _ahead(flow_run, others)
    if ahead is not None:
        return f"queued behind {ahead.run or ahead.name}: one flow run goes at a time"
    if flow_run.state_name == "Late":
        return "no worker has taken it yet: is one up? `rl360 status`"
    if flow_run.state == "PAUSED":
        return "paused in Prefect"
    return f"a worker takes it next (flow run is {flow_run.state_name})"


def _ahead(flow_run: FlowRun, others: Sequence[FlowRun]) -> FlowRun | None:
    """The one at work, else the one that is about to be, else the first of those that were asked for before it."""
    ids = [item.id for item in others]
    before = others[ids.index(flow_run.id) + 1 :] if flow_run.id in ids else others
    begun = [item for item in others if item.state in _AT_WORK]
    taken = [item for item in others if item.state == "PENDING" and flow_run.state != "PENDING"]
    waits = [item for item in before if item.state == "SCHEDULED" and flow_run.state != "PENDING"]
    return next((each[-1] for each in (begun, taken, waits) if each), None)


def step_at_work(store: ObjectStore, run: str, step: int) -> str:
    """What step `step` is at, from what it has stored: `step 3: train`."""
    groups = read_manifest(store, run, step, "sample_groups")
    if groups is None:
        return f"step {step}: sampling groups"
    if read_manifest(store, run, step, "collect") is None:
        stored = len(store.list(step_prefix(run, step) + "merged/"))  # an object an attempt; records share theirs
        return f"step {step}: rollouts {stored}/{groups.counts['attempts']}" if stored else f"step {step}: engines"
    for task in _TASKS:
        if read_manifest(store, run, step, task) is None:
            return f"step {step}: {task.replace('_', ' ')}"
    return f"step {step}: done"


def advice(run: str, name: str, newest: saved.CheckpointManifest | None) -> str:
    """What to do after a flow run of the run ended in the state `name`, when that is its newest checkpoint."""
    resume, fork = f"`rl360 run resume {run}`", "a run under another name"
    if newest is not None:
        fork = f"`rl360 run fork {run} NEW --from-step {newest.step}`"
    fixed = f"it ends the same way until that is put right, then {resume}"
    as_is = "resuming cannot help as things are"
    before = f"go on from before it with {fork}"
    return {
        "BadInput": f"{fixed}; where the run's own config is wrong, it is frozen, but {fork} takes -s FIELD=VALUE",
        "CorruptObject": f"{as_is}: restore the object from a copy, then {resume}; or {before}",
        "LedgerBroken": f"{as_is}: what is stored of the step does not add up, and is evidence; {before}",
        "WitnessDisagrees": f"{as_is}: gradients and books disagree, which is evidence of a fault in rl360; {before}",
        "ReplayMismatch": f"{as_is}: start the trainer with the processes, threads and machine type that the "
        f"step was recorded on, then {resume}; or {before}",
        "InfraLosses": f"nothing committed is lost; mend what lost the attempts, then {resume}; what was lost for good "
        "stays lost unless -s rollout.infra_retries is raised",
        "CleanupUnconfirmed": f"nothing committed is lost; do what it says, see `rl360 fleet status`, then {resume}",
        "Cancelled": f"nothing committed is lost, go on with {resume}",
        "Failed": "rl360 does not expect this error (its traceback is in the flow run's logs); nothing committed is "
        f"lost, {resume} tries the step again",
    }.get(name, f"nothing committed is lost; see `rl360 status`, then go on with {resume}")


def ended_text(store: ObjectStore, api: PrefectApi, run: str, target: int, ended: FlowRun) -> str:
    """One line on a flow run that ended without completing: what failed where, why, what to do, where to look."""
    step, why = cause(ended)
    try:
        done = next_step(store, run)
        begun = done in step_folders(store, run)
        task = f" ({step_at_work(store, run, done).partition(': ')[2]})" if begun else ""
        where = f" in step {done}{task}" if begun or step is not None else ""
        where += f" with {done} of {target} steps done"
        now = advice(run, ended.state_name, saved.latest(store, run))
        if not store.exists(run_config_key(run)):
            now = "nothing was begun and the name is free: put that right and start it again with `rl360 run start`"
    except StoreUnavailable:
        where, now = "" if step is None else f" in step {step}", advice(run, ended.state_name, None)
    told = "" if ended.state == "CANCELLED" else f": {why[:500].rstrip('. ')}"
    return f"run {run} ended as {ended.state_name}{where}{told}. Now: {now}. Details: {api.run_url(ended.id)}"
