"""Launch the step's waves at the configured pace and wait for all of them.

The pace is kept here, in the flow's process: a wave starts `wave_interval_s` after the one before it and never more
than `max_concurrent` attempts (in whole waves, at least one) are in flight.
"""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from rl360.config.run import RunConfig
from rl360.store.manifest import Manifest
from tasks.roll_out import roll_out


def launch_waves(config: RunConfig, step: int, groups: Manifest, weight_version: str) -> list[Manifest]:
    """Submit one `roll_out` task per wave; return their manifests in wave order. The first failure is raised."""
    pace = config.rollout
    at_once = max(1, pace.max_concurrent // pace.wave_size)
    waves: list[Any] = []  # Prefect's futures; typed loosely because each runner has its own class
    for wave in range(groups.counts["waves"]):
        if wave:
            time.sleep(pace.wave_interval_s)
        running = _running(waves)
        while len(running) >= at_once:
            wait(running, return_when=FIRST_COMPLETED)
            running = _running(waves)
        waves.append(roll_out.submit(config, step, wave, weight_version))
    return [future.result() for future in waves]


def _running(waves: list[Any]) -> list[Future]:
    return [future.wrapped_future for future in waves if not future.wrapped_future.done()]
