"""The fleet's memory: one linear log of events in the store, and the slots that follow from it.

Contract: an *entry* is one object `_fleet/events/{seq:08}.json`, written by conditional put as the next number, so that
of two writers one is told that it lost, reads what won and decides again. An entry holds the events its owner makes
together; it counts whole or not at all. The state is the fold of all entries and nothing else; every SNAPSHOT_EVERY
entries it is kept as `_fleet/snapshots/{seq:08}.json`, so that a reader starts there. `fold` refuses what the machine
(rl360/engines/fleet.py) has no arrow for, and a move by anybody but the slot's owner: before an entry is written, and
again when it is read. Only a push makes an engine loading, confirmed or serving.

An owner is `push:EPOCH`, `keeper:TOKEN` or `person:NAME`. A claim lasts until its owner gives it back, or until it is
proven that the owner can't act any more (`claim_is_over`). A keeper's also ends when its lease was taken from it
(rl360/engines/keeper_lease.py); what it still tries then does not follow from the log.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from pydantic import ConfigDict, Field

from rl360.engines.fleet import EngineIdentity, EngineState, advance
from rl360.engines.processes import EndProof, ProcessTree, boot_id, host_id, proof_of_end
from rl360.errors import CorruptObject, Rl360Error, ServiceError
from rl360.store.data import Data, parse, read
from rl360.weights import fence

EVENTS = "_fleet/events/"
SNAPSHOTS = "_fleet/snapshots/"
KEEPERS = "_fleet/keepers/"
SNAPSHOT_EVERY = 64  # a cold reader reads fewer entries than this, one small object each
_RACES = 200  # lost races in a row before a writer gives up: somebody writes without end
_PUSH_ONLY = frozenset({EngineState.LOADING, EngineState.CONFIRMED, EngineState.SERVING})
NAME = r"^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$"


class FleetConflict(ServiceError):
    """A move that the slot's state or owner does not allow now. Safe to decide again."""


class _Stored(Data):
    model_config = ConfigDict(populate_by_name=True)


class Event(_Stored):
    """One engine's move. `was` is its state before, null for a slot that begins; `was == to` changes only the rest."""

    engine: str = Field(pattern=NAME)
    url: str
    incarnation: str = Field("", description="empty until it answered once")
    was: EngineState | None = Field(None, alias="from")
    to: EngineState
    reason: str = Field(min_length=1)
    launcher: str
    epoch: int | None = None
    evidence: str = ""
    holds: bool = Field(False, description="whether the owner keeps the slot after this event")
    took_from: str = Field("", description="owner whose claim is over; `evidence` says how that is known")
    member: bool | None = Field(None, description="true: added, false: removed, null: as the services say")
    version: str = Field("", description="what it serves")
    process: ProcessTree | None = None
    ref: dict[str, str] = Field(default_factory=dict, description="the launcher's own names of what it started")
    confirms: str = Field("", description="a replaced incarnation that a person knows to be gone")


class Entry(_Stored):
    """What one owner wrote at once. `token` tells a put whose reply was lost from another's."""

    schema_version: Literal[1]
    seq: int = Field(ge=1)
    at: float
    token: str
    owner: str = Field(pattern=r"^(push|keeper|person):.+$")
    events: tuple[Event, ...] = Field(min_length=1)


class Unproven(_Stored):
    """An incarnation whose place another one took before its end was proven."""

    url: str
    incarnation: str
    evidence: str


class Slot(_Stored):
    """One engine of the fleet as the log has it. `starts` counts its incarnations; `since`: when it got its state."""

    name: str
    url: str
    launcher: str
    state: EngineState
    owner: str | None = None
    member: bool | None = None
    incarnation: str = ""
    process: ProcessTree | None = None
    ref: dict[str, str] = Field(default_factory=dict)
    starts: int = 1
    epoch: int | None = None
    version: str = ""
    reason: str = ""
    evidence: str = ""
    since: float = 0.0
    unproven: tuple[Unproven, ...] = ()
    flaps: tuple[float, ...] = Field((), description="when a keeper took this incarnation's traffic, the last 16 times")


class FleetState(_Stored):
    """All slots after entry `seq`, in the order in which they joined."""

    seq: int = 0
    slots: dict[str, Slot] = Field(default_factory=dict)


def push_owner(epoch: int) -> str:
    return f"push:{epoch}"


def event_key(seq: int) -> str:
    return f"{EVENTS}{seq:08}.json"


def snapshot_key(seq: int) -> str:
    return f"{SNAPSHOTS}{seq:08}.json"


def fold(state: FleetState, entry: Entry) -> FleetState:
    """The state after this entry; `FleetConflict` when any of its events is not allowed in `state`."""
    slots = dict(state.slots)
    for event in entry.events:
        slots[event.engine] = _apply(slots.get(event.engine), entry, event)
    return FleetState(seq=entry.seq, slots=slots)


