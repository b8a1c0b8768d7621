"""The layer modules that megatron lacks without TransformerEngine, a critic's head, and token log-probs over a split
vocabulary.

`CausalAttention` is the core attention by `scaled_dot_product_attention`; `RmsNorm` carries the sequence-parallel mark
(the stock wrapper refuses it). Batches are rectangles `[batch, sequence]` padded on the right: under a causal mask no
real token ever sees the padding, so a row equals the same sequence alone. docs/training.md has the measurement that
chose rectangles of similar lengths over one packed row with per-sequence segments.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class RmsNorm(torch.nn.Module):
    """Root-mean-square norm over the last axis."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # megatron sums these gradients over the TP group

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)


class CausalAttention(MegatronModule):
    """Grouped-query causal attention: [seq, batch, heads or groups, dim] -> [seq, batch, heads * dim]."""

    def __init__(self, config: TransformerConfig, **_unused: Any) -> None:
        super().__init__(config=config)
        self.grouped = config.num_attention_heads != config.num_query_groups

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        if packed_seq_params is not None or attention_mask is not None or attention_bias is not None:
            raise ValueError("CausalAttention takes right-padded rectangles: no packed sequences, mask or bias")
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


class ValueHead(torch.nn.Module):
    """Hidden states [sequence, batch, hidden] -> values [sequence, batch, 1], in the place of megatron's output layer.

    Each tensor-parallel rank computes all values by a copy of its own, whose gradient is therefore the same on each.
    """

    def __init__(self, hidden: int, like: torch.Tensor, sequence_parallel: bool) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.zeros(1, hidden, dtype=like.dtype, device=like.device))
        self.sequence_parallel = sequence_parallel

    def forward(self, hidden: torch.Tensor, **_unused: Any) -> tuple[torch.Tensor, None]:
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return F.linear(hidden, self.value), None


class _VocabLogprob(torch.autograd.Function):
    """log p(target) and entropy from logits split over the tensor-parallel group, both with gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        world = 1 if group is None else group.size()
        shift = logits.detach().amax(-1)
        if world > 1:
            torch.distributed.all_reduce(shift, torch.distributed.ReduceOp.MAX, group=group)
        x = logits.float() - shift[..., None]
        probs = x.exp()
        first = 0 if world == 1 else group.rank() * x.shape[-1]
        held = (target >= first) & (target < first + x.shape[-1])  # is the target's column on this rank?
        column = (target - first).clamp(0, x.shape[-1] - 1)
        picked = x.gather(-1, column[..., None])[..., 0] * held
        sums = torch.stack([probs.sum(-1), torch.einsum("...v,...v->...", probs, x), picked])
        if world > 1:
            torch.distributed.all_reduce(sums, group=group)
        total, weighted, picked = sums
        log_total = total.log()
        probs /= total[..., None]
        entropy = log_total - weighted / total
        ctx.save_for_backward(probs, column, held, entropy)
        ctx.logits_dtype = logits.dtype
        ctx.set_materialize_grads(False)  # None for the one that the loss does not use
        return picked - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        probs, column, held, entropy = ctx.saved_tensors
        grad, grad_entropy = grads
        if grad is None:
            grad = torch.zeros_like(entropy)
        out = probs * -grad[..., None]
        out.scatter_add_(-1, column[..., None], (grad * held)[..., None])
        if grad_entropy is not None:  # d entropy / d logit = -p (log p + entropy)
            out -= grad_entropy[..., None] * (torch.xlogy(probs, probs) + probs * entropy[..., None])
        return out.to(ctx.logits_dtype), None, None


def token_logprobs(logits: torch.Tensor, target: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropy `[...]` of `target` `[...]` under `logits` `[..., vocab / tp]`, both fp32."""
    return _VocabLogprob.apply(logits, target, group)
