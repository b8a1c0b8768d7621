"""The ordinary way, written plainly: what the rows of the session benchmark are compared with.

Every turn's record holds its whole prompt and its whole routing history; the merge deep-copies the sample for each
turn, compares the full prefix and extends python lists; the sample then travels as JSON.
"""

from __future__ import annotations

import base64
import copy
from typing import Any

import numpy as np


def turn_records(
    tokens: np.ndarray, logprobs: np.ndarray, routing: np.ndarray | None, edges: list[tuple[int, int]]
) -> list[dict[str, Any]]:
    """What an ordinary session server holds after a trajectory of these turns: `edges` are (prompt end, end) by turn,
    `routing` is int32 `[tokens - 1, layers, top_k]` as the engine sends it."""
    return [
        {
            "prompt_ids": tokens[:prompt_end].tolist(),
            "output_ids": tokens[prompt_end:end].tolist(),
            "output_logprobs": logprobs[prompt_end:end].tolist(),
            "routed_experts": None if routing is None else routing[: end - 1],
        }
        for prompt_end, end in edges
    ]


def deep_copy_merge(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """One sample from the turns of one session."""
    sample: dict[str, Any] = {"tokens": [], "loss_mask": [], "logprobs": [], "routed_experts": None}
    for turn in turns:
        merged = copy.deepcopy(sample)
        held = len(merged["tokens"])
        if turn["prompt_ids"][:held] != merged["tokens"]:
            raise ValueError("the prompt does not begin with what was sampled so far")
        new = turn["prompt_ids"][held:]
        merged["tokens"] += new + turn["output_ids"]
        merged["loss_mask"] += [0] * len(new) + [1] * len(turn["output_ids"])
        merged["logprobs"] += [0.0] * len(new) + turn["output_logprobs"]
        merged["routed_experts"] = turn["routed_experts"]
        sample = merged
    return sample


def token_counts(sample: dict[str, Any]) -> dict[str, int]:
    """The sample's line in the books, counted id by id."""
    first = sample["loss_mask"].index(1)
    return {
        "prompt": first,
        "sampled": sum(1 for bit in sample["loss_mask"] if bit),
        "observation": sum(1 for bit in sample["loss_mask"][first:] if not bit),
    }


def json_ready(sample: dict[str, Any]) -> dict[str, Any]:
    """The sample as plain lists, the routing nested `[tokens - 1][layers][top_k]`."""
    return {**sample, "routed_experts": sample["routed_experts"].tolist()}


def full_history_bytes(edges: list[tuple[int, int]], layers: int, top_k: int) -> int:
    """Bytes of routing that engines send when every turn returns all its rows, int32 in base64."""
    return sum(len64((end - 1) * layers * top_k * 4) for _prompt_end, end in edges)


def len64(size: int) -> int:
    """Length of the base64 text of `size` bytes."""
    return 4 * -(-size // 3)


def as_base64(rows: np.ndarray) -> str:
    """Routing rows as the engine's replies carry them."""
    return base64.b64encode(np.ascontiguousarray(rows, dtype="<i4").data).decode()
