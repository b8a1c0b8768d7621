"""The Megatron backend in one process: mapping, log-probs by hand, non-finite steps, refused shapes and layouts."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl360.config.run import ObjectiveConfig
from rl360.errors import BadInput
from rl360.objective.losses import policy_loss
from rl360.objective.presets import PRESETS
from rl360.training.logprobs import sequence_logprobs
from rl360.training.megatron import alone, cpu_hook, hf_map, parallel
from rl360.training.megatron.hf_dir import read_tensors, write_dir
from rl360.training.megatron.hf_map import digest_of
from rl360.training.megatron.model import Layout, ModelShape, check_layout, read_shape
from rl360.training.megatron.modules import token_logprobs
from rl360.training.megatron.policy import Goal, Optim, Policy
from rl360.training.objective import policy_sums
from rl360.training.packing import MicroBatch, TrainSequence, build
from tests.unit.training_data import samples_of, write_model

pytestmark = pytest.mark.contract  # the real Megatron-core

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def policy(model: Path) -> Iterator[Policy]:
    with alone.single_process():
        yield Policy(model, Layout(), Optim(lr=1e-2))


def sequences(step: int) -> list[TrainSequence]:
    return [
        TrainSequence(row["tokens"], row["loss_mask"], row["logprobs"], row["advantage"], row["attempt_id"])
        for row in samples_of(step)
    ]


def test_import_then_export_is_the_identity(policy: Policy, model: Path) -> None:
    assert digest_of(policy.weights()) == digest_of(read_tensors(model))


def test_a_row_does_not_depend_on_its_neighbours(policy: Policy) -> None:
    samples = sequences(1)
    packed = sequence_logprobs(policy, samples, 4096)
    for one, found in zip(samples, packed, strict=True):
        alone = sequence_logprobs(policy, [one], 4096)[0]
        assert found.shape == (len(one.tokens) - 1,)
        np.testing.assert_allclose(found, alone, atol=2e-6)


def test_step_is_independent_of_micro_batches_and_moments_restore(policy: Policy) -> None:
    samples = sequences(2)
    weight = sum(int(s.loss_mask.sum()) for s in samples)
    loss = policy_sums(ObjectiveConfig())
    one = policy.accumulate(policy.micro_batches(samples, 4096), Goal(loss, weight))
    many = policy.accumulate(policy.micro_batches(samples, 64), Goal(loss, weight))
    assert one[1] == pytest.approx(many[1], rel=1e-5)
    assert one[0] == pytest.approx(many[0], rel=1e-5)
    before = policy.weights()
    first = policy.step(policy.micro_batches(samples, 256), loss, weight)
    assert first.applied
    assert first.sums["weight"] == weight
    after, moments = policy.weights(), policy.moments()
    assert digest_of(after) != digest_of(before)
    policy.step(policy.micro_batches(samples, 256), loss, weight)
    goal = digest_of(policy.weights())
    policy.load(before, moments, 7)
    policy.load(after, moments, 1)
    policy.step(policy.micro_batches(samples, 256), loss, weight)
    assert digest_of(policy.weights()) == goal


@pytest.mark.parametrize("experts", [0, 4], ids=["dense", "experts"])
def test_padding_micro_batches_leave_no_trace(policy: Policy, tmp_path: Path, experts: int) -> None:
    """What keeps ranks in step is in no sum and no gradient, to the bit, with a KL and kept actors on: before, between
    and after those that train."""
    trained = policy if not experts else Policy(write_model(tmp_path, experts=experts), Layout(), Optim(lr=1e-2))
    samples = [replace(one, versions=np.where(one.loss_mask, i % 2, -1)) for i, one in enumerate(sequences(5))]
    tokens = sum(int(s.loss_mask.sum()) for s in samples)
    fields = {"old_policy": "kept", "kl_coef": 0.2, "entropy_coef": 0.1}
    sums = policy_sums(ObjectiveConfig.model_validate(fields), 1)
    other = [part * 1.01 for part in trained.parts()]

    def accumulated(batches: list[MicroBatch]) -> tuple[dict[str, float], float, dict[str, torch.Tensor]]:
        found = trained.batch_logprobs(batches, parts=other)
        judged = [replace(one, old=values, reference=values) for one, values in zip(batches, found, strict=True)]
        told, norm = trained.accumulate(judged, Goal(sums, tokens))
        return told, norm, hf_map.gather_hf(trained.core, trained.shape, Layout(), lambda p: p.main_grad)

    one, two = trained.micro_batches(samples[:6], 4096), trained.micro_batches(samples[6:], 4096)
    plain = accumulated([*one, *two])
    dummy = build({}, ())
    padded = accumulated([dummy, *one, dummy, dummy, *two, dummy])
    assert padded[:2] == plain[:2] and plain[0]["kl"] > 0
    assert plain[0]["tokens"] == tokens and plain[0]["samples"] == len(samples)
    assert all(torch.equal(grad, plain[2][name]) for name, grad in padded[2].items())


def near(policy: Policy, step: int) -> list[TrainSequence]:
    """Samples of an engine that was the policy, nearly, so that bounds and masks have something to do, and weights."""
    noise, samples = np.random.default_rng(5), []
    for one, found in zip(sequences(step), sequence_logprobs(policy, sequences(step), 4096), strict=True):
        moved = np.concatenate([[0.0], found + noise.normal(0, 0.3, len(found))])
        logprobs = np.where(one.loss_mask, moved, 0).astype(np.float32)
        samples.append(replace(one, logprobs=logprobs, weight=float(noise.uniform(0.5, 2))))
    return samples


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_trains_what_it_says(policy: Policy, preset: str) -> None:
    wider = {"correction_low": 0.95, "correction_high": 1.05} if preset == "mis_geometric" else {}  # or nothing is left
    fields = {"preset": preset, "veto": 0.3, "off_policy_delta": 0.05, **wider}
    samples, config = near(policy, 6), ObjectiveConfig.model_validate(fields)
    tokens = [int(s.loss_mask.sum()) for s in samples]
    config = config.model_copy(update={"kl_coef": 0.0})  # that term: test_training_kl
    whole, norm = policy.accumulate(policy.micro_batches(samples, 4096), Goal(policy_sums(config), sum(tokens)))
    split, split_norm = policy.accumulate(policy.micro_batches(samples, 64), Goal(policy_sums(config), sum(tokens)))
    assert (whole["tokens"], whole["samples"]) == (sum(tokens), len(samples))
    assert (
        whole == pytest.approx(split, rel=1e-4, abs=1e-4) and norm == pytest.approx(split_norm, rel=1e-4) and norm > 0
    )
    assert whole["weight"] == pytest.approx(sum(n * s.weight for n, s in zip(tokens, samples, strict=True)), rel=1e-6)
    alone = []
    for one, found in zip(samples, sequence_logprobs(policy, samples, 4096), strict=True):
        held = [torch.from_numpy(each).double() for each in (found, one.logprobs[1:])]
        rest = torch.full_like(held[0], one.advantage), torch.from_numpy(one.loss_mask[1:])
        alone.append(policy_loss(*held, *rest, config, weights=torch.full_like(held[0], one.weight)))
    assert whole["loss"] == pytest.approx(sum(parts.loss_sum.item() for parts in alone), rel=1e-4)
    assert whole["masked"] == sum(parts.masked_sum.item() for parts in alone) > 0
    assert whole["tis"] == pytest.approx(sum(parts.importance_sum.item() for parts in alone), rel=1e-4)


def test_the_entropy_bonus_reaches_the_gradient(policy: Policy) -> None:
    """With advantages of 0 the bonus is all there is; one step along it raises the entropy."""
    samples = [replace(one, advantage=0.0) for one in near(policy, 7)]
    tokens, batches = sum(int(s.loss_mask.sum()) for s in samples), policy.micro_batches(samples, 4096)
    assert policy.accumulate(batches, Goal(policy_sums(ObjectiveConfig()), tokens))[1] == 0
    bonus = policy_sums(ObjectiveConfig(entropy_coef=1.0))
    before = policy.step(batches, bonus, tokens)
    after, _ = policy.accumulate(batches, Goal(bonus, tokens))
    assert before.applied and before.grad_norm > 0 and after["entropy"] > before.sums["entropy"]


def test_log_probs_are_those_of_the_temperature_that_was_sampled_at(policy: Policy) -> None:
    """An engine reports log-probs after division by the temperature: against them the trainer's ratio must be 1."""
    samples = sequences(4)
    weight = sum(int(s.loss_mask.sum()) for s in samples)
    logits: list[np.ndarray] = []
    for one in samples:
        ids = torch.from_numpy(one.tokens[None, :-1].astype(np.int64))
        with torch.no_grad():
            logits.append(policy.core(ids, None, None)[0].numpy())
    sampled = []
    for one, rows in zip(samples, logits, strict=True):
        found = torch.from_numpy(rows / 0.7).log_softmax(-1)[range(len(rows)), one.tokens[1:].astype(np.int64)]
        logprobs = np.where(one.loss_mask, np.concatenate([[0.0], found.numpy()]), 0).astype(np.float32)
        sampled.append(TrainSequence(one.tokens, one.loss_mask, logprobs, one.advantage, one.name))
    batches, loss = policy.micro_batches(sampled, 4096), policy_sums(ObjectiveConfig())
    at_07, norm_07 = policy.accumulate(batches, Goal(loss, weight, 0.7))
    at_1, norm_1 = policy.accumulate(batches, Goal(loss, weight))
    assert at_07["abs_dlogp"] / weight < 1e-5
    assert at_07["tis"] / weight == pytest.approx(1.0, abs=1e-5)
    assert at_1["abs_dlogp"] / weight > 0.05
    assert norm_07 != pytest.approx(norm_1, rel=1e-3)


