"""What a person may do to the fleet: add, remove, drain, and give their word. Events in the fleet's log, nothing more.

Nothing here starts or ends a process; the keeper does, from what the log says. A person moves a slot that nobody owns;
one that a push or the keeper has is waited for. Each function is one entry of `person:NAME`, or an error that says why
not and what to do.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import orjson

from rl360.config.services import Services
from rl360.engines.fleet import EngineIdentity, EngineState
from rl360.engines.fleet_log import (
    KEEPERS,
    Event,
    FleetLog,
    FleetState,
    Slot,
    change,
    claim_is_over,
    read_lease,
    slot_after,
    taking,
    walk,
)
from rl360.engines.keeper_lease import dismiss
from rl360.engines.members import EXTERNAL, SUPERVISED, members
from rl360.errors import BadInput, ServiceError
from rl360.weights import fence

S = EngineState
STARTED_BY_US = ("local", "kubernetes", "slurm")
LOCAL_PORT_OFFSET = 50  # of the first local engine behind the first configured one: `rl360 up` fills the ports between
_POLL_S = 1.0


def _free_names(state: FleetState, kind: str, count: int) -> list[str]:
    numbers = (number for number in range(100_000) if f"{kind}-{number}" not in state.slots)
    return [f"{kind}-{next(numbers)}" for _ in range(count)]


def _local_url(services: Services, state: FleetState, taken: set[int]) -> str:
    """A port behind those of the configured engines that neither a slot nor anything that listens has."""
    first = min(urlsplit(url).port or 13_000 for url in services.engine_urls) + LOCAL_PORT_OFFSET
    used = {urlsplit(slot.url).port for slot in state.slots.values() if slot.url} | taken
    for port in range(first, first + 50):
        if port in used:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                taken.add(port)
                return f"http://127.0.0.1:{port}"
    raise BadInput(f"no free port from {first} to {first + 49} for a local engine; remove one first")


def start_more(log: FleetLog, services: Services, kind: str, count: int, by: str, reason: str) -> list[str]:
    """`count` new slots for the keeper to start."""
    if kind not in STARTED_BY_US:
        raise BadInput(
            f"--launcher {kind}: use one of {', '.join(STARTED_BY_US)}; an engine that runs is added by its URL"
        )
    names: list[str] = []

    def decide(state: FleetState) -> list[Event]:
        names[:] = _free_names(state, kind, count)
        taken: set[int] = set()
        urls = [_local_url(services, state, taken) if kind == "local" else "" for _ in names]
        return [
            Event(engine=name, url=url, launcher=kind, to=S.JOINING, reason=reason, member=True)
            for name, url in zip(names, urls, strict=True)
        ]

    log.append(f"person:{by}", decide)
    return names


def _not_twice(state: FleetState, name: str, engine: EngineIdentity, answering: Mapping[str, str]) -> None:
    """`BadInput` when this engine is another slot's, whatever URL that one names."""
    for held, incarnation in ({slot.name: slot.incarnation for slot in state.slots.values()} | {**answering}).items():
        if incarnation == engine.incarnation and held != name:
            raise BadInput(f"{engine.url} is {held} by another URL (incarnation {incarnation}): use {held} instead")


def add_external(
    log: FleetLog, engine: EngineIdentity, by: str, reason: str, answering: Mapping[str, str] | None = None
) -> str:
    """Someone else's running engine. `answering`: names of the fleet's engines -> incarnation that answers there."""
    names: list[str] = []

    def decide(state: FleetState) -> list[Event]:
        if any(slot.url == engine.url for slot in state.slots.values()):
            return []
        _not_twice(state, "", engine, answering or {})
        names[:] = _free_names(state, EXTERNAL, 1)
        said = {"incarnation": engine.incarnation, "process": engine.process, "reason": reason, "member": True}
        return [Event(engine=names[0], url=engine.url, launcher=EXTERNAL, to=S.JOINING, **said)]

    state = log.append(f"person:{by}", decide)
    return next(slot.name for slot in state.slots.values() if slot.url == engine.url)


