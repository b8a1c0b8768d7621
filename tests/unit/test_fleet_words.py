"""`rl360 fleet` to a person: refusals at once, what was never started, who removed what, and what is waited for."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from rl360.commands import fleet
from rl360.engines import membership
from rl360.engines.fleet import EngineIdentity, EngineState, Probe
from rl360.engines.fleet_log import KEEPERS, Event, FleetLog, Slot, change, walk
from rl360.engines.keeper import Keeper
from rl360.errors import BadInput, Rl360Error, ServiceError
from rl360.weights import fence
from tests.unit.memory_store import MemoryStore
from tests.unit.test_fleet_command import services_of
from tests.unit.test_help import shown

S = EngineState
NOBODY: Any = None
OPTIONS = cast(Any, SimpleNamespace(lease_s=30.0))
said: list[str] = []


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> FleetLog:
    """An empty fleet's, on a machine without Slurm and outside any pod."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    return FleetLog(MemoryStore())


def keeper_elsewhere(log: FleetLog) -> str:
    owner = fence.new_owner().model_copy(update={"host": "n7/pid:[1]"})
    log.store.put_once(f"{KEEPERS}{owner.token}/lease.json", owner.model_dump_json().encode())
    return f"keeper:{owner.token}"


def held(log: FleetLog, name: str, owner: str, states: list[EngineState]) -> Slot:
    """The slot moved over these states by an owner that keeps it."""
    slot = log.refresh().slots[name]
    return log.append(owner, lambda _: walk(slot, states, "ends", holds=True)).slots[name]


