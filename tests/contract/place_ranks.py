"""Run by torchrun in test_training_push: under each layout every rank gets the full tensors that it asks for, as rank 0
gathers them, and no others. argv: folder of the models, then a case each: model:tp:pp:ep:port."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from rl360.errors import BadInput
from rl360.training.megatron import hf_map, parallel
from rl360.training.megatron.model import Layout
from rl360.training.megatron.policy import Policy


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # it would hold what the groups of the case before left
    for case in sys.argv[2:]:
        model, tp, pp, ep, os.environ["MASTER_PORT"] = case.split(":")
        layout = Layout(int(tp), int(pp), int(ep), sequence_parallel=(model, tp) == ("moe", "2"))
        parallel.enter(layout)
        rank = torch.distributed.get_rank()
        policy = Policy(folder / model, layout)
        held = [policy.weights()]
        torch.distributed.broadcast_object_list(held, src=0)
        names = sorted(held[0])
        wanted = [names[::2] + names[1:2], names[1::2] + names[:3]]
        found = hf_map.place_hf(policy.core, policy.shape, policy.layout, wanted, torch.bfloat16)
        assert set(found) == set(wanted[rank]), (model, layout, rank)
        for name, tensor in found.items():
            assert tensor.is_contiguous() and torch.equal(tensor, held[0][name].to(torch.bfloat16)), (layout, name)
        with pytest.raises(BadInput, match="no rank of the trainer holds it"):
            hf_map.place_hf(policy.core, policy.shape, policy.layout, [[], ["no.such.weight"]], torch.bfloat16)
        parallel.leave()


if __name__ == "__main__":
    main()
