"""Routing replay (R3): the experts that the engine chose for a token take the place of the router's own top k.

Megatron's router asks an object, when it has one, where it would take the top k of its logits, and goes on with what
that answers: softmax over the logits at those ids, so gradients reach the router through the weights of its experts.
The object here is ours and stays for one pass over a step's micro-batches. Megatron's own (`RouterReplay`) keeps all
its instances, of every model ever built, in one global list and must be told which of forward and recomputation runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter

Choice = tuple[torch.Tensor, torch.Tensor]  # scores and ids, both [tokens, top_k]


class _LayerReplay:
    """What one router asks. `rows`: of the micro-batch in its forward, [sequence, batch, layers, top_k]."""

    def __init__(self, router: TopKRouter) -> None:
        self.router = router
        # of micro-batches whose forward is computed again in their backward, which come in the order of the forwards
        self.recomputed: deque[torch.Tensor | None] = deque()
        self.rows: torch.Tensor | None = None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., Choice] | None = None,
    ) -> Choice:
        """Called by megatron in place of its own top k of `scores` [tokens, experts]."""
        rows = self._of_this_forward()
        if rows is None:
            assert default_compute_topk is not None
            return default_compute_topk(scores, topk, num_groups, group_topk)
        ids = rows[:, :, self.router.layer_number - 1].reshape(-1, topk).to(scores.device, torch.int64)
        return scores.gather(1, ids), ids

    def _of_this_forward(self) -> torch.Tensor | None:
        if torch.is_grad_enabled():  # a forward that keeps its graph, or the recomputation of one that did not
            return self.recomputed.popleft() if self.recomputed else self.rows
        if self.router.training:  # megatron's checkpoints run the first forward without a graph
            self.recomputed.append(self.rows)
        return self.rows


@contextmanager
def replaying(model: GPTModel) -> Iterator[Callable[[torch.Tensor | None], None]]:
    """Within, call the given function with each micro-batch's routing `[rows, width, layers, top_k]` right before its
    forward; None leaves that micro-batch to the model. Afterwards nothing is left in the model."""
    layers = [_LayerReplay(module) for module in model.modules() if isinstance(module, TopKRouter)]

    def use(routing: torch.Tensor | None) -> None:
        rows = None if routing is None else _local(routing, model.config)
        for layer in layers:
            layer.rows = rows

    for layer in layers:
        layer.router.router_replay = layer
    try:
        yield use
    finally:
        for layer in layers:
            layer.router.router_replay = None


def _local(routing: torch.Tensor, config: Any) -> torch.Tensor:
    """The part that this rank's routers see, in the order of their tokens: sequence first, under sequence parallelism
    one stretch of it a rank."""
    if config.sequence_parallel:
        group = parallel_state.get_tensor_model_parallel_group()
        routing = routing.chunk(group.size(), 1)[group.rank()]
    return routing.transpose(0, 1)
