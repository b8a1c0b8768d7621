"""`rl360 harbor setup`: the environment that real Harbor's agents run in, apart from ours (Python 3.12)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add `rl360 harbor` to the program."""
    harbor = typer.Typer(help="Real Harbor's agents (docs/agents.md).", no_args_is_help=True)
    harbor.command("setup", epilog="Example: rl360 harbor setup --python /usr/bin/python3.12")(setup)
    app.add_typer(harbor, name="harbor")


def setup(
    python: Annotated[str, typer.Option(help="a Python 3.12 (default: python3.12 of PATH)")] = "python3.12",
    folder: Annotated[Path | None, typer.Option(help="where (default: HOME/harbor)")] = None,
) -> None:
    """Make the environment from requirements/harbor.txt, or say that it is there already."""
    from rl360.harbor.real.place import default_folder, make

    made, path = make(folder or default_folder(), python)
    typer.echo(f"{'made' if made else 'ready'}: {path}")
