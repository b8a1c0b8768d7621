"""`rl360 tasks check DIR`: run each oracle, and nothing, in real sandboxes; name the tasks that cannot be trusted."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from pathlib import Path
from typing import Annotated

import orjson
import typer

from rl360.config.services import home_dir
from rl360.errors import BadInput


def register(app: typer.Typer) -> None:
    """Add `rl360 tasks` to the program."""
    tasks = typer.Typer(help="Harbor task directories.", no_args_is_help=True)
    tasks.command("check", epilog="Example: rl360 tasks check rl360/tasksets/chores_tasks --json")(check)
    app.add_typer(tasks, name="tasks")


def check(
    directory: Annotated[Path, typer.Argument(help="a task directory, or a folder of them")],
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

    if bool(judge_url) != bool(judge_model):
        raise BadInput("--judge-url and --judge-model belong together; give both")
    directories = task_dirs(directory)
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
