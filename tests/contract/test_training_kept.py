"""A kept old policy through the real backend: each token's ratio is to the weights that sampled it, whatever was lost
and restored in between; on-policy it is the recomputed one to the bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pytest
import torch

from rl360.config.run import RunConfig
from rl360.errors import CorruptObject, StoreUnavailable
from rl360.ledger.outcomes import Bucket
from rl360.objective.filters import filter_groups, trainable_versions
from rl360.objective.losses import policy_loss
from rl360.replay.steps import Scratch
from rl360.replay.trainer import take
from rl360.store.layout import actor_prefix, run_config_key, step_key
from rl360.training.actors import read_actor, rebuilt_from
from rl360.training.director import Director
from rl360.training.megatron import alone
from rl360.training.megatron.hf_dir import write_dir
from rl360.training.megatron.hf_map import digest_of
from rl360.training.megatron.model import Layout
from rl360.training.replica import Replica
from rl360.training.results import TrainResult
from tests.contract.test_training_director import batch_of, new_store, new_trainer
from tests.contract.test_training_kl import logprobs_of
from tests.unit.memory_store import MemoryStore
from tests.unit.objective_data import attempt
from tests.unit.training_data import merged, sampled_by, samples_of, write_model

pytestmark = pytest.mark.contract  # the real Megatron-core

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
KEPT: dict[str, Any] = {
    "objective": {"old_policy": "kept", "kl_coef": 0.1},
    "trainer": {"kept_versions": 2, "lr": 1e-2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = write_model(tmp_path_factory.mktemp("model"))
    with alone.single_process():
        yield folder


def rows_of(step: int, *versions: int) -> list[dict[str, Any]]:
    """Samples whose stretches of sampled tokens come from these versions in turn."""
    return [sampled_by(row, *versions) for row in samples_of(step, 4)]


def trained(trainer: Director, store: MemoryStore, step: int, *versions: int) -> TrainResult:
    return trainer.put_step(step, batch_of(store, step, rows_of(step, *versions)))


def held(store: MemoryStore) -> list[int]:
    return sorted(int(name) for name in store.list_folders(actor_prefix("r1")))


def three_steps(model: Path) -> tuple[MemoryStore, Director, list[TrainResult]]:
    """Versions 0, 1, 2; the third step trains tokens of all three, several of them in one sample."""
    store = new_store(model, **KEPT)
    trainer = new_trainer(store)
    return (
        store,
        trainer,
        [trained(trainer, store, 0, 0), trained(trainer, store, 1, 1), trained(trainer, store, 2, 2, 0, 1)],
    )


def test_on_policy_a_kept_old_policy_is_the_recomputed_one_to_the_bit(model: Path) -> None:
    recomputed = new_store(model, objective={"kl_coef": 0.1}, trainer={"lr": 1e-2})
    kept = new_store(model, **KEPT)
    one, other = new_trainer(recomputed), new_trainer(kept)
    for step in range(3):
        mine, theirs = (trained(*each, step, step) for each in ((other, kept), (one, recomputed)))
        assert mine.actors_used == ()
        apart = {"seconds", "batch_digest"}
        assert mine.model_dump(exclude=apart) == theirs.model_dump(exclude=apart)
    assert held(recomputed) == [] and held(kept) == [0, 1, 2]


def test_each_tokens_old_log_prob_is_of_the_weights_that_sampled_it(model: Path) -> None:
    """Old and new log-probs from models of their own, put together token by token, give the loss that was reported."""
    store = new_store(model, objective={"old_policy": "kept"}, trainer=KEPT["trainer"])
    trainer = new_trainer(store)
    folders = [model]
    for step in range(2):
        trained(trainer, store, step, step)
        policy = trainer.replica.policy
        assert policy is not None
        folders.append(model.parent / f"version-{step + 1}")
        write_dir(policy.weights(), model, folders[-1])
    rows = rows_of(2, 2, 0, 1)
    assert any(len({span[2] for span in spans(row)}) == 3 for row in rows), "several versions in one sample"
    result = trained(trainer, store, 2, 2, 0, 1)
    assert result.actors_used == (0, 1)
    by_version = [logprobs_of(folder, rows) for folder in folders]
    total = clipped = 0.0
    config = RunConfig.parse({"objective": {"old_policy": "kept"}, "trainer": {"kept_versions": 2}}).objective
    for i, row in enumerate(rows):
        mask = row["loss_mask"] == 1
        which = np.zeros(len(mask), np.int64)
        for start, end, version in spans(row):
            which[start:end] = int(version[3:])
        old = np.array([by_version[v][i][t] for t, v in enumerate(which[mask])])
        new, rollout = by_version[2][i], row["logprobs"][mask].astype(np.float64)
        args = [
            torch.from_numpy(each) for each in (new, rollout, np.full(len(new), row["advantage"]), np.ones(len(new)))
        ]
        parts = policy_loss(*args, config, logprobs_old=torch.from_numpy(old))
        total, clipped = total + parts.loss_sum.item(), clipped + parts.clipped_sum.item()
    assert result.loss == pytest.approx(total / result.trained_tokens, rel=1e-4)
    assert result.clip_fraction == pytest.approx(clipped / result.trained_tokens) and clipped > 0


def spans(row: dict[str, Any]) -> list[tuple[int, int, str]]:
    return merged(row).version_spans


def test_a_lost_memory_has_the_actors_from_the_store(model: Path) -> None:
    store, trainer, results = three_steps(model)
    assert results[2].actors_used == (0, 1)
    for version, result in enumerate(results[:2], 1):
        actor = read_actor(cast(Any, store), "r1", version)
        assert actor is not None and actor.weights_digest == result.weights_digest
    trainer.checkpoint("r1", 2)
    again = new_trainer(store)
    assert again.open_run("r1")["weights_digest"] == results[2].weights_digest
    lost = MemoryStore()
    lost.objects = dict(store.objects)
    fourth = trained(trainer, store, 3, 3, 1, 2)
    restored = new_trainer(lost)
    assert trained(restored, lost, 3, 3, 1, 2).model_dump(exclude={"seconds"}) == fourth.model_dump(exclude={"seconds"})
    assert lost.objects.keys() == store.objects.keys()


def test_what_was_not_stored_is_made_again_by_the_steps_that_are_replayed(model: Path) -> None:
    """Killed after the record of a step and before anything of the next: the version's actor is not stored yet."""
    store, trainer, results = three_steps(model)
    actors = {key: data for key, data in store.objects.items() if key.startswith(actor_prefix("r1"))}
    for key in actors:
        store.delete(key)
    again = new_trainer(store)
    assert again.open_run("r1")["weights_digest"] == results[2].weights_digest
    assert {key: store.objects[key] for key in actors} == actors, "the same objects, by digest and byte"
    assert trained(again, store, 3, 1, 2) == trainer.put_step(3, batch_of(store, 3, rows_of(3, 1, 2)))


