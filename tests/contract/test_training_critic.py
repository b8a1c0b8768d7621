"""The critic: a copy of the policy with a head of zeros, what it makes of its values, and that it learns returns."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rl360.config.run import ObjectiveConfig
from rl360.objective.gae import masked_gae
from rl360.training.critic import Critic, value_sums
from rl360.training.megatron import alone
from rl360.training.megatron.hf_dir import read_tensors
from rl360.training.megatron.hf_map import EMBEDDING, VALUE_HEAD, digest_of
from rl360.training.megatron.model import Layout
from rl360.training.megatron.policy import Goal, Optim, Policy
from rl360.training.packing import MicroBatch, TrainSequence
from tests.unit.training_data import EXPERTS, HIDDEN, routed, samples_of, write_model

pytestmark = pytest.mark.contract  # the real Megatron-core

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
GAE = ObjectiveConfig(estimator="gae")


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    with alone.single_process():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def critic(group: None, model: Path) -> Critic:
    return Critic(model, Layout(), Optim(lr=1e-2))


def sequences(step: int, count: int = 12) -> list[TrainSequence]:
    """Half of the attempts passed."""
    return [
        TrainSequence(row["tokens"], row["loss_mask"], row["logprobs"], float(index % 2), row["attempt_id"])
        for index, row in enumerate(samples_of(step, count))
    ]


def with_head(critic: Critic, head: torch.Tensor) -> None:
    zeros = {name: torch.zeros_like(tensor) for name, tensor in critic.weights().items()}
    critic.load(critic.weights() | {VALUE_HEAD: head[None]}, {"exp_avg": zeros, "exp_avg_sq": zeros}, 0)


def by_sample(batches: list[MicroBatch], samples: list[TrainSequence], field: str) -> list[np.ndarray]:
    found = {
        i: getattr(b, field)[row, : len(samples[i].tokens) - 1] for b in batches for row, i in enumerate(b.indices)
    }
    return [found[index] for index in range(len(samples))]


def test_it_begins_as_the_policy_with_a_head_of_zeros(critic: Critic, model: Path) -> None:
    held, policy = critic.weights(), read_tensors(model)
    assert held.keys() == policy.keys() | {VALUE_HEAD}
    assert digest_of({name: held[name] for name in policy}) == digest_of(policy)
    assert held[VALUE_HEAD].shape == (1, HIDDEN) and not held[VALUE_HEAD].any()
    samples = sequences(0)
    batches, explained = critic.judged(critic.micro_batches(samples, 256), GAE)
    assert explained == pytest.approx(0.0, abs=1e-12)
    for one, values, advantages in zip(
        samples, by_sample(batches, samples, "values"), by_sample(batches, samples, "advantages"), strict=True
    ):
        assert not values.any()
        last = np.flatnonzero(one.loss_mask[1:])[-1]
        assert advantages[last] == one.advantage  # V is 0: the reward itself, at the last trained token


def test_a_value_is_the_head_times_the_hidden_state(critic: Critic, model: Path) -> None:
    """With the embedding of a token for a head, values are the logits of that token under the (tied) policy."""
    samples, token = sequences(1), 17
    with_head(critic, read_tensors(model)[EMBEDDING][token])
    batches, _ = critic.judged(critic.micro_batches(samples, 256), GAE)
    policy = Policy(model, Layout())
    for one, values in zip(samples, by_sample(batches, samples, "values"), strict=True):
        with torch.no_grad():
            logits = policy.core(torch.from_numpy(one.tokens[None, :-1].astype(np.int64)), None, None)
        np.testing.assert_allclose(values, logits[0, :, token].numpy(), atol=1e-5)


@pytest.mark.parametrize("fields", [{}, {"gamma": 0.9, "gae_lambda": 0.8}, {"gae_lambda": 0.5, "critic_lambda": 1.0}])
def test_what_a_step_makes_of_the_values(critic: Critic, fields: dict[str, float]) -> None:
    samples, config = sequences(2), ObjectiveConfig(estimator="gae", **fields)
    with_head(critic, torch.randn(HIDDEN, generator=torch.Generator().manual_seed(0)) / 50)
    batches, explained = critic.judged(critic.micro_batches(samples, 256), config)
    whitened, same = critic.judged(
        critic.micro_batches(samples, 4096), config.model_copy(update={"whiten_advantages": True})
    )
    told = {name: by_sample(batches, samples, name) for name in ("values", "advantages", "returns")}
    trained = [one.loss_mask[1:].astype(bool) for one in samples]
    for index, (one, mask) in enumerate(zip(samples, trained, strict=True)):
        values, rewards = told["values"][index][None], np.array([one.advantage])
        both = {"gamma": config.gamma, "lam": config.gae_lambda}
        advantages, returns = masked_gae(values, rewards, mask[None], **both)
        if config.critic_lambda is not None:
            _, returns = masked_gae(values, rewards, mask[None], **(both | {"lam": config.critic_lambda}))
        np.testing.assert_allclose(told["advantages"][index], advantages[0], atol=1e-6)
        np.testing.assert_allclose(told["returns"][index], returns[0], atol=1e-6)
    flat = {name: np.concatenate([row[m] for row, m in zip(rows, trained, strict=True)]) for name, rows in told.items()}
    assert explained == pytest.approx(1 - np.var(flat["returns"] - flat["values"]) / np.var(flat["returns"]), abs=1e-5)
    assert same == pytest.approx(explained, abs=1e-4)
    reward = [replace(b, token_rewards=0.1 * b.targets % 7) for b in critic.micro_batches(samples, 256)]
    shaped, _ = critic.judged(reward, config)
    for index, (one, mask) in enumerate(zip(samples, trained, strict=True)):
        each = (0.1 * one.tokens[1:] % 7)[None]
        both = {"gamma": config.gamma, "lam": config.gae_lambda, "token_rewards": each}
        expected, _ = masked_gae(told["values"][index][None], np.array([one.advantage]), mask[None], **both)
        np.testing.assert_allclose(by_sample(shaped, samples, "advantages")[index], expected[0], rtol=1e-5, atol=1e-5)
    scaled = np.concatenate([r[m] for r, m in zip(by_sample(whitened, samples, "advantages"), trained, strict=True)])
    expected = (flat["advantages"] - flat["advantages"].mean()) / flat["advantages"].std()
    np.testing.assert_allclose(scaled, expected, atol=1e-3)


def test_the_gradient_is_that_of_the_value_loss_however_micro_batches_are_cut(critic: Critic) -> None:
    """At the head, by hand: sum of weight * (V - R) * hidden state."""
    samples = [replace(one, weight=1.0 + index % 3) for index, one in enumerate(sequences(3))]
    divisor = sum(int(one.loss_mask.sum()) for one in samples)
    whole, _ = critic.judged(critic.micro_batches(samples, 4096), GAE)
    split, _ = critic.judged(critic.micro_batches(samples, 64), GAE)
    sums, norm = critic.accumulate(whole, Goal(value_sums(None), divisor))
    gradient = critic.core.output_layer.value.main_grad.clone()
    again, norm_again = critic.accumulate(split, Goal(value_sums(0.2), divisor))
    assert norm == pytest.approx(norm_again, rel=1e-4) and norm > 0
    assert sums == pytest.approx(again, rel=1e-5), "one step a batch: the clip of values holds nothing"
    expected = sum(
        one.weight * 0.5 * one.advantage**2 * int(one.loss_mask.sum()) for one in samples
    )  # V 0, R the reward
    assert sums["value_loss"] == pytest.approx(expected, rel=1e-5)
    assert sums["weight"] == pytest.approx(sum(one.weight * int(one.loss_mask.sum()) for one in samples))
    hidden: list[torch.Tensor] = []
    watch = critic.core.output_layer.register_forward_hook(lambda _module, given, _out: hidden.append(given[0]))
    batches, _ = critic.judged(critic.micro_batches(samples, 4096), GAE)
    watch.remove()
    by_hand = torch.zeros(HIDDEN)
    for batch, states in zip(batches, hidden, strict=True):
        assert batch.returns is not None
        slope = torch.from_numpy(batch.weights * batch.mask * (0.0 - batch.returns)) / divisor
        by_hand += torch.einsum("bt,tbh->h", slope, states)
    torch.testing.assert_close(gradient[0], by_hand, atol=1e-6, rtol=1e-5)


def test_it_learns(critic: Critic) -> None:
    """On fixed data the value loss falls and its values come to explain the returns."""
    samples = sequences(4)
    divisor, losses, explained = sum(int(one.loss_mask.sum()) for one in samples), [], []
    for _ in range(25):
        batches, found = critic.judged(critic.micro_batches(samples, 4096), GAE)
        losses.append(critic.step(batches, value_sums(None), divisor).sums["value_loss"] / divisor)
        explained.append(found)
    assert losses[-1] < losses[0] / 20, losses
    assert explained[0] == pytest.approx(0.0, abs=1e-9) and explained[-1] is not None and explained[-1] > 0.9


def test_its_state_goes_on_bit_by_bit(critic: Critic, model: Path) -> None:
    def step(of: Critic) -> str:
        samples = sequences(5)
        batches, _ = of.judged(of.micro_batches(samples, 256), GAE)
        assert of.step(batches, value_sums(None), 10).applied
        return digest_of(of.weights())

    assert critic.updates == 0
    step(critic)
    sets, steps = critic.sets(), critic.updates
    assert steps == 1 and sets.keys() == {"critic_weights", "critic_exp_avg", "critic_exp_avg_sq"}
    other = Critic(model, Layout(), Optim(lr=1e-2))
    other.restore(sets, steps)
    assert step(other) == step(critic)
    forked = Critic(model, Layout(), Optim(lr=1e-2))
    policy = {name: tensor + 1 for name, tensor in read_tensors(model).items()}
    forked.restore({"weights": policy}, 7)
    assert forked.updates == 0 and digest_of({n: t for n, t in forked.weights().items() if n in policy}) == digest_of(
        policy
    )


def test_a_value_that_is_no_number_spoils_the_step(critic: Critic) -> None:
    with_head(critic, torch.full((HIDDEN,), torch.inf))
    before = digest_of(critic.weights())
    samples = sequences(6)
    batches, _ = critic.judged(critic.micro_batches(samples, 256), GAE)
    assert any(not np.isfinite(b.advantages[b.mask.astype(bool)]).all() for b in batches)
    assert not critic.step(batches, value_sums(None), 10).applied
    assert digest_of(critic.weights()) == before


def test_experts_are_routed_by_the_critic_itself(group: None, tmp_path: Path) -> None:
    critic = Critic(write_model(tmp_path / "moe", experts=EXPERTS), Layout(), Optim(lr=1e-2))
    with_head(critic, torch.ones(HIDDEN))
    rows = samples_of(7, 4)
    plain = [TrainSequence(row["tokens"], row["loss_mask"], row["logprobs"], 1.0) for row in rows]
    replayed = [replace(one, routing=routed(row)["routing"]) for one, row in zip(plain, rows, strict=True)]
    own, _ = critic.judged(critic.micro_batches(plain, 4096), GAE)
    other, _ = critic.judged(critic.micro_batches(replayed, 4096), GAE)
    np.testing.assert_array_equal(own[0].values, other[0].values)
    assert other[0].routing is not None, "the policy still replays it"
