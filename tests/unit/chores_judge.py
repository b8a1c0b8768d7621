"""Runs command sequences of chores and their real verifier in throw-away directories, many in one shell process.

Also holds the chat messages of an attempt as an OpenAI client would write them.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl360.policy.template import SYSTEM_PROMPT

_SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
BASH_TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": _SCHEMA}}]


def chat_messages(instruction: str, turns: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """A whole attempt of (command, observation) turns, closed by `done`."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM_PROMPT.split("\n")[0]},
        {"role": "user", "content": instruction},
    ]
    for command, observation in turns:
        call = {"type": "function", "function": {"name": "bash", "arguments": {"command": command}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": observation})
    return [*messages, {"role": "assistant", "content": "done"}]


def judge_all(root: Path, cases: Sequence[tuple[Mapping[str, str], Sequence[str], str]]) -> list[str]:
    """Content of reward.txt for each (files, commands, test.sh text); `/app`, `/logs/verifier` are moved."""
    script = ["export LC_ALL=C HOME=" + shlex.quote(str(root))]
    for index, (files, commands, verifier) in enumerate(cases):
        case = root / str(index)
        app, logs = case / "app", case / "verifier"
        app.mkdir(parents=True)
        logs.mkdir()
        for name, text in files.items():
            (app / name).write_text(text)
        moved = verifier.replace("/app", str(app)).replace("/logs/verifier", str(logs))
        (case / "test.sh").write_text(moved)
        script.append(f"cd {shlex.quote(str(app))} || exit 9")
        script += [f"( eval {shlex.quote(command.replace('/app', str(app)))} ) >/dev/null 2>&1" for command in commands]
        script.append(f"cd / && sh {shlex.quote(str(case / 'test.sh'))}")
    path = root / "all.sh"
    path.write_text("\n".join(script))
    subprocess.run(["bash", str(path)], timeout=120, check=True, stdin=subprocess.DEVNULL)
    return [(root / str(index) / "verifier" / "reward.txt").read_text().strip() for index in range(len(cases))]
