"""May a run's policy be served by engines, or start from weights, that were made with another model directory?

Weights travel between the two, tokenizer and chat template do not: those must be the same files, or ids would mean
other text, and every tensor must have the same shape.
"""

from __future__ import annotations

from pathlib import Path

from rl360.errors import BadInput

SHARED_FILES = ("tokenizer.json", "chat_template.jinja")
SERVED = "the model the services were started with"


def refuse_other_model(ours: str | Path, other: str | Path, what: str = SERVED) -> None:
    """`BadInput` when a shared file or a tensor's shape differs. A directory that is not on this host is not judged."""
    from rl360.weights.push import model_shapes

    ours, other = Path(ours), Path(other)
    if ours == other or not ours.is_dir() or not other.is_dir():
        return
    fix = f"`rl360 down` and `rl360 up --model {ours}`" if what == SERVED else "give a model of the same kind"
    for name in SHARED_FILES:
        pair = [path.read_bytes() if path.is_file() else b"" for path in (ours / name, other / name)]
        if pair[0] != pair[1]:
            raise BadInput(f"the run's model {ours} and {what}, {other}, have different {name}; {fix}")
    have, want = model_shapes(ours), model_shapes(other)
    for name in sorted((have.keys() | want.keys()) - {"lm_head.weight"}):  # a tied model may be saved with it or not
        if have.get(name) != want.get(name):
            shapes = f"{name} of shape {have.get(name)}, {what}, {other}, has {want.get(name)}"
            raise BadInput(f"the run's model {ours} has {shapes}; {fix}")
