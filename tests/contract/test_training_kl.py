"""The KL to a reference policy, through the real backend: what is loaded, what it adds to loss and gradient, what it
takes off the reward; the same bits after a restart and in a replay."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from rl360.config.run import ObjectiveConfig
from rl360.errors import BadInput
from rl360.objective.kl import KINDS, kl_ahead, reward_advantages, token_kl
from rl360.replay.steps import Scratch
from rl360.replay.trainer import take
from rl360.store.codec import sha256_hex
from rl360.store.layout import reference_key
from rl360.training import actors
from rl360.training.director import Director, StepBody
from rl360.training.megatron import alone
from rl360.training.megatron.hf_dir import write_dir
from rl360.training.megatron.model import Layout
from rl360.training.megatron.policy import DeviceBatch, Goal, Optim, Policy
from rl360.training.objective import policy_sums
from rl360.training.packing import MicroBatch, TrainSequence
from rl360.training.replica import Replica
from rl360.training.results import TrainResult
from tests.contract.test_training_backend import sequences
from tests.contract.test_training_director import batch_of, new_store, new_trainer
from tests.unit.memory_store import MemoryStore
from tests.unit.training_data import batch, put_batch, routed, samples_of, stored_row, write_model

pytestmark = pytest.mark.contract  # the real Megatron-core

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
KL = {"kl_coef": 0.3}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    folder = tmp_path_factory.mktemp("models")
    made = {"start": write_model(folder / "start"), "other": write_model(folder / "other", seed=5)}
    made["moe"] = write_model(folder / "moe", experts=4)
    with alone.single_process():
        yield made


def trained(trainer: Director, store: MemoryStore, step: int, rows: list[dict[str, Any]] | None = None) -> TrainResult:
    return trainer.put_step(step, batch_of(store, step, rows))


def logprobs_of(folder: Path, rows: list[dict[str, Any]], temperature: float = 1.0) -> list[np.ndarray]:
    """Of every sample's trained tokens, by a model of its own."""
    policy = Policy(folder, Layout())
    batches = policy.micro_batches([_sequence(row) for row in rows], 4096)
    found = [np.zeros(0)] * len(rows)
    for one, values in zip(batches, policy.batch_logprobs(batches, temperature), strict=True):
        assert values is not None
        for row, index in enumerate(one.indices):
            found[index] = values[row][one.mask[row].astype(bool)].astype(np.float64)
    return found


def _sequence(row: dict[str, Any]) -> TrainSequence:
    return TrainSequence(row["tokens"], row["loss_mask"], row["logprobs"], row["advantage"])


# -- what is loaded ---------------------------------------------------------------------------------------------------


def test_without_a_coefficient_no_reference_is_loaded_or_run(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_args: Any, **_kwargs: Any) -> Any:
        raise AssertionError("a reference was asked for")

    monkeypatch.setattr(actors, "read_tensors", refused)
    monkeypatch.setattr(Policy, "batch_logprobs", refused)
    store = new_store(models["start"])
    trainer = new_trainer(store)
    result = trained(trainer, store, 0)
    assert result.status == "trained" and result.kl_mean is None
    assert trainer.replica.actors is not None and trainer.replica.actors.reference is None
    assert not store.exists(reference_key("r1"))
    monkeypatch.undo()
    with_kl = new_store(models["start"], objective=KL)
    assert trained(new_trainer(with_kl), with_kl, 0).kl_mean == 0.0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_reference_is_what_the_run_starts_from(models: dict[str, Path], temperature: float) -> None:
    """At the first step the KL is exactly 0 and moves no bit of the weights; from the second on it pulls back."""
    plain = new_store(models["start"], rollout={"temperature": temperature}, trainer={"lr": 1e-2})
    store = new_store(models["start"], rollout={"temperature": temperature}, objective=KL, trainer={"lr": 1e-2})
    without, trainer = new_trainer(plain), new_trainer(store)
    first, same = trained(trainer, store, 0), trained(without, plain, 0)
    assert (first.kl_mean, first.loss, first.weights_digest) == (0.0, same.loss, same.weights_digest)
    policy = trainer.replica.policy
    assert policy is not None
    moved = policy.weights()
    second, other = trained(trainer, store, 1), trained(without, plain, 1)
    assert second.kl_mean is not None and second.kl_mean > 1e-4
    assert second.weights_digest != other.weights_digest
    folder = models["start"].parent / f"moved-{temperature}"
    write_dir(moved, models["start"], folder)
    rows = samples_of(1, 4)
    pairs = zip(logprobs_of(folder, rows, temperature), logprobs_of(models["start"], rows, temperature), strict=True)
    kl = np.concatenate([np.exp(ref - new) - 1 + (new - ref) for new, ref in pairs])
    assert second.kl_mean == pytest.approx(kl.mean(), rel=1e-4)
    assert second.loss is not None and other.loss is not None
    assert second.loss - other.loss == pytest.approx(KL["kl_coef"] * kl.mean(), rel=1e-3)