def test_an_actor_is_kept_before_the_step_that_leaves_it_or_the_step_is_not_taken(model: Path) -> None:
    store = new_store(model, **KEPT)
    trainer = new_trainer(store)
    before = trainer.open_run("r1")
    put_once = store.put_once

    def away(key: str, data: bytes) -> bool:
        if "/actors/" in key:
            raise StoreUnavailable("away")
        return put_once(key, data)

    body = batch_of(store, 0, rows_of(0, 0))
    store.put_once = away  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable):
        trainer.put_step(0, body)
    assert trainer.open_run("r1") == before and held(store) == []
    store.put_once = put_once  # type: ignore[method-assign]
    assert trainer.put_step(0, body).version_after == 1 and held(store) == [0]


def test_actors_that_a_restart_cannot_need_go_with_the_checkpoint(model: Path) -> None:
    store, trainer, _ = three_steps(model)
    for step in (3, 4):
        trained(trainer, store, step, step)
    assert held(store) == [0, 1, 2, 3, 4], "until then a restart may take any of these steps again"
    trainer.checkpoint("r1", 4)
    assert held(store) == [3, 4], "version 5 trains samples of 3 and 4"
    assert trained(trainer, store, 5, 5, 4, 3).actors_used == (3, 4)
    assert trainer.replica.actors is not None and sorted(trainer.replica.actors.kept) == [3, 4, 5]


def test_a_replay_goes_back_as_far_as_the_actors_it_needs_are_made_again(model: Path) -> None:
    store = new_store(model, **KEPT)
    trainer = new_trainer(store)
    results = [trained(trainer, store, step, step, max(0, step - 1)) for step in range(3)]
    trainer.checkpoint("r1", 2)
    results += [trained(trainer, store, step, step, step - 1) for step in (3, 4, 5)]
    assert rebuilt_from(cast(Any, store), config_of(store), 4)[0].step == 2  # type: ignore[union-attr]
    trainer.checkpoint("r1", 5)
    assert held(store) == [4, 5] and results[3].actors_used == (2,)
    assert rebuilt_from(cast(Any, store), config_of(store), 4)[0] is None, (
        "the checkpoint does not make version 2 again"
    )
    before = dict(store.objects)
    for step in (1, 4, 5):
        scratch = Scratch(cast(Any, store), remember=False)
        again = take(cast(Any, store), Replica(cast(Any, scratch), Layout(), "an incarnation"), "-", "r1", step)
        assert not scratch.written, "as many models as steps"
        assert again.model_dump(exclude={"seconds"}) == results[step].model_dump(exclude={"seconds"})
    assert store.objects == before


