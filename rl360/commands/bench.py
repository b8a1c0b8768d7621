"""`rl360 bench NAME`: figures with a goal, each measured beside its baseline in the same run."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add `rl360 bench` to the program."""
    bench = typer.Typer(help="Measure against goals; docs/benchmarks.md explains each row.", no_args_is_help=True)
    bench.callback()(lambda: None)  # keeps the benchmark's name on the command line while there is only one
    bench.command("sessions", epilog="Example: rl360 bench sessions --rows merge_pipeline_ms,turn61_vs_turn2")(sessions)
    app.add_typer(bench, name="bench")


def sessions(
    rows: Annotated[str, typer.Option(help="Only these rows, joined by commas (default: all but collection).")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line a row, for programs.")] = False,
    quick: Annotated[bool, typer.Option(help="Few repeats: a look, not figures.")] = False,
    count: Annotated[int, typer.Option(min=1, help="Trajectories of the collection row.")] = 8192,
    shard: Annotated[int, typer.Option(min=1, help="Trajectories written before they are checked and deleted.")] = 256,
) -> None:
    """Sessions, merging and collection on synthetic trajectories of 61 turns and 58K tokens. Exit 1 when a row misses.

    Example: rl360 bench sessions --json
    """
    import orjson

    from rl360.bench.rows import Options, machine, table
    from rl360.bench.sessions import chosen, measure

    names = chosen(rows)
    options = Options(quick=quick, count=count, shard=shard, say=lambda line: typer.echo(line, err=True))
    found = []
    for row in measure(names, options):
        found.append(row)
        if as_json:
            typer.echo(orjson.dumps(row.to_json()).decode())
    if not as_json:
        typer.echo(f"{machine()}\n\n{table(found)}")
    if not all(row.holds for row in found):
        raise typer.Exit(1)
