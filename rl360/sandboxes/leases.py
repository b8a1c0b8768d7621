"""Leases: whose a sandbox is and until when, written on the sandbox itself, so that whoever finds it can tell.

Never removed by a reaper: what a living process owns or one of another host, which can't be seen, may own, and what
nobody can tell to be ownerless. The first two only until a while after the lease: an owner stops a sandbox by its own
clock before that, and the provider's end of life is set to the same moment; what is still there could not be stopped.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any

from rl360.engines.processes import ProcessId, alive, boot_id, identify

OWNER, EXPIRES, NAME, DEPLOYMENT = "rl360.owner", "rl360.expires", "rl360.name", "rl360.deployment"
GRACE_S = 300.0  # clocks of two hosts differ; an owner's own teardown comes first


class LeaseState(StrEnum):
    """Only the two that say that nobody holds it may be reaped."""

    HELD = "held"
    ORPHANED = "orphaned"
    EXPIRED = "expired"
    ELSEWHERE = "elsewhere"
    UNKNOWN = "unknown"


REAPABLE = frozenset({LeaseState.ORPHANED, LeaseState.EXPIRED})


class OwnerState(StrEnum):
    """Of the process that an owner label names; `unseen`: of another host."""

    ALIVE = "alive"
    ENDED = "ended"
    UNSEEN = "unseen"
    UNKNOWN = "unknown"


@cache
def _here() -> str:
    """This host, its boot, and the PID namespace in which pids mean anything."""
    return f"{socket.gethostname()}:{boot_id()[:8]}:{os.stat('/proc/self/ns/pid').st_ino}"


def owner(pid: int | None = None) -> str:
    """A living process of this host, else this one, as an owner: where, pid, when started."""
    process = identify(os.getpid() if pid is None else pid)
    if process is None:
        raise ProcessLookupError(f"no process {pid}")
    return f"{_here()}/{process.pid}/{process.start_ticks}"


@dataclass(frozen=True)
class Lease:
    """One sandbox as its provider tells it. `ident` is the provider's own id, `labels` those that rl360 gave it."""

    provider: str
    ident: str
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def expires(self) -> float | None:
        """The end of its lease, seconds since the epoch; None when no number says so."""
        try:
            return float(self.labels.get(EXPIRES, ""))
        except ValueError:
            return None

    def _owner(self) -> tuple[str, ProcessId] | None:
        """Where, and which process there."""
        where, _, process = self.labels.get(OWNER, "").partition("/")
        pid, _, started = process.partition("/")
        if not where or not (pid.isdecimal() and started.isdecimal() and len(pid) < 20 and len(started) < 20):
            return None
        return where, ProcessId(pid=int(pid), start_ticks=int(started))

    def owner_state(self) -> OwnerState:
        found = self._owner()
        if found is None:
            return OwnerState.UNKNOWN
        if found[0] != _here():
            return OwnerState.UNSEEN
        return OwnerState.ALIVE if alive(found[1]) else OwnerState.ENDED

    def state(self, now: float) -> LeaseState:
        """`now`: seconds since the epoch."""
        held_by = self.owner_state()
        if held_by is OwnerState.UNKNOWN or self.expires is None:
            return LeaseState.UNKNOWN
        if held_by is OwnerState.ENDED:
            return LeaseState.ORPHANED
        if now > self.expires + GRACE_S:
            return LeaseState.EXPIRED
        return LeaseState.HELD if held_by is OwnerState.ALIVE else LeaseState.ELSEWHERE

    def row(self, now: float) -> dict[str, Any]:
        """For programs: the same keys for each sandbox, null where its labels say nothing (docs/providers.md)."""
        told = {name: self.labels.get(f"rl360.{name}") or None for name in ("run", "step", "group", "attempt")}
        step, found, expires = told["step"] or "", self._owner(), self.expires
        if expires is not None and not math.isfinite(expires):
            expires = None
        return {
            "provider": self.provider,
            "id": self.ident,
            "name": self.labels.get(NAME) or None,
            "state": self.state(now),
            "owner": self.labels.get(OWNER) or None,
            "owner_host": None if found is None else found[0].partition(":")[0],
            "owner_pid": None if found is None else found[1].pid,
            "owner_state": self.owner_state(),
            "expires": expires,
            "lease_left_s": None if expires is None else round(expires - now, 3),
            "deployment": self.labels.get(DEPLOYMENT) or None,
            **told,
            "step": int(step) if step.isdecimal() and len(step) < 20 else None,
        }


def labels(name: str, deployment: str, lifetime_s: float, given: Mapping[str, str]) -> dict[str, str]:
    """The labels of a new sandbox: owner, expiry, and whose attempt it is (run, step, group, attempt)."""
    own = {OWNER: owner(), EXPIRES: str(int(time.time() + lifetime_s)), NAME: name, DEPLOYMENT: deployment}
    return {**{f"rl360.{key}": value for key, value in given.items()}, **own}