def test_a_step_that_is_not_finite_changes_nothing(policy: Policy) -> None:
    samples = sequences(3)
    bad = samples[0]
    assert bad.logprobs is not None
    poisoned = TrainSequence(bad.tokens, bad.loss_mask, np.where(bad.loss_mask, -np.inf, 0).astype(np.float32), 1.0)
    loss = policy_sums(ObjectiveConfig(old_policy="rollout", correction="off"))
    before, moments = digest_of(policy.weights()), {m: digest_of(t) for m, t in policy.moments().items()}
    result = policy.step(policy.micro_batches([poisoned, *samples[1:]], 4096), loss, 10)
    assert not result.applied
    assert digest_of(policy.weights()) == before
    assert {m: digest_of(t) for m, t in policy.moments().items()} == moments
    assert policy.step(policy.micro_batches(samples, 4096), loss, 10).applied  # and the next one is clean


def test_token_logprobs_gradient() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 5, 11, requires_grad=True)
    target = torch.randint(0, 11, (3, 5))
    weight = torch.randn(3, 5)
    found, entropy = token_logprobs(logits, target, None)
    plain = logits.log_softmax(-1)
    expected = plain.gather(-1, target[..., None])[..., 0]
    spread = -(plain.exp() * plain).sum(-1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(entropy, spread)

    def gradient(of: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((of * weight).sum(), logits, retain_graph=True)[0]

    torch.testing.assert_close(gradient(found), gradient(expected))
    torch.testing.assert_close(gradient(entropy), gradient(spread))
    torch.testing.assert_close(gradient(found + 0.3 * entropy), gradient(expected + 0.3 * spread))
    dead = torch.tensor([[0.0, -200.0, 1.0]], requires_grad=True)  # a probability of 0 has no gradient, not NaN
    token_logprobs(dead, torch.tensor([0]), None)[1].sum().backward()
    assert dead.grad is not None and dead.grad.isfinite().all()


def test_written_directory_reads_back(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    write_dir(read_tensors(model), model, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert digest_of(read_tensors(tmp_path / "out")) == digest_of(read_tensors(model))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type='yarn'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_size": None}, "hidden_size missing"),
    ],
)
def test_unknown_shapes_are_refused(tmp_path: Path, changes: dict[str, object], match: str) -> None:
    with pytest.raises(BadInput, match=match):
        read_shape(write_model(tmp_path, **changes))


DENSE = ModelShape(2, 64, 4, 2, 16, 128, 512, 1024, 1e4, 1e-6, True)
MOE = ModelShape(2, 64, 4, 2, 16, 128, 512, 1024, 1e4, 1e-6, True, experts=8, experts_per_token=2, expert_ffn=32)


@pytest.mark.parametrize(
    ("shape", "layout", "match"),
    [
        (MOE, Layout(tp=2), "needs sequence_parallel"),
        (DENSE, Layout(tp=4), "num_key_value_heads=2 cannot be split 4 ways"),
        (DENSE, Layout(ep=2), "without experts"),
        (DENSE, Layout(sequence_parallel=True), "needs tensor parallel"),
    ],
)
def test_layouts_that_would_train_wrong_are_refused(shape: ModelShape, layout: Layout, match: str) -> None:
    with pytest.raises(BadInput, match=match):
        check_layout(shape, layout)


def test_cpu_autocast_is_refused() -> None:
    with torch.autocast("cpu"), pytest.raises(BadInput, match="autocast on the CPU"):
        check_layout(DENSE, Layout())


def test_each_rank_takes_the_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here: what is looked at is that the device is chosen, by rank, before the group is made."""
    done: list[object] = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(parallel, "ON_CPU", False)
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, timeout: done.append(backend))
    monkeypatch.setattr(parallel, "start_megatron", lambda layout, seed: None)
    parallel.enter(Layout())
    assert done == [3, "cpu:gloo,cuda:nccl"]


def test_the_hook_rewrites_device_names_only() -> None:
    source = "import torch\nx = torch.zeros(2, device='cuda').cuda()\nn = torch.cuda.device_count()"
    source += "\nt = 'torch.cuda.FloatTensor'"
    names = {"_rl360_cuda": cpu_hook._CpuCuda()}
    exec(cpu_hook.rewrite(source, "<test>"), names)
    assert names["x"].device.type == "cpu"
    assert names["n"] == 0
    assert names["t"] == "torch.FloatTensor"
    assert "_rl360_cuda" in ast.unparse(cpu_hook._ToCpu().visit(ast.parse("torch.cuda.Event()")))
    assert torch.cuda.device_count.__module__.startswith("torch")


def test_byte_code_of_a_rewritten_module_is_kept_until_its_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "of_cuda.py"
    rewritten: list[str] = []
    rewrite = cpu_hook.rewrite
    monkeypatch.setattr(cpu_hook, "rewrite", lambda *args: rewritten.append(args[0]) or rewrite(*args))

    def device(source: str) -> Any:
        if not path.exists() or path.read_text() != source:
            path.write_text(source)
        names = {"_rl360_cuda": cpu_hook._CpuCuda(), "torch": torch}
        exec(cpu_hook._Loader("of_cuda", str(path), names["_rl360_cuda"]).get_code("of_cuda"), names)
        return names["device"]

    one, other = "import torch\ndevice = torch.cuda.current_device()\n", "import torch\ndevice = 'no cuda'\n"
    assert device(one) == device(one) == torch.device("cpu")
    assert rewritten == [one], "compiled once, then read"
    (kept,) = (tmp_path / "__pycache__").iterdir()
    assert cpu_hook._DIGEST in kept.name, "Python itself and another rewrite do not take it for theirs"
    assert device(other) == "no cuda" and rewritten == [one, other]
    kept.write_bytes(b"of another Python")
    assert device(other) == "no cuda" and rewritten == [one, other, other]


def test_a_module_that_names_no_device_shares_pythons_byte_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "plain.py"
    path.write_text("answer = 42\n")
    names: dict[str, Any] = {}
    exec(cpu_hook._Loader("plain", str(path), cpu_hook._CpuCuda()).get_code("plain"), names)
    assert names["answer"] == 42
    assert [each.name for each in (tmp_path / "__pycache__").iterdir()] == [
        Path(importlib.util.cache_from_source(str(path))).name
    ]
