"""`rl360 ledger RUN`: where every attempt and every sampled token went, with the sums checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rl360.ledger.checks import Check
    from rl360.ledger.step import StepLedger

DASH = "-"
_STYLE: dict[str, Any] = {"title_justify": "left", "header_style": "bold", "box": None, "padding": (0, 0, 0, 1)}


def register(app: typer.Typer) -> None:
    """Add `rl360 ledger` to the command line."""
    app.command("ledger")(ledger)


def ledger(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    step: Annotated[int | None, typer.Option(min=0, help="One step only, with its sums in full.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Where every attempt and every sampled token of a run went. Exits 1 when a sum does not hold.

    Example: rl360 ledger demo --step 3
    """
    from rl360.config.services import load_services
    from rl360.errors import BadInput
    from rl360.ledger.checks import check_run
    from rl360.ledger.metrics import run_json
    from rl360.ledger.read import read_run
    from rl360.store.object_store import ObjectStore

    ledgers = read_run(ObjectStore.from_services(load_services()), run)
    checked = check_run(ledgers)
    if step is not None:
        if step not in checked:
            known = f"ledgers exist for steps {min(checked)} to {max(checked)}" if checked else "no step has one yet"
            raise BadInput(f"run {run} has no ledger for step {step}; {known}")
        ledgers = [book for book in ledgers if book.step == step]
        checked = {step: checked[step]}
    if json:
        typer.echo(orjson.dumps(run_json(run, ledgers)).decode())
    else:
        print_ledgers(run, ledgers, checked, in_full=step is not None)
    broken = [(k, check) for k, checks in checked.items() for check in checks if not check.holds]
    for k, check in broken:
        typer.echo(f"rl360: {run} step {k}: {check.name}: {check.line()}", err=True)
    if broken:
        raise typer.Exit(1)


def print_ledgers(run: str, ledgers: list[StepLedger], checked: dict[int, list[Check]], *, in_full: bool) -> None:
    """Both tables, then the sums."""
    from rich.console import Console

    console = Console(highlight=False)
    if not ledgers:
        console.print(f"{run}: no step has a ledger yet")
        return
    for table in ledger_tables(run, ledgers):
        console.print(table)
        console.print()
    print_checks(console, checked, in_full=in_full)


def ledger_tables(run: str, ledgers: list[StepLedger]) -> list[Table]:
    """Attempts and reward, tokens by bucket (one row a step, no empty columns), then losses by cause if any."""
    return [_attempt_table(run, ledgers), _token_table(ledgers), *_loss_tables(ledgers)]


def print_checks(console: Console, checked: dict[int, list[Check]], *, in_full: bool) -> None:
    """All sums of one step, or one line for the run."""
    if in_full:
        for checks in checked.values():
            for check in checks:
                mark = "[green]holds [/]" if check.holds else "[red]BROKEN[/]"
                console.print(f"{mark} {check.name}: {check.line()}")
        return
    total = sum(len(checks) for checks in checked.values())
    broken = sum(not check.holds for checks in checked.values() for check in checks)
    colour = "red" if broken else "green"
    console.print(f"[{colour}]{total - broken} of {total} sums hold[/] over {len(checked)} steps")


def _attempt_table(run: str, ledgers: list[StepLedger]) -> Table:
    from rich.table import Table

    from rl360.ledger import metrics

    outcomes = [metrics.outcome_counts(book) for book in ledgers]
    names = ["passed", "failed", "truncated"]
    table = Table(title=f"{run}: attempts (groups: trained/all passed/all failed)", **_STYLE)
    for name in ("step", "attempts", *names, "lost"):
        table.add_column(name, justify="right")
    for name in ("groups", "reward", "kept", "infra", "loss"):
        table.add_column(name, justify="right")
    for book, counts in zip(ledgers, outcomes, strict=True):
        groups, reward = metrics.group_counts(book), metrics.reward_metrics(book)
        table.add_row(
            str(book.step),
            f"{len(book.attempts):,}",
            *(_count(counts.get(name, 0)) for name in names),
            _count(sum(count for name, count in counts.items() if name not in names)),
            f"{groups['trained']}/{groups['all_pass']}/{groups['all_fail']}",
            number(reward["unfiltered_mean_valid"], 3),
            number(reward["kept_mean"], 3),
            percent(reward["infra_rate"]),
            number(book.train.loss, 4),
        )
    return table


def _token_table(ledgers: list[StepLedger]) -> Table:
    from rich.table import Table

    from rl360.ledger import metrics

    tokens = [metrics.token_counts(book) for book in ledgers]
    names = _present(tokens, ["trained"])
    table = Table(title="sampled tokens", **_STYLE)
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


def _loss_tables(ledgers: list[StepLedger]) -> list[Table]:
    from rich.table import Table

    from rl360.ledger.metrics import run_losses

    losses = run_losses(ledgers)
    if not losses:
        return []
    table = Table(title="losses by cause", **_STYLE)
    table.add_column("cause")
    for name in ("attempts", "seconds", "tokens"):
        table.add_column(name, justify="right")
    for loss in losses:
        row = (f"{loss['attempts']:,}", f"{loss['seconds']:,.1f}", f"{loss['tokens']:,}")
        table.add_row(loss["cause"].replace("_", " "), *row)
    return [table]


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
