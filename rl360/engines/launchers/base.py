"""What a launcher is: it starts an engine's processes, finds what it started, ends it, and says what it can prove.

A start is named by the slot and its number (`Start.mark`, e.g. `local-0-3`): the fleet's log has the start before the
launcher is asked, so `start` is safe to repeat, and whatever `find` returns that the log doesn't know is a leftover.
`end` and `proof` answer with `EndProof`: `gone` only when no process of that start can run any more, with what was
looked at; everything else is for a person. Every call ends within its deadline or raises `ServiceError`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from rl360.config.services import Services
from rl360.engines.fleet_log import Slot
from rl360.engines.launchers.options import EngineOptions
from rl360.engines.processes import EndProof, ProcessTree


class Start(BaseModel):
    """An engine to start. `port` is one that nothing else of the fleet uses on the same host."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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


class Handle(BaseModel):
    """One start as its launcher knows it. `ref` holds the launcher's own names; `url` is empty until it is known."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mark: str
    url: str = ""
    incarnation: str = ""
    epoch: int | None = None
    process: ProcessTree | None = None
    ref: Mapping[str, str] = {}


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
    """Tells this fleet's pods and jobs from those of another on the same cluster: fleets differ by their store."""
    return hashlib.sha256(f"{services.s3_endpoint} {services.s3_bucket}".encode()).hexdigest()[:10]


class Launcher(Protocol):
    """One way to run engines. `starts`: whether `start` makes an engine; else something outside keeps one there."""

    kind: str
    starts: bool

    async def start(self, start: Start, deadline_s: float) -> Handle:
        """Make it, or return what an earlier call with the same mark made. It need not answer yet."""
        ...

    async def locate(self, handle: Handle, deadline_s: float) -> Handle:
        """With its URL, when that is known by now."""
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
