"""`rl360 tasks`: `check` runs each oracle, and nothing, in sandboxes and names the tasks that cannot be trusted.

`drawn`, `quarantined` and `release` are of a run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from rl360.config.services import home_dir, service_token
from rl360.errors import BadInput, Rl360Error

if TYPE_CHECKING:
    from rl360.harbor.check import TaskCheck
    from rl360.harbor.judge import Judge
    from rl360.store.object_store import ObjectStore


def register(app: typer.Typer) -> None:
    """Add `rl360 tasks` to the program."""
    tasks = typer.Typer(
        help="Task sets: check tasks; what a run drew; its quarantined tasks, and their release.", no_args_is_help=True
    )
    tasks.command("check", epilog="Example: rl360 tasks check rl360/tasksets/chores_tasks --json")(check)
    tasks.command("drawn", epilog="Example: rl360 tasks drawn demo --step 3 --json")(drawn)
    tasks.command("quarantined", epilog="Example: rl360 tasks quarantined demo --json")(list_quarantined)
    tasks.command("release", epilog="Example: rl360 tasks release demo chores-rename")(release)
    app.add_typer(tasks, name="tasks")


def drawn(
    run: Annotated[str, typer.Argument(help="name of the run")],
    step: Annotated[int | None, typer.Option(min=0, help="of the run; default: the last one that drew tasks")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object, for programs")] = False,
) -> None:
    """Which tasks and domains a step drew, and by what it knew of them where the run draws by difficulty."""
    from rl360.config.freeze import load_frozen
    from rl360.step_work import load_plan
    from rl360.store.manifest import read_manifest
    from rl360.store.progress import next_step
    from rl360.tasksets.mix import weight_of

    store = _store()
    difficulty = load_frozen(store, run, extra="ignore").taskset.difficulty
    ahead = next_step(store, run)
    asked = [step] if step is not None else [ahead, ahead - 1]
    shown = next((each for each in asked if each >= 0 and read_manifest(store, run, each, "sample_groups")), None)
    if shown is None:
        raise BadInput(f"{run} has drawn no tasks for step {asked[0]}; it has done {ahead} steps, the first is 0")
    plan = load_plan(store, run, shown)
    times, domain_of = (
        Counter(plan.groups.values()),
        {spec.task_id: spec.domain for wave in plan.waves for spec in wave},
    )
    by_history = difficulty == "history" and shown > 0  # step 0 had nothing to go by
    rows = []
    for task, groups in sorted(times.items(), key=lambda item: (domain_of[item[0]], item[0])):
        passed, tried = plan.history.get(task, (0.0, 0.0))
        rate = round(passed / tried, 4) if tried else None
        weight = round(weight_of((passed, tried)), 4) if by_history else None
        rows.append({"task": task, "domain": domain_of[task], "groups": groups, "pass_rate": rate, "weight": weight})
    domains = Counter(domain_of[task] for task in plan.groups.values())
    found = {
        "run": run,
        "step": shown,
        "difficulty": difficulty,
        "domains": dict(sorted(domains.items())),
        "tasks": rows,
    }
    if as_json:
        typer.echo(orjson.dumps({**found, "quarantined": plan.quarantined}).decode())
        return
    typer.echo(f"{run} step {shown}: {sum(times.values())} groups of {len(times)} tasks; difficulty {difficulty}")
    typer.echo("domains: " + ", ".join(f"{name} {count}" for name, count in sorted(domains.items())))
    for row in rows:
        known = "not known" if row["pass_rate"] is None else f"passed {row['pass_rate']:.0%}"
        by = "" if row["weight"] is None else f", weight {row['weight']:.3f}"
        typer.echo(f"{row['domain']}  {row['task']}  x{row['groups']}  {known}{by}")


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
    typer.echo(f"{len(found)} in quarantine" + (f"; `rl360 tasks release {run} TASK` tries one again" if found else ""))


def release(
    run: Annotated[str, typer.Argument(help="name of the run")],
    task: Annotated[str, typer.Argument(help="id of the task")],
) -> None:
    """Let a run try a task again, from the next wave that begins, and draw it again from the next step on."""
    from rl360.agents.budgets import quarantined
    from rl360.store.layout import quarantine_key

    store = _store()
    held = quarantined(store, run)
    if task not in held:
        meant = " or ".join(name for name in sorted(held) if name.endswith(f"/{task}"))
        hint = f"did you mean {meant}?" if meant else f"see `rl360 tasks quarantined {run}`"
        raise BadInput(f"{task} is not in quarantine; {hint}")
    store.delete(quarantine_key(run, task))
    typer.echo(f"{task} is tried again")


def _store() -> ObjectStore:
    from rl360.config.services import load_services
    from rl360.store.object_store import ObjectStore

    return ObjectStore.from_services(load_services())


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FIX = "the tasks must be readable, the home (RL360_HOME, default .rl360) writable"


async def _sweep(
    kind: str, directories: list[Path], concurrency: int, judge: Judge | None, judge_model: str
) -> list[TaskCheck]:
    """One folder a kind of provider, so that the next check ends what a killed one left, as a server does."""
    from rl360.harbor.check import check_tasks
    from rl360.sandboxes.providers import open_provider
    from rl360.sandboxes.providers.remote import RemoteProvider
    from rl360.sandboxes.rooted import Rooted

    loop, me = asyncio.get_running_loop(), asyncio.current_task()
    assert me is not None
    for number in STOPS:  # however often: what runs is ended first, and proven gone
        loop.add_signal_handler(number, me.cancel)
    local = kind == "bubblewrap"
    root = home_dir() / "sandboxes" / ("check" if local else f"check-{kind}")
    provider = open_provider(kind, root, "" if local else service_token())
    try:
        for line in await provider.reap():
            if line.startswith("NOT asked"):
                raise Rl360Error(f"--provider {kind}: {line}")
            if "NOT " in line:
                typer.echo(line, err=True)
        return await check_tasks(provider, directories, concurrency, judge, judge_model)
    finally:
        if isinstance(provider, RemoteProvider):
            await provider.aclose()
        elif isinstance(provider, Rooted):
            provider.close()


def check(
    source: Annotated[str, typer.Argument(help="a task directory, or what taskset.path can be, e.g. human-eval")],
    provider: Annotated[
        str, typer.Option(help="where sandboxes run: bubblewrap, docker, daytona or kubernetes (docs/providers.md)")
    ] = "bubblewrap",
    concurrency: Annotated[int, typer.Option(min=1, max=512, help="tasks checked at once")] = os.cpu_count() or 2,
    judge_url: Annotated[str, typer.Option(help="LLM judge of tasks that want one, e.g. https://HOST/v1")] = "",
    judge_model: Annotated[str, typer.Option(help="model that the judge is asked for")] = "",
    judge_key_env: Annotated[str, typer.Option(metavar="NAME", help="environment variable with its API key")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object, for programs")] = False,
) -> None:
    """Run the oracle and nothing at all on every task; exit 1 when any is broken or does not discriminate."""
    from rl360.harbor.check import task_dirs
    from rl360.harbor.judge_options import judge_at
    from rl360.harbor.server import raise_open_files
    from rl360.tasksets.sources import folder_of

    if bool(judge_url) != bool(judge_model):
        raise BadInput("--judge-url and --judge-model belong together; give both")
    if not source:
        raise BadInput("the task source is empty; give a task directory, or what taskset.path can be")
    judge = judge_at(judge_url, judge_key_env, concurrency) if judge_url else None
    root = Path(source).expanduser()
    try:
        directories = task_dirs(root if root.is_dir() else folder_of(source))
        raise_open_files()
        started = time.monotonic()
        results = asyncio.run(_sweep(provider, directories, concurrency, judge, judge_model))
    except asyncio.CancelledError:
        raise Rl360Error("interrupted: its sandboxes were ended, no task is judged") from None
    except OSError as error:  # a folder that cannot be read, a home that cannot be written
        raise BadInput(f"{error.filename or source}: {error.strerror}; {_FIX}") from None
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
