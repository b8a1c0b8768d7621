"""Hugging Face <-> Megatron parameters, for any split by tensor, pipeline, expert and data parallelism.

`load_hf` fills this rank's parameters (or a tensor beside each, such as an Adam moment) from full tensors under their
Hugging Face names; `gather_hf` is its inverse: all ranks take part, rank 0 gets the full tensors. Since both only cut,
stack and reorder, a checkpoint made of them can be restored under another split.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from rl360.errors import BadInput
from rl360.training.megatron.model import Layout, ModelShape

Value = Callable[[torch.nn.Parameter], torch.Tensor]
EMBEDDING = "model.embed_tokens.weight"
VALUE_HEAD = "value_head.weight"  # a critic's, in place of the head over the vocabulary


class Cut(StrEnum):
    """How a parameter is cut over the tensor-parallel group."""

    WHOLE = "whole"
    ROWS = "rows"
    COLUMNS = "columns"
    QKV = "qkv"  # rows, with each key/value group's queries, key and value together
    GATE_UP = "gate_up"  # two matrices, each cut by rows, a rank's halves stacked


@dataclass(frozen=True)
class Entry:
    """A local parameter and the Hugging Face tensors that it holds a part of."""

    param: torch.nn.Parameter
    cut: Cut
    names: tuple[str, ...]
    expert: bool = False
    copy: bool = False  # a second copy of a tensor that another entry owns


_LAYER: dict[str, tuple[Cut, tuple[str, ...]]] = {
    "input_layernorm.weight": (Cut.WHOLE, ("input_layernorm.weight",)),
    "pre_mlp_layernorm.weight": (Cut.WHOLE, ("post_attention_layernorm.weight",)),
    "self_attention.q_layernorm.weight": (Cut.WHOLE, ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": (Cut.WHOLE, ("self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": (Cut.COLUMNS, ("self_attn.o_proj.weight",)),
    "self_attention.linear_qkv.weight": (
        Cut.QKV,
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    ),
    "mlp.linear_fc1.weight": (Cut.GATE_UP, ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": (Cut.COLUMNS, ("mlp.down_proj.weight",)),
    "mlp.router.weight": (Cut.WHOLE, ("mlp.gate.weight",)),
}


def entries(model: torch.nn.Module, shape: ModelShape, layout: Layout) -> Iterator[Entry]:
    """Every local parameter with its Hugging Face names, in construction order."""
    layer_offset = get_transformer_layer_offset(model.config) if layout.pp > 1 else 0
    expert_offset = (
        parallel_state.get_expert_model_parallel_rank() * (shape.experts // layout.ep) if shape.experts else 0
    )
    for name, param in model.named_parameters():
        if name == "embedding.word_embeddings.weight":
            yield Entry(param, Cut.ROWS, (EMBEDDING,))
        elif name == "output_layer.weight":
            yield Entry(param, Cut.ROWS, (EMBEDDING if shape.tied else "lm_head.weight",), copy=shape.tied)
        elif name == "output_layer.value":
            yield Entry(param, Cut.WHOLE, (VALUE_HEAD,))
        elif name == "decoder.final_layernorm.weight":
            yield Entry(param, Cut.WHOLE, ("model.norm.weight",))
        elif name.startswith("decoder.layers."):
            _, _, index, rest = name.split(".", 3)
            prefix = f"model.layers.{int(index) + layer_offset}."
            expert = rest.startswith("mlp.experts.local_experts.")
            if expert:
                _, _, _, local, rest = rest.split(".", 4)
                rest = f"mlp.{rest}"
            if rest not in _LAYER:
                raise BadInput(f"parameter {name} has no Hugging Face counterpart")
            cut, names = _LAYER[rest]
            if expert:
                names = tuple(n.replace("mlp.", f"mlp.experts.{int(local) + expert_offset}.") for n in names)
            yield Entry(param, cut, tuple(prefix + n for n in names), expert)
        else:
            raise BadInput(f"parameter {name} has no Hugging Face counterpart")


def _cut(entry: Entry, full: list[torch.Tensor], shape: ModelShape, parts: int, part: int) -> torch.Tensor:
    if entry.cut is Cut.WHOLE:
        return full[0]
    if entry.cut is Cut.ROWS:
        return full[0].chunk(parts, 0)[part]
    if entry.cut is Cut.COLUMNS:
        return full[0].chunk(parts, 1)[part]
    if entry.cut is Cut.GATE_UP:
        return torch.cat([t.chunk(parts, 0)[part] for t in full])
    grouped = torch.cat([t.view(shape.groups, -1, shape.hidden) for t in full], 1)
    return grouped.reshape(-1, shape.hidden).chunk(parts, 0)[part]


def _join(entry: Entry, parts: list[torch.Tensor], shape: ModelShape) -> list[torch.Tensor]:
    if entry.cut is Cut.WHOLE:
        return [parts[0]]
    if entry.cut is Cut.ROWS:
        return [torch.cat(parts, 0)]
    if entry.cut is Cut.COLUMNS:
        return [torch.cat(parts, 1)]
    if entry.cut is Cut.GATE_UP:
        return [torch.cat(half, 0) for half in zip(*(p.chunk(2, 0) for p in parts), strict=True)]
    grouped = torch.cat(parts, 0).view(shape.groups, -1, shape.hidden)
    sizes = [shape.heads // shape.groups * shape.head_dim, shape.head_dim, shape.head_dim]
    return [t.reshape(-1, shape.hidden) for t in grouped.split(sizes, 1)]


def _tensor_group(entry: Entry) -> Any:
    if entry.expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


@torch.no_grad()
def load_hf(
    model: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    shape: ModelShape,
    layout: Layout,
    value_of: Value = lambda param: param,
) -> None:
    """Copy this rank's parts of `tensors` into `value_of(param)`; refuse a missing, left-over or misshapen tensor."""
    used: set[str] = set()
    for entry in entries(model, shape, layout):
        missing = [n for n in entry.names if n not in tensors]
        if missing:
            raise BadInput(f"the weights lack tensor {missing[0]}: they are not of the shape in config.json")
        used.update(entry.names)
        group = _tensor_group(entry)
        part = _cut(entry, [tensors[n] for n in entry.names], shape, group.size(), group.rank())
        target = value_of(entry.param)
        if part.shape != target.shape:
            raise BadInput(
                f"tensor {entry.names[0]} has shape {tuple(part.shape)}, the model needs {tuple(target.shape)}"
            )
        target.copy_(part)
    allowed = {"lm_head.weight"} if shape.tied else set()  # some writers repeat a tied head
    left = sorted(set(tensors) - used - allowed)
    if left and layout.pp == 1 and layout.ep == 1:
        raise BadInput(f"the weights hold {len(left)} tensors that the model does not have, first {left[0]}")


