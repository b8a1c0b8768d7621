"""May a run's starting policy be served by engines and sessions that were started with another directory's?

Weights are pushed, tokenizer and chat template are not: both must be the same files, or ids would mean other text.
"""

from __future__ import annotations

from pathlib import Path

from rl360.errors import BadInput

SHARED_FILES = ("tokenizer.json", "chat_template.jinja")


def refuse_other_tokenizer(run_model: str, served_model: str) -> None:
    """`BadInput` when a shared file differs. A directory that is not on this host is not judged."""
    ours, served = Path(run_model), Path(served_model)
    if ours == served or not ours.is_dir() or not served.is_dir():
        return
    for name in SHARED_FILES:
        pair = [path.read_bytes() if path.is_file() else b"" for path in (ours / name, served / name)]
        if pair[0] != pair[1]:
            raise BadInput(
                f"the run's model {ours} and the model the services were started with, {served}, have different "
                f"{name}; run `rl360 down` and `rl360 up --model {ours}`"
            )
