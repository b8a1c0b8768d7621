"""What `rl360 status` reads: the supervisor's view of its services, one JSON file replaced in one move.

Only the supervisor writes it while it lives. A reader checks the supervisor's pid and start time first: a file left by
a dead supervisor says what it started, not what runs.
"""

from __future__ import annotations

import json
import os
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from infra.local import proc
from rl360.errors import Rl360Error

STATE_FILE = "state.json"


class Status(StrEnum):
    """Where a service is. `ready` is the only good one; `done` is a one-shot that ended well."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    DONE = "done"
    UNRESPONSIVE = "unresponsive"
    BACKOFF = "backoff"
    FAILED = "failed"
    STOPPED = "stopped"


GOOD = frozenset({Status.READY, Status.DONE})


class ServiceState(BaseModel):
    """One service as the supervisor last saw it. pid is the leader of its own process group."""

    model_config = ConfigDict(extra="forbid")

    status: Status = Status.WAITING
    pid: int | None = None
    start_ticks: int | None = None
    incarnation: str = ""
    restarts: int = 0
    port: int | None = None
    rss_bytes: int = 0
    started_at: float | None = None
    ready_after_s: float | None = None
    detail: str = ""


class SupervisorState(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid")

    instance: str
    home: str
    pid: int
    start_ticks: int
    started_at: float
    stopping: bool = False
    ui_url: str = ""
    ports: list[int] = Field(default_factory=list)
    services: dict[str, ServiceState] = Field(default_factory=dict)

    @property
    def alive(self) -> bool:
        return proc.is_alive(self.pid, self.start_ticks)

    @property
    def good(self) -> bool:
        return self.alive and not self.stopping and all(item.status in GOOD for item in self.services.values())


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace `path` in one move; it never exists with wider rights than `mode`."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(data)
    scratch.replace(path)


def write_state(home: Path, state: SupervisorState) -> None:
    write_atomic(home / STATE_FILE, state.model_dump_json(indent=1).encode())


def read_state(home: Path) -> SupervisorState | None:
    """The state of `home`; None when nothing was started there."""
    path = home / STATE_FILE
    try:
        return SupervisorState.model_validate(json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (json.JSONDecodeError, ValidationError):
        raise Rl360Error(
            f"{path} is not a state file of this version; run `rl360 down` of the version that wrote it"
        ) from None
