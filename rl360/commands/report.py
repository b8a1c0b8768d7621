"""`rl360 report RUN`: one HTML page and its pictures, drawn from the run's ledgers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

if TYPE_CHECKING:
    from rl360.config.services import Services
    from rl360.report.page import ReportPaths


def register(app: typer.Typer) -> None:
    """Add `rl360 report` to the command line."""
    app.command("report")(report)


def report(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to.", show_default="reports/RUN under the state folder")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable: the paths written.")] = False,
) -> None:
    """Write the report of a run: a page that needs nothing beside itself, and PNG pictures.

    Example: rl360 report demo --out /tmp/demo-report
    """
    from rl360.config.services import load_services

    paths = write_report(load_services(), run, out)
    if json:
        written = {"html": str(paths.html), "pngs": {name: str(path) for name, path in paths.pngs.items()}}
        typer.echo(orjson.dumps(written).decode())
    else:
        typer.echo(str(paths.html))


def write_report(services: Services, run: str, out: Path | None = None) -> ReportPaths:
    """Read the run's ledgers and write its report to `out`, or to `reports/RUN` under the state folder."""
    from rl360.ledger.read import iter_run
    from rl360.report.page import render_run
    from rl360.store.object_store import ObjectStore

    ledgers = iter_run(ObjectStore.from_services(services), run)
    return render_run(ledgers, out or Path(services.home) / "reports" / run)
