"""A tiny Qwen3-shaped model directory and train batches, made from a seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from rl360.sessions.sample import MergedSample, encode_samples
from rl360.store.codec import pack, sha256_hex
from rl360.store.layout import merged_key, step_key

VOCAB, HIDDEN, LAYERS, HEADS, GROUPS, HEAD_DIM, FFN = 512, 64, 2, 4, 2, 16, 128
EXPERTS, EXPERT_FFN = 4, 32


def write_model(folder: Path, seed: int = 0, experts: int = 0, **changes: Any) -> Path:
    """Config and random weights, dense or with `experts`; `changes` go into config.json."""
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.08, shape).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return (1 + rng.normal(0, 0.1, size)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "model.norm.weight": norm(HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        tensors |= {
            at + "input_layernorm.weight": norm(HIDDEN),
            at + "post_attention_layernorm.weight": norm(HIDDEN),
            at + "self_attn.q_norm.weight": norm(HEAD_DIM),
            at + "self_attn.k_norm.weight": norm(HEAD_DIM),
            at + "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.k_proj.weight": matrix(GROUPS * HEAD_DIM, HIDDEN),
            at + "self_attn.v_proj.weight": matrix(GROUPS * HEAD_DIM, HIDDEN),
            at + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
        }
        mlps = [("mlp.", FFN)]
        if experts:
            tensors[at + "mlp.gate.weight"] = matrix(experts, HIDDEN)
            mlps = [(f"mlp.experts.{e}.", EXPERT_FFN) for e in range(experts)]
        for prefix, width in mlps:
            tensors |= {
                at + prefix + "gate_proj.weight": matrix(width, HIDDEN),
                at + prefix + "up_proj.weight": matrix(width, HIDDEN),
                at + prefix + "down_proj.weight": matrix(HIDDEN, width),
            }
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": HEAD_DIM,
        "intermediate_size": FFN,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "dtype": "float32",
    }
    if experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": EXPERT_FFN,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def sample(seed: int, name: str, **changes: Any) -> dict[str, Any]:
    """One sample and its advantage: what a row of the batch and the object it refers to hold between them."""
    rng = np.random.default_rng(seed)
    length = int(rng.integers(8, 60))
    mask = (rng.random(length) < 0.5).astype(np.uint8)
    mask[0], mask[1] = 0, 1
    return {
        "attempt_id": name,
        "group_id": "s000000-g000",
        "tokens": rng.integers(0, VOCAB, length).astype(np.int32),
        "loss_mask": mask,
        "logprobs": np.where(mask, rng.normal(-6.2, 0.4, length), 0).astype(np.float32),
        "advantage": float(rng.normal()),
    } | changes


def sampled_by(row: dict[str, Any], *versions: int) -> dict[str, Any]:
    """The same sample, its stretches of sampled tokens by these weight versions in turn."""
    return row | {"sampled_by": versions}


def untrained(row: dict[str, Any]) -> dict[str, Any]:
    """The same sample with nothing under its mask."""
    return row | {"loss_mask": np.zeros_like(row["loss_mask"]), "logprobs": np.zeros_like(row["logprobs"])}


def routed(row: dict[str, Any], experts: int = EXPERTS, top_k: int = 2, layers: int = LAYERS) -> dict[str, Any]:
    """The same sample with experts drawn at random for every row of it."""
    every = np.tile(np.arange(experts, dtype=np.uint8), (len(row["tokens"]) - 1, layers, 1))
    return row | {"routing": np.random.default_rng(len(row["tokens"])).permuted(every, axis=-1)[..., :top_k]}


def samples_of(step: int, count: int = 12) -> list[dict[str, Any]]:
    return [sample(1000 * step + i, f"s{step:06}-g000-a{i:02}-t0") for i in range(count)]


def merged(row: dict[str, Any], leaf: int = 0) -> MergedSample:
    """The sample as a session server merges it; unchecked, so that tests can store what no server would."""
    mask, routing = row["loss_mask"], row.get("routing")
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask != 0, [0]]).astype(np.int8)))
    sampled_by = row.get("sampled_by", (0,))
    spans = [
        (int(start), int(end), f"{row.get('run', 'r1')}:{sampled_by[i % len(sampled_by)]}")
        for i, (start, end) in enumerate(edges.reshape(-1, 2))
    ]
    return MergedSample(
        attempt_id=row["attempt_id"],
        group_id=row["group_id"],
        task_id="a-task",
        session_id="a-session",
        tokens=row["tokens"],
        loss_mask=mask,
        logprobs=row["logprobs"],
        version_spans=spans,
        sampled_tokens=int(np.count_nonzero(mask)),
        truncated=False,
        turns=len(spans),
        leaf=leaf,
        routing_pieces=() if routing is None else (routing,),
        row_forward=None if routing is None else np.zeros(len(mask) - 1, np.uint8),
    )


def stored_row(store: Any, run: str, step: int, row: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Store the sample as an object of its own; its row of the batch."""
    data = encode_samples([merged({"run": run} | row)])
    key = merged_key(run, step, 0, row["attempt_id"])
    store.put(key, data)
    return {
        "attempt_id": row["attempt_id"],
        "group_id": row["group_id"],
        "leaf": 0,
        "key": key,
        "sha256": sha256_hex(data),
        "tokens": len(row["tokens"]),
        "trained": int(np.count_nonzero(row["loss_mask"])),
        "advantage": row["advantage"],
        "weight": 0.125,
    } | changes


def batch(run: str, step: int, rows: list[dict[str, Any]], **changes: Any) -> bytes:
    """The bytes of a train batch object."""
    return pack({"schema_version": 4, "run": run, "step": step, "samples": rows, "decisions": []} | changes)


def put_batch(store: Any, run: str, step: int, samples: list[dict[str, Any]], scored: bool = False) -> dict[str, str]:
    """Store the samples and the batch that refers to them, weighed for the mean over tokens; the body that asks the
    trainer for the step. scored: decisions with a score of each attempt are in the batch."""
    tokens = sum(int(np.count_nonzero(row["loss_mask"])) for row in samples)
    decisions = [
        {"attempt_id": row["attempt_id"], "group_id": row["group_id"], "score": float(i % 2)}
        for i, row in enumerate(samples)
        if scored
    ]
    rows = [stored_row(store, run, step, row, weight=1 / max(tokens, 1)) for row in samples]
    data = batch(run, step, rows, decisions=decisions)
    key = step_key(run, step, "filter.msgpack")
    store.put(key, data)
    return {"run": run, "batch_key": key, "batch_digest": sha256_hex(data)}
