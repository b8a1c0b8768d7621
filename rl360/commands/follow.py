"""Follow a run in the terminal: one table row per finished step, and what the step at work is doing.

Reads the object store (manifests, records, ledgers) and the flow run's state; it starts and stops nothing, so leaving
it with Ctrl-C leaves the run alone.
"""

from __future__ import annotations

import time

import typer

from rl360.commands.prefect_api import TERMINAL, FlowRun, PrefectApi
from rl360.commands.states import ended_text, step_at_work, waiting_for
from rl360.config.services import Services
from rl360.errors import Rl360Error, ServiceError, StoreUnavailable
from rl360.ledger.metrics import step_json
from rl360.ledger.read import read_step
from rl360.report.live import LiveTable
from rl360.store.layout import manifest_key
from rl360.store.object_store import ObjectStore
from rl360.store.progress import LAST_TASK, step_folders

_POLL_S = 1.0
_SILENCE_S = 120.0  # how long Prefect may not answer (it restarts) before following ends


def follow(services: Services, run: str, target: int, flow_run_id: str | None) -> None:
    """Show the run of `target` steps until its flow run ends (or, without one, what there is). `Rl360Error` when it did
    not complete."""
    store = ObjectStore.from_services(services)
    api = PrefectApi(services.prefect_api_url, services.prefect_ui_url)
    shown: set[int] = set()
    state: FlowRun | None = None
    heard_at = time.monotonic()
    try:
        with LiveTable(run, target) as table:
            while True:
                try:
                    state = api.flow_run(flow_run_id) if flow_run_id else None
                    heard_at = time.monotonic()
                except ServiceError as error:
                    if time.monotonic() - heard_at > _SILENCE_S:
                        raise
                    table.update_phase(str(error))
                    time.sleep(_POLL_S)
                    continue
                ended = state is None or state.state in TERMINAL
                try:
                    _show_new_steps(store, run, shown, table)
                    if state is not None and not ended:
                        _show_phase(store, api, run, len(shown), target, state, table)
                except (StoreUnavailable, ServiceError) as error:
                    table.update_phase(str(error))
                if ended:
                    break
                time.sleep(_POLL_S)
    except KeyboardInterrupt:
        typer.echo(f"left; the run goes on. Watch it again with `rl360 run watch {run}`")
        return
    if state is not None and state.state != "COMPLETED":
        raise Rl360Error(ended_text(store, api, run, target, state))


def _show_new_steps(store: ObjectStore, run: str, shown: set[int], table: LiveTable) -> None:
    for step in step_folders(store, run):
        # asked only of what is not shown yet: this runs every second, over hundreds of steps
        if step not in shown and store.exists(manifest_key(run, step, LAST_TASK)):
            table.add_step(step_json(read_step(store, run, step)))
            shown.add(step)


def _show_phase(
    store: ObjectStore, api: PrefectApi, run: str, step: int, target: int, state: FlowRun, table: LiveTable
) -> None:
    if state.state_name not in ("Running", "Cancelling"):
        table.wait(waiting_for(state, api.active()))
        return
    at_work = "finishing" if step >= target else step_at_work(store, run, step)
    table.update_phase(f"cancelling, {at_work}" if state.state_name == "Cancelling" else at_work)
