"""PPO in the trainer service: policy and critic step, are saved and come back bit by bit, through a SIGKILL as well."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from rl360.store.layout import checkpoint_prefix, step_key
from tests.contract.trainer_rig import Rig, Trap
from tests.unit.training_data import samples_of

pytestmark = [pytest.mark.contract, pytest.mark.timeout(900)]
RECORD_WRITE = re.compile(rb"PUT /\S*/train\.json")
PPO = {"preset": "ppo", "critic_lr": 1e-3}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = Rig(tmp_path_factory.mktemp("trainer"))
    yield made
    made.close()


def scored(step: int) -> list[dict[str, Any]]:
    """Half of the attempts passed; for a critic a row holds the score."""
    return [row | {"advantage": float(index % 2)} for index, row in enumerate(samples_of(step))]


def test_steps_checkpoint_kill_and_restore(rig: Rig) -> None:
    reference = rig.new_run("reference", objective=PPO)
    undisturbed = [rig.train(reference, step, scored(step)) for step in range(4)]
    assert [each["version_after"] for each in undisturbed] == [1, 2, 3, 4]
    assert len({each["critic_digest"] for each in undisturbed}) == 4
    for step, each in enumerate(undisturbed):
        assert np.isfinite([each["loss"], each["value_loss"], each["explained_variance"]]).all()
        assert orjson.loads(rig.store.get(step_key(reference, step, "train.json"))) == each

    run = rig.new_run("killed", objective=PPO)
    rig.train(run, 0, scored(0))
    saved = rig.ask("POST", f"/runs/{run}/checkpoints/0").json()
    assert saved["critic_digest"] == undisturbed[0]["critic_digest"]
    assert len(rig.store.list(checkpoint_prefix(run, 0))) == 8  # six sets of tensors, the random state, the manifest
    rig.train(run, 1, scored(1))
    body = rig.put_batch(run, 2, scored(2))
    rig.wire.sprung, rig.wire.trap = 0, Trap(RECORD_WRITE, rig.kill_rank)
    with pytest.raises(httpx.HTTPError):
        rig.ask("PUT", "/steps/2", body)
    assert rig.wire.sprung == 1 and not rig.store.exists(step_key(run, 2, "train.json"))
    rig.restart()
    again = rig.ask("PUT", "/steps/2", body)  # the checkpoint restored, step 1 replayed, step 2 taken
    assert again.status_code == 200, again.text
    ends = ("weights_digest", "critic_digest", "value_loss", "explained_variance", "value_clip_fraction")
    assert [again.json()[name] for name in ends] == [undisturbed[2][name] for name in ends]
    assert rig.train(run, 3, scored(3))["critic_digest"] == undisturbed[3]["critic_digest"]


def test_a_step_that_is_not_finite_leaves_both(rig: Rig) -> None:
    run = rig.new_run("spoilt", objective=PPO)
    first = rig.train(run, 0, scored(0))
    rows = [row | {"advantage": 3e38 if index else -3e38} for index, row in enumerate(scored(1))]
    refused = rig.train(run, 1, rows)  # the squares of the value loss overflow, the policy's loss does not
    assert (refused["status"], refused["version_after"], refused["value_loss"]) == ("nonfinite", 1, None)
    ends = ("weights_digest", "critic_digest")
    assert [refused[name] for name in ends] == [first[name] for name in ends]
