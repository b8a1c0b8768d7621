"""Which engines are the fleet's, and what a push writes about them in the fleet's log.

`members` is the set that a push freezes: the configured engines, those added, without those removed. A push claims its
receivers after it wrote its intent and before it touches one (`claim`): from then on they are `loading` and nobody
else's. An engine that somebody else owns or that is fenced is not claimed and must be left alone. The moves of the push
itself are written when it is over (`settle`), from its record: no object is written while engines are paused, and a
push that was killed leaves its engines `loading`, which is what they may be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl360.engines.fleet import EngineIdentity, EngineState
from rl360.engines.fleet_log import (
    Event,
    FleetLog,
    FleetState,
    Slot,
    arrival,
    claim_is_over,
    push_owner,
    slot_after,
    taking,
    walk,
)
from rl360.weights.fence import Intent, Store
from rl360.weights.messages import PushRecord

S = EngineState
EXTERNAL = "external"  # launcher of somebody else's engines, added by their URL
SUPERVISED = "supervised"  # launcher of the configured engines: something outside keeps a process at their URL
_TO_LOADING = {
    S.JOINING: [S.LOADING],
    S.SERVING: [S.LOADING],
    S.SUSPECT: [S.LOADING],
    S.DRAINING: [S.JOINING, S.LOADING],
    S.CONFIRMED: [S.SUSPECT, S.LOADING],
    S.LOADING: [S.LOADING],
}
_FROM_LOADING = {
    S.JOINING: [S.DRAINING, S.JOINING],
    S.LOADING: [S.LOADING],
    S.CONFIRMED: [S.CONFIRMED],
    S.SERVING: [S.CONFIRMED, S.SERVING],
    S.DRAINING: [S.DRAINING],
    S.SUSPECT: [S.SUSPECT],
    S.FENCED: [S.SUSPECT, S.FENCED],
    S.GONE: [S.SUSPECT, S.FENCED, S.GONE],
}


def is_external(slot: Slot | None, configured: Sequence[str]) -> bool:
    """Whether somebody else started it: our token is not shown to it. A URL that is configured is ours."""
    return slot is not None and slot.launcher == EXTERNAL and slot.url not in {url.rstrip("/") for url in configured}


def holders(state: FleetState, configured: Sequence[str]) -> dict[str, str]:
    """Incarnation -> the slot that it belongs to: of two that hold one a configured engine's, else the earlier."""
    ours = {f"engine-{number}" for number in range(len(configured))}
    held = [s for s in state.slots.values() if s.incarnation and s.member is not False]
    living = [s for s in reversed(held) if s.state not in (S.FENCED, S.GONE)]
    return {slot.incarnation: slot.name for slot in sorted(living, key=lambda slot: slot.name in ours)}


def members(state: FleetState, configured: Sequence[str]) -> dict[str, str]:
    """Name -> URL of every engine a push must reach; `configured` are the services' engine URLs."""
    found = {}
    for number, url in enumerate(configured):
        slot = state.slots.get(f"engine-{number}")
        if slot is None or slot.member is not False:
            found[f"engine-{number}"] = url.rstrip("/")
    kept = holders(state, configured)
    for slot in state.slots.values():
        twice = slot.url in found.values() or kept.get(slot.incarnation, slot.name) != slot.name
        if slot.member and slot.url and not twice:
            found[slot.name] = slot.url
    return found


def _name_of(state: FleetState, names: Mapping[str, str], url: str) -> str:
    """The slot's name; a URL that was configured when the push began keeps it, whatever was added since."""
    return next((name for name, held in names.items() if held == url), "") or next(
        slot.name for slot in state.slots.values() if slot.url == url
    )


def _bring(
    store: Store,
    state: FleetState,
    names: Mapping[str, str],
    engine: EngineIdentity,
    owner: str,
    tail: list[S],
    reason: str,
    **more: Any,
) -> list[Event] | str:
    """The events that make `engine` loading under `owner`, and then all of `tail`; or why that is not to be."""
    name = _name_of(state, names, engine.url)
    slot = state.slots.get(name)
    over = ""
    if slot is not None and slot.owner not in (None, owner):
        over = claim_is_over(store, slot.owner or "")
        if not over:
            return f"{name} belongs to {slot.owner}"
    if slot is not None and slot.owner == owner and slot.state is S.LOADING and not tail:
        return []  # written by a try of this call whose reply was lost
    launcher = slot.launcher if slot else SUPERVISED
    events = arrival(slot, name, engine, launcher, "answered when a push froze its set")
    now = slot_after(events[-1]) if events else slot
    assert now is not None  # an engine that is not in the log has an arrival
    if now.state not in _TO_LOADING:
        return f"{name} is {now.state}: {now.reason}"
    events += walk(now, [*_TO_LOADING[now.state], *tail], reason, evidence="", **more)
    return taking(events, slot, owner, over)


def claim(log: FleetLog, names: Mapping[str, str], intent: Intent) -> dict[str, str]:
    """Take every receiver of the intent. Returns those that may not be taken: URL -> why."""
    owner, reason = push_owner(intent.epoch), f"push of {intent.version}"
    refused: dict[str, str] = {}

    def decide(state: FleetState) -> list[Event]:
        refused.clear()
        events: list[Event] = []
        for engine in intent.engines:
            found = _bring(log.store, state, names, engine, owner, [], reason, epoch=intent.epoch, holds=True)
            if isinstance(found, str):
                refused[engine.url] = found
            else:
                events += found
        return events

    log.append(owner, decide)
    return refused


def settle(log: FleetLog, record: PushRecord) -> None:
    """Write what the push made of the engines it owns, and give them back. Safe to repeat."""
    owner = push_owner(record.epoch)
    outcomes = {(outcome.identity.url, outcome.identity.incarnation): outcome for outcome in record.engines}

    def decide(state: FleetState) -> list[Event]:
        events: list[Event] = []
        for slot in state.slots.values():
            outcome = outcomes.get((slot.url, slot.incarnation))
            if slot.owner != owner or outcome is None:
                continue
            reason = outcome.reason or f"push of {record.version} {record.status}"
            serving = outcome.state is S.SERVING
            # an engine that a failed push never came to still serves what it served
            version = (record.version if outcome.calls else slot.version) if serving else ""
            evidence = reason if outcome.state in (S.FENCED, S.GONE) else ""
            events += walk(slot, _FROM_LOADING[outcome.state], reason, version=version, evidence=evidence)
        return events

    log.append(owner, decide)


def serves_again(log: FleetLog, names: Mapping[str, str], engine: EngineIdentity, record: PushRecord) -> bool:
    """A push read back that `engine` still holds what `record` confirmed: it serves. False: it is not ours to say."""
    owner, reason = push_owner(record.epoch), f"still holds {record.version}: incarnation, name and checksums read back"
    allowed = True

    def decide(state: FleetState) -> list[Event]:
        nonlocal allowed
        slot = state.slots.get(_name_of(state, names, engine.url))
        allowed = True
        if slot is not None and slot.state is S.SERVING and slot.incarnation == engine.incarnation and not slot.owner:
            return []
        told = {"epoch": record.epoch, "version": record.version}
        found = _bring(log.store, state, names, engine, owner, _FROM_LOADING[S.SERVING], reason, **told)
        allowed = not isinstance(found, str)
        return [] if isinstance(found, str) else found

    log.append(owner, decide)
    return allowed
