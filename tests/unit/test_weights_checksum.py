"""Expected checksums follow SGLang's algorithm: sha256 over a fused parameter's bytes, first 8 bytes."""

from __future__ import annotations

import hashlib

import pytest
import torch

from rl360.errors import BadInput
from rl360.weights.checksum import expected_checksums, tensor_specs
from rl360.weights.messages import Bucket, PushPlan
from rl360.weights.plan import plan_push
from rl360.weights.transports.broadcast import BroadcastTransport
from rl360.weights.transports.common import flatten


def digest(tensor: torch.Tensor) -> str:
    """What the engine computes over the parameter it holds, in one piece."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{int.from_bytes(hashlib.sha256(data).digest()[:8], 'big'):016x}"


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


@pytest.fixture
def dense() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    head = "model.layers.0."
    # up before gate and v before q: the order of export must not matter
    return {
        "model.embed_tokens.weight": random(10, 4),
        f"{head}mlp.up_proj.weight": random(6, 4),
        f"{head}mlp.gate_proj.weight": random(6, 4),
        f"{head}self_attn.v_proj.weight": random(2, 4),
        f"{head}self_attn.k_proj.weight": random(2, 4),
        f"{head}self_attn.q_proj.weight": random(4, 4),
        f"{head}self_attn.q_proj.bias": random(4),
        f"{head}self_attn.k_proj.bias": random(2),
        f"{head}self_attn.v_proj.bias": random(2),
        f"{head}mlp.down_proj.weight": random(4, 6).t().contiguous().t(),  # not contiguous
    }


def test_fused_parameters_of_a_dense_layer(dense: dict[str, torch.Tensor]) -> None:
    head = "model.layers.0."
    qkv = torch.cat([dense[f"{head}self_attn.{p}_proj.weight"] for p in "qkv"])
    bias = torch.cat([dense[f"{head}self_attn.{p}_proj.bias"] for p in "qkv"])
    gate_up = torch.cat([dense[f"{head}mlp.{p}_proj.weight"] for p in ("gate", "up")])
    assert expected_checksums(dense) == {
        "model.embed_tokens.weight": digest(dense["model.embed_tokens.weight"]),
        f"{head}self_attn.qkv_proj.weight": digest(qkv),
        f"{head}self_attn.qkv_proj.bias": digest(bias),
        f"{head}mlp.gate_up_proj.weight": digest(gate_up),
        f"{head}mlp.down_proj.weight": digest(dense[f"{head}mlp.down_proj.weight"]),
    }


def test_fused_experts_in_numeric_order() -> None:
    head = "model.layers.1.mlp.experts."
    order = [10, 2, 0, 1, 3, 4, 5, 6, 7, 8, 9, 11]
    held = {f"{head}{e}.{p}_proj.weight": random(3, 5) for e in order for p in ("up", "gate", "down")}
    w13 = torch.stack(
        [torch.cat([held[f"{head}{e}.gate_proj.weight"], held[f"{head}{e}.up_proj.weight"]]) for e in range(12)]
    )
    w2 = torch.stack([held[f"{head}{e}.down_proj.weight"] for e in range(12)])
    assert expected_checksums(held) == {f"{head}w13_weight": digest(w13), f"{head}w2_weight": digest(w2)}


def test_one_changed_bit_changes_one_checksum(dense: dict[str, torch.Tensor]) -> None:
    before = expected_checksums(dense)
    dense["model.layers.0.self_attn.k_proj.weight"].view(torch.int16)[0, 0] ^= 1
    after = expected_checksums(dense)
    assert [name for name in before if before[name] != after[name]] == ["model.layers.0.self_attn.qkv_proj.weight"]


def test_flatten_puts_tensors_back_to_back(dense: dict[str, torch.Tensor]) -> None:
    specs = tensor_specs(dense)
    flat = flatten(Bucket(tensors=tuple(specs)), dense)
    assert flat.shape == (sum(spec.size_bytes for spec in specs),)
    offset = 0
    for spec in specs:
        part = flat[offset : offset + spec.size_bytes].view(torch.bfloat16).view(spec.shape)
        assert torch.equal(part, dense[spec.name])
        offset += spec.size_bytes


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(BadInput, match="cast it to the engines' dtype"):
        tensor_specs({"model.norm.weight": torch.zeros(3, dtype=torch.float64)})


def test_a_plan_for_other_tensors_is_refused_before_anything_is_sent(
    dense: dict[str, torch.Tensor], one_engine_set: object
) -> None:
    plan = plan_push(
        tensor_specs(dense),
        one_engine_set,  # type: ignore[arg-type]
        run="demo",
        version="demo:1",
        bucket_bytes=1000,
        call_deadline_s=1.0,
    )
    assert isinstance(plan, PushPlan)
    dense["model.embed_tokens.weight"] = random(11, 4)
    with pytest.raises(BadInput, match="plan names"):
        BroadcastTransport().transfer(plan, dense)


@pytest.fixture
def one_engine_set() -> object:
    from rl360.engines.fleet import EngineIdentity
    from rl360.weights.messages import EngineSet

    return EngineSet(epoch=1, engines=(EngineIdentity(url="http://127.0.0.1:9", incarnation="a"),))
