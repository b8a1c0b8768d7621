"""`rl360 demo`: the whole product on one machine. A policy from nothing learns to drive a bash tool."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from rl360.config.run import RunConfig
from rl360.config.services import home_dir, load_services
from rl360.errors import BadInput

if TYPE_CHECKING:
    from rl360.store.object_store import ObjectStore


def register(root: typer.Typer) -> None:
    """Add `rl360 demo` to the command line."""
    root.command("demo")(demo)


def demo(
    steps: Annotated[int, typer.Option(min=1, help="RL steps of the run.")] = 30,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the warm start and the run.")] = 0,
    name: Annotated[str | None, typer.Option(help="Name of the run; default: a new demo-s{seed}-{n}.")] = None,
) -> None:
    """Make a starting policy (once), bring the services up, run RL and write the report.

    A demo of the same seed that was stopped on the way is resumed.

    Example: rl360 demo --steps 30 --seed 0
    """
    from rl360.commands.model import patient
    from rl360.commands.report import write_report
    from rl360.commands.run import launch
    from rl360.commands.services import ensure_up
    from rl360.policy.warm_start import ensure_warm_start
    from rl360.store.object_store import ObjectStore

    started_at = time.monotonic()
    with patient(typer.echo) as say:
        model = ensure_warm_start(seed, home_dir(), progress=say)
    ensure_up(model)
    services = load_services()
    store = ObjectStore.from_services(services)
    run, resumed = _pick_run(store, seed, steps, name, str(model))
    config = RunConfig.parse({"run": run, "seed": seed, "steps": steps, "model": {"path": str(model)}})
    typer.echo(
        f"{'resuming' if resumed else 'starting'} {run}: {steps} steps, {time.monotonic() - started_at:.0f} s so far"
    )
    launch(services, config, follow=True, join=True)
    paths = write_report(services, run)
    typer.echo(f"report: {paths.html}")
    typer.echo(f"Prefect UI: {services.prefect_ui_url}   (services stay up; `rl360 down` stops them)")


def _pick_run(store: ObjectStore, seed: int, steps: int, name: str | None, model: str) -> tuple[str, bool]:
    """Name of the run, and whether it goes on: the seed's last demo when it was stopped on the way, else a new one."""
    from rl360.config.freeze import load_frozen
    from rl360.ledger.read import list_runs

    runs = {row["run"]: row for row in list_runs(store)}
    if name is not None:
        if name in runs and runs[name]["steps"] >= steps:
            raise BadInput(f"run {name} already has {runs[name]['steps']} steps; give another --name or more --steps")
        return name, name in runs
    prefix = f"demo-s{seed}-"
    numbers = [int(run.removeprefix(prefix)) for run in runs if run.removeprefix(prefix).isdigit()]
    last = max(numbers, default=0)
    stopped = runs.get(f"{prefix}{last}")
    unfinished = stopped is not None and stopped["steps"] < stopped["target_steps"] == steps
    # a starting policy made by another recipe is another run
    if unfinished and load_frozen(store, f"{prefix}{last}").model.path == model:
        return f"{prefix}{last}", True
    return f"{prefix}{last + 1}", False
