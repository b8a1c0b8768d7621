"""Routed experts of a mixture-of-experts model, as the engine reports them (R3: rollout routing replay).

A row says which experts the forward pass of one token chose: `[layers, top_k]`. The row of position p is the forward of
token p, so a context of T tokens has T-1 rows: the last token was never fed back. What an engine answers for rows
[start, T-1) is base64 of little-endian int32 `[T-1-start, layers, top_k]`; it is decoded once, checked, and narrowed to
the smallest type that holds an expert's index. Rows that do not line up are refused, never padded or cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pybase64

from rl360.errors import BadInput
from rl360.sessions.refusals import Refusal, SessionRefusal

_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")


class RowForward(IntEnum):
    """Which forward pass wrote a row."""

    PREFILL = 0  # a prompt or observation token, of this turn's own prefill
    DECODE = 1  # a sampled token, in the decode step that fed it back
    REPREFILL = 2  # a sampled token, recomputed by a prefill after the engine had retracted the request
    UNKNOWN = 3  # a sampled token of a retracted request: decode or that prefill, the engine does not say


@dataclass(frozen=True)
class RoutingShape:
    """`layers` hidden layers (dense ones included, as the engine counts), `top_k` experts each, of `experts`."""

    layers: int
    top_k: int
    experts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint8 up to 256 experts, else uint16."""
        return np.dtype(np.uint8 if self.experts <= 256 else np.uint16)

    @property
    def row_bytes(self) -> int:
        return self.layers * self.top_k * self.dtype.itemsize

    @classmethod
    def from_model_dir(cls, model_dir: str | Path) -> RoutingShape | None:
        """Read config.json; None for a dense model. `BadInput` when it names experts but not their shape."""
        path = Path(model_dir) / "config.json"
        try:
            config = orjson.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise BadInput(f"{path} is not a readable JSON file ({error})") from None
        if not isinstance(config, dict):
            raise BadInput(f"{path} is not a JSON object")
        text = config.get("text_config")
        config = text if isinstance(text, dict) else config
        experts = next((config[key] for key in _EXPERT_KEYS if config.get(key)), None)
        if experts is None:
            return None
        layers, top_k = config.get("num_hidden_layers"), config.get("num_experts_per_tok")
        if not (isinstance(layers, int) and isinstance(top_k, int) and isinstance(experts, int)) or not (
            layers > 0 and 0 < top_k <= experts <= 1 << 16
        ):
            raise BadInput(f"{path}: layers {layers!r}, experts per token {top_k!r} of {experts!r} is no routing shape")
        return cls(layers, top_k, experts)


def decode_rows(data: bytes | str | memoryview, shape: RoutingShape, rows: int) -> np.ndarray:
    """Rows `[rows, layers, top_k]` of `shape.dtype`, read-only, from the engine's base64.

    `SessionRefusal(bad_routing)` on anything but exactly `rows` rows of expert indices in [0, experts).
    """
    try:
        raw = pybase64.b64decode(data, validate=True)
    except ValueError as error:  # binascii.Error included
        raise _bad(f"routed experts are not base64: {error}") from None
    expected = 4 * rows * shape.layers * shape.top_k
    if len(raw) != expected:
        raise _bad(
            f"routed experts are {len(raw)} bytes; {rows} rows of {shape.layers} layers, {shape.top_k} experts each, "
            f"as int32 are {expected}"
        )
    wide = np.frombuffer(raw, dtype="<u4")  # unsigned: a negative index becomes a huge one
    if wide.size and int(wide.max()) >= shape.experts:
        wrong = int(wide.view("<i4")[wide >= shape.experts][0])
        raise _bad(f"routed experts name expert {wrong}, the model has {shape.experts}")
    narrow = wide.astype(shape.dtype).reshape(rows, shape.layers, shape.top_k)
    narrow.flags.writeable = False
    return narrow


def check_rows(rows: np.ndarray | None, shape: RoutingShape, count: int) -> None:
    """Refuse (`bad_routing`) decoded rows of another number, layout or type than a turn needs."""
    wanted = (count, shape.layers, shape.top_k)
    if rows is None:
        raise _bad(f"the engine reported no routed experts, {count} rows are needed")
    if rows.shape != wanted or rows.dtype != shape.dtype:
        raise _bad(f"routed experts are {rows.dtype} {rows.shape}, expected {shape.dtype} {wanted}")


def rows_written(
    held: int, prompt_end: int, end: int, spans: tuple[tuple[int, int, str], ...], retractions: int
) -> np.ndarray:
    """`RowForward` of rows [held, end-1) of a turn, uint8 `[rows]`.

    Ids before `prompt_end` were sent, [prompt_end, end) sampled; `spans` (start, end, weight version) are over the same
    positions. After a retraction that met a weight update, the tokens before the last span were prefilled again.
    """
    forward = np.full(end - 1 - held, RowForward.PREFILL, dtype=np.uint8)
    sampled = forward[prompt_end - held :]
    if retractions == 0:
        sampled[:] = RowForward.DECODE
    elif len(spans) > 1:
        sampled[:] = RowForward.DECODE
        sampled[: spans[-1][0] - prompt_end] = RowForward.REPREFILL
    else:
        sampled[:] = RowForward.UNKNOWN
    return forward


def _bad(problem: str) -> SessionRefusal:
    return SessionRefusal(Refusal.BAD_ROUTING, f"upstream reply refused: {problem}")