def _apply(slot: Slot | None, entry: Entry, event: Event) -> Slot:
    begins = event.to is EngineState.JOINING and event.was in (None, EngineState.GONE, EngineState.FENCED)
    _check(slot, entry, event, begins)
    moved = slot is None or begins or event.to is not slot.state
    unproven = slot.unproven if slot else ()
    if slot is not None and begins and slot.state is EngineState.FENCED:
        left = Unproven(url=slot.url, incarnation=slot.incarnation, evidence=slot.evidence or slot.reason)
        unproven = (*unproven, left)
    # a person knows that it is gone, or it answers again and is looked after
    unproven = tuple(item for item in unproven if item.incarnation not in (event.confirms, event.incarnation or None))
    kept = None if slot is None or begins else slot
    flaps = kept.flaps if kept else ()
    lost = kept is not None and (kept.state, event.to) == (EngineState.SERVING, EngineState.SUSPECT)
    if lost and entry.owner.startswith("keeper:"):
        flaps = (*flaps, entry.at)[-16:]
    return Slot(
        name=event.engine,
        url=event.url,
        launcher=event.launcher,
        state=event.to,
        owner=entry.owner if event.holds else None,
        member=event.member,
        incarnation=event.incarnation,
        process=event.process,
        ref=event.ref,
        starts=1 if slot is None else slot.starts + begins,
        epoch=event.epoch,
        version=event.version,
        reason=event.reason,
        evidence=event.evidence or (kept.evidence if kept and not moved else ""),
        since=entry.at if moved or slot is None else slot.since,
        unproven=unproven,
        flaps=flaps,
    )


def _check(slot: Slot | None, entry: Entry, event: Event, begins: bool) -> None:
    """Refuse what the slot's owner or the machine does not allow."""
    name, state = event.engine, slot.state if slot else None
    if slot is not None and slot.owner not in (None, entry.owner) and event.took_from != slot.owner:
        raise FleetConflict(f"{name} belongs to {slot.owner}, {entry.owner} may not move it")
    if event.holds and entry.owner.startswith("person:"):
        raise FleetConflict(
            f"{name}: {entry.owner} can't hold a slot: nothing would show that a person is done with it"
        )
    if event.took_from and not event.evidence:
        raise FleetConflict(f"{name}: {entry.owner} takes it from {event.took_from} without evidence that it is over")
    if event.was is not state:
        raise FleetConflict(f"{name} is {state or 'not known'}, not {event.was or 'not known'}")
    if event.to in _PUSH_ONLY and event.to is not state and not entry.owner.startswith("push:"):
        raise FleetConflict(f"{name}: only a push makes an engine {event.to}, not {entry.owner}")
    if event.to is EngineState.GONE and state is not EngineState.GONE and not event.evidence:
        raise FleetConflict(f"{name}: gone needs evidence")
    if begins:
        return
    if slot is None or state is None:
        raise FleetConflict(f"{name}: a slot begins as joining, not as {event.to}")
    if event.to is not state:
        try:
            advance(state, event.to)
        except Rl360Error as error:
            raise FleetConflict(f"{name}: {error}") from None
    if slot.incarnation and (event.incarnation, event.url) != (slot.incarnation, slot.url):
        raise FleetConflict(f"{name} is incarnation {slot.incarnation} at {slot.url}, not {event.incarnation}")


_KEPT = ("url", "launcher", "member", "incarnation", "process", "ref", "epoch", "version")


def slot_after(event: Event) -> Slot:
    """The slot as an event that gives it back leaves it, for the events of the same entry that follow."""
    kept = {name: getattr(event, name) for name in (*_KEPT, "reason", "evidence")}
    return Slot(name=event.engine, state=event.to, **kept)


def change(slot: Slot, to: EngineState, reason: str, **more: Any) -> Event:
    """The event that moves `slot` to `to` and leaves everything else as it is, but for what `more` names."""
    kept: dict[str, Any] = {name: getattr(slot, name) for name in _KEPT}
    return Event(**kept | {"engine": slot.name, "was": slot.state, "to": to, "reason": reason} | more)


def walk(slot: Slot, states: Iterable[EngineState], reason: str, **more: Any) -> list[Event]:
    """`change` over several states."""
    events: list[Event] = []
    for to in states:
        events.append(change(slot, to, reason, **more))
        slot = slot.model_copy(update={"state": to})
    return events


def taking(events: list[Event], slot: Slot | None, owner: str, over: str) -> list[Event]:
    """The same events, the first of which takes the slot from an owner whose claim is `over` (evidence)."""
    if not events or slot is None or slot.owner in (None, owner):
        return events
    evidence = "; ".join(part for part in (over, events[0].evidence) if part)
    return [events[0].model_copy(update={"took_from": slot.owner, "evidence": evidence}), *events[1:]]


_BURIAL = {EngineState.FENCED: [EngineState.GONE], EngineState.SUSPECT: [EngineState.FENCED, EngineState.GONE]}


def burial(slot: Slot, proof: EndProof, reason: str, **more: Any) -> list[Event]:
    """suspect, fenced, and gone when its end is proven: what is left to do for an incarnation that is no more."""
    if slot.state is EngineState.GONE:
        return []
    states = _BURIAL.get(slot.state, [EngineState.SUSPECT, EngineState.FENCED, EngineState.GONE])
    return walk(slot, states if proof.gone else states[:-1], reason, evidence=proof.evidence, **more)


