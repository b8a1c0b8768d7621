"""`rl360 ledger RUN`: where every attempt and every sampled token went, with the sums checked."""

from __future__ import annotations

import orjson
import typer
from rich.console import Console
from rich.table import Table

from rl360.config.services import load_services
from rl360.ledger import metrics
from rl360.ledger.checks import Check, check_ledger
from rl360.ledger.read import read_run, read_step
from rl360.ledger.step import StepLedger
from rl360.store.object_store import ObjectStore

DASH = "-"


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("ledger", help=ledger.__doc__)(ledger)


def ledger(
    run: str = typer.Argument(help="name of the run"),
    step: int | None = typer.Option(None, min=0, help="one step only, with its sums in full"),
    as_json: bool = typer.Option(False, "--json", help="one JSON object, for a program"),
) -> None:
    """Where every attempt and every sampled token of a run went. Exits 1 when a sum does not hold.

    Example: rl360 ledger demo --step 3
    """
    store = ObjectStore.from_services(load_services())
    ledgers = read_run(store, run)
    checked = check_run(ledgers)
    if step is not None:
        ledgers = [read_step(store, run, step)]
        checked = {step: checked[step]}
    if as_json:
        typer.echo(orjson.dumps(metrics.run_json(run, ledgers)).decode())
    else:
        console = Console()
        for table in ledger_tables(run, ledgers):
            console.print(table)
        print_checks(console, checked, in_full=step is not None)
    broken = [(k, check) for k, checks in checked.items() for check in checks if not check.holds]
    for k, check in broken:
        typer.echo(f"rl360: {run} step {k}: {check.name}: {check.line()}", err=True)
    if broken:
        raise typer.Exit(1)


def check_run(ledgers: list[StepLedger]) -> dict[int, list[Check]]:
    """Every check of every step, the one across steps (trained once) included."""
    trained: set[str] = set()
    checked = {}
    for book in ledgers:
        checked[book.step] = check_ledger(book, trained)
        trained.update(book.trained_ids)
    return checked


def ledger_tables(run: str, ledgers: list[StepLedger]) -> list[Table]:
    """Attempts and reward, then tokens: one row a step, only the columns that are not all zero."""
    return [_attempt_table(run, ledgers), _token_table(ledgers)]


def print_checks(console: Console, checked: dict[int, list[Check]], *, in_full: bool) -> None:
    """All sums of one step, or one line for the run."""
    if in_full:
        for checks in checked.values():
            for check in checks:
                mark = "[green]holds [/]" if check.holds else "[red]BROKEN[/]"
                console.print(f"{mark} {check.name}: {check.line()}", highlight=False)
        return
    total = sum(len(checks) for checks in checked.values())
    broken = sum(not check.holds for checks in checked.values() for check in checks)
    colour = "red" if broken else "green"
    console.print(f"[{colour}]{total - broken} of {total} sums hold[/] over {len(checked)} steps", highlight=False)


def _attempt_table(run: str, ledgers: list[StepLedger]) -> Table:
    outcomes = [metrics.outcome_counts(book) for book in ledgers]
    names = _present(outcomes, ["passed", "failed", "truncated"])
    table = Table(title=f"{run}: attempts", title_justify="left", header_style="bold", box=None, pad_edge=False)
    for name in ("step", "attempts", *names):
        table.add_column(name, justify="right")
    for name in ("groups", "trained", "all pass", "all fail", "reward", "kept", "infra", "loss"):
        table.add_column(name, justify="right")
    for book, counts in zip(ledgers, outcomes, strict=True):
        groups, reward = metrics.group_counts(book), metrics.reward_metrics(book)
        table.add_row(
            str(book.step),
            f"{len(book.attempts):,}",
            *(_count(counts.get(name, 0)) for name in names),
            *(_count(groups[name]) for name in ("total", "trained", "all_pass", "all_fail")),
            number(reward["unfiltered_mean_valid"], 3),
            number(reward["kept_mean"], 3),
            percent(reward["infra_rate"]),
            number(book.train.loss, 4),
        )
    return table


def _token_table(ledgers: list[StepLedger]) -> Table:
    tokens = [metrics.token_counts(book) for book in ledgers]
    names = _present(tokens, ["trained"])
    table = Table(title="sampled tokens", title_justify="left", header_style="bold", box=None, pad_edge=False)
    for name in ("step", "sampled", *names, "loss weight"):
        table.add_column(name.replace("_", " "), justify="right")
    for book, counts in zip(ledgers, tokens, strict=True):
        table.add_row(
            str(book.step),
            f"{metrics.sampled_tokens(book):,}",
            *(_count(counts.get(name, 0)) for name in names),
            f"{book.train.loss_weight_sum:.6f}",
        )
    if len(ledgers) > 1:
        sums = [sum(count.get(name, 0) for count in tokens) for name in names]
        total = sum(metrics.sampled_tokens(book) for book in ledgers)
        table.add_section()
        table.add_row("all", f"{total:,}", *(_count(value) for value in sums), "")
    return table


def _present(counts: list[dict[str, int]], always: list[str]) -> list[str]:
    """The names to show as columns: `always`, then whatever else occurs, in the order of its enum."""
    occurring = dict.fromkeys(name for count in counts for name in count)
    return always + [name for name in occurring if name not in always]


def _count(value: int) -> str:
    return f"{value:,}" if value else DASH


def number(value: float | None, digits: int) -> str:
    """A figure for a table; a dash where there is none."""
    return DASH if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share for a table; a dash where there is none."""
    return DASH if value is None else f"{100 * value:.1f}%"
