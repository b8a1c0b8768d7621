"""What infrastructure may cost a step: tries of a group, starts of a task, the share of all attempts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from rl360.agents.budgets import ENOUGH, Budgets, LossShare, quarantined
from rl360.agents.records import RecordLog
from rl360.agents.rollout import AttemptSpec, Played, roll_out_slot
from rl360.commands import tasks as tasks_command
from rl360.config.run import RunConfig
from rl360.errors import CorruptObject, InfraLosses, StoreUnavailable
from rl360.harbor.outcome import ExitStatus
from rl360.ledger.outcomes import HAS_VERDICT, INFRA, Outcome
from rl360.report.markdown import step_markdown
from rl360.sessions.sample import AttemptRecord
from tasks import roll_out as roll_out_task
from tasks.durable import Job
from tests.unit.ledger_data import made_up_run
from tests.unit.memory_store import MemoryStore
from tests.unit.verdict_data import verdict


def record(
    task: str, outcome: Outcome, group: str = "g", try_index: int = 0, status: str = "", detail: str = "d"
) -> AttemptRecord:
    name = f"{group}-a00-t{try_index}"
    said = verdict(name, 1.0, task_id=task) if outcome in HAS_VERDICT else None
    began = outcome is not Outcome.SANDBOX_START
    return AttemptRecord(
        name, group, task, try_index, outcome, said, status or "x", "", None,
        detail=detail, phases_s={"agent": 1.0} if began else {},
    )  # fmt: skip


def unstarted(task: str, status: str = ExitStatus.ENV_START) -> AttemptRecord:
    return record(task, Outcome.SANDBOX_START, status=status, detail="no such image")


def budgets_of(store: MemoryStore, earlier: list[AttemptRecord] | None = None, **rollout: Any) -> Budgets:
    config = RunConfig.parse({"rollout": rollout})
    share = LossShare("demo", 3, config.rollout.max_infra_rate)
    return Budgets(cast(Any, store), config, 3, share, earlier or [])


def quarantined_here(store: MemoryStore, task: str) -> Budgets:
    """After two starts of the task failed and two of another did not."""
    budgets = budgets_of(store, quarantine_after=2)
    ended = [*[unstarted(task)] * 2, *[record("good", Outcome.PASSED)] * 2]
    for made in [made for each in ended for made in budgets.note(each)]:
        budgets.publish(made)
    return budgets


# -- the share of a step ----------------------------------------------------------------------------------------------


def test_a_step_that_loses_too_many_is_stopped_with_the_causes() -> None:
    budgets = budgets_of(MemoryStore(), max_infra_rate=0.25)
    lost = [Outcome.SANDBOX_LOST] * 6 + [Outcome.NO_VERDICT] * 2
    for number in range(ENOUGH - 1):  # all of them bad: still not enough to judge by
        budgets.ended(record("t", lost[number % 8], detail="sandbox gone"))
    message = (
        r"32 of 32 attempts \(100%\) of step 3 of run demo were lost to infrastructure, limit rollout.max_infra_rate "
        r"25%: sandbox_lost 25 \(provider: sandbox gone\); no_verdict 7 \(verifier: .*`rl360 run resume`"
    )
    with pytest.raises(InfraLosses, match=message):
        budgets.ended(record("t", Outcome.SANDBOX_LOST, detail="sandbox gone"))


def test_the_limit_itself_is_allowed_and_all_waves_of_a_step_count_together() -> None:
    share = LossShare("demo", 3, 0.5)
    for _ in range(ENOUGH):
        share.ended(record("t", Outcome.PASSED), lost=False)
        share.ended(record("t", Outcome.ABORTED), lost=True)
    with pytest.raises(InfraLosses, match="33 of 65"):
        share.ended(record("t", Outcome.ABORTED), lost=True)
    with pytest.raises(InfraLosses):  # another wave of it, at whatever comes next
        share.ended(record("t", Outcome.ABORTED), lost=True)


@pytest.mark.parametrize(("switch", "stops"), [("mask", True), ("score_zero", False)])
def test_timeouts_that_are_scored_are_no_losses(switch: str, stops: bool) -> None:
    budgets = budgets_of(MemoryStore(), unverified_timeout=switch)
    try:
        for _ in range(ENOUGH):
            budgets.ended(record("t", Outcome.AGENT_TIMEOUT))
    except InfraLosses:
        assert stops
    else:
        assert not stops


# -- a group's tries --------------------------------------------------------------------------------------------------


def test_further_tries_are_the_attempts_and_the_groups() -> None:
    budgets = budgets_of(MemoryStore(), infra_retries=2, group_retries=3)
    assert [budgets.another(Outcome.SANDBOX_LOST, tries, "g", "t") for tries in (0, 1, 2)] == [True, True, False]
    assert [budgets.another(Outcome.SANDBOX_LOST, 0, "g", "t") for _ in range(2)] == [True, False]
    assert budgets.another(Outcome.SANDBOX_LOST, 0, "other", "t")
    assert not any(budgets.another(outcome, 0, "third", "t") for outcome in (*HAS_VERDICT, Outcome.NO_VERDICT))


def test_tries_of_a_killed_run_of_the_wave_are_paid_for() -> None:
    earlier = [record("t", Outcome.SANDBOX_LOST, try_index=index) for index in range(3)]
    budgets = budgets_of(MemoryStore(), earlier, infra_retries=5, group_retries=2)
    assert not budgets.another(Outcome.SANDBOX_LOST, 0, "g", "t")


# -- a task that never starts -----------------------------------------------------------------------------------------


def test_a_task_that_never_starts_while_others_do_is_quarantined() -> None:
    store = MemoryStore()
    budgets = budgets_of(store, quarantine_after=3)
    assert [budgets.note(unstarted("bad")) for _ in range(3)] == [[]] * 3, "nothing shows that it is the task"
    assert [budgets.note(record("good", Outcome.FAILED)) for _ in range(2)] == [[]] * 2
    (made,) = budgets.note(record("good", Outcome.SANDBOX_LOST))  # it had started
    assert made["task"] == "bad" and budgets.refusal("bad"), "from now on"
    assert budgets.note(record("good", Outcome.FAILED)) == budgets.note(unstarted("bad")) == [], "once"
    budgets.publish(made)
    assert budgets.refusal("good") is None
    assert budgets.refusal("bad") == "task bad is in quarantine since step 3: `rl360 tasks release demo bad`"
    assert not budgets.another(Outcome.SANDBOX_START, 0, "g", "bad")
    (said,) = quarantined(cast(Any, store), "demo").values()
    assert (said["task"], said["step"], said["starts"], said["detail"]) == ("bad", 3, 3, "no such image")
    assert budgets_of(store).refusal("bad"), "a resumed run knows"
    for _ in range(2 * ENOUGH):  # named already: no reason to stop the step as well
        budgets.ended(unstarted("bad"))


def test_when_nothing_starts_it_is_no_tasks_fault() -> None:
    budgets = budgets_of(MemoryStore(), quarantine_after=2)
    assert not [task for name in "abcabcabc" for task in budgets.note(unstarted(name))]


def test_what_started_before_the_first_failure_says_nothing() -> None:
    """All of the provider failed since: tasks that began to be tried then are not to blame."""
    budgets = budgets_of(MemoryStore(), quarantine_after=2)
    for _ in range(50):
        budgets.note(record("good", Outcome.PASSED))
    assert not [task for _ in range(9) for task in budgets.note(unstarted("late"))]


@pytest.mark.parametrize("status", [ExitStatus.QUEUE_TIMEOUT])
def test_waiting_in_vain_is_no_failed_start(status: str) -> None:
    budgets = budgets_of(MemoryStore(), quarantine_after=2)
    for _ in range(9):
        assert budgets.note(unstarted("t", status)) == [] == budgets.note(record("good", Outcome.PASSED))


def test_a_start_in_between_takes_a_task_off_the_list() -> None:
    budgets = budgets_of(MemoryStore(), quarantine_after=3)
    kinds = [unstarted("t"), unstarted("t"), record("t", Outcome.FAILED), unstarted("t"), unstarted("t")]
    for made in kinds:
        assert budgets.note(made) == []
        assert budgets.note(record("good", Outcome.PASSED)) == []


def test_attempts_of_a_quarantined_task_end_without_a_try() -> None:
    budgets = quarantined_here(MemoryStore(), "bad")
    kept: list[AttemptRecord] = []

    class Nobody:
        async def play(self, *_: Any) -> Played:
            raise AssertionError("nobody is asked")

        async def finish(self, played: Played) -> AttemptRecord:
            assert (played.session_id, played.reply) == ("", None)
            return replace(record("bad", played.outcome), attempt_id=played.attempt_id, detail=played.detail)

    async def keep(made: AttemptRecord) -> None:
        kept.append(made)

    async def go() -> None:
        spec = AttemptSpec("g-a00", "g", "bad", "/t", "d")
        await roll_out_slot(cast(Any, Nobody()), spec, [], asyncio.Semaphore(1), keep, cast(Any, None), budgets)

    asyncio.run(go())
    assert [(made.outcome, made.try_index) for made in kept] == [(Outcome.SANDBOX_START, 0)]
    assert "rl360 tasks release demo bad" in kept[0].detail and kept[0].outcome in INFRA


def test_a_person_sees_it_and_releases_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = MemoryStore()
    quarantined_here(store, "chores/bad")
    shown = step_markdown(made_up_run(1)[0], {}, quarantined(cast(Any, store), "demo"))
    assert "## Tasks in quarantine" in shown and "| chores/bad | 3 | 2 | no such image |" in shown
    assert "rl360 tasks release" in shown and "quarantine" not in step_markdown(made_up_run(1)[0], {})
    monkeypatch.setattr(tasks_command, "_store", lambda: store)

    def said(*argv: str) -> str:
        result = CliRunner().invoke(app, list(argv), catch_exceptions=True)
        return result.output + str(result.exception or "")

    app = _app()
    assert "chores/bad: 2 starts failed in step 3; the last: no such image" in said("tasks", "quarantined", "demo")
    assert "is not in quarantine" in said("tasks", "release", "demo", "good")
    assert "is tried again" in said("tasks", "release", "demo", "chores/bad")
    assert budgets_of(store).refusal("chores/bad") is None and store.objects == {}


def _app() -> Any:
    import typer

    app = typer.Typer()
    app.callback()(lambda: None)
    tasks_command.register(app)
    return app


@pytest.mark.parametrize("data", [b"", b"[]", b'{"task": "t"}', b'{"task": "t", "step": null}'])
def test_a_damaged_quarantine_is_named(data: bytes) -> None:
    store = MemoryStore()
    store.objects["demo/quarantine/t.json"] = data
    with pytest.raises(CorruptObject, match=r"quarantine/t\.json"):
        budgets_of(store)


# -- a wave -----------------------------------------------------------------------------------------------------------


class Doomed:
    """A rollout client whose attempts are lost, but for those of a task."""

    good = "none"

    def __init__(self, _services: Any, config: RunConfig, *_: Any) -> None:
        self.config = config

    async def __aenter__(self) -> Doomed:
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def play(self, spec: AttemptSpec, try_index: int) -> Played:
        await asyncio.sleep(0)
        outcome = Outcome.NO_VERDICT if spec.task_id == self.good else Outcome.SANDBOX_LOST
        return Played(spec, try_index, 0.0, 1.0, "", None, outcome, "sandbox gone")

    async def finish(self, played: Played) -> AttemptRecord:
        made = record(played.spec.task_id, played.outcome, detail=played.detail)
        return replace(made, attempt_id=played.attempt_id, group_id=played.spec.group_id, try_index=played.try_index)


def test_waves_of_a_step_that_lose_their_attempts_stop_it_and_a_resume_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was lost for good stays recorded and is not counted again; the rest is tried."""
    monkeypatch.setattr(roll_out_task, "RolloutClient", Doomed)
    store = MemoryStore()
    config = RunConfig.parse({"run": "demo", "rollout": {"infra_retries": 0, "max_concurrent": 4}})
    job = Job(config, 0, "roll_out-0000", cast(Any, None), cast(Any, store), logging.getLogger("test"))
    waves = [[AttemptSpec(f"w{w}-a{n:02}", f"w{w}", "t", "/t", "d") for n in range(20)] for w in range(2)]
    logs = [RecordLog(job.store, "demo", 0, wave, every_s=0.0) for wave in range(2)]
    roll_out_task._shares.cache_clear()
    asyncio.run(roll_out_task._run_wave(job, 0, waves[0], "demo:0", logs[0]))  # 20 ended: too few to judge
    with pytest.raises(InfraLosses, match=r"sandbox_lost .*provider: sandbox gone"):
        asyncio.run(roll_out_task._run_wave(job, 1, waves[1], "demo:0", logs[1]))
    kept = len(logs[1].stored)
    assert ENOUGH - 20 <= kept < 20
    roll_out_task._shares.cache_clear()  # another flow run
    asyncio.run(roll_out_task._run_wave(job, 1, waves[1], "demo:0", RecordLog(job.store, "demo", 0, 1, every_s=0.0)))
    assert len(RecordLog(job.store, "demo", 0, 1).stored) == 20


