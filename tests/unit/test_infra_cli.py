"""The program `rl360`: quick help, exit codes, one-line errors."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rl360 import cli


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of one command line, in this process."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(list(args))
    out, err = capsys.readouterr()
    code = exit_.value.code
    return (code if isinstance(code, int) else 0), out, err


def test_help_imports_no_command_and_nothing_heavy() -> None:
    code = "import sys\nfrom rl360 import cli\ntry:\n    cli.main(['--help'])\nexcept SystemExit: pass\n"
    code += "print(sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    text, _, modules = result.stdout.rpartition("[")
    for name in ("up", "status", "logs", "down"):
        assert f"  {name} " in text
    for heavy in ("torch", "prefect", "typer", "pydantic", "httpx", "rl360.commands.services"):
        assert f"'{heavy}'" not in modules, heavy


@pytest.mark.parametrize("command", ["up", "status", "logs", "down"])
def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert f"Example: rl360 {command}" in out


def test_every_listed_command_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    for command in cli.COMMANDS:
        code, out, err = run(capsys, command, "--help")
        assert (code, "Usage" in out) == (0, True), f"{command}: {err}"


def test_an_unknown_command_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "upp")
    assert code == 2
    assert "no command 'upp'; choose among up, status" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--only", "s4"), "--only s4: no such service"),
        (("--ports", "web=80"), "--ports web=...: no such port"),
        (("--ports", "s3"), "write NAME=PORT"),
        (("--port-base", "70000"), "is outside 1024.."),
        (("--only", "engine-0", "--model", "/nowhere"), "--model /nowhere: no config.json there"),
        (("--judge-key-env", "PATH"), "says nothing without --judge-url"),
    ],
)
def test_bad_options_of_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str
) -> None:
    code, _, err = run(capsys, "up", "--home", str(tmp_path), *args)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("url", ["https://me:hidden@host/v1", "https://host/v1?key=hidden", "me:hidden@host/v1"])
def test_a_judges_secret_in_its_address_reaches_no_file_and_no_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    code, _, err = run(capsys, "up", "--home", str(tmp_path), "--judge-url", url)
    assert (code, err.count("\n")) == (2, 1)
    assert "--judge-url" in err and "hidden" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_taken_port_names_its_owner_and_the_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = run(capsys, "up", "--home", str(tmp_path), "--only", "gateway", "--ports", f"gateway={port}")
    assert code == 1
    assert err.count("\n") == 1
    assert f"port {port} of gateway is in use by pid {os.getpid()}" in err
    assert "--ports gateway=PORT" in err


@pytest.mark.parametrize("home", ["/proc/nowhere", "/dev/null/home"])
def test_a_home_that_cannot_be_is_one_line(home: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    code, _, err = run(capsys, "up", "--home", home, "--only", "gateway", "--model", str(tmp_path))
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith(f"error: cannot write {home}")


def test_without_services(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "status", "--home", str(tmp_path))
    assert code == 1
    assert "nothing is up" in out
    assert run(capsys, "status", "--home", str(tmp_path), "--json")[1].startswith('{"up": false')
    code, out, _ = run(capsys, "down", "--home", str(tmp_path))
    assert code == 0
    assert out == "checked: 0 processes, 0 sandboxes, 0 cgroups, 0 mounts left\n"
    code, _, err = run(capsys, "logs", "engine-0", "--home", str(tmp_path))
    assert code == 2
    assert "no log of engine-0" in err
