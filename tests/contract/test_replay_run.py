"""Past steps computed again: the optimizer step by a trainer process of its own beside a running one, bit by bit, and
every task of a real run."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from rl360.config.services import load_services
from rl360.replay.train import replay_train
from rl360.store.layout import step_key
from rl360.store.manifest import Manifest, commit_manifest, put_object
from tests.conftest import Cli
from tests.contract.trainer_rig import Rig

pytestmark = [pytest.mark.contract, pytest.mark.timeout(900)]
DEADLINE_S = 240.0
STEPS = 4


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = Rig(tmp_path_factory.mktemp("trainer"))
    yield made
    made.close()


def commit_train(rig: Rig, run: str, step: int, data: bytes) -> None:
    """As the flow's train task does after the trainer recorded the step."""
    ref = put_object(rig.store, step_key(run, step, "train.json"), data)
    manifest = Manifest(run=run, step=step, task="train", objects=[ref], info=orjson.loads(data))
    commit_manifest(rig.store, manifest)


@pytest.mark.parametrize("kept", [False, True], ids=["plain", "kl-and-kept-actors"])
def test_an_optimizer_step_taken_again_ends_in_the_same_bits(rig: Rig, kept: bool) -> None:
    """From a checkpoint two steps before, and from the starting policy; the running trainer stays where it is."""
    fields: dict[str, Any] = {"objective": {"old_policy": "kept", "kl_coef": 0.1, "kl_estimator": "k2"}}
    fields["trainer"] = {"lr": 1e-3, "kept_versions": 3}
    run = rig.new_run(f"replayed-{kept}".lower(), **(fields if kept else {}))
    for step in range(STEPS):
        assert rig.train(run, step)["actors_used"] == ([0] if kept and step else [])
        commit_train(rig, run, step, rig.store.get(step_key(run, step, "train.json")))
        if step == 1:
            assert rig.ask("POST", f"/runs/{run}/checkpoints/1").status_code == 200
    before, keys = rig.state(run), rig.store.list("")
    services = load_services(rig.folder)
    for step in (3, 1):
        rows = replay_train(rig.store, services, run, step, DEADLINE_S)
        assert [row.line() for row in rows if not row.equal] == [] and len(rows) == 2
    assert rig.state(run) == before
    assert rig.store.list("") == keys


def test_a_record_of_other_weights_is_found(rig: Rig) -> None:
    run = rig.new_run("forged")
    result = rig.train(run, 0)
    key = step_key(run, 0, "train.json")
    rig.store.put(key, orjson.dumps({**result, "weights_digest": "0" * 64, "loss": result["loss"] * 2}))
    commit_train(rig, run, 0, rig.store.get(key))
    row = replay_train(rig.store, load_services(rig.folder), run, 0, DEADLINE_S)[0]
    assert (row.path, row.stored, row.recomputed) == ("loss", repr(result["loss"] * 2), repr(result["loss"]))


def test_every_task_of_a_real_step_computes_to_what_is_stored(cli: Cli) -> None:
    name = f"replay-{uuid.uuid4().hex[:8]}"
    small = ("-s", "taskset.groups_per_step=4", "-s", "taskset.attempts_per_group=4", "-s", "rollout.wave_size=8")
    done = cli("run", "start", "--name", name, "--steps", "2", *small, "-s", "trainer.checkpoint_every=1")
    assert done.returncode == 0, done.stdout + done.stderr
    again = cli("replay", name, "1", "--json")
    rows: list[dict[str, Any]] = [json.loads(line) for line in again.stdout.splitlines()]
    assert again.returncode == 0, again.stdout + again.stderr
    assert [row["task"] for row in rows[::2]] == ["sample_groups", "collect", "filter_groups", "train", "report"]
    assert all(row["equal"] for row in rows)
