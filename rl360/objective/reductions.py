"""How token losses become one number: the loss of a step is the sum over trained tokens of weight * token loss.

A weight depends on counts alone, so the ledger can state it before anything is trained, and weighted sums add up over
micro-batches and ranks in any split.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl360.errors import BadInput

REDUCTIONS = ("token_mean", "sample_mean", "constant")


def token_weights(reduction: str, trained_tokens: Sequence[int], constant: float | None = None) -> np.ndarray:
    """Loss weight of each trained token, float64 `[samples]`; 0 for a sample without any.

    trained_tokens: their number by sample, over the whole step. A sample here is whatever counts as one: rl360 passes
    attempts, so an attempt that became several samples weighs as one.

    - `token_mean`: 1 / all trained tokens. DAPO, arXiv 2503.14476, section 3.3.
    - `sample_mean`: 1 / (samples * tokens of the sample): the mean over samples of each one's mean. DeepSeekMath
      (GRPO), arXiv 2402.03300, section 4.1.1, equation 3; GSPO, arXiv 2507.18071, section 4.1.
    - `constant`: 1 / constant, however many tokens there are. Dr. GRPO, arXiv 2503.20783, section 3.2 and listing 1.
    """
    counts = np.asarray(trained_tokens, dtype=np.float64)
    if reduction == "token_mean":
        divisor = np.full_like(counts, counts.sum())
    elif reduction == "sample_mean":
        divisor = counts * np.count_nonzero(counts)
    elif reduction == "constant":
        if constant is None or not 0 < constant < np.inf:
            raise BadInput(f"reduction constant needs a divisor above 0, got {constant}")
        divisor = np.full_like(counts, constant)
    else:
        raise BadInput(f"reduction {reduction!r} is none of {', '.join(REDUCTIONS)}")
    return np.divide(1.0, divisor, out=np.zeros_like(counts), where=counts > 0)
