"""Which samples pull at the weights in a step, seen in the model alone, and held against what the filter booked.

Gradients are watched at two places while they run back. What enters the output layer has one at position t of a row
exactly when the prediction made from t is in the loss. What leaves the embedding has, under a causal model, none behind
the last such position of its row, and none in a row without any: so a sample that another one's loss reaches shows too.
No mask, weight or advantage is looked at; a position is lit when any number of its gradient is not 0.

What is expected of a row of the batch (docs/training.md, "The witness"): never more lit positions than it has tokens to
train; fewer only where something takes a token's gradient to exactly 0: an advantage of 0, a clip or a correction. The
last two are counted by the loss over the whole step: of a row that is short in such a step the witness cannot tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from rl360.errors import WitnessDisagrees
from rl360.ledger.checks import samples_digest
from rl360.objective.filters import TrainRow
from rl360.training.results import Witnessed

OUTPUT, EMBEDDING = 0, 1
_FILLER = -1  # rows of a rectangle that hold no sample
_NAMED = 5


class Witness:
    """Of one optimizer step. rows: of the whole batch, in order; `indices` of micro-batches count them.

    other_terms: the loss has a term that an advantage of 0 does not take away (entropy, a KL), or advantages that are
    not the rows' own.
    """

    def __init__(self, rows: Sequence[TrainRow], other_terms: bool) -> None:
        self.rows, self.other_terms = rows, other_terms
        self.report: Witnessed | None = None
        self._lit: dict[tuple[int, int], np.ndarray] = {}  # sorted columns by place and row of the batch

    def note(self, place: int, indices: tuple[int, ...], first: int, grad: torch.Tensor) -> None:
        """Take down a gradient [columns, rows, hidden], whose first column is `first` of its rectangle."""
        lit = (grad != 0).any(-1).cpu().numpy()
        for row in range(lit.shape[1]):
            at = place, indices[row] if row < len(indices) else _FILLER
            columns = first + np.flatnonzero(lit[:, row])
            self._lit[at] = np.union1d(self._lit[at], columns) if at in self._lit else columns

    def settle(self, sums: Mapping[str, float]) -> None:
        """Compare; collective. `WitnessDisagrees` naming the rows at fault, the same on every rank. sums: the step's,
        of which the tokens without gradient (`clipped`, `masked`) are used."""
        lit, ends = self._gathered()
        wrong, short, missing, unclear = [], [], 0, 0
        for index, row in enumerate(self.rows):
            name, found = f"{row.attempt_id} leaf {row.leaf}", int(lit[index])
            if found > row.trained or ends[EMBEDDING, index] > ends[OUTPUT, index]:
                reach = int(ends[EMBEDDING, index])
                wrong.append(f"{name} ({row.trained} booked, {found} with a gradient, which reaches column {reach})")
            elif found and not ends[EMBEDDING, index]:
                wrong.append(f"{name} (its gradient does not reach the embedding)")
            elif row.advantage == 0:
                unclear += self.other_terms
                wrong += [f"{name} (advantage 0, {found} with a gradient)"] if found and not self.other_terms else []
            elif found < row.trained:
                short.append(f"{name} ({row.trained} booked, {found} with a gradient)")
                missing += row.trained - found
        if lit[_FILLER] or ends[:, _FILLER].any():
            wrong.append("a row of padding")
        explained = round(sums["clipped"] + sums["masked"])
        if missing > explained:
            wrong += short
        if wrong:
            more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
            raise WitnessDisagrees(f"gradients are not where the filter booked them: {'; '.join(wrong[:_NAMED])}{more}")
        seen = [(row.attempt_id, row.leaf) for index, row in enumerate(self.rows) if lit[index]]
        self.report = Witnessed(
            samples=len(seen),
            tokens=int(lit[:_FILLER].sum()),
            digest=samples_digest(seen),
            cannot_tell=len(short) + unclear,
            excused=tuple(
                index for index, row in enumerate(self.rows) if bool(lit[index]) != bool(row.advantage and row.trained)
            ),
        )

    def _gathered(self) -> tuple[np.ndarray, np.ndarray]:
        """By row, the padding's last: lit positions at the output, and one past the last lit column at each place."""
        lit = torch.zeros(len(self.rows) + 1, dtype=torch.int64)
        ends = torch.zeros(2, len(self.rows) + 1, dtype=torch.int64)
        for (place, index), columns in self._lit.items():
            if len(columns):
                ends[place, index] = 1 + int(columns[-1])
                lit[index] += len(columns) if place == OUTPUT else 0
        if torch.distributed.get_world_size() > 1:  # no position is taken down by two ranks
            torch.distributed.all_reduce(lit)
            torch.distributed.all_reduce(ends, torch.distributed.ReduceOp.MAX)
        return lit.numpy(), ends.numpy()


@contextmanager
def watching(model: GPTModel, witness: Witness | None) -> Iterator[Callable[[tuple[int, ...]], None]]:
    """Within, call the given function with each micro-batch's indices right before its forward. Afterwards, and without
    a witness, nothing is left in the model."""
    now: list[tuple[int, ...]] = [()]
    rank, split = parallel_state.get_tensor_model_parallel_rank(), model.config.sequence_parallel

    def watch(place: int, hidden: torch.Tensor) -> None:
        # under tensor parallelism all ranks hold the same, but for a split sequence, of which each has one stretch
        if witness is not None and hidden.requires_grad and (split or rank == 0):
            hidden.register_hook(partial(witness.note, place, now[0], rank * hidden.shape[0] if split else 0))

    hooks = []
    if witness is not None and model.pre_process:
        hooks.append(model.embedding.register_forward_hook(lambda _module, _args, hidden: watch(EMBEDDING, hidden)))
    if witness is not None and model.post_process:
        hooks.append(model.output_layer.register_forward_pre_hook(lambda _module, args: watch(OUTPUT, args[0])))
    try:
        yield partial(now.__setitem__, 0)
    finally:
        for hook in hooks:
            hook.remove()
