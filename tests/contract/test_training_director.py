"""A step is applied once: the director and a real replica over a store that can be away at the worst moment.

The same over HTTP, S3 and SIGKILL is in tests/contract/test_trainer.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
import torch

from rl360.config.run import RunConfig
from rl360.errors import BadInput, CorruptObject, ReplayMismatch, StoreUnavailable
from rl360.replay.steps import Scratch
from rl360.replay.trainer import take
from rl360.sessions.sample import encode_samples
from rl360.store.codec import sha256_hex
from rl360.store.layout import merged_key, run_config_key, step_key
from rl360.training.director import Conflict, Director, ExportBody, StepBody
from rl360.training.megatron import alone
from rl360.training.megatron.hf_dir import read_tensors
from rl360.training.megatron.hf_map import digest_of
from rl360.training.megatron.model import Layout
from rl360.training.replica import Replica
from rl360.training.results import StepStatus
from tests.unit.memory_store import MemoryStore
from tests.unit.training_data import batch, merged, put_batch, sample, samples_of, stored_row, untrained, write_model

pytestmark = pytest.mark.contract  # the real Megatron-core

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = write_model(tmp_path_factory.mktemp("model"))
    with alone.single_process():
        yield folder


def new_store(model: Path, **fields: Any) -> MemoryStore:
    store = MemoryStore()
    config = RunConfig.parse({"run": "r1", "model": {"path": str(model)}, **fields})
    store.put(run_config_key("r1"), config.to_json())
    return store


def new_trainer(store: MemoryStore) -> Director:
    """A trainer that has just been started: it knows what the store holds and nothing else."""
    replica = Replica(cast(Any, store), Layout(), "an incarnation")
    return Director(replica, cast(Any, SimpleNamespace(model_dir="-")), replica.execute)


def batch_of(store: MemoryStore, step: int, samples: list[dict[str, Any]] | None = None) -> StepBody:
    return StepBody(**put_batch(store, "r1", step, samples_of(step, 4) if samples is None else samples))


def test_asking_again_trains_nothing(model: Path) -> None:
    store = new_store(model)
    trainer = new_trainer(store)
    first = trainer.put_step(0, batch_of(store, 0))
    assert trainer.put_step(0, batch_of(store, 0)) == first
    assert (first.status, first.version_after) == (StepStatus.TRAINED, 1)
    assert first.loss_weight_sum == pytest.approx(1.0)
    assert trainer.open_run("r1")["weights_digest"] == first.weights_digest
    with pytest.raises(Conflict, match=r"step 0 of r1 was trained on .*, asked for "):
        trainer.put_step(0, batch_of(store, 0, samples_of(9, 4)))
    with pytest.raises(Conflict, match="next step is 1"):
        trainer.put_step(2, batch_of(store, 2))


def test_a_trainer_that_lost_its_memory_ends_in_the_same_bits(model: Path) -> None:
    store = new_store(model)
    trainer = new_trainer(store)
    results = [trainer.put_step(step, batch_of(store, step)) for step in (0, 1)]
    again = new_trainer(store)
    assert again.open_run("r1")["weights_digest"] == results[-1].weights_digest
    trainer.checkpoint("r1", 1)
    third = trainer.put_step(2, batch_of(store, 2))
    restored = new_trainer(store)  # from the checkpoint, and one step replayed after it
    assert restored.open_run("r1")["weights_digest"] == third.weights_digest
    assert restored.put_step(2, batch_of(store, 2)) == third
    fourth = batch_of(store, 3)
    ahead = restored.put_step(3, fourth)
    assert trainer.put_step(3, fourth) == ahead  # another trainer recorded it: taken over, not trained again
    assert trainer.open_run("r1")["weights_digest"] == ahead.weights_digest


@pytest.mark.parametrize(("damage", "match"), [("missing", "is missing though"), ("flipped", "has sha256 ")])
def test_a_sample_that_is_not_what_was_stored_is_refused_by_name(model: Path, damage: str, match: str) -> None:
    """Nothing is applied, and the same step goes on once the object is back; a replay refuses it in the same words."""
    store = new_store(model)
    trainer = new_trainer(store)
    body = batch_of(store, 0)
    before = trainer.open_run("r1")
    key = merged_key("r1", 0, 0, samples_of(0)[2]["attempt_id"])
    good = store.objects[key]

    def spoil() -> None:
        if damage == "missing":
            del store.objects[key]
        else:
            store.objects[key] = good[:-1] + bytes([good[-1] ^ 1])

    spoil()
    with pytest.raises(CorruptObject, match=f"object {key}: {match}"):
        trainer.put_step(0, body)
    assert trainer.open_run("r1") == before
    store.objects[key] = good
    trained = trainer.put_step(0, body)
    spoil()
    with pytest.raises(CorruptObject, match=f"object {key}: {match}"):
        new_trainer(store).open_run("r1")
    store.objects[key] = good
    assert new_trainer(store).open_run("r1")["weights_digest"] == trained.weights_digest


def test_every_leaf_of_an_attempt_trains_once(model: Path) -> None:
    """Two leaves of one attempt in one object end in the same weights as two attempts with an object each."""
    apart, together = new_store(model), new_store(model)
    rows = [sample(i, name, advantage=0.5) for i, name in enumerate(("s000000-g000-a00-t0", "s000000-g000-a01-t0"))]
    expected = new_trainer(apart).put_step(0, batch_of(apart, 0, rows))
    name = rows[0]["attempt_id"]
    leaves = [row | {"attempt_id": name} for row in rows]
    data = encode_samples([merged(row, leaf) for leaf, row in enumerate(leaves)])
    key = merged_key("r1", 0, 0, name)
    together.put(key, data)
    shared = {"key": key, "sha256": sha256_hex(data), "weight": 1 / expected.trained_tokens}
    wire = [stored_row(MemoryStore(), "r1", 0, row, leaf=leaf, **shared) for leaf, row in enumerate(leaves)]
    together.put(step_key("r1", 0, "filter.msgpack"), batch("r1", 0, wire))
    digest = sha256_hex(together.objects[step_key("r1", 0, "filter.msgpack")])
    result = new_trainer(together).put_step(
        0, StepBody(run="r1", batch_key=step_key("r1", 0, "filter.msgpack"), batch_digest=digest)
    )
    assert (result.trained_samples, result.trained_tokens) == (2, expected.trained_tokens)
    assert result.weights_digest == expected.weights_digest
    assert together.read.count(key) == 1


def test_a_record_that_could_not_be_written_is_no_second_step(model: Path) -> None:
    store, calm = new_store(model), new_store(model)
    expected = new_trainer(calm).put_step(0, batch_of(calm, 0))
    trainer = new_trainer(store)
    body = batch_of(store, 0)
    put_once = store.put_once

    def away(key: str, data: bytes) -> bool:
        raise StoreUnavailable("away")

    store.put_once = away  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=r"is applied in memory and not recorded .*ask for it again"):
            trainer.put_step(0, body)
    with pytest.raises(Conflict, match="step 0 of r1 is applied, not recorded yet"):
        trainer.put_step(1, batch_of(store, 1))
    with pytest.raises(Conflict, match="not recorded yet"):
        trainer.checkpoint("r1", 0)
    store.put_once = put_once  # type: ignore[method-assign]
    assert trainer.put_step(0, body).weights_digest == expected.weights_digest


@pytest.mark.parametrize("samples", [[], "no token under the mask"], ids=["no sample", "no token"])
def test_an_empty_step_changes_nothing_and_has_no_loss(model: Path, samples: Any) -> None:
    store = new_store(model)
    trainer = new_trainer(store)
    before = trainer.open_run("r1")["weights_digest"]
    rows = [untrained(row) for row in samples_of(0, 2)] if samples else []
    result = trainer.put_step(0, batch_of(store, 0, rows))
    assert (result.status, result.loss, result.version_after, result.weights_digest) == ("empty", None, 0, before)
    assert trainer.put_step(1, batch_of(store, 1)).version_after == 1


def test_a_replay_that_differs_stops_the_run(model: Path) -> None:
    store = new_store(model)
    result = new_trainer(store).put_step(0, batch_of(store, 0))
    changed = result.model_copy(update={"weights_digest": "f" * 64})
    store.put(step_key("r1", 0, "train.json"), changed.model_dump_json().encode())
    for _ in range(2):
        with pytest.raises(ReplayMismatch, match=r"replay of step 0 of r1: weights .* differ from the recorded ffff"):
            new_trainer(store).open_run("r1")


def test_the_runs_temperature_reaches_the_loss(model: Path) -> None:
    distances = []
    for temperature in (1.0, 0.5):
        store = new_store(model, rollout={"temperature": temperature})
        distances.append(new_trainer(store).put_step(0, batch_of(store, 0)).mean_abs_dlogp)
    assert distances[0] != pytest.approx(distances[1], rel=1e-3)


def test_a_run_of_a_config_that_todays_rules_refuse_is_restored_exported_and_replayed(
    model: Path, tmp_path: Path
) -> None:
    """Its steps are done: whether it may go on is asked where a run is started."""
    store = new_store(model)
    trainer = new_trainer(store)
    results = [trainer.put_step(step, batch_of(store, step)) for step in range(2)]
    frozen = orjson.loads(store.get(run_config_key("r1")))
    frozen["rollout"]["pick"] = "all"  # with linear sessions, as it could be
    store.put(run_config_key("r1"), orjson.dumps(frozen))
    with pytest.raises(BadInput, match="pick all says nothing"):
        RunConfig.parse(store.get(run_config_key("r1")))
    again = new_trainer(store)
    assert again.open_run("r1")["weights_digest"] == results[1].weights_digest
    done = again.export("r1", ExportBody(dir=str(tmp_path / "out"), dtype="float32"))
    assert done["weights_digest"] == results[1].weights_digest == digest_of(read_tensors(tmp_path / "out"))
    replica = Replica(cast(Any, Scratch(cast(Any, store))), Layout(), "an incarnation")
    replayed = take(cast(Any, store), replica, "-", "r1", 1)
    assert replayed.model_dump(exclude={"seconds"}) == results[1].model_dump(exclude={"seconds"})
