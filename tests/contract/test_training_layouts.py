"""Several processes train as one does: data, tensor, pipeline and expert parallel; a checkpoint moves between layouts.

Log-probs equal those of transformers in fp32.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.contract.trainer_rig import REPO, free_ports
from tests.unit.training_data import EXPERTS, VOCAB, write_model

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]
Run = Callable[..., tuple[list[dict[str, float]], dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("layouts")
    write_model(made / "dense")
    write_model(made / "moe", experts=EXPERTS)
    write_model(made / "reference", seed=9)
    return made


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    """Steps of a model under a layout, by torchrun; what each told and the tensors at the end."""
    done: dict[str, Any] = {}

    def train(
        model: str,
        ranks: int,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        sp: int = 0,
        start: str = "-",
        routing: str = "own",
        count: int = 13,
        objective: str = "plain",
    ) -> Any:
        name = f"{model}-{ranks}-{tp}-{pp}-{ep}-{sp}-{start}-{routing}"
        name += "" if (count, objective) == (13, "plain") else f"-{count}-{objective}"
        if name not in done:
            after = str(folder / f"{start}.safetensors") if start != "-" else "-"
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
            command += ["--master-addr", "127.0.0.1", "--master-port", str(free_ports(1)[0])]
            command += ["-m", "tests.contract.training_ranks", str(folder / model), str(folder), name]
            command += [str(tp), str(pp), str(ep), str(sp), after, routing, str(count), objective]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(REPO)}
            found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=REPO)
            assert found.returncode == 0, found.stderr[-3000:]
            told = json.loads((folder / f"{name}.json").read_text())
            done[name] = told, load_file(folder / f"{name}.safetensors"), name
        return done[name][:2]

    return train


def assert_same(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert mine == pytest.approx(theirs, rel=2e-4, abs=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        # a weight moves by up to lr 1e-3 a step: a lost or doubled gradient shows as 1e-3, rounding as 1e-5
        np.testing.assert_allclose(found[1][name], tensor, atol=1e-4 if "weights/" in name else 2e-5)


@pytest.mark.parametrize(
    "layout",
    [{"ranks": 2}, {"ranks": 2, "tp": 2}, {"ranks": 2, "tp": 2, "sp": 1}, {"ranks": 2, "pp": 2}],
    ids=["dp2", "tp2", "tp2-sp", "pp2"],
)
def test_dense_layouts_train_as_one_process(run: Run, layout: dict[str, int]) -> None:
    assert_same(run("dense", **layout), run("dense", 1))


@pytest.mark.parametrize("layout", [{"ranks": 2}, {"ranks": 2, "ep": 2}], ids=["dp2", "ep2"])
def test_expert_layouts_train_as_one_process(run: Run, layout: dict[str, int]) -> None:
    assert_same(run("moe", **layout), run("moe", 1))


@pytest.mark.parametrize(
    "layout",
    [
        {"ranks": 2},
        {"ranks": 2, "ep": 2},
        {"ranks": 2, "tp": 2, "sp": 1},
        {"ranks": 2, "pp": 2},
        {"ranks": 2, "pp": 2, "routing": "recompute"},
    ],
    ids=["dp2", "ep2", "tp2-sp", "pp2", "pp2-recompute"],
)
def test_layouts_replay_routing_as_one_process(run: Run, layout: dict[str, Any]) -> None:
    one = run("moe", 1, routing="replay")
    assert_same(run("moe", **{"routing": "replay"} | layout), one)
    assert abs(one[0][0]["loss_weight_sum"] - run("moe", 1)[0][0]["loss_weight_sum"]) < 1e-6
    assert abs(one[0][0]["mean_abs_dlogp"] - run("moe", 1)[0][0]["mean_abs_dlogp"]) > 1e-2, "it is another forward"


@pytest.mark.parametrize(
    ("objective", "layout"),
    [
        ("kl", {"ranks": 2}),
        ("kl", {"ranks": 2, "tp": 2}),
        ("kl", {"ranks": 2, "pp": 2}),
        ("reward", {"ranks": 2}),
        ("reward", {"ranks": 2, "pp": 2}),
    ],
    ids=["dp2", "tp2", "pp2", "reward-dp2", "reward-pp2"],
)
def test_layouts_train_against_a_reference_and_kept_actors_as_one_process(
    run: Run, objective: str, layout: dict[str, int]
) -> None:
    one = run("dense", 1, objective=objective)
    assert_same(run("dense", **layout, objective=objective), one)
    assert one[0][0]["kl_mean"] != 0 and one[0][1]["mean_loss"] != run("dense", 1)[0][1]["mean_loss"]


@pytest.mark.parametrize(("model", "count"), [("dense", 1), ("moe", 3)])
def test_ranks_without_a_sample_keep_step_and_count_for_nothing(run: Run, model: str, count: int) -> None:
    """One sample on two ranks leaves one of them with padding alone, three leave it with less."""
    assert_same(run(model, 2, count=count), run(model, 1, count=count))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("dense", {"ranks": 2}),
        ("dense", {"ranks": 2, "tp": 2}),
        ("dense", {"ranks": 2, "tp": 2, "sp": 1}),
        ("dense", {"ranks": 2, "pp": 2}),
        ("moe", {"ranks": 2, "ep": 2}),
        ("moe", {"ranks": 2, "tp": 2, "sp": 1}),
        ("moe", {"ranks": 2, "pp": 2}),
    ],
    ids=["dp2", "tp2", "tp2-sp", "pp2", "moe-ep2", "moe-tp2-sp", "moe-pp2"],
)
def test_layouts_train_policy_and_critic_as_one_process(run: Run, model: str, layout: dict[str, int]) -> None:
    one = run(model, 1, objective="critic")
    assert_same(run(model, **layout, objective="critic"), one)
    assert sum(name.startswith("critic_weights/") for name in one[1]) > 20


def test_a_checkpoint_moves_between_layouts(run: Run) -> None:
    run("dense", 2, tp=2)
    run("dense", 1)
    moved = run("dense", 1, start="dense-2-2-1-1-0---own")
    stayed = run("dense", 1, start="dense-1-1-1-1-0---own")
    assert_same(moved, stayed)


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_logprobs_equal_transformers(folder: Path, model: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from rl360.training.logprobs import megatron_logprobs

    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, VOCAB, n).astype(np.int32) for n in rng.integers(2, 120, 24)]
    theirs = AutoModelForCausalLM.from_pretrained(folder / model, dtype=torch.float32).eval()
    for tokens, found in zip(sequences, megatron_logprobs(folder / model, sequences), strict=True):
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        with torch.no_grad():
            expected = theirs(ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-4)
