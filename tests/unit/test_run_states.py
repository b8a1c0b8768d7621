"""The state of a run is true: what the store holds, what Prefect says, and what a person is told to do about an end."""

from __future__ import annotations

from typing import Any, cast

import pytest

from rl360 import errors
from rl360.commands.prefect_api import FlowRun
from rl360.commands.states import advice, cause, ended_text, judge, list_states, waiting_for
from rl360.config.freeze import freeze_config
from rl360.config.run import RunConfig
from rl360.errors import BadInput, CorruptObject, Rl360Error, ServiceError
from rl360.ledger.checks import LedgerBroken
from rl360.store.layout import checkpoint_prefix
from rl360.store.manifest import Manifest, commit_manifest
from rl360.training.saved import CheckpointManifest
from tests.unit.memory_store import MemoryStore


def flow_run(state: str, name: str = "", message: str = "", run: str = "r1", steps: int = 5) -> FlowRun:
    return FlowRun("id-1", "a-name", state, name or state.title(), message, {"config": {"run": run, "steps": steps}})


def store_at(steps: int, *tasks: str) -> Any:
    """A run of 5 steps: `steps` of them done, and `tasks` of the next one committed."""
    store = MemoryStore()
    freeze_config(cast(Any, store), RunConfig(run="r1", steps=5), default_model="/m")
    for step in range(steps):
        commit(store, step, "sample_groups", "report")
        store.put(f"r1/steps/{step:06}/ledger.msgpack", b"a ledger")
    commit(store, steps, *tasks)
    return cast(Any, store)


def commit(store: Any, step: int, *tasks: str) -> None:
    for task in tasks:
        commit_manifest(store, Manifest(run="r1", step=step, task=task, counts={"attempts": 8}, started_at=float(step)))


class Api:
    def __init__(self, *found: FlowRun, away: bool = False) -> None:
        self.found, self.away = found, away

    def newest_by_run(self) -> dict[str, FlowRun]:
        if self.away:
            raise ServiceError("Prefect did not answer")
        return {item.run: item for item in self.found}

    def run_url(self, flow_run_id: str) -> str:
        return f"http://ui/{flow_run_id}"


@pytest.mark.parametrize(
    ("done", "newest", "state", "detail"),
    [
        (0, None, "new", ""),
        (2, None, "stopped", ""),
        (5, None, "done", ""),
        (2, flow_run("RUNNING"), "running", "step 2: sampling groups"),
        (2, flow_run("CANCELLING"), "cancelling", "step 2: sampling groups"),
        (2, flow_run("SCHEDULED", "AwaitingConcurrencySlot"), "waiting",
         "a worker takes it next (flow run is AwaitingConcurrencySlot)"),
        (2, flow_run("SCHEDULED", "Late"), "waiting", "no worker has taken it"),
        (2, flow_run("PENDING"), "waiting", "a worker takes it next (flow run is Pending)"),
        (2, flow_run("PAUSED"), "waiting", "paused in Prefect"),
        (2, flow_run("COMPLETED"), "stopped", ""),
        (0, flow_run("COMPLETED"), "stopped", ""),
        (2, flow_run("CANCELLED"), "cancelled", ""),
        (2, flow_run("CRASHED", "", "exited with -9"), "failed", "step 2: Crashed: exited with -9"),
        (0, flow_run("FAILED", "BadInput", "task set 'x' is gone"), "failed", "BadInput: task set 'x' is gone"),
        (2, flow_run("FAILED", "CorruptObject", "step 2: object k: is\n bad"), "failed",
         "step 2: CorruptObject: object k: is bad"),
        (5, flow_run("CRASHED"), "done", ""),
        (5, flow_run("FAILED", "BadInput", "task set 'x' is gone", steps=9), "failed",
         "BadInput: task set 'x' is gone"),
        (5, flow_run("CRASHED", "", "exited with -9", steps=9), "failed", "step 5: Crashed: exited with -9"),
        (5, flow_run("CANCELLED", steps=9), "done", ""),
        (5, flow_run("COMPLETED", steps=9), "done", ""),
        (5, flow_run("FAILED", "BadInput", "fewer steps than it has", steps=3), "done", ""),
        (5, flow_run("RUNNING"), "running", "step 5: sampling groups"),
    ],
)  # fmt: skip
def test_each_state(done: int, newest: FlowRun | None, state: str, detail: str) -> None:
    found = judge(store_at(done), "r1", done, 5, newest)
    assert found.state == state
    assert found.detail.startswith(detail) and bool(found.detail) == bool(detail)


