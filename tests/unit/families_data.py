"""A small tokenizer, a template and a model directory for each family; nothing random."""

from __future__ import annotations

import functools
from pathlib import Path

import orjson
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from rl360.sessions.families.base import ChatTemplate
from rl360.sessions.families.registry import FAMILIES

VOCAB_SIZE = 512
MODEL_TYPES = {"qwen3": "qwen3_moe", "glm4": "glm4_moe"}
# what real checkpoints of these families split text by
_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@functools.cache
def tokenizer_json(family: str) -> str:
    """Byte-level BPE with the family's tokens and one that no format uses; as in real checkpoints, most of them are
    added tokens that the file does not call special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(["assistant\n\n\nuser\n\nsystem think tool hello done ls\n\n\n\n"] * 20, trainer)
    for name in (*FAMILIES[family].tokens, "<|unused|>"):
        tokenizer.add_tokens([AddedToken(name, special="|" in name, normalized=False)])
    return tokenizer.to_str()


@functools.cache
def family_template(family: str) -> ChatTemplate:
    """The template every test shares."""
    return ChatTemplate(FAMILIES[family], tokenizer_json(family), VOCAB_SIZE)


@functools.cache
def stock_tokenizer(family: str) -> Tokenizer:
    """The tokenizer as a file on disk is read: it finds its added tokens in text."""
    return Tokenizer.from_str(tokenizer_json(family))


def token_ids(family: str, text: str) -> list[int]:
    """Ids of text in which the names of tokens are the tokens."""
    return stock_tokenizer(family).encode(text, add_special_tokens=False).ids


def write_family_dir(folder: Path, family: str, stock: str | None = None) -> Path:
    """A model directory; `stock` None ships the packaged template."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(family))
    config = {"vocab_size": VOCAB_SIZE, "model_type": MODEL_TYPES.get(family, "qwen3_moe")}
    (folder / "config.json").write_bytes(orjson.dumps(config))
    (folder / "chat_template.jinja").write_text(FAMILIES[family].template_text() if stock is None else stock)
    return folder
