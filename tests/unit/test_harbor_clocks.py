"""Budgets nest: whatever the parts of an attempt take, its reply comes in time, and an agent that used all of its time
is verified. In virtual time, over a provider that takes as long as it is told to."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from rl360.agents import bash_agent
from rl360.agents.base import AgentContext, AgentEnd
from rl360.errors import BadInput
from rl360.harbor import app as app_module
from rl360.harbor.app import Attempts, FlushRequest
from rl360.harbor.outcome import ExitStatus
from rl360.harbor.protocol import RunReply, RunRequest
from rl360.harbor.runner import SLACK_S, Attempt, Prepared, Runner, prepare, request_key
from rl360.harbor.task import load_task
from rl360.sandboxes.provider import ExecResult, SandboxGone, SandboxSpec, SandboxStartError, StopProof, Workspace
from rl360.sandboxes.rooted import DiskMeter, Watch
from rl360.tasksets.harbor_files import BUILTIN_DIR
from tests.unit.virtual_time import gate, run_virtual

TASK = load_task(next(path for path in sorted(BUILTIN_DIR.iterdir()) if path.is_dir()))
QUEUE_S, SETUP_S, AGENT_S, VERIFIER_S = 60.0, 20.0, 60.0, 20.0
DEADLINE_S = QUEUE_S + SETUP_S + AGENT_S + VERIFIER_S + SLACK_S
# shares of the slack that a stop and a start have for sure, see rl360.harbor.runner
STOP_S, START_S, LAST_STOP_S = 6.0, 5.0, 2.0


@dataclass
class Takes:
    """Seconds of each part; infinity hangs until its own deadline ends it."""

    setup: float = 1.0
    agent: float = 1.0
    stop: float = 0.1
    start: float = 0.1
    verify: float = 1.0
    last_stop: float = 0.1
    remove: float = 0.0


class SlowSandbox:
    def __init__(self, takes: Takes, spec: SandboxSpec) -> None:
        self.takes, self.spec = takes, spec

    async def exec(self, command: str, timeout_s: float, cap_bytes: int | None = None) -> ExecResult:
        if not self.spec.with_logs:
            return ExecResult(0, b"", 0, 0.0)
        await asyncio.sleep(min(self.takes.verify, timeout_s))
        late = self.takes.verify > timeout_s
        if not late:
            (self.spec.workspace.logs / "reward.txt").write_text("1")
        return ExecResult(124 if late else 0, b"", 0, 0.0, late)

    async def carry(self, deadline_s: float) -> None:
        return

    async def stop(self, deadline_s: float = 10.0) -> StopProof:
        takes = self.takes.last_stop if self.spec.with_logs else self.takes.stop
        await asyncio.sleep(min(takes, deadline_s))
        return StopProof(takes <= deadline_s, "seen", takes)

    def pids(self) -> None:
        return None


@dataclass
class SlowProvider:
    folder: Path
    takes: Takes
    made: list[SandboxSpec] = field(default_factory=list)
    image: str | None = None

    def refusal(self, _: Any) -> str | None:
        return None

    async def new_workspace(self, name: str, source: Path | None) -> Workspace:
        made = Workspace(self.folder / f"w{len(self.made)}")
        made.files.mkdir(parents=True, exist_ok=True)
        made.logs.mkdir(exist_ok=True)
        return made

    async def publish(self, source: Path, digest: str) -> Path:
        return source

    async def create(self, spec: SandboxSpec) -> SlowSandbox:
        self.made.append(spec)
        takes = self.takes.start if spec.with_logs else self.takes.setup
        await asyncio.sleep(min(takes, spec.start_timeout_s))
        if takes > spec.start_timeout_s:
            raise SandboxStartError("not ready", StopProof(True, "gone", 0.0))
        return SlowSandbox(self.takes, spec)

    async def remove_workspace(self, workspace: Workspace) -> str | None:
        await asyncio.sleep(self.takes.remove)
        return None

    def meter(self, workspace: Workspace, storage_mb: int) -> DiskMeter:
        return DiskMeter(Watch(self.folder), workspace, storage_mb << 20)


def request_of(name: str = "a", **more: Any) -> RunRequest:
    parts = {"queue_timeout_s": QUEUE_S, "setup_timeout_s": SETUP_S, "agent_timeout_s": AGENT_S}
    parts |= {"verifier_timeout_s": VERIFIER_S, "deadline_s": DEADLINE_S, **more}
    return RunRequest(instance_id=TASK.id, task_dir=str(TASK.path), attempt_id=name, base_url="http://h", **parts)


def agent_that_takes(seconds: float) -> Any:
    async def agent(_: AgentContext) -> AgentEnd:
        await asyncio.sleep(seconds)
        return AgentEnd(ExitStatus.SUBMITTED)

    return agent


async def carried(provider: SlowProvider, agent: Any, http: Any = None) -> tuple[RunReply, float]:
    """The reply, and how long after the request it came."""
    loop = asyncio.get_running_loop()
    request, started = request_of(), loop.time()
    prepared = Prepared(request, TASK, agent, request.limits, AGENT_S, VERIFIER_S)
    attempt = Attempt(request)
    await asyncio.sleep(QUEUE_S)  # all of the queue's time, too
    reply = await Runner(cast(Any, provider), http, "t" * 16).run(prepared, attempt)
    return reply, loop.time() - started


def test_an_agent_that_uses_all_of_its_time_is_verified(tmp_path: Path) -> None:
    takes = Takes(*(most - 0.01 for most in (SETUP_S, math.inf, STOP_S, START_S, VERIFIER_S, LAST_STOP_S)))
    reply, seconds = run_virtual(carried(SlowProvider(tmp_path, takes), agent_that_takes(math.inf)))
    assert (reply.outcome, reply.exit_status, reply.reward) == ("passed", ExitStatus.AGENT_TIMEOUT, 1.0)
    assert reply.phases.agent == pytest.approx(AGENT_S) and reply.phases.verify >= VERIFIER_S - 0.1
    assert seconds <= DEADLINE_S


def test_waiting_is_never_agent_time(tmp_path: Path) -> None:
    """Two attempts on one slot, each with an agent that uses all it has: the second waits for the whole first one."""
    provider = SlowProvider(tmp_path, Takes())
    agents = {"bash": agent_that_takes(math.inf)}

    async def both() -> list[RunReply]:
        attempts = Attempts(Runner(cast(Any, provider), cast(Any, None), "t" * 16), gate(1), 8)
        orders = [request_of(name, queue_timeout_s=100.0, deadline_s=DEADLINE_S + 40) for name in "ab"]
        return await asyncio.gather(*(attempts.submit(order, "", agents) for order in orders))

    first, second = run_virtual(both())
    assert [reply.exit_status for reply in (first, second)] == [ExitStatus.AGENT_TIMEOUT] * 2
    assert [reply.outcome for reply in (first, second)] == ["passed"] * 2
    assert first.phases.queue == 0 and second.phases.queue > AGENT_S
    assert first.phases.agent == second.phases.agent == pytest.approx(AGENT_S)


def test_an_agent_that_does_not_heed_its_end_is_verified_too(tmp_path: Path) -> None:
    async def deaf(_: AgentContext) -> AgentEnd:
        ends = asyncio.get_running_loop().time() + 3600
        while (left := ends - asyncio.get_running_loop().time()) > 0:
            try:
                await asyncio.sleep(left)
            except asyncio.CancelledError:
                if asyncio.get_running_loop().is_running() and left < 3000:
                    raise
        return AgentEnd(ExitStatus.SUBMITTED)

    async def go() -> tuple[RunReply, float]:
        found = await carried(SlowProvider(tmp_path, Takes(agent=math.inf)), deaf)
        await asyncio.sleep(1000)  # so that the loop can end it
        return found

    reply, seconds = run_virtual(go())
    assert (reply.outcome, reply.exit_status) == ("passed", ExitStatus.AGENT_TIMEOUT)
    assert seconds < DEADLINE_S


def test_a_timeout_of_the_agents_own_is_a_fault_of_the_agent(tmp_path: Path) -> None:
    """Not its deadline: it had time left, and a clock of its own ended something."""

    async def hasty(_: AgentContext) -> AgentEnd:
        async with asyncio.timeout(1.0):
            await asyncio.sleep(5)
        return AgentEnd(ExitStatus.SUBMITTED)

    reply, _ = run_virtual(carried(SlowProvider(tmp_path, Takes()), hasty))
    assert (reply.outcome, reply.exit_status, reply.reward) == ("unclassified", ExitStatus.AGENT_ERROR, None)


@pytest.mark.parametrize("fault", [RuntimeError("adapter"), OSError("disk"), TimeoutError(), KeyError("x")])
def test_a_teardown_that_fails_spoils_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    async def fails(*_: object) -> None:
        raise fault

    monkeypatch.setattr(SlowProvider, "remove_workspace", fails)
    reply, _ = run_virtual(carried(SlowProvider(tmp_path, Takes()), agent_that_takes(1.0)))
    assert (reply.outcome, reply.reward) == ("passed", 1.0)
    assert not reply.cleanup.confirmed and "not deleted" in reply.cleanup.evidence


def test_an_adapter_that_raises_anything_gives_an_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, where in (("create", "RuntimeError: odd"), ("publish", "RuntimeError: odd")):
        with monkeypatch.context() as patch:

            async def odd(*_: object) -> None:
                raise RuntimeError("odd")

            patch.setattr(SlowProvider, name, odd)
            reply, _ = run_virtual(carried(SlowProvider(tmp_path / name, Takes()), agent_that_takes(1.0)))
        assert (reply.outcome, reply.exit_status) == ("unclassified", ExitStatus.INTERNAL_ERROR)
        assert where in reply.detail and reply.cleanup.confirmed


class Unproven(SlowProvider):
    """Makes sandboxes of which nobody knows whether they are gone; its folders take their time."""

    removed = False

    async def new_workspace(self, name: str, source: Path | None) -> Workspace:
        await asyncio.sleep(SETUP_S - 5.0)
        return await super().new_workspace(name, source)

    async def create(self, spec: SandboxSpec) -> SlowSandbox:
        self.made.append(spec)
        try:
            await asyncio.sleep(spec.start_timeout_s)
        except asyncio.CancelledError:
            spec.stops.append(StopProof(False, "nobody knows", 0.0))
            raise
        await asyncio.sleep(3.0)  # to end it
        raise SandboxStartError("not ready", StopProof(False, "nobody knows", 3.0))

    async def remove_workspace(self, workspace: Workspace) -> str | None:
        self.removed = True
        return None


@pytest.mark.parametrize("flushed", [False, True])
def test_a_start_that_ends_late_or_is_flushed_says_how_it_was_ended(tmp_path: Path, flushed: bool) -> None:
    provider = Unproven(tmp_path, Takes())

    async def go() -> RunReply:
        job = asyncio.ensure_future(carried(provider, agent_that_takes(1.0)))
        await asyncio.sleep(QUEUE_S + SETUP_S - 4.0)
        if flushed:
            job.cancel()
        return (await job)[0]

    reply = run_virtual(go())
    assert reply.outcome == ("aborted" if flushed else "sandbox_start")
    assert not reply.cleanup.confirmed and reply.cleanup.evidence == "nobody knows" and not provider.removed
    assert provider.made[0].start_timeout_s == pytest.approx(5.0), "what its folders left of the setup's time"


def test_what_may_still_live_holds_its_room_for_as_long_as_its_lease(tmp_path: Path) -> None:
    async def go() -> None:
        provider = SlowProvider(tmp_path, Takes(stop=math.inf))
        attempts = Attempts(Runner(cast(Any, provider), cast(Any, None), "t" * 16), gate(1), 8)
        reply = await attempts.submit(request_of(), "", {"bash": agent_that_takes(1.0)})
        assert reply.outcome == "sandbox_lost" and not reply.cleanup.confirmed
        assert attempts.gate.waves.live == 1 and attempts.counts()["held_unconfirmed"] == 1
        await asyncio.sleep(DEADLINE_S + 1.0)
        assert attempts.gate.waves.live == 0 and attempts.counts()["held_unconfirmed"] == 0
        assert attempts.gate.reservations.left == attempts.gate.reservations.room

    run_virtual(go())


@pytest.mark.parametrize("by_contents", [False, True])
def test_a_timeout_whose_verifier_the_host_lost_is_no_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_contents: bool
) -> None:
    async def gone(*_: object) -> None:
        raise SandboxGone("gone", by_contents=by_contents)

    monkeypatch.setattr(SlowSandbox, "exec", gone)
    reply, _ = run_virtual(carried(SlowProvider(tmp_path, Takes()), agent_that_takes(math.inf)))
    assert reply.exit_status == ExitStatus.AGENT_TIMEOUT
    assert reply.outcome == ("agent_timeout" if by_contents else "sandbox_lost")


def test_nor_is_one_whose_verifier_is_not_proven_gone_or_whose_host_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply, _ = run_virtual(carried(SlowProvider(tmp_path / "a", Takes(last_stop=math.inf)), agent_that_takes(math.inf)))
    assert (reply.outcome, reply.reward) == ("sandbox_lost", None) and not reply.cleanup.confirmed

    create = SlowProvider.create

    async def full(self: SlowProvider, spec: SandboxSpec) -> SlowSandbox:
        if spec.with_logs:
            raise OSError("no space left")
        return await create(self, spec)

    monkeypatch.setattr(SlowProvider, "create", full)
    reply, _ = run_virtual(carried(SlowProvider(tmp_path / "b", Takes()), agent_that_takes(math.inf)))
    assert (reply.outcome, reply.reward, reply.cleanup.confirmed) == ("sandbox_lost", None, True)


def test_no_two_sandboxes_of_any_attempts_have_one_name(tmp_path: Path) -> None:
    provider = SlowProvider(tmp_path, Takes())
    run_virtual(carried(provider, agent_that_takes(1.0)))
    of_one = [spec.name for spec in provider.made]
    assert len(of_one) == 2
    names = ["a/b", "a", "b", "a%2Fb", "%verifier", "%verifier/", "a-verifier", "%", "verifier"]
    asked = [request_of(name, run=run) for name in ["c", "b/c", *of_one, *names] for run in ["", *names]]
    keys = {request_key(request) for request in asked}
    assert len(keys) == len({(request.run, request.attempt_id) for request in asked})
    assert keys.isdisjoint({of_one[1], *(of_one[1].replace("/a", f"/{key}") for key in keys)})
    assert request_key(request_of("a", run="demo")) == "demo/a"


def test_the_deadline_begins_with_the_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*given: Any) -> Prepared:
        time.sleep(0.3)
        return prepare(*given)

    monkeypatch.setattr(app_module, "prepare", slow)

    async def go() -> float:
        attempts = Attempts(Runner(cast(Any, SlowProvider(tmp_path, Takes())), cast(Any, None), "t" * 16), gate(1), 1)
        came = asyncio.get_running_loop().time()
        asked = asyncio.create_task(attempts.submit(request_of(), "", {"bash": bash_agent.run}))
        while not attempts._open:  # noqa: ASYNC110  the moment when it was prepared is what is tested
            await asyncio.sleep(0.01)
        (entry,) = attempts._open.values()
        entry.job.cancel()
        await asyncio.wait({asked})
        return entry.attempt.deadline - came - DEADLINE_S

    assert asyncio.run(go()) < 0.2


@pytest.mark.parametrize(("answers", "outcome"), [(False, "no_engine"), (True, "passed")])
def test_time_that_went_into_a_model_that_refuses_is_not_the_agents(
    tmp_path: Path, answers: bool, outcome: str
) -> None:
    """The engines go away in its last seconds; if a turn came after that, the rest of the time was its own."""
    said = {"choices": [{"message": {"role": "assistant", "tool_calls": [{}]}}]}

    async def model(_: httpx.Request) -> httpx.Response:
        model_asked.append(asyncio.get_running_loop().time())
        asked = len(model_asked)
        if asked == 1:
            await asyncio.sleep(AGENT_S - 2.0)
        if asked == 2 and answers:
            return httpx.Response(200, json=said)
        if asked > 2 and answers:
            await asyncio.sleep(AGENT_S)
        return httpx.Response(503, json={"error": {"code": "no_engine", "message": "none"}})

    model_asked: list[float] = []

    async def go() -> RunReply:
        async with httpx.AsyncClient(transport=httpx.MockTransport(model)) as http:
            return (await carried(SlowProvider(tmp_path, Takes()), bash_agent.run, http))[0]

    reply = run_virtual(go())
    assert len(model_asked) >= 3 and (reply.outcome, reply.reward) == (outcome, 1.0 if answers else None)


@pytest.mark.parametrize("less", [1.0, 20.0])
def test_budgets_that_do_not_nest_are_refused_with_their_sum(tmp_path: Path, less: float) -> None:
    provider = cast(Any, SlowProvider(tmp_path, Takes()))
    agents = {"bash": agent_that_takes(1.0)}
    assert prepare(request_of(), provider, agents).verify_s == VERIFIER_S
    with pytest.raises(BadInput, match=rf"deadline_s {DEADLINE_S - less:g} < queue_timeout_s 60 .* = {DEADLINE_S:g}"):
        prepare(request_of(deadline_s=DEADLINE_S - less), provider, agents)


@pytest.mark.parametrize(("image", "at_once", "warm"), [(None, 2, 0), ("python:3", 1, 1)])
def test_tasks_of_one_image_share_its_cap_and_what_is_warm(
    tmp_path: Path, image: str | None, at_once: int, warm: int
) -> None:
    async def go() -> None:
        provider = SlowProvider(tmp_path, Takes(), image=image)
        one_each = gate(8)
        one_each.waves.pace = replace(one_each.waves.pace, per_group=1)
        attempts = Attempts(Runner(cast(Any, provider), cast(Any, None), "t" * 16), one_each, 8)
        folders = [path for path in sorted(BUILTIN_DIR.iterdir()) if path.is_dir()][:2]
        requests = [request_of(path.name).model_copy(update={"task_dir": str(path)}) for path in folders]
        asked = [asyncio.ensure_future(attempts.submit(one, "", {"bash": agent_that_takes(5.0)})) for one in requests]
        await asyncio.sleep(3.0)
        assert attempts.gate.waves.live == at_once
        await asyncio.gather(*asked)
        assert attempts.counts()["warm_starts"] == warm

    run_virtual(go())


def paced(attempts: Attempts, **parts: Any) -> None:
    attempts.gate.waves.pace = replace(attempts.gate.waves.pace, **parts)


def attempts_of(provider: Any, slots: int = 4) -> Attempts:
    return Attempts(Runner(cast(Any, provider), cast(Any, None), "t" * 16), gate(slots), 8)


def test_a_verifiers_sandbox_waits_for_the_next_wave_and_that_is_nobodys_time(tmp_path: Path) -> None:
    async def go() -> RunReply:
        attempts = attempts_of(SlowProvider(tmp_path, Takes()))
        paced(attempts, size=1, interval_s=10.0)
        reply = await attempts.submit(request_of(), "", {"bash": agent_that_takes(1.0)})
        assert attempts.gate.waves.starting == attempts.gate.waves.live == 0
        return reply

    reply = run_virtual(go())
    assert reply.outcome == "passed"
    # begun at 0, ready at 1, the agent until 2, its stop until 2.1; the next wave at 10
    assert reply.phases.queue == pytest.approx(7.9) and reply.phases.agent == pytest.approx(1.0)
    assert reply.phases.verify == pytest.approx(0.1 + 1.0 + 0.1)


def test_a_verifiers_sandbox_goes_before_new_attempts(tmp_path: Path) -> None:
    async def go() -> None:
        provider = SlowProvider(tmp_path, Takes())
        attempts = attempts_of(provider)
        paced(attempts, size=1, interval_s=5.0)
        agents = {"bash": agent_that_takes(1.0)}
        await asyncio.gather(*(attempts.submit(request_of(f"a{n}"), "", agents) for n in range(3)))
        assert [spec.with_logs for spec in provider.made] == [False, True] * 3

    run_virtual(go())


def test_a_verifier_whose_turn_does_not_come_is_not_given_up(tmp_path: Path) -> None:
    """No wave comes in time: its sandbox starts when only what is kept for it is left, and the reply comes in time."""

    async def go() -> tuple[RunReply, float]:
        loop = asyncio.get_running_loop()
        takes = Takes(*(most - 0.01 for most in (SETUP_S, math.inf, STOP_S, START_S, VERIFIER_S, LAST_STOP_S)))
        attempts = attempts_of(SlowProvider(tmp_path, takes))
        paced(attempts, size=1, interval_s=1e9)
        started = loop.time()
        reply = await attempts.submit(request_of(), "", {"bash": agent_that_takes(math.inf)})
        return reply, loop.time() - started

    reply, seconds = run_virtual(go())
    assert (reply.outcome, reply.reward) == ("passed", 1.0)
    assert reply.phases.queue > 0.5 * QUEUE_S, "the queue's time was left"
    assert DEADLINE_S - 10.0 < seconds <= DEADLINE_S


class FullForVerifiers(SlowProvider):
    async def create(self, spec: SandboxSpec) -> SlowSandbox:
        if spec.with_logs:
            raise SandboxStartError("quota", refused=True)
        return await super().create(spec)


def test_a_refused_verifiers_sandbox_narrows_the_window(tmp_path: Path) -> None:
    async def go() -> None:
        attempts = attempts_of(FullForVerifiers(tmp_path, Takes()), 8)
        reply = await attempts.submit(request_of(), "", {"bash": agent_that_takes(1.0)})
        assert reply.outcome == "sandbox_start" and attempts.gate.waves.window == 4.0

    run_virtual(go())


@pytest.mark.parametrize("after_s", [4.0, 11.05])
def test_one_flushed_while_its_verifier_waits_or_starts_leaves_nothing(tmp_path: Path, after_s: float) -> None:
    async def go() -> None:
        attempts = attempts_of(SlowProvider(tmp_path, Takes(start=3.0)))
        paced(attempts, size=1, interval_s=10.0)
        asked = asyncio.ensure_future(attempts.submit(request_of(), "", {"bash": agent_that_takes(1.0)}))
        await asyncio.sleep(after_s)
        assert attempts.flush(FlushRequest(attempt_ids=["a"])) == 1
        assert (await asked).outcome == "aborted"
        waves = attempts.gate.waves
        assert (waves.live, waves.starting, waves.free(1e9)) == (0, 0, 1)
        assert attempts.gate.again_at(-1e9) is None

    run_virtual(go())


def test_a_start_that_was_cut_off_holds_its_place_and_keeps_no_other_from_starting(tmp_path: Path) -> None:
    async def go() -> None:
        attempts = attempts_of(Unproven(tmp_path, Takes()))
        asked = asyncio.ensure_future(attempts.submit(request_of(), "", {"bash": agent_that_takes(1.0)}))
        await asyncio.sleep(18.0)
        assert attempts.gate.waves.starting == 1
        attempts.flush(FlushRequest(attempt_ids=["a"]))
        assert not (await asked).cleanup.confirmed
        assert (attempts.gate.waves.live, attempts.gate.waves.starting) == (1, 0)

    run_virtual(go())


class SlowReplies:
    """A store that takes its time."""

    async def claim(self, _: RunRequest) -> None:
        await asyncio.sleep(2.0)

    async def begin(self, _: RunRequest) -> None:
        return

    async def keep(self, _: RunRequest, reply: RunReply) -> RunReply:
        await asyncio.sleep(2.0)
        return reply


def test_what_is_claimed_or_stored_does_not_run(tmp_path: Path) -> None:
    async def go() -> list[int]:
        attempts = attempts_of(SlowProvider(tmp_path, Takes()), 1)
        attempts.replies = cast(Any, SlowReplies())
        agents = {"bash": agent_that_takes(1.0)}
        asked = [asyncio.ensure_future(attempts.submit(request_of(f"a{n}"), "", agents)) for n in range(3)]
        seen = []
        while not all(job.done() for job in asked):
            seen.append(attempts.running)
            await asyncio.sleep(0.1)
        return seen

    seen = run_virtual(go())
    assert set(seen) == {0, 1} and seen[0] == 0, "one place, and at first nothing but claims"
