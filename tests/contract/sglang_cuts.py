"""Loads weights with SGLang's own loaders as each rank of an engine and prints which elements of them the rank keeps.

Run as a program with a JSON list of cases. A checkpoint tensor's element is its own flat index, so what a parameter
holds afterwards says where each of its elements came from.
"""

from __future__ import annotations

import json
import sys

import torch

from rl360.engines.launch import prepare_cpu

prepare_cpu()  # before SGLang looks for what this machine lacks

from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear  # noqa: E402
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

Kept = dict[str, list[int]]


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def kept(parameter: torch.Tensor) -> list[int]:
    return parameter.detach().flatten().to(torch.int64).tolist()


def rank_keeps(
    tp: int, rank: int, hidden: int, heads: int, kv_heads: int, head_dim: int, width: int, vocab: int
) -> Kept:
    with get_parallel().override(tp_size=tp, tp_rank=rank, attn_tp_size=tp, attn_tp_rank=rank):
        qkv = QKVParallelLinear(hidden, head_dim, heads, kv_heads, bias=False, parallel_group="attn_tp")
        for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            qkv.weight.weight_loader(qkv.weight, numbered(count * head_dim, hidden), part)
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
    found = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": o.weight}
    found |= {"gate_proj": gate, "up_proj": up, "embed_tokens": words}
    return {name: kept(parameter) for name, parameter in found.items()}


def main() -> None:
    torch.set_default_dtype(torch.float32)
    cases = json.loads(sys.argv[1])
    print(json.dumps([[rank_keeps(case["tp"], rank, **case["model"]) for rank in range(case["tp"])] for case in cases]))


if __name__ == "__main__":
    main()
