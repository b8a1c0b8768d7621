"""`rl360 sandboxes list|reap`: whose sandboxes there are, and the end of those that nobody owns."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from rl360.config.services import home_dir, service_token
from rl360.errors import BadInput

if TYPE_CHECKING:
    from rl360.sandboxes.leases import Lease
    from rl360.sandboxes.providers.remote import Daemon

ProviderOption = Annotated[str, typer.Option(help="bubblewrap (this host's home), docker, daytona or kubernetes.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON list, for programs.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the group."""
    app.command("list", epilog="Example: rl360 sandboxes list --provider docker --json")(list_)
    app.command("reap", epilog="Example: rl360 sandboxes reap --provider docker --yes")(reap)


def list_(provider: ProviderOption = "bubblewrap", as_json: JsonOption = False) -> None:
    """Sandboxes of this deployment: owner, lease and attempt of each. Removes nothing."""
    leases = _on_this_host() if provider == "bubblewrap" else asyncio.run(_elsewhere(provider))
    rows = [lease.row(time.time()) for lease in leases]
    if as_json:
        typer.echo(orjson.dumps(rows).decode())
        return
    for row in rows:
        attempt = " ".join(f"{name} {row[name]}" for name in ("run", "step", "attempt") if name in row)
        typer.echo(f"{row['state']:<10} {row['id']:<40} {attempt}")
    typer.echo(f"{len(rows)} sandboxes of {provider}")


def reap(
    provider: ProviderOption = "bubblewrap",
    yes: Annotated[bool, typer.Option("--yes", help="Remove them; else only say which.")] = False,
) -> None:
    """End and remove sandboxes whose owner is gone or whose lease has run out, and prove it. Never those of the living.

    Exit 1 when one could not be proven gone.
    """
    lines = _reap_here(yes) if provider == "bubblewrap" else asyncio.run(_reap_elsewhere(provider, yes))
    for line in lines:
        typer.echo(line)
    if not lines:
        typer.echo("nothing to reap")
    elif not yes:
        typer.echo("nothing was removed; add --yes")
    if any("NOT " in line for line in lines):
        raise typer.Exit(1)


def _on_this_host() -> list[Lease]:
    from rl360.sandboxes.bubblewrap import listed

    return listed(home_dir() / "sandboxes")


def _reap_here(yes: bool) -> list[str]:
    """Each server's folder that no server holds."""
    from rl360.sandboxes.bubblewrap import BubblewrapProvider

    lines = []
    for root in sorted((home_dir() / "sandboxes").glob("*/live")):
        try:
            provider = BubblewrapProvider(root.parent)
        except BadInput as error:
            if "in use" not in str(error):
                raise
            continue  # its server lives, and cleans up after itself
        try:
            if yes:
                lines += asyncio.run(provider.reap())
            else:
                lines += [f"{path.name}: would be removed" for path in sorted(root.iterdir())]
        finally:
            provider.close()
    return lines


async def _elsewhere(kind: str) -> list[Lease]:
    from rl360.sandboxes.leases import DEPLOYMENT
    from rl360.sandboxes.providers.remote import UNDO_S

    daemon, deployment = _daemon(kind)
    try:
        return await daemon.listed({DEPLOYMENT: deployment}, UNDO_S)
    finally:
        await daemon.close()


async def _reap_elsewhere(kind: str, yes: bool) -> list[str]:
    from rl360.sandboxes.providers.remote import reap as reap_daemon

    daemon, deployment = _daemon(kind)
    try:
        return await reap_daemon(daemon, deployment, dry=not yes)
    finally:
        await daemon.close()


def _daemon(kind: str) -> tuple[Daemon, str]:
    from rl360.sandboxes.providers import open_daemon
    from rl360.sandboxes.providers.remote import deployment_of

    daemon = open_daemon(kind)
    return daemon, deployment_of(service_token())
