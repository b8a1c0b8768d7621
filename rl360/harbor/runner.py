"""One attempt from start to end: set up, let the agent act, prove its sandbox gone, verify, tear down.

Each phase has its own clock, and all have one deadline, set when the request came: what a phase may take is never more
than is left when the later ones keep theirs. So an agent that uses all of its time is still verified, and the caller
still waits when the reply comes. A teardown that fails never spoils a verdict: it is reported in `cleanup`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import httpx

from rl360.agents.base import Agent, AgentContext, AgentEnd, AgentFailure, AgentMetrics
from rl360.errors import BadInput
from rl360.harbor.judge import Judge, JudgeSpent
from rl360.harbor.outcome import PASS_REWARD, RETRYABLE, VERIFIED_AFTER, ExitStatus, outcome_of
from rl360.harbor.protocol import Cleanup, Phases, RunReply, RunRequest, SandboxLimits
from rl360.harbor.task import Task, load_task
from rl360.harbor.verdict import Verdict, run_key
from rl360.harbor.verifier import Bench, Verification, VerifyOrder, verify
from rl360.ledger.outcomes import HAS_VERDICT, Outcome
from rl360.sandboxes.provider import (
    Meter,
    Sandbox,
    SandboxGone,
    SandboxNeeds,
    SandboxProvider,
    SandboxSpec,
    SandboxStartError,
    StopProof,
    StorageFull,
    Workspace,
    stop_surely,
)

log = logging.getLogger("rl360.sandbox")
PhaseName = Literal["queue", "setup", "agent", "verify", "judge", "teardown"]
# What nothing else of a request's deadline is for: stopping the agent, starting the verifier's sandbox, stopping that.
# Each may take its own most while the later ones keep what is reserved for them.
SLACK_S = 15.0
VERIFIER_START_S, START_RESERVE_S = 10.0, 5.0
STOP_DEADLINE_S, STOP_RESERVE_S = 10.0, 2.0
LEAST_S = 1.0
CLEAR_S = 30.0
AGENT_GRACE_S = 2.0  # for an agent to end when it is cancelled; then nobody waits for it any more


async def _until(deadline: float, work: Awaitable[AgentEnd]) -> AgentEnd:
    """What the agent returns, or a timeout at the deadline: then it is cancelled, and left alone if that does not end
    it. Its sandbox is stopped next, so it can do no more than talk. An error of its own clocks is its own, not ours."""
    job = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({job}, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
        if not done:
            raise AgentFailure(ExitStatus.AGENT_TIMEOUT, "the agent's time is over", retryable=False)
        return job.result()
    finally:
        if not job.done():
            job.cancel()
            await asyncio.wait({job}, timeout=AGENT_GRACE_S)
            if job.done() and not job.cancelled():
                job.exception()  # seen: it ended too late to say anything


async def _at_once(_limit_s: float) -> None:
    return


@dataclass
class Attempt:
    """What is known of an attempt so far."""

    request: RunRequest
    came: float = field(default_factory=lambda: asyncio.get_running_loop().time())  # the request, on the loop's clock
    trial_id: str = field(default_factory=lambda: uuid4().hex)
    exit_status: str = ExitStatus.ABORTED
    failure_phase: PhaseName | None = None
    detail: str = ""
    verdict: Verdict | None = None
    problem: Outcome | None = None
    metrics: AgentMetrics = field(default_factory=AgentMetrics)
    phases: dict[PhaseName, float] = field(default_factory=dict)
    stops: list[StopProof] = field(default_factory=list)
    workspace: Workspace | None = None
    meter: Meter | None = None
    tests: Path = Path()  # the copy that will judge it
    closing: bool = False
    ours: bool = False  # it runs on this server, and on no other
    left_behind: str | None = None
    verifier_log: str = ""
    transcript: list[dict[str, Any]] = field(default_factory=list)
    judging: JudgeSpent = field(default_factory=JudgeSpent)
    started: Callable[[bool, bool], None] = lambda _ready, _refused: None  # told how a sandbox's start went
    again: Callable[[float], Awaitable[None]] = _at_once  # waits, so long at most, until another may start
    refused: bool = False

    def __post_init__(self) -> None:
        self.deadline = self.came + self.request.deadline_s

    def left(self, most_s: float, reserved_s: float = 0.0) -> float:
        """Seconds for a part that may take `most_s`, when `reserved_s` stay for those after it."""
        return max(LEAST_S, min(most_s, self.deadline - asyncio.get_running_loop().time() - reserved_s))

    @contextlib.contextmanager
    def timed(self, phase: PhaseName) -> Iterator[None]:
        started = time.monotonic()  # the loop's own clock may count in milliseconds
        try:
            yield
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + time.monotonic() - started

    def failed(self, phase: PhaseName, status: str, detail: str) -> None:
        self.failure_phase, self.exit_status, self.detail = phase, status, detail

    def reply(self) -> RunReply:
        outcome = outcome_of(self.exit_status, self.verdict, self.problem)
        has_verdict = outcome in HAS_VERDICT
        unproven = [proof.evidence for proof in self.stops if not proof.confirmed]
        if self.left_behind is not None:
            unproven.append(self.left_behind)
        proven = "; ".join(proof.evidence for proof in self.stops) or "no sandbox was started"
        phases = Phases(**{name: round(seconds, 6) for name, seconds in self.phases.items()})
        times = {"agent_run_time": phases.agent, "eval_time": phases.verify + phases.judge}
        times["total_time"] = sum(self.phases.values())
        return RunReply(
            trial_id=self.trial_id,
            outcome=outcome,
            exit_status=self.exit_status,
            reward=None if self.verdict is None else self.verdict.reward,
            verdict=self.verdict,
            failure_phase=None if has_verdict else self.failure_phase,
            retryable=outcome in RETRYABLE,
            agent_metrics={**self.metrics.as_dict(), **times, **self.judging.as_metrics()},
            phases=phases,
            cleanup=Cleanup(confirmed=not unproven, evidence="; ".join(unproven) or proven),
            eval_report={"verifier_log": self.verifier_log} if self.verifier_log else {},
            detail=self.detail[:2000],
        )


@dataclass(frozen=True)
class Prepared:
    """A request checked before it is queued: what it needs is known to exist."""

    request: RunRequest
    task: Task
    agent: Agent
    limits: SandboxLimits
    agent_timeout_s: float
    verifier_timeout_s: float
    read_only: Mapping[str, Path] = field(default_factory=dict)

    @property
    def judge_s(self) -> float:
        return 0.0 if self.request.judge is None else self.request.judge.timeout_s

    @property
    def verify_s(self) -> float:
        """What is kept for the verdict whatever came before."""
        return self.verifier_timeout_s + self.judge_s


def prepare(
    request: RunRequest, provider: SandboxProvider, agents: Mapping[str, Agent], judge: Judge | None = None
) -> Prepared:
    """Check everything that can be checked without running. Raises `BadInput`."""
    parts = {
        "queue_timeout_s": request.queue_timeout_s,
        "setup_timeout_s": request.setup_timeout_s,
        "agent_timeout_s": request.agent_timeout_s,
        "verifier_timeout_s": request.verifier_timeout_s,
        "judge.timeout_s": 0.0 if request.judge is None else request.judge.timeout_s,
        "slack": SLACK_S,
    }
    total = sum(parts.values())
    if request.deadline_s < total:
        summed = " + ".join(f"{name} {value:g}" for name, value in parts.items() if value)
        raise BadInput(f"deadline_s {request.deadline_s:g} < {summed} = {total:g}; raise it or lower a part")
    if request.agent_name not in agents:
        raise BadInput(f"agent_name {request.agent_name!r} is not one of {', '.join(sorted(agents))}")
    if request.task_dir is None:
        raise BadInput(f"task_dir is missing for instance_id {request.instance_id!r}; give the task's directory")
    try:
        task = load_task(request.task_dir)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise BadInput(f"task_dir {request.task_dir[:80]!r}...: no path is so long; give the folder") from None
    if request.instance_id.endswith(f"/{task.id}"):  # of one of several sources
        task = task.model_copy(update={"id": request.instance_id})
    environment = task.config.environment
    needs = SandboxNeeds(environment.network_mode, environment.docker_image)
    refusal = provider.refusal(needs)
    if refusal is not None:
        raise BadInput(f"{task.path}: {refusal}")
    if task.judge is not None and request.judge is None:
        raise BadInput(f"{task.path}: is judged by an LLM; set judge.model and deadlines.judge_s in the run's config")
    if task.judge is not None and judge is None:
        raise BadInput(f"{task.path}: is judged by an LLM; start this sandbox server with --judge-url")
    lowered = {
        "memory_mb": min(request.limits.memory_mb, environment.memory_mb),
        "cpus": min(request.limits.cpus, environment.cpus),
        "reserved_cpus": min(request.limits.reserved_cpus, environment.cpus),
    }
    return Prepared(
        request=request,
        task=task,
        agent=agents[request.agent_name],
        limits=request.limits.model_copy(update=lowered),
        agent_timeout_s=min(request.agent_timeout_s, task.config.agent.timeout_sec),
        verifier_timeout_s=min(request.verifier_timeout_s, task.config.verifier.timeout_sec),
    )


class Runner:
    """Runs prepared attempts on one provider. `token`: the deployment's, from which each run's verdict key follows."""

    def __init__(
        self, provider: SandboxProvider, http: httpx.AsyncClient, token: str, judge: Judge | None = None
    ) -> None:
        self.provider = provider
        self.http = http
        self.judge = judge
        self._token = token

    async def run(self, prepared: Prepared, attempt: Attempt) -> RunReply:
        """Always a reply: a cancelled attempt is torn down like any other and comes back `aborted`."""
        try:
            sandbox = await self._set_up(prepared, attempt)
            attempt.started(sandbox is not None, attempt.refused)
            if sandbox is not None:
                try:
                    with attempt.timed("agent"):
                        await self._act(prepared, attempt, sandbox)
                    if attempt.exit_status in VERIFIED_AFTER:
                        with attempt.timed("teardown"):
                            await self._carry(prepared, attempt, sandbox)
                finally:
                    with attempt.timed("teardown"):
                        reserved_s = START_RESERVE_S + prepared.verify_s + STOP_RESERVE_S
                        stop_s = attempt.left(STOP_DEADLINE_S, reserved_s)
                        proof = await stop_surely(sandbox, attempt.stops, stop_s)
                if not proof.confirmed:
                    # what still lives could change the files under the verifier's eyes
                    attempt.failed("teardown", ExitStatus.SANDBOX_LOST, proof.evidence)
                elif attempt.exit_status in VERIFIED_AFTER:
                    await self._verify(prepared, attempt)
        except asyncio.CancelledError:
            if attempt.verdict is None:
                attempt.exit_status, attempt.detail = ExitStatus.ABORTED, "cancelled"
        except Exception as error:  # a provider's adapter, or a bug: an outcome all the same, and torn down
            log.exception("attempt %s", attempt.request.attempt_id)
            if attempt.verdict is None:
                attempt.exit_status = ExitStatus.INTERNAL_ERROR
                attempt.detail = f"{type(error).__name__}: {error}"[:500]
        finally:
            attempt.closing = True
            self._excuse(attempt)
            with attempt.timed("teardown"):
                await self._clear(attempt)
        return attempt.reply()

    async def _set_up(self, prepared: Prepared, attempt: Attempt) -> Sandbox | None:
        request, task = prepared.request, prepared.task
        try:
            with attempt.timed("setup"):
                async with asyncio.timeout(request.setup_timeout_s) as clock:
                    workspace = await self.provider.new_workspace(request_key(request), task.files)
                    attempt.workspace = workspace
                    attempt.meter = self.provider.meter(workspace, task.config.environment.storage_mb)
                    attempt.tests = await self._tests(task)
                    mounts = await asyncio.to_thread(_mounts_of, prepared.agent, workspace)
                    spec = SandboxSpec(
                        name=request_key(request),
                        labels=labels_of(request),
                        limits=prepared.limits,
                        workspace=workspace,
                        workdir=task.config.environment.workdir,
                        read_only={**prepared.read_only, **mounts},
                        env=task.config.environment.env,
                        start_timeout_s=max(LEAST_S, (clock.when() or 0.0) - asyncio.get_running_loop().time()),
                        image=task.config.environment.docker_image,
                        network=task.config.environment.network_mode,
                        disk_mb=task.config.environment.storage_mb,
                        lifetime_s=request.deadline_s,
                        stops=attempt.stops,
                    )
                # outside: a clock that ends a create from without loses how the start was ended
                return await self.provider.create(spec)
        except TimeoutError:
            detail = f"sandbox not ready within {request.setup_timeout_s:g} s"
            attempt.failed("setup", ExitStatus.ENV_START, detail)
        except SandboxStartError as error:
            attempt.stops.extend([error.proof] if error.proof is not None else [])
            attempt.refused = error.refused
            attempt.failed("setup", ExitStatus.ENV_START, str(error))
        except (BadInput, OSError) as error:
            attempt.failed("setup", ExitStatus.ENV_START, str(error))
        return None

    async def _tests(self, task: Task) -> Path:
        """The copy of the tests that judges, by the digest that is signed: from before the agent began."""
        scripted = task.judge is None or task.judge.mode != "only"
        return await self.provider.publish(task.tests_dir, task.verifier_digest) if scripted else task.tests_dir

    async def _act(self, prepared: Prepared, attempt: Attempt, sandbox: Sandbox) -> None:
        assert attempt.meter is not None
        context = AgentContext(
            instruction=prepared.task.instruction,
            base_url=prepared.request.base_url.rstrip("/"),
            model=prepared.request.model,
            sampling_params=prepared.request.sampling_params,
            max_turns=prepared.request.max_turns,
            deadline=asyncio.get_running_loop().time() + prepared.agent_timeout_s,
            exec=partial(attempt.meter.exec, sandbox),
            http=self.http,
            metrics=attempt.metrics,
            transcript=attempt.transcript,
            folder=_agent_folder(sandbox.spec.workspace),
            time_s=prepared.agent_timeout_s,
        )
        try:
            end = await _until(context.deadline, prepared.agent(context))
            attempt.exit_status, attempt.detail = end.exit_status, end.detail
        except AgentFailure as error:
            late = error.exit_status == ExitStatus.AGENT_TIMEOUT
            error = (context.kept_by() if late else None) or error  # what the agent's time went into
            attempt.failed("agent", error.exit_status, str(error))
        except SandboxGone as error:
            status = ExitStatus.SANDBOX_LIMIT if error.by_contents else ExitStatus.SANDBOX_LOST
            attempt.failed("agent", status, str(error))
        except StorageFull:
            detail = f"workspace over {prepared.task.config.environment.storage_mb} MB or too many files"
            attempt.failed("agent", ExitStatus.SANDBOX_LIMIT, detail)
        except Exception as error:  # plug-in code may raise anything; it is named, never scored
            attempt.failed("agent", ExitStatus.AGENT_ERROR, f"{type(error).__name__}: {error}"[:500])

    async def _carry(self, prepared: Prepared, attempt: Attempt, sandbox: Sandbox) -> None:
        """Have the agent's files on this host; without them there is nothing to judge."""
        try:
            await sandbox.carry(attempt.left(STOP_DEADLINE_S, START_RESERVE_S + prepared.verify_s + STOP_RESERVE_S))
        except SandboxGone as error:
            status = ExitStatus.SANDBOX_LIMIT if error.by_contents else ExitStatus.SANDBOX_LOST
            attempt.failed("teardown", status, str(error))

    async def _verify(self, prepared: Prepared, attempt: Attempt) -> None:
        request = prepared.request
        assert attempt.workspace is not None
        assert attempt.meter is not None
        after_s = prepared.verify_s + STOP_RESERVE_S

        async def turn() -> None:
            with attempt.timed("queue"):
                await attempt.again(attempt.deadline - asyncio.get_running_loop().time() - VERIFIER_START_S - after_s)

        order = VerifyOrder(
            task=prepared.task,
            workspace=attempt.workspace,
            meter=attempt.meter,
            tests=attempt.tests,
            run=request.run,
            attempt_id=request.attempt_id,
            name=f"%verifier/{request_key(request)}",  # no attempt's key begins so
            labels=labels_of(request),
            limits=prepared.limits,
            timeout_s=prepared.verifier_timeout_s,
            turn=turn,
            started=attempt.started,
            start_s=lambda: attempt.left(VERIFIER_START_S, after_s),
            stop_s=lambda: attempt.left(STOP_DEADLINE_S, prepared.judge_s),
            timed=attempt.timed,
            key=run_key(self._token, request.run),
            bench=Bench(self.judge, self.http, request.judge, attempt.transcript, attempt.judging)
            if self.judge is not None and request.judge is not None
            else None,
        )
        try:
            result = await verify(self.provider, order, attempt.stops)
        except OSError as error:  # the host's disk or descriptors: the verifier did not speak
            result = Verification(None, Outcome.SANDBOX_LOST, f"host: {error}")
        attempt.verdict, attempt.problem, attempt.verifier_log = result.verdict, result.problem, result.log
        if result.problem is not None:
            attempt.failure_phase = "judge" if result.problem is Outcome.JUDGE_ERROR else "verify"
            attempt.detail = f"{attempt.detail}; {result.log}" if attempt.detail else result.log

    def _excuse(self, attempt: Attempt) -> None:
        """No attempt is scored a failure while this host had no room, unless it had filled its own."""
        if attempt.meter is None:
            return
        attempt.meter.close()
        passed = attempt.verdict is not None and attempt.verdict.reward >= PASS_REWARD
        if attempt.meter.full and not (attempt.meter.over or passed) and attempt.exit_status in VERIFIED_AFTER:
            attempt.verdict, attempt.problem, attempt.failure_phase = None, Outcome.SANDBOX_LOST, "teardown"
            attempt.detail = f"the host's disk was full meanwhile; {attempt.detail}"

    async def _clear(self, attempt: Attempt) -> None:
        """Delete the workspace unless something unproven may still use it; then it stays for `reap`."""
        if attempt.workspace is None or not all(proof.confirmed for proof in attempt.stops):
            return
        job = asyncio.ensure_future(self.provider.remove_workspace(attempt.workspace))
        done, _ = await asyncio.wait({job}, timeout=attempt.left(CLEAR_S))
        if not done:
            job.cancel()
            attempt.left_behind = f"{attempt.workspace.path}: not deleted in time"
        elif (error := job.exception()) is not None:  # the verdict is there already
            attempt.left_behind = f"{attempt.workspace.path}: not deleted: {type(error).__name__}: {error}"[:500]
        else:
            attempt.left_behind = job.result()


def _agent_folder(workspace: Workspace) -> Path:
    return workspace.path / "agent"


def _mounts_of(agent: Agent, workspace: Workspace) -> Mapping[str, Path]:
    """What an agent with `mounts` wants its sandbox to see."""
    mounts = getattr(agent, "mounts", None)
    if mounts is None:
        return {}
    folder = _agent_folder(workspace)
    folder.mkdir()
    folder.chmod(0o755)
    return mounts(folder)


def request_key(request: RunRequest) -> str:
    """Which attempt this is: attempt ids repeat from run to run, and either may hold a slash."""
    return f"{request.run.replace('%', '%25').replace('/', '%2F')}/{request.attempt_id}"


def labels_of(request: RunRequest) -> dict[str, str]:
    """What a stray sandbox is found by."""
    labels = {"run": request.run, "step": str(request.step), "group": request.group_id, "attempt": request.attempt_id}
    return {name: value for name, value in labels.items() if value}
