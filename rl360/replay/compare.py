"""Two values, stored and recomputed: where they first differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

_MISSING = "(absent)"


@dataclass(frozen=True)
class Compared:
    """One object of one task. `path` is where it first differs, empty when it is equal; `stored` and `recomputed` are
    what is there, as text."""

    task: str
    object: str
    path: str = ""
    stored: str = ""
    recomputed: str = ""

    @property
    def equal(self) -> bool:
        return not self.path

    def to_json(self) -> dict[str, Any]:
        difference = {"path": self.path, "stored": self.stored, "recomputed": self.recomputed}
        return {
            "task": self.task,
            "object": self.object,
            "equal": self.equal,
            "difference": None if self.equal else difference,
        }

    def line(self) -> str:
        said = "equal" if self.equal else f"{self.path}: stored {self.stored}, recomputed {self.recomputed}"
        return f"{self.task:<14} {self.object:<29} {said}"


def compared(task: str, name: str, stored: Any, recomputed: Any) -> Compared:
    """`Compared` of two plain values (maps, lists, arrays, numbers, text)."""
    for path, left, right in differences(stored, recomputed):
        return Compared(task, name, path or "(whole)", _text(left), _text(right))
    return Compared(task, name)


def differences(stored: Any, recomputed: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every place where the two differ, in their order. Numbers are equal when they are of one type and one value, so
    1 and 1.0 differ; a NaN equals a NaN."""
    if isinstance(stored, dict) and isinstance(recomputed, dict):
        for key in [*stored, *(key for key in recomputed if key not in stored)]:
            where = f"{path}.{key}" if path else str(key)
            yield from differences(stored.get(key, _MISSING), recomputed.get(key, _MISSING), where)
    elif isinstance(stored, list) and isinstance(recomputed, list):
        for index in range(max(len(stored), len(recomputed))):
            left, right = (side[index] if index < len(side) else _MISSING for side in (stored, recomputed))
            yield from differences(left, right, f"{path}[{index}]")
    elif isinstance(stored, np.ndarray) and isinstance(recomputed, np.ndarray):
        if (stored.dtype, stored.shape, stored.tobytes()) != (recomputed.dtype, recomputed.shape, recomputed.tobytes()):
            yield path, f"{stored.dtype} {stored.shape}", f"{recomputed.dtype} {recomputed.shape}, other bytes"
    elif type(stored) is not type(recomputed) or not (stored == recomputed or _both_nan(stored, recomputed)):
        yield path, stored, recomputed


def _both_nan(stored: Any, recomputed: Any) -> bool:
    return isinstance(stored, float) and math.isnan(stored) and math.isnan(recomputed)


def _text(value: Any) -> str:
    text = value if value is _MISSING else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
