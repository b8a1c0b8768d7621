"""Where tasks come from: `folder_of(spec)` is a folder of Harbor task directories, whatever `spec` names.

`builtin:chores`; `human-eval`; a file of rows (.jsonl, .parquet); or such a folder itself. What is no folder yet is
written as one, once for what it is made from, under `$RL360_HOME/tasks/`. Here alone a source is chosen.
"""

from __future__ import annotations

from pathlib import Path

from rl360.errors import BadInput
from rl360.tasksets.made import human_eval, rows, written

BUILTIN_DIR = Path(__file__).parent / "chores_tasks"
KINDS = "builtin:chores, human-eval, a .jsonl or .parquet file, or a directory of Harbor tasks"


def folder_of(spec: str) -> Path:
    """The folder of task directories that `spec` names. Raises `BadInput`."""
    path = Path(spec).expanduser()
    if spec == "builtin:chores":
        return BUILTIN_DIR
    if spec == "human-eval":
        return written(human_eval.source())
    if path.suffix in rows.READERS and path.is_file():
        return written(rows.source(path))
    if not path.is_dir():
        known = "unknown" if spec.startswith("builtin:") else "not a directory, and no file of rows"
        raise BadInput(f"task set {spec!r} is {known}; give {KINDS}")
    return path.resolve()
