"""README and docs are true where a machine can tell: links lead somewhere, commands and config fields exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from infra.local import plan
from rl360.cli import COMMANDS
from rl360.commands.services import _port_choices
from rl360.config import reference
from rl360.config.run import RunConfig
from rl360.config.services import Secrets

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def _commands() -> dict[str, set[str]]:
    """Sub-commands by command; a command without any maps to the empty set."""
    found = {}
    for name, entry in COMMANDS.items():
        app = typer.Typer()
        app.callback()(lambda: None)
        importlib.import_module(f"rl360.commands.{entry.module}").register(app)
        group: Any = typer.main.get_group(app)
        found[name] = set(getattr(group.commands[name], "commands", {}))
    return found


def test_commands_in_the_pages_exist() -> None:
    known = _commands()
    for page in PAGES:
        for first, second in re.findall(r"(?:^|[`/ ])rl360 ([a-z-]+)(?: ([a-z-]+))?", page.read_text(), re.MULTILINE):
            if f"rl360 {first}" in ("rl360 run", "rl360 tasks", "rl360 fleet", "rl360 model") and second:
                assert second in known[first], f"{page.name}: rl360 {first} {second}"
            elif first in known:
                continue
            else:
                assert not re.search(rf"`(?:\.venv/bin/)?rl360 {first}\b", page.read_text()), (
                    f"{page.name}: rl360 {first}"
                )


def test_the_ports_in_the_pages_are_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_program", lambda name: name)
    text = (ROOT / "docs" / "operations.md").read_text().partition("## Ports\n")[2].partition("\n## ")[0]
    for name, port in plan.port_table(None, {}).items():
        assert re.search(rf"\b{port}\b", text), (name, port)
    for base, prefect in ((None, ""), (26000, "26500 (Prefect)")):
        options = plan.UpOptions(home="/h", ports=plan.port_table(base, {}))
        s3 = plan._s3(options, Secrets(token="t" * 16, s3_access_key="a", s3_secret_key="b"))
        assert prefect in text and re.search(rf"\b{s3.ports[-1]}\b", text), s3.ports
        if base is None:
            assert f"{s3.ports[0]} to {s3.ports[-2]} and {s3.ports[-1]}" in text
            assert f"to {s3.ports[-2]}, and {s3.ports[-1]}" in (ROOT / "README.md").read_text()
    for option in re.findall(r"--ports (\S+)", text):
        plan.port_table(None, _port_choices([option]))


def test_fields_in_the_pages_exist() -> None:
    for page in PAGES:
        for field in re.findall(r"(?:-s|--set) ([a-z_.]+)=", page.read_text()):
            value = RunConfig().model_dump()
            for part in field.split("."):
                assert part in value, f"{page.name}: {field}"
                value = value[part]


def test_the_config_page_is_the_config() -> None:
    told = (ROOT / "docs" / "config.md").read_text()
    assert told == reference.page(), "run: python -m rl360.config.reference > docs/config.md"
