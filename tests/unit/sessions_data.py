"""A small tokenizer and model directory, messages and engine replies for the session tests; nothing random."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rl360.sessions.core import Completion, Sampling, Session, SessionSpec
from rl360.sessions.families.base import ChatTemplate
from rl360.sessions.families.registry import load_template
from rl360.sessions.families.rl360_chat import SPECIALS, template_text
from rl360.sessions.messages import Message, Tool, parse_tools

VERSION = "run:0"
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=48)
BASH_SCHEMA = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
EDIT_SCHEMA = {
    "type": "function",
    "function": {
        "name": "edit",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "line": {"type": "integer"}, "text": {"type": "string"}},
            "required": ["path", "text"],
        },
    },
}
TOOLS: tuple[Tool, ...] = parse_tools([BASH_SCHEMA, EDIT_SCHEMA])
BASH: tuple[Tool, ...] = parse_tools([BASH_SCHEMA])
OPENING = (Message("system", "Use bash."), Message("user", "Create hello.txt"))


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE over a fixed corpus with the family's special tokens; every byte has a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [
        "Use bash.\n# bash(command)\nassistant user system tool echo hello > hello.txt cat done ok (exit 1)",
        "\n\n\n\n x\n\n y",
    ] * 20
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def write_model_dir(folder: Path, vocab_size: int = 512) -> Path:
    """What a session server reads of a model directory."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_bytes(orjson.dumps({"vocab_size": vocab_size}))
    (folder / "chat_template.jinja").write_text(template_text())
    return folder


@functools.cache
def template() -> ChatTemplate:
    """The template every test shares (immutable after load)."""
    with tempfile.TemporaryDirectory() as folder:
        return load_template(write_model_dir(Path(folder)))


def spec(**changes: Any) -> SessionSpec:
    fields: dict[str, Any] = {
        "attempt_id": "s000000-g000-a00-t0",
        "group_id": "s000000-g000",
        "task_id": "hello",
        "sampling": SAMPLING,
        "max_seq_len": 1024,
        "expected_weight_version": VERSION,
    }
    return SessionSpec(**{**fields, **changes})


def new_session(budget_bytes: int = 1 << 20, **changes: Any) -> Session:
    return Session("session-1", spec(**changes), template(), budget_bytes)


def encode_turn(text: str) -> list[int]:
    """Sampled ids of a turn; special tokens written out in `text` are the real ones."""
    return _stock().encode(text, add_special_tokens=False).ids


@functools.cache
def _stock() -> Tokenizer:
    return build_tokenizer()


def completion(
    text: str = "done<|im_end|>", finish: str = "stop", version: str = VERSION, **changes: Any
) -> Completion:
    """An engine's answer; log-probabilities are -1, -2, ... so that a shift shows."""
    ids = np.array(encode_turn(text), dtype=np.int32)
    fields: dict[str, Any] = {
        "output_ids": ids,
        "logprobs": -np.arange(1, len(ids) + 1, dtype=np.float32),
        "finish_reason": finish,
        "spans": ((0, len(ids), version),),
        "cached_tokens": 0,
    }
    return Completion(**{**fields, **changes})


def call_turn(command: str) -> str:
    return f"<tool_call>bash\n{command}</tool_call><|im_end|>"


def state_of(session: Session) -> tuple[Any, ...]:
    """Everything a refused request must leave alone."""
    return (
        session.epoch,
        session.tokens.view.tolist(),
        session.logprobs.view.tolist(),
        session.mask.view.tolist(),
        tuple(session.turns),
        tuple(session.messages),
        session.tools,
        session.sampled_tokens,
        session.prefix_break_tokens,
        session.prompt_tokens,
        session.rollbacks,
        dict(session.ignored_params),
        session.held_bytes,
    )