@pytest.mark.parametrize(("kind", "why"), [("kubernetes", "KUBERNETES_SERVICE_HOST"), ("slurm", "no program sbatch")])
def test_a_launcher_that_cannot_work_is_refused_at_once(
    log: FleetLog, kind: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = services_of("-")
    monkeypatch.setattr(fleet, "_open", lambda: (services, log.store, log))
    error = CliRunner().invoke(fleet_app(), ["add", "--launcher", kind]).exception
    assert isinstance(error, BadInput) and why in str(error)
    assert log.refresh().seq == 0
    keeper_elsewhere(log)  # it may have what is missing here
    assert membership.cannot_start(log.store, services, kind) == ""


def fleet_app() -> Any:
    import typer

    app = typer.Typer()
    fleet.register(app)
    return cast(Any, app.registered_groups[0].typer_instance)


@pytest.mark.parametrize("by_keeper", [False, True])
@pytest.mark.parametrize("kind", ["kubernetes", "slurm"])
def test_what_was_never_started_is_gone_when_it_is_removed(log: FleetLog, kind: str, by_keeper: bool) -> None:
    services, name = services_of("-"), f"{kind}-0"
    membership.start_more(log, services, kind, 1, "ann", "more")
    if by_keeper:
        owner = fence.new_owner()  # lives here: this process
        fence.mark_running(owner, True)
        log.store.put_once(f"{KEEPERS}{owner.token}/lease.json", owner.model_dump_json().encode())
        held(log, name, f"keeper:{owner.token}", [S.SUSPECT, S.FENCED])
    else:
        with pytest.raises(BadInput, match=f"was never started.*use `rl360 fleet remove {name}`"):
            membership.drain(log, services, name, "", "ann", "a mistake", 0)
    assert membership.remove(log, services, name, "", "ann", "a mistake", 0)
    slot = log.refresh().slots[name]
    assert (slot.state, slot.owner, slot.member) == (S.GONE, None, False)
    assert "was never started" in slot.evidence
    assert membership.who_removed(log, name) == "removed by ann: a mistake"


def test_one_that_was_started_is_not_called_gone(log: FleetLog) -> None:
    services = services_of("-")
    membership.start_more(log, services, "slurm", 1, "ann", "more")
    slot = log.refresh().slots["slurm-0"]
    log.append("keeper:k", lambda _: [change(slot, S.JOINING, "started", ref={"job": "7"})])
    assert not membership.remove(log, services, "slurm-0", "", "ann", "off", 0)
    assert log.refresh().slots["slurm-0"].state is S.SUSPECT


@pytest.mark.parametrize("incarnation", ["", "aa"])
def test_a_persons_word_counts_while_the_keeper_holds_what_it_fenced(log: FleetLog, incarnation: str) -> None:
    url = "http://h:9" if incarnation else ""
    first = Event(
        engine="slurm-0", url=url, incarnation=incarnation, launcher="slurm", to=S.JOINING, reason="r", member=True
    )
    log.append("person:ann", lambda _: [first])
    keeper = keeper_elsewhere(log)
    held(log, "slurm-0", keeper, [S.SUSPECT])
    with pytest.raises(BadInput, match="slurm-0 is suspect: nothing to confirm"):
        membership.is_gone(log.store, log, "slurm-0", url, None, "node is off", "bob")
    held(log, "slurm-0", keeper, [S.FENCED])
    assert membership.is_gone(log.store, log, "slurm-0", url, None, "node is off", "bob")
    slot = log.refresh().slots["slurm-0"]
    assert (slot.state, slot.owner) == (S.GONE, None) and "bob confirmed: node is off" in slot.evidence


def test_removing_twice_says_since_when_and_by_whom(log: FleetLog) -> None:
    services = services_of("-")
    url = "http://h:9"
    membership.add_external(log, EngineIdentity(url=url, incarnation="cc"), "ann", "borrowed")
    membership.drain(log, services, "external-0", url, "ann", "node maintenance", 0)
    with pytest.raises(membership.Already, match=r"draining already, since 20.* \(drained by ann: node maintenance\)"):
        membership.drain(log, services, "external-0", url, "bob", "again", 0)
    membership.remove(log, services, "external-0", url, "bob", "ECC errors", 0)
    keeper = keeper_elsewhere(log)
    held(log, "external-0", keeper, [S.FENCED])
    began = time.monotonic()  # also while a keeper has it, and at once
    with pytest.raises(membership.Already, match=r"fenced already.*removed by bob: ECC errors\)"):
        membership.remove(log, services, "external-0", url, "ann", "again", 60.0)
    assert time.monotonic() - began < 1


def test_a_wait_is_announced_and_what_time_cannot_change_is_not_waited_for(
    log: FleetLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_POLL_S", 0.02)
    services, said = services_of("-", "http://h:1"), list[str]()
    membership.add_external(log, EngineIdentity(url="http://h:9", incarnation="cc"), "ann", "borrowed")
    slot = log.refresh().slots["external-0"]
    log.append("push:4", lambda _: walk(slot, [S.LOADING], "push of demo:2", holds=True))
    with pytest.raises(ServiceError, match="push:4 has it") as caught:
        membership.drain(log, services, "external-0", slot.url, "ann", "off", 0.01, said.append)
    assert "--wait" in str(caught.value)
    assert len(said) == 1 and "push:4 has it (push of demo:2): waits up to 0.01 s" in said[0]
    with pytest.raises(BadInput, match="is in the fleet; nothing to add"):
        membership.take_back(log, "external-0", None, "ann", "again", 60.0, said.append)
    assert len(said) == 1


def test_status_lists_the_removed_and_says_what_is_normal(
    log: FleetLog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    services = services_of("-", "http://h:1")
    membership.start_more(log, services, "kubernetes", 1, "ann", "more")
    membership.remove(log, services, "kubernetes-0", "", "ann@a-host-with-a-long-name", "a mistake", 0)
    unseen = Probe("http://h:1", None, None, False, "refuses connections")

    async def look(*_: Any) -> tuple[list[Probe], dict[str, str]]:
        return [unseen], {}

    monkeypatch.setattr(fleet, "_open", lambda: (services, log.store, log))
    monkeypatch.setattr(fleet, "look", look)
    result = CliRunner().invoke(fleet_app(), ["status"])
    assert result.exit_code == 1  # for engine-0, which joins
    gone = "gone (removed by ann@a-host-with-a-long-name: a mistake; back with: rl360 fleet add kubernetes-0)"
    assert gone in result.output
    assert "not seen yet: refuses connections" in result.output and " gone " not in result.output.split("kubernetes")[0]
    assert "normal before the first push of a run: start a run" in result.output
    assert "person:ann@a-host-with-a-long-name" in result.output


def test_the_supervisor_starts_again_what_ended() -> None:
    slot = Slot(name="engine-0", url="http://h:1", launcher="supervised", state=S.GONE, reason="its processes ended")
    row = fleet._row("engine-0", Probe("http://h:1", None, None, False, "refused"), {}, slot, None)
    assert row["reason"] == "its processes ended; being started by the supervisor"


def test_help_says_when_joining_is_normal() -> None:
    assert "before the first push" in " ".join(shown("fleet", "status").split())


def keeper_of(log: FleetLog) -> Keeper:
    """A keeper's memory, with the lease held; no engine and no HTTP."""
    keeper = Keeper(cast(Any, log.store), services_of("-"), OPTIONS, NOBODY, said.append)
    keeper.lease._until = time.monotonic() + 60
    return keeper


def test_one_error_is_said_once_and_shown_while_it_lasts(log: FleetLog) -> None:
    said.clear()
    keeper = keeper_of(log)

    async def fails(text: str) -> None:
        raise Rl360Error(text)

    async def rounds() -> None:
        for text in ("no sbatch", "no sbatch", "quota", "no sbatch"):
            keeper.tasks["slurm-0"] = asyncio.create_task(fails(text))
            await asyncio.wait(keeper.tasks.values())
            keeper.reap()

    asyncio.run(rounds())
    assert said == ["slurm-0: no sbatch", "slurm-0: quota", "slurm-0: no sbatch"]
    assert keeper.notes == {"slurm-0": "no sbatch"}


def test_a_keeper_does_not_say_a_move_that_somebody_else_made(log: FleetLog) -> None:
    said.clear()
    membership.add_external(log, EngineIdentity(url="http://h:9", incarnation="cc"), "ann", "borrowed")
    slot = log.refresh().slots["external-0"]
    membership.drain(log, services_of("-"), "external-0", slot.url, "ann", "off", 0)
    keeper = keeper_of(log)
    assert asyncio.run(keeper.write(slot, walk(slot, [S.SUSPECT], "silent"))) is None
    assert said == []
