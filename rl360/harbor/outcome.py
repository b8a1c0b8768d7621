"""How an attempt ended, and what that makes it: one function from (exit status, verification) to an `Outcome`.

`MEANINGS` is the one table of what exit statuses mean: those of this server, and those that other `/run` servers and
the harnesses behind them use. A status that is not in it is `unclassified` and counted by its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rl360.harbor.verdict import Verdict
from rl360.ledger.outcomes import HAS_VERDICT, Outcome

PASS_REWARD = 1.0


class Boundary(StrEnum):
    """On whose side an attempt was lost: where to look first."""

    PROVIDER = "provider"  # what makes sandboxes, and the hosts they run on
    HARNESS = "harness"  # the agent's program
    MODEL = "model"  # sessions, gateway, engines
    VERIFIER = "verifier"  # the task's tests, or its judge
    OURS = "ours"  # rl360: its queue, its own end, what nobody knows


class ExitStatus(StrEnum):
    """How the part before the verifier ended. The names seen in the wild where one exists."""

    SUBMITTED = "Submitted"
    TURN_LIMIT = "TurnLimitExceeded"
    LENGTH_LIMIT = "SequenceLengthLimitExceeded"
    AGENT_TIMEOUT = "AgentTimeout"
    SANDBOX_LIMIT = "SandboxLimitExceeded"
    AGENT_EXITED = "AgentExited"
    QUEUE_TIMEOUT = "QueueTimeout"
    ENV_START = "EnvStartFailed"
    SANDBOX_LOST = "SandboxLost"
    SESSION_LOST = "SessionLost"
    GENERATION_ERROR = "GenerationError"
    NO_ENGINE = "NoEngine"
    AGENT_ERROR = "AgentError"
    INTERNAL_ERROR = "InternalError"
    ABORTED = "Aborted"


@dataclass(frozen=True)
class Meaning:
    """What an exit status says where there is no verdict. `verified`: the agent's work is on disk and was not cut short
    by infrastructure, so the verifier judges it, and what kept it from that is the outcome unless the status has one of
    its own (`ends`)."""

    outcome: Outcome
    boundary: Boundary
    verified: bool = False
    ends: bool = True


_DONE = Meaning(Outcome.UNCLASSIFIED, Boundary.OURS, verified=True, ends=False)  # without a verifier's problem: ours
_LATE = Meaning(Outcome.AGENT_TIMEOUT, Boundary.HARNESS, verified=True)
_NOT_STARTED = Meaning(Outcome.SANDBOX_START, Boundary.PROVIDER)
_NO_SESSION = Meaning(Outcome.SESSION_LOST, Boundary.MODEL)
_BROKEN_AGENT = Meaning(Outcome.UNCLASSIFIED, Boundary.HARNESS)

MEANINGS: dict[str, Meaning] = {
    ExitStatus.SUBMITTED: _DONE,
    ExitStatus.TURN_LIMIT: _DONE,
    ExitStatus.LENGTH_LIMIT: _DONE,
    ExitStatus.SANDBOX_LIMIT: _DONE,
    ExitStatus.AGENT_EXITED: _DONE,  # of a program that what the policy wrote runs beside, and may end
    ExitStatus.AGENT_TIMEOUT: _LATE,
    "TimeLimitExceeded": _LATE,
    ExitStatus.QUEUE_TIMEOUT: Meaning(Outcome.SANDBOX_START, Boundary.OURS),
    ExitStatus.ENV_START: _NOT_STARTED,
    "EnvStartTimeout": _NOT_STARTED,
    ExitStatus.SANDBOX_LOST: Meaning(Outcome.SANDBOX_LOST, Boundary.PROVIDER),
    ExitStatus.SESSION_LOST: _NO_SESSION,
    "NotFoundError": _NO_SESSION,  # of a harness's model client: the session's URL answered 404
    ExitStatus.GENERATION_ERROR: Meaning(Outcome.GENERATION_ERROR, Boundary.MODEL),
    ExitStatus.NO_ENGINE: Meaning(Outcome.NO_ENGINE, Boundary.MODEL),
    "VerifierTimeout": Meaning(Outcome.VERIFIER_TIMEOUT, Boundary.VERIFIER),
    ExitStatus.AGENT_ERROR: _BROKEN_AGENT,
    "Error: RuntimeError": _BROKEN_AGENT,
    ExitStatus.INTERNAL_ERROR: Meaning(Outcome.UNCLASSIFIED, Boundary.OURS),
    ExitStatus.ABORTED: Meaning(Outcome.ABORTED, Boundary.OURS),
}
VERIFIED_AFTER = frozenset(status for status, meaning in MEANINGS.items() if meaning.verified)

# where to look first when an attempt ended so: where a status that means it says, else with us
LOSSES: dict[Outcome, Boundary] = {
    **{meaning.outcome: meaning.boundary for meaning in MEANINGS.values()},
    Outcome.SANDBOX_START: Boundary.PROVIDER,
    Outcome.UNCLASSIFIED: Boundary.OURS,
    **dict.fromkeys((Outcome.VERIFIER_ERROR, Outcome.NO_VERDICT, Outcome.JUDGE_ERROR), Boundary.VERIFIER),
}
_LOST = frozenset((Outcome.JUDGE_ERROR, Outcome.SANDBOX_START, Outcome.SANDBOX_LOST))  # of a verifier: not its doing
# another try may end otherwise
RETRYABLE = frozenset(
    (Outcome.NO_ENGINE, Outcome.SANDBOX_START, Outcome.SANDBOX_LOST, Outcome.JUDGE_ERROR, Outcome.SESSION_LOST)
) | {Outcome.GENERATION_ERROR, Outcome.ABORTED}


def outcome_of(exit_status: str, verdict: Verdict | None, problem: Outcome | None) -> Outcome:
    """A verdict wins over a status. Without one: what kept the verifier or the judge from its work, before the agent's
    own end (no run may score a timeout that infrastructure lost), then the verifier's problem; a status nobody knows is
    `unclassified`."""
    if verdict is not None:
        if exit_status == ExitStatus.LENGTH_LIMIT:
            return Outcome.TRUNCATED
        return Outcome.PASSED if verdict.reward >= PASS_REWARD else Outcome.FAILED
    meaning = MEANINGS.get(exit_status)
    if meaning is None:
        return Outcome.UNCLASSIFIED
    if meaning.verified and problem is not None and (problem in _LOST or not meaning.ends):
        return problem
    return meaning.outcome


def boundary_of(outcome: Outcome, exit_status: str = "") -> Boundary | None:
    """On whose side an attempt of this outcome was lost; None when it has a verdict."""
    if outcome in HAS_VERDICT:
        return None
    meaning = MEANINGS.get(exit_status)
    return meaning.boundary if meaning is not None and meaning.outcome is outcome else LOSSES[outcome]
