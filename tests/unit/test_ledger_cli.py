"""`rl360 ledger` as a user types it: every question, its JSON, its exit code, and one line for what is wrong."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from rl360.cli import main
from rl360.commands.ledger import EXAMPLES
from rl360.config import services as services_module
from rl360.store.codec import pack, unpack
from rl360.store.layout import manifest_key, step_key
from rl360.store.object_store import ObjectStore
from tests.unit.ledger_run import finished_run
from tests.unit.memory_store import MemoryStore
from tests.unit.verdict_data import TOKEN

STORE = finished_run(2)


class Rl360:
    """Runs a command line over a store in memory; answers (exit code, stdout, stderr)."""

    def __init__(self, store: MemoryStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        services = SimpleNamespace(secrets=lambda: SimpleNamespace(token=TOKEN), session_urls=["http://127.0.0.1:1"])
        monkeypatch.setattr(services_module, "load_services", lambda: services)
        monkeypatch.setattr(ObjectStore, "from_services", lambda _services: store)
        self._capsys = capsys

    def __call__(self, *args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(["ledger", "demo", *args])
        said = self._capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    def json(self, *args: str) -> Any:
        code, out, err = self(*args, "--json")
        assert (code, err) == (0, "")
        return orjson.loads(out)


@pytest.fixture
def rl360(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Rl360:
    return Rl360(STORE, capsys, monkeypatch)


def test_the_whole_run_and_one_step(rl360: Rl360) -> None:
    told = rl360.json()
    assert [step["step"] for step in told["steps"]] == [0, 1] and told["run"] == "demo"
    assert rl360.json("--step", "1")["steps"] == told["steps"][1:]
    code, out, _ = rl360()
    assert code == 0 and "29 of 29 sums hold over 2 steps" in out
    code, out, _ = rl360("--step", "1")
    assert code == 0 and out.count("holds ") == 14


def test_a_step_alone_is_read_alone(rl360: Rl360) -> None:
    STORE.read.clear()
    rl360("--step", "1")
    assert [key for key in STORE.read if key.endswith("ledger.msgpack")] == [step_key("demo", 1, "ledger.msgpack")]


def test_an_attempt(rl360: Rl360) -> None:
    told = rl360.json("--attempt", "s000001-g000-a00")
    assert [each["outcome"] for each in told["tries"]] == ["sandbox_lost", "passed"]
    assert told["tries"][1]["verdict"]["verifies"] is True
    assert rl360("--attempt", "s000001-g000-a00-t1", "--step", "1")[0] == 0
    code, out, _ = rl360("--attempt", "s000001-g000-a00")
    assert code == 0 and out.startswith("s000001-g000-a00 of run demo\n") and "signature verifies" in out


def test_why_and_waste_agree(rl360: Rl360) -> None:
    waste = rl360.json("--waste")
    for name, entry in waste["by_class"].items():
        found = rl360.json("--why", name.upper())
        assert (found["attempts"], len(found["rows"])) == (entry["attempts"], entry["attempts"])
    steps = rl360.json()["steps"]
    assert waste["sampled_tokens"] == sum(step["sampled_tokens"] for step in steps)
    assert rl360.json("--waste", "--step", "0")["steps"] == 1
    assert len(rl360.json("--why", "kept", "--limit", "3")["rows"]) == 3
    assert {row["fate"] for row in rl360.json("--why", "all-fail", "--groups")["rows"]} == {"all_fail"}
    code, out, _ = rl360("--why", "no engine")
    assert code == 0 and "s000000-g003-a03-t0" in out


def test_money_only_when_it_has_a_price(rl360: Rl360, tmp_path: Path) -> None:
    assert rl360.json("--waste")["money"] is None
    assert "cost" not in rl360("--waste")[1]
    prices = tmp_path / "prices.toml"
    prices.write_text("sandbox_hour = 0.5\n")
    told = rl360.json("--waste", "--prices", str(prices), "--price-gpu-hour", "2", "--gpus", "4")
    assert told["money"]["prices"] == {"gpu_hour": 2.0, "sandbox_hour": 0.5, "gpus": 4.0}
    code, out, _ = rl360("--waste", "--prices", str(prices))
    assert code == 0 and "cost = gpu_hour x gpus x wall_s / 3600 + sandbox_hour x sandbox_s / 3600" in out


def test_an_export(rl360: Rl360, tmp_path: Path) -> None:
    told = rl360.json("--export", str(tmp_path / "out"))
    assert told["rows"] == {"attempts": 34, "tokens": 94, "steps": 2, "phases": 14}
    assert (tmp_path / "out" / "views.sql").exists()
    code, out, _ = rl360("--export", str(tmp_path / "out"), "--step", "0")
    assert code == 0 and "attempts 17, tokens 47, steps 1, phases 7 rows" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--step", "9"), "run demo has no ledger for step 9; steps 0 to 1 have one"),
        (("--attempt", "s000000-g000-a09"), "no attempt s000000-g000-a09; nearest: s000000-g000-a0"),
        (("--attempt", "s000000-g000-a00", "--step", "1"), "is of step 0, not of step 1; leave --step out"),
        (("--why", "lost"), "--why 'lost' is no reason; choose among class: kept, dropped, infra; bucket: "),
        (("--why", "kept", "--waste"), "--why and --waste are different questions; ask one at a time"),
        (("--why", ""), "--why '' is no reason"),
        (("--groups",), "--groups and --limit belong to --why"),
        (("--limit", "3"), "--groups and --limit belong to --why"),
        (("--price-gpu-hour", "2"), "prices belong to --waste"),
        (("--prices", "x.toml"), "prices belong to --waste"),
        (("--waste", "--price-gpu-hour", "-2"), "gpu_hour is -2.0, a finite number of at least 0 is needed"),
        (("--waste", "--prices", "/nowhere/x.toml"), "cannot read prices /nowhere/x.toml"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_2(rl360: Rl360, args: tuple[str, ...], message: str) -> None:
    code, out, err = rl360(*args)
    assert (code, out) == (2, "") and err.startswith("error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize("args", [(), ("--step", "1"), ("--why", "kept"), ("--waste",), ("--export", "out")])
def test_a_sum_that_does_not_hold_is_named_and_exit_1(
    args: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    store = finished_run(2)
    key = step_key("demo", 1, "ledger.msgpack")
    wire = unpack(store.objects[key], key)
    wire["train"]["trained_tokens"] = 45
    store.objects[key] = pack(wire)
    del store.objects[manifest_key("demo", 1, "report")]  # else the digest tells
    code, out, err = Rl360(store, capsys, monkeypatch)(*args)
    assert (code, err) == (1, "rl360: demo step 1: trained tokens: booked 46 != trainer 45\n") and out


def test_a_ledger_of_an_older_schema_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = finished_run(1)
    key = step_key("demo", 0, "ledger.msgpack")
    store.objects[key] = pack({**unpack(store.objects[key], key), "schema_version": 2})
    del store.objects[manifest_key("demo", 0, "report")]
    code, _, err = Rl360(store, capsys, monkeypatch)()
    assert code == 1
    assert err == (
        f"error: object {key}: ledger schema 2, this rl360 reads 3 and 4; read it with the rl360 that wrote it, other "
        "steps with --step\n"
    )


def test_help_shows_an_example_of_every_question(rl360: Rl360) -> None:
    code, out, _ = rl360("--help")
    assert code == 0
    for option in ("--step", "--attempt", "--why", "--waste", "--export"):
        assert option in out and any(option in example for example in EXAMPLES)
    assert all(example.split()[0:3] == ["rl360", "ledger", "demo"] for example in EXAMPLES[1:])
    for example in EXAMPLES[1:]:
        names = re.findall(r"--[a-z-]+", example)
        assert all(name in out for name in names), example
