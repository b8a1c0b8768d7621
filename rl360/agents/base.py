"""What an agent is: an async function `agent(context) -> AgentEnd`, named by import path (`module:function`).

It samples from `context.base_url` (OpenAI chat completions of one session) and acts through `context.exec`; it runs on
the host, so the sandbox needs no network. It returns how it ended, or raises `AgentFailure` when infrastructure kept
it from going on; anything else it raises is a fault of the agent's code and becomes `unclassified`. Counters go to
`context.metrics` as it goes, so that a timeout keeps them.

An agent that has a method `mounts(folder) -> inside path -> host path` is given a folder of its own for the attempt, to
make there what its sandbox is to see, read-only, and finds it again in `context.folder`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from rl360.errors import Rl360Error
from rl360.harbor.outcome import ExitStatus
from rl360.sandboxes.provider import ExecResult


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
    `refused`: what the session refused since its last turn; an agent whose time is over then was kept by that."""

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
    refused: list[AgentFailure] = field(default_factory=list)


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
