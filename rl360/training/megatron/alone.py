"""Megatron in one process, without others: for commands, benches and tests. A step's trainer is several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from rl360.errors import BadInput
from rl360.training.megatron.model import Layout
from rl360.training.megatron.parallel import leave, start_megatron


@contextlib.contextmanager
def single_process(seed: int = 0) -> Iterator[None]:
    """A group of this process alone, without a port; for work that is done inside a command or a flow run."""
    if torch.distributed.is_initialized():
        raise BadInput("this process is already part of a process group: run the work in a process of its own")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        start_megatron(Layout(), seed)
        yield
    finally:
        leave()
