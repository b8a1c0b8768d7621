"""Builds a Megatron GPT model of the shape that a Hugging Face `config.json` states.

Shapes: Qwen3 (dense) and Qwen3-MoE. A shape, layout or device that would train wrong without a word is refused here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from rl360.errors import BadInput
from rl360.sessions.routing import RoutingShape
from rl360.training.megatron import ON_CPU
from rl360.training.megatron.modules import CausalAttention, RmsNorm

MODEL_TYPES = ("qwen3", "qwen3_moe")


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model that fix its parameters."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    tied: bool
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0

    @property
    def routing(self) -> RoutingShape | None:
        """Of the experts a token is routed to; None for a dense model. Every layer has them, or none (`read_shape`)."""
        return RoutingShape(self.layers, self.experts_per_token, self.experts) if self.experts else None


@dataclass(frozen=True)
class Layout:
    """How a model is split over processes; data parallel takes what is left. Experts are split over the tensor-parallel
    group as all else is: any other way, with ep 1, never reduces their gradients over it."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    sequence_parallel: bool = False


def read_shape(hf_dir: Path) -> ModelShape:
    """The shape in `hf_dir/config.json`; anything that this backend does not model is refused by name."""
    path = hf_dir / "config.json"
    if not path.is_file():
        raise BadInput(f"no model at {hf_dir}: config.json is missing; give a Hugging Face model directory")
    raw: dict[str, Any] = json.loads(path.read_text())
    kind = raw.get("model_type")
    if kind not in MODEL_TYPES:
        raise BadInput(f"{path}: model_type {kind!r} is not supported; use one of {', '.join(MODEL_TYPES)}")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", "default")
    refused = {
        "rope_type": rope_type != "default",
        "attention_bias": bool(raw.get("attention_bias")),
        "use_sliding_window": bool(raw.get("use_sliding_window")),
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "mlp_only_layers": bool(raw.get("mlp_only_layers")),
        "decoder_sparse_step": raw.get("decoder_sparse_step", 1) != 1,
        "norm_topk_prob": kind == "qwen3_moe" and not raw.get("norm_topk_prob", False),
    }
    for field, bad in refused.items():
        if bad:
            raise BadInput(f"{path}: {field}={raw.get(field, rope_type)!r} is not supported by the trainer")
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise BadInput(f"{path}: no rope_theta (neither at the top level nor under rope_parameters)")
    moe = kind == "qwen3_moe"
    if moe:
        raw["num_experts"] = raw.get("num_experts", raw.get("num_local_experts"))  # the name differs between writers
    needed = ["num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"]
    needed += ["vocab_size", "max_position_embeddings", "rms_norm_eps"]
    needed += ["num_experts", "num_experts_per_tok", "moe_intermediate_size"] if moe else []
    missing = [name for name in needed if raw.get(name) is None]
    if missing:
        raise BadInput(f"{path}: {', '.join(missing)} missing; the model's shape is not complete")
    return ModelShape(
        layers=raw["num_hidden_layers"],
        hidden=raw["hidden_size"],
        heads=raw["num_attention_heads"],
        groups=raw["num_key_value_heads"],
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        ffn=raw["intermediate_size"],
        vocab=raw["vocab_size"],
        max_positions=raw["max_position_embeddings"],
        rope_theta=float(theta),
        norm_eps=raw["rms_norm_eps"],
        tied=bool(raw.get("tie_word_embeddings", False)),
        experts=raw["num_experts"] if moe else 0,
        experts_per_token=raw["num_experts_per_tok"] if moe else 0,
        expert_ffn=raw["moe_intermediate_size"] if moe else 0,
    )


def check_layout(shape: ModelShape, layout: Layout) -> None:
    """Refuse splits that do not divide the model, and the ones measured to train wrong silently."""
    for name, value, parts in (
        ("vocab_size", shape.vocab, layout.tp),
        ("num_attention_heads", shape.heads, layout.tp),
        ("num_key_value_heads", shape.groups, layout.tp),
        ("intermediate_size", shape.ffn, layout.tp),
        ("num_hidden_layers", shape.layers, layout.pp),
        ("num_experts", shape.experts, layout.ep),
    ):
        if value % parts:
            raise BadInput(f"{name}={value} cannot be split {parts} ways; choose a parallel size that divides it")
    if shape.experts == 0 and layout.ep > 1:
        raise BadInput(f"expert parallel size {layout.ep} for a model without experts; use 1")
    if shape.experts and layout.tp > 1 and not layout.sequence_parallel:
        raise BadInput(f"tensor parallel {layout.tp} with experts needs sequence_parallel=true")
    if layout.sequence_parallel and layout.tp == 1:
        raise BadInput("sequence_parallel needs tensor parallel > 1")
    if ON_CPU and torch.is_autocast_enabled("cpu"):
        raise BadInput(
            "autocast on the CPU fails in megatron's backward: leave it off, the trainer computes in fp32 there"
        )


def transformer_config(shape: ModelShape, layout: Layout) -> TransformerConfig:
    """Megatron's config of `shape`: fp32, every fusion that needs TransformerEngine, Apex or CUDA off."""
    check_layout(shape, layout)
    moe: dict[str, Any] = {}
    if shape.experts:
        moe = {
            "num_moe_experts": shape.experts,
            "moe_router_topk": shape.experts_per_token,
            "moe_ffn_hidden_size": shape.expert_ffn,
            "moe_grouped_gemm": False,
            "moe_router_load_balancing_type": "none",
            "moe_router_pre_softmax": False,
            "moe_router_dtype": "fp32",
            "expert_model_parallel_size": layout.ep,
        }
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        sequence_parallel=layout.sequence_parallel,
        variable_seq_lengths=layout.pp > 1,
        moe_token_dispatcher_type="alltoall",  # the default cannot carry variable sequence lengths
        use_cpu_initialization=ON_CPU,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,  # gradients are summed: the loss is already divided by the batch's tokens
        finalize_model_grads_func=finalize_model_grads,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        **moe,
    )


def build_model(shape: ModelShape, layout: Layout) -> GPTModel:
    """This rank's part of the model, weights as megatron initialises them."""
    config = transformer_config(shape, layout)
    layer: ModuleSpec = get_gpt_layer_local_spec(
        num_experts=shape.experts or None, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RmsNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CausalAttention
    attention.q_layernorm = attention.k_layernorm = RmsNorm
    block = TransformerBlockSubmodules(layer_specs=[layer] * (shape.layers // layout.pp), layer_norm=RmsNorm)
    model = GPTModel(
        config,
        block,
        vocab_size=shape.vocab,
        max_sequence_length=shape.max_positions,
        position_embedding_type="rope",
        rotary_base=int(shape.rope_theta),
        share_embeddings_and_output_weights=shape.tied,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    return model if ON_CPU else model.cuda()
