"""Routed experts of a real mixture-of-experts engine behind a real gateway, merged row by row (R3).

The engine runs a tiny random Qwen3-MoE of 2 layers and 8 experts, 2 of them a token; it is started for this file.
"""

from __future__ import annotations

import base64
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rl360.sessions.routing import RowForward
from rl360.sessions.sample import MergedSample
from tests.contract.session_rig import MESSAGES, Rig, free_port, process, session_rig

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]

LAYERS, TOP_K, EXPERTS = 2, 2, 8


def write_moe(folder: Path) -> None:
    """A Qwen3-MoE directory with the laptop policy's tokenizer and template."""
    import torch
    from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    from rl360.policy.tokenizer import VOCAB_SIZE, save_tokenizer, train_tokenizer

    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=2048,
        tie_word_embeddings=False,  # SGLang reads no tied head of this family: it would sample from empty memory
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():  # a constant dimension that only the head reads: one sampled token in 20 or so ends the turn
        model.model.embed_tokens.weight[:, 0] = 0.5
        model.lm_head.weight[2, 0] = 0.52
        for layer in model.model.layers:
            layer.mlp.gate.weight[:, 0] = 0
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder)
    save_tokenizer(train_tokenizer(), folder)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("moe")
    model = folder / "model"
    write_moe(model)
    url = f"http://127.0.0.1:{free_port()}"
    engine = [sys.executable, "-m", "rl360.engines.launch", "--model", str(model), "--port", url.rsplit(":", 1)[1]]
    with (
        process([*engine, "--routed-experts"], f"{url}/ping", folder / "engine.log"),
        session_rig(url, str(model), folder, "--return-routed-experts") as rig,
    ):
        yield rig


def all_rows(rig: Rig, sample: MergedSample) -> np.ndarray:
    """The engine's own rows of these ids, asked for from the start in one go."""
    body = {
        "input_ids": sample.tokens.tolist(),
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_routed_experts": True,
    }
    meta = httpx.post(f"{rig.engine_url}/generate", json=body, timeout=60).json()["meta_info"]
    rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype="<i4").reshape(-1, LAYERS, TOP_K)
    return rows[: len(sample.tokens) - 1]


def several_turns(rig: Rig, least: int = 2, **changes: Any) -> tuple[str, MergedSample]:
    """A session of at least `least` turns: random weights end a turn by themselves once in a while."""
    for _ in range(300):
        session_id, reasons = rig.attempt(4, **changes)
        if len(reasons) >= least:
            return session_id, rig.sample(session_id)
    raise AssertionError("no session came to a second turn")


def test_each_row_is_there_once_and_where_it_belongs(moe: Rig) -> None:
    session_id, sample = several_turns(moe)
    assert sample.routing is not None and sample.row_forward is not None
    assert (sample.routing.dtype, sample.routing.shape) == (np.uint8, (len(sample.tokens) - 1, LAYERS, TOP_K))
    again = all_rows(moe, sample)  # its prefix is cached: these are the rows of the same forwards
    assert np.array_equal(sample.routing, again)
    # the comparison can fail: one row off, it does
    assert (sample.routing[1:] != again[:-1]).any(axis=(1, 2)).mean() > 0.5
    for start, end, _version in sample.version_spans:
        assert (sample.row_forward[start : end - 1] == RowForward.DECODE).all()
    outside = sample.loss_mask[:-1] == 0
    assert (sample.row_forward[outside] == RowForward.PREFILL).all()
    assert moe.told(session_id)["reprefilled_rows"] == 0


