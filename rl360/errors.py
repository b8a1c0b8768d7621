"""The errors a person can meet. Each message is one line: the value, the limit, the fix.

The command line prints the message and exits 2 for `BadInput`, 1 for every other `Rl360Error`.
Tasks decide by type who may retry (DESIGN, "Retries: who may"); nothing decides by message text.
"""

from __future__ import annotations


class Rl360Error(Exception):
    """Base of every error rl360 raises on purpose."""


class BadInput(Rl360Error):
    """The caller gave something that can never work: a bad config, a bad path, a bad body. Not retried."""


class CorruptObject(Rl360Error):
    """A stored object does not decode, or does not match its digest or schema. Not retried, never repaired."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"object {key}: {reason}")
        self.key = key
        self.reason = reason

    def __reduce__(self) -> tuple[type[CorruptObject], tuple[str, str]]:
        # a Prefect state carries its exception pickled; the default would call __init__ with one argument
        return type(self), (self.key, self.reason)


class ReplayMismatch(Rl360Error):
    """Replaying a committed step gave other weights than were recorded. Nothing may go on from here. Not retried."""


class WitnessDisagrees(Rl360Error):
    """Gradients reach other samples or positions than the filter booked as trained. The step changed nothing."""


class StoreUnavailable(Rl360Error):
    """The object store did not answer in time, or refused the credentials. Safe to retry."""


class ServiceError(Rl360Error):
    """A service did not answer in time, or answered outside its contract. Safe to retry: requests are idempotent."""


class EngineChurn(Rl360Error):
    """The engine set changed under a push. Safe to retry: the plan is rebuilt for the new set."""


class InfraLosses(Rl360Error):
    """A step lost more attempts to infrastructure than its config allows. Not retried; a person resumes."""


class CleanupUnconfirmed(Rl360Error):
    """Receivers of an earlier push are not proven gone. Never retried; a person confirms and resumes."""
