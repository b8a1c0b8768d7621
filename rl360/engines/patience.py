"""How often the keeper looks at the engines, how long it waits for each thing, and when it gives one up."""

from __future__ import annotations

from dataclasses import dataclass

from rl360.engines.keeper_lease import LASTS_S
from rl360.errors import BadInput


@dataclass(frozen=True)
class KeepOptions:
    """A round that finds nothing wrong costs two requests an engine. `start_s` begins when a start is first seen
    running; `flaps`: so often within `flaps_s` an engine may lose its traffic, the last time ends it."""

    every_s: float = 5.0
    ping_s: float = 5.0
    look_s: float = 15.0
    suspect_after: int = 4
    fence_after: int = 12
    generate_every_s: float = 60.0
    generate_s: float = 60.0
    end_s: float = 60.0
    start_s: float = 600.0
    drain_s: float = 600.0
    flaps: int = 3
    flaps_s: float = 6 * 3600.0
    lease_s: float = LASTS_S

    def __post_init__(self) -> None:
        if not 1 <= self.suspect_after <= self.fence_after:
            raise BadInput(
                f"suspect after {self.suspect_after} misses and fenced after {self.fence_after}: the first must be at "
                "least 1 and not more than the second"
            )
        if self.flaps < 1:
            raise BadInput(f"flaps {self.flaps}: the least is 1, which ends an engine when it first loses its traffic")
        for name in ("start_s", "flaps_s", "lease_s"):
            if getattr(self, name) <= 0:
                raise BadInput(f"{name} {getattr(self, name):g}: must be above 0")
