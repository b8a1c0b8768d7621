"""Real outputs of many short command sequences, run by one bash process.

Only for our own known commands (the families in `rl360.tasksets.chores`): there is no sandbox here. Every sequence
gets a fresh directory and every command its own subshell, so that a program's messages and exit codes are the ones
the policy will meet. A message of bash itself would name this module's script instead of what a rollout shows: such
an output is refused.
"""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl360.errors import Rl360Error

OUTPUT_CAP_BYTES = 2048
_SECONDS_PER_COMMAND = 1.0
_FLOOR_S = 30.0


def format_observation(output: bytes, exit_code: int) -> str:
    """The text of a tool reply: capped output, `(exit N)` on failure, `ok` when there is nothing else to say."""
    text = output[:OUTPUT_CAP_BYTES].decode("utf-8", errors="replace").rstrip("\n")
    if exit_code != 0:
        text = f"{text}\n(exit {exit_code})" if text else f"(exit {exit_code})"
    return text or "ok"


def _script(root: Path, work: Sequence[tuple[Mapping[str, str], Sequence[str]]]) -> str:
    lines = [f"export HOME={shlex.quote(str(root))} LC_ALL=C PATH=/usr/bin:/bin"]
    for index, (_, commands) in enumerate(work):
        lines.append(f"cd {shlex.quote(str(root / str(index) / 'app'))} || exit 9")  # `rm *` must never run elsewhere
        for turn, command in enumerate(commands):
            lines.append(f"( eval {shlex.quote(command)} ) >../out{turn} 2>&1; echo $? >../rc{turn}")
    return "\n".join(lines)


def run_batch(work: Sequence[tuple[Mapping[str, str], Sequence[str]]]) -> list[list[str]]:
    """Observations of each (files, commands): one text a command, in order."""
    commands_total = sum(len(commands) for _, commands in work)
    with tempfile.TemporaryDirectory(prefix="rl360-demos-") as folder:
        root = Path(folder)
        for index, (files, _) in enumerate(work):
            app = root / str(index) / "app"
            app.mkdir(parents=True)
            for name, text in files.items():
                (app / name).write_text(text, encoding="utf-8")
        deadline_s = _FLOOR_S + _SECONDS_PER_COMMAND * commands_total
        script = root / "batch.sh"
        script.write_text(_script(root, work), encoding="utf-8")
        try:
            done = subprocess.run(
                ["bash", str(script)], stdin=subprocess.DEVNULL, capture_output=True, timeout=deadline_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise Rl360Error(
                f"demonstrations: {commands_total} commands took over {deadline_s:.0f} s; is the machine overloaded?"
            ) from error
        if done.returncode == 9:
            raise Rl360Error(f"demonstrations: cannot enter a work directory under {root}")
        return [
            [_observation(root / str(index), turn, command) for turn, command in enumerate(commands)]
            for index, (_, commands) in enumerate(work)
        ]


def _observation(folder: Path, turn: int, command: str) -> str:
    output = (folder / f"out{turn}").read_bytes()
    if b"batch.sh: line" in output:
        raise Rl360Error(
            f"demonstrations: bash refused {command!r}: {output[:200]!r}; use only commands that it can parse"
        )
    return format_observation(output, int((folder / f"rc{turn}").read_text()))
