"""The rl360-chat format as token ids: what a session server sends and what the policy is expected to sample.

Assistant pieces are encoded apart from prompt and tool pieces, exactly as they arise in a rollout, so no token ever
spans the border between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

SYSTEM_PROMPT = "Use bash.\n# bash(command)"
FINAL_TURN = "done<|im_end|>"


class Encodes(Protocol):
    """What is needed of a tokenizer: the raw `tokenizers.Tokenizer` and a thin wrapper of a transformers one both
    fit.
    """

    def encode_ids(self, text: str) -> list[int]: ...


def prompt_text(instruction: str) -> str:
    system = f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>"
    return f"{system}<|im_start|>user\n{instruction.strip()}<|im_end|><|im_start|>assistant\n"


def call_text(command: str) -> str:
    return f"<tool_call>bash\n{command}</tool_call><|im_end|>"


def observation_turn(observation: str) -> str:
    return f"<|im_start|>tool\n{observation}<|im_end|><|im_start|>assistant\n"


def episode_pieces(instruction: str, turns: Sequence[tuple[str, str]]) -> list[tuple[str, bool]]:
    """(text, sampled by the policy?) of a whole attempt whose turns are (command, observation), closed by `done`."""
    pieces = [(prompt_text(instruction), False)]
    for command, observation in turns:
        pieces += [(call_text(command), True), (observation_turn(observation), False)]
    return [*pieces, (FINAL_TURN, True)]


def encode_pieces(tokenizer: Encodes, pieces: Sequence[tuple[str, bool]]) -> tuple[np.ndarray, np.ndarray]:
    """ids int32 [tokens] and mask uint8 [tokens], 1 on what the policy has to produce (its `<|im_end|>` included)."""
    encoded = [(tokenizer.encode_ids(text), sampled) for text, sampled in pieces]
    ids = np.concatenate([np.asarray(piece, dtype=np.int32) for piece, _ in encoded])
    mask = np.concatenate([np.full(len(piece), sampled, dtype=np.uint8) for piece, sampled in encoded])
    return ids, mask