def _act(log: FleetLog, name: str, by: str, wait_s: float, decide: Callable[[FleetState], Sequence[Event]]) -> None:
    """Write `decide`'s events once nobody else has the slot."""
    until, owner = time.monotonic() + wait_s, f"person:{by}"

    def taken(state: FleetState) -> list[Event]:
        slot = state.slots.get(name)
        over = claim_is_over(log.store, slot.owner) if slot is not None and slot.owner is not None else ""
        return taking(list(decide(state)), slot if over else None, owner, over)

    while True:
        slot = log.refresh().slots.get(name)
        if slot is None or slot.owner is None or claim_is_over(log.store, slot.owner):
            log.append(owner, taken)
            return
        if time.monotonic() > until:
            raise ServiceError(
                f"{name} is {slot.state} and {slot.owner} has it ({slot.reason}); try again when it has ended "
                "(`rl360 fleet status`), or wait longer with --wait"
            )
        time.sleep(_POLL_S)


def _begun(state: FleetState, name: str, url: str, reason: str) -> tuple[Slot, list[Event]]:
    """The slot, with the event that begins it when the log doesn't know the engine yet."""
    slot = state.slots.get(name)
    if slot is not None:
        return slot, []
    first = Event(engine=name, url=url, launcher=SUPERVISED, to=S.JOINING, reason=reason)
    return slot_after(first), [first]


def _not_the_last(state: FleetState, services: Services, name: str) -> None:
    left = members(state, services.engine_urls)
    if name in left and len(left) == 1:
        raise BadInput(f"{name} is the fleet's last engine; add another one first (`rl360 fleet add --local 1`)")


def remove(log: FleetLog, services: Services, name: str, url: str, by: str, reason: str, wait_s: float) -> None:
    """Out of the fleet now: suspect, for the keeper to fence."""

    def decide(state: FleetState) -> list[Event]:
        _not_the_last(state, services, name)
        slot, begun = _begun(state, name, url, reason)
        if slot.member is False and slot.state in (S.SUSPECT, S.FENCED, S.GONE):
            return []
        to = slot.state if slot.state in (S.SUSPECT, S.FENCED, S.GONE) else S.SUSPECT
        return [*begun, change(slot, to, reason, member=False)]

    _act(log, name, by, wait_s, decide)


def drain(log: FleetLog, services: Services, name: str, url: str, by: str, reason: str, wait_s: float) -> None:
    """Out of the fleet once what is in flight is done."""

    def decide(state: FleetState) -> list[Event]:
        _not_the_last(state, services, name)
        slot, begun = _begun(state, name, url, reason)
        if slot.member is False and slot.state in (S.DRAINING, S.GONE):
            return []
        if slot.state in (S.SUSPECT, S.FENCED, S.GONE):
            raise BadInput(f"{name} is {slot.state}, there is nothing to wait for: use `rl360 fleet remove {name}`")
        return [*begun, change(slot, S.DRAINING, reason, member=False)]

    _act(log, name, by, wait_s, decide)


def take_back(log: FleetLog, name: str, now: EngineIdentity | None, by: str, reason: str, wait_s: float) -> None:
    """An engine of the log is the fleet's again. `now`: who answers at its URL."""

    def decide(state: FleetState) -> list[Event]:
        slot = state.slots.get(name)
        if slot is None or (slot.member is not False and slot.state not in (S.FENCED, S.GONE)):
            raise BadInput(f"{name} is in the fleet; nothing to add")
        if now is not None:
            _not_twice(state, name, now, {})
        member = None if slot.launcher == SUPERVISED else True
        fresh: dict[str, Any] = {
            "incarnation": "",
            "process": None,
            "ref": {},
            "epoch": None,
            "version": "",
            "evidence": "",
        }
        if slot.state in (S.FENCED, S.GONE) and slot.launcher in STARTED_BY_US:
            if slot.state is S.FENCED:
                raise BadInput(f"{name} is not proven gone: first `rl360 fleet confirm-gone {name} --reason '...'`")
            return [change(slot, S.JOINING, reason, member=member, **fresh)]
        if slot.state is S.GONE and now is not None and now.incarnation == slot.incarnation:
            raise BadInput(f"{name} was declared gone and answers as the same incarnation: restart it first")
        if slot.state is S.FENCED and now is not None:
            return [change(slot, S.JOINING, reason, member=member, **fresh)]
        to = S.JOINING if slot.state is S.DRAINING else slot.state
        return [change(slot, to, reason, member=member)]

    _act(log, name, by, wait_s, decide)


