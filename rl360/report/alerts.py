"""What a finished step warns of, by rules over the `step_json` of the run's steps (docs/fleet.md, "Alerts"). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

CACHE_FELL = "rl360.run.cache-hit-rate"  # the event's name, for automations
# a share below this part of the median of the run's earlier steps, of which there are so many, and this much below it
CACHE_FELL_TO, CACHE_STEPS, CACHE_FELL_BY = 0.7, 3, 0.05


@dataclass(frozen=True)
class CacheFall:
    """The engines' prefix cache held less of the step's prompts than in the steps before. `steps` made the baseline."""

    share: float
    baseline: float
    steps: int

    def __str__(self) -> str:
        return (
            f"the engines' caches held {self.share:.0%} of the prompts, the median of the {self.steps} steps before is "
            f"{self.baseline:.0%}: look for replaced engines, sessions that changed engines, a cache that is too small"
        )

    def event(self, run: str, step: int) -> dict[str, Any]:
        """What Prefect is told of it."""
        resource = {"prefect.resource.id": f"rl360.run.{run}", "prefect.resource.name": run}
        return {"event": CACHE_FELL, "resource": resource, "payload": asdict(self) | {"step": step}}


def cache_fall(earlier: Sequence[Mapping[str, Any]], step: Mapping[str, Any]) -> CacheFall | None:
    """Whether this step's `cache_share` has fallen; None also when it, or enough of the earlier ones, is not known."""
    shares = [float(each["cache_share"]) for each in earlier if each.get("cache_share") is not None]
    share = step.get("cache_share")
    if share is None or len(shares) < CACHE_STEPS:
        return None
    baseline = median(shares)
    fell = share < CACHE_FELL_TO * baseline and share <= baseline - CACHE_FELL_BY
    return CacheFall(share, baseline, len(shares)) if fell else None