def _over_tensor_groups(
    model: torch.nn.Module, shape: ModelShape, layout: Layout, value_of: Value
) -> Iterator[tuple[Entry, list[torch.Tensor]]]:
    """Every local parameter but second copies, and its parts of all ranks of its tensor group. Collective in those."""
    for entry in entries(model, shape, layout):
        if entry.copy:
            continue
        local = value_of(entry.param).detach()
        group = _tensor_group(entry)
        parts = [local]
        if group.size() > 1:
            parts = [torch.empty_like(local) for _ in range(group.size())]
            torch.distributed.all_gather(parts, local.contiguous(), group=group)
        yield entry, parts


@torch.no_grad()
def place_hf(
    model: torch.nn.Module, shape: ModelShape, layout: Layout, wanted: Sequence[Collection[str]], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """On each rank the full tensors that `wanted` names for it, as `dtype` (CPU, contiguous). Collective over all.

    What a rank and its tensor group hold doesn't travel; the rest comes from the lowest rank that holds it.
    """
    rank, someone = torch.distributed.get_rank(), {name for names in wanted for name in names}
    held: dict[str, torch.Tensor] = {}
    for entry, parts in _over_tensor_groups(model, shape, layout, lambda param: param):
        if someone.intersection(entry.names):
            full = _join(entry, parts, shape)
            held.update((n, t.to(dtype).contiguous().cpu()) for n, t in zip(entry.names, full, strict=True))
    holders: list[Any] = [None] * len(wanted)
    torch.distributed.all_gather_object(holders, {name: tensor.shape for name, tensor in held.items()})
    for name in sorted(someone):
        owner = next((r for r, names in enumerate(holders) if name in names), None)
        if owner is None:
            raise BadInput(f"tensor {name}: no rank of the trainer holds it; plan again")
        for receiver in (r for r, names in enumerate(wanted) if name in names and name not in holders[r]):
            if rank == receiver:
                held[name] = torch.empty(holders[owner][name], dtype=dtype)
                torch.distributed.recv(held[name].view(torch.uint8), owner)
            elif rank == owner:
                torch.distributed.send(held[name].view(torch.uint8), receiver)
    return {name: held[name] for name in wanted[rank]}


@torch.no_grad()
def gather_hf(
    model: torch.nn.Module, shape: ModelShape, layout: Layout, value_of: Value = lambda param: param
) -> dict[str, torch.Tensor]:
    """Full tensors by sorted Hugging Face name on rank 0 (CPU, contiguous), {} elsewhere. Collective over all ranks."""
    mine: dict[str, torch.Tensor] = {}
    dense_owner = parallel_state.get_data_parallel_rank() == 0 and parallel_state.get_tensor_model_parallel_rank() == 0
    for entry, parts in _over_tensor_groups(model, shape, layout, value_of):
        owner = dense_owner
        if entry.expert:
            owner = _tensor_group(entry).rank() == 0 and parallel_state.get_expert_data_parallel_rank() == 0
        if owner:
            full = _join(entry, parts, shape)
            mine.update((n, t.contiguous().cpu().clone()) for n, t in zip(entry.names, full, strict=True))
    if layout.pp > 1 or layout.ep > 1:
        rank = torch.distributed.get_rank()
        gathered: list[Any] | None = [None] * torch.distributed.get_world_size() if rank == 0 else None
        torch.distributed.gather_object(mine, gathered)
        mine = {n: t for part in gathered or [] for n, t in part.items()}
    elif torch.distributed.get_rank() != 0:
        mine = {}
    return dict(sorted(mine.items()))


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """sha256 over name, dtype, shape and bytes of every tensor, in name order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(memoryview(tensor.view(torch.uint8).numpy().reshape(-1)))
    return digest.hexdigest()
