"""The laptop policy: a Qwen3-shaped decoder of under a million parameters, freshly initialised as a Hugging Face
directory.

Hidden 128, 3 layers, 4 heads with 2 key-value heads of 32, MLP 384, tied embeddings, 1,024 tokens. Every value that an
engine or trainer reads is written out, so that SGLang, transformers and Megatron-core agree without anybody's defaults.

The initialisation is made for copying, which is most of what a chore needs (file names go from the instruction into
the command): embeddings are wide (0.1) and each head's output projection starts as `COPY_GAIN` times the transpose of
its value projection, so a head writes out the embedding of whatever it looks at. Without these two, 200 supervised
steps end on a plateau where commands have the right form and random words.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from rl360.policy.tokenizer import END, PAD, VOCAB_SIZE, save_tokenizer

CONTEXT_TOKENS = 2048
ROPE_THETA = 10_000.0
LAYERS = 3
HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 32, 128
EMBEDDING_STD = 0.1
COPY_GAIN = 3.0


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Loading and saving a few megabytes needs no bars on the screen; the setting is put back."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def model_config(tokenizer: Tokenizer, layers: int = LAYERS) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=0.02,
        attention_bias=False,
        attention_dropout=0.0,
        use_sliding_window=False,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(PAD),
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )


def new_model(tokenizer: Tokenizer, seed: int, layers: int = LAYERS) -> Qwen3ForCausalLM:
    """Random fp32 weights as a pure function of `seed`; the caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(model_config(tokenizer, layers))
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(EMBEDDING_STD / model.config.initializer_range)
        for layer in model.model.layers:
            values = layer.self_attn.v_proj.weight.view(KV_HEADS, HEAD_DIM, HIDDEN)
            for head in range(HEADS):
                columns = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
                layer.self_attn.o_proj.weight[:, columns] = COPY_GAIN * values[head * KV_HEADS // HEADS].T
    return model


def write_model(folder: Path, tokenizer: Tokenizer, seed: int, layers: int = LAYERS) -> Path:
    """Write a loadable Hugging Face directory: config, generation config, safetensors, tokenizer and chat template."""
    os.makedirs(folder, exist_ok=True)
    model = new_model(tokenizer, seed, layers)
    model.generation_config = GenerationConfig(
        bos_token_id=None, eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id
    )
    with no_progress_bars():
        model.save_pretrained(str(folder))
    save_tokenizer(tokenizer, folder)
    return folder
