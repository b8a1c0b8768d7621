"""The keeper's lease: which of several processes looks after the fleet, decided in the store by conditional puts.

  _fleet/keepers/{token}/lease.json       which process this keeper is
  _fleet/keepers/{token}/beats/{n:08}.json   renewal n, written by conditional put; the last BEATS_KEPT are kept
  _fleet/keepers/{token}/end.json         it has stopped;  gone.json: a person's word;  lapsed.json: another took over

A keeper renews every third of `lasts_s` and acts only within `lasts_s` of the start of its last renewal that was
written. Another process that saw no renewal for `lasts_s` and some slack on its own clock takes the next number, with
its own name in it: of the renewal and the taking one is written, so an old keeper that wakes up is told at its next
renewal that it is none any more. No two hosts' clocks are compared. What an old keeper may still have under way then
is harmless: an entry of the fleet's log that does not follow from the newest state is refused there, and it ends only
what it holds in that log as fenced, for good, or as drained.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from pydantic import Field

from rl360.engines.fleet_log import KEEPERS, claim_is_over, read_lease
from rl360.errors import Rl360Error, ServiceError
from rl360.store.data import Data, parse
from rl360.weights import fence

LASTS_S = 30.0
BEATS_KEPT = 8  # a taker writes within `lasts_s` of its look, in which an old keeper renews about three times
NOTES = 200  # engines that one renewal tells of


class Store(fence.Store, Protocol):
    """What a lease needs besides."""

    def delete(self, key: str) -> None: ...


class Beat(Data):
    """One renewal. `notes`: what the keeper sees of engines that start. `taken_by`: who ended this lease."""

    lasts_s: float = Field(gt=0)
    at: float
    notes: dict[str, str] = Field(default_factory=dict)
    taken_by: str = ""


class LeaseLost(ServiceError):
    """This keeper may not act: it could not renew in time, or another one has taken over."""


def slack_s(lasts_s: float) -> float:
    """How much longer than a lease lasts a successor waits: clocks run at slightly different rates, calls take time."""
    return lasts_s / 3


def _folder(token: str) -> str:
    return f"{KEEPERS}{token}/"


def _beat_key(token: str, number: int) -> str:
    return f"{_folder(token)}beats/{number:08}.json"


def _read(store: fence.Store, key: str) -> Beat:
    return parse(store.get(key), key, Beat, "not a keeper's renewal")


def last_beat(store: fence.Store, token: str) -> tuple[int, Beat | None]:
    """Number and content of the newest renewal; 0 and None before the first."""
    for _ in range(3):
        keys = store.list(f"{_folder(token)}beats/")
        if not keys:
            return 0, None
        try:
            return int(keys[-1].rpartition("/")[2].partition(".")[0]), _read(store, keys[-1])
        except KeyError:  # it moved on by BEATS_KEPT between the two calls
            continue
    raise ServiceError(f"renewals of keeper {token[:8]} vanish while they are read; retry")


def _end(store: fence.Store, token: str, taken_by: str) -> None:
    """The lease was taken: write what readers look for. Repeated by whoever finds it missing."""
    store.put_once(f"{_folder(token)}lapsed.json", f'{{"taken_by": "{taken_by}"}}'.encode())


def keepers(store: fence.Store) -> list[str]:
    """Tokens of the keepers whose end is not written."""
    files: dict[str, set[str]] = {}
    for key in store.list(KEEPERS):
        token, _, kind = key[len(KEEPERS) :].partition("/")
        files.setdefault(token, set()).add(kind)
    over = {"end.json", "gone.json", "lapsed.json"}
    return sorted(token for token, kinds in files.items() if "lease.json" in kinds and not kinds & over)


def other_keepers(store: fence.Store, token: str) -> list[str]:
    """Keepers whose end isn't known: `keeper:TOKEN (where)`."""
    living = (other for other in keepers(store) if other != token and not claim_is_over(store, f"keeper:{other}"))
    return [f"keeper:{other} ({_where(store, other)})" for other in living]


def _where(store: fence.Store, token: str) -> str:
    lease = read_lease(store, token)
    return f"pid {lease.process.pid} on {lease.host}" if lease else "unknown"


def dismiss(store: fence.Store, token: str, by: str) -> None:
    """Take the lease away for a person: should that keeper live after all, its next renewal tells it to stop."""
    for _ in range(10):
        number, beat = last_beat(store, token)
        lasts_s = beat.lasts_s if beat is not None else LASTS_S
        taken = Beat(lasts_s=lasts_s, at=time.time(), taken_by=by)
        if (beat is not None and beat.taken_by) or store.put_once(
            _beat_key(token, number + 1), taken.model_dump_json().encode()
        ):
            return
    raise ServiceError(f"keeper {token[:8]} renews its lease faster than it can be taken; retry")


