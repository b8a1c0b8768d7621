"""A verdict is a receipt: what the verifier said of one attempt, signed with a key of the run.

The key is HMAC-SHA256 of the run's name under the service token: the sandbox server signs with it, the flow checks with
it, and neither stores it. It is in no message, object, log, parameter or sandbox. A verdict counts when
`receipt_problem` finds nothing wrong with it; one that it finds something wrong with is refused, never repaired.

What the types promise: `Verdict` takes a `Signature`, and only `sign` makes one; the product calls it in one place
(rl360.harbor.verifier; a test holds that). What they cannot promise: Python keeps no constructor private, and a verdict
read from bytes has whatever signature stood there. So no type makes a reward count: the check does.
"""

from __future__ import annotations

import hmac
import json
import math
import struct
from typing import Any, Literal, NewType

from pydantic import BaseModel, ConfigDict, Field, field_validator

_KEY_LABEL = b"rl360 verdict key 1\n"
_LABEL = b"rl360 verdict 1\n"
_JUDGED_LABEL = b"rl360 verdict 2\n"

Signature = NewType("Signature", str)


class JudgeReceipt(BaseModel):
    """What an LLM judge said and how it was asked: `score` in the task's own range, `prompt_digest` the sha256 of the
    request's body, `host` of the judge's URL, `served_model`, `reply_id` and token counts as its reply names them,
    `script_reward` what test.sh gave before it. Data until a verdict that holds it is signed."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str = Field(min_length=1)
    served_model: str
    host: str = Field(min_length=1)
    prompt_digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    reply_id: str
    score: float
    script_reward: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Verdict(BaseModel):
    """What the verifier said of one attempt, with its signature over all of it but `written_by_verifier`.

    `reward` is finite; NaN, infinities and booleans are refused, so no failure can be dressed as a number.
    `verifier_digest` is the sha256 over the task's `tests/` tree: which verifier said so. `judge`: whose score the
    reward was made from; left out of bytes where none was asked.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    task_id: str = Field(min_length=1)
    attempt_id: str = Field(min_length=1)
    reward: float
    verifier_digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    finished_at: float = Field(description="unix seconds", allow_inf_nan=False)
    judge: JudgeReceipt | None = Field(None, exclude_if=lambda value: value is None)
    written_by_verifier: Literal[True] = True
    signature: Signature = Field(pattern=r"^[0-9a-f]{64}$")

    @field_validator("reward", mode="before")
    @classmethod
    def _finite_number(cls, value: object) -> float:
        return finite(value, "a reward")


def run_key(token: str, run: str) -> bytes:
    """The key of one run's verdicts: a receipt of another run, or of another deployment, does not verify with it."""
    return hmac.digest(token.encode(), _KEY_LABEL + run.encode(), "sha256")


def signed_bytes(
    run: str,
    task_id: str,
    attempt_id: str,
    verifier_digest: str,
    finished_at: float,
    reward: float,
    judge: JudgeReceipt | None = None,
) -> bytes:
    """What is signed: `rl360 verdict 1` and a newline; the four texts in this order as UTF-8, each after its length in
    bytes as a big-endian uint32; `finished_at` and `reward` as big-endian IEEE 754 doubles. Of a judged attempt the
    label is `rl360 verdict 2`, and the judge's receipt stands at the end: all its fields as ASCII JSON, keys sorted, no
    spaces."""
    texts = (text.encode() for text in (run, task_id, attempt_id, verifier_digest))
    named = b"".join(struct.pack(">I", len(text)) + text for text in texts)
    named += struct.pack(">dd", finite(finished_at, "a verdict's time"), finite(reward, "a reward"))
    if judge is None:
        return _LABEL + named
    return _JUDGED_LABEL + named + json.dumps(judge.model_dump(), sort_keys=True, separators=(",", ":")).encode()


def sign(key: bytes, **said: Any) -> Verdict:
    """The verdict, signed. `said`: what `signed_bytes` takes. ValueError for a number that is none. For the verifier
    alone."""
    return Verdict(**said, signature=_seal(key, signed_bytes(**said)))


def receipt_problem(verdict: Verdict, key: bytes, run: str) -> str | None:
    """Why this verdict is no receipt of the run's verifier, or None when it is one. `key`: of this run."""
    name = f"verdict of attempt {verdict.attempt_id}"
    if verdict.run != run:
        return f"{name} is of run {verdict.run!r}, not of {run!r}"
    try:
        names = (run, verdict.task_id, verdict.attempt_id, verdict.verifier_digest)
        said = signed_bytes(*names, verdict.finished_at, verdict.reward, verdict.judge)
    except ValueError as error:
        return f"{name}: {error}"
    if not hmac.compare_digest(_seal(key, said).encode(), verdict.signature.encode()):
        return f"{name} is not signed by the verifier of run {run}: changed since, or of another deployment's token"
    return None


def _seal(key: bytes, said: bytes) -> Signature:
    return Signature(hmac.digest(key, said, "sha256").hex())


def finite(value: object, what: str) -> float:
    """`value`, named `what` in the ValueError for one that is no finite number."""
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{what} is a finite number, got {value!r}")
    return number
