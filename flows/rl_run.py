"""A run: steps in order, starting where the manifests end, until `steps` are done.

A thin driver. It keeps nothing in memory between steps, so killing it loses nothing: start the same run again.
"""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.states import Failed

from flows.rl_step import rl_step
from rl360.config.run import RunConfig
from rl360.errors import Rl360Error
from tasks.durable import ended_by
from tasks.open_run import open_run


@flow(
    name="rl_run",
    flow_run_name="{config.run}",
    description="A run of RL steps. Starting it again resumes it at the first step that is not finished.",
    retries=0,
    persist_result=False,
)
def rl_run(config: RunConfig) -> Any:
    """Run the steps that are left; a step that fails ends the run with that step's state."""
    try:
        _, first = open_run(config, None)
    except Rl360Error as error:
        return ended_by(error)
    for step in range(first, config.steps):
        state: Any = rl_step(config, step, return_state=True)
        if not state.is_completed():
            return Failed(name=state.name or "Failed", message=f"step {step}: {state.message}")
    return {"run": config.run, "steps": config.steps}
