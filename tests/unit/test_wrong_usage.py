"""A wrong command line is one line on stderr, exit 2: the option, its value, what it must be, where the help is."""

from __future__ import annotations

import pytest

from rl360.cli import COMMANDS, main
from tests.unit.test_docs import _commands

GROUPS = sorted(name for name, subs in _commands().items() if subs)
LEAVES = [[name, *([sub] if sub else [])] for name, subs in _commands().items() for sub in (sorted(subs) or [""])]


def left(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (2, "")
    return told.err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("tasks check", ["Missing argument 'source'", "see `rl360 tasks check --help`"]),
        ("tasks check x --concurrency 0", ["--concurrency '0': must be greater than or equal to 1"]),
        ("tasks check x --concurrency x", ["--concurrency 'x': must be a valid integer"]),
        ("tasks check x y", ["unexpected extra argument", "(y)"]),
        ("sandboxes simulate --heavy-share nan", ["--heavy-share 'nan': must be"]),
        ("sandboxes simulate --start 3", ["No such option: --start", "--starts"]),
        ("sandboxes simulate --starts", ["'--starts' requires an argument"]),
        ("sandboxes list --json=3", ["'--json' does not take a value"]),
        ("nope", ["no command 'nope'; choose among", *COMMANDS]),
    ],
)
def test_what_is_wrong_is_named(argv: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = left(argv.split(), capsys)
    assert said.startswith("error: ") and said.count("\n") == 1
    for word in words:
        assert word in said


@pytest.mark.parametrize("argv", LEAVES, ids=" ".join)
def test_every_command_refuses_an_unknown_option(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = left([*argv, "--bogus"], capsys)
    assert said.startswith("error: No such option: --bogus") and said.count("\n") == 1
    assert said.endswith(f"; see `rl360 {' '.join(argv)} --help`\n")


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_without_a_command_shows_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert left([name], capsys).startswith(f"Usage: rl360 {name} ")
    assert left([name, "nope"], capsys) == f"error: No such command 'nope'; see `rl360 {name} --help`\n"
