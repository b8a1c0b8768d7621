"""Run by torchrun in test_training_layouts: of each case three steps of a replica under a layout, then the weights and
moments to a file. Each data-parallel rank must have read the samples it trains and no others, and the witness must see
a gradient in every position that trains, whichever ranks hold it.

argv: the folder that holds models, results and `cases.json`: the cases of test_training_layouts, each with its name and
that of the case to start from, or null. Routing is "own", "replay" of experts drawn at random, or "recompute" (replay,
and every layer's forward runs twice); objective a key of OBJECTIVES.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file

from rl360.config.run import RunConfig
from rl360.training.megatron import parallel
from rl360.training.megatron.model import Layout, parallel_state
from rl360.training.replica import OpenRun, Replica, TrainStep
from rl360.training.results import StepStatus, TrainResult
from tests.unit.memory_store import MemoryStore
from tests.unit.training_data import put_batch, routed, sampled_by, samples_of

STEPS, MAX_TOKENS = 3, 256
MEANS = {"loss", "loss_weight_sum", "clip_fraction", "tis_mean", "mean_abs_dlogp", "entropy", "kl_mean"}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "plain": {},
    "kl": {"kl_coef": 0.3, "old_policy": "kept"},  # and samples of earlier versions
    "critic": {"preset": "ppo", "value_clip": 0.02},
    "reward": {"kl_coef": 0.3, "estimator": "reinforce_pp", "kl_in": "reward", "kl_estimator": "k1"},
}


def main() -> None:
    folder = Path(sys.argv[1])
    shared = torch.distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # torchrun's holds what the groups of the case before left
    for case in json.loads((folder / "cases.json").read_text()):
        if os.environ["RANK"] == "0":
            with socket.create_server(("127.0.0.1", 0)) as free:
                shared.set(case["name"], str(free.getsockname()[1]))
        os.environ["MASTER_PORT"] = shared.get(case["name"]).decode()
        layout = Layout(case["tp"], case["pp"], case["ep"], sequence_parallel=case["sp"])
        parallel.enter(layout)
        _train(folder, layout, case)
        parallel.leave()


def _train(folder: Path, layout: Layout, case: dict[str, Any]) -> None:
    model, name, count = folder / case["model"], case["name"], case["count"]
    objective, routing = case["objective"], case["routing"]
    kept = objective == "kl"
    store = MemoryStore()
    trainer = {"lr": 1e-3, "max_tokens_per_micro_batch": MAX_TOKENS, "routing_replay": routing != "own"}
    trainer |= {"witness": objective != "critic"} | ({"kept_versions": 2} if kept else {})
    fields = {"run": "r1", "rollout": {"max_seq_len": MAX_TOKENS}, "trainer": trainer}
    reference = {"reference": str(folder / "reference")} if "kl_coef" in OBJECTIVES[objective] else {}
    config = RunConfig.parse(fields | {"objective": OBJECTIVES[objective] | reference})
    replica = Replica(cast(Any, store), layout, name)
    replica.execute(OpenRun("r1", config.to_json(), str(model), None, ()))
    policy = replica.policy
    assert policy is not None
    if routing == "recompute":
        core = policy.core.config
        core.recompute_granularity, core.recompute_method, core.recompute_num_layers = "full", "uniform", 1
    first = 0
    if case["start"] is not None:
        held = load_file(folder / f"{case['start']}.safetensors")
        sets = {
            kind: {key.split("/", 1)[1]: value for key, value in held.items() if key.startswith(kind + "/")}
            for kind in ("weights", "exp_avg", "exp_avg_sq")
        }
        policy.load(sets["weights"], sets, STEPS)
        first = STEPS
    told = []
    for step in range(first, first + STEPS):
        samples = samples_of(step, count)
        samples = [sampled_by(row, step, max(0, step - 1)) for row in samples] if kept else samples
        samples = samples if routing == "own" else [routed(row) for row in samples]
        body = put_batch(store, "r1", step, samples, scored=objective == "reward")
        store.read.clear()
        result = cast(TrainResult, replica.execute(TrainStep(step, body["batch_key"], body["batch_digest"])))
        assert result.status is StepStatus.TRAINED
        assert result.trained_samples == count
        seen = result.witness
        assert (seen is None) == (objective == "critic") and (seen is None or seen.samples == count)
        # against kept actors the clip takes the gradient of some tokens to 0
        lit = result.trained_tokens if seen is None else seen.tokens
        assert lit <= result.trained_tokens and (kept or lit == result.trained_tokens)
        assert result.actors_used == ((step - 1,) if kept and step else ())
        means = {name: value or 0.0 for name, value in result.model_dump(include=MEANS).items()}
        sums = {name: value * result.trained_tokens for name, value in means.items()}
        told.append({"mean_loss": result.loss, "grad_norm": result.grad_norm, **sums})
        if objective == "critic":
            assert result.value_clip_fraction, "several updates of the critic: its clip has something to hold"
            told[-1] |= {name: getattr(result, name) for name in ("value_loss", "explained_variance")}
        _refuse_wrong_share([key for key in store.read if "/merged/" in key], count)
    tensors = {f"weights/{key}": value for key, value in policy.weights().items()}
    for kind, values in (policy.moments() | ({} if replica.critic is None else replica.critic.sets())).items():
        tensors |= {f"{kind}/{key}": value for key, value in values.items()}
    if torch.distributed.get_rank() == 0:
        save_file(tensors, folder / f"{name}.safetensors")
        (folder / f"{name}.json").write_text(json.dumps(told))


def _refuse_wrong_share(read: list[str], count: int) -> None:
    """The data-parallel ranks' reads together are each sample once; the ranks of one of them read the same."""
    ranks: list[tuple[int, list[str]]] = [(0, [])] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, (parallel_state.get_data_parallel_rank(), sorted(read)))
    shares = dict(ranks)
    assert all(keys == shares[rank] for rank, keys in ranks)
    assert len(set().union(*shares.values())) == sum(map(len, shares.values())) == count


if __name__ == "__main__":
    main()
