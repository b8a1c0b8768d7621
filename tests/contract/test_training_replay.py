"""Routing replay in one process: against a mixture of experts written out by hand, by finite differences, and gone
after the step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rl360.config.run import RunConfig
from rl360.errors import BadInput, CorruptObject, ReplayMismatch
from rl360.training.logprobs import sequence_logprobs
from rl360.training.megatron import alone, hf_map
from rl360.training.megatron.hf_dir import read_tensors
from rl360.training.megatron.hf_map import digest_of
from rl360.training.megatron.model import Layout
from rl360.training.megatron.policy import DeviceBatch, Goal, Optim, Policy
from rl360.training.packing import TrainSequence, build
from rl360.training.replica import OpenRun, Replica, TrainStep
from rl360.training.results import StepStatus, TrainResult
from tests.unit.memory_store import MemoryStore
from tests.unit.training_data import GROUPS, HEAD_DIM, HEADS, LAYERS, VOCAB, put_batch, routed, samples_of, write_model

pytestmark = pytest.mark.contract  # the real Megatron-core

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
EXPERTS, TOP_K, WEIGHT = 6, 2, 40.0
GATE = "model.layers.1.mlp.gate.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("moe"), experts=EXPERTS)


@pytest.fixture(scope="module")
def policy(model: Path) -> Iterator[Policy]:
    with alone.single_process():
        yield Policy(model, Layout(), Optim(lr=1e-2))


@pytest.fixture
def tensors(model: Path) -> Tensors:
    return {name: tensor.requires_grad_() for name, tensor in read_tensors(model).items()}


# -- the model by hand ------------------------------------------------------------------------------------------------


def rope(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions of x [heads, T, head_dim]."""
    half = HEAD_DIM // 2
    angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def reference(tensors: Tensors, tokens: np.ndarray, routing: np.ndarray | None) -> tuple[torch.Tensor, np.ndarray]:
    """Log-probs [T - 1] of all tokens but the first, one expert after the other, and the experts used."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    hidden, used = tensors["model.embed_tokens.weight"][ids[:-1]], []

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * tensors[name]

    for layer in range(LAYERS):
        at = f"model.layers.{layer}."

        def project(x: torch.Tensor, name: str, at: str = at) -> torch.Tensor:
            return x @ tensors[f"{at}{name}.weight"].T

        x = norm(hidden, at + "input_layernorm.weight")
        q, k, v = (project(x, f"self_attn.{n}_proj").unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1) for n in "qkv")
        q, k = rope(norm(q, at + "self_attn.q_norm.weight")), rope(norm(k, at + "self_attn.k_norm.weight"))
        k, v = (each.repeat_interleave(HEADS // GROUPS, 0) for each in (k, v))
        scores = q @ k.transpose(1, 2) / HEAD_DIM**0.5
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        hidden = hidden + project((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), "self_attn.o_proj")
        x = norm(hidden, at + "post_attention_layernorm.weight")
        logits = project(x, "mlp.gate")
        chosen = logits.topk(TOP_K).indices if routing is None else torch.from_numpy(routing[:, layer].astype(np.int64))
        used.append(chosen.numpy())
        weights = torch.stack([logits[t, chosen[t]] for t in range(len(x))]).softmax(-1)
        rows = []
        for t in range(len(x)):
            out = torch.zeros(x.shape[1])
            for weight, expert in zip(weights[t], chosen[t].tolist(), strict=True):
                gate, up = (project(x[t], f"mlp.experts.{expert}.{n}_proj") for n in ("gate", "up"))
                out = out + weight * project(F.silu(gate) * up, f"mlp.experts.{expert}.down_proj")
            rows.append(out)
        hidden = hidden + torch.stack(rows)
    logits = norm(hidden, "model.norm.weight") @ tensors["model.embed_tokens.weight"].T
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0], np.stack(used, 1).astype(np.uint8)


# -- samples and gradients --------------------------------------------------------------------------------------------


def sequence(seed: int, length: int) -> TrainSequence:
    """Every token but the first trains; random experts, other ones than the model would choose."""
    rng = np.random.default_rng(seed)
    mask = np.ones(length, np.uint8)
    mask[0] = 0
    experts = rng.permuted(np.tile(np.arange(EXPERTS), (length - 1, LAYERS, 1)), axis=-1)[..., :TOP_K]
    return TrainSequence(
        rng.integers(0, VOCAB, length).astype(np.int32), mask, name=f"s{seed}", routing=experts.astype(np.uint8)
    )


def likelihood(logprobs: torch.Tensor, entropy: torch.Tensor, batch: DeviceBatch) -> list[torch.Tensor]:
    zero = logprobs.new_zeros(())
    return [-logprobs[batch.mask.bool()].sum(), *[zero] * 9]


def gradients(policy: Policy, samples: list[TrainSequence], max_tokens: int = 4096) -> tuple[float, Tensors]:
    sums, _ = policy.accumulate(policy.micro_batches(samples, max_tokens), Goal(likelihood, WEIGHT))
    grads = hf_map.gather_hf(policy.core, policy.shape, policy.layout, lambda p: p.main_grad)
    return sums["loss"], {name: grad.clone() for name, grad in grads.items()}


def assert_close(found: Tensors, expected: Tensors, atol: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor, atol=atol, err_msg=name)


def test_other_experts_give_what_a_mixture_written_by_hand_gives(policy: Policy, tensors: Tensors) -> None:
    samples = [sequence(seed, length) for seed, length in enumerate((9, 14, 20))]
    loss = torch.zeros(())
    for sample, found in zip(samples, sequence_logprobs(policy, samples, 4096), strict=True):
        expected, used = reference(tensors, sample.tokens, sample.routing)
        own, chosen = reference(tensors, sample.tokens, None)
        np.testing.assert_array_equal(used, sample.routing)
        assert (chosen != used).any()
        np.testing.assert_allclose(found, expected.detach(), atol=1e-5)
        assert np.abs(found - own.detach().numpy()).max() > 1e-2
        loss = loss - expected.sum() / WEIGHT
    loss.backward()
    expected_grads = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in tensors.items()}
    assert expected_grads[GATE].abs().max() > 1e-3
    for max_tokens in (4096, 20):  # one rectangle with padding, and one for each sample
        total, found_grads = gradients(policy, samples, max_tokens)
        assert total / WEIGHT == pytest.approx(loss.item(), rel=1e-5)
        assert_close(found_grads, expected_grads, 1e-5)


def test_replay_of_the_models_own_choice_changes_no_bit(policy: Policy, tensors: Tensors) -> None:
    bare = [replace(sequence(seed, 16), routing=None) for seed in range(3)]  # of one length: nothing to fill
    own = [replace(s, routing=reference(tensors, s.tokens, None)[1]) for s in bare]
    for plain, replayed in zip(
        sequence_logprobs(policy, bare, 4096), sequence_logprobs(policy, own, 4096), strict=True
    ):
        np.testing.assert_array_equal(plain, replayed)
    assert gradients(policy, bare)[0] == gradients(policy, own)[0]
    assert_close(gradients(policy, own)[1], gradients(policy, bare)[1], 0)


def test_router_gradient_by_finite_differences(policy: Policy) -> None:
    samples = [sequence(seed, 12) for seed in range(3)]
    _, grads = gradients(policy, samples)
    gates = {
        n: torch.randn(g.shape, generator=torch.Generator().manual_seed(1)) for n, g in grads.items() if "gate.w" in n
    }
    assert len(gates) == LAYERS
    weights = policy.weights()
    slopes, eps = [], 2e-3
    try:
        for sign in (1, -1):
            moved = {n: w + sign * eps * gates[n] if n in gates else w for n, w in weights.items()}
            hf_map.load_hf(policy.core, moved, policy.shape, policy.layout)
            slopes.append(sign * -sum(v.astype(np.float64).sum() for v in sequence_logprobs(policy, samples, 4096)))
    finally:
        hf_map.load_hf(policy.core, weights, policy.shape, policy.layout)
    expected = sum(float((grads[n] * d).sum()) for n, d in gates.items())
    assert sum(slopes) / (2 * eps) / WEIGHT == pytest.approx(expected, rel=1e-2)


def test_recomputed_layers_replay_their_own_micro_batch(policy: Policy) -> None:
    samples = [sequence(seed, 8 + seed) for seed in range(5)]
    expected = gradients(policy, samples, 16)
    config = policy.core.config
    config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "uniform", 1
    try:
        found = gradients(policy, samples, 16)
    finally:
        config.recompute_granularity = config.recompute_method = config.recompute_num_layers = None
    assert found[0] == expected[0]
    assert_close(found[1], expected[1], 1e-7)


def test_what_fills_the_rest_of_a_rectangle_reaches_nothing_trained(policy: Policy) -> None:
    samples = dict(enumerate([sequence(0, 30), sequence(1, 9)]))
    batch = build(samples, (0, 1))
    rows = samples[1].routing
    assert batch.routing is not None and rows is not None
    assert batch.routing.dtype == np.uint8 and batch.routing.shape == (2, 29, LAYERS, TOP_K)
    np.testing.assert_array_equal(batch.routing[1, :8], rows)
    np.testing.assert_array_equal(batch.routing[1, 8:16], rows)
    other = batch.routing.copy()
    other[1, 8:] = (other[1, 8:] + 1) % EXPERTS
    loss, norm = policy.accumulate([batch], Goal(likelihood, WEIGHT))
    for routing in (other, batch.routing.astype(np.uint16)):
        found, found_norm = policy.accumulate([replace(batch, routing=routing)], Goal(likelihood, WEIGHT))
        assert found["loss"] == pytest.approx(loss["loss"], rel=1e-6)
        assert found_norm == pytest.approx(norm, rel=1e-6)


def test_nothing_of_a_replay_is_left_in_the_model(policy: Policy) -> None:
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay

    routers = [module for module in policy.core.modules() if isinstance(module, TopKRouter)]
    assert len(routers) == LAYERS
    seen: list[Any] = []

    def fails(logprobs: torch.Tensor, entropy: torch.Tensor, batch: DeviceBatch) -> list[torch.Tensor]:
        seen.extend(router.router_replay.rows for router in routers)
        raise ValueError("inside the step")

    samples = [sequence(0, 12)]
    gradients(policy, samples)
    assert [router.router_replay for router in routers] == [None] * LAYERS
    with pytest.raises(ValueError, match="inside the step"):
        policy.accumulate(policy.micro_batches(samples, 64), Goal(fails, WEIGHT))
    assert [rows.dtype for rows in seen] == [torch.uint8] * LAYERS
    assert [router.router_replay for router in routers] == [None] * LAYERS
    assert RouterReplay.global_router_replay_instances == []
    plain = sequence_logprobs(policy, [replace(samples[0], routing=None)], 64)[0]
    assert np.abs(plain - sequence_logprobs(policy, samples, 64)[0]).max() > 1e-2


def opened(model: Path, store: Any, committed: tuple[TrainResult, ...] = (), **trainer: Any) -> Replica:
    replica = Replica(store, Layout(), "here")
    config = RunConfig.parse({"run": "r1", "trainer": {"lr": 1e-2, **trainer}})
    replica.execute(OpenRun("r1", config.to_json(), str(model), None, committed))
    return replica


def test_a_run_replays_when_its_config_says_so(policy: Policy, model: Path) -> None:
    results = []
    for replay in (False, True):
        store = MemoryStore()
        body = put_batch(store, "r1", 0, [routed(row, EXPERTS) for row in samples_of(0)])
        replica = opened(model, store, routing_replay=replay)
        results.append(cast(TrainResult, replica.execute(TrainStep(0, body["batch_key"], body["batch_digest"]))))
    off, on = results
    assert (off.status, on.status) == (StepStatus.TRAINED, StepStatus.TRAINED)
    assert off.mean_abs_dlogp != pytest.approx(on.mean_abs_dlogp, rel=1e-3)
    restarted = opened(model, store, (on,), routing_replay=True)  # takes the recorded step again, routing and all
    assert restarted.at is not None and restarted.at.digest == on.weights_digest != off.weights_digest
    with pytest.raises(ReplayMismatch):
        opened(model, store, (on,), routing_replay=False)


def test_a_step_that_cannot_replay_a_sample_names_it_and_changes_nothing(policy: Policy, model: Path) -> None:
    store = MemoryStore()
    samples = [routed(row, EXPERTS) for row in samples_of(0)]
    samples[4] = routed(samples[4], EXPERTS + 1)
    body = put_batch(store, "r1", 0, samples)
    replica = opened(model, store, routing_replay=True)
    before = replica.at
    with pytest.raises(CorruptObject, match=f"{samples[4]['attempt_id']} leaf 0: .* expert 6, the model has 6"):
        replica.execute(TrainStep(0, body["batch_key"], body["batch_digest"]))
    assert replica.at == before and replica.policy is not None
    assert digest_of(replica.policy.weights()) == digest_of(read_tensors(model))


def test_a_dense_model_has_nothing_to_replay(policy: Policy, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"trainer\.routing_replay is on and .* has no experts; switch it off"):
        opened(write_model(tmp_path / "dense"), MemoryStore(), routing_replay=True)


def test_samples_of_a_micro_batch_replay_alike_or_are_refused() -> None:
    routed = sequence(0, 12)
    assert routed.routing is not None
    for other in (None, routed.routing.astype(np.uint16), routed.routing[:, :1]):
        with pytest.raises(BadInput, match="routing of s0, s0: not all have it, or not in one type and layout"):
            build([routed, replace(routed, routing=other)], (0, 1))
    with pytest.raises(BadInput, match="s0: 10 rows of routed experts, 12 tokens have 11"):
        replace(routed, routing=routed.routing[1:])
