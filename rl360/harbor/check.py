"""Does a task tell good work from none? Its oracle must be rewarded, doing nothing must not."""

from __future__ import annotations

import asyncio
import os
import secrets
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import httpx

from rl360.agents.base import Agent, AgentContext, AgentEnd
from rl360.errors import BadInput
from rl360.harbor.judge import Judge
from rl360.harbor.outcome import PASS_REWARD, ExitStatus
from rl360.harbor.protocol import JudgeOrder, RunReply, RunRequest
from rl360.harbor.runner import SLACK_S, Attempt, Runner, prepare
from rl360.harbor.task import Task, load_task, tree_digest
from rl360.ledger.outcomes import Outcome
from rl360.sandboxes.provider import SandboxProvider

MAX_AGENT_S = 600.0
MAX_VERIFIER_S = 600.0
MAX_JUDGE_S = 120.0
SETUP_S = 300.0  # an image may have to be pulled


@dataclass(frozen=True)
class TaskCheck:
    """One task's result. `problem` is None for a task that discriminates."""

    task: str
    path: str
    oracle: float | None
    nop: float | None
    problem: str | None
    seconds: float


async def oracle_agent(context: AgentContext) -> AgentEnd:
    """Runs the task's own solution."""
    left = context.deadline - asyncio.get_running_loop().time()
    result = await context.exec("bash /solution/solve.sh", max(0.1, left))
    said = " ".join(result.output.decode("utf-8", "replace").split())[:300]
    return AgentEnd(ExitStatus.SUBMITTED, "" if result.exit_code == 0 else f"solve.sh exit {result.exit_code}: {said}")


async def nop_agent(context: AgentContext) -> AgentEnd:
    """Does nothing."""
    return AgentEnd(ExitStatus.SUBMITTED)


AGENTS: dict[str, Agent] = {"oracle": oracle_agent, "nop": nop_agent}


def task_dirs(root: Path) -> list[Path]:
    """`root` itself when it is a task, else the task directories right under it, by plain paths."""
    root = Path(os.path.normpath(root))
    if (root / "task.toml").exists():
        return [root]
    if not root.is_dir():
        raise BadInput(f"{root}: no such directory; give a task directory or a folder of them")
    found = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not found:
        raise BadInput(f"{root}: holds no task directories; give a folder of Harbor tasks")
    return found


async def check_tasks(
    provider: SandboxProvider,
    directories: list[Path],
    concurrency: int,
    judge: Judge | None = None,
    judge_model: str = "",
) -> list[TaskCheck]:
    """Check each directory, `concurrency` tasks at once; the order of the results is that of `directories`. `judge` and
    the model it is asked for are for tasks that an LLM judges."""
    slots = asyncio.Semaphore(concurrency)
    order = None
    if judge is not None:
        order = JudgeOrder(model=judge_model, timeout_s=MAX_JUDGE_S, call_s=MAX_JUDGE_S, retries=3)
    async with httpx.AsyncClient(trust_env=False) as http:
        runner = Runner(provider, http, secrets.token_urlsafe(), judge)  # its verdicts are shown, never kept

        async def one(directory: Path) -> TaskCheck:
            async with slots:
                return await check_task(runner, directory, order)

        # a group and no gather: that ends with the first that is cancelled, while the others still stop their sandboxes
        async with asyncio.TaskGroup() as group:
            checks = [group.create_task(one(path)) for path in directories]
    return _named_once([check.result() for check in checks])


def _named_once(results: list[TaskCheck]) -> list[TaskCheck]:
    """A set of two tasks with one name is refused by a run; so each but the first is told."""
    first: dict[str, TaskCheck] = {}
    for result in results:
        if result.problem is None:
            first.setdefault(result.task, result)
    return [
        replace(result, problem=f"its name {result.task!r} is also that of {other.path}; rename one")
        if result.problem is None and (other := first[result.task]) is not result
        else result
        for result in results
    ]


