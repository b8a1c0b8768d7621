"""How a push ends an engine and knows that it is gone: by the launcher that the fleet's log names for it.

Only what is written or proven counts: the log's own `gone`, the launcher's proof, and, for an incarnation that the log
has no slot for, its processes on this host. An engine that somebody else started is never ended from here: its door is
barred, and a person knows the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from rl360.config.services import Services
from rl360.engines import launchers
from rl360.engines.fleet import EngineIdentity, EngineState
from rl360.engines.fleet_log import FleetLog, Slot, claim_is_over
from rl360.engines.members import EXTERNAL, is_external
from rl360.engines.processes import EndProof, end_tree

END_DEADLINE_S = 45.0  # a killed process is gone at once; a pod has 30 s to end
DOOR_S = 10.0  # for the door of an engine that is only barred
SLACK_S = 5.0
_ENTRIES = 256  # of the log that are looked through for an incarnation whose place another one has


@dataclass
class Ends:
    """Of the engines of one fleet. `names`: its members, name -> URL. The log is read up to here by its user."""

    log: FleetLog
    services: Services
    names: Mapping[str, str] = field(default_factory=dict)

    def slot(self, url: str, incarnation: str = "") -> Slot | None:
        """What the log holds at this URL; of this incarnation, when one is named."""
        slots = self.log.state.slots
        named = [slots[name] for name, held in self.names.items() if held == url and name in slots]
        found = (*named, *(slot for slot in slots.values() if slot.url == url))
        return next((slot for slot in found if incarnation in ("", slot.incarnation)), None)

    def held(self, slot: Slot | None) -> bool:
        """Whether somebody has this slot who may still act."""
        return slot is not None and slot.owner is not None and not claim_is_over(self.log.store, slot.owner)

    async def end(self, engine: EngineIdentity) -> EndProof:
        """End this incarnation and prove it, or say what is missing."""
        slot = self.slot(engine.url, engine.incarnation)
        if slot is None:
            return await self._unknown(engine)
        if slot.state is EngineState.GONE:
            return EndProof(gone=True, evidence=f"the fleet's log calls it gone: {slot.evidence or slot.reason}")
        slot = slot.model_copy(update={"process": engine.process or slot.process})
        limit_s = DOOR_S if slot.launcher == EXTERNAL else END_DEADLINE_S
        try:
            async with asyncio.timeout(limit_s + SLACK_S):
                return await asyncio.to_thread(launchers.end, slot, self.services, limit_s)
        except TimeoutError:
            return EndProof(gone=False, evidence=f"launcher {slot.launcher} did not answer")

    async def _unknown(self, engine: EngineIdentity) -> EndProof:
        """The log's slot at this URL is another incarnation's, or there is none."""
        for entry in reversed(await asyncio.to_thread(self.log.recent, _ENTRIES)):
            for event in entry.events:
                if event.to is EngineState.GONE and (event.url, event.incarnation) == (engine.url, engine.incarnation):
                    return EndProof(gone=True, evidence=f"the fleet's log calls it gone: {event.evidence}")
        slot = self.slot(engine.url)
        if engine.external or is_external(slot, self.services.engine_urls):
            return EndProof(gone=False, evidence="started by someone else, and another one has its place in the log")
        return await end_tree(engine.process, END_DEADLINE_S)
