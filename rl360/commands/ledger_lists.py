"""What `rl360 ledger --why` and `--waste` print: plain columns, so that no id is cut to fit a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rl360.report.numbers import DASH, fixed, percent
from rl360.report.waste import CLASSES


def why_text(found: Mapping[str, Any]) -> str:
    """Totals, counts by cause, then the rows that were asked for. `found`: of `rl360.report.why.why`, with `run`."""
    return "\n".join(_why(found))


def waste_text(books: Mapping[str, Any]) -> str:
    """Classes, buckets, outcomes and phases, each summing to the first line; money where prices are given.

    `books`: of `rl360.report.waste.waste`, with `run`.
    """
    return "\n".join(_waste(books))


def _why(found: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{found['run']}: {_words(found['why'])} ({found['kind']}): {found['attempts']:,} attempts in "
        f"{found['groups']:,} groups, {found['tokens']:,} tokens of {found['sampled_tokens']:,} sampled, "
        f"{found['seconds']:,.1f} s"
    )
    if not found["rows"]:
        return
    causes = (
        (_words(each["outcome"]), _words(each["bucket"]), *_amounts(each, "attempts", "tokens"))
        for each in found["by_cause"]
    )
    yield from _table(("outcome", "bucket"), ("attempts", "tokens", "seconds"), causes)
    if found["listed"] == "groups":
        numbers = ("attempts", "of", "tokens", "seconds")
        yield from _table(("group", "fate", "task", "rewards"), numbers, map(_group_row, found["rows"]))
    else:
        numbers = ("reward", "score", "tokens", "seconds")
        yield from _table(("attempt", "outcome", "bucket", "task"), numbers, map(_attempt_row, found["rows"]))
    more = found["rows_in_all"] - len(found["rows"])
    if more:
        yield f"and {more:,} more {found['listed']}; --limit 0 lists all"


def _attempt_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    names = (row["attempt_id"], _words(row["outcome"]), _words(row["bucket"]), row["task_id"])
    return (*names, fixed(row["reward"], 2), fixed(row["score"], 2), *_amounts(row, "tokens"))


def _group_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    rewards = " ".join(DASH if reward is None else f"{reward:g}" for reward in row["rewards"])
    return (row["group_id"], _words(row["fate"]), row["task_id"], rewards, *_amounts(row, "attempts", "of", "tokens"))


def _waste(books: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{books['run']}: {books['attempts']:,} attempts of {books['steps']:,} steps took {books['seconds']:,.1f} s "
        f"and sampled {books['sampled_tokens']:,} tokens, of which {books['trained_tokens']:,} trained"
    )
    for name in ("class", "bucket", "outcome"):
        split = CLASSES if name == "outcome" else ()
        rows = (
            (
                _words(key),
                _count(each["attempts"]),
                f"{each['seconds']:,.1f}",
                _part(each["seconds"], books["seconds"]),
                _count(each["tokens"]),
                _part(each["tokens"], books["sampled_tokens"]),
                *(_count(each[f"{part}_tokens"]) for part in split),
            )
            for key, each in books[f"by_{name}"].items()
        )
        yield from _table((name,), ("attempts", "seconds", "share", "tokens", "share", *split), rows)
    phases = (
        (_words(phase), *(f"{spent[name]:,.1f}" for name in CLASSES), *_whole(sum(spent.values()), books["seconds"]))
        for phase, spent in books["by_phase"].items()
    )
    yield from _table(("seconds by phase",), (*CLASSES, "all", "share"), phases)
    if books["money"] is not None:
        yield from _money(books, books["money"])


def _money(books: Mapping[str, Any], money: Mapping[str, Any]) -> Iterator[str]:
    rows = [(name, f"{cost:,.4f}", _part(cost, money["total"])) for name, cost in money["by_class"].items()]
    yield from _table(("cost of",), ("cost", "share"), [*rows, ("all", f"{money['total']:,.4f}", "")])
    per_token = money["per_trained_token"]
    shown = DASH if per_token is None else f"{per_token:.3e} ({1e6 * per_token:,.4f} a million)"
    prices = ", ".join(f"{name} {value:g}" for name, value in money["prices"].items())
    yield f"per trained token: {shown}"
    yield money["formula"]
    yield f"with {prices}; wall_s {books['wall_s']:,.1f}, sandbox_s {books['sandbox_s']:,.1f}"


def _table(names: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A blank line, the header and the rows: names to the left, numbers to the right."""
    lines = [(*names, *numbers), *rows]
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]

    def padded(line: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if at < len(names) else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return ("  " + "  ".join(cells)).rstrip()

    return ["", *map(padded, lines)]


def _amounts(row: Mapping[str, Any], *counts: str) -> tuple[str, ...]:
    return (*(_count(row[name]) for name in counts), f"{row['seconds']:,.1f}")


def _whole(part: float, whole: float) -> tuple[str, str]:
    return f"{part:,.1f}", _part(part, whole)


def _part(part: float, whole: float) -> str:
    return percent(part / whole if whole else None)


def _count(value: int) -> str:
    return f"{value:,}" if value else DASH


def _words(name: str) -> str:
    return name.replace("_", " ")