class Lease:
    """One keeper's lease. `renew` and `take_over` ask the store and block; the rest is quick."""

    def __init__(self, store: Store, lasts_s: float) -> None:
        self.store, self.lasts_s = store, lasts_s
        self.owner = fence.new_owner()
        self.token = self.owner.token
        self.me = f"keeper:{self.token}"
        self.number = 0
        self.taken_by = ""  # who took over
        self._until = 0.0  # on the monotonic clock

    @property
    def held(self) -> bool:
        """Whether this keeper may act now."""
        return not self.taken_by and time.monotonic() < self._until

    def check(self) -> None:
        if self.taken_by:
            raise LeaseLost(f"{self.taken_by} took over from this keeper, which did not renew its lease in time")
        if not self.held:
            raise LeaseLost(f"this keeper's lease of {self.lasts_s:g} s ran out before it could be renewed")

    def begin(self) -> None:
        """Say who we are, and hold."""
        fence.mark_running(self.owner, True)
        self.store.put_once(f"{_folder(self.token)}lease.json", self.owner.model_dump_json().encode())
        self.renew({})

    def end(self) -> None:
        fence.mark_running(self.owner, False)
        self._until = 0.0
        self.store.put_once(f"{_folder(self.token)}end.json", b"{}")
        for key in self.store.list(f"{_folder(self.token)}beats/"):
            self.store.delete(key)

    def renew(self, notes: Mapping[str, str]) -> None:
        """One more renewal; `LeaseLost` when another keeper has taken its number."""
        while True:
            began, number = time.monotonic(), self.number + 1
            beat = Beat(lasts_s=self.lasts_s, at=time.time(), notes=dict(list(notes.items())[:NOTES]))
            if self.store.put_once(_beat_key(self.token, number), beat.model_dump_json().encode()):
                self.number, self._until = number, began + self.lasts_s
                break
            # there is one: a renewal of ours whose reply was lost, or the end of this lease
            self.taken_by = _read(self.store, _beat_key(self.token, number)).taken_by
            if self.taken_by:
                self.check()
            self.number = number
        if self.number > BEATS_KEPT:
            self.store.delete(_beat_key(self.token, self.number - BEATS_KEPT))

    async def keep(self, notes: Callable[[], Mapping[str, str]], say: Callable[[str], None]) -> None:
        """Renew until another keeper has taken over. A store that does not answer is asked again, more often."""
        pause_s = self.lasts_s / 3
        while True:
            await asyncio.sleep(pause_s)
            try:
                await asyncio.to_thread(self.renew, notes())
                pause_s = self.lasts_s / 3
            except LeaseLost:
                return
            except Rl360Error as error:
                say(f"lease not renewed: {error}")
                pause_s = self.lasts_s / 10

    async def wait_for_others(self, say: Callable[[str], None], beat: Callable[[], None]) -> None:
        """Until every other keeper is known to have ended: because it says so, its process is gone from this host, or
        it renewed nothing for as long as its lease lasts and longer, and this one has taken it over. An error, at
        once, when another one lives here or renews."""
        seen: dict[str, tuple[int, float]] = {}
        while True:
            left = await asyncio.to_thread(self._still_there, seen, say)
            if not left:
                return
            beat()
            await asyncio.sleep(min(1.0, self.lasts_s / 10))

    def _still_there(self, seen: dict[str, tuple[int, float]], say: Callable[[str], None]) -> int:
        """One look at the others. `seen`: by token, the renewal that we saw last and since when it is the last."""
        waiting = 0
        for token in keepers(self.store):
            if token == self.token:
                continue
            if claim_is_over(self.store, f"keeper:{token}"):  # by its process, which others can't see
                _end(self.store, token, self.me)
                continue
            lease = read_lease(self.store, token)
            looked = time.monotonic()
            number, beat = last_beat(self.store, token)
            if beat is not None and beat.taken_by:  # its taker died before it said so
                _end(self.store, token, beat.taken_by)
                continue
            if lease is not None and fence.owner_runs(lease):
                raise self._refused(token, "its process runs here")
            if token not in seen:
                seen[token] = number, time.monotonic()  # after the read: what it saw may be as young as its end
                say(f"waits for keeper:{token} ({_where(self.store, token)}): it may renew its lease")
            elif seen[token][0] != number:
                raise self._refused(token, "it renews its lease")
            lasts_s = beat.lasts_s if beat is not None else LASTS_S
            if looked - seen[token][1] <= lasts_s + slack_s(lasts_s) or not self._take(token, number, lasts_s, looked):
                waiting += 1
            else:
                say(f"took over from keeper:{token}, which renewed nothing for {looked - seen[token][1]:.0f} s")
        return waiting

    def _take(self, token: str, number: int, lasts_s: float, looked: float) -> bool:
        """Take the number after its last renewal. False: it, or somebody else, was quicker, or we too slow to know."""
        beat = Beat(lasts_s=lasts_s, at=time.time(), taken_by=self.me)
        taken = fence.put_mine(self.store, _beat_key(token, number + 1), beat.model_dump_json().encode())
        if not taken or time.monotonic() - looked > lasts_s:
            return False
        _end(self.store, token, self.me)
        return True

    def _refused(self, token: str, why: str) -> Rl360Error:
        return Rl360Error(
            f"another keeper runs: keeper:{token} ({_where(self.store, token)}), {why}. Stop it; when you know that it "
            f"is gone: rl360 fleet confirm-gone keeper:{token} --reason '...'"
        )