def test_waves_that_begin_at_once_have_one_share(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    def slow(*_: object) -> object:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.05)  # what was not found in the cache is made by both
        return object()

    monkeypatch.setattr(roll_out_task, "LossShare", slow)
    roll_out_task._shares.cache_clear()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: roll_out_task._share("flow", "r", 0, 0.5), range(2))
    roll_out_task._shares.cache_clear()
    assert first is second


def test_a_session_is_closed_though_its_quarantine_could_not_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Client:
        async def play(self, spec: AttemptSpec, try_index: int) -> Played:
            return Played(spec, try_index, 0.0, 1.0, "session", None, Outcome.NO_VERDICT, "")

        async def finish(self, played: Played) -> AttemptRecord:
            made = record("t", played.outcome)
            return replace(made, attempt_id=played.attempt_id, session_id=played.session_id)

        async def close_session(self, _attempt_id: str, session_id: str) -> None:
            closed.append(session_id)

    class Away(Budgets):
        def __init__(self) -> None: ...

        def refusal(self, task_id: str) -> None: ...

        def note(self, record: AttemptRecord) -> Any:
            return [record]

        def publish(self, quarantine: Any) -> None:
            raise StoreUnavailable("away")

        def another(self, *_: Any) -> bool:
            return False

    async def nothing(_: AttemptRecord) -> None: ...

    spec = AttemptSpec("s", "g", "t", "/t", "d")
    work = roll_out_slot(cast(Any, Client()), spec, [], asyncio.Semaphore(1), nothing, nothing, Away())
    with pytest.raises(StoreUnavailable):
        asyncio.run(work)
    assert closed == ["session"]
