"""Supervised training on fixed examples: the warm start of a policy, by the same backend that trains it later."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl360.errors import BadInput, Rl360Error

if TYPE_CHECKING:
    import numpy as np
    import torch

    from rl360.training.megatron.policy import DeviceBatch

MAX_TOKENS = 4096
Progress = Callable[[int, float], None]  # (steps done, loss of the last one)


def _supervised_sums(logprobs: torch.Tensor, entropy: torch.Tensor, batch: DeviceBatch) -> list[torch.Tensor]:
    """Negative log-likelihood of the masked tokens, in the places of the metrics of a step."""
    from rl360.training.objective import counts

    trained = batch.mask.bool()
    zero = logprobs.new_zeros(())
    tokens, samples = counts(batch)
    spread = entropy.detach()[trained].sum()
    return [-logprobs[trained].sum(), tokens, tokens, samples, zero, zero, zero, zero, spread, zero]


def _draws(count: int, batch_size: int, steps: int, seed: int) -> Iterator[list[int]]:
    """`steps` batches of example indices: shuffled passes, each example once a pass."""
    import numpy as np

    rng = np.random.default_rng(seed)
    queue: list[int] = []
    for _ in range(steps):
        while len(queue) < batch_size:
            queue.extend(rng.permutation(count).tolist())
        yield queue[:batch_size]
        del queue[:batch_size]


def train_sft(
    hf_dir: str | Path,
    examples: Sequence[tuple[np.ndarray, np.ndarray]],
    out_dir: str | Path,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    seed: int,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train the model at `hf_dir` on (ids int32 [T], mask uint8 [T]) examples and save it at `out_dir`.

    AdamW (0.9, 0.95), constant `lr`, gradient clip 1.0, mean over the batch's masked tokens. `out_dir` becomes an
    ordinary Hugging Face directory with the tokenizer of `hf_dir`. Runs in this process, alone. Same inputs, same
    threads: same bytes.
    """
    import numpy as np

    from rl360.training.megatron import alone
    from rl360.training.megatron.hf_dir import write_dir
    from rl360.training.megatron.hf_map import digest_of
    from rl360.training.megatron.model import Layout
    from rl360.training.megatron.policy import Optim, Policy
    from rl360.training.packing import TrainSequence

    if not examples or steps < 1 or batch_size < 1:
        raise BadInput(f"nothing to train: {len(examples)} examples, {steps} steps, batch size {batch_size}")
    samples = [
        TrainSequence(np.asarray(ids, np.int32), np.asarray(mask, np.uint8), name=f"example {i}")
        for i, (ids, mask) in enumerate(examples)
    ]
    budget = max(MAX_TOKENS, max(len(s.tokens) for s in samples))
    losses: list[float] = []
    tokens = trained_tokens = 0
    with alone.single_process(seed):
        policy = Policy(Path(hf_dir), Layout(), Optim(lr=lr))
        started = time.monotonic()
        for step, indices in enumerate(_draws(len(samples), batch_size, steps, seed), 1):
            batch = [samples[i] for i in indices]
            weight = int(sum(int(s.loss_mask.sum()) for s in batch))
            if weight == 0:
                raise BadInput(f"batch {step} has no token to train on: every mask in it is 0")
            result = policy.step(policy.micro_batches(batch, budget), _supervised_sums, weight)
            if not result.applied:
                raise Rl360Error(f"loss is not finite at supervised step {step}: lower lr {lr}")
            losses.append(result.sums["loss"] / weight)
            tokens += sum(len(s.tokens) for s in batch)
            trained_tokens += weight
            if progress is not None:
                progress(step, losses[-1])
        seconds = time.monotonic() - started
        weights = policy.weights()
        write_dir(weights, Path(hf_dir), Path(out_dir))
    return {
        "steps": steps,
        "tokens": tokens,
        "trained_tokens": trained_tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "weights_digest": digest_of(weights),
    }