def test_another_reference_must_be_of_the_policys_shape_and_stay_what_it_was(models: dict[str, Path]) -> None:
    store = new_store(models["start"], objective={**KL, "reference": str(models["moe"])})
    with pytest.raises(BadInput, match=r"reference .*/moe is another model than the policy"):
        new_trainer(store).open_run("r1")
    with pytest.raises(BadInput, match="no model at /nowhere"):
        new_trainer(new_store(models["start"], objective={**KL, "reference": "/nowhere"})).open_run("r1")
    folder = write_model(models["start"].parent / "replaced", seed=5)
    store = new_store(models["start"], objective={**KL, "reference": str(folder)})
    result = trained(new_trainer(store), store, 0)
    assert result.kl_mean is not None and result.kl_mean > 0.01
    write_model(folder, seed=6)
    with pytest.raises(BadInput, match=r"reference .*/replaced holds weights .*, run r1 began with .*; restore"):
        new_trainer(store).open_run("r1")
    write_model(folder, seed=5)
    assert new_trainer(store).open_run("r1")["weights_digest"] == result.weights_digest


def test_a_reference_is_given_the_engines_routing(models: dict[str, Path]) -> None:
    store = new_store(models["moe"], objective=KL, trainer={"routing_replay": True})
    rows = [routed(row) for row in samples_of(0, 4)]
    assert trained(new_trainer(store), store, 0, rows).kl_mean == 0.0


@pytest.mark.parametrize(
    "objective",
    [
        KL,
        {"estimator": "rloo", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
        {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k3"},
    ],
    ids=["loss", "reward", "k3 reward"],
)
def test_a_lost_memory_and_a_replay_end_in_the_same_bits(models: dict[str, Path], objective: dict[str, Any]) -> None:
    store = new_store(models["start"], objective={**objective, "reference": str(models["other"])})
    trainer = new_trainer(store)
    results = [trained(trainer, store, step) for step in range(3)]
    assert new_trainer(store).open_run("r1")["weights_digest"] == results[-1].weights_digest
    before = dict(store.objects)
    replica = Replica(cast(Any, Scratch(cast(Any, store))), Layout(), "an incarnation")
    again = take(cast(Any, store), replica, "-", "r1", 1)
    assert again.model_dump(exclude={"seconds"}) == results[1].model_dump(exclude={"seconds"})
    assert store.objects == before


def test_a_step_that_is_not_finite_changes_nothing_under_a_kl(models: dict[str, Path]) -> None:
    broken = write_model(models["start"].parent / "broken", seed=5)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][0] = np.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    for more in ({}, {"estimator": "rloo", "kl_in": "reward", "kl_estimator": "k1"}):
        store = new_store(models["start"], objective={**KL, **more, "reference": str(broken)})
        trainer = new_trainer(store)
        before = trainer.open_run("r1")["weights_digest"]
        result = trained(trainer, store, 0)
        assert (result.status, result.loss, result.kl_mean, result.version_after) == ("nonfinite", None, None, 0)
        assert result.weights_digest == before
        policy = trainer.replica.policy
        assert policy is not None and all(not tensor.any() for tensor in policy.moments()["exp_avg"].values())


# -- loss and gradient ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def judged(models: dict[str, Path]) -> tuple[Policy, list[MicroBatch], list[MicroBatch], float]:
    """A policy, its micro-batches in two cuts with log-probs of another model, and the number of trained tokens."""
    policy = Policy(models["start"], Layout(), Optim(lr=1e-2))
    other = policy.parts(actors.read_tensors(models["other"]))
    noise = np.random.default_rng(3)
    samples = [replace(one, weight=float(noise.uniform(0.5, 2))) for one in sequences(2)]

    def cut(size: int) -> list[MicroBatch]:
        batches = policy.micro_batches(samples, size)
        found = policy.batch_logprobs(batches, parts=other)
        return [replace(one, reference=values) for one, values in zip(batches, found, strict=True)]

    return policy, cut(4096), cut(64), float(sum(int(one.loss_mask.sum()) for one in samples))


def test_running_with_other_parameters_leaves_the_policys_own(models: dict[str, Path]) -> None:
    policy = Policy(models["start"], Layout(), Optim(lr=1e-2))
    batches = policy.micro_batches(sequences(1), 4096)
    before, mine = policy.weights(), policy.batch_logprobs(batches)
    held = [param.data_ptr() for param in policy.core.parameters()]
    parts = policy.parts(actors.read_tensors(models["other"]))
    found = policy.batch_logprobs(batches, parts=parts)
    expected = Policy(models["other"], Layout()).batch_logprobs(batches)
    for one, theirs, own in zip(found, expected, mine, strict=True):
        assert one is not None and theirs is not None and own is not None
        assert np.array_equal(one, theirs) and not np.array_equal(one, own)
    with pytest.raises(RuntimeError), policy._holding(parts):
        raise RuntimeError("in the middle")
    assert [param.data_ptr() for param in policy.core.parameters()] == held
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.weights().items())


