"""The fence: what the store remembers about pushes, so that a retry never touches receivers it can't account for.

A push writes an *intent* (its receivers) before it touches an engine and an *end* when it is over; both once, both
named by the fleet-wide epoch. An intent without an end is *open*: SIGKILL runs no clean-up, so nothing else may be
concluded from it. docs/weights.md explains the rule that `push` applies to open intents.
Objects, outside every run because engines outlive runs:
  _fleet/push/{epoch:08}/intent.json   receivers, version, owner process
  _fleet/push/{epoch:08}/end.json      the PushRecord
  _fleet/push/{epoch:08}/unconfirmed/{engine}.json    evidence of an engine whose end is not proven
  _fleet/gone/{engine}/{incarnation}.json             a person's word that this incarnation is gone, with the reason
  _fleet/versions/{run}/{k:08}         a version that was confirmed at least once; versions never go back
"""

from __future__ import annotations

import os
import time
import uuid
from typing import Protocol
from urllib.parse import urlsplit

from pydantic import Field

from rl360.engines.fleet import EngineIdentity
from rl360.engines.processes import ProcessId, alive, boot_id, host_id, identify
from rl360.errors import BadInput, Rl360Error, ServiceError
from rl360.store.data import Data, M, parse, read
from rl360.weights.messages import PushRecord, PushStatus, parse_version

_PUSH = "_fleet/push/"
_GONE = "_fleet/gone/"


class Store(Protocol):
    """The part of the object store a fence needs."""

    def get(self, key: str) -> bytes: ...
    def put(self, key: str, data: bytes) -> None: ...
    def put_once(self, key: str, data: bytes) -> bool: ...
    def exists(self, key: str) -> bool: ...
    def list(self, prefix: str) -> list[str]: ...


class Owner(Data):
    """The process that runs a push. `token` tells two pushes of one process apart."""

    host: str
    boot_id: str
    process: ProcessId
    token: str


class Intent(Data):
    """Receivers of a push, written before the first of them is touched."""

    epoch: int = Field(ge=1)
    run: str
    step: int | None
    version: str
    engines: tuple[EngineIdentity, ...]
    group_name: str
    call_deadline_s: float
    owner: Owner
    written_at: float


class GoneConfirmation(Data):
    """A person's statement, kept for good."""

    url: str
    incarnation: str
    epoch: int
    reason: str = Field(min_length=1)
    by: str
    confirmed_at: float


class Unconfirmed(Data):
    """An engine whose end could not be proven, and what was seen."""

    identity: EngineIdentity
    epoch: int
    version: str
    group_name: str
    evidence: str
    command: str
    answered_at: float = Field(description="its last answer that a push got, by that push's clock")
    seen_at: float


_running: set[str] = set()  # tokens of the pushes running in this process


def new_owner() -> Owner:
    process = identify(os.getpid())
    assert process is not None  # this process is alive
    return Owner(host=host_id(), boot_id=boot_id(), process=process, token=uuid.uuid4().hex)


def owner_runs(owner: Owner) -> bool:
    """Whether the push of this owner is known to still run. On another host nothing is known; see docs/weights.md."""
    if owner.host != host_id() or owner.boot_id != boot_id():
        return False
    if owner.process.pid == os.getpid():
        return owner.token in _running
    return alive(owner.process)


def mark_running(owner: Owner, running: bool) -> None:
    """Note that a push of this process began or ended."""
    if running:
        _running.add(owner.token)
    else:
        _running.discard(owner.token)


def slug(url: str) -> str:
    """An engine's URL as part of a key."""
    parts = urlsplit(url)
    return f"{parts.hostname}-{parts.port}"


def intent_key(epoch: int) -> str:
    return f"{_PUSH}{epoch:08}/intent.json"


def end_key(epoch: int) -> str:
    return f"{_PUSH}{epoch:08}/end.json"


def gone_key(url: str, incarnation: str) -> str:
    return f"{_GONE}{slug(url)}/{incarnation}.json"


def _epochs(store: Store) -> tuple[set[int], set[int]]:
    """Epochs with an intent, and with an end."""
    intents, ends = set(), set()
    for key in store.list(_PUSH):
        epoch, _, name = key[len(_PUSH) :].partition("/")
        if name == "intent.json":
            intents.add(int(epoch))
        elif name == "end.json":
            ends.add(int(epoch))
    return intents, ends


def _read(store: Store, key: str, model: type[M]) -> M:
    return parse(store.get(key), key, model, f"not a {model.__name__}")


def read_end(store: Store, epoch: int) -> PushRecord | None:
    """The record of a push that is over."""
    return read(store, end_key(epoch), PushRecord, "not a PushRecord")


def look(store: Store) -> tuple[int, list[Intent]]:
    """The next epoch and the intents without an end, oldest first, from one listing. Who writes an intent later takes
    that epoch, so nobody begins one without having met those before."""
    intents, ends = _epochs(store)
    return max(intents | ends, default=0) + 1, [_read(store, intent_key(n), Intent) for n in sorted(intents - ends)]


def open_intents(store: Store) -> list[Intent]:
    """Intents without an end, oldest first."""
    return look(store)[1]


def last_record(store: Store) -> PushRecord | None:
    """The newest push that is over, for people to look at."""
    _, ends = _epochs(store)
    return read_end(store, max(ends)) if ends else None


