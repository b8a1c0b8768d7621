"""`--why` and `--waste`: every listing and every sum agrees with the rows, whatever they are split by."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from rl360.commands.ledger_lists import waste_text, why_text
from rl360.errors import BadInput
from rl360.harbor.protocol import Phases
from rl360.ledger.metrics import AGREED
from rl360.ledger.outcomes import SAMPLED, Bucket, Outcome
from rl360.report.export import SANDBOX_PHASES
from rl360.report.waste import CLASSES, Prices, read_prices, waste
from rl360.report.why import allowed, reason, why
from tests.unit.ledger_data import ledger_of, made_up_run
from tests.unit.objective_data import attempt

LEDGERS = made_up_run(3, groups=12, size=8)
ROWS = [row for ledger in LEDGERS for row in ledger.attempts]
SAMPLED_TOKENS = sum(row.sampled_tokens for row in ROWS)
SECONDS = math.fsum(row.seconds for row in ROWS)


def summed(entries: Any, name: str) -> float:
    return math.fsum(entry[name] for entry in entries.values())


def test_waste_sums_to_what_was_sampled_and_to_what_attempts_took() -> None:
    books = waste(LEDGERS)
    assert (books["steps"], books["attempts"], books["sampled_tokens"]) == (3, len(ROWS), SAMPLED_TOKENS)
    for split in ("by_class", "by_bucket", "by_outcome"):
        assert summed(books[split], "attempts") == len(ROWS)
        assert summed(books[split], "tokens") == SAMPLED_TOKENS
        assert summed(books[split], "seconds") == pytest.approx(SECONDS, rel=1e-12)
    phases = math.fsum(spent for by_class in books["by_phase"].values() for spent in by_class.values())
    assert phases == pytest.approx(SECONDS, rel=1e-12)
    for name in CLASSES:
        crossed = sum(entry[f"{name}_tokens"] for entry in books["by_outcome"].values())
        assert crossed == books["by_class"][name]["tokens"]
        spent = math.fsum(by_class[name] for by_class in books["by_phase"].values())
        assert spent == pytest.approx(books["by_class"][name]["seconds"], rel=1e-12)
    assert books["by_class"]["kept"]["tokens"] == books["trained_tokens"] == books["by_bucket"]["trained"]["tokens"]
    assert all(books["by_class"][name]["attempts"] for name in CLASSES), "a class that is empty checks nothing"
    assert books["money"] is None


def test_tokens_follow_their_bucket_and_seconds_their_attempt() -> None:
    cut = {"truncated": True, "dropped": {"after_truncation": 4, "infra": 1}}
    attempts = [attempt(0, 0, 1.0, **cut), attempt(0, 1, 0.0), attempt(0, 2, None), attempt(1, 0, 0.5)]
    books = waste([ledger_of(attempts)])
    assert {name: entry["tokens"] for name, entry in books["by_class"].items()} == {
        "kept": 12,
        "dropped": 11,
        "infra": 6,
    }
    assert {name: entry["attempts"] for name, entry in books["by_class"].items()} == {
        "kept": 2,
        "dropped": 1,
        "infra": 1,
    }
    assert books["by_bucket"]["after_truncation"] == {"attempts": 0, "tokens": 4, "seconds": 0.0}
    assert books["by_bucket"]["infra"]["tokens"] == 7, (
        "a refused reply of a kept attempt is in the bucket, not the class"
    )


def test_money_is_what_the_formula_says() -> None:
    prices = Prices(gpu_hour=3.0, sandbox_hour=0.5, gpus=8)
    books = waste(LEDGERS, prices)
    wall = math.fsum(sum(ledger.phases_s.values()) for ledger in LEDGERS)
    held = math.fsum(spent for row in ROWS for phase, spent in row.phases_s.items() if phase != "queue")
    money = books["money"]
    assert money["gpu"] == pytest.approx(3.0 * 8 * wall / 3600)
    assert money["sandbox"] == pytest.approx(0.5 * held / 3600)
    assert money["total"] == pytest.approx(money["gpu"] + money["sandbox"])
    assert math.fsum(money["by_class"].values()) == pytest.approx(money["total"])
    assert money["by_class"]["update"] == pytest.approx(
        3.0 * 8 * sum(each.phases_s["train"] for each in LEDGERS) / 3600
    )
    assert money["per_trained_token"] == pytest.approx(money["total"] / books["trained_tokens"])
    only = waste(LEDGERS, Prices(sandbox_hour=0.5))["money"]
    share = sum(row.seconds for row in ROWS if row.score is None) / SECONDS
    assert only["by_class"]["infra"] / only["total"] == pytest.approx(share), "equal phases: cost goes as seconds do"


def test_a_token_that_never_trained_has_no_price() -> None:
    lost = ledger_of([attempt(0, 0, None, sample=False), attempt(0, 1, None, sample=False)])
    money = waste([lost], Prices(gpu_hour=1.0))["money"]
    assert money["per_trained_token"] is None and money["total"] > 0
    assert money["by_class"]["kept"] == 0.0 and money["by_class"]["infra"] > 0
    assert "per trained token: -" in waste_text({"run": "demo", **waste([lost], Prices(gpu_hour=1.0))})
    assert waste([])["money"] is None and waste([])["attempts"] == 0
    assert waste_text({"run": "demo", **waste([])}).startswith("demo: 0 attempts of 0 steps")


def test_prices_from_a_file_and_from_the_command_line(tmp_path: Path) -> None:
    toml, json = tmp_path / "prices.toml", tmp_path / "prices.json"
    toml.write_text("gpu_hour = 2.5\ngpus = 8\n")
    json.write_text('{"gpu_hour": 2.5, "gpus": 8}')
    assert read_prices(toml) == read_prices(json) == Prices(gpu_hour=2.5, gpus=8)
    assert read_prices(toml, gpu_hour=1.0, sandbox_hour=0.1) == Prices(1.0, 0.1, 8)
    assert read_prices(None) is None and read_prices(None, gpu_hour=None) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu_hour = -1", "gpu_hour is -1, a finite number of at least 0 is needed"),
        ("gpu_hour = nan", "gpu_hour is nan"),
        ("gpu_hour = true", "gpu_hour is True"),
        ('gpu_hour = "2"', "gpu_hour is '2'"),
        ("gpu_price = 2", "unknown field gpu_price; allowed are gpu_hour, sandbox_hour, gpus"),
        ("gpus = 2", "gpus alone has no price"),
        ("gpu_hour: 2", "is not TOML"),
    ],
)
def test_prices_that_are_none_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(BadInput, match=message):
        read_prices(path)


def test_no_file_of_prices(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"cannot read prices .*No such file"):
        read_prices(tmp_path / "none.toml")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(BadInput, match="holds list, expected a map"):
        read_prices(tmp_path / "list.json")


def test_every_name_can_be_asked_for_in_any_spelling() -> None:
    names = allowed()
    assert set(names["class"]) | set(names["bucket"]) == {str(bucket) for bucket in SAMPLED} | {"kept", "dropped"}
    assert names["outcome"] == tuple(map(str, Outcome)) and names["agreement"] == AGREED
    for kind, of_kind in names.items():
        for name in of_kind:
            for spelled in (name, name.upper(), f" {name.replace('_', '-')} ", name.replace("_", " ").title()):
                assert (reason(spelled).name, reason(spelled).kind) == (name, kind)
    with pytest.raises(
        BadInput, match=r"--why 'lost' is no reason; choose among class: kept, dropped, infra; bucket: "
    ):
        reason("lost")
    for wrong in ("", "prompt", "kept;drop"):
        with pytest.raises(BadInput, match="is no reason"):
            reason(wrong)


@pytest.mark.parametrize("groups", [False, True])
def test_what_is_listed_adds_up_to_the_books(groups: bool) -> None:
    books = waste(LEDGERS)
    by_class = {name: why(LEDGERS, reason(name), groups=groups) for name in CLASSES}
    for name, found in by_class.items():
        assert found["attempts"] == books["by_class"][name]["attempts"]
        assert found["seconds"] == pytest.approx(books["by_class"][name]["seconds"])
    assert sum(found["sampled_tokens"] for found in by_class.values()) == SAMPLED_TOKENS
    for kind, of_kind in (("bucket", SAMPLED), ("outcome", Outcome)):
        for name in of_kind:
            if name == "infra":
                continue
            found = why(LEDGERS, reason(str(name)), groups=groups)
            assert found["tokens"] == books[f"by_{kind}"].get(str(name), {"tokens": 0})["tokens"]
            assert found["tokens"] == sum(row["tokens"] for row in found["rows"])
            assert found["attempts"] == sum(cause["attempts"] for cause in found["by_cause"])
            assert found["seconds"] == pytest.approx(sum(row["seconds"] for row in found["rows"]))
    agreed = [why(LEDGERS, reason(name), groups=groups) for name in AGREED]
    assert sum(found["tokens"] for found in agreed) >= books["by_bucket"]["zero_disagreement"]["tokens"]


def test_a_listing_is_cut_and_says_so() -> None:
    whole, some = why(LEDGERS, reason("kept")), why(LEDGERS, reason("kept"), limit=2)
    assert some["rows"] == whole["rows"][:2] and len(whole["rows"]) == whole["rows_in_all"] == some["rows_in_all"] > 2
    assert {**some, "rows": None} == {**whole, "rows": None}, "totals are of all"
    text = why_text({"run": "demo", **some})
    assert f"and {whole['attempts'] - 2:,} more attempts; --limit 0 lists all" in text
    assert whole["rows"][0]["attempt_id"] in text
    nothing = why_text({"run": "demo", **why(LEDGERS, reason("surplus"))})
    assert nothing == "demo: surplus (bucket): 0 attempts in 0 groups, 0 tokens of 0 sampled, 0.0 s"


def test_groups_show_all_their_rewards() -> None:
    ledger = ledger_of([attempt(0, 0, 1.0), attempt(0, 1, 0.0), attempt(0, 2, None)])
    (row,) = why([ledger], reason("kept"), groups=True)["rows"]
    assert (row["attempts"], row["of"], row["rewards"]) == (2, 3, [1.0, 0.0, None])
    assert "1 0 -" in why_text({"run": "demo", **why([ledger], reason("kept"), groups=True)})


def test_every_phase_of_a_sandbox_has_a_column() -> None:
    assert set(Phases.model_fields) <= set(SANDBOX_PHASES)
    assert Bucket.TRAINED in SAMPLED