@pytest.mark.parametrize("kind", ["k2", "k3", "low_variance"])
def test_the_kl_is_weighed_as_the_loss_and_depends_on_no_cut(judged: Any, kind: str) -> None:
    policy, batches, narrow, tokens = judged
    without = policy.accumulate(batches, Goal(policy_sums(ObjectiveConfig()), tokens))[0]
    config = ObjectiveConfig.model_validate({**KL, "kl_estimator": kind})
    sums, norm = policy.accumulate(batches, Goal(policy_sums(config), tokens))
    again, norm_again = policy.accumulate(narrow, Goal(policy_sums(config), tokens))
    assert sums == pytest.approx(again, rel=1e-4, abs=1e-4) and norm == pytest.approx(norm_again, rel=1e-4)
    total = weighed = 0.0
    for one, values in zip(batches, policy.batch_logprobs(batches), strict=True):
        each = token_kl(torch.from_numpy(values).double(), torch.from_numpy(one.reference).double(), kind).numpy()
        total += float((each * one.mask).sum())
        weighed += float((each * one.mask * one.weights).sum())
    assert sums["kl"] == pytest.approx(total, rel=1e-5)
    assert sums["loss"] - without["loss"] == pytest.approx(KL["kl_coef"] * weighed, rel=1e-3)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_the_models_gradient_of_the_kl_matches_finite_differences(judged: Any, kind: str) -> None:
    """Along its own gradient, advantages being 0: the loss is the KL and nothing else."""
    policy, batches, _, tokens = judged
    alone = [replace(one, advantages=np.zeros_like(one.advantages)) for one in batches]
    sums = policy_sums(ObjectiveConfig(kl_coef=1.0, kl_estimator=cast(Any, kind)))
    _, norm = policy.accumulate(alone, Goal(sums, tokens))
    params = list(policy.core.parameters())
    slope = [param.main_grad.clone() for param in params]
    reach = 2e-3 / norm
    losses = []
    for sign in (1, -1):
        with torch.no_grad(), policy._holding([p + sign * reach * g for p, g in zip(params, slope, strict=True)]):
            losses.append(policy.accumulate(alone, Goal(sums, tokens))[0]["loss"] / tokens)
    assert (losses[0] - losses[1]) / (2 * reach) == pytest.approx(norm**2, rel=2e-3)


