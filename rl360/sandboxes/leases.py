"""Leases: whose a sandbox is and until when, written on the sandbox itself, so that whoever finds it can tell.

Never removed by a reaper: what a living process owns or one of another host, which can't be seen, may own, and what
nobody can tell to be ownerless. The first two only until a while after the lease: an owner stops a sandbox by its own
clock before that, and the provider's end of life is set to the same moment; what is still there could not be stopped.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path

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


@cache
def _here() -> str:
    """This host, its boot, and the PID namespace in which pids mean anything."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return f"{socket.gethostname()}:{boot}:{os.stat('/proc/self/ns/pid').st_ino}"


def _started(pid: int) -> str | None:
    """When a process started, in kernel ticks; None when there is none (a zombie is none)."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else rest[18]


def owner() -> str:
    """This process as an owner: where, pid, when started."""
    return f"{_here()}/{os.getpid()}/{_started(os.getpid())}"


@dataclass(frozen=True)
class Lease:
    """One sandbox as its provider tells it. `ident` is the provider's own id, `labels` those that rl360 gave it."""

    provider: str
    ident: str
    labels: Mapping[str, str] = field(default_factory=dict)

    def state(self, now: float) -> LeaseState:
        """`now`: seconds since the epoch."""
        where, _, process = self.labels.get(OWNER, "").partition("/")
        pid, _, started = process.partition("/")
        if not where or not pid.isdecimal() or not started:
            return LeaseState.UNKNOWN
        try:
            over = now > float(self.labels.get(EXPIRES, "")) + GRACE_S
        except ValueError:
            return LeaseState.UNKNOWN
        if where != _here():
            return LeaseState.EXPIRED if over else LeaseState.ELSEWHERE
        if _started(int(pid)) != started:
            return LeaseState.ORPHANED
        return LeaseState.EXPIRED if over else LeaseState.HELD

    def row(self, now: float) -> dict[str, str]:
        """For people and programs: labels without the `rl360.` in front."""
        told = {name.removeprefix("rl360."): value for name, value in self.labels.items()}
        return {"provider": self.provider, "id": self.ident, "state": self.state(now), **told}


def labels(name: str, deployment: str, lifetime_s: float, given: Mapping[str, str]) -> dict[str, str]:
    """The labels of a new sandbox: owner, expiry, and whose attempt it is (run, step, group, attempt)."""
    own = {OWNER: owner(), EXPIRES: str(int(time.time() + lifetime_s)), NAME: name, DEPLOYMENT: deployment}
    return {**{f"rl360.{key}": value for key, value in given.items()}, **own}