def test_a_step_that_had_begun_is_no_new_run() -> None:
    assert judge(store_at(0, "sample_groups"), "r1", 0, 5, None).state == "stopped"


def test_what_is_at_work_is_read_off_the_manifests() -> None:
    found = judge(store_at(2, "sample_groups", "collect", "filter_groups"), "r1", 2, 5, flow_run("RUNNING"))
    assert found.detail == "step 2: train"


def test_the_list_joins_both_and_shows_what_never_reached_the_store() -> None:
    never = flow_run("FAILED", "BadInput", "model.path /x is no model", run="r2")
    ended = flow_run("COMPLETED", run="gone")
    rows, warning = list_states(
        store_at(2), cast(Any, Api(flow_run("FAILED", "ServiceError", "step 2: away"), never, ended))
    )
    assert [(row["run"], row["steps"], row["target_steps"], row["state"]) for row in rows] == [
        ("r1", 2, 5, "failed"),
        ("r2", 0, 5, "failed"),
    ]
    assert [row["ended_as"] for row in rows] == ["ServiceError", "BadInput"]
    assert rows[1]["detail"] == "BadInput: model.path /x is no model"
    assert warning == ""


def test_a_run_that_was_to_go_on_and_was_refused_is_not_done_in_the_list() -> None:
    """Refused before it could raise the target: without its flow run the store would say done, and nobody why not."""
    refused = flow_run("FAILED", "BadInput", "task set 'x' is gone", steps=9)
    ((row,), _) = list_states(store_at(5), cast(Any, Api(refused)))
    assert (row["state"], row["ended_as"], row["detail"]) == ("failed", "BadInput", "BadInput: task set 'x' is gone")
    ((row,), _) = list_states(store_at(5), cast(Any, Api(flow_run("COMPLETED"))))
    assert (row["state"], row["detail"]) == ("done", "")


@pytest.mark.parametrize(
    ("state", "name"), [("SCHEDULED", "Late"), ("SCHEDULED", "Scheduled"), ("PENDING", "Submitting")]
)
@pytest.mark.parametrize("at_work", ["RUNNING", "CANCELLING"])
def test_what_waits_for_another_run_is_queued_behind_it_and_is_no_fault(state: str, name: str, at_work: str) -> None:
    ahead = FlowRun("id-0", "first", at_work, at_work.title(), "", {"config": {"run": "r0", "steps": 5}})
    rows, _ = list_states(store_at(2), cast(Any, Api(flow_run(state, name, run="r2"), ahead, flow_run(state, name))))
    told = {row["run"]: (row["state"], row["detail"]) for row in rows}
    assert told["r1"] == told["r2"] == ("waiting", "queued behind r0: one flow run goes at a time")
    assert told["r0"][0] == {"RUNNING": "running", "CANCELLING": "cancelling"}[at_work]


def test_of_those_that_all_wait_each_is_behind_the_one_that_is_taken_or_was_first() -> None:
    def asked(run: str, state: str, name: str) -> FlowRun:
        return FlowRun(run, run, state, name, "", {"config": {"run": run, "steps": 5}})

    three = [asked("c", "SCHEDULED", "Scheduled"), asked("b", "SCHEDULED", "Late"), asked("a", "PENDING", "Submitting")]
    told = {each.run: waiting_for(each, three) for each in three}
    assert told["b"] == told["c"] == "queued behind a: one flow run goes at a time"
    assert told["a"] == "a worker takes it next (flow run is Submitting)"
    assert waiting_for(three[0], three[:2]).startswith("queued behind b:")
    assert waiting_for(three[1], three[:2]) == "no worker has taken it yet: is one up? `rl360 status`"


