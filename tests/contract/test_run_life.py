"""Forks and ends of runs through everything that is real: what goes on, what a person is told, what is refused."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

import pytest

from rl360.agents.records import read_table
from rl360.commands.prefect_api import TERMINAL, PrefectApi
from rl360.config.services import Services
from rl360.store.layout import run_config_key, step_key
from rl360.store.manifest import read_manifest
from rl360.store.object_store import ObjectStore
from rl360.training import saved
from tests.conftest import Cli

pytestmark = [pytest.mark.contract, pytest.mark.timeout(900)]

SMALL = ("-s", "taskset.groups_per_step=4", "-s", "taskset.attempts_per_group=4", "-s", "trainer.checkpoint_every=1")


@pytest.fixture(scope="module")
def run(cli: Cli) -> str:
    """A finished run of three small steps, of whose checkpoints two were kept."""
    name = f"life-{uuid.uuid4().hex[:8]}"
    done = cli("run", "start", "--name", name, "--steps", "3", *SMALL, "-s", "trainer.keep_checkpoints=2")
    assert done.returncode == 0, done.stdout + done.stderr
    return name


def row_of(cli: Cli, run: str) -> dict[str, Any]:
    return {row["run"]: row for row in json.loads(cli("run", "list", "--json").stdout)}[run]


def test_older_checkpoints_were_pruned(store: ObjectStore, run: str) -> None:
    assert [saved.read_manifest(store, run, step) is not None for step in range(3)] == [False, True, True]
    noted = read_manifest(store, run, 2, "checkpoint")
    assert noted is not None and noted.info["deleted"] == [0]


def test_a_fork_goes_on_from_the_weights_under_another_config(cli: Cli, store: ObjectStore, run: str) -> None:
    new = f"{run}-f"
    done = cli("run", "fork", run, new, "--from-step", "1", "--steps", "1", "-s", "trainer.lr=0.0001")
    assert done.returncode == 0, done.stdout + done.stderr
    trained = json.loads(store.get(step_key(run, 1, "train.json")))
    frozen = json.loads(store.get(run_config_key(new)))
    assert (frozen["parent"]["run"], frozen["parent"]["step"], frozen["trainer"]["lr"]) == (run, 1, 0.0001)
    assert frozen["parent"]["weights_digest"] == trained["weights_digest"]
    assert json.loads(store.get(step_key(new, 0, "push.json")))["version"] == f"{new}:1"
    collected = read_manifest(store, new, 0, "collect")
    assert collected is not None
    assert {r.verdict.run for r in read_table(store, collected.objects[0]) if r.verdict is not None} == {new}
    assert row_of(cli, new)["state"] == "done"
    again = cli("run", "fork", run, new)
    assert again.returncode == 2 and f"run {new} is there already" in again.stderr


def test_a_damaged_object_ends_the_run_and_resuming_is_not_advised(cli: Cli, store: ObjectStore, run: str) -> None:
    store.put(step_key(run, 3, "groups.msgpack"), b"\xc0")
    ended = cli("run", "resume", run, "--steps", "4")
    watched = cli("run", "watch", run)
    for shown in (ended, watched):
        assert shown.returncode == 1
        assert f"run {run} ended as CorruptObject in step 3" in shown.stderr
        assert "resuming cannot help" in shown.stderr and f"`rl360 run fork {run} NEW --from-step 2`" in shown.stderr
    row = row_of(cli, run)
    assert (row["state"], row["steps"], row["ended_as"]) == ("failed", 3, "CorruptObject")
    assert row["detail"].startswith("step 3: CorruptObject: object ")


def test_a_wrong_config_from_the_ui_fails_by_name_and_spends_no_name(
    cli: Cli, services: Services, store: ObjectStore
) -> None:
    name = f"ui-{uuid.uuid4().hex[:8]}"
    api = PrefectApi(services.prefect_api_url, services.prefect_ui_url)
    flow_run = api.trigger("rl_run/local", {"config": {"run": name, "taskset": {"path": "/no/such"}}})
    give_up_at = time.monotonic() + 300
    while api.flow_run(flow_run.id).state not in TERMINAL and time.monotonic() < give_up_at:
        time.sleep(1)
    row = row_of(cli, name)
    assert (row["state"], row["ended_as"]) == ("failed", "BadInput")
    assert "task set '/no/such' is not a directory" in row["detail"]
    watched = cli("run", "watch", name)
    assert watched.returncode == 1 and "the name is free" in watched.stderr
    assert not store.exists(run_config_key(name))
