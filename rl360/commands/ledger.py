"""`rl360 ledger RUN`: where every attempt and every sampled token went, with the sums checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rl360.ledger.checks import Check
    from rl360.ledger.step import StepLedger

_LISTED = 40
EXAMPLES = (
    "Examples:",
    "rl360 ledger demo --step 3",
    "rl360 ledger demo --attempt s000003-g001-a02",
    "rl360 ledger demo --why dropped --groups",
    "rl360 ledger demo --why no_engine --json",
    "rl360 ledger demo --waste --price-gpu-hour 2.5 --gpus 8 --price-sandbox-hour 0.05",
    "rl360 ledger demo --export demo-ledger",
)


def register(app: typer.Typer) -> None:
    """Add `rl360 ledger` to the command line."""
    app.command("ledger", epilog="\n\n".join(EXAMPLES))(ledger)


def ledger(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    step: Annotated[int | None, typer.Option(min=0, help="One step only, with its sums in full.")] = None,
    attempt: Annotated[
        str | None, typer.Option(metavar="ID", help="The whole life of one attempt; without -tN, of all its tries.")
    ] = None,
    why: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="List what was kept, dropped, infra, or ended in any bucket or outcome."),
    ] = None,
    groups: Annotated[bool, typer.Option("--groups", help="With --why: a row a group, not a row an attempt.")] = False,
    limit: Annotated[
        int | None,
        typer.Option(min=0, help=f"With --why: rows to list, 0 for all. Default: {_LISTED}; all with --json."),
    ] = None,
    waste: Annotated[
        bool, typer.Option("--waste", help="Seconds and tokens by class, bucket and outcome; cost when priced.")
    ] = False,
    price_gpu_hour: Annotated[float | None, typer.Option(help="With --waste: price of an hour of one GPU.")] = None,
    price_sandbox_hour: Annotated[float | None, typer.Option(help="With --waste: of an hour of one sandbox.")] = None,
    gpus: Annotated[float | None, typer.Option(help="With --waste: GPUs that the run holds (default 1).")] = None,
    prices: Annotated[
        Path | None, typer.Option(help="With --waste: TOML or JSON file of gpu_hour, sandbox_hour and gpus.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write tables that DuckDB reads: JSON lines and views.sql.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Where every attempt and every sampled token of a run went. Exits 1 when a sum does not hold."""
    from rl360.errors import BadInput

    chosen = [
        f"--{name}"
        for name, given in (("attempt", attempt), ("why", why), ("waste", waste), ("export", export))
        if given
    ]
    if len(chosen) > 1:
        raise BadInput(f"{' and '.join(chosen)} are different questions; ask one at a time")
    priced = {"gpu_hour": price_gpu_hour, "sandbox_hour": price_sandbox_hour, "gpus": gpus}
    if not waste and (prices is not None or any(value is not None for value in priced.values())):
        raise BadInput("prices belong to --waste")
    if why is None and (groups or limit is not None):
        raise BadInput("--groups and --limit belong to --why")
    if attempt is not None:
        _show_attempt(run, attempt, step, json)
    elif why is not None:
        _show_why(run, step, why, groups, limit, json)
    elif waste:
        _show_waste(run, step, prices, priced, json)
    elif export is not None:
        _export(run, step, export, json)
    else:
        _show(run, step, json)


class _Books:
    """The ledgers asked for, one at a time; their checks stay, so that a command can say at its end what is broken."""

    def __init__(self, run: str, step: int | None) -> None:
        from rl360.config.services import load_services
        from rl360.ledger.read import iter_run, read_step
        from rl360.store.object_store import ObjectStore

        self.run = run
        store = ObjectStore.from_services(load_services())
        self._ledgers: Iterable[StepLedger] = iter_run(store, run) if step is None else [read_step(store, run, step)]
        self.checked: dict[int, list[Check]] = {}

    def __iter__(self) -> Iterator[StepLedger]:
        from rl360.ledger.read import audit_run

        for book, checks in audit_run(self._ledgers):
            self.checked[book.step] = checks
            yield book

    def refuse_broken(self) -> None:
        """Name every sum that does not hold and leave with 1."""
        broken = [(step, check) for step, checks in self.checked.items() for check in checks if not check.holds]
        for step, check in broken:
            typer.echo(f"rl360: {self.run} step {step}: {check.name}: {check.line()}", err=True)
        if broken:
            raise typer.Exit(1)


def _echo_json(value: Any) -> None:
    import orjson

    typer.echo(orjson.dumps(value).decode())


def _show(run: str, step: int | None, json: bool) -> None:
    from rl360.commands.ledger_tables import print_ledgers
    from rl360.ledger.metrics import step_json

    books = _Books(run, step)
    steps = [step_json(book) for book in books]
    if json:
        _echo_json({"run": run, "steps": steps})
    else:
        print_ledgers(run, steps, books.checked, in_full=step is not None)
    books.refuse_broken()


def _show_attempt(run: str, attempt: str, step: int | None, json: bool) -> None:
    from rl360.commands.ledger_page import page
    from rl360.config.services import load_services
    from rl360.errors import BadInput
    from rl360.harbor.verdict import run_key
    from rl360.report.attempt import Told, attempt_life
    from rl360.store.object_store import ObjectStore

    services = load_services()
    told = Told(run_key(services.secrets().token, run), services.session_urls)
    life = attempt_life(ObjectStore.from_services(services), run, attempt, told)
    if step is not None and step != life["step"]:
        raise BadInput(f"attempt {attempt} is of step {life['step']}, not of step {step}; leave --step out")
    if json:
        _echo_json(life)
    else:
        typer.echo(page(life))


def _show_why(run: str, step: int | None, name: str, groups: bool, limit: int | None, json: bool) -> None:
    from rl360.commands.ledger_lists import why_text
    from rl360.report.why import reason, why

    asked = reason(name)
    books = _Books(run, step)
    shown = limit if limit is not None else 0 if json else _LISTED
    found = {"run": run, **why(books, asked, groups=groups, limit=shown or None)}
    if json:
        _echo_json(found)
    else:
        typer.echo(why_text(found))
    books.refuse_broken()


def _show_waste(run: str, step: int | None, prices: Path | None, given: dict[str, float | None], json: bool) -> None:
    from rl360.commands.ledger_lists import waste_text
    from rl360.report.waste import read_prices, waste

    priced = read_prices(prices, **given)
    books = _Books(run, step)
    found = {"run": run, **waste(books, priced)}
    if json:
        _echo_json(found)
    else:
        typer.echo(waste_text(found))
    books.refuse_broken()


def _export(run: str, step: int | None, out_dir: Path, json: bool) -> None:
    from rl360.report.export import VIEWS, export

    books = _Books(run, step)
    rows = export(books, out_dir)
    if json:
        _echo_json({"run": run, "dir": str(out_dir), "rows": rows})
    else:
        counts = ", ".join(f"{name} {count:,}" for name, count in rows.items())
        typer.echo(f"{out_dir}: {counts} rows; query them there: duckdb -init {VIEWS}")
    books.refuse_broken()
