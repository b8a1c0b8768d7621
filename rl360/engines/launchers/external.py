"""Someone else's engines, known by URL. They are taken out of the gateway and barred; their end can't be proven here.

`end` asks the engine's door (rl360/engines/door.py), when it has one and answers, to refuse generation and control
calls of an epoch that is over. That keeps a receiver that wakes up out of the next push; it does not show that its
processes are gone, so `gone` is never true and a person confirms it.
"""

from __future__ import annotations

from rl360.config.services import Services
from rl360.engines.client import EngineClient, open_http
from rl360.engines.launchers.base import Handle, Start
from rl360.engines.processes import EndProof
from rl360.errors import ServiceError

NOT_OURS = "started by someone else, so its end can't be proven here"


class ExternalLauncher:
    """Nothing is started or ended."""

    kind = "external"
    starts = False

    def __init__(self, services: Services) -> None:
        self.services = services

    def port_of(self, number: int) -> int:
        raise ServiceError("somebody else's engine has the port that its URL names")

    async def start(self, start: Start, deadline_s: float) -> Handle:
        raise ServiceError(f"{start.name} is someone else's engine: start it where it runs")

    async def locate(self, handle: Handle, deadline_s: float) -> Handle:
        return handle

    async def find(self, deadline_s: float) -> list[Handle]:
        return []

    async def proof(self, handle: Handle, deadline_s: float) -> EndProof:
        return EndProof(gone=False, evidence=NOT_OURS)

    async def end(self, handle: Handle, deadline_s: float) -> EndProof:
        async with open_http() as http:
            engine = EngineClient(handle.url, http, deadline_s, epoch=handle.epoch or 1)
            try:
                barred = await engine.bar("fenced by the fleet", deadline_s)
            except ServiceError as error:
                return EndProof(gone=False, evidence=f"{NOT_OURS}; its door was not reached: {error}")
        if not barred:
            return EndProof(
                gone=False, evidence=f"{NOT_OURS}; it has no door, so nothing on its side refuses an old push"
            )
        return EndProof(gone=False, evidence=f"{NOT_OURS}; its door refuses generation and control calls of old epochs")
