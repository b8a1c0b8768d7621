"""A chore as the files of a Harbor task directory, and the 32 committed tasks.

`python -m rl360.tasksets.harbor_files [DIR]` writes the builtin tasks again; the result is identical every time (a
test compares). The verifier is plain `sh` with one `cmp` a file: it runs once an attempt, hundreds of times a step.
`cmp` stops at the first difference and `-f` refuses pipes and devices, so nothing an agent leaves behind can make it
slow.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

from rl360.tasksets.chores import FAMILIES, Chore, draw_chore
from rl360.tasksets.sources import BUILTIN_DIR

TASKS_PER_FAMILY = 2

_VERIFIER = """#!/bin/sh
# Writes 1 when /app is exactly as the instruction asks, else 0.
same() {{ [ -f "$1" ] && [ ! -L "$1" ] && cmp -s "$1" -; }}
gone() {{ [ ! -e "$1" ] && [ ! -L "$1" ]; }}
check() {{
{checks}
}}
if cd /app && check; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
"""

_TASK_TOML = """schema_version = "1.4"
[task]
name = "rl360/{name}"
[metadata]
family = "{family}"
[agent]
timeout_sec = 60.0
[verifier]
timeout_sec = 20.0
[environment]
build_timeout_sec = 60.0
network_mode = "no-network"
cpus = 1
memory_mb = 256
workdir = "/app"
"""


def verifier_text(chore: Chore) -> str:
    """test.sh for `chore`: every expected file compared byte for byte, every removed one looked for."""
    checks = []
    for path, text in chore.expected.items():
        if text is None:
            checks.append(f"gone {path} || return 1")
        else:
            checks.append(f"same {path} <<'END' || return 1\n{text}END")
    return _VERIFIER.format(checks="\n".join(checks))


def solution_text(chore: Chore) -> str:
    return "\n".join(["#!/bin/bash", "set -e", "cd /app", *chore.right[0], ""])


def task_files(name: str, chore: Chore) -> dict[str, str]:
    """Relative path -> text of the Harbor task directory of `chore`."""
    dockerfile = f"FROM debian:bookworm-slim\nWORKDIR /app\nCOPY {' '.join(sorted(chore.files))} /app/\n"
    files = {
        "task.toml": _TASK_TOML.format(name=name, family=chore.family),
        "instruction.md": chore.instruction + "\n",
        "environment/Dockerfile": dockerfile,
        "tests/test.sh": verifier_text(chore),
        "solution/solve.sh": solution_text(chore),
    }
    return files | {f"environment/{path}": text for path, text in chore.files.items()}


def builtin_chores() -> Iterator[tuple[str, Chore]]:
    """(task name, chore) of the 32 builtin tasks, in a fixed order."""
    for family in FAMILIES:
        for number in range(1, TASKS_PER_FAMILY + 1):
            name = f"{family}-{number}"
            yield name, draw_chore(random.Random(f"builtin:{name}"), family)


def write_task(root: Path, name: str, chore: Chore) -> Path:
    """Write one task directory under `root`; scripts are executable."""
    for relative, text in task_files(name, chore).items():
        path = root / name / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if relative in ("tests/test.sh", "solution/solve.sh"):
            path.chmod(0o755)
    return root / name


def write_builtin_tasks(root: Path = BUILTIN_DIR) -> list[Path]:
    return [write_task(root, name, chore) for name, chore in builtin_chores()]


if __name__ == "__main__":
    written = write_builtin_tasks(Path(sys.argv[1]) if len(sys.argv) > 1 else BUILTIN_DIR)
    print(f"wrote {len(written)} tasks")
