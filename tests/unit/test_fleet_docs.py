"""docs/fleet.md shows commands that are there, with options that they have, and names every state and launcher."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from test_help import shown

from infra.local.plan import UpOptions, build_specs
from rl360.commands.fleet import describe
from rl360.config.services import Secrets
from rl360.engines.fleet import EngineIdentity, EngineState, Probe
from rl360.engines.fleet_log import FleetLog
from rl360.engines.launchers import KINDS
from rl360.engines.membership import add_external
from rl360.report.alerts import CACHE_FELL
from tests.unit.memory_store import MemoryStore

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "fleet.md").read_text()
COMMANDS = sorted({line.partition("#")[0].strip() for line in re.findall(r"^rl360 fleet .*$", PAGE, re.MULTILINE)})
INLINE = sorted(set(re.findall(r"`(rl360 fleet [^`]+)`", PAGE)))


@pytest.mark.parametrize("line", COMMANDS + INLINE)
def test_a_shown_command_is_one(line: str) -> None:
    _, _, sub, *rest = shlex.split(line)
    text = shown("fleet", sub)
    known = set(re.findall(r"(?<![\w-])(--?[a-z][a-z-]*)", text.partition("Example")[0] + text.partition("Options")[2]))
    for word in rest:
        if word.startswith("-"):
            assert word.partition("=")[0] in known, f"{line}: no option {word}"


def test_the_page_shows_commands_at_all() -> None:
    assert len(COMMANDS) >= 10
    shown_subs = {line.split()[2] for line in COMMANDS}
    assert shown_subs == {"status", "events", "add", "remove", "drain", "confirm-gone", "keep"}


def test_every_state_and_every_launcher_is_explained() -> None:
    for word in [*EngineState, *KINDS]:
        assert f"| `{word}` |" in PAGE, word


def test_the_service_is_what_the_page_calls_it() -> None:
    secrets = Secrets(token="t" * 32, s3_access_key="a", s3_secret_key="s")
    specs = build_specs(UpOptions(home="/h", model_dir="/m"), secrets, "i")
    (spec,) = [spec for spec in specs if spec.name == "fleet"]
    assert spec.argv[2:] == ("rl360.cli", "fleet", "keep", "--start-s", "300") and not spec.sweep


def test_one_option_lets_a_large_model_load() -> None:
    secrets = Secrets(token="t" * 32, s3_access_key="a", s3_secret_key="s")
    specs = {spec.name: spec for spec in build_specs(UpOptions(home="/h", model_dir="/m", start_s=1800), secrets, "i")}
    assert specs["engine-0"].start_deadline_s == specs["engine-1"].start_deadline_s == 1800
    assert specs["fleet"].argv[-2:] == ("--start-s", "1800")


def test_every_key_of_the_status_is_explained() -> None:
    store = MemoryStore()
    log = FleetLog(store)
    add_external(log, EngineIdentity(url="http://h:9", incarnation="cc"), "ann", "borrowed")
    silent = Probe("http://h:9", None, None, True, "no answer")
    picture = describe({"engine-0": silent, "external-0": silent}, {}, log.refresh(), [], None, store)
    first, second = picture["engines"]
    assert first.keys() == second.keys(), "whether the log knows an engine or not, its row is the same"
    table = PAGE.partition("| key | |")[2].partition("\n\n")[0]
    explained = {word.rpartition(".")[2].removesuffix("[]") for word in re.findall(r"`([a-z_.\[\]]+)`", table)}
    assert explained >= {*first, *picture} - {"engines"}


def test_the_example_is_an_automation() -> None:
    from prefect.automations import Automation

    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    automation = Automation.model_validate(yaml.safe_load(text))
    assert automation.trigger.expect == {CACHE_FELL}
    assert CACHE_FELL in PAGE.partition("## Alerts")[2].partition("```")[0]
