"""Run by torchrun in test_training_layouts: three steps of a replica under a layout, then the weights and moments to a
file. Each data-parallel rank must have read the samples it trains and no others, and the witness must see a gradient in
every position that trains, whichever ranks hold it.

argv: model directory, output folder, name, tp, pp, ep, sequence parallel (0 or 1), checkpoint to start from or "-",
routing: "own", "replay" of experts drawn at random, "recompute" (replay, and every layer's forward runs twice), number
of samples a step, objective (a key of OBJECTIVES)
"""

from __future__ import annotations

import json
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
    model, out, name, tp, pp, ep, sp, start, routing, count, objective = sys.argv[1:]
    kept = objective == "kl"
    layout = Layout(int(tp), int(pp), int(ep), sequence_parallel=sp == "1")
    parallel.enter(layout)
    store = MemoryStore()
    trainer = {"lr": 1e-3, "max_tokens_per_micro_batch": MAX_TOKENS, "routing_replay": routing != "own"}
    trainer |= {"witness": objective != "critic"} | ({"kept_versions": 2} if kept else {})
    fields = {"run": "r1", "rollout": {"max_seq_len": MAX_TOKENS}, "trainer": trainer}
    reference = {"reference": str(Path(model).with_name("reference"))} if "kl_coef" in OBJECTIVES[objective] else {}
    config = RunConfig.parse(fields | {"objective": OBJECTIVES[objective] | reference})
    replica = Replica(cast(Any, store), layout, name)
    replica.execute(OpenRun("r1", config.to_json(), model, None, ()))
    policy = replica.policy
    assert policy is not None
    if routing == "recompute":
        core = policy.core.config
        core.recompute_granularity, core.recompute_method, core.recompute_num_layers = "full", "uniform", 1
    first = 0
    if start != "-":
        held = load_file(start)
        sets = {
            kind: {key.split("/", 1)[1]: value for key, value in held.items() if key.startswith(kind + "/")}
            for kind in ("weights", "exp_avg", "exp_avg_sq")
        }
        policy.load(sets["weights"], sets, STEPS)
        first = STEPS
    told = []
    for step in range(first, first + STEPS):
        samples = samples_of(step, int(count))
        samples = [sampled_by(row, step, max(0, step - 1)) for row in samples] if kept else samples
        samples = samples if routing == "own" else [routed(row) for row in samples]
        body = put_batch(store, "r1", step, samples, scored=objective == "reward")
        store.read.clear()
        result = cast(TrainResult, replica.execute(TrainStep(step, body["batch_key"], body["batch_digest"])))
        assert result.status is StepStatus.TRAINED
        assert result.trained_samples == int(count)
        seen = result.witness
        assert (seen is None) == (objective == "critic") and (seen is None or seen.samples == int(count))
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
        _refuse_wrong_share([key for key in store.read if "/merged/" in key], int(count))
    tensors = {f"weights/{key}": value for key, value in policy.weights().items()}
    for kind, values in (policy.moments() | ({} if replica.critic is None else replica.critic.sets())).items():
        tensors |= {f"{kind}/{key}": value for key, value in values.items()}
    if torch.distributed.get_rank() == 0:
        save_file(tensors, Path(out) / f"{name}.safetensors")
        (Path(out) / f"{name}.json").write_text(json.dumps(told))
    parallel.leave()


def _refuse_wrong_share(read: list[str], count: int) -> None:
    """The data-parallel ranks' reads together are each sample once; the ranks of one of them read the same."""
    ranks: list[tuple[int, list[str]]] = [(0, [])] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, (parallel_state.get_data_parallel_rank(), sorted(read)))
    shares = dict(ranks)
    assert all(keys == shares[rank] for rank, keys in ranks)
    assert len(set().union(*shares.values())) == sum(map(len, shares.values())) == count


if __name__ == "__main__":
    main()
