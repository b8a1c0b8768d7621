"""What infrastructure may cost a step: tries of a group, starts of a task, the share of all attempts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from rl360.agents.budgets import ENOUGH, Budgets, StepBudget, quarantined
from rl360.agents.records import RecordLog, put_table
from rl360.agents.rollout import AttemptSpec, Played, roll_out_slot
from rl360.commands import tasks as tasks_command
from rl360.config.run import RunConfig
from rl360.errors import CorruptObject, InfraLosses, StoreUnavailable
from rl360.harbor.outcome import ExitStatus
from rl360.ledger.outcomes import HAS_VERDICT, INFRA, Outcome
from rl360.report.markdown import step_markdown
from rl360.sessions.sample import AttemptRecord
from rl360.store.layout import attempts_key
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


def budgets_of(
    store: MemoryStore, earlier: list[AttemptRecord] | None = None, attempts: int = 1000, **rollout: Any
) -> Budgets:
    config = RunConfig.parse({"rollout": rollout})
    share = StepBudget("demo", 3, config.rollout.max_infra_rate, attempts)
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
    share = StepBudget("demo", 3, 0.5, 1000)
    for _ in range(ENOUGH):
        share.ended(record("t", Outcome.PASSED), lost=False)
        share.ended(record("t", Outcome.ABORTED), lost=True)
    with pytest.raises(InfraLosses, match="33 of 65"):
        share.ended(record("t", Outcome.ABORTED), lost=True)
    with pytest.raises(InfraLosses):  # another wave of it, at whatever comes next
        share.ended(record("t", Outcome.ABORTED), lost=True)


@pytest.mark.parametrize(("attempts", "limit", "at"), [(8, 0.5, 5), (1, 0.5, 1), (31, 0.5, 16), (8, 1.0, None)])
def test_a_small_step_is_stopped_as_soon_as_the_rest_cannot_save_it(
    attempts: int, limit: float, at: int | None
) -> None:
    budgets = budgets_of(MemoryStore(), attempts=attempts, max_infra_rate=limit)
    for number in range(1, attempts + 1):
        if number == at:
            with pytest.raises(InfraLosses, match=f"{at} of {attempts} attempts"):
                budgets.ended(record("t", Outcome.SANDBOX_LOST))
            return
        budgets.ended(record("t", Outcome.SANDBOX_LOST))
    assert at is None


def test_a_small_step_that_keeps_enough_ends() -> None:
    budgets = budgets_of(MemoryStore(), attempts=8, max_infra_rate=0.5)
    for outcome in [Outcome.SANDBOX_LOST, Outcome.PASSED] * 4:
        budgets.ended(record("t", outcome))


def test_attempts_of_a_quarantined_task_neither_spoil_nor_save_a_small_step() -> None:
    store = MemoryStore()
    quarantined_here(store, "bad")
    budgets = budgets_of(store, attempts=8, max_infra_rate=0.5)
    for ended in [unstarted("bad")] * 3 + [record("t", Outcome.SANDBOX_LOST)] * 2 + [record("t", Outcome.PASSED)] * 2:
        budgets.ended(ended)
    with pytest.raises(InfraLosses, match="3 of 5 attempts"):
        budgets.ended(record("t", Outcome.SANDBOX_LOST))
    late = budgets_of(store, attempts=8, max_infra_rate=0.5)
    for ended in [record("t", Outcome.SANDBOX_LOST)] * 3 + [unstarted("bad")] * 2:
        late.ended(ended)
    with pytest.raises(InfraLosses, match="3 of 5 attempts"):  # the excuse is what tips it
        late.ended(unstarted("bad"))


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


def another(
    budgets: Budgets, further: int, slot: str, outcome: Outcome = Outcome.SANDBOX_LOST, task: str = "t"
) -> bool:
    return budgets.another(outcome, further, slot.partition("-")[0], task, f"{slot}-t{further + 1}")


def test_further_tries_are_the_attempts_and_the_groups() -> None:
    budgets = budgets_of(MemoryStore(), infra_retries=2, group_retries=3)
    assert [another(budgets, tries, "g-a0") for tries in (0, 1, 2)] == [True, True, False]
    assert [another(budgets, 0, slot) for slot in ("g-a1", "g-a2", "g-a1")] == [True, False, True], "paid once"
    assert another(budgets, 0, "other-a0")
    assert not any(another(budgets, 0, "third-a0", outcome) for outcome in (*HAS_VERDICT, Outcome.NO_VERDICT))


def test_tries_of_a_killed_run_of_the_wave_are_paid_for() -> None:
    earlier = [record("t", Outcome.SANDBOX_LOST, try_index=index) for index in range(3)]
    earlier = [replace(made, attempt_id=f"g-a00-t{made.try_index}") for made in earlier]
    budgets = budgets_of(MemoryStore(), earlier, infra_retries=5, group_retries=2)
    assert not another(budgets, 0, "g-a01") and another(budgets, 1, "g-a00"), (
        "what is stored already may be asked again"
    )


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
    assert not another(budgets, 0, "g-a0", Outcome.SANDBOX_START, "bad")
    (said,) = quarantined(cast(Any, store), "demo").values()
    assert (said["task"], said["step"], said["starts"], said["detail"]) == ("bad", 3, 3, "no such image")
    assert budgets_of(store).refusal("bad"), "a resumed run knows"
    for _ in range(2 * ENOUGH):  # named already: no reason to stop the step as well
        budgets.ended(unstarted("bad"))


def test_a_plug_ins_reply_that_tells_no_phases_started_when_it_was_verified() -> None:
    """A generate function may make the reply itself; without this its task could be told not to start, or none."""
    silent = replace(record("good", Outcome.FAILED), phases_s={})
    budgets = budgets_of(MemoryStore(), quarantine_after=2)
    assert [made for _ in range(2) for made in budgets.note(unstarted("bad"))] == []
    assert [made["task"] for _ in range(2) for made in budgets.note(silent)] == ["bad"]
    budgets = budgets_of(MemoryStore(), quarantine_after=2)
    for made in [unstarted("good"), silent] * 4 + [record("other", Outcome.PASSED)] * 4:
        assert budgets.note(made) == []


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
    assert "good is not in quarantine; see `rl360 tasks quarantined demo`" in said("tasks", "release", "demo", "good")
    assert "bad is not in quarantine; did you mean chores/bad?" in said("tasks", "release", "demo", "bad")
    assert "is tried again" in said("tasks", "release", "demo", "chores/bad")
    assert budgets_of(store).refusal("chores/bad") is None and store.objects == {}
    assert said("tasks", "quarantined", "demo") == "0 in quarantine\n"


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
    asyncio.run(roll_out_task._run_wave(job, 0, waves, "demo:0", logs[0]))  # 20 of 40 ended: too few to judge
    with pytest.raises(InfraLosses, match=r"sandbox_lost .*provider: sandbox gone"):
        asyncio.run(roll_out_task._run_wave(job, 1, waves, "demo:0", logs[1]))
    kept = len(logs[1].stored)
    assert 1 <= kept < 20, "one more than half of all"
    roll_out_task._shares.cache_clear()  # another flow run
    asyncio.run(roll_out_task._run_wave(job, 1, waves, "demo:0", RecordLog(job.store, "demo", 0, 1, every_s=0.0)))
    assert len(RecordLog(job.store, "demo", 0, 1).stored) == 20


def test_waves_that_begin_at_once_have_one_share(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    def slow(*_: object) -> object:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.05)  # what was not found in the cache is made by both
        return object()

    monkeypatch.setattr(roll_out_task, "StepBudget", slow)
    roll_out_task._shares.cache_clear()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: roll_out_task._share("flow", "r", 0, 0.5, 8)[0], range(2))
    roll_out_task._shares.cache_clear()
    assert first is second


def test_a_quarantine_is_written_before_the_record_that_brought_it_about() -> None:
    """Whoever is killed in between asks again for that try, whose session is still open; the other order lost it."""
    did: list[str] = []

    class Client:
        async def play(self, spec: AttemptSpec, try_index: int) -> Played:
            return Played(spec, try_index, 0.0, 1.0, "session", None, Outcome.NO_VERDICT, "")

        async def finish(self, played: Played) -> AttemptRecord:
            made = record("t", played.outcome)
            return replace(made, attempt_id=played.attempt_id, session_id=played.session_id)

        async def close_session(self, _attempt_id: str, session_id: str) -> None:
            did.append(f"close {session_id}")

    class Noted(Budgets):
        away = False

        def __init__(self) -> None: ...

        def refusal(self, task_id: str) -> None: ...

        def note(self, record: AttemptRecord) -> Any:
            return [record]

        def publish(self, quarantine: Any) -> None:
            if self.away:
                raise StoreUnavailable("away")
            did.append("quarantine")

        def another(self, *_: Any) -> bool:
            return False

        def ended(self, record: AttemptRecord) -> None: ...

    async def keep(_: AttemptRecord) -> None:
        did.append("record")

    def work(budgets: Budgets) -> Any:
        spec = AttemptSpec("s", "g", "t", "/t", "d")
        return roll_out_slot(cast(Any, Client()), spec, [], asyncio.Semaphore(1), keep, cast(Any, None), budgets)

    asyncio.run(work(Noted()))
    assert did == ["quarantine", "record", "close session"]
    away = Noted()
    away.away = True
    with pytest.raises(StoreUnavailable):
        asyncio.run(work(away))
    assert did[3:] == []


def test_a_group_in_two_waves_pays_once_for_what_either_tried_before_the_flow_was_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roll_out_task, "RolloutClient", Doomed)
    store = MemoryStore()
    config = RunConfig.parse(
        {"run": "demo", "rollout": {"infra_retries": 9, "group_retries": 3, "max_infra_rate": 1.0}}
    )
    job = Job(config, 0, "roll_out-0000", cast(Any, None), cast(Any, store), logging.getLogger("test"))
    waves = [[AttemptSpec(f"g-a{n:02}", "g", "t", "/t", "d")] for n in range(3)]
    tries = [replace(record("t", Outcome.SANDBOX_LOST), attempt_id=f"g-a02-t{n}", try_index=n) for n in range(3)]
    put_table(job.store, attempts_key("demo", 0, 2, 0), tries)
    for wave in range(3):
        roll_out_task._shares.cache_clear()  # in whatever process
        log = RecordLog(job.store, "demo", 0, wave, every_s=0.0)
        asyncio.run(roll_out_task._run_wave(job, wave, waves, "demo:0", log))
    roll_out_task._shares.cache_clear()
    stored = [RecordLog(job.store, "demo", 0, wave).stored.keys() for wave in range(3)]
    assert stored == [{"g-a00-t0", "g-a00-t1"}, {"g-a01-t0"}, {"g-a02-t0", "g-a02-t1", "g-a02-t2"}]


class Flaky(Doomed):
    """Never starts a sandbox of the task `bad`; loses every first, second, ... try of the others by a drawn list. After
    `kill_after` tries the flow is killed."""

    lose: tuple[bool, ...] = ()
    kill_after = 0
    played: list[str] = []

    async def play(self, spec: AttemptSpec, try_index: int) -> Played:
        if len(Flaky.played) == Flaky.kill_after:
            raise KilledHere
        Flaky.played.append(spec.attempt_id(try_index))
        lost = Flaky.lose[len(Flaky.played) % len(Flaky.lose)]
        await asyncio.sleep(0)
        outcome = (
            Outcome.SANDBOX_START if spec.task_id == "bad" else Outcome.SANDBOX_LOST if lost else Outcome.NO_VERDICT
        )
        return Played(spec, try_index, 0.0, 1.0, "", None, outcome, "no such image")

    async def finish(self, played: Played) -> AttemptRecord:
        made = await super().finish(played)
        return replace(made, exit_status=ExitStatus.ENV_START) if made.outcome is Outcome.SANDBOX_START else made


class KilledHere(Exception):
    pass


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_flow_that_is_killed_and_resumed_keeps_its_groups_budgets_and_its_quarantine(data: st.DataObject) -> None:
    """Groups spread over waves that run at once or one after the other, however often the flow is killed: no group's
    further tries exceed its budget, tables hold each try once, and what is in quarantine is tried no more."""
    groups, size, wave = (data.draw(st.integers(*bounds)) for bounds in ((1, 3), (2, 5), (1, 6)))
    tasks = [data.draw(st.sampled_from(["good", "fine", "bad"])) for _ in range(groups)]
    specs = [AttemptSpec(f"g{g}-a{n:02}", f"g{g}", tasks[g], "/t", "d") for g in range(groups) for n in range(size)]
    waves = [specs[start : start + wave] for start in range(0, len(specs), wave)]
    most, Flaky.lose = data.draw(st.integers(0, 4)), tuple(data.draw(st.lists(st.booleans(), min_size=1, max_size=7)))
    rollout = {"infra_retries": 3, "group_retries": most, "quarantine_after": 2, "max_infra_rate": 1.0}
    config = RunConfig.parse({"run": "demo", "rollout": rollout | {"max_concurrent": data.draw(st.integers(1, 8))}})
    store = MemoryStore()
    job = Job(config, 0, "roll_out", cast(Any, None), cast(Any, store), logging.getLogger("test"))
    Flaky.played = []

    async def flow(at_once: int) -> None:
        pace = asyncio.Semaphore(at_once)

        async def one(number: int) -> None:
            async with pace:
                log = RecordLog(job.store, "demo", 0, number, every_s=0.0)
                await roll_out_task._run_wave(job, number, waves, "demo:0", log)

        async with asyncio.TaskGroup() as together:
            for number in range(len(waves)):
                together.create_task(one(number))

    banned: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roll_out_task, "RolloutClient", Flaky)
        for more in [*data.draw(st.lists(st.integers(0, 9), max_size=3)), 10**6]:
            roll_out_task._shares.cache_clear()  # another flow run
            before = len(Flaky.played)
            Flaky.kill_after = before + more
            with contextlib.suppress(ExceptionGroup):
                asyncio.run(flow(data.draw(st.integers(1, 3))))
            tried = {
                next(spec.task_id for spec in specs if name.startswith(spec.slot_id)) for name in Flaky.played[before:]
            }
            assert not banned & tried
            banned = set(quarantined(cast(Any, store), "demo"))
    roll_out_task._shares.cache_clear()
    records = [made for number in range(len(waves)) for made in RecordLog(job.store, "demo", 0, number).stored.values()]
    assert {made.attempt_id for made in records if not made.try_index} == {spec.attempt_id(0) for spec in specs}
    further = Counter(made.group_id for made in records if made.try_index)
    assert all(count <= most for count in further.values()), further
    for made in records:  # whoever stopped had a reason
        last = made.attempt_id[: -len("-t0")] + f"-t{made.try_index + 1}" not in {each.attempt_id for each in records}
        if last and made.outcome is Outcome.SANDBOX_LOST:
            assert made.try_index == 3 or further[made.group_id] == most
