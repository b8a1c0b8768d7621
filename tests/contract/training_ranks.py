"""Run by torchrun in test_training_layouts: three steps under a layout, then the weights and moments to a file.

argv: model directory, output folder, name, tp, pp, ep, sequence parallel (0 or 1), checkpoint to start from or "-"
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rl360.config.run import ObjectiveConfig
from rl360.training.megatron import parallel
from rl360.training.megatron.model import Layout
from rl360.training.megatron.policy import Optim, Policy
from rl360.training.objective import policy_sums
from rl360.training.packing import TrainSequence
from tests.unit.training_data import samples_of

STEPS, MAX_TOKENS = 3, 256


def main() -> None:
    model, out, name, tp, pp, ep, sp, start = sys.argv[1:]
    layout = Layout(int(tp), int(pp), int(ep), sequence_parallel=sp == "1")
    parallel.enter(layout)
    policy = Policy(Path(model), layout, Optim(lr=1e-3))
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
        samples = [
            TrainSequence(row["tokens"], row["loss_mask"], row["logprobs"], row["advantage"], row["attempt_id"])
            for row in samples_of(step, 13)
        ]
        weight = sum(int(s.loss_mask.sum()) for s in samples)
        result = policy.step(policy.micro_batches(samples, MAX_TOKENS), policy_sums(ObjectiveConfig()), weight)
        assert result.applied
        told.append({"loss": result.sums["loss"] / weight, "grad_norm": result.grad_norm, **result.sums})
    tensors = {f"weights/{key}": value for key, value in policy.weights().items()}
    for moment, values in policy.moments().items():
        tensors |= {f"{moment}/{key}": value for key, value in values.items()}
    if torch.distributed.get_rank() == 0:
        save_file(tensors, Path(out) / f"{name}.safetensors")
        (Path(out) / f"{name}.json").write_text(json.dumps(told))
    parallel.leave()


if __name__ == "__main__":
    main()