def test_an_actor_that_is_gone_or_damaged_is_named(model: Path) -> None:
    store, trainer, _ = three_steps(model)
    body = batch_of(store, 3, rows_of(3, 3, 1))
    trainer.checkpoint("r1", 2)
    key = next(key for key in store.list(actor_prefix("r1", 1)) if key.endswith(".safetensors"))
    good, manifest = store.objects[key], actor_prefix("r1", 1) + "manifest.json"
    store.objects[key] = good[:-1] + bytes([good[-1] ^ 1])
    again = new_trainer(store)
    before = again.open_run("r1")
    with pytest.raises(CorruptObject, match=f"object {key}: is not what its manifest committed"):
        again.put_step(3, body)
    store.objects[key] = good
    kept = store.objects.pop(manifest)
    with pytest.raises(CorruptObject, match=r"actors/000001/manifest.json: is missing: tokens of this step"):
        again.put_step(3, body)
    assert again.open_run("r1") == before
    store.put(manifest, orjson.dumps({"run": "r1"}))
    with pytest.raises(CorruptObject, match=r"is no manifest of a kept actor"):
        again.put_step(3, body)
    store.put(manifest, kept)
    assert again.put_step(3, body).actors_used == (1,)


@pytest.mark.parametrize("version", [0, 4])
def test_a_version_of_which_no_actor_is_kept_is_refused_by_the_sample(model: Path, version: int) -> None:
    """The filter books such samples as stale; a batch that holds one is not what the filter of this run wrote."""
    store, trainer, results = three_steps(model)
    with pytest.raises(CorruptObject, match=rf"holds tokens of version r1:{version}; .* those of r1:1, r1:2, r1:3"):
        trained(trainer, store, 3, 3, version)
    assert trainer.open_run("r1")["weights_digest"] == results[2].weights_digest


def test_a_step_that_is_not_finite_leaves_weights_and_actors(model: Path) -> None:
    rows = rows_of(3, 3, 1)
    rows[0]["logprobs"] = np.where(rows[0]["loss_mask"], -3e38, 0).astype(np.float32)
    rows[0]["advantage"] = -1.0
    config = {"objective": {"old_policy": "kept", "correction": "truncate", "correction_high": 3e38, "kl_coef": 0.1}}
    poisoned = new_store(model, **{**KEPT, **config})
    again = new_trainer(poisoned)
    for step in range(3):
        trained(again, poisoned, step, step)
    before = again.open_run("r1")["weights_digest"]
    refused = again.put_step(3, batch_of(poisoned, 3, rows))
    assert (refused.status, refused.version_after, refused.weights_digest) == ("nonfinite", 3, before)
    empty = again.put_step(4, batch_of(poisoned, 4, []))
    assert (empty.status, empty.version_after, empty.weights_digest) == ("empty", 3, before)
    policy = again.replica.policy
    assert policy is not None and digest_of(policy.weights()) == before
    after = trained(again, poisoned, 5, 3, 2, 1)
    assert (after.status, after.version_after, after.actors_used) == ("trained", 4, (1, 2))
    assert new_trainer(poisoned).open_run("r1")["weights_digest"] == after.weights_digest
    assert orjson.loads(poisoned.objects[step_key("r1", 3, "train.json")])["status"] == "nonfinite"


def config_of(store: MemoryStore) -> RunConfig:
    return RunConfig.parse(store.objects[run_config_key("r1")])


# -- what the filter lets pass ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "version", "fate"), [(0, 2, "stale"), (1, 2, "trained"), (1, 1, "stale"), (1, 4, "stale")]
)
def test_the_filter_books_as_stale_what_has_no_actor(kept: int, version: int, fate: str) -> None:
    config = RunConfig().objective
    records = [attempt(0, 0, 1.0, version=f"run:{version}"), attempt(0, 1, 0.0, version="run:3")]
    result = filter_groups(records, config, expected_version="run:3", max_seq_len=384, kept_versions=kept)
    assert result.decisions[0].bucket is Bucket(fate)
    assert sum(result.tokens.values()) == sum(record.sampled_tokens for record in records)
    mixed = replace(records[1].stored.leaves[0], versions=("run:3", f"run:{version}"))  # type: ignore[union-attr]
    stored = replace(records[1].stored, leaves=(mixed,))  # type: ignore[type-var]
    again = filter_groups(
        [records[1], replace(records[0], stored=stored, attempt_id="b")],
        config,
        expected_version="run:3",
        max_seq_len=384,
        kept_versions=kept,
    )
    assert again.decisions[0].bucket is Bucket(fate), "one token is enough"


def test_versions_that_may_train() -> None:
    assert trainable_versions("r:3", 0) == ("r:3",)
    assert trainable_versions("r:3", 2) == ("r:1", "r:2", "r:3")
    assert trainable_versions("r:1", 5) == ("r:0", "r:1")
