"""Any number of samples -> micro-batches of rectangles. Pure numpy; the same input gives the same plan everywhere.

Samples of similar length share a rectangle `[rows, width]`, so padding stays small; every sample is in exactly one
micro-batch of one rank; all ranks get the same number of micro-batches, filled up with empty ones that weigh nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from rl360.errors import BadInput

A = TypeVar("A")  # an array here, a tensor on the device
PAD_ID = 0  # any valid id: padding sits to the right of a row's tokens, where a causal model never looks


@dataclass(frozen=True)
class TrainSequence:
    """What the trainer needs of one sample. tokens int32 [T], loss_mask uint8 [T], logprobs float32 [T].

    weight: of each of its trained tokens in the loss, relative to those of others.
    routing: experts to replay, uint8 or uint16 [T - 1, layers, top_k]; None leaves the choice to the model.
    versions: int32 [T], of the weights that sampled each token under the mask, -1 elsewhere; None when nobody asks.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray | None = None
    advantage: float = 0.0
    name: str = ""
    weight: float = 1.0
    routing: np.ndarray | None = None
    versions: np.ndarray | None = None

    def __post_init__(self) -> None:
        name, length = self.name or "sample", len(self.tokens)
        if length < 2:
            raise BadInput(f"{name} has {length} tokens; a sequence needs at least 2 to be scored")
        if len(self.loss_mask) != length or (self.logprobs is not None and len(self.logprobs) != length):
            raise BadInput(f"{name}: tokens, loss_mask and logprobs differ in length")
        if self.loss_mask[0]:
            raise BadInput(f"{name}: loss_mask is set on the first token, which nothing predicts")
        if self.routing is not None and len(self.routing) != length - 1:
            raise BadInput(f"{name}: {len(self.routing)} rows of routed experts, {length} tokens have {length - 1}")


@dataclass(frozen=True)
class Rectangle(Generic[A]):
    """A rectangle of next-token predictions: column t of `targets` is predicted from columns 0..t of `inputs`.

    inputs, targets int64 [rows, width]; mask uint8, logprobs, advantages and weights float32 [rows, width].
    indices: the sample in each row; empty for a micro-batch that only keeps ranks in step.
    routing: experts to replay [rows, width, layers, top_k], as narrow as the samples hold them; None: the model's own.
    versions: of the weights that sampled each target, int32 [rows, width], -1 where none did.
    old, reference: log-probs under kept earlier weights and under the reference policy, float32 [rows, width].
    token_rewards: beside the scores, for a critic; values, returns: of it before the step, and what it learns; float32
    [rows, width], None without one.
    """

    indices: tuple[int, ...]
    inputs: A
    targets: A
    mask: A
    logprobs: A
    advantages: A
    weights: A
    routing: A | None = None
    versions: A | None = None
    old: A | None = None
    reference: A | None = None
    token_rewards: A | None = None
    values: A | None = None
    returns: A | None = None


MicroBatch = Rectangle[np.ndarray]


def _width(length: int, multiple: int) -> int:
    return -(-(length - 1) // multiple) * multiple


def plan(lengths: Sequence[int], max_tokens: int, ranks: int = 1, multiple: int = 1) -> list[list[tuple[int, ...]]]:
    """Sample indices by rank and micro-batch. `max_tokens` bounds rows x width of a rectangle, padding included."""
    if max_tokens < 1 or ranks < 1 or multiple < 1:
        raise BadInput(f"max_tokens {max_tokens}, ranks {ranks} and multiple {multiple} must all be at least 1")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups: list[tuple[int, ...]] = []
    start = 0
    while start < len(order):
        width = _width(lengths[order[start]], multiple)
        if width > max_tokens:
            raise BadInput(
                f"sample {order[start]} has {lengths[order[start]]} tokens, more than max_tokens_per_micro_batch "
                f"{max_tokens}; raise it or lower rollout.max_seq_len"
            )
        rows = max_tokens // width
        groups.append(tuple(order[start : start + rows]))
        start += rows

    def cost(group: tuple[int, ...]) -> int:
        return len(group) * _width(lengths[group[0]], multiple)

    wanted = -(-len(groups) // ranks) * ranks
    while len(groups) < wanted and any(len(g) > 1 for g in groups):  # share the work before padding with nothing
        largest = max((i for i in range(len(groups)) if len(groups[i]) > 1), key=lambda i: (cost(groups[i]), -i))
        group = groups[largest]
        half = (len(group) + 1) // 2
        groups[largest : largest + 1] = [group[:half], group[half:]]
    groups += [()] * (wanted - len(groups))
    groups.sort(key=lambda g: -cost(g) if g else 0)
    by_rank: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
    for turn in range(len(groups) // ranks):
        row = groups[turn * ranks : (turn + 1) * ranks]
        for rank, group in enumerate(row if turn % 2 == 0 else reversed(row)):  # back and forth, so sums even out
            by_rank[rank].append(group)
    return by_rank


def build(
    samples: Sequence[TrainSequence] | Mapping[int, TrainSequence], indices: tuple[int, ...], multiple: int = 1
) -> MicroBatch:
    """The rectangle of `indices`; with none, one row of padding that weighs nothing."""
    rows = max(1, len(indices))
    width = _width(max((len(samples[i].tokens) for i in indices), default=2), multiple)
    tokens = np.full((rows, width + 1), PAD_ID, np.int64)
    mask = np.zeros((rows, width), np.uint8)
    logprobs, advantages, weights = (np.zeros((rows, width), np.float32) for _ in range(3))
    versions = np.full((rows, width), -1, np.int32)
    for row, index in enumerate(indices):
        sample = samples[index]
        length = len(sample.tokens)
        tokens[row, :length] = sample.tokens
        mask[row, : length - 1] = sample.loss_mask[1:]
        advantages[row], weights[row] = sample.advantage, sample.weight
        if sample.logprobs is not None:
            logprobs[row, : length - 1] = sample.logprobs[1:]
        if sample.versions is not None:
            versions[row, : length - 1] = sample.versions[1:]
    routing = _routing([samples[index] for index in indices], width)
    return MicroBatch(indices, tokens[:, :-1], tokens[:, 1:], mask, logprobs, advantages, weights, routing, versions)


def _routing(samples: Sequence[TrainSequence], width: int) -> np.ndarray | None:
    """The samples' routing as a rectangle. Column t is the forward of token t, so T - 1 rows fill all columns but those
    of the last token and the padding. These repeat the sample's own rows from the first on: valid, spread over experts
    as the sample is, and without effect: nothing trained is predicted there and, the mask being causal, sees them."""
    held = [sample.routing for sample in samples if sample.routing is not None]
    if not held:
        return None
    if len(held) < len(samples) or len({(rows.dtype, rows.shape[1:]) for rows in held}) > 1:
        raise BadInput(
            f"routing of {', '.join(s.name for s in samples)}: not all have it, or not in one type and layout"
        )
    return np.stack([np.resize(rows, (width, *rows.shape[1:])) for rows in held])
