"""`rl360 model`: make the laptop's starting policy, and check that everything that scores tokens agrees."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="The starting policy: warm start and parity.")


def _progress(line: str) -> None:
    typer.echo(line, err=True)


@contextlib.contextmanager
def patient(
    say: Callable[[str], None], what: str = "warm start", every_s: float = 10.0
) -> Iterator[Callable[[str], None]]:
    """`say`, and whenever it said nothing for `every_s`, since when it is at it."""
    began = heard = time.monotonic()
    over = threading.Event()

    def tell(line: str) -> None:
        nonlocal heard
        heard = time.monotonic()
        say(line)

    def remind() -> None:
        while not over.wait(every_s / 5):
            if time.monotonic() - heard >= every_s:
                tell(f"{what}: at it for {time.monotonic() - began:.0f} s")

    teller = threading.Thread(target=remind, daemon=True)
    teller.start()
    try:
        yield tell
    finally:
        over.set()
        teller.join()


@app.command("warm-start")
def warm_start(
    seed: Annotated[int, typer.Option(help="Seed of initialisation, demonstrations and their order.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write here instead of the cache; must not exist yet.")] = None,
    steps: Annotated[int | None, typer.Option(help="Supervised steps instead of the recipe's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Train the starting policy on demonstrations (cached by recipe, code and seed).

    Example: rl360 model warm-start --seed 0
    """
    from dataclasses import replace

    from rl360.config.services import home_dir
    from rl360.errors import BadInput
    from rl360.policy.warm_start import RECORD, Recipe, build_warm_start, ensure_warm_start

    recipe = Recipe() if steps is None else replace(Recipe(), steps=steps)
    if out is not None:
        if out.exists():
            raise BadInput(f"{out} exists already; give a new directory or delete it")
        if seed < 0:
            raise BadInput(f"seed {seed} is negative; give 0 or more")
        with patient(_progress) as say:
            build_warm_start(seed, recipe, out, say)
        folder = out
    else:
        with patient(_progress) as say:
            folder = ensure_warm_start(seed, home_dir(), recipe, say)
    record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    if as_json:
        typer.echo(json.dumps({"path": str(folder), **record}))
    else:
        typer.echo(
            f"{folder}\n{record['steps']} steps, {record['tokens']} tokens, "
            f"loss {record['loss']:.3f}, {record['seconds']:.0f} s"
        )


@app.command("parity")
def parity(
    model_dir: Annotated[Path, typer.Argument(help="Hugging Face model directory.")],
    engine: Annotated[str | None, typer.Option(help="URL of an engine that serves the same weights.")] = None,
    sequences: Annotated[int, typer.Option(min=1, max=1000, help="How many whole demonstrations to score.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print the gaps as JSON.")] = False,
) -> None:
    """Compare log-probs of Megatron-core and transformers in fp32 (exit 1 above 1e-4), and measure an engine's gap.

    Example: rl360 model parity .rl360/models/warm-0-1234 --engine http://127.0.0.1:13050
    """
    from dataclasses import asdict

    from rl360.policy.parity import PARITY_LIMIT, engine_logprobs, gap, probe_examples, transformers_logprobs
    from rl360.training.logprobs import megatron_logprobs

    examples = probe_examples(model_dir, sequences)
    probes = [ids for ids, _ in examples]
    reference = transformers_logprobs(model_dir, probes)
    gaps = {"megatron": gap(megatron_logprobs(model_dir, probes), reference)}
    if engine is not None:
        gaps["engine"] = gap(engine_logprobs(engine, probes), reference, [mask for _, mask in examples])
    holds = gaps["megatron"].maximum < PARITY_LIMIT
    if as_json:
        typer.echo(
            json.dumps({"limit": PARITY_LIMIT, "holds": holds, **{name: asdict(value) for name, value in gaps.items()}})
        )
    else:
        scored = {"megatron": "tokens", "engine": "assistant tokens"}
        for name, value in gaps.items():
            judged = (
                f" (limit {PARITY_LIMIT:g}: {'holds' if holds else 'BROKEN'})"
                if name == "megatron"
                else " (measured, not judged)"
            )
            typer.echo(
                f"{name} against transformers fp32, {value.tokens} {scored[name]}: "
                f"mean {value.mean:.2e}, max {value.maximum:.2e}{judged}"
            )
    if not holds:
        raise typer.Exit(1)


def register(root: typer.Typer) -> None:
    """Add `model` to the program."""
    root.add_typer(app, name="model")
