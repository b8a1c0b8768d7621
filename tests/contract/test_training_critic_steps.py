"""Steps with a critic: both models step or neither does, and a trainer that lost its memory rebuilds both."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from rl360.config.run import RunConfig
from rl360.store.layout import checkpoint_prefix, run_config_key, step_key
from rl360.training import saved
from rl360.training.critic import Critic
from rl360.training.director import Conflict, Director, StepBody
from rl360.training.megatron import alone
from rl360.training.megatron.hf_map import VALUE_HEAD, digest_of
from rl360.training.megatron.model import Layout
from rl360.training.megatron.policy import Policy, StepSums
from rl360.training.replica import ReplayMismatch, Replica
from rl360.training.results import StepStatus, TrainResult
from tests.unit.memory_store import MemoryStore
from tests.unit.training_data import put_batch, samples_of, untrained, write_model

pytestmark = pytest.mark.contract  # the real Megatron-core

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
PPO = {"preset": "ppo", "critic_lr": 1e-2, "critic_updates": 2}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with alone.single_process():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def new_trainer(store: MemoryStore) -> Director:
    replica = Replica(cast(Any, store), Layout(), "an incarnation")
    return Director(replica, cast(Any, None), replica.execute)


def start(store: MemoryStore, model: Path, run: str = "r1", parent: Any = None, **objective: Any) -> RunConfig:
    fields = {"run": run, "model": {"path": str(model)}, "parent": parent, "objective": PPO | objective}
    config = RunConfig.parse(fields)
    store.put(run_config_key(run), config.to_json())
    return config


def scored(data: int) -> list[dict[str, Any]]:
    return [row | {"advantage": float(index % 2)} for index, row in enumerate(samples_of(data, 4))]


def step(trainer: Director, store: MemoryStore, number: int, run: str = "r1", rows: Any = None) -> TrainResult:
    rows = scored(number) if rows is None else rows
    return trainer.put_step(number, StepBody(**put_batch(store, run, number, rows)))


def both(trainer: Director) -> tuple[str, str]:
    replica = trainer.replica
    assert replica.policy is not None
    assert replica.critic is not None
    return digest_of(replica.policy.weights()), digest_of(replica.critic.weights())


def test_two_steps_then_memory_lost_at_every_point(model: Path) -> None:
    store = MemoryStore()
    start(store, model)
    trainer = new_trainer(store)
    first = step(trainer, store, 0)
    assert (first.status, first.version_after, first.explained_variance) == (StepStatus.TRAINED, 1, pytest.approx(0.0))
    assert first.value_loss is not None and first.value_loss > 0 and first.value_clip_fraction is not None
    trainer.checkpoint("r1", 0)
    second = step(trainer, store, 1)
    assert both(trainer) == (second.weights_digest, second.critic_digest)
    assert len({first.weights_digest, second.weights_digest, first.critic_digest, second.critic_digest}) == 4
    assert new_trainer(store).open_run("r1")["weights_digest"] == second.weights_digest  # restored, a step replayed
    third = step(new_trainer(store), store, 2)
    trainer.checkpoint("r1", 2)  # this trainer takes the third step first, from the records
    for gone in (None, 2, 0):  # restored after the third step, after the first, and every step taken from the start
        for key in [] if gone is None else store.list(checkpoint_prefix("r1", gone)):
            store.delete(key)
        again = new_trainer(store)
        assert again.open_run("r1")["next_step"] == 3
        assert both(again) == (third.weights_digest, third.critic_digest)


def test_the_models_of_the_run_before_are_gone_before_those_of_the_next_are_built(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the next has no critic: a host that holds one run has no room for two."""
    store = MemoryStore()
    start(store, model, run="r1", kl_coef=0.1)
    plain = RunConfig.parse({"run": "g1", "model": {"path": str(model)}})
    store.put(run_config_key("g1"), plain.to_json())
    trainer = new_trainer(store)
    trainer.open_run("r1")
    replica = trainer.replica
    before = [weakref.ref(each) for each in (replica.policy, replica.critic, replica.actors)]
    assert all(each() is not None for each in before)
    build, left = Policy._build, []

    def watched(self: Policy) -> Any:
        left.append([each() for each in before])
        return build(self)

    monkeypatch.setattr(Policy, "_build", watched)
    trainer.open_run("g1")
    assert left == [[None] * 3]


