"""Shape files, and the figures of a 375B mixture of experts: what a push of it would be, without a weight of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rl360.commands import weights as command
from rl360.engines.fleet import EngineIdentity
from rl360.errors import BadInput
from rl360.weights import shapes
from rl360.weights.messages import EngineLayout, EngineSet, PushPlan, Transport
from rl360.weights.plan import expert_number, plan_push
from rl360.weights.shapes import ModelShape, model_shape, read_shape
from rl360.weights.simulate import simulate

BIG = Path(shapes.__file__).with_name("moe_375b.json")
GLM = {
    "model_type": "glm4_moe",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "vocab_size": 50,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 6,
    "first_k_dense_replace": 1,
}


@pytest.fixture(scope="module")
def big() -> ModelShape:
    return read_shape(BIG)


def plan(model: ModelShape, transport: Transport, count: int, tp: int = 1, ep: int = 1, sources: int = 1) -> PushPlan:
    members = tuple(EngineIdentity(url=f"http://h:{n}", incarnation="i") for n in range(count))
    return plan_push(
        model.tensors,
        EngineSet(epoch=1, engines=members),
        run="demo",
        version="demo:1",
        bucket_bytes=512 << 20,
        call_deadline_s=60,
        transport=transport,
        layout=EngineLayout(tp=tp, ep=ep, kv_heads=model.kv_heads),
        sources=sources,
    )


def test_a_375b_model_is_one(big: ModelShape) -> None:
    experts = [tensor for tensor in big.tensors if expert_number(tensor.name) is not None]
    other_bytes = sum(t.size_bytes for t in big.tensors) - sum(t.size_bytes for t in experts)
    assert big.parameters == pytest.approx(375e9, rel=0.003)
    assert len(experts) == 66 * 256 * 3
    assert other_bytes == pytest.approx(20e9, rel=0.03)


def test_direct_is_41_calls_and_broadcast_about_1432(big: ModelShape) -> None:
    direct, broadcast = plan(big, Transport.DIRECT_EXPERTS, 24), plan(big, Transport.BROADCAST, 24)
    assert (len(direct.buckets), direct.calls_per_engine) == (40, 41)
    assert broadcast.calls_per_engine == 1437
    assert broadcast.calls_per_engine == pytest.approx(1432, rel=0.005)
    # rounds are of 512 MiB but where one tensor is larger by itself
    for bucket in broadcast.buckets:
        assert bucket.size_bytes <= 512 << 20 or len(bucket.tensors) == 1


@pytest.mark.parametrize("transport", [Transport.BROADCAST, Transport.DIRECT_EXPERTS, Transport.P2P])
def test_the_simulator_runs_it_in_seconds(big: ModelShape, transport: Transport) -> None:
    began = time.process_time()
    made = plan(big, transport, 24, tp=8, ep=8, sources=64)
    done = simulate(made, big.tensors)
    assert time.process_time() - began < 30, "a few seconds where nothing else runs"
    total = sum(tensor.size_bytes for tensor in big.tensors)
    assert set(done.calls) == {made.calls_per_engine}
    if transport is Transport.BROADCAST:
        assert set(done.received_bytes) == {8 * total}
        return
    assert transport is Transport.P2P or made.calls_per_engine == 41  # whatever the layout of the fleet
    assert all(total <= received < 1.3 * total for received in done.received_bytes)
    assert len({n for n, sent in enumerate(done.sent_bytes) if sent}) == 64


def test_families_have_the_tensors_of_their_checkpoints() -> None:
    named = {tensor.name: tensor for tensor in model_shape(GLM).tensors}
    dense, moe = "model.layers.0.", "model.layers.1."
    assert named[f"{dense}mlp.up_proj.weight"].shape == (24, 16)
    assert named[f"{dense}self_attn.k_proj.weight"].shape == (16, 16)
    assert named[f"{moe}mlp.gate.weight"].shape == (4, 16)
    assert named[f"{moe}mlp.gate.e_score_correction_bias"].dtype == "float32"
    assert named[f"{moe}mlp.shared_experts.down_proj.weight"].shape == (16, 12)
    assert named[f"{moe}mlp.experts.3.down_proj.weight"].shape == (16, 6)
    assert f"{dense}self_attn.q_norm.weight" not in named and f"{dense}self_attn.q_proj.bias" not in named
    more = {t.name for t in model_shape({**GLM, "use_qk_norm": True, "attention_bias": True}).tensors}
    assert {f"{dense}self_attn.q_norm.weight", f"{dense}self_attn.q_proj.bias"} == {
        n for n in more - named.keys() if n.startswith(dense) and ".q_" in n
    }
    tied = {t.name for t in model_shape({**GLM, "tie_word_embeddings": True}).tensors}
    assert named.keys() - tied == {"lm_head.weight"}


def test_a_list_of_tensors_is_a_shape_too(tmp_path: Path) -> None:
    path = tmp_path / "shape.json"
    path.write_text(json.dumps({"tensors": [{"name": "a", "shape": [2, 3], "dtype": "float32"}], "kv_heads": 4}))
    model = read_shape(path)
    assert (model.parameters, model.kv_heads, model.tensors[0].size_bytes) == (6, 4, 24)


@pytest.mark.parametrize(
    ("described", "told"),
    [
        ({"model_type": "llama"}, "model_type 'llama': use one of qwen3, qwen3_moe, glm4_moe, deepseek_v3"),
        ({k: v for k, v in GLM.items() if k != "hidden_size"}, "hidden_size: Field required"),
        ({**GLM, "n_routed_experts": 0}, "n_routed_experts: .*greater than or equal to 1"),
        ({**GLM, "num_key_value_heads": 3}, "num_key_value_heads 3 do not divide 4 heads"),
        ({**GLM, "head_dim": 0, "num_attention_heads": 6}, "name head_dim"),
        ({"tensors": []}, "tensors: .*at least 1 item"),
        ({"tensors": [{"name": "a", "shape": [1], "dtype": "int4"}]}, r"tensors\.0\.dtype"),
    ],
)
def test_a_bad_shape_is_named(described: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        model_shape(described)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "shape.json"
    with pytest.raises(BadInput, match=r"shape\.json: No such file"):
        read_shape(path)
    for content, told in (("{", "is not JSON"), ("[]", "expected a JSON object, found list")):
        path.write_text(content)
        with pytest.raises(BadInput, match=told):
            read_shape(path)


def run(*args: str) -> str:
    import typer

    app = typer.Typer()
    command.register(app)
    result = CliRunner().invoke(app, ["weights", "plan", *args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_prints_the_figures() -> None:
    shape = ["--model-shape", str(BIG), "--engines", "24"]
    told = json.loads(
        run(*shape, "--transport", "direct_experts", "--tp", "8", "--ep", "8", "--sources", "64", "--json")
    )
    (row,) = told["plans"]
    assert (row["calls_per_engine"], row["control_calls"], row["groups"], row["senders"]) == (41, 10, 193, 64)
    other, experts = told["model"]["other_bytes"], told["model"]["bytes"] - told["model"]["other_bytes"]
    assert row["sent_bytes"] == other + 24 * experts
    assert row["wire_bytes"] == 24 * row["bytes_per_engine"] == 24 * (8 * other + experts)
    assert {"parameter": "mlp.experts.w13_weight", "groups": 16896, "tensors_each": 2, "whole": False} in told[
        "together"
    ]
    assert {"parameter": "self_attn.qkv_proj.weight", "groups": 69, "tensors_each": 3, "whole": True} in told[
        "together"
    ]


def test_the_command_simulates_every_transport(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GLM))
    text = run("--model-shape", str(path), "--engines", "3", "--tp", "2", "--ep", "2", "--sources", "2", "--simulate")
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.split()[0] in list(Transport)}
    assert set(rows) == set(Transport) and all(len(row) == 11 for row in rows.values())
    assert "simulated: 6 plans were run in memory and are right" in text and "largest: the largest bucket" in text
    assert "sent MB" in text and "buckets of 512 MiB (a run's default: 64 MiB)" in text
    assert all(float(rows["broadcast"][at]) > 0 for at in (3, 4, 5, 6)), "a small model has sizes"
    assert "  1 x mlp.gate_up_proj.weight, 2 tensors each" in text and "self_attn.qkv_proj.weight, 3 tensors" in text
    dense = {k: v for k, v in GLM.items() if "experts" not in k} | {"model_type": "qwen3"}
    path.write_text(json.dumps(dense))
    text = run("--model-shape", str(path))
    assert "direct_experts is left out: a dense model" in text and "\ndirect_experts  " not in text
    assert "simulated" not in text
    with pytest.raises(BadInput, match="no routed experts"):
        run("--model-shape", str(path), "--transport", "direct_experts")
    with pytest.raises(BadInput, match="use all or one of broadcast"):
        run("--model-shape", str(path), "--transport", "pigeon")
    with pytest.raises(BadInput, match="--ep 2 does not divide --tp 3"):
        run("--model-shape", str(path), "--tp", "3", "--ep", "2")
