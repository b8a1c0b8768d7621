"""Run by torchrun in test_training_push: under each layout every rank gets the full tensors that it asks for, as rank 0
gathers them, and no others. argv: folder of the models, then a case each: model:tp:pp:ep."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch

from rl360.errors import BadInput
from rl360.training.megatron import hf_map, parallel
from rl360.training.megatron.model import Layout
from rl360.training.megatron.policy import Policy
from tests.contract.trainer_rig import free_ports


def meeting_port(told: Path) -> str:
    """A port that was free a moment ago: rank 0 finds it and tells the other in a file."""
    if os.environ["RANK"] == "0":
        told.with_suffix(".part").write_text(str(free_ports(1)[0]))
        told.with_suffix(".part").rename(told)
    until = time.monotonic() + 120
    while not told.exists():
        assert time.monotonic() < until, "rank 0 found no port"
        time.sleep(0.05)
    return told.read_text()


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # it would hold what the groups of the case before left
    for case in sys.argv[2:]:
        model, tp, pp, ep = case.split(":")
        os.environ["MASTER_PORT"] = meeting_port(folder / f"port-{case.replace(':', '-')}")
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
