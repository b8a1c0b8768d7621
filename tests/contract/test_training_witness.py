"""The witness: which samples have a gradient, seen in the real model of the real trainer, against filter and ledger.

Every fault here is put where the trainer's own sums cannot see it: after the batch was checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pytest
import torch
import torch.nn.functional as F

from rl360.config.run import RunConfig
from rl360.errors import WitnessDisagrees
from rl360.ledger.checks import check_ledger, samples_digest
from rl360.ledger.outcomes import Bucket
from rl360.ledger.step import StepLedger, build_step_ledger
from rl360.objective.filters import FilterResult, TrainRow, filter_groups
from rl360.sessions.sample import AttemptRecord
from rl360.store.codec import pack, sha256_hex
from rl360.training.megatron import alone, policy
from rl360.training.megatron.model import Layout
from rl360.training.megatron.modules import CausalAttention
from rl360.training.megatron.witness import Witness
from rl360.training.packing import MicroBatch
from rl360.training.replica import OpenRun, Replica, TrainStep
from rl360.training.results import StepStatus, TrainResult
from tests.unit.memory_store import MemoryStore
from tests.unit.objective_data import OBJECTS, attempt
from tests.unit.test_objective_worked_faults import TOKENS, tries
from tests.unit.training_data import write_model

pytestmark = pytest.mark.contract  # the real Megatron-core

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
KEY = "filter.msgpack"
Spoil = Callable[[MicroBatch], MicroBatch]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = write_model(tmp_path_factory.mktemp("model"))
    with alone.single_process():
        yield folder


def records() -> list[AttemptRecord]:
    """Two groups that disagree (one attempt of two branches, one stale, one lost), and one that agrees."""
    made = [attempt(0, i, float(i % 2), trained=5 + i, prompt=3 + i, seed=i) for i in range(4)]
    made += [attempt(1, 0, 1.0, leaves=[{"seed": 7}, {"seed": 8, "trained": 9}]), attempt(1, 1, 0.0, seed=9)]
    made += [attempt(1, 2, 0.0, version="run:7"), attempt(1, 3, None)]
    return made + [attempt(2, i, 1.0, seed=20 + i) for i in range(3)]


class Rig:
    """A trainer with a run open, and the step of some records before it."""

    def __init__(self, model: Path, made: list[AttemptRecord], *, witness: bool = True, **objective: Any) -> None:
        trainer = {"witness": witness, "max_tokens_per_micro_batch": 64, "lr": 1e-3}
        fields = {"run": "demo", "rollout": {"max_seq_len": 64}, "trainer": trainer, "objective": objective}
        self.config, self.records, self.store = RunConfig.parse(fields), made, MemoryStore()
        self.result = self._filtered()
        self.data = pack(self.result.to_wire("demo", 0))
        self.store.put(KEY, self.data)
        for record in made:
            if record.stored is not None:
                self.store.put(record.stored.key, OBJECTS[record.stored.sha256])
        self.replica = Replica(cast(Any, self.store), Layout(), "here")
        self.replica.execute(OpenRun("demo", self.config.to_json(), str(model), None, ()))

    def _filtered(self) -> FilterResult:
        return filter_groups(self.records, self.config.objective, expected_version="run:0", max_seq_len=64)

    @property
    def weights(self) -> str:
        assert self.replica.at is not None
        return self.replica.at.digest

    def train(self) -> TrainResult:
        return cast(TrainResult, self.replica.execute(TrainStep(0, KEY, sha256_hex(self.data))))

    def ledger(self, result: TrainResult) -> StepLedger:
        said = orjson.loads(result.model_dump_json())
        return build_step_ledger(
            run="demo",
            step=0,
            attempts=self.records,
            decisions=self.result.decisions,
            train=said,
            push=None,
            phases_s={},
        )


def spoil(monkeypatch: pytest.MonkeyPatch, change: Spoil) -> None:
    """Every rectangle changed after the batch and its samples were checked."""
    build = policy.build
    monkeypatch.setattr(policy, "build", lambda *args: change(build(*args)))


# -- it agrees --------------------------------------------------------------------------------------------------------


def test_it_sees_the_samples_that_the_ledger_books_and_changes_no_bit(model: Path) -> None:
    rig, plain = Rig(model, records()), Rig(model, records(), witness=False)
    result, without = rig.train(), plain.train()
    assert result.status is StepStatus.TRAINED and result.weights_digest == without.weights_digest
    assert (result.loss, result.grad_norm, without.witness) == (without.loss, without.grad_norm, None)
    seen = result.witness
    assert seen is not None
    assert (seen.samples, seen.tokens, seen.cannot_tell) == (7, rig.result.trained_tokens, 0)
    assert seen.excused == ()
    ledger = rig.ledger(result)
    trained = [
        (row.attempt_id, at) for row in ledger.attempts for at, b in enumerate(row.leaves) if b is Bucket.TRAINED
    ]
    assert len(trained) == 7 and samples_digest(trained) == seen.digest
    checks = {each.name: each for each in check_ledger(ledger)}
    assert all(check.holds for check in checks.values())
    assert checks["samples with a gradient"].line() == "booked 7 = seen 7"
    assert checks["positions with a gradient"].line() == f"booked {seen.tokens} = seen {seen.tokens}"
    other = replace(
        ledger, train=replace(ledger.train, witness={**seen.model_dump(), "digest": samples_digest(trained[1:])})
    )
    assert [each.name for each in check_ledger(other) if not each.holds] == ["samples with a gradient"]
    assert plain.ledger(without).train.witness is None


def test_nothing_is_left_in_the_model(model: Path) -> None:
    rig = Rig(model, records())
    rig.train()
    assert rig.replica.policy is not None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in rig.replica.policy.core.modules())


# -- it does not ------------------------------------------------------------------------------------------------------


def leaking(batch: MicroBatch, row: int, columns: slice) -> MicroBatch:
    mask, advantages, weights = batch.mask.copy(), batch.advantages.copy(), batch.weights.copy()
    mask[row, columns], advantages[row, columns], weights[row, columns] = 1, 1.0, 1.0
    return replace(batch, mask=mask, advantages=advantages, weights=weights)


def observations_train(batch: MicroBatch) -> MicroBatch:
    """The first sample's prompt and tool output are under the mask."""
    return leaking(batch, batch.indices.index(0), slice(0, 10)) if 0 in batch.indices else batch


