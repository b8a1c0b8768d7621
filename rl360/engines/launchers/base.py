"""What a launcher is: it starts an engine's processes, finds what it started, ends it, and says what it can prove.

A start is named by the slot and its number (`Start.mark`, e.g. `local-0-3`): the fleet's log has the start before the
launcher is asked, so `start` is safe to repeat, and whatever `find` returns that the log doesn't know is a leftover.
`locate` says whether its processes run by now: one that waits in a queue is waited for, however long. `end` and `proof`
answer with `EndProof`: `gone` only when no process of that start can run any more, with what was looked at; everything
else is for a person. Every call ends within its deadline or raises `ServiceError`.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from rl360.config.services import Services
from rl360.engines.fleet_log import Slot
from rl360.engines.launchers.options import EngineOptions
from rl360.engines.processes import EndProof, ProcessTree
from rl360.store.data import Data


class Start(Data):
    """An engine to start. `port` is one that nothing else of the fleet uses on the same host."""

    name: str
    number: int
    model_dir: str
    port: int
    seed: int = 0
    routed_experts: bool = False

    @property
    def mark(self) -> str:
        return f"{self.name}-{self.number}"

    def argv(self, host: str) -> list[str]:
        """Arguments of `python -m rl360.engines.launch`."""
        options = EngineOptions(
            model_dir=self.model_dir,
            port=self.port,
            host=host,
            seed=self.seed,
            routed_experts=self.routed_experts,
            strict=True,
        )
        return options.argv()


class Handle(Data):
    """One start as its launcher knows it. `ref` holds the launcher's own names; `url` is empty until it is known.
    `running`: its processes have begun; `state`: what the launcher calls it, in few words that stay the same while
    nothing changes; `detail`: more, for people, that may change at every look. `failed`: why it will never run."""

    mark: str
    url: str = ""
    incarnation: str = ""
    epoch: int | None = None
    process: ProcessTree | None = None
    ref: Mapping[str, str] = {}
    running: bool = False
    state: str = ""
    detail: str = ""
    failed: str = ""


def handle_of(slot: Slot) -> Handle:
    """What the log remembers of a slot's present start."""
    return Handle(
        mark=f"{slot.name}-{slot.starts}",
        url=slot.url,
        incarnation=slot.incarnation,
        epoch=slot.epoch,
        process=slot.process,
        ref=slot.ref,
    )


def fleet_id(services: Services) -> str:
    """Tells this fleet's pods and jobs from those of another on the same cluster: fleets differ by their store. A store
    on loopback is another one on each host and for each home: what it doesn't know must not be ended as a leftover."""
    name = f"{services.s3_endpoint} {services.s3_bucket}"
    if urlsplit(services.s3_endpoint).hostname in ("localhost", "127.0.0.1", "::1"):
        name += f" {socket.gethostname()} {services.home}"
    return hashlib.sha256(name.encode()).hexdigest()[:10]


def last_line(path: str | Path) -> str:
    """The end of what an engine has written to its log, for people; empty when there is nothing to be read."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
            text = log.read().decode(errors="replace").replace("\r", "\n")
    except OSError:
        return ""
    lines = [line for line in text.splitlines() if line.strip()]
    return "".join(c for c in lines[-1] if c.isprintable()).strip()[-160:] if lines else ""


class Launcher(Protocol):
    """One way to run engines. `starts`: whether `start` makes an engine; else something outside keeps one there."""

    kind: str
    starts: bool

    def port_of(self, number: int) -> int:
        """The port of the fleet's engine `number` of this launcher: no two on the same host may have the same."""
        ...

    async def start(self, start: Start, deadline_s: float) -> Handle:
        """Make it, or return what an earlier call with the same mark made. It need not answer yet."""
        ...

    async def locate(self, handle: Handle, deadline_s: float) -> Handle:
        """What is known of it by now: its URL, whether it runs, its state."""
        ...

    async def find(self, deadline_s: float) -> list[Handle]:
        """Everything this launcher started for this fleet that may still run."""
        ...

    async def proof(self, handle: Handle, deadline_s: float) -> EndProof:
        """Whether it is gone, without touching it."""
        ...

    async def end(self, handle: Handle, deadline_s: float) -> EndProof:
        """End it and prove it."""
        ...
