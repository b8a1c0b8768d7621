"""`rl360 tasks check SOURCE`: run each oracle, and nothing, in sandboxes; name the tasks that cannot be trusted."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from rl360.config.services import home_dir
from rl360.errors import BadInput

if TYPE_CHECKING:
    from rl360.store.object_store import ObjectStore


def register(app: typer.Typer) -> None:
    """Add `rl360 tasks` to the program."""
    tasks = typer.Typer(help="Task sets.", no_args_is_help=True)
    tasks.command("check", epilog="Example: rl360 tasks check rl360/tasksets/chores_tasks --json")(check)
    tasks.command("quarantined", epilog="Example: rl360 tasks quarantined demo --json")(list_quarantined)
    tasks.command("release", epilog="Example: rl360 tasks release demo chores-rename")(release)
    app.add_typer(tasks, name="tasks")


def list_quarantined(
    run: Annotated[str, typer.Argument(help="name of the run")],
    as_json: Annotated[bool, typer.Option("--json", help="one JSON list, for programs")] = False,
) -> None:
    """Tasks that a run does not try any more because their sandboxes never started."""
    from rl360.agents.budgets import quarantined

    found = quarantined(_store(), run)
    if as_json:
        typer.echo(orjson.dumps([found[task] for task in sorted(found)]).decode())
        return
    for task, said in sorted(found.items()):
        typer.echo(f"{task}: {said['starts']} starts failed in step {said['step']}; the last: {said['detail']}")
    typer.echo(f"{len(found)} in quarantine; `rl360 tasks release {run} TASK` tries one again")


def release(
    run: Annotated[str, typer.Argument(help="name of the run")],
    task: Annotated[str, typer.Argument(help="id of the task")],
) -> None:
    """Let a run try a task again, from the next wave that begins."""
    from rl360.agents.budgets import quarantined
    from rl360.store.layout import quarantine_key

    store = _store()
    if task not in quarantined(store, run):
        raise BadInput(f"{task} is not in quarantine; see `rl360 tasks quarantined {run}`")
    store.delete(quarantine_key(run, task))
    typer.echo(f"{task} is tried again")


def _store() -> ObjectStore:
    from rl360.config.services import load_services
    from rl360.store.object_store import ObjectStore

    return ObjectStore.from_services(load_services())


def check(
    source: Annotated[str, typer.Argument(help="a task directory, or what taskset.path can be, e.g. human-eval")],
    concurrency: Annotated[int, typer.Option(min=1, max=512, help="tasks checked at once")] = os.cpu_count() or 2,
    judge_url: Annotated[str, typer.Option(help="LLM judge of tasks that want one, e.g. https://HOST/v1")] = "",
    judge_model: Annotated[str, typer.Option(help="model that the judge is asked for")] = "",
    judge_key_env: Annotated[str, typer.Option(metavar="NAME", help="environment variable with its API key")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object, for programs")] = False,
) -> None:
    """Run the oracle and nothing at all on every task; exit 1 when any is broken or does not discriminate."""
    from rl360.harbor.check import check_tasks, task_dirs
    from rl360.harbor.judge import Judge
    from rl360.harbor.server import raise_open_files
    from rl360.sandboxes.bubblewrap import BubblewrapProvider
    from rl360.tasksets.sources import folder_of

    if bool(judge_url) != bool(judge_model):
        raise BadInput("--judge-url and --judge-model belong together; give both")
    root = Path(source).expanduser()
    directories = task_dirs(root if root.is_dir() else folder_of(source))
    judge = Judge.at(judge_url, judge_key_env, concurrency) if judge_url else None
    raise_open_files()
    provider = BubblewrapProvider(home_dir() / "sandboxes" / "check")
    started = time.monotonic()

    async def sweep() -> list:
        await provider.reap()
        return await check_tasks(provider, directories, concurrency, judge, judge_model)

    try:
        results = asyncio.run(sweep())
    finally:
        provider.close()
    seconds = time.monotonic() - started
    bad = [result for result in results if result.problem is not None]
    if as_json:
        rows = [dataclasses.asdict(result) for result in results]
        report = {"checked": len(results), "good": len(results) - len(bad), "seconds": round(seconds, 3), "tasks": rows}
        typer.echo(orjson.dumps(report).decode())
    else:
        for result in bad:
            typer.echo(f"{result.path}: {result.problem}")
        typer.echo(f"{len(results) - len(bad)} of {len(results)} tasks discriminate ({seconds:.1f} s)")
    if bad:
        raise typer.Exit(1)
