"""`rl360 replay RUN STEP`: compute a past step's results again from its stored inputs, and compare."""

from __future__ import annotations

from typing import Annotated

import typer

TASKS = ("sample_groups", "collect", "filter_groups", "train", "report")  # the order they run in


def register(app: typer.Typer) -> None:
    """Add `rl360 replay` to the command line."""
    app.command("replay", epilog="Example: rl360 replay demo 3 --task filter_groups --task train")(replay)


def replay(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    step: Annotated[int, typer.Argument(min=0, help="A step of it whose tasks have committed.")],
    tasks: Annotated[
        list[str] | None, typer.Option("--task", help=f"One of {', '.join(TASKS)}; repeatable. Default: all.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON line per compared object, for programs.")] = False,
) -> None:
    """Compute a past step's results again from its stored inputs and compare them with what is stored.

    Writes nothing. `train` starts a trainer process of its own, which restores the checkpoint before the step and takes
    the steps up to it. Exits 1 when something differs, naming where.
    """
    import orjson

    from rl360.config.freeze import load_frozen
    from rl360.config.services import load_services
    from rl360.errors import BadInput
    from rl360.harbor.verdict import run_key
    from rl360.replay.steps import manifest_of, replay_task
    from rl360.replay.train import replay_train, sizes
    from rl360.store.object_store import ObjectStore

    unknown = [name for name in tasks or () if name not in TASKS]
    if unknown:
        raise BadInput(f"--task {unknown[0]}: cannot be replayed; choose among {', '.join(TASKS)}")
    services = load_services()
    store = ObjectStore.from_services(services)
    config = load_frozen(store, run)
    chosen = [name for name in TASKS if name in (tasks or TASKS)]
    for name in chosen:  # all of them, before the first takes its time
        manifest = manifest_of(store, run, step, name)
        if name == "train":
            sizes(str(manifest.info.get("layout")), run, step)
    equal = True
    for name in chosen:
        if name == "train":
            rows = replay_train(store, services, run, step, config.deadlines.train_s)
        else:
            rows = replay_task(store, config, step, name, run_key(services.secrets().token, run))
        for row in rows:
            typer.echo(orjson.dumps(row.to_json()).decode() if json else row.line())
            equal = equal and row.equal
    if not equal:
        raise typer.Exit(1)