def padding_trains(batch: MicroBatch) -> MicroBatch:
    """One more row, of no sample, trains."""
    more = {
        name: np.concatenate([value, value[:1]]) for name, value in vars(batch).items() if isinstance(value, np.ndarray)
    }
    return replace(batch, **more)


def swapped(batch: MicroBatch) -> MicroBatch:
    """A row's mask is another's: the counts of the step are right."""
    return replace(batch, mask=batch.mask[::-1].copy())


def lost(batch: MicroBatch) -> MicroBatch:
    """A row that is booked has no weight."""
    weights = batch.weights.copy()
    weights[0] = 0
    return replace(batch, weights=weights)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (observations_train, r"s000000-g000-a00-t0 leaf 0 \(5 booked, 10 with a gradient"),
        (padding_trains, "a row of padding"),
        (swapped, r"\(\d+ booked, \d+ with a gradient"),
        (lost, r"\(\d+ booked, 0 with a gradient\)"),
    ],
)
def test_what_was_not_booked_is_named_and_nothing_is_applied(
    model: Path, monkeypatch: pytest.MonkeyPatch, change: Spoil, said: str
) -> None:
    spoil(monkeypatch, change)
    blind = Rig(model, records(), witness=False)
    assert blind.train().status is StepStatus.TRAINED, "the trainer alone does not see it"
    rig = Rig(model, records())
    before = rig.weights
    with pytest.raises(WitnessDisagrees, match=said):
        rig.train()
    assert rig.weights == before and rig.replica.at is not None and rig.replica.at.next_step == 0
    monkeypatch.undo()
    assert rig.train().weights_digest == Rig(model, records(), witness=False).train().weights_digest


def test_a_masked_out_sample_that_leaks_is_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the batch that has nothing to train gets a mask on its way into the rectangle."""
    rig = Rig(model, records())
    wire = rig.result.to_wire("demo", 0)
    row = wire["samples"][0]
    bare = attempt(0, 0, 0.0, trained=0, prompt=8)
    assert bare.stored is not None and row["attempt_id"] == bare.attempt_id
    row.update(key=bare.stored.key, sha256=bare.stored.sha256, tokens=bare.stored.leaves[0].tokens, trained=0)
    rig.store.put(bare.stored.key, OBJECTS[bare.stored.sha256])
    rig.data = pack(wire)
    rig.store.put(KEY, rig.data)
    spoil(monkeypatch, lambda b: leaking(b, b.indices.index(0), slice(3, 4)) if 0 in b.indices else b)
    with pytest.raises(
        WitnessDisagrees, match=r"-a00-t0 leaf 0 \(0 booked, 1 with a gradient, which reaches column 4\)"
    ):
        rig.train()
    monkeypatch.undo()
    seen = rig.train().witness
    assert seen is not None and seen.samples == 6


def test_a_sample_that_sees_what_comes_after_is_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that is not causal: the loss reaches the padding and what follows the last token that trains."""

    def both_ways(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.grouped)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    monkeypatch.setattr(CausalAttention, "forward", both_ways)
    with pytest.raises(WitnessDisagrees, match=r"5 booked, 5 with a gradient, which reaches column 1\d"):
        Rig(model, records()).train()


# -- exact zeros ------------------------------------------------------------------------------------------------------


