"""Verdicts for tests: signed as the verifier signs, with the token that tests give their services."""

from __future__ import annotations

from typing import Any

from rl360.harbor.verdict import Verdict, run_key, sign

TOKEN = "t" * 16
DIGEST = "ab" * 32


def verdict(
    attempt_id: str, reward: Any, *, task_id: str = "chores-rename", run: str = "demo", token: str = TOKEN
) -> Verdict:
    """What the verifier of `run` says of this attempt."""
    said = {"run": run, "task_id": task_id, "attempt_id": attempt_id, "verifier_digest": DIGEST}
    return sign(run_key(token, run), finished_at=1.0, reward=reward, **said)


def renamed(old: Verdict, **changes: str) -> Verdict:
    """The same reward, said of another attempt, task or run."""
    names = {"attempt_id": old.attempt_id, "task_id": old.task_id, "run": old.run}
    return verdict(reward=old.reward, **{**names, **changes})
