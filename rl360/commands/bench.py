"""`rl360 bench NAME`: figures with a goal, each measured beside its baseline in the same run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rl360.bench.rows import Row

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON line a row, for programs.")]
QuickOption = Annotated[bool, typer.Option(help="Few repeats: a look, not figures.")]


def register(app: typer.Typer) -> None:
    """Add `rl360 bench` to the program."""
    bench = typer.Typer(help="Measure against goals; docs/benchmarks.md explains each row.", no_args_is_help=True)
    bench.command("sessions", epilog="Example: rl360 bench sessions --rows merge_pipeline_ms,turn61_vs_turn2")(sessions)
    bench.command("objective", epilog="Example: rl360 bench objective --rows advantages_ms")(objective)
    bench.command("faults", epilog="Example: rl360 bench faults --seeds 2 --steps 6")(faults)
    bench.command("push", epilog="Example: rl360 bench push --rows calls_direct,calls_broadcast")(push)
    bench.command("sandboxes", epilog="Example: rl360 bench sandboxes --rows sim_refusals,sim_makespan")(sandboxes)
    app.add_typer(bench, name="bench")


def sessions(
    rows: Annotated[
        str | None, typer.Option(help="Only these rows, joined by commas (default: all but collection).")
    ] = None,
    as_json: JsonOption = False,
    quick: QuickOption = False,
    count: Annotated[int, typer.Option(min=1, help="Trajectories of the collection row.")] = 8192,
    shard: Annotated[int, typer.Option(min=1, help="Trajectories written before they are checked and deleted.")] = 256,
) -> None:
    """Sessions, merging and collection on synthetic trajectories of 61 turns and 58K tokens.

    Exit 1 when a row misses.
    """
    from rl360.bench.rows import Options
    from rl360.bench.sessions import chosen, measure

    options = Options(quick=quick, count=count, shard=shard, say=_say)
    _print(measure(chosen(rows), options), as_json)


def objective(
    rows: Annotated[str | None, typer.Option(help="Only these rows, joined by commas (default: all).")] = None,
    as_json: JsonOption = False,
    quick: QuickOption = False,
) -> None:
    """Advantages, packing and the trainer's step beside their plain versions. Exit 1 when a row misses."""
    from rl360.bench.objective import chosen, measure
    from rl360.bench.rows import Options

    _print(measure(chosen(rows), Options(quick=quick, say=_say)), as_json)


def push(
    rows: Annotated[str | None, typer.Option(help="Only these rows, joined by commas (default: all).")] = None,
    as_json: JsonOption = False,
    quick: QuickOption = False,
) -> None:
    """Weight pushes: calls at the 375B shape, what a difference saves, and three real engines of which one is replaced.

    A quarter of an hour with all rows; wants the machine to itself. Exit 1 when a row misses.
    """
    from rl360.bench.push import chosen, measure
    from rl360.bench.rows import Options

    _print(measure(chosen(rows), Options(quick=quick, say=_say)), as_json)


def sandboxes(
    rows: Annotated[str | None, typer.Option(help="Only these rows, joined by commas (default: all).")] = None,
    as_json: JsonOption = False,
    quick: QuickOption = False,
    tasks: Annotated[Path | None, typer.Option(help="Folder of Harbor tasks of the row oracle_sweep.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Attempts of the rows soak and soak_memory.")] = 5000,
) -> None:
    """Sandboxes: starting, admitting and placing them; --rows soak,soak_memory (an object store is up) strikes them.

    Exit 1 when a row misses.
    """
    from rl360.bench.rows import Options
    from rl360.bench.sandboxes import chosen, measure

    _print(measure(chosen(rows), Options(quick=quick, tasks=tasks, count=count, say=_say)), as_json)


def faults(
    seeds: Annotated[int, typer.Option(min=2, help="Seeds; each is run with kills and without.")] = 3,
    steps: Annotated[int, typer.Option(min=3, help="RL steps of each run.")] = 12,
    share: Annotated[float, typer.Option(help="Share of the sandboxes that is killed, between 0 and 1.")] = 0.1,
    as_json: JsonOption = False,
) -> None:
    """Runs of the demo whose sandboxes are killed at random, beside clean ones. Wants the services to itself.

    Exit 1 when a row misses.
    """
    from rl360.bench.faults import FaultOptions, measure

    _print(measure(FaultOptions(seeds=seeds, steps=steps, share=share), _say), as_json)


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _print(rows: Iterator[Row], as_json: bool) -> None:
    """Each row as it is measured, or a table at the end; exit 1 when one misses its goal."""
    import orjson

    from rl360.bench.rows import machine, table

    found = []
    for row in rows:
        found.append(row)
        if as_json:
            typer.echo(orjson.dumps(row.to_json()).decode())
            _say(f"{row.row}: {row.detail}")  # an hour's measurement tells where it went, whatever reads stdout
    if not as_json:
        typer.echo(f"{machine()}\n\n{table(found)}")
    if not all(row.holds for row in found):
        raise typer.Exit(1)
