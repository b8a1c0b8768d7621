"""The bodies that the session server validates: those of the operator's path.

What an agent sends is read by `wire.py` and `formats/`, for speed; its models, and those of all replies, are in
`described.py`, for the OpenAPI page and its tests.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rl360.sessions.merge import Pick
from rl360.sessions.turns import MAX_VERSION, Sampling, SamplingPolicy, SessionMode, SessionSpec

_Id = Field(min_length=1, max_length=200)
_ATTEMPT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class SamplingBody(Body):
    """Sampling parameters of a session; all must be stated."""

    model_config = ConfigDict(strict=True)

    temperature: float = Field(ge=0.0, le=2.0)
    top_p: float = Field(gt=0.0, le=1.0)
    top_k: int = Field(ge=-1, le=1 << 30, description="-1 is off")
    max_new_tokens: int = Field(ge=1, le=1 << 20, description="sampled tokens per turn")

    @field_validator("top_k")
    @classmethod
    def _not_zero(cls, value: int) -> int:
        if value == 0:
            raise ValueError("top_k 0 samples nothing; use -1 for off, or at least 1")
        return value


class CreateBody(Body):
    """One attempt's session. The same body finds the same session while it lives, if it names a weight version."""

    model_config = ConfigDict(strict=True)

    attempt_id: str = Field(
        min_length=1,
        max_length=200,
        description="names the object that its samples are stored in",
        json_schema_extra={"pattern": f"^{_ATTEMPT_ID.pattern}$"},
    )
    group_id: str = _Id
    task_id: str = _Id
    sampling: SamplingBody
    max_seq_len: int = Field(ge=2, le=1 << 24, description="tokens on one path, prompt included")
    expected_weight_version: str | None = Field(
        None, max_length=MAX_VERSION, description="null: any version is taken and recorded"
    )
    mode: Literal["linear", "tree"] = "linear"
    matcher: str = Field("strict", max_length=200, description="strict, loose_tool_calls, role_content or module:name")
    sampling_policy: Literal["pin", "record", "refuse"] = Field(
        "pin", description="sampling parameters a request names: ignored and counted, used and recorded, refused"
    )
    thinking: bool = Field(False, description="ask for a reasoning part, where the template has one")

    @field_validator("attempt_id")
    @classmethod
    def _names_an_object(cls, value: str) -> str:
        if not _ATTEMPT_ID.fullmatch(value):
            raise ValueError("use letters, digits, dot, underscore and hyphen, and begin with a letter or a digit")
        return value

    def to_spec(self) -> SessionSpec:
        """Field by field the same, in the types of a session."""
        mode, policy = SessionMode(self.mode), SamplingPolicy(self.sampling_policy)
        own = {"sampling": Sampling(**dict(self.sampling)), "mode": mode, "sampling_policy": policy}
        return SessionSpec(**{**dict(self), **own})


class StoreBody(Body):
    """Where to write the samples: `{run}/steps/{step}/merged/{wave}/{attempt}.msgpack`."""

    key: str = Field(max_length=1024)
    pick: Pick = Field(Pick.LAST, description="branches that become samples")


class StoreOne(StoreBody):
    session_id: str = Field(max_length=200)


class StoreManyBody(Body):
    """Sessions that ended within a moment of each other."""

    sessions: list[StoreOne] = Field(min_length=1, max_length=64)
