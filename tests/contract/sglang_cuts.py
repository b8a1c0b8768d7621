"""Loads weights with SGLang's own layers as each rank of an engine and prints which elements of them the rank keeps.

Run as a program: a JSON list of cases, and a model folder (its config.json only satisfies SGLang's arguments). A
checkpoint tensor's element is its own flat index, so what a parameter holds afterwards says where each of its elements
came from; each expert's count on from those of the one before.
"""

from __future__ import annotations

import json
import sys

import torch

from rl360.engines.launch import prepare_cpu

prepare_cpu()  # before SGLang looks for what this machine lacks

from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear  # noqa: E402
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE  # noqa: E402
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish, reset_context  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

Kept = dict[str, list[int]]


def numbered(*shape: int, first: int = 0) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(first, first + count, dtype=torch.float32).reshape(shape)


def kept(parameter: torch.Tensor) -> list[int]:
    return parameter.detach().flatten().to(torch.int64).tolist()


def experts_kept(hidden: int, width: int, experts: int) -> dict[str, torch.Tensor]:
    moe = FusedMoE(
        num_experts=experts,
        hidden_size=hidden,
        intermediate_size=width,
        layer_id=0,
        top_k=2,
        params_dtype=torch.float32,
    )
    for number in range(experts):
        for parameter, shard, shape in (
            (moe.w13_weight, "w1", (width, hidden)),
            (moe.w13_weight, "w3", (width, hidden)),
            (moe.w2_weight, "w2", (hidden, width)),
        ):
            loaded = numbered(*shape, first=number * hidden * width)
            parameter.weight_loader(parameter, loaded, "experts.weight", shard, number)
    gate, up = moe.w13_weight.chunk(2, dim=1)
    return {"experts.gate_proj": gate, "experts.up_proj": up, "experts.down_proj": moe.w2_weight}


def rank_keeps(hidden: int, heads: int, kv_heads: int, head_dim: int, width: int, vocab: int, experts: int) -> Kept:
    qkv = QKVParallelLinear(hidden, head_dim, heads, kv_heads, bias=False, parallel_group="attn_tp")
    for head, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        qkv.weight.weight_loader(qkv.weight, numbered(count * head_dim, hidden), head)
    q, k, v = qkv.weight.split([qkv.q_proj_shard_size, qkv.kv_proj_shard_size, qkv.v_proj_shard_size])
    o = RowParallelLinear(heads * head_dim, hidden, bias=False, parallel_group="attn_tp")
    o.weight.weight_loader(o.weight, numbered(hidden, heads * head_dim))
    gate_up = MergedColumnParallelLinear(hidden, [width, width], bias=False)
    for part in (0, 1):
        gate_up.weight.weight_loader(gate_up.weight, numbered(width, hidden), part)
    gate, up = gate_up.weight.chunk(2)
    embedding = VocabParallelEmbedding(vocab, hidden)
    embedding.weight.weight_loader(embedding.weight, numbered(vocab, hidden))
    words = embedding.weight[: embedding.shard_indices.num_org_elements]
    found = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": o.weight, "gate_proj": gate, "up_proj": up}
    found |= {"embed_tokens": words, **experts_kept(hidden, width, experts)}
    return {name: kept(parameter) for name, parameter in found.items()}


def main() -> None:
    torch.set_default_dtype(torch.float32)
    cases, folder = json.loads(sys.argv[1]), sys.argv[2]
    found = []
    for case in cases:
        ranks = []
        for rank in range(case["tp"]):
            args = ServerArgs(model_path=folder, tp_size=case["tp"], ep_size=case["ep"], device="cpu")
            reset_context()  # of the rank before
            publish(args, role="test", ranks=SpawnRanks(world_rank=rank))
            ranks.append(rank_keeps(**case["model"]))
        found.append(ranks)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
