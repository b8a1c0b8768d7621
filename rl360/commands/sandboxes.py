"""`rl360 sandboxes`: what the policies for starting, admitting and placing them do, simulated; whose there are."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from rl360.commands import sandbox_leases

if TYPE_CHECKING:
    from rl360.sandboxes.comparisons import Compared

app = typer.Typer(no_args_is_help=True, help="Sandboxes: whose there are, what nobody owns, the policies simulated.")
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")]
SILENT_S = 2.0
sandbox_leases.register(app)


def register(root: typer.Typer) -> None:
    """Add `sandboxes` to the program."""
    root.add_typer(app, name="sandboxes")


@app.callback()
def sandboxes() -> None:
    """Sandboxes: whose there are, what nobody owns, the policies simulated."""


@app.command("simulate", epilog="Example: rl360 sandboxes simulate --starts 8192 --nodes 64 --out pictures")
def simulate(
    only: Annotated[
        str | None, typer.Option(help="One comparison: waves, admission or placement (default: all).")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="What is random is drawn from it.")] = 0,
    starts: Annotated[int, typer.Option(min=1, max=100_000, help="Attempts that are asked for together.")] = 8192,
    nodes: Annotated[int, typer.Option(min=2, max=10_000, help="Nodes of the cluster.")] = 64,
    images: Annotated[int, typer.Option(min=1, max=100_000, help="Images of a step (placement, admission).")] = 512,
    pulls_per_s: Annotated[float, typer.Option(min=0.01, max=1e6, help="What the registry serves.")] = 50.0,
    pulls_at_once: Annotated[int, typer.Option(min=1, help="Pulls under way beyond which it refuses.")] = 256,
    wave_size: Annotated[int, typer.Option(min=1, help="Starts in a wave; also the first window.")] = 64,
    wave_interval_s: Annotated[float, typer.Option(min=0, max=3600, help="Seconds from wave to wave.")] = 0.5,
    ready_goal_s: Annotated[
        float, typer.Option(min=0.01, max=1e9, help="Starts over half of it stop the window's growth.")
    ] = 6,
    heavy_share: Annotated[float, typer.Option(min=0, max=1, help="Attempts that are heavy builds.")] = 0.05,
    heavy_cpus: Annotated[float, typer.Option(min=0.1, help="What a heavy build uses; a node has 64.")] = 16.0,
    out: Annotated[Path | None, typer.Option(help="Folder for one picture a comparison.")] = None,
    as_json: JsonOption = False,
) -> None:
    """All at once or in waves, with or without reservations, anywhere or pinned: the product's policies, simulated.

    docs/sandboxes.md says what is modelled and what is not.
    """
    from rl360.sandboxes.comparisons import NAMES, Setting, compare

    setting = Setting(
        seed=seed,
        starts=starts,
        nodes=nodes,
        pulls_per_s=pulls_per_s,
        pulls_at_once=pulls_at_once,
        wave_size=wave_size,
        wave_interval_s=wave_interval_s,
        ready_goal_s=ready_goal_s,
        heavy_share=heavy_share,
        heavy_cpus=heavy_cpus,
        images=images,
    )
    if out is not None:
        _writable(out)
    found = []
    names = NAMES if only is None else (only,)
    for number, name in enumerate(names, 1):
        with _progress(f"{name} ({number} of {len(names)})"):
            found.append(compare(name, setting))
    pictures = [_draw(compared, out) for compared in found] if out else []
    if as_json:
        told: dict[str, Any] = {compared.name: compared.figures for compared in found}
        typer.echo(orjson.dumps({"seed": seed, **told, "pictures": pictures}).decode())
        return
    for compared in found:
        _table(compared)
    for path in pictures:
        typer.echo(path)


@contextlib.contextmanager
def _progress(what: str) -> Iterator[None]:
    """On a terminal, from the third second on: what is computed, and since when."""
    if not sys.stderr.isatty():
        yield
        return
    began, over = time.monotonic(), threading.Event()

    def tell() -> None:
        if over.wait(SILENT_S):
            return
        while True:
            print(f"\r{what}: {time.monotonic() - began:.0f} s", end="", file=sys.stderr, flush=True)
            if over.wait(1.0):
                break
        print("\r\033[K", end="", file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def _writable(folder: Path) -> None:
    """Before anything is computed for it."""
    from rl360.errors import BadInput

    try:
        folder.mkdir(parents=True, exist_ok=True)
        why = "" if os.access(folder, os.W_OK | os.X_OK) else "Permission denied"
    except OSError as error:
        why = error.strerror or type(error).__name__
    if why:
        raise BadInput(f"--out {folder}: cannot be written ({why}); name another folder")


def _draw(compared: Compared, folder: Path) -> str:
    from rl360.errors import BadInput
    from rl360.sandboxes.pictures import picture

    path = folder / f"{compared.name}.png"
    try:
        path.write_bytes(picture(compared))
    except OSError as error:
        raise BadInput(f"--out {folder}: cannot write {path.name} ({error.strerror}); name another folder") from None
    return str(path)


def _table(compared: Compared) -> None:
    """Rows are figures, columns the two sides."""
    sides = list(compared.figures)
    typer.echo(f"{compared.name + ':':<28}" + "".join(f"{side:>40}" for side in sides))
    for name in compared.figures[sides[0]]:
        cells = [_cell(compared.figures[side][name]) for side in sides]
        typer.echo(f"  {name:<26}" + "".join(f"{cell:>40}" for cell in cells))
    typer.echo("")


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(_cell(item) for item in value)
    return "-" if value is None else f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
