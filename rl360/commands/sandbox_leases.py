"""`rl360 sandboxes list|reap`: whose sandboxes there are, and the end of those that nobody owns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from rl360.config.services import home_dir, service_token
from rl360.errors import BadInput

if TYPE_CHECKING:
    from rl360.sandboxes.leases import Lease
    from rl360.sandboxes.providers.remote import Daemon

ProviderOption = Annotated[str, typer.Option(help="bubblewrap (this host's home), docker, daytona or kubernetes.")]
TokenOption = Annotated[
    Path | None, typer.Option("--token-file", help="The deployment's token (not for bubblewrap; default: the home's).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON list, for programs (docs/providers.md).")]
HEAD = ("state", "owner", "lease left", "run", "step", "attempt", "sandbox")


def register(app: typer.Typer) -> None:
    """Add the commands to the group."""
    app.command("list", epilog="Example: rl360 sandboxes list --provider docker --json")(list_)
    app.command("reap", epilog="Example: rl360 sandboxes reap --provider docker --yes")(reap)


def list_(
    provider: ProviderOption = "bubblewrap",
    run: Annotated[str | None, typer.Option(help="Only those of this run.")] = None,
    attempt: Annotated[str | None, typer.Option(help="Only those of this attempt.")] = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sandboxes of this deployment: owner, lease and attempt of each. Removes nothing."""
    with _readable():
        leases = _on_this_host() if provider == "bubblewrap" else asyncio.run(_elsewhere(provider, token_file))
    rows = [lease.row(time.time()) for lease in leases]
    rows = [row for row in rows if run in (None, row["run"]) and attempt in (None, row["attempt"])]
    if as_json:
        typer.echo(orjson.dumps(rows).decode())
        return
    table = [HEAD, *map(_cells, rows)] if rows else []
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        typer.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip())
    where = f" in {home_dir() / 'sandboxes'}" if provider == "bubblewrap" else ""
    typer.echo(f"{len(rows)} {'sandbox' if len(rows) == 1 else 'sandboxes'} of {provider}{where}")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    here = row["owner_state"] in ("alive", "ended")
    who = f"pid {row['owner_pid']} {row['owner_state']}" if here else row["owner_state"]
    who += f" on {row['owner_host']}" if row["owner_state"] == "unseen" else ""
    said = ["-" if row[name] is None else str(row[name]) for name in ("run", "step", "attempt")]
    return (row["state"], who, _span(row["lease_left_s"]), *said, row["id"])


def _span(left_s: float | None) -> str:
    if left_s is None:
        return "-"
    size = abs(left_s)
    told = f"{size:.0f} s" if size < 120 else f"{size / 60:.0f} min" if size < 7200 else f"{size / 3600:.1f} h"
    return told if left_s >= 0 else f"over, {told} ago"


def reap(
    provider: ProviderOption = "bubblewrap",
    yes: Annotated[bool, typer.Option("--yes", help="Remove them; else only say which.")] = False,
    token_file: TokenOption = None,
) -> None:
    """End and remove sandboxes whose owner is gone or whose lease has run out, and prove it. Never those of the living.

    Says of each what was proven. Exit 1 when one could not be proven gone, or something of it could not be removed.
    """
    with _readable():
        local = provider == "bubblewrap"
        lines = _reap_here(yes) if local else asyncio.run(_reap_elsewhere(provider, token_file, yes))
    for line in lines:
        typer.echo(line)
    failed = any("NOT " in line for line in lines)
    if not lines:
        typer.echo("nothing to reap")
    elif not yes and not failed:
        typer.echo("nothing was removed; add --yes")
    if failed:
        raise typer.Exit(1)


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadInput(f"{error.filename}: {error.strerror}; set RL360_HOME to a home that this user may use") from None


def _folder() -> Path:
    """Of this home's sandboxes. One that cannot be looked into is no empty one."""
    folder = home_dir() / "sandboxes"
    with contextlib.suppress(FileNotFoundError):
        for live in [path / "live" for path in folder.iterdir()]:
            if live.is_dir():
                os.listdir(live)
    return folder


def _on_this_host() -> list[Lease]:
    from rl360.sandboxes.bubblewrap import listed

    return listed(_folder())


def _reap_here(yes: bool) -> list[str]:
    """Each server's folder that no server holds."""
    from rl360.sandboxes.bubblewrap import BubblewrapProvider

    lines, rows = [], {lease.ident: lease.row(time.time()) for lease in _on_this_host()}
    for root in sorted(_folder().glob("*/live")):
        try:
            provider = BubblewrapProvider(root.parent)
        except BadInput as error:
            if "in use" not in str(error):
                raise
            continue  # its server lives, and cleans up after itself
        try:
            if yes:
                lines += asyncio.run(provider.reap())
                lines += [f"NOT removed: {reason}" for end in provider.reaped if (reason := end.result())]
            else:
                lines += [f"{path}{_whose(rows.get(str(path)))}: would be removed" for path in sorted(root.iterdir())]
        finally:
            provider.close()
    return lines


def _whose(row: dict[str, Any] | None) -> str:
    said = [f"{name} {row[name]}" for name in ("run", "step", "attempt") if row[name] is not None] if row else []
    return " ".join(["", *said, f"({_cells(row)[1]})"]) if row else ""


async def _elsewhere(kind: str, token_file: Path | None) -> list[Lease]:
    from rl360.sandboxes.leases import DEPLOYMENT
    from rl360.sandboxes.providers.remote import UNDO_S

    daemon, deployment = _daemon(kind, token_file)
    try:
        return await daemon.listed({DEPLOYMENT: deployment}, UNDO_S)
    finally:
        await daemon.close()


async def _reap_elsewhere(kind: str, token_file: Path | None, yes: bool) -> list[str]:
    from rl360.sandboxes.providers.remote import reap as reap_daemon

    daemon, deployment = _daemon(kind, token_file)
    try:
        return await reap_daemon(daemon, deployment, dry=not yes)
    finally:
        await daemon.close()


def _daemon(kind: str, token_file: Path | None) -> tuple[Daemon, str]:
    from rl360.sandboxes.providers import open_daemon
    from rl360.sandboxes.providers.remote import deployment_of

    daemon = open_daemon(kind)
    return daemon, deployment_of(service_token(token_file))
