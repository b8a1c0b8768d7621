"""The tables of `rl360 ledger`: steps, tokens, training, losses, sums, waste and reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl360.report.numbers import DASH, fixed, percent, run_losses, short

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rl360.ledger.checks import Check

Step = Mapping[str, Any]
_STYLE: dict[str, Any] = {"title_justify": "left", "header_style": "bold", "box": None, "padding": (0, 0, 0, 1)}


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
    """Attempts and reward, tokens by bucket, what training saw (one row a step, no empty columns), then losses by cause
    if any."""
    tables = [_attempt_table(run, steps), _token_table(steps), _training_table(steps)]
    return [*tables, *_reference_tables(steps), *_loss_tables(steps)]


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


def _training_table(steps: Sequence[Step]) -> Table:
    """Pass@k for the smallest and the largest k that has groups; means over trained tokens."""
    from rich.table import Table

    largest = max((int(k) for step in steps for k, found in step["pass_at_k"].items() if found["groups"]), default=1)
    table = Table(title="groups and training (means over trained tokens)", **_STYLE)
    names = ("step", "pass@1", f"pass@{largest}", "agree", "stale", "|dlogp|", "TIS", "clipped", "masked", "grad")
    for name in names:
        table.add_column(name, justify="right")
    for step in steps:
        passed = [step["pass_at_k"].get(k, {}).get("mean") for k in ("1", str(largest))]
        dlogp = step["mean_abs_dlogp"]
        table.add_row(
            str(step["step"]),
            *(fixed(value, 3) for value in passed),
            percent(step["zero_disagreement"]["share"]),
            fixed(step["staleness"]["mean"], 2),
            DASH if dlogp is None else f"{dlogp:.1e}",
            fixed(step["tis_mean"], 3),
            percent(step["clip_fraction"]),
            percent(step["masked_fraction"]),
            fixed(step["grad_norm"], 3),
        )
    return table


def _reference_tables(steps: Sequence[Step]) -> list[Table]:
    """What a KL and a critic add: no table in a run that has neither."""
    from rich.table import Table

    keys = {
        "kl_mean": "KL",
        "value_loss": "value loss",
        "explained_variance": "explained variance",
        "value_clip_fraction": "value clipped",
        "critic_grad_norm": "critic grad",
    }
    shown = {key: name for key, name in keys.items() if any(step.get(key) is not None for step in steps)}
    if not shown:
        return []
    title = "reference policy and critic"
    table = Table(title=title, min_width=len(title) + 1, **_STYLE)  # a title folds to the width of its table
    for name in ("step", *shown.values()):
        table.add_column(name, justify="right")
    for step in steps:
        table.add_row(str(step["step"]), *(short(step.get(key)) for key in shown))
    return [table]


def _loss_tables(steps: Sequence[Step]) -> list[Table]:
    from rich.table import Table

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