async def check_task(runner: Runner, directory: Path, judge: JudgeOrder | None = None) -> TaskCheck:
    """Oracle and nop, one after the other, each in fresh sandboxes."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    try:
        task = await asyncio.to_thread(load_task, directory)
        if solution_dir(task) is None:
            raise BadInput(f"{task.path}: no solution/solve.sh, so nothing shows that it can be solved")
        if task.judge is not None and judge is None:
            raise BadInput(f"{task.path}: is judged by an LLM; give --judge-url and --judge-model")
        oracle = await _run(runner, task, "oracle", judge)
        nop = await _run(runner, task, "nop", judge)
    except BadInput as error:
        return TaskCheck(directory.name, str(directory), None, None, _why(error, directory), loop.time() - started)
    except OSError as error:
        why = f"not checked: {error.filename}: {error.strerror}"
        return TaskCheck(directory.name, str(directory), None, None, why, loop.time() - started)
    problem = problem_of(oracle, nop)
    return TaskCheck(task.id, str(directory), oracle.reward, nop.reward, problem, loop.time() - started)


def _why(error: BadInput, directory: Path) -> str:
    """Without the task's path, which is told beside it."""
    return str(error).removeprefix(os.path.abspath(directory)).lstrip(":/ ")


def solution_dir(task: Task) -> Path | None:
    """The task's solution, for tasks that have an oracle."""
    path = task.path / "solution"
    return path if (path / "solve.sh").is_file() else None


async def _run(runner: Runner, task: Task, agent: str, judge: JudgeOrder | None) -> RunReply:
    agent_s = min(MAX_AGENT_S, task.config.agent.timeout_sec)
    verifier_s = min(MAX_VERIFIER_S, task.config.verifier.timeout_sec)
    request = RunRequest(
        instance_id=task.id,
        task_dir=str(task.path),
        attempt_id=f"{task.path.name}-{agent}",
        run=f"check-{sha256(str(task.path).encode()).hexdigest()[:8]}",
        agent_name=agent,
        base_url="http://127.0.0.1:9/no-session",
        agent_timeout_s=agent_s,
        verifier_timeout_s=verifier_s,
        queue_timeout_s=1.0,
        setup_timeout_s=SETUP_S,
        judge=judge,
        deadline_s=agent_s + verifier_s + (0.0 if judge is None else judge.timeout_s) + 1.0 + SETUP_S + SLACK_S,
    )
    prepared = await asyncio.to_thread(prepare, request, runner.provider, AGENTS, runner.judge)
    if agent == "oracle" and (folder := solution_dir(task)) is not None:
        digest = await asyncio.to_thread(tree_digest, folder)
        solution = await runner.provider.publish(folder, digest)
        prepared = replace(prepared, read_only={"/solution": solution})
    return await runner.run(prepared, Attempt(request))


def problem_of(oracle: RunReply, nop: RunReply) -> str | None:
    """Why the task cannot be trusted; None when it can. What a sandbox failed at says nothing about it."""
    for name, reply in (("oracle", oracle), ("nop", nop)):
        if reply.outcome in (Outcome.SANDBOX_START, Outcome.SANDBOX_LOST):
            return f"not checked: {name}: {reply.outcome}: {reply.detail}"
    if oracle.verdict is None:
        return f"broken: the oracle got no verdict ({oracle.outcome}: {oracle.detail})"
    if oracle.verdict.reward < PASS_REWARD and oracle.verdict.judge is None:  # a judge may give its best to nobody
        said = oracle.detail or str(oracle.eval_report.get("verifier_log", ""))
        return f"broken: the oracle got {oracle.verdict.reward:g} ({said[-200:]})"
    if nop.verdict is None:
        return f"broken: doing nothing got no verdict ({nop.outcome}: {nop.detail})"
    if nop.verdict.reward >= oracle.verdict.reward:
        return f"does not discriminate: doing nothing got {nop.verdict.reward:g}"
    for name, reply in (("oracle", oracle), ("nop", nop)):
        if not reply.cleanup.confirmed:
            return f"{name}: cleanup unconfirmed: {reply.cleanup.evidence}"
    return None