def keeper_is_gone(store: fence.Store, keeper: str, reason: str, by: str) -> None:
    """A person's word that a keeper on another host is gone."""
    token = keeper.partition(":")[2]
    if not reason.strip():
        raise BadInput("confirm-gone needs a reason: say how you know that the keeper is gone")
    lease = read_lease(store, token)
    if lease is None:
        raise BadInput(f"{keeper}: no such keeper (`rl360 fleet status` names those that may run)")
    if fence.owner_runs(lease):
        raise BadInput(f"{keeper} runs here as pid {lease.process.pid}: end that first")
    word = {"reason": reason.strip(), "by": by, "confirmed_at": time.time()}
    dismiss(store, token, f"person:{by}")
    store.put_once(f"{KEEPERS}{token}/gone.json", orjson.dumps(word))


def is_gone(
    store: fence.Store, log: FleetLog, name: str, url: str, now: EngineIdentity | None, reason: str, by: str
) -> list[str]:
    """A person's word for every incarnation of this engine whose end is not proven: those that an unfinished push
    names, the fenced one, and those that others replaced. One line for each. `now`: who answers at its URL."""
    slot = log.refresh().slots.get(name)
    fenced = slot if slot is not None and slot.state is S.FENCED else None
    replaced = slot.unproven if slot is not None else ()
    named = {e.incarnation for intent in fence.open_intents(store) for e in intent.engines if e.url == url}
    if now is not None and now.incarnation in named | ({fenced.incarnation} if fenced else set()):
        raise BadInput(f"{name} answers now as incarnation {now.incarnation}: it is not gone; stop it first")
    if not reason.strip():
        raise BadInput("confirm-gone needs a reason: say how you know that the engine is gone")
    told = []
    unsaid = [i for i in named if not fence.is_gone_confirmed(store, EngineIdentity(url=url, incarnation=i))]
    if unsaid or slot is None or not (fenced or replaced):
        words = fence.confirm_gone(store, url, reason, by=by)  # an error when there is nothing to confirm
        told = [f"{w.url} incarnation {w.incarnation} of push epoch {w.epoch} is gone; now resume" for w in words]
    if slot is None or not (fenced or replaced):
        return told
    evidence = f"{by} confirmed: {reason.strip()}"

    def decide(state: FleetState) -> list[Event]:
        found = state.slots[name]
        events = []
        if found.state is S.FENCED:
            events = walk(found, [S.GONE], "a person confirmed that it is gone", evidence=evidence)
            found = found.model_copy(update={"state": S.GONE})
        why = "a person confirmed that an earlier incarnation is gone"
        return events + [change(found, found.state, why, confirms=i.incarnation, evidence=evidence) for i in replaced]

    if fenced is not None:
        word = fence.GoneConfirmation(
            url=url,
            incarnation=fenced.incarnation,
            epoch=fenced.epoch or 0,
            reason=reason.strip(),
            by=by,
            confirmed_at=time.time(),
        )
        store.put_once(fence.gone_key(url, fenced.incarnation), word.model_dump_json().encode())
        told.append(f"{url} incarnation {fenced.incarnation} is gone")
    _act(log, name, by, 0.0, decide)
    return [*told, *(f"{item.url} incarnation {item.incarnation} is gone" for item in replaced)]
