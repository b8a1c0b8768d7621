"""Figures as a person reads them: fixed digits, shares, durations; a dash where there is nothing, never a zero."""

from __future__ import annotations

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
