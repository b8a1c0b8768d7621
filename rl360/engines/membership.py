"""What a person may do to the fleet: add, remove, drain, and give their word. Events in the fleet's log, nothing more.

Nothing here starts or ends a process; the keeper does, from what the log says. A person moves a slot that nobody owns;
one that a push or the keeper has is waited for, and `say` is told at once what is waited for. Each function is one
entry of `person:NAME`, or an error that says why not and what to do. Only a person's word that an engine is gone, and
the removal of one that was never started, do not wait for a keeper that holds it.
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
    burial,
    change,
    claim_is_over,
    read_lease,
    slot_after,
    taking,
    walk,
)
from rl360.engines.keeper_lease import dismiss, keepers
from rl360.engines.launchers import cannot_start_here
from rl360.engines.members import EXTERNAL, SUPERVISED, members
from rl360.engines.processes import EndProof
from rl360.errors import BadInput, ServiceError
from rl360.weights import fence

S = EngineState
STARTED_BY_US = ("local", "kubernetes", "slurm")
LOCAL_PORT_OFFSET = 50  # of the first local engine behind the first configured one: `rl360 up` fills the ports between
LOOK_BACK = 500  # entries of the log in which it is looked up who removed an engine
_POLL_S = 1.0
Say = Callable[[str], None]


class Already(BadInput):
    """Nothing to do: the engine is what was asked for, or on its way there."""


def _quiet(line: str) -> None:
    """Nobody listens."""


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


def cannot_start(store: fence.Store, services: Services, kind: str) -> str:
    """Why no keeper can start engines by launcher `kind`, as far as is known here; empty when one may be able to: a
    keeper on another host may have what this one lacks."""
    for token in keepers(store):
        lease = read_lease(store, token)
        if lease is not None and not fence.owner_runs(lease) and not claim_is_over(store, f"keeper:{token}"):
            return ""
    return cannot_start_here(kind, services)


def who_removed(log: FleetLog, name: str) -> str:
    """`drained by ann: node maintenance`, from the newest part of the log; empty when it isn't there."""
    found = ""
    for entry in log.recent(LOOK_BACK):
        for event in entry.events:
            if event.engine == name and event.member is not False:
                found = ""
            elif event.engine == name and entry.owner.startswith("person:"):
                how = "drained" if event.to is S.DRAINING else "removed"
                if not found or event.to in (S.DRAINING, S.SUSPECT):  # and not who confirmed its end later
                    found = f"{how} by {entry.owner.partition(':')[2]}: {event.reason}"
    return found


def _act(
    log: FleetLog,
    name: str,
    by: str,
    wait_s: float,
    decide: Callable[[FleetState], Sequence[Event]],
    say: Say = _quiet,
    word: str = "",
    longer: str = ", or wait longer with --wait",
) -> None:
    """Write `decide`'s events once nobody else has the slot. `word`: why a keeper that has it need not be waited for.
    What `decide` refuses, or finds done, is not waited for."""
    until, owner, told = time.monotonic() + wait_s, f"person:{by}", False

    def over(slot: Slot | None) -> str:
        if slot is None or slot.owner is None:
            return ""
        return word if word and slot.owner.startswith("keeper:") else claim_is_over(log.store, slot.owner)

    def taken(state: FleetState) -> list[Event]:
        slot = state.slots.get(name)
        return taking(list(decide(state)), slot if (why := over(slot)) else None, owner, why)

    while True:
        state = log.refresh()
        slot = state.slots.get(name)
        if slot is None or slot.owner is None or over(slot):
            log.append(owner, taken)
            return
        try:
            if not decide(state):
                return
        except Already:
            raise
        except BadInput:
            # what a keeper is ending may be gone in a moment, which changes the answer
            if not (slot.owner.startswith("keeper:") and slot.state in (S.SUSPECT, S.FENCED)):
                raise
        has = f"{name} is {slot.state} and {slot.owner} has it ({slot.reason})"
        if time.monotonic() > until:
            raise ServiceError(
                f"{has}; try again when it has ended (`rl360 fleet status`){longer}; a push that did not finish ends "
                "when its run is resumed"
            )
        if not told:
            say(f"{has}: waits up to {wait_s:g} s for its end (--wait)")
            told = True
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


def _already(log: FleetLog, slot: Slot, ends: tuple[EngineState, ...]) -> None:
    """`Already` that says since when and by whom, when the slot is on its way out or out."""
    if slot.member is False and slot.state in ends:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(slot.since))
        who = who_removed(log, slot.name) or "removed by a person"
        raise Already(
            f"{slot.name} is {slot.state} already, since {since} ({who}); back with: rl360 fleet add {slot.name}"
        )


