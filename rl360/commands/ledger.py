"""`rl360 ledger RUN`: where every attempt and every sampled token went, with the sums checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from rl360.report.numbers import DASH, fixed, percent

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rl360.ledger.checks import Check

Step = Mapping[str, Any]
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
    from rl360.ledger.checks import audit_run
    from rl360.ledger.metrics import step_json
    from rl360.ledger.read import iter_run
    from rl360.store.object_store import ObjectStore

    steps, checked = [], {}
    for book, checks in audit_run(iter_run(ObjectStore.from_services(load_services()), run)):
        if step is None or book.step == step:
            steps.append(step_json(book))
        checked[book.step] = checks
    if step is not None:
        if step not in checked:
            known = f"ledgers exist for steps {min(checked)} to {max(checked)}" if checked else "no step has one yet"
            raise BadInput(f"run {run} has no ledger for step {step}; {known}")
        checked = {step: checked[step]}
    if json:
        typer.echo(orjson.dumps({"run": run, "steps": steps}).decode())
    else:
        print_ledgers(run, steps, checked, in_full=step is not None)
    broken = [(k, check) for k, checks in checked.items() for check in checks if not check.holds]
    for k, check in broken:
        typer.echo(f"rl360: {run} step {k}: {check.name}: {check.line()}", err=True)
    if broken:
        raise typer.Exit(1)


def print_ledgers(run: str, steps: Sequence[Step], checked: dict[int, list[Check]], *, in_full: bool) -> None:
    """Both tables, then the sums."""
    from rich.console import Console

    console = Console(highlight=False)
    if not steps:
        console.print(f"{run}: no step has a ledger yet")
        return
    for table in ledger_tables(run, steps):
        console.print(table)
        console.print()
    print_checks(console, checked, in_full=in_full)


def ledger_tables(run: str, steps: Sequence[Step]) -> list[Table]:
    """Attempts and reward, tokens by bucket (one row a step, no empty columns), then losses by cause if any."""
    return [_attempt_table(run, steps), _token_table(steps), *_loss_tables(steps)]


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


def _attempt_table(run: str, steps: Sequence[Step]) -> Table:
    from rich.table import Table

    names = ["passed", "failed", "truncated"]
    table = Table(title=f"{run}: attempts (groups: trained/all passed/all failed)", **_STYLE)
    for name in ("step", "attempts", *names, "lost"):
        table.add_column(name, justify="right")
    for name in ("groups", "reward", "kept", "infra", "loss"):
        table.add_column(name, justify="right")
    for step in steps:
        counts, groups, reward = step["outcomes"], step["groups"], step["reward"]
        table.add_row(
            str(step["step"]),
            f"{step['attempts']:,}",
            *(_count(counts.get(name, 0)) for name in names),
            _count(sum(count for name, count in counts.items() if name not in names)),
            f"{groups['trained']}/{groups['all_pass']}/{groups['all_fail']}",
            fixed(reward["unfiltered_mean_valid"], 3),
            fixed(reward["kept_mean"], 3),
            percent(reward["infra_rate"]),
            fixed(step["loss"], 4),
        )
    return table


def _token_table(steps: Sequence[Step]) -> Table:
    from rich.table import Table

    tokens = [step["tokens"] for step in steps]
    names = _present(tokens, ["trained"])
    table = Table(title="sampled tokens", **_STYLE)
    for name in ("step", "sampled", *names, "loss weight"):
        table.add_column(name.replace("_", " "), justify="right")
    for step, counts in zip(steps, tokens, strict=True):
        table.add_row(
            str(step["step"]),
            f"{step['sampled_tokens']:,}",
            *(_count(counts.get(name, 0)) for name in names),
            f"{step['loss_weight_sum']:.6f}",
        )
    if len(steps) > 1:
        sums = [sum(count.get(name, 0) for count in tokens) for name in names]
        total = sum(step["sampled_tokens"] for step in steps)
        table.add_section()
        table.add_row("all", f"{total:,}", *(_count(value) for value in sums), "")
    return table


def _loss_tables(steps: Sequence[Step]) -> list[Table]:
    from rich.table import Table

    from rl360.ledger.metrics import run_losses

    losses = run_losses(steps)
    if not losses:
        return []
    table = Table(title="losses by cause", **_STYLE)
    table.add_column("cause")
    for name in ("attempts", "seconds", "tokens"):
        table.add_column(name, justify="right")
    for loss in losses:
        row = (f"{loss['attempts']:,}", f"{loss['seconds']:,.1f}", f"{loss['sampled_tokens']:,}")
        table.add_row(loss["cause"].replace("_", " "), *row)
    return [table]


def _present(counts: Sequence[Mapping[str, int]], always: list[str]) -> list[str]:
    """The names to show as columns: `always`, then whatever else occurs, in the order of its enum."""
    occurring = dict.fromkeys(name for count in counts for name in count)
    return always + [name for name in occurring if name not in always]


def _count(value: int) -> str:
    return f"{value:,}" if value else DASH
