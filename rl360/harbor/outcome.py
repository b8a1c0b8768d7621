"""How an attempt ended, and what that makes it: one function from (exit status, verification) to an `Outcome`."""

from __future__ import annotations

from enum import StrEnum

from rl360.harbor.verdict import Verdict
from rl360.ledger.outcomes import Outcome

PASS_REWARD = 1.0


class ExitStatus(StrEnum):
    """How the part before the verifier ended. The names seen in the wild where one exists."""

    SUBMITTED = "Submitted"
    TURN_LIMIT = "TurnLimitExceeded"
    LENGTH_LIMIT = "SequenceLengthLimitExceeded"
    AGENT_TIMEOUT = "AgentTimeout"
    SANDBOX_LIMIT = "SandboxLimitExceeded"
    QUEUE_TIMEOUT = "QueueTimeout"
    ENV_START = "EnvStartFailed"
    SANDBOX_LOST = "SandboxLost"
    SESSION_LOST = "SessionLost"
    GENERATION_ERROR = "GenerationError"
    NO_ENGINE = "NoEngine"
    AGENT_ERROR = "AgentError"
    ABORTED = "Aborted"


# the agent's work is on disk and was not cut short by infrastructure: the verifier judges it
VERIFIED_AFTER = frozenset(
    {
        ExitStatus.SUBMITTED,
        ExitStatus.TURN_LIMIT,
        ExitStatus.LENGTH_LIMIT,
        ExitStatus.AGENT_TIMEOUT,
        ExitStatus.SANDBOX_LIMIT,
    }
)

WITHOUT_VERDICT: dict[str, Outcome] = {
    ExitStatus.AGENT_TIMEOUT: Outcome.AGENT_TIMEOUT,
    ExitStatus.QUEUE_TIMEOUT: Outcome.SANDBOX_START,
    ExitStatus.ENV_START: Outcome.SANDBOX_START,
    ExitStatus.SANDBOX_LOST: Outcome.SANDBOX_LOST,
    ExitStatus.SESSION_LOST: Outcome.SESSION_LOST,
    ExitStatus.GENERATION_ERROR: Outcome.GENERATION_ERROR,
    ExitStatus.NO_ENGINE: Outcome.NO_ENGINE,
    ExitStatus.ABORTED: Outcome.ABORTED,
}

RETRYABLE = frozenset(
    {
        Outcome.SANDBOX_START,
        Outcome.SANDBOX_LOST,
        Outcome.SESSION_LOST,
        Outcome.GENERATION_ERROR,
        Outcome.NO_ENGINE,
        Outcome.ABORTED,
        Outcome.JUDGE_ERROR,
    }
)


def outcome_of(exit_status: str, verdict: Verdict | None, problem: Outcome | None) -> Outcome:
    """A verdict wins over a status. Without one: a judge that failed, before the agent's own end when it names
    infrastructure (no run may score a timeout that the judge lost), then the verifier's problem; a status nobody knows
    is `unclassified`."""
    if verdict is not None:
        if exit_status == ExitStatus.LENGTH_LIMIT:
            return Outcome.TRUNCATED
        return Outcome.PASSED if verdict.reward >= PASS_REWARD else Outcome.FAILED
    if exit_status in VERIFIED_AFTER and problem is Outcome.JUDGE_ERROR:
        return problem
    if exit_status in WITHOUT_VERDICT:
        return WITHOUT_VERDICT[exit_status]
    if exit_status in VERIFIED_AFTER and problem is not None:
        return problem
    return Outcome.UNCLASSIFIED