@pytest.mark.parametrize("kind", ["k2", "k3", "low_variance"])
@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_the_whole_losss_gradient_matches_finite_differences(kind: str, loss: str) -> None:
    """The trainer's own sums from logits on, in float64: policy loss against a kept old policy, entropy and KL."""
    rng = torch.Generator().manual_seed(7)
    logits = torch.randn(3, 6, 5, dtype=torch.float64, generator=rng, requires_grad=True)
    targets = torch.randint(0, 5, (3, 6), generator=rng)

    def near(spread: float) -> torch.Tensor:
        held = logits.detach() + spread * torch.randn(logits.shape, dtype=torch.float64, generator=rng)
        return held.log_softmax(-1).gather(-1, targets[..., None])[..., 0]

    values = {"logprobs": near(0.2), "old": near(0.1), "reference": near(0.5)}
    advantages, weights = (torch.rand(3, 6, dtype=torch.float64, generator=rng) - shift for shift in (0.5, 0.0))
    versions = torch.zeros(3, 6, dtype=torch.int32)
    held = DeviceBatch(
        (), targets, targets, (torch.rand(3, 6, generator=rng) > 0.3).to(torch.uint8), values["logprobs"], advantages,
        weights, versions=versions, old=values["old"], reference=values["reference"],
    )  # fmt: skip
    fields = {"old_policy": "kept", "loss": loss, "clip_low": 0.9, "clip_high": 9.0, "entropy_coef": 0.1}
    config = ObjectiveConfig.model_validate({**fields, "kl_coef": 0.4, "kl_estimator": kind})

    def of(logits: torch.Tensor) -> torch.Tensor:
        plain = logits.log_softmax(-1)
        return policy_sums(config, 1)(
            plain.gather(-1, targets[..., None])[..., 0], -(plain.exp() * plain).sum(-1), held
        )[0]

    if loss == "ppo":  # gspo's value is the sequence's and its gradient each token's, so no difference of values is it
        assert torch.autograd.gradcheck(of, (logits,))
    gradient = torch.autograd.grad(of(logits), logits)[0]
    without = config.model_copy(update={"kl_coef": 0.0})
    config = without
    rest = torch.autograd.grad(of(logits), logits)[0]
    assert (gradient - rest).abs().max() > 1e-3, "the KL is in it"


# -- in the reward ----------------------------------------------------------------------------------------------------

ATTEMPTS = [("a0", "g0"), ("a0", "g0"), ("a1", "g0"), ("a2", "g1"), ("a3", "g1"), ("a4", "g1"), ("a5", "g2")]
SCORES = {"a0": 1.0, "a1": 0.0, "a2": 0.5, "a3": 1.0, "a4": 0.0, "a5": 1.0}


def sampled_kl() -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(1)
    masks = [(rng.random(9) < 0.6).astype(np.uint8) for _ in ATTEMPTS]
    return [np.where(mask, rng.normal(0.1, 0.5, 9), np.nan) for mask in masks], masks


def test_rloo_takes_the_kl_of_the_answer_off_the_reward_before_the_baseline() -> None:
    kl, masks = sampled_kl()
    rows = [kl_ahead(*each)[0] for each in zip(kl, masks, strict=True)]
    reward = dict(SCORES)
    for (name, _), values, mask in zip(ATTEMPTS, kl, masks, strict=True):
        reward[name] -= 0.2 * values[mask == 1].sum()
    group_of = dict(ATTEMPTS)

    def leave_one_out(values: dict[str, float], name: str) -> float:
        others = [value for each, value in values.items() if group_of[each] == group_of[name] and each != name]
        return values[name] - np.mean(others) if others else 0.0

    base, slope = reward_advantages(
        "rloo",
        0.2,
        rows,
        attempt_ids=[name for name, _ in ATTEMPTS],
        group_ids=[group for _, group in ATTEMPTS],
        scored={},
        advantages=[leave_one_out(SCORES, name) for name, _ in ATTEMPTS],
    )
    np.testing.assert_allclose(base, [leave_one_out(reward, name) for name, _ in ATTEMPTS], atol=1e-12)
    assert not slope.any(), "the same at every token"


def test_reinforce_pp_takes_off_the_kl_that_lies_ahead_and_normalises_over_tokens() -> None:
    kl, masks = sampled_kl()
    told = [kl_ahead(*each) for each in zip(kl, masks, strict=True)]
    base, slope = reward_advantages(
        "reinforce_pp",
        0.2,
        [row for row, _ in told],
        attempt_ids=[name for name, _ in ATTEMPTS],
        group_ids=[group for _, group in ATTEMPTS],
        scored={name: (group, SCORES[name]) for name, group in ATTEMPTS},
        advantages=(),
    )
    expected, found = [], []
    for i, (name, _) in enumerate(ATTEMPTS):
        for t in np.flatnonzero(masks[i]):
            expected.append(SCORES[name] - 0.2 * sum(kl[i][u] for u in range(t, 9) if masks[i][u]))
            found.append(base[i] + slope[i] * told[i][1][t])
    values = np.array(expected)
    np.testing.assert_allclose(found, (values - values.mean()) / (values.std() + 1e-6), atol=1e-9)


