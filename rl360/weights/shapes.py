"""A model's tensors without its weights: from a shape file, for planning and simulating.

A shape file is JSON: the Hugging Face `config.json` of a known family (`model_type` in `FAMILIES`), or a list of
tensors, `{"tensors": [{"name", "shape", "dtype"}], "kv_heads": 8}`. Tensors come in the order of a checkpoint, layer by
layer, in the dtype in which they travel (bfloat16; the routers' correction bias float32). Prediction layers after the
last one (`num_nextn_predict_layers`) are left out: the model that an engine serves does not hold them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from rl360.errors import BadInput
from rl360.weights.messages import TensorSpec

_MAX_FILE_BYTES = 256 << 20


@dataclass(frozen=True)
class ModelShape:
    """What a planner needs to know about a model. `kv_heads` None: unknown, then k/v can't be cut over ranks."""

    tensors: tuple[TensorSpec, ...]
    kv_heads: int | None

    @property
    def parameters(self) -> int:
        return sum(tensor.size_bytes // (4 if tensor.dtype == "float32" else 2) for tensor in self.tensors)


class _Listed(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tensors: list[TensorSpec] = Field(min_length=1)
    kv_heads: int | None = Field(None, ge=1)


class _Config(BaseModel):
    """What all families say. Other fields of a config.json are about computing, not about shapes."""

    model_config = ConfigDict(extra="ignore")

    hidden_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    tie_word_embeddings: bool = False
    attention_bias: bool = False

    def moe_layer(self, layer: int) -> _Moe | None:
        """The experts of this layer; None for a dense one."""
        return None

    @abstractmethod
    def attention(self, head: str) -> Iterator[TensorSpec]: ...

    @property
    def kv_heads(self) -> int | None:
        return None


@dataclass(frozen=True)
class _Moe:
    experts: int
    width: int
    shared_width: int = 0
    router_bias: bool = False


class _Grouped(_Config):
    """Grouped-query attention, with norms on the heads of q and k."""

    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(0, ge=0)
    use_qk_norm: bool = True

    @property
    def kv_heads(self) -> int | None:
        return self.num_key_value_heads

    @model_validator(mode="after")
    def _heads_fit(self) -> _Grouped:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads {self.num_key_value_heads} do not divide {self.num_attention_heads} heads"
            )
        if not self.head_dim:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError("name head_dim: num_attention_heads do not divide hidden_size")
            self.head_dim = self.hidden_size // self.num_attention_heads
        return self

    def attention(self, head: str) -> Iterator[TensorSpec]:
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield _spec(f"{head}.{part}_proj.weight", rows, self.hidden_size)
            if self.attention_bias:
                yield _spec(f"{head}.{part}_proj.bias", rows)
        yield _spec(f"{head}.o_proj.weight", self.hidden_size, queries)
        if self.use_qk_norm:
            yield _spec(f"{head}.q_norm.weight", self.head_dim)
            yield _spec(f"{head}.k_norm.weight", self.head_dim)


class _Qwen3(_Grouped):
    use_qk_norm: Literal[True] = True


class _Qwen3Moe(_Qwen3):
    # published files say the first; transformers 5 writes the second
    num_experts: int = Field(ge=1, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    moe_intermediate_size: int = Field(ge=1)
    decoder_sparse_step: int = Field(1, ge=1)
    mlp_only_layers: list[int] = []

    def moe_layer(self, layer: int) -> _Moe | None:
        if layer in self.mlp_only_layers or (layer + 1) % self.decoder_sparse_step:
            return None
        return _Moe(self.num_experts, self.moe_intermediate_size)


class _Routed(_Config):
    """Experts as DeepSeek-V3 has them: the first layers dense, shared experts, a correction bias at the router."""

    n_routed_experts: int = Field(ge=1)
    n_shared_experts: int = Field(1, ge=0)
    moe_intermediate_size: int = Field(ge=1)
    first_k_dense_replace: int = Field(ge=0)
    moe_layer_freq: Literal[1] = 1

    def moe_layer(self, layer: int) -> _Moe | None:
        if layer < self.first_k_dense_replace:
            return None
        shared = self.n_shared_experts * self.moe_intermediate_size
        return _Moe(self.n_routed_experts, self.moe_intermediate_size, shared, router_bias=True)


class _Glm4Moe(_Routed, _Grouped):
    use_qk_norm: bool = False


class _DeepseekV3(_Routed):
    q_lora_rank: int | None = Field(ge=1)
    kv_lora_rank: int = Field(ge=1)
    qk_nope_head_dim: int = Field(ge=1)
    qk_rope_head_dim: int = Field(ge=1)
    v_head_dim: int = Field(ge=1)
    attention_bias: Literal[False] = False

    def attention(self, head: str) -> Iterator[TensorSpec]:
        hidden, heads = self.hidden_size, self.num_attention_heads
        queries = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        if self.q_lora_rank is None:
            yield _spec(f"{head}.q_proj.weight", queries, hidden)
        else:
            yield _spec(f"{head}.q_a_proj.weight", self.q_lora_rank, hidden)
            yield _spec(f"{head}.q_a_layernorm.weight", self.q_lora_rank)
            yield _spec(f"{head}.q_b_proj.weight", queries, self.q_lora_rank)
        yield _spec(f"{head}.kv_a_proj_with_mqa.weight", self.kv_lora_rank + self.qk_rope_head_dim, hidden)
        yield _spec(f"{head}.kv_a_layernorm.weight", self.kv_lora_rank)
        yield _spec(f"{head}.kv_b_proj.weight", heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank)
        yield _spec(f"{head}.o_proj.weight", hidden, heads * self.v_head_dim)


FAMILIES: dict[str, type[_Config]] = {
    "qwen3": _Qwen3,
    "qwen3_moe": _Qwen3Moe,
    "glm4_moe": _Glm4Moe,
    "deepseek_v3": _DeepseekV3,
}


def _spec(name: str, *shape: int, dtype: Literal["bfloat16", "float32"] = "bfloat16") -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype)


def _gated(head: str, width: int, hidden: int) -> Iterator[TensorSpec]:
    yield _spec(f"{head}.gate_proj.weight", width, hidden)
    yield _spec(f"{head}.up_proj.weight", width, hidden)
    yield _spec(f"{head}.down_proj.weight", hidden, width)


def _layer(config: _Config, layer: int) -> Iterator[TensorSpec]:
    head, hidden = f"model.layers.{layer}", config.hidden_size
    yield from config.attention(f"{head}.self_attn")
    moe = config.moe_layer(layer)
    if moe is None:
        yield from _gated(f"{head}.mlp", config.intermediate_size, hidden)
    else:
        yield _spec(f"{head}.mlp.gate.weight", moe.experts, hidden)
        if moe.router_bias:
            yield _spec(f"{head}.mlp.gate.e_score_correction_bias", moe.experts, dtype="float32")
        for expert in range(moe.experts):
            yield from _gated(f"{head}.mlp.experts.{expert}", moe.width, hidden)
        if moe.shared_width:
            yield from _gated(f"{head}.mlp.shared_experts", moe.shared_width, hidden)
    yield _spec(f"{head}.input_layernorm.weight", hidden)
    yield _spec(f"{head}.post_attention_layernorm.weight", hidden)


def _tensors(config: _Config) -> Iterator[TensorSpec]:
    yield _spec("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    for layer in range(config.num_hidden_layers):
        yield from _layer(config, layer)
    yield _spec("model.norm.weight", config.hidden_size)
    if not config.tie_word_embeddings:
        yield _spec("lm_head.weight", config.vocab_size, config.hidden_size)


def model_shape(described: dict[str, Any]) -> ModelShape:
    """The shape that the content of a shape file describes; `BadInput` names what is wrong with it."""
    try:
        if "tensors" in described:
            listed = _Listed.model_validate(described)
            return ModelShape(tuple(listed.tensors), listed.kv_heads)
        family = described.get("model_type")
        if family not in FAMILIES:
            raise BadInput(f"model_type {family!r}: use one of {', '.join(FAMILIES)}, or list the tensors")
        config = FAMILIES[family].model_validate(described)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadInput(f"model shape, {'.'.join(map(str, first['loc'])) or 'whole'}: {first['msg']}") from None
    return ModelShape(tuple(_tensors(config)), config.kv_heads)


def read_shape(path: Path) -> ModelShape:
    """Read a shape file."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise BadInput(f"{path} has {path.stat().st_size} bytes; a model shape has at most {_MAX_FILE_BYTES}")
        described = orjson.loads(path.read_bytes())
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}; give a config.json or a list of tensors") from None
    except orjson.JSONDecodeError as error:
        raise BadInput(f"{path} is not JSON: {error}") from None
    if not isinstance(described, dict):
        raise BadInput(f"{path}: expected a JSON object, found {type(described).__name__}")
    return model_shape(described)