def test_without_prefect_the_list_says_what_the_store_knows_and_that_it_is_all() -> None:
    rows, warning = list_states(store_at(2), cast(Any, Api(away=True)))
    assert [row["state"] for row in rows] == ["stopped"]
    assert "Prefect did not answer" in warning


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ("Flow run encountered an exception: KeyError: 'x'", (None, "KeyError: 'x'")),
        ("step 12: object a: b", (12, "object a: b")),
        ("step 12: Flow run encountered an exception: KeyError: 'x'", (12, "KeyError: 'x'")),
        ("", (None, "")),
    ],
)
def test_the_cause_is_one_line_with_its_step(message: str, found: tuple[int | None, str]) -> None:
    assert cause(flow_run("FAILED", "X", message)) == found


PERMANENT = (BadInput, CorruptObject, LedgerBroken, errors.ReplayMismatch, errors.WitnessDisagrees)


@pytest.mark.parametrize("kind", PERMANENT)
def test_what_a_resume_cannot_mend_is_not_told_to_resume(kind: type[Rl360Error]) -> None:
    store = store_at(2, "sample_groups", "collect")
    told = ended_text(store, cast(Any, Api()), "r1", 5, flow_run("FAILED", kind.__name__, "step 2: why it is"))
    assert told.startswith(
        f"run r1 ended as {kind.__name__} in step 2 (filter groups) with 2 of 5 steps done: why it is. "
    )
    assert "resuming cannot help" in told or "it ends the same way until that is put right" in told
    assert "a run under another name" in told and "nothing committed is lost; see" not in told
    assert told.endswith("Details: http://ui/id-1") and "\n" not in told
    checkpoint = CheckpointManifest(
        run="r1", step=1, next_step=2, version=2, weights_digest="0" * 64, layout="l", objects={}
    )
    store.put(checkpoint_prefix("r1", 1) + "manifest.json", checkpoint.model_dump_json().encode())
    told = ended_text(store, cast(Any, Api()), "r1", 5, flow_run("FAILED", kind.__name__, "step 2: why it is"))
    assert "`rl360 run fork r1 NEW --from-step 1`" in told


def test_every_kind_that_is_never_retried_has_its_own_advice() -> None:
    """So that a new kind of error is not told to resume by default."""
    from tasks.durable import SAFE_TO_REPEAT, ended_by

    passes = advice("r1", "ServiceError", None)
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Rl360Error)]
    for kind in (*kinds, LedgerBroken):
        if kind is not Rl360Error:
            name = ended_by(CorruptObject("k", "why") if kind is CorruptObject else kind("why")).name
            assert (advice("r1", str(name), None) == passes) == issubclass(kind, SAFE_TO_REPEAT), kind


@pytest.mark.parametrize("name", ["ServiceError", "StoreUnavailable", "EngineChurn", "TrainerConflict", "Crashed"])
def test_what_passes_is_told_to_resume(name: str) -> None:
    assert "cannot help" not in advice("r1", name, None)
    assert advice("r1", name, None).endswith("go on with `rl360 run resume r1`")


def test_proof_before_a_resume_and_an_error_nobody_expected() -> None:
    assert "rl360 fleet status" in advice("r1", "CleanupUnconfirmed", None)
    assert "traceback" in advice("r1", "Failed", None)


def test_a_run_that_never_began_is_started_again() -> None:
    ended = flow_run("FAILED", "BadInput", "no such task set")
    told = ended_text(cast(Any, MemoryStore()), cast(Any, Api()), "r1", 5, ended)
    assert "no such task set. Now: nothing was begun and the name is free" in told and "resume" not in told


def test_a_store_that_is_away_does_not_hide_why_the_run_ended() -> None:
    store = store_at(2)
    store.down = True
    told = ended_text(store, cast(Any, Api()), "r1", 5, flow_run("FAILED", "StoreUnavailable", "step 2: store is away"))
    assert told.startswith("run r1 ended as StoreUnavailable in step 2: store is away. Now: nothing committed is lost")