@pytest.mark.parametrize(
    ("estimator", "normalize_std"),
    [("rloo", False), ("reinforce_pp", False), ("grpo", False), ("grpo", True), ("reinforce_pp_baseline", False)],
)
def test_the_trainer_takes_the_kl_off_the_reward(models: dict[str, Path], estimator: str, normalize_std: bool) -> None:
    """The same weights as a run without a KL whose advantages were moved by hand; reported is the mean of k1."""
    objective = {"estimator": estimator, "kl_coef": 0.05, "kl_in": "reward", "kl_estimator": "k1"}
    objective |= {"normalize_std": normalize_std}
    store = new_store(models["start"], objective={**objective, "reference": str(models["other"])})
    rows = samples_of(0, 4)
    rows = [row | {"group_id": f"g{i // 2}"} for i, row in enumerate(rows)]
    scores = [1.0, 0.0, 0.25, 1.0]
    trainer = new_trainer(store)
    tokens = sum(int(row["loss_mask"].sum()) for row in rows)
    wire = [stored_row(store, "r1", 0, row, weight=1 / tokens) for row in rows]
    scored = {row["attempt_id"]: (row["group_id"], score) for row, score in zip(rows, scores, strict=True)}
    decisions = [{"attempt_id": name, "group_id": group, "score": s} for name, (group, s) in scored.items()]
    body = put_batch(store, "r1", 0, rows)
    data = batch("r1", 0, wire, decisions=decisions)
    store.put(body["batch_key"], data)
    result = trainer.put_step(0, StepBody(**body | {"batch_digest": sha256_hex(data)}))
    pairs = zip(logprobs_of(models["start"], rows), logprobs_of(models["other"], rows), strict=True)
    kl = [new - ref for new, ref in pairs]
    assert result.kl_mean == pytest.approx(np.concatenate(kl).mean(), rel=1e-5)
    told = [kl_ahead(each, np.ones(len(each))) for each in kl]
    base, slope = reward_advantages(
        estimator,
        0.05,
        [row for row, _ in told],
        attempt_ids=[row["attempt_id"] for row in rows],
        group_ids=[row["group_id"] for row in rows],
        scored=scored,
        advantages=[row["advantage"] for row in rows],
        normalize_std=normalize_std,
    )
    policy = Policy(models["start"], Layout(), Optim(lr=3e-4))
    batches = []
    for one in policy.micro_batches([_sequence(row) for row in rows], 4096):
        advantages = np.zeros_like(one.advantages)
        for row, index in enumerate(one.indices):
            advantages[row][one.mask[row] == 1] = base[index] + slope[index] * told[index][1]
        batches.append(replace(one, advantages=advantages))
    sums = policy.step(batches, policy_sums(ObjectiveConfig()), tokens)
    assert result.loss == pytest.approx(sums.sums["loss"] / tokens, rel=1e-4)
    assert result.grad_norm == pytest.approx(sums.grad_norm, rel=1e-4)


def test_reinforce_pp_in_the_reward_needs_the_scores(models: dict[str, Path]) -> None:
    objective = {"estimator": "reinforce_pp", "kl_coef": 0.05, "kl_in": "reward", "kl_estimator": "k1"}
    store = new_store(models["start"], objective=objective)
    with pytest.raises(BadInput, match="the batch gives no score"):
        trained(new_trainer(store), store, 0)


def test_every_estimator_is_in_the_config() -> None:
    assert get_args(ObjectiveConfig.model_fields["kl_estimator"].annotation) == KINDS


def test_the_bounded_estimate_is_k3_near_the_reference_and_bounded_far_from_it() -> None:
    d = torch.tensor([0.3, -0.3, -5.0, 60.0, -800.0, torch.inf, torch.nan], dtype=torch.float64, requires_grad=True)
    found = token_kl(d, torch.zeros_like(d), "low_variance")
    k3 = token_kl(d, torch.zeros_like(d), "k3")
    assert torch.equal(found[:2], k3[:2]) and found[2:5].tolist() == [10, 10, 10]
    assert not found[5:].isfinite().any(), "what is not finite is not hidden"
    found[:5].sum().backward()
    assert d.grad is not None and d.grad[2:5].tolist() == [0, 0, 0]
