"""The verifier: a new sandbox over the agent's workspace runs `tests/test.sh`; what it wrote is read as hostile bytes.
A task may be judged by an LLM instead, or after a script that passed (docs/judges.md); either is signed here alone.

A reward exists only when test.sh wrote it: the agent's sandbox is proven gone before, `/logs/verifier` is a folder
only this sandbox ever sees, and everything in it is proven gone before the file is read. Missing, malformed, too
large, linked or not finite is never a number.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx

from rl360.errors import Rl360Error
from rl360.harbor.evidence import files_text, transcript_text
from rl360.harbor.judge import Evidence, Judge, JudgeError, JudgeSpent
from rl360.harbor.outcome import PASS_REWARD
from rl360.harbor.protocol import JudgeOrder, SandboxLimits
from rl360.harbor.task import JudgeTerms, Task
from rl360.harbor.verdict import JudgeReceipt, Verdict, finite, sign
from rl360.ledger.outcomes import Outcome
from rl360.sandboxes.provider import (
    Meter,
    SandboxGone,
    SandboxProvider,
    SandboxSpec,
    SandboxStartError,
    StopProof,
    StorageFull,
    Workspace,
    stop_surely,
)

MAX_REWARD_BYTES = 65_536
MAX_LOG_BYTES = 2000
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
SIGNALLED = 128
# where a home is what the agent wrote to, holds it, or is not there; `cd` follows what leads to it
NEW_HOME = (
    'case "$HOME" in /*) ;; *) export HOME=/tmp;; esac; '
    'here=$(pwd -P); home=$(CDPATH= cd -P -- "$HOME" 2>/dev/null && pwd -P | tr -s /); home=${home%/}; '
    'case "$here/" in "$home"/*) export HOME=/tmp;; esac; case "$home/" in "$here"/*) export HOME=/tmp;; esac; '
    "unset here home"
)
END_S = 60.0  # of the lease of a verifier's sandbox, for its files and its end
Found = tuple[float | None, Outcome | None, str]  # a reward or the problem, and a line about it


class RewardError(Rl360Error):
    """A reward file is there but is not a reward. The verdict is absent; the outcome is `verifier_error`."""


@dataclass(frozen=True)
class Bench:
    """What judging one attempt takes: the judge, how the run asks it, what the agent said, what it costs."""

    judge: Judge
    http: httpx.AsyncClient
    order: JudgeOrder
    transcript: Sequence[Mapping[str, Any]]
    spent: JudgeSpent


@dataclass(frozen=True)
class VerifyOrder:
    """What to verify, by which copy of the tests, whose it is, and the clocks: `turn` waits until a sandbox may start,
    `started` is told how that went, `start_s` and `stop_s` say what is left for either, `timed` runs the clock of a
    phase. `key` signs the verdict: the run's (rl360.harbor.verdict); `bench` is there for a task with judge terms."""

    task: Task
    workspace: Workspace
    meter: Meter
    tests: Path
    run: str
    attempt_id: str
    name: str
    labels: Mapping[str, str]
    limits: SandboxLimits
    timeout_s: float
    turn: Callable[[], Awaitable[None]]
    started: Callable[[bool, bool], None]
    start_s: Callable[[], float]
    stop_s: Callable[[], float]
    timed: Callable[[Literal["verify", "judge"]], AbstractContextManager[None]]
    key: bytes = field(repr=False)
    bench: Bench | None = None


@dataclass(frozen=True)
class Verification:
    """A verdict, or the reason there is none. `log`: the end of what test.sh printed, what the judge said, or what went
    wrong."""

    verdict: Verdict | None
    problem: Outcome | None
    log: str


async def verify(provider: SandboxProvider, order: VerifyOrder, stops: list[StopProof]) -> Verification:
    """Run the task's tests over the workspace, its judge, or both; the agent's sandbox must be proven gone already.

    The judge sees what the agent left, read before test.sh runs the agent's code. The proof that the verifier's own
    sandbox is gone is appended to `stops`, whatever happens.
    """
    terms, bench = order.task.judge, order.bench
    if terms is None:
        return _concluded(order, await _script(provider, order, stops))
    if bench is None:
        return Verification(None, Outcome.JUDGE_ERROR, "the task is judged by an LLM and there is no judge")
    with order.timed("judge"):
        evidence = await asyncio.to_thread(_evidence, order, terms, bench)
    script_reward = None
    if terms.mode == "after_script":
        script_reward, *_ = script = await _script(provider, order, stops)
        if script_reward is None or script_reward < PASS_REWARD:
            return _concluded(order, script)
    try:
        with order.timed("judge"):
            receipt = await bench.judge.ask(bench.http, bench.order, terms, evidence, bench.spent, script_reward)
    except JudgeError as error:
        return Verification(None, Outcome.JUDGE_ERROR, str(error))
    said = f"{receipt.model} at {receipt.host}: {receipt.score:g} of {terms.score_min:g} to {terms.score_max:g}"
    return _concluded(order, (terms.reward(receipt.score), None, said), receipt)


def _evidence(order: VerifyOrder, terms: JudgeTerms, bench: Bench) -> Evidence:
    task, files = order.task, None
    if terms.files != ():
        files = files_text(order.workspace.files, task.files, terms.files, terms.max_bytes)
    said = transcript_text(bench.transcript, task.instruction) if terms.transcript else None
    return Evidence(task.instruction, said, files)


async def _script(provider: SandboxProvider, order: VerifyOrder, stops: list[StopProof]) -> Found:
    await order.turn()  # nobody's time
    with order.timed("verify"):
        return await _run_script(provider, order, stops)


