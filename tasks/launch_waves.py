"""Launch the step's waves at the configured pace and wait for all of them.

The pace is kept here, in the flow's process: a wave starts `wave_interval_s` after the one before it and never more
than `max_concurrent` attempts are in flight: whole waves that fit, or a part of one where a wave is larger than that.
What sandbox servers have no place for yet waits in its wave (rl360.agents.places).
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
    at_once = waves_at_once(groups.counts, pace.max_concurrent)
    waves: list[Any] = []  # Prefect's futures; typed loosely because each runner has its own class
    for wave in range(groups.counts["waves"]):
        if wave:
            time.sleep(pace.wave_interval_s)
        running = _running(waves)
        while len(running) >= at_once:
            wait(running, return_when=FIRST_COMPLETED)
            running = _running(waves)
        if any(_ended_badly(future.wrapped_future) for future in waves):
            break  # its error is raised below; waves that would only be thrown away are not started
        waves.append(roll_out.submit(config, step, wave, weight_version))
    return [future.result() for future in waves]


def waves_at_once(counts: dict[str, int], max_concurrent: int) -> int:
    """How many of the planned waves may run together. From the plan: `wave_size` may have changed since it was made."""
    largest = counts.get("wave_size") or -(-counts["attempts"] // counts["waves"])
    return max(1, max_concurrent // largest)


def _ended_badly(wave: Future) -> bool:
    if not wave.done():
        return False
    return wave.exception() is not None or not wave.result().is_completed()  # the result is the task run's state


def _running(waves: list[Any]) -> list[Future]:
    return [future.wrapped_future for future in waves if not future.wrapped_future.done()]
