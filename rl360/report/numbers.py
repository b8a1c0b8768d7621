"""Figures as a person reads them: fixed digits, shares, durations; a dash where there is nothing, never a zero. And
figures of many steps, from their `step_json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl360.ledger.metrics import mean

DASH = "-"


def fixed(value: float | None, digits: int) -> str:
    """A figure with fixed digits."""
    return DASH if value is None else f"{value:.{digits}f}"


def short(value: float | None) -> str:
    """A figure in two digits, whatever its size."""
    return DASH if value is None else f"{value:.2g}"


def percent(value: float | None) -> str:
    """A share of one, in percent."""
    return DASH if value is None else f"{100 * value:.1f}%"


def run_losses(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`losses_by_cause` over the `step_json` of many steps, most attempts first."""
    total: dict[str, dict[str, Any]] = {}
    for step in steps:
        for cause in step["losses_by_cause"]:
            entry = total.setdefault(cause["cause"], {**cause, "attempts": 0, "seconds": 0.0, "sampled_tokens": 0})
            for name in ("attempts", "seconds", "sampled_tokens"):
                entry[name] += cause[name]
    return sorted(total.values(), key=lambda entry: (-entry["attempts"], entry["cause"]))


def rolling_mean(values: Sequence[float | None], window: int) -> list[float | None]:
    """Mean of the last `window` values that exist, at each position; None where there is none."""
    return [mean([v for v in values[max(0, end - window) : end] if v is not None]) for end in range(1, len(values) + 1)]
