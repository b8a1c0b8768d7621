"""Log-probs of given sequences under a Hugging Face model, computed by the training backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rl360.training.megatron.policy import Policy
    from rl360.training.packing import TrainSequence

MAX_TOKENS = 4096


def sequence_logprobs(policy: Policy, samples: Sequence[TrainSequence], max_tokens: int) -> list[np.ndarray]:
    """Log-prob of every token but the first, float32 [T - 1] per sample. Data parallel 1, last pipeline stage."""
    batches = policy.micro_batches(samples, max_tokens)
    out: list[np.ndarray] = [np.zeros(0, np.float32)] * len(samples)
    for batch, values in zip(batches, policy.batch_logprobs(batches), strict=True):
        for row, index in enumerate(batch.indices):
            assert values is not None
            out[index] = values[row, : len(samples[index].tokens) - 1]
    return out


def megatron_logprobs(hf_dir: str | Path, seqs: Sequence[np.ndarray], max_tokens: int = MAX_TOKENS) -> list[np.ndarray]:
    """log p(token t | tokens before it) for t >= 1: one float32 array [T - 1] per sequence, in order.

    Runs in this process, alone (no port, no other process); refuses when the process is part of a group already.
    """
    from rl360.training.megatron import alone
    from rl360.training.megatron.model import Layout
    from rl360.training.megatron.policy import Policy
    from rl360.training.packing import TrainSequence

    samples = [
        TrainSequence(np.asarray(s, np.int32), np.zeros(len(s), np.uint8), name=f"sequence {i}")
        for i, s in enumerate(seqs)
    ]
    if not samples:
        return []
    with alone.single_process():
        policy = Policy(Path(hf_dir), Layout())
        return sequence_logprobs(policy, samples, max(max_tokens, max(len(s.tokens) for s in samples)))
