"""Help that a newcomer can rely on: a command shows one place with examples, of options it has; flags take no value."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from rl360.cli import COMMANDS, help_text, run_command
from tests.unit.test_docs import _commands

ROOT = Path(__file__).resolve().parents[2]
LEAVES = [(name, sub) for name, subs in _commands().items() for sub in (sorted(subs) or [""])]


def shown(*args: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        run_command(args[0], [*args[1:], "--help"])
    assert ended.value.code == 0
    return out.getvalue()


@pytest.mark.parametrize(("name", "sub"), LEAVES, ids=lambda part: part or "-")
def test_a_command_has_one_example_of_itself(name: str, sub: str) -> None:
    text = shown(name, *([sub] if sub else []))
    assert len(re.findall(r"^ *Examples?:", text, re.MULTILINE)) == len(re.findall(r"\bExample", text)) == 1, text
    assert "<bool>" not in text, "a flag takes no value"
    told = re.split(r"\n\n(?:Options|Arguments):", re.split(r"Examples?:", text)[1])[0]
    assert f"rl360 {name} {sub}".strip() in " ".join(told.split()), text
    options = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", text.replace(told, "")))
    assert set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", told)) <= options


def test_the_path_in_the_example_of_tasks_check_is_there() -> None:
    found = re.search(r"Example: rl360 tasks check (\S+)", shown("tasks", "check"))
    assert found and (ROOT / found[1]).is_dir()


@pytest.mark.parametrize("name", [name for name, subs in _commands().items() if subs])
def test_a_group_names_all_it_can_do(name: str) -> None:
    text = shown(name)
    assert "Example" not in text, text
    for sub in _commands()[name]:
        assert re.search(rf"^  {sub} +[A-Z]", text, re.MULTILINE), f"{name} does not list {sub}"
    if name == "run":
        assert "..." not in text.replace("[ARGS]...", ""), text
        for sub in _commands()[name]:
            assert sub in COMMANDS["run"].help.lower() and sub in text.partition("Options")[0].lower()


def test_the_first_page_names_every_command() -> None:
    for name in COMMANDS:
        assert f"\n  {name}" in help_text()
    for name in ("sandboxes", "tasks"):
        for sub in _commands()[name]:
            assert re.search(rf"\b{sub}", COMMANDS[name].help), f"{name}: {sub}"