def test_an_advantage_of_0_has_no_gradient_unless_the_loss_has_other_terms(model: Path) -> None:
    """Three passes of which two are penalised, and a failure at the same score: their group trains with advantage 0."""
    made = [attempt(0, i, 1.0, seed=i) for i in range(2)] + [attempt(0, 2, 0.5, seed=2)]
    for record in made:
        record.agent_metrics["format_errors"] = 1.0
    made += [attempt(1, i, float(i), seed=10 + i) for i in range(2)]
    for record in made[3:]:
        record.agent_metrics["format_errors"] = 0.0
    rig = Rig(model, made, format_error_penalty=0.5)
    assert [row.advantage for row in rig.result.kept] == [0.0, 0.0, 0.0, -0.5, 0.5]
    seen = rig.train().witness
    assert seen is not None and (seen.samples, seen.cannot_tell) == (2, 0)
    entropy = Rig(model, made, format_error_penalty=0.5, entropy_coef=0.01).train()
    seen = entropy.witness
    assert seen is not None and (seen.samples, seen.cannot_tell, seen.excused) == (5, 3, (0, 1, 2))
    assert all(check.holds for check in check_ledger(rig.ledger(entropy)))


@pytest.mark.parametrize(("level", "low", "dark"), [("token", 0.99, (7, 7)), ("geometric", 0.0028, (1, 6))])
def test_of_what_a_correction_may_have_dropped_it_cannot_tell(
    model: Path, level: str, low: float, dark: tuple[int, int]
) -> None:
    """The made-up log-probs are far from the model's: masks drop tokens, or whole samples, and the step counts them."""
    rig = Rig(model, records(), correction="mask", correction_level=level, correction_low=low, correction_high=1.01)
    result = rig.train()
    seen, tokens = result.witness, rig.result.trained_tokens
    assert seen is not None and result.masked_fraction is not None
    assert seen.tokens == round(tokens * (1 - result.masked_fraction)) and seen.cannot_tell > 0
    ledger = rig.ledger(result)
    assert all(check.holds for check in check_ledger(ledger))
    assert seen.excused is not None and dark[0] <= len(seen.excused) <= dark[1]
    assert len(seen.excused) == len(rig.result.kept) - seen.samples <= seen.cannot_tell
    others: list[dict[str, Any]] = [{"excused": list(seen.excused[1:])}, {"tokens": seen.tokens - 1}]
    for changes in (*others, {"digest": "0" * 64}, {"cannot_tell": 0}, {"tokens": tokens + 1}):
        other = replace(ledger, train=replace(ledger.train, witness={**seen.model_dump(), **changes}))
        assert [check.name for check in check_ledger(other) if not check.holds], changes


@pytest.mark.usefixtures("model")  # it makes the process group
def test_more_silence_than_the_loss_explains_is_a_fault() -> None:
    row = TrainRow("a", "g", 0, "k", "d", 9, 4, 1.0, 0.25)
    for dropped in (0.0, 2.0, 3.0):
        witness = Witness([row], other_terms=False)
        grad = torch.zeros(8, 1, 2)
        grad[3] = 1.0  # one of four
        witness.note(0, (0,), 0, grad)
        witness.note(1, (0,), 0, grad)
        if dropped < 3:
            with pytest.raises(WitnessDisagrees, match="a leaf 0"):
                witness.settle({"clipped": 0.0, "masked": dropped})
        else:
            witness.settle({"clipped": 1.0, "masked": 2.0})
            assert witness.report is not None
            assert (witness.report.samples, witness.report.tokens, witness.report.cannot_tell) == (1, 1, 1)


# -- the worked step --------------------------------------------------------------------------------------------------


def test_the_worked_step_of_56_tries_trains_as_its_33_valid_ones(model: Path) -> None:
    """tests/unit/test_objective_worked_faults.py through the real trainer: 23 lost tries scale no gradient and dilute
    no mean; what the naive divisor makes of the same sums stands beside."""
    crowd = tries()
    valid = [record for record in crowd if record.verdict is not None]
    assert (len(crowd), len(valid)) == (56, 33)
    ours, alone = Rig(model, crowd).train(), Rig(model, valid).train()
    assert ours.weights_digest == alone.weights_digest, "gradient scale x 1, to the bit"
    for name in ("loss", "grad_norm", "mean_abs_dlogp", "tis_mean", "loss_weight_sum", "trained_tokens", "witness"):
        assert getattr(ours, name) == getattr(alone, name) is not None
    assert ours.trained_tokens == 33 * TOKENS and ours.loss_weight_sum == 1.0
    assert ours.witness is not None and ours.witness.samples == 33
    # by a mean over all 56 rows each of these would read 0.59 of itself
    assert ours.mean_abs_dlogp is not None and ours.mean_abs_dlogp > 1.0
    assert round(ours.mean_abs_dlogp * ours.trained_tokens / (56 * TOKENS) / ours.mean_abs_dlogp, 2) == 0.59
