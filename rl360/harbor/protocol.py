"""The wire types of `POST /run`: Miles' client contract with our additions (docs/sandboxes.md)."""

from __future__ import annotations

import re
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rl360.config.run import JudgeConfig, SandboxConfig
from rl360.harbor.verdict import Verdict
from rl360.ledger.outcomes import Outcome


class SandboxLimits(SandboxConfig):
    """Resources of one sandbox; a task's own `[environment]` values may lower them, never raise them."""


class JudgeOrder(JudgeConfig):
    """How a judged task's judge is asked: the run's choice. Where it is, and its key, only the sandbox server knows."""

    model: str = Field(min_length=1, max_length=200)
    timeout_s: float = Field(gt=0, description="all calls of an attempt, their pauses and waiting for room")


class RunRequest(BaseModel):
    """One attempt to run: a task, a session to sample from, budgets."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    instance_id: str = Field(min_length=1, description="task id")
    task_dir: str | None = Field(None, description="Harbor task directory on the sandbox server's host")
    attempt_id: str = Field(min_length=1, max_length=200, description="default: the session's id in base_url")
    group_id: str = ""
    run: str = ""
    step: int = Field(0, ge=0, lt=1 << 63)
    agent_name: str = "bash"
    base_url: str
    model: str = "openai/policy"
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    max_seq_len: int | None = Field(None, ge=1, lt=1 << 63)
    limits: SandboxLimits = SandboxLimits()
    max_turns: int = Field(8, ge=1, lt=1 << 63)
    queue_timeout_s: float = Field(60.0, gt=0)
    setup_timeout_s: float = Field(20.0, gt=0)
    agent_timeout_s: float = Field(60.0, gt=0)
    verifier_timeout_s: float = Field(20.0, gt=0)
    judge: JudgeOrder | None = None
    deadline_s: float = Field(180.0, gt=0, description="the caller waits this long; must cover the parts")
    resent: bool = Field(False, description="asked before, and the connection broke: it may have begun")
    session_server_instance_id: str | None = Field(None, description="whose attempt it is, to flush by")

    @model_validator(mode="before")
    @classmethod
    def _of_its_session(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("attempt_id") is not None:
            return given
        found = re.search(r"/sessions/([^/?#]+)", str(given.get("base_url")))
        return given | {"attempt_id": found[1]} if found else given

    @field_validator("sampling_params")
    @classmethod
    def _can_be_sent(cls, given: dict[str, Any]) -> dict[str, Any]:
        try:
            orjson.dumps(given)
        except TypeError as error:
            raise ValueError(f"cannot be sent on: {error}") from None
        return given


class Phases(BaseModel):
    """Seconds spent in each phase; a phase that was not reached is 0."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    queue: float = 0.0
    setup: float = 0.0
    agent: float = 0.0
    verify: float = 0.0
    judge: float = 0.0
    teardown: float = 0.0


class Cleanup(BaseModel):
    """Whether every process of the attempt's sandboxes is proven gone, and how that was seen."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    confirmed: bool
    evidence: str


class RunReply(BaseModel):
    """What became of an attempt. `reward` repeats `verdict.reward` for clients that know only that."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trial_id: str
    outcome: Outcome
    exit_status: str
    reward: float | None = None
    verdict: Verdict | None = None
    failure_phase: Literal["queue", "setup", "agent", "verify", "judge", "teardown"] | None = None
    retryable: bool = False
    agent_metrics: dict[str, float] = Field(default_factory=dict)
    phases: Phases = Phases()
    cleanup: Cleanup
    eval_report: dict[str, Any] = Field(default_factory=dict)
    detail: str = Field("", max_length=2000, description="one line for a person")
