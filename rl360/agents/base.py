"""What an agent is: an async function `agent(context) -> AgentEnd`, named by import path (`module:function`).

It samples from `context.base_url` (OpenAI chat completions of one session) and acts through `context.exec`; it runs on
the host, so the sandbox needs no network. It returns how it ended, or raises `AgentFailure` when infrastructure kept
it from going on; anything else it raises is a fault of the agent's code and becomes `unclassified`. Counters go to
`context.metrics` as it goes, so that a timeout keeps them.

An agent that has a method `mounts(folder) -> inside path -> host path` is given a folder of its own for the attempt, to
make there what its sandbox is to see, read-only, and finds it again in `context.folder`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from rl360.errors import Rl360Error
from rl360.harbor.outcome import ExitStatus
from rl360.sandboxes.provider import ExecResult

SILENT_S, SILENT_SHARE = 5.0, 0.5  # what a model must be silent for, to have kept an agent until its time was over


@dataclass
class ModelCalls:
    """What the session owes an attempt, as seen from this host: nothing in a sandbox can claim it. Each request for a
    turn is `asked`, and then `answered` or `refused`; one that is cut off stays owed."""

    failure: AgentFailure | None = None  # the last refusal of infrastructure, when no turn came after it
    owed: list[float] = field(default_factory=list)  # event-loop clock: when what is not answered was asked for
    turn_at: float = 0.0  # and when the last turn came

    def asked(self) -> float:
        """Give it to the other two."""
        self.owed.append(asyncio.get_running_loop().time())
        return self.owed[-1]

    def answered(self, asked: float) -> None:
        self.owed.remove(asked)
        self.failure, self.turn_at = None, asyncio.get_running_loop().time()

    def refused(self, asked: float, failure: AgentFailure | None) -> None:
        """None: for what was asked, which says nothing of the model."""
        self.owed.remove(asked)
        self.failure = failure or self.failure


@dataclass
class AgentMetrics:
    """Counted while the agent runs; the names Miles' clients read. `completion_tokens` sums the replies' usage."""

    turns: int = 0
    completion_tokens: int = 0
    tool_calls: int = 0
    format_errors: int = 0
    retries: int = 0
    model_query_time_sum: float = 0.0
    env_execution_time_sum: float = 0.0

    def as_dict(self) -> dict[str, float]:
        return {name: float(value) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class AgentContext:
    """Everything an agent may use. `deadline`: event-loop clock; `exec(command, timeout_s, cap_bytes)` runs in the
    sandbox, its output cut at the run's limit where no cap is given. What is appended to `transcript` (chat messages)
    is what a judge of the task is shown of the conversation. `folder`: what `mounts` of the agent was given.
    `time_s`: what it was given in all; `calls`: its requests for turns, which say what kept one whose time is over."""

    instruction: str
    base_url: str
    model: str
    sampling_params: Mapping[str, Any]
    max_turns: int
    deadline: float
    exec: Callable[..., Awaitable[ExecResult]]
    http: httpx.AsyncClient
    metrics: AgentMetrics = field(default_factory=AgentMetrics)
    transcript: list[dict[str, Any]] = field(default_factory=list)
    folder: Path | None = None
    time_s: float = math.inf
    calls: ModelCalls = field(default_factory=ModelCalls)

    def kept_by(self) -> AgentFailure | None:
        """What kept an agent from going on that ended, or whose time is over: a refusal with no turn after it, or a
        model that is silent since more than half of all the agent's time. Less proves nothing: who asks at the end of
        its time, or ends while it is answered, has no excuse."""
        until = min(asyncio.get_running_loop().time(), self.deadline)
        silent_s = until - max(self.calls.turn_at, min(self.calls.owed, default=until))
        if self.calls.failure is None and silent_s > max(SILENT_S, SILENT_SHARE * self.time_s):
            said = f"its model was silent for the last {silent_s:.0f} s of the agent's {self.time_s:.0f} s"
            return AgentFailure(ExitStatus.GENERATION_ERROR, said, retryable=True)
        return self.calls.failure


@dataclass(frozen=True)
class AgentEnd:
    """How the agent ended by itself."""

    exit_status: ExitStatus
    detail: str = ""


class AgentFailure(Rl360Error):
    """Infrastructure kept the agent from going on: no verdict is sought."""

    def __init__(self, exit_status: ExitStatus, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.exit_status = exit_status
        self.retryable = retryable


Agent = Callable[[AgentContext], Awaitable[AgentEnd]]
