"""A reward that a verifier wrote. There is no other way to have one: everywhere else it is `Verdict | None`."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Verdict(BaseModel):
    """What the verifier said of one attempt.

    `reward` is finite; NaN, infinities and booleans are refused, so no failure can be dressed as a number.
    `verifier_digest` is the sha256 over the task's `tests/` tree: which verifier said so.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    task_id: str = Field(min_length=1)
    attempt_id: str = Field(min_length=1)
    reward: float
    verifier_digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    finished_at: float = Field(description="unix seconds")
    written_by_verifier: Literal[True] = True

    @field_validator("reward", mode="before")
    @classmethod
    def _finite_number(cls, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"a reward is a finite number, got {value!r}")
        return float(value)