async def _run_script(provider: SandboxProvider, order: VerifyOrder, stops: list[StopProof]) -> Found:
    environment = order.task.config.environment
    start_s = order.start_s()
    spec = SandboxSpec(
        name=order.name,
        labels=order.labels,
        limits=order.limits,
        workspace=order.workspace,
        workdir=environment.workdir,
        read_only={"/tests": order.tests},
        with_logs=True,
        env={**environment.env, **order.task.config.verifier.env},
        start_timeout_s=start_s,
        image=environment.docker_image,
        network=environment.network_mode,
        disk_mb=environment.storage_mb,
        lifetime_s=start_s + order.timeout_s + END_S,
        stops=stops,
    )
    try:
        sandbox = await provider.create(spec)
    except SandboxStartError as error:
        order.started(False, error.refused)
        stops.extend([error.proof] if error.proof is not None else [])
        return (None, Outcome.SANDBOX_START, str(error))
    order.started(True, False)
    problem: Outcome | None = None
    try:
        result = await order.meter.exec(
            sandbox, f"{NEW_HOME}; bash /tests/test.sh", order.timeout_s, MAX_LOG_BYTES, ends=False
        )
        log = _tail(result.output)
        if result.timed_out:
            problem, log = Outcome.VERIFIER_TIMEOUT, f"test.sh ran longer than {order.timeout_s:g} s; {log}"
        elif result.exit_code > SIGNALLED:
            # the exit code of a test.sh that ended is ignored; one that was killed did not end
            problem, log = Outcome.VERIFIER_ERROR, f"test.sh was ended by signal {result.exit_code - 128}; {log}"
        else:
            await sandbox.carry(order.stop_s())
    except StorageFull:
        problem, log = Outcome.VERIFIER_ERROR, "test.sh wrote more than the task's storage_mb and was ended"
    except SandboxGone as error:
        problem, log = Outcome.VERIFIER_ERROR if error.by_contents else Outcome.SANDBOX_LOST, str(error)
    finally:
        stop = await stop_surely(sandbox, stops, order.stop_s())
    if problem is not None:
        return (None, problem, log)
    if not stop.confirmed:
        # something may still write the file, so what it says now is not what the verifier said
        return (None, Outcome.SANDBOX_LOST, f"verifier sandbox not proven gone: {stop.evidence}")
    try:
        reward = read_reward(order.workspace.logs)
    except RewardError as error:
        return (None, Outcome.VERIFIER_ERROR, str(error))
    if reward is None:
        return (None, Outcome.NO_VERDICT, f"test.sh wrote no reward file; {log}")
    return (reward, None, log)


def _concluded(order: VerifyOrder, found: Found, judge: JudgeReceipt | None = None) -> Verification:
    reward, problem, log = found
    if reward is None:
        return Verification(None, problem, log)
    verdict = sign(
        order.key,
        run=order.run,
        task_id=order.task.id,
        attempt_id=order.attempt_id,
        verifier_digest=order.task.verifier_digest,
        finished_at=time.time(),
        reward=reward,
        judge=judge,
    )
    return Verification(verdict, None, log)


def read_reward(folder: Path) -> float | None:
    """The reward in `folder`: reward.json before reward.txt; None when neither is there. Raises `RewardError`."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except PermissionError:
        raise RewardError("/logs/verifier: its permissions were taken away") from None
    try:
        data = _read_regular(descriptor, "reward.json")
        if data is not None:
            return _from_json(data)
        data = _read_regular(descriptor, "reward.txt")
        return None if data is None else _from_text(data)
    finally:
        os.close(descriptor)


def _read_regular(folder: int, name: str) -> bytes | None:
    try:
        # O_NONBLOCK: a fifo planted here must not stop the server
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RewardError(f"{name}: cannot be opened as a plain file ({error.strerror}); write one") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise RewardError(f"{name}: not a regular file with one name; write a regular file")
        if status.st_size > MAX_REWARD_BYTES:
            raise RewardError(f"{name}: {status.st_size} bytes, limit {MAX_REWARD_BYTES}; write only the reward")
        return os.read(descriptor, MAX_REWARD_BYTES + 1)
    finally:
        os.close(descriptor)


def _from_json(data: bytes) -> float:
    """`{"reward": number}`, further keys allowed. Scalars, NaN, infinities and booleans are refused."""

    def not_finite(word: str) -> float:
        raise RewardError(f"reward.json: {word} is not a finite number")

    try:
        value = json.loads(data.decode(), parse_constant=not_finite)
    except (ValueError, RecursionError) as error:
        raise RewardError(f"reward.json: not JSON ({str(error)[:100]})") from None
    if not isinstance(value, dict) or "reward" not in value:
        raise RewardError(f"reward.json: need an object with a `reward`, got {str(value)[:80]}")
    reward = value["reward"]
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise RewardError(f"reward.json: reward {str(reward)[:80]!r} is not a number")
    return _finite(reward, "reward.json")


def _from_text(data: bytes) -> float:
    text = data.decode("utf-8", "replace").strip()
    if not NUMBER.fullmatch(text):
        raise RewardError(f"reward.txt: {text[:80]!r} is not a plain number such as 1 or 0.5")
    return _finite(float(text), "reward.txt")


def _finite(value: int | float, name: str) -> float:
    try:
        return finite(value, "")
    except ValueError:
        raise RewardError(f"{name}: {str(value)[:80]} is not a finite number") from None


def _tail(output: bytes) -> str:
    return " ".join(output.decode("utf-8", "replace").split())[-500:]
