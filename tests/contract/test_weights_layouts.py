"""What the planner says about models and ranks, against the code that decides: transformers and SGLang's loaders."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl360.weights.messages import EngineLayout, TensorSpec
from rl360.weights.plan import expert_number, rank_needs
from rl360.weights.push import model_shapes
from rl360.weights.shapes import read_shape

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "vocab_size": 70,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "tie_word_embeddings": False,
}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
LORA: dict[str, Any] = {
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
MODELS = {
    "qwen3": {**GROUPED, "tie_word_embeddings": True},
    "qwen3_moe": {**GROUPED, "num_experts": 4, "moe_intermediate_size": 12, "mlp_only_layers": [1]},
    "glm4_moe": {**GROUPED, **EXPERTS, "use_qk_norm": True, "attention_bias": True},
    "deepseek_v3": {**EXPERTS, **LORA, "q_lora_rank": 5},
    "deepseek_v3 without q_lora_rank": {**EXPERTS, **LORA, "q_lora_rank": None},
}


@pytest.mark.parametrize("model", MODELS)
def test_shapes_are_those_of_a_saved_model(model: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model.split()[0], **(COMMON | MODELS[model]))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    told = read_shape(tmp_path / "config.json")
    assert {tensor.name: tensor.shape for tensor in told.tensors} == model_shapes(tmp_path)
    assert told.kv_heads == MODELS[model].get("num_key_value_heads") or "kv_lora_rank" in MODELS[model]


CASES: list[dict[str, Any]] = [
    {
        "tp": tp,
        "ep": ep,
        "model": {
            "hidden": 8,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": 4,
            "width": 12,
            "vocab": vocab,
            "experts": 8,
        },
    }
    for tp, ep, heads, kv_heads, vocab in (
        (1, 1, 4, 2, 70),
        (2, 1, 4, 2, 100),
        (2, 2, 4, 4, 100),
        (4, 2, 8, 2, 100),
        (4, 4, 4, 1, 300),
        (3, 1, 6, 3, 70),
    )
]


def planned(tp: int, ep: int, model: dict[str, int]) -> list[dict[str, list[int]]]:
    """By the planner, which elements of each tensor each rank keeps; an expert's count on from the one before."""
    hidden, width, keys = model["hidden"], model["width"], model["kv_heads"] * model["head_dim"]
    queries = model["heads"] * model["head_dim"]
    shapes = {
        "model.embed_tokens": (model["vocab"], hidden),
        "l.self_attn.q_proj": (queries, hidden),
        "l.self_attn.k_proj": (keys, hidden),
        "l.self_attn.v_proj": (keys, hidden),
        "l.self_attn.o_proj": (hidden, queries),
        "l.mlp.gate_proj": (width, hidden),
        "l.mlp.up_proj": (width, hidden),
    }
    for expert in range(model["experts"]):
        shapes |= {f"m.mlp.experts.{expert}.{part}_proj": (width, hidden) for part in ("gate", "up")}
        shapes[f"m.mlp.experts.{expert}.down_proj"] = (hidden, width)
    specs = [TensorSpec(name=f"{name}.weight", shape=shape) for name, shape in shapes.items()]

    def short(name: str) -> str:
        return re.sub(r"^(?:model|l\.self_attn|l\.mlp)\.|^m\.mlp\.|\d+\.|\.weight$", "", name)

    ranks = []
    for rank in rank_needs(specs, EngineLayout(tp=tp, ep=ep, kv_heads=model["kv_heads"])):
        told: dict[str, list[int]] = {short(name): [] for name in shapes}  # none of a tensor may be a rank's share
        for tensor in rank:
            whole = np.arange(np.prod(tensor.shape)).reshape(tensor.shape)
            axis, first, rows = tensor.part or (0, 0, tensor.shape[0])
            piece = whole.take(range(first, first + rows), axis) + (expert_number(tensor.name) or 0) * whole.size
            told[short(tensor.name)] += piece.flatten().tolist()
        ranks.append(told)
    return ranks


def test_ranks_keep_what_sglang_loads(tmp_path: Path) -> None:
    config = {**COMMON, **MODELS["qwen3_moe"], "model_type": "qwen3_moe", "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3MoeForCausalLM"]}))
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("sglang_cuts.py")), json.dumps(CASES), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout.splitlines()[-1])
    for case, ranks in zip(CASES, found, strict=True):
        assert planned(**case) == ranks, case
