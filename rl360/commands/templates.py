"""`rl360 templates`: the known model families, and whether a model's template keeps what a session relies on."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

app = typer.Typer(no_args_is_help=True, help="Chat templates: families, and checks of a model's template.")
_SHOWN = 5


@app.command("list", epilog="Example: rl360 templates list")
def list_families(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list, for programs.")] = False,
) -> None:
    """The model families rl360 can hold sessions with."""
    from rl360.sessions.families.registry import FAMILIES

    if as_json:
        rows = [
            {
                "family": family.name,
                "about": family.about,
                "model_types": sorted(family.model_types),
                "stops": family.stops,
                "appended_roles": sorted(family.appended_roles),
                "thinking": family.split_reasoning is not None,
            }
            for family in FAMILIES.values()
        ]
        typer.echo(orjson.dumps(rows).decode())
        return
    for family in FAMILIES.values():
        kinds = "model_type " + " or ".join(sorted(family.model_types)) if family.model_types else "its own template"
        typer.echo(f"{family.name:<12}{family.about}\n{'':<12}recognised by {kinds}; stops {' '.join(family.stops)}")


@app.command("check", epilog="Example: rl360 templates check --model models/Qwen3-4B --engine http://127.0.0.1:13050")
def check(
    model: Annotated[Path, typer.Option(help="Model directory: tokenizer.json, config.json, its chat template.")],
    engine: Annotated[str | None, typer.Option(help="URL of an engine that serves it, to check against.")] = None,
    family: Annotated[str | None, typer.Option(help="Take this family instead of recognising one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """Check that the template only ever appends (exit 1 when not), and that an engine takes its ids as sessions need.

    What the model's own template does is shown beside it, not judged. An unknown family is exit 2, with the reason.
    """
    from rl360.sessions.families.check import check_stock, check_template
    from rl360.sessions.families.live import check_engine
    from rl360.sessions.families.registry import load_template, stock_template

    template = load_template(model, family)
    report = check_template(template)
    stock_text = stock_template(model)
    stock = None
    if stock_text is not None and stock_text.strip() != template.jinja_text.strip():
        stock = check_stock(stock_text, model / "tokenizer.json", template)
    rows = [] if engine is None else check_engine(template, engine)
    holds = not report.findings and all(row.holds is not False for row in rows)
    if as_json:
        shown = {
            "model": str(model),
            "family": template.family,
            "holds": holds,
            "template": _report(report),
            "stock_template": None if stock is None else _report(stock),
            "engine": [asdict(row) for row in rows],
        }
        typer.echo(orjson.dumps(shown).decode())
    else:
        typer.echo(f"{model}: family {template.family}")
        _show("template", report)
        if stock is not None:
            _show("the model's own template (not used)", stock)
        for row in rows:
            said = {True: "holds", False: "BROKEN", None: "not seen"}[row.holds]
            typer.echo(f"engine: {row.name}: {said} ({row.detail})")
    if not holds:
        raise typer.Exit(1)


def _report(report: Any) -> dict[str, Any]:
    fields = asdict(report)
    return {**fields, "failing": report.failing, "never_sampled": sorted(report.never_sampled)}


def _show(what: str, report: Any) -> None:
    good = report.shapes - report.failing
    typer.echo(f"{what}: {good} of {report.shapes} conversations are append-only, {report.turns} turns")
    for text in sorted(report.never_sampled):
        typer.echo(f"  after a reply it writes {text!r}, which no model samples")
    told: set[str] = set()
    for finding in report.findings:
        kind = finding.shape.split(",")[0]
        if kind not in told and len(told) < _SHOWN:
            told.add(kind)
            typer.echo(f"  {finding.shape}, turn {finding.turn}: {finding.problem}")


def register(root: typer.Typer) -> None:
    """Add `templates` to the program."""
    root.add_typer(app, name="templates")
