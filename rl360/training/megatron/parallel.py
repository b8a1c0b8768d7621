"""Process groups: one call to enter Megatron's parallel state, one to leave it."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from rl360.errors import BadInput, Rl360Error
from rl360.training.megatron import ON_CPU
from rl360.training.megatron.hf_dir import read_tensors
from rl360.training.megatron.hf_map import digest_of
from rl360.training.megatron.model import Layout, parallel_state

COLLECTIVE_DEADLINE_S = 600
T = TypeVar("T")


def start_megatron(layout: Layout, seed: int) -> None:
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    world = torch.distributed.get_world_size()
    if world % (layout.tp * layout.pp):
        raise BadInput(
            f"{world} processes cannot hold tensor parallel {layout.tp} x pipeline parallel {layout.pp}: "
            "start a multiple of the product"
        )
    parallel_state.initialize_model_parallel(layout.tp, layout.pp, expert_model_parallel_size=layout.ep)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def enter(layout: Layout, seed: int = 0) -> None:
    """Join the processes started by torchrun (its environment names them) under `layout`."""
    if not ON_CPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # else all ranks of a host meet on its first GPU
    backend = "gloo" if ON_CPU else "cpu:gloo,cuda:nccl"
    torch.distributed.init_process_group(backend, timeout=datetime.timedelta(seconds=COLLECTIVE_DEADLINE_S))
    start_megatron(layout, seed)


def leave() -> None:
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def gathered(value: T) -> list[T]:
    """Every rank's value, in the order of ranks, on all of them."""
    values = [value] * torch.distributed.get_world_size()
    if len(values) > 1:
        torch.distributed.all_gather_object(values, value)
    return values


def together(work: Callable[[], T]) -> T:
    """Do local work on every rank; when it fails on one, all raise that rank's error."""
    value: T | None = None
    error: Rl360Error | None = None
    try:
        value = work()
    except Rl360Error as caught:
        error = caught
    for found in gathered(error):
        if found is not None:
            raise found
    assert value is not None
    return value


def refuse_other_copies(folder: Path) -> None:
    """`BadInput` on every rank when the weights in `folder` are not the same for all: each host reads its own copy, and
    no gradient would tell that they differ. Collective."""
    if torch.distributed.get_world_size() == 1:
        return
    digests = gathered(together(lambda: digest_of(read_tensors(folder))))
    other = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    if other:
        raise BadInput(
            f"{folder} holds weights {digests[0][:16]} on rank 0 and others on rank {', '.join(other)}; "
            "give every host of the trainer the same copy"
        )