def last_confirmed(store: Store, run: str) -> PushRecord | None:
    """The run's newest push that confirmed, among the last few."""
    for epoch in sorted(_epochs(store)[1], reverse=True)[:20]:
        record = read_end(store, epoch)
        if record is not None and record.run == run and record.status is PushStatus.CONFIRMED:
            return record
    return None


def put_mine(store: Store, key: str, data: bytes) -> bool:
    """Conditional put whose answer survives a lost reply: True when the object there is the one we wanted to write."""
    return store.put_once(key, data) or store.get(key) == data


def next_epoch(store: Store) -> int:
    return look(store)[0]


def write_intent(store: Store, intent: Intent) -> None:
    """Take the epoch. `ServiceError` when another push took it first: the caller starts over and meets that intent."""
    if not put_mine(store, intent_key(intent.epoch), intent.model_dump_json().encode()):
        raise ServiceError(f"push epoch {intent.epoch} was taken by another push just now; retry")


def write_end(store: Store, record: PushRecord) -> bool:
    """Close the epoch. False: it was closed by another push, which has taken the receivers over."""
    return put_mine(store, end_key(record.epoch), record.model_dump_json().encode())


def is_over(store: Store, intent: Intent) -> bool:
    """Whether this push has no epoch to go on with: a later one closed it, another took it, or it was never written."""
    try:
        mine = store.get(intent_key(intent.epoch)) == intent.model_dump_json().encode()
    except KeyError:
        return True
    return not mine or store.exists(end_key(intent.epoch))


def is_gone_confirmed(store: Store, engine: EngineIdentity) -> bool:
    return store.exists(gone_key(engine.url, engine.incarnation))


def note_unconfirmed(
    store: Store, intent: Intent, engine: EngineIdentity, evidence: str, answered_at: float | None = None
) -> Unconfirmed:
    """Write what was seen of an engine whose end isn't proven; overwritten by a later look. It answered when its
    push wrote the intent, if nothing later is known. What is unconfirmed counts, written or not: a store that fails is
    told in the evidence."""
    note = Unconfirmed(
        identity=engine,
        epoch=intent.epoch,
        version=intent.version,
        group_name=intent.group_name,
        evidence=evidence,
        command=f"rl360 fleet confirm-gone {engine.url} --reason '...'",
        answered_at=answered_at or intent.written_at,
        seen_at=time.time(),
    )
    try:
        known = [old.answered_at for old in read_unconfirmed(store, intent.epoch) if old.identity == engine]
        note = note.model_copy(update={"answered_at": answered_at or max([intent.written_at, *known])})
        key = f"{_PUSH}{intent.epoch:08}/unconfirmed/{slug(engine.url)}.json"
        store.put(key, note.model_dump_json().encode())
    except Rl360Error as error:
        return note.model_copy(update={"evidence": f"{evidence}; this could not be written down: {error}"})
    return note


def read_unconfirmed(store: Store, epoch: int) -> list[Unconfirmed]:
    """What was seen of the engines of this push that are not proven gone."""
    return [_read(store, key, Unconfirmed) for key in store.list(f"{_PUSH}{epoch:08}/unconfirmed/")]


def unconfirmed_report(notes: list[Unconfirmed]) -> str:
    """What a person needs to find out whether these engines are gone, and to say so: Markdown."""
    told = "They may still be written to, so nothing is retried until somebody knows that they are gone."
    parts = [
        f"## Engines that are not proven gone\n\nA push cannot account for these. {told} Nothing committed is lost."
    ]
    for note in notes:
        tree = note.identity.process
        where = "its processes were not visible to the push: ask whatever runs it (pod, job, host)"
        if tree is not None:
            began = _clock(tree.started_at) if tree.started_at else f"{tree.root.start_ticks} ticks after boot"
            pids = ",".join(str(member.pid) for member in tree.members)
            where = (
                f"pid {tree.root.pid} on {tree.host}, boot {tree.boot_id[:8]}, started {began}, process group "
                f"{tree.group or 'shared'}: `ps -o pid,lstart,cmd -p {pids}` there"
            )
        parts.append(
            f"### {note.identity.url}\n"
            f"- incarnation `{note.identity.incarnation}`, receiver of push epoch {note.epoch} ({note.version}) in the "
            f"group `{note.group_name}`\n"
            f"- last answer {_clock(note.answered_at)}; looked for {_clock(note.seen_at)}\n"
            f"- seen: {note.evidence}\n"
            f"- check: {where}; end it if it lives\n"
            f"- once it is gone: `{note.command}`"
        )
    return "\n\n".join([*parts, "Then resume the run: it goes on at the push and repeats nothing before it."])


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def check_version_advances(store: Store, run: str, version: str) -> None:
    """Versions never go back: an older one than was ever confirmed for the run is refused."""
    named_run, steps = parse_version(version)
    if named_run != run:
        raise BadInput(f"version {version!r} does not belong to run {run!r}")
    confirmed = [int(key.rpartition("/")[2]) for key in store.list(f"_fleet/versions/{run}/")]
    if confirmed and steps < max(confirmed):
        raise BadInput(f"version {version}: engines already held {run}:{max(confirmed)}; versions never go back")


def note_version(store: Store, run: str, version: str) -> None:
    store.put_once(f"_fleet/versions/{run}/{parse_version(version)[1]:08}", version.encode())