def arrival(
    slot: Slot | None, name: str, identity: EngineIdentity, launcher: str, reason: str, proof: EndProof | None = None
) -> list[Event]:
    """The events after which `identity` is the slot's incarnation; none when it is already. What it replaces is buried
    first: gone when its processes are proven gone, else kept among the unproven."""
    fresh = {"url": identity.url, "incarnation": identity.incarnation, "process": identity.process}
    if slot is None:
        return [Event(engine=name, launcher=launcher, to=EngineState.JOINING, reason=reason, **fresh)]
    if slot.incarnation == identity.incarnation and slot.url == identity.url:
        return []
    if not slot.incarnation and slot.state is EngineState.JOINING:
        return walk(slot, [EngineState.JOINING], reason, **fresh)
    replaced = f"another incarnation answers at {identity.url}"
    events = burial(slot, proof or proof_of_end(slot.process), replaced)
    over = slot_after(events[-1]) if events else slot
    return [*events, change(over, EngineState.JOINING, reason, evidence="", version="", epoch=None, **fresh)]


def claim_is_over(store: fence.Store, owner: str) -> str:
    """How it is known that this owner can't act any more; empty when it is not known."""
    kind, _, rest = owner.partition(":")
    if kind == "push":
        return f"push epoch {rest} has ended" if store.exists(fence.end_key(int(rest))) else ""
    if store.exists(f"{KEEPERS}{rest}/end.json"):
        return f"keeper {rest[:8]} has stopped"
    if store.exists(f"{KEEPERS}{rest}/gone.json"):
        return f"a person confirmed that keeper {rest[:8]} is gone"
    if store.exists(f"{KEEPERS}{rest}/lapsed.json"):
        return f"keeper {rest[:8]} did not renew its lease and another one took over"
    lease = read_lease(store, rest)
    if lease is None or (lease.host, lease.boot_id) != (host_id(), boot_id()) or fence.owner_runs(lease):
        return ""
    return f"keeper {rest[:8]}, pid {lease.process.pid}, is gone"


def read_lease(store: fence.Store, token: str) -> fence.Owner | None:
    """The process that called itself `keeper:TOKEN`."""
    return read(store, f"{KEEPERS}{token}/lease.json", fence.Owner, "not a keeper's lease")


class FleetLog:
    """The log of one store, read as far as this process has come. Safe to use from several threads."""

    def __init__(self, store: fence.Store) -> None:
        self.store = store
        self.state = FleetState()
        self._one = threading.RLock()

    def refresh(self) -> FleetState:
        """The state as of now."""
        with self._one:
            if self.state.seq == 0:
                self._from_snapshot()
            while True:
                entry = self.entry(self.state.seq + 1)
                if entry is None:
                    return self.state
                try:
                    self.state = fold(self.state, entry)
                except FleetConflict as error:
                    reason = f"does not follow from the entries before it: {error}"
                    raise CorruptObject(event_key(entry.seq), reason) from None

    def _from_snapshot(self) -> None:
        kept = self.store.list(SNAPSHOTS)
        if kept:
            self.state = parse(self.store.get(kept[-1]), kept[-1], FleetState, "not a FleetState")
            if snapshot_key(self.state.seq) != kept[-1]:
                raise CorruptObject(kept[-1], f"is the state after entry {self.state.seq}")

    def entry(self, seq: int) -> Entry | None:
        """One entry; None when it is not written yet."""
        entry = read(self.store, event_key(seq), Entry, "not an Entry")
        if entry is not None and entry.seq != seq:
            raise CorruptObject(event_key(seq), f"calls itself entry {entry.seq}")
        return entry

    def append(self, owner: str, decide: Callable[[FleetState], Sequence[Event]]) -> FleetState:
        """Write what `decide` makes of the newest state, as one entry; again when another entry came first. Calling it
        again must be safe: after a put whose fate is unknown it sees its own events. No events: nothing is written."""
        with self._one:
            for _ in range(_RACES):
                state = self.refresh()
                events = tuple(decide(state))
                if not events:
                    return state
                token = uuid.uuid4().hex
                entry = Entry(
                    schema_version=1, seq=state.seq + 1, at=time.time(), token=token, owner=owner, events=events
                )
                after = fold(state, entry)
                data = entry.model_dump_json(by_alias=True, exclude_defaults=True).encode()
                if fence.put_mine(self.store, event_key(entry.seq), data):
                    self.state = after
                    if entry.seq % SNAPSHOT_EVERY == 0:
                        self.store.put_once(snapshot_key(entry.seq), after.model_dump_json().encode())
                    return after
        raise ServiceError(f"the fleet's log moved on {_RACES} times under {owner}; retry")

    def recent(self, count: int) -> list[Entry]:
        """The last entries, oldest first."""
        newest = self.refresh().seq
        found = (self.entry(seq) for seq in range(max(1, newest - count + 1), newest + 1))
        return [entry for entry in found if entry is not None]
