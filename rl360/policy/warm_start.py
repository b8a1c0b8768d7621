"""The warm start: the supervised recipe whose result reinforcement learning can improve, and its cache.

It is built to leave room, on purpose: most demonstrations are plausibly wrong, so that the policy knows every command
but does the right thing only about four times in ten, and disagrees with itself on nearly every task. Clean
demonstrations stopped early would give the same pass rate by diffuse token noise, from which reinforcement learning
learns nothing in a few steps.

A warm start is a pure function of (recipe, seed, the sources below). It is made once, under its digest, in
`<home>/models/`, and put there whole with one rename; a reader checks the weights against the recorded digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl360.errors import BadInput, CorruptObject

Progress = Callable[[str], None]
RECORD = "warm_start.json"
WEIGHTS = "model.safetensors"
MAX_STEPS = 100_000
SAY_S = 5.0
_PACKAGE = Path(__file__).parents[1]
_SOURCES = (
    *(
        f"policy/{name}.py"
        for name in ("demonstrations", "model", "shell_batch", "template", "tokenizer", "warm_start")
    ),
    "tasksets/chores.py",
    "tasksets/harbor_files.py",
    "sessions/families/rl360_chat.jinja",
    "training/sft.py",
)


@dataclass(frozen=True)
class Recipe:
    """What the supervised training sees. `right_share` of the demonstrations solve their chore, the rest are
    plausibly wrong.
    """

    right_share: float = 0.4
    demonstrations: int = 4000
    steps: int = 320
    batch_size: int = 32
    lr: float = 2e-3

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= MAX_STEPS:
            raise BadInput(f"steps {self.steps} is not between 1 and {MAX_STEPS}")


def code_digest() -> str:
    """sha256 over the sources that decide what a warm start is."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update(name.encode() + b"\0" + (_PACKAGE / name).read_bytes() + b"\0")
    return digest.hexdigest()


def warm_start_key(seed: int, recipe: Recipe) -> str:
    text = json.dumps({"recipe": asdict(recipe), "seed": seed, "code": code_digest()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checked(folder: Path) -> Path:
    """`folder` when it holds the warm start its record names; raises otherwise."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        digest = _sha256(folder / WEIGHTS)
    except (OSError, ValueError) as error:
        raise CorruptObject(
            str(folder), f"not a whole warm start ({error}); delete the directory and try again"
        ) from error
    if record.get("weights_sha256") != digest:
        raise CorruptObject(str(folder), "the weights are not the recorded ones; delete the directory and try again")
    return folder


def build_warm_start(seed: int, recipe: Recipe, out_dir: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Make tokenizer, model and demonstrations, train with the trainer's own backend, write the directory; returns
    its record.
    """
    say = progress or (lambda line: None)
    started_s = time.monotonic()
    say(f"warm start: drawing {recipe.demonstrations} demonstrations, {recipe.right_share:.0%} right")
    # threads that wait for each other after every small product sleep: spinning, they take busy cores from each other
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch reads it when it is imported, which is here

    from rl360.policy.demonstrations import demonstrations
    from rl360.policy.model import write_model
    from rl360.policy.tokenizer import RawEncoder, tokenizer_digest, train_tokenizer
    from rl360.training.sft import train_sft

    imported_s = time.monotonic()
    tokenizer = train_tokenizer()
    examples = demonstrations(seed, recipe.demonstrations, recipe.right_share, RawEncoder(tokenizer))
    first_s = said_s = time.monotonic()
    demonstrations_s = first_s - imported_s

    def step_done(step: int, loss: float) -> None:
        nonlocal said_s, first_s
        now_s = time.monotonic()
        if step == 1:  # before it, the model is set up
            first_s = now_s
        if now_s - said_s >= SAY_S or step == recipe.steps:
            said_s, left_s = now_s, (now_s - first_s) / max(step - 1, 1) * (recipe.steps - step)
            took = f"{now_s - started_s:.0f} s" + (f", about {left_s:.0f} s left" if left_s else "")
            say(f"warm start: step {step} of {recipe.steps}, loss {loss:.3f}, {took}")

    with tempfile.TemporaryDirectory(prefix="rl360-init-") as initial:
        write_model(Path(initial), tokenizer, seed)
        out_dir.mkdir(parents=True, exist_ok=True)
        trained = train_sft(
            initial,
            examples,
            out_dir,
            steps=recipe.steps,
            batch_size=recipe.batch_size,
            lr=recipe.lr,
            seed=seed,
            progress=step_done,
        )
    record = {
        "schema_version": 1,
        "recipe": asdict(recipe),
        "seed": seed,
        "code_sha256": code_digest(),
        "tokenizer_sha256": tokenizer_digest(tokenizer),
        "weights_sha256": _sha256(out_dir / WEIGHTS),
        "steps": trained["steps"],
        "tokens": trained["tokens"],
        "trained_tokens": trained["trained_tokens"],
        "first_loss": trained["first_loss"],
        "loss": trained["last_loss"],
        "demonstrations_s": round(demonstrations_s, 2),
        "training_s": round(trained["seconds"], 2),
        "seconds": round(time.monotonic() - started_s, 2),
    }
    (out_dir / RECORD).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return record


def ensure_warm_start(seed: int, home: Path, recipe: Recipe | None = None, progress: Progress | None = None) -> Path:
    """The warm start of `seed` under `home`/models: the cached directory when it is there and whole, else built now."""
    recipe = recipe or Recipe()
    if seed < 0:
        raise BadInput(f"seed {seed} is negative; give 0 or more")
    models = Path(home) / "models"
    target = models / f"warm-{seed}-{warm_start_key(seed, recipe)[:16]}"
    if target.exists():
        return _checked(target)
    models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=models) as scratch:
        built = Path(scratch) / "model"
        build_warm_start(seed, recipe, built, progress)
        try:
            built.rename(target)
        except OSError:
            if not target.exists():  # else another process built the same one first: same inputs, same content
                raise
    return _checked(target)