def remove(
    log: FleetLog,
    services: Services,
    name: str,
    url: str,
    by: str,
    reason: str,
    wait_s: float,
    say: Say = _quiet,
) -> bool:
    """Out of the fleet now: suspect, for the keeper to fence. True: gone at once, for it was never started."""
    word = _never_started(log, services, name)

    def decide(state: FleetState) -> list[Event]:
        _not_the_last(state, services, name)
        slot, begun = _begun(state, name, url, reason)
        if word and _unbegun(slot) and slot.state is not S.GONE:
            return burial(slot, EndProof(gone=True, evidence=word), reason, member=False)
        _already(log, slot, (S.SUSPECT, S.FENCED, S.GONE))
        to = slot.state if slot.state in (S.SUSPECT, S.FENCED, S.GONE) else S.SUSPECT
        return [*begun, change(slot, to, reason, member=False)]

    _act(log, name, by, wait_s, decide, say, word)
    return bool(word)


def _unbegun(slot: Slot) -> bool:
    """Whether the log knows of nothing that this slot's launcher made."""
    return slot.launcher in STARTED_BY_US and not (slot.incarnation or slot.ref or slot.process)


def _never_started(log: FleetLog, services: Services, name: str) -> str:
    """Why nothing can have been made of this slot, by its launcher; empty when that is not known."""
    slot = log.refresh().slots.get(name)
    cannot = cannot_start(log.store, services, slot.launcher) if slot is not None and _unbegun(slot) else ""
    return f"was never started: {cannot}" if cannot else ""


def drain(
    log: FleetLog,
    services: Services,
    name: str,
    url: str,
    by: str,
    reason: str,
    wait_s: float,
    say: Say = _quiet,
) -> None:
    """Out of the fleet once what is in flight is done."""
    word = _never_started(log, services, name)

    def decide(state: FleetState) -> list[Event]:
        _not_the_last(state, services, name)
        slot, begun = _begun(state, name, url, reason)
        _already(log, slot, (S.DRAINING, S.GONE))
        if word and _unbegun(slot):
            raise BadInput(f"{name} {word}; there is nothing to wait for: use `rl360 fleet remove {name}`")
        if slot.state in (S.SUSPECT, S.FENCED, S.GONE):
            raise BadInput(f"{name} is {slot.state}, there is nothing to wait for: use `rl360 fleet remove {name}`")
        return [*begun, change(slot, S.DRAINING, reason, member=False)]

    _act(log, name, by, wait_s, decide, say)


def take_back(
    log: FleetLog, name: str, now: EngineIdentity | None, by: str, reason: str, wait_s: float, say: Say = _quiet
) -> None:
    """An engine of the log is the fleet's again. `now`: who answers at its URL."""

    def decide(state: FleetState) -> list[Event]:
        slot = state.slots.get(name)
        if slot is None or (slot.member is not False and slot.state not in (S.FENCED, S.GONE)):
            raise BadInput(f"{name} is in the fleet; nothing to add")
        if now is not None:
            _not_twice(state, name, now, {})
        member = None if slot.launcher == SUPERVISED else True
        fresh: dict[str, Any] = {"incarnation": "", "process": None, "ref": {}, "epoch": None, "version": ""}
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

    _act(log, name, by, wait_s, decide, say)


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


def _write_gone(
    store: fence.Store, url: str, incarnation: str, epoch: int, reason: str, by: str
) -> fence.GoneConfirmation:
    """Keep a person's word that this incarnation, a receiver of that push, is gone."""
    word = fence.GoneConfirmation(
        url=url, incarnation=incarnation, epoch=epoch, reason=reason.strip(), by=by, confirmed_at=time.time()
    )
    store.put_once(fence.gone_key(url, incarnation), word.model_dump_json().encode())
    return word


def confirm_gone(store: fence.Store, url: str, reason: str, by: str) -> list[fence.GoneConfirmation]:
    """Record a person's word for each incarnation at `url` that an open intent names; `BadInput` when none does."""
    if not reason.strip():
        raise BadInput("confirm-gone needs a reason: say how you know that the engine is gone")
    written = [
        _write_gone(store, engine.url, engine.incarnation, intent.epoch, reason, by)
        for intent in fence.open_intents(store)
        for engine in intent.engines
        if engine.url == url.rstrip("/") and not fence.is_gone_confirmed(store, engine)
    ]
    if not written:
        raise BadInput(
            f"engine {url}: no unfinished push names it, so there is nothing to confirm (`rl360 fleet status`)"
        )
    return written


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
    if slot is not None and not (fenced or replaced or unsaid):
        raise BadInput(f"{name} is {slot.state}: nothing to confirm; it is not fenced, and no unfinished push names it")
    if unsaid or slot is None or not (fenced or replaced):
        words = confirm_gone(store, url, reason, by)  # an error when there is nothing to confirm
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

    if fenced is not None and not fenced.incarnation:
        told.append(f"{name}, which never answered, is gone")
    elif fenced is not None:
        _write_gone(store, url, fenced.incarnation, fenced.epoch or 0, reason, by)
        told.append(f"{url} incarnation {fenced.incarnation} is gone")
    _act(log, name, by, 0.0, decide, word=evidence if fenced is not None else "", longer="")
    return [*told, *(f"{item.url} incarnation {item.incarnation} is gone" for item in replaced)]
