"""How far the parts that compute log-probs are apart: transformers, Megatron-core (both fp32) and a serving engine
(bf16).

The first gap must be rounding only (`PARITY_LIMIT`), else the trainer optimises another model than the engine serves.
The engine's gap is reported, not judged: it is what the objective's importance weights correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from rl360.engines.health import headers_for
from rl360.errors import BadInput, ServiceError

PARITY_LIMIT = 1e-4
_ENGINE_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Gap:
    """Absolute log-prob difference over `tokens` positions."""

    mean: float
    maximum: float
    tokens: int


def gap(one: Sequence[np.ndarray], other: Sequence[np.ndarray], masks: Sequence[np.ndarray] | None = None) -> Gap:
    """Both: one float array [T - 1] per sequence. `masks`: uint8 [T] per sequence, to count only tokens marked 1."""
    apart = np.abs(
        np.concatenate([np.asarray(a, np.float64) - np.asarray(b, np.float64) for a, b in zip(one, other, strict=True)])
    )
    if masks is not None:
        apart = apart[np.concatenate([mask[1:] for mask in masks]) == 1]
    return Gap(mean=float(apart.mean()), maximum=float(apart.max()), tokens=len(apart))


def probe_examples(hf_dir: Path, count: int, seed: int = 991) -> list[tuple[np.ndarray, np.ndarray]]:
    """`count` whole demonstrations in the tokenizer of `hf_dir`: (ids int32 [T], mask uint8 [T]) each."""
    from tokenizers import Tokenizer

    from rl360.policy.demonstrations import demonstrations
    from rl360.policy.tokenizer import RawEncoder

    path = hf_dir / "tokenizer.json"
    if not path.is_file():
        raise BadInput(
            f"{hf_dir} is not a model directory: {path.name} is missing; make one with `rl360 model warm-start`"
        )
    return demonstrations(seed, count, 0.5, RawEncoder(Tokenizer.from_file(str(path))))


def transformers_logprobs(hf_dir: Path, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
    """log p(token t | before) in fp32 by transformers: float32 [T - 1] per sequence."""
    import torch
    from transformers import AutoModelForCausalLM

    from rl360.policy.model import no_progress_bars

    with no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(str(hf_dir), dtype=torch.float32, local_files_only=True).eval()
    found = []
    with torch.no_grad():
        for sequence in sequences:
            ids = torch.from_numpy(sequence.astype(np.int64))[None]  # [1, T]
            scores = torch.log_softmax(
                model(input_ids=ids, use_cache=False).logits[0, :-1].float(), dim=-1
            )  # [T - 1, vocab]
            found.append(scores.gather(-1, ids[0, 1:, None])[:, 0].numpy())
    return found


def engine_logprobs(engine_url: str, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The engine's own log-probs of the same tokens (its dtype): float32 [T - 1] per sequence."""
    found = []
    with httpx.Client(base_url=engine_url, headers=headers_for(engine_url), timeout=_ENGINE_DEADLINE_S) as client:
        for number, sequence in enumerate(sequences):
            body = {
                "input_ids": sequence.tolist(),
                "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            try:
                reply = client.post("/generate", json=body)
                reply.raise_for_status()
                rows = reply.json()["meta_info"]["input_token_logprobs"]
            except (httpx.HTTPError, KeyError, ValueError) as error:
                raise ServiceError(
                    f"engine {engine_url}: cannot score sequence {number}: {type(error).__name__}: {error}"
                ) from error
            # SGLang 0.5.23 tells the vocabulary's last id as 0 here (it clips images' placeholders one too early)
            told = [row[1] for row in rows]
            if len(told) != len(sequence) or any(told[i] not in (0, sequence[i]) for i in range(len(told))):
                raise ServiceError(f"engine {engine_url}: scored other tokens than sequence {number} holds")
            found.append(np.asarray([row[0] for row in rows[1:]], np.float32))
    return found