def test_the_trainer_replays_what_the_engine_routed(moe: Rig) -> None:
    """The engine's log-probs come back under its own experts, and not when these are a row or a layer off."""
    from rl360.training.logprobs import sequence_logprobs
    from rl360.training.megatron import alone, hf_map
    from rl360.training.megatron.hf_dir import read_tensors
    from rl360.training.megatron.model import Layout
    from rl360.training.megatron.policy import Policy
    from rl360.training.packing import TrainSequence

    samples = [several_turns(moe)[1] for _ in range(8)]

    def distance(policy: Policy, routing: Callable[[np.ndarray], np.ndarray]) -> float:
        found = []
        for sample in samples:
            assert sample.routing is not None
            sequence = TrainSequence(sample.tokens, sample.loss_mask, routing=routing(sample.routing))
            moved = sequence_logprobs(policy, [sequence], 4096)[0] - sample.logprobs[1:]
            found.append(np.abs(moved[sample.loss_mask[1:] == 1]))
        return float(np.concatenate(found).mean())

    with alone.single_process():
        policy = Policy(model_dir(moe), Layout())
        served = {name: tensor.bfloat16().float() for name, tensor in read_tensors(model_dir(moe)).items()}
        hf_map.load_hf(policy.core, served, policy.shape, policy.layout)
        right = distance(policy, lambda rows: rows)
        row_off = distance(policy, lambda rows: np.roll(rows, 1, axis=0))
        layer_off = distance(policy, lambda rows: rows[:, ::-1])
    assert right < 1.5e-3, "bfloat16 against float32"
    assert min(row_off, layer_off) > 2 * right, (right, row_off, layer_off)


def test_rows_of_a_lost_cache_are_kept_and_counted(moe: Rig) -> None:
    for _ in range(300):
        session_id, _ = moe.create()
        first = moe.chat(session_id, MESSAGES).json()["choices"][0]
        if first["finish_reason"] != "length":
            break
    before = moe.sample(session_id)
    assert httpx.post(f"{moe.engine_url}/flush_cache", timeout=20).status_code == 200
    reply = moe.chat(session_id, [*MESSAGES, first["message"], {"role": "tool", "content": "ok"}])
    assert reply.status_code == 200, reply.text
    after = moe.sample(session_id)
    assert before.routing is not None and after.routing is not None and after.row_forward is not None
    assert np.array_equal(after.routing[: len(before.routing)], before.routing)
    assert after.reprefilled_rows == len(before.routing)


def test_an_update_in_mid_turn_leaves_two_spans_and_says_which_forward_wrote_a_row(moe: Rig) -> None:
    long = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 900}
    for number in range(60):
        session_id, _ = moe.create(sampling=long, max_seq_len=1000)
        replies: list[httpx.Response] = []
        talk = threading.Thread(target=lambda s=session_id, r=replies: r.append(moe.chat(s, MESSAGES)))
        talk.start()
        time.sleep(0.25)
        assert httpx.post(f"{moe.engine_url}/pause_generation", json={"mode": "retract"}, timeout=20).status_code == 200
        body = {"model_path": str(model_dir(moe)), "weight_version": f"update:{number}", "flush_cache": True}
        assert httpx.post(f"{moe.engine_url}/update_weights_from_disk", json=body, timeout=60).json()["success"]
        assert httpx.post(f"{moe.engine_url}/continue_generation", json={}, timeout=20).status_code == 200
        talk.join(timeout=60)
        assert replies[0].status_code == 200, replies[0].text
        sample = moe.sample(session_id)
        if len(sample.version_spans) == 2:
            break
    (start, middle, _old), (begin, end, new) = sample.version_spans
    assert (begin, end, new) == (middle, len(sample.tokens), f"update:{number}")
    assert sample.routing is not None and sample.row_forward is not None
    assert (sample.row_forward[:start] == RowForward.PREFILL).all()
    assert (sample.row_forward[start:middle] == RowForward.REPREFILL).all()
    assert (sample.row_forward[middle : end - 1] == RowForward.DECODE).all()
    assert sample.sampled_tokens == end - start


def model_dir(rig: Rig) -> Path:
    return Path(httpx.get(f"{rig.engine_url}/model_info", timeout=20).json()["model_path"])


def test_the_agent_sees_neither_rows_nor_ids(moe: Rig) -> None:
    session_id, _ = moe.create()
    reply = moe.chat(session_id, MESSAGES)
    assert set(reply.json()) == {"id", "object", "created", "model", "choices", "usage"}
    assert set(reply.json()["choices"][0]) == {"index", "message", "finish_reason", "logprobs"}
    assert len(reply.content) < 2000