def test_a_replay_or_a_record_of_another_critic_is_told(model: Path) -> None:
    store = MemoryStore()
    start(store, model)
    trainer = new_trainer(store)
    result = step(trainer, store, 0)
    key = step_key("r1", 0, "train.json")
    store.put(key, result.model_copy(update={"critic_digest": "f" * 64}).model_dump_json().encode())
    with pytest.raises(ReplayMismatch, match="replay of step 0 of r1, its critic: weights"):
        trainer.open_run("r1")
    store.delete(key)
    trainer = new_trainer(store)
    body = StepBody(**put_batch(store, "r1", 0, scored(0)))
    trainer._commit = lambda found: found  # type: ignore[method-assign]
    applied = trainer.put_step(0, body)
    del trainer._commit  # type: ignore[misc]
    store.put(key, applied.model_copy(update={"critic_digest": "f" * 64}).model_dump_json().encode())
    with pytest.raises(Conflict, match="recorded by another trainer"):
        trainer.put_step(0, body)


@pytest.mark.parametrize("part", ["policy", "critic", "later_update"])
def test_what_is_not_finite_moves_neither(model: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    start(store, model, run="r1", old_policy="rollout")
    trainer = new_trainer(store)
    step(trainer, store, 0)
    critic, policy = trainer.replica.critic, trainer.replica.policy
    assert critic is not None
    assert policy is not None
    before, rows = (both(trainer), digest_of(critic.moments()["exp_avg"]), critic.updates, policy.updates), scored(1)
    if part == "policy":
        rows[0]["logprobs"] = np.where(rows[0]["loss_mask"], -3e38, 0).astype(np.float32)
        rows[0]["advantage"] = -1.0
    elif part == "critic":  # finite values and advantages, yet the square of their loss is not
        rows = [row | {"advantage": 3e38 if index else -3e38} for index, row in enumerate(rows)]
    else:
        accumulate, calls = critic.accumulate, []

        def second_fails(*given: Any, **named: Any) -> Any:
            sums, norm = accumulate(*given, **named)
            calls.append(norm)
            return sums, norm if len(calls) < 2 else float("nan")

        monkeypatch.setattr(critic, "accumulate", second_fails)
    refused = step(trainer, store, 1, rows=rows)
    assert (refused.status, refused.version_after, refused.value_loss) == (StepStatus.NONFINITE, 1, None)
    assert (both(trainer), digest_of(critic.moments()["exp_avg"]), critic.updates, policy.updates) == before
    assert (refused.weights_digest, refused.critic_digest) == before[0]
    monkeypatch.undo()
    assert step(trainer, store, 2).status is StepStatus.TRAINED


def test_a_warm_up_moves_the_critic_alone_and_adam_counts_what_was_taken(model: Path) -> None:
    warm, store = MemoryStore(), MemoryStore()
    start(warm, model, critic_warmup_steps=2)
    trainer = new_trainer(warm)
    opened = trainer.open_run("r1")["weights_digest"]
    results = [step(trainer, warm, number) for number in range(2)]
    assert [(each.version_after, each.weights_digest) for each in results] == [(1, opened), (2, opened)]
    assert results[0].critic_digest != results[1].critic_digest
    assert results[0].loss is not None, "what the policy's step would have been"
    trainer.checkpoint("r1", 1)
    third = step(trainer, warm, 2)
    assert third.weights_digest != opened and trainer.replica.policy is not None
    assert trainer.replica.policy.updates == 1
    restored = new_trainer(warm)
    assert restored.open_run("r1")["weights_digest"] == third.weights_digest
    assert restored.replica.policy is not None and restored.replica.policy.updates == 1
    origin = saved.parent_at(cast(Any, warm), RunConfig.parse(warm.get(run_config_key("r1"))), None).model_dump()
    start(warm, model, run="f1", parent=origin)
    forked = step(new_trainer(warm), warm, 0, "f1", scored(2))
    assert (forked.weights_digest, forked.critic_digest) == (third.weights_digest, third.critic_digest)
    assert store.objects == {}


def test_a_kl_in_the_reward_is_taken_off_by_token(model: Path) -> None:
    """Against the policy it starts from: none of it in the first step, so the same weights; then it counts."""
    found: dict[str, list[TrainResult]] = {}
    kl = {"kl_coef": 0.5, "kl_in": "reward", "kl_estimator": "k1"}
    for name, fields in {"plain": {}, "kl": kl, "again": kl}.items():
        store = MemoryStore()
        start(store, model, **fields)
        trainer = new_trainer(store)
        found[name] = [step(trainer, store, number) for number in range(2)]
    first, second = ([found[name][number].left for name in ("plain", "kl", "again")] for number in range(2))
    assert first[0] == first[1] and second[0] != second[1] and second[1] == second[2]
    assert found["kl"][1].kl_mean


def test_empty_steps_keep_the_critic_and_a_fork_of_a_run_without_one_gets_one(model: Path) -> None:
    store = MemoryStore()
    plain = start(store, model)
    trainer = new_trainer(store)
    trainer.open_run("r1")
    before = both(trainer)
    empty = step(trainer, store, 0, rows=[untrained(scored(0)[0])])
    assert (empty.status, empty.weights_digest, empty.critic_digest) == (StepStatus.EMPTY, *before)
    config = RunConfig.parse(plain.model_dump() | {"run": "g1", "objective": {}})
    store.put(run_config_key("g1"), config.to_json())
    step(trainer, store, 0, "g1")
    assert trainer.replica.critic is None
    trainer.checkpoint("g1", 0)
    origin = saved.parent_at(cast(Any, store), config, None).model_dump()
    start(store, model, run="f1", parent=origin)
    trainer.open_run("f1")
    assert trainer.replica.critic is not None and trainer.replica.policy is not None
    policy, critic = trainer.replica.policy.weights(), trainer.replica.critic.weights()
    assert digest_of({name: critic[name] for name in policy}) == digest_of(policy) and not critic[VALUE_HEAD].any()


@pytest.mark.parametrize("updates", [1, 3])
def test_the_norm_of_the_critics_first_gradient_is_told(
    model: Path, updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before clipping, and null where nothing was applied or there is no critic."""
    norms: list[float] = []
    whole = Critic.step

    def watched(self: Critic, *given: Any) -> StepSums:
        found = whole(self, *given)
        norms.append(found.grad_norm)
        return found

    monkeypatch.setattr(Critic, "step", watched)
    store = MemoryStore()
    start(store, model, critic_updates=updates, value_clip=0.2 if updates > 1 else None)
    trainer = new_trainer(store)
    told = step(trainer, store, 0).critic_grad_norm
    assert len(norms) == len(set(norms)) == updates and told == norms[0] > 0
    assert step(trainer, store, 1, rows=[untrained(scored(0)[0])]).critic_grad_norm is None
    plain = RunConfig.parse({"run": "g1", "model": {"path": str(model)}})
    store.put(run_config_key("g1"), plain.to_json())
    assert step(trainer, store, 0, "g1").critic_grad_norm is None


def test_a_run_without_a_critic_does_not_read_that_of_its_parent(model: Path) -> None:
    """A restore reads what it loads: three sets of the policy, then three of a critic where there is one to load."""
    store = MemoryStore()
    parent = start(store, model)
    trainer = new_trainer(store)
    step(trainer, store, 0)
    trainer.checkpoint("r1", 0)
    origin = saved.parent_at(cast(Any, store), parent, None)
    plain = RunConfig.parse({"run": "g1", "model": {"path": str(model)}, "parent": origin.model_dump()})
    store.put(run_config_key("g1"), plain.to_json())
    for run, sets in (
        ("g1", ["exp_avg", "exp_avg_sq", "rng", "weights"]),
        ("r1", ["critic_weights", "rng", "weights"]),
    ):
        store.read.clear()
        new_trainer(store).open_run(run)
        read = [key.rpartition("/")[2].rpartition("-")[0] for key in store.read if key.endswith(".safetensors")]
        assert len(read) == len(set(read)) and set(sets) <= set(read), "each once"
        assert any(name.startswith("critic_") for name in read) == (run == "r1")
