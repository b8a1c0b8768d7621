"""A training step as one writes it first on Megatron-core: samples in the order they came, padded to the longest of
their micro-batch, Megatron's own cross entropy, schedule and optimizer. What the row `trainer_tokens` compares with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import rl360.training.megatron  # noqa: F401 - first: puts the CPU rewrite in place

# isort: split
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from rl360.training.megatron import hf_map
from rl360.training.megatron.hf_dir import read_tensors
from rl360.training.megatron.model import Layout, build_model, read_shape
from rl360.training.megatron.policy import Optim
from rl360.training.packing import TrainSequence


def in_order(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices by micro-batch: as many samples in a row as fit, padded to the longest of them."""
    batches: list[list[int]] = []
    longest = 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if batches and (len(batches[-1]) + 1) * longest <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = length
    return batches


class BareTrainer:
    """One process, no splits."""

    def __init__(self, hf_dir: Path, optim: Optim) -> None:
        shape, layout = read_shape(hf_dir), Layout()
        core = build_model(shape, layout)
        hf_map.load_hf(core, read_tensors(hf_dir), shape, layout)
        self.model: Any = DistributedDataParallel(core.config, DistributedDataParallelConfig(), core)
        settings = OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            adam_beta1=optim.beta1,
            adam_beta2=optim.beta2,
            adam_eps=optim.eps,
            weight_decay=optim.weight_decay,
            clip_grad=optim.grad_clip,
        )
        self.optimizer: Any = get_megatron_optimizer(settings, [self.model])

    def step(self, samples: Sequence[TrainSequence], budget: int, high: float) -> tuple[float, float]:
        """Loss and gradient norm of one optimizer step on the token mean of -min(w, high) * ratio * advantage."""
        batches = in_order([len(sample.tokens) - 1 for sample in samples], budget)
        trained = sum(int(sample.loss_mask.sum()) for sample in samples)
        self.model.train()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

        def forward_step(stream: Iterator[list[int]], model: Any) -> tuple[torch.Tensor, Any]:
            rows = [samples[index] for index in next(stream)]
            tokens = _padded([row.tokens for row in rows], torch.int64)
            losses = model(tokens[:, :-1].contiguous(), None, None, labels=tokens[:, 1:].contiguous())
            return losses, partial(on_losses, rows)

        def on_losses(rows: list[TrainSequence], losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            mask = _padded([row.loss_mask for row in rows], torch.float32)[:, 1:]
            rollout = _padded([row.logprobs for row in rows], torch.float32)[:, 1:]
            advantages = torch.tensor([row.advantage for row in rows], dtype=torch.float32)[:, None]
            new = -losses
            weight = torch.exp(new.detach() - rollout).clamp(max=high)
            loss = -(weight * torch.exp(new - new.detach()) * advantages * mask).sum() / trained
            return loss, torch.zeros((), dtype=torch.int), loss.detach()

        found = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=self.model,
            num_microbatches=len(batches),
            seq_length=max(len(sample.tokens) for sample in samples) - 1,
            micro_batch_size=max(map(len, batches)),
            forward_only=False,
        )
        _, grad_norm, _ = self.optimizer.step()
        return float(sum(found)), float(grad_norm)


def _padded(rows: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.as_tensor(row, dtype=dtype) for row in rows], batch_first=True)
