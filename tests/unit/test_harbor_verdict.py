"""A verdict is a receipt: signed over every field, with a key of the run, by the verifier alone."""

from __future__ import annotations

import ast
import hashlib
import hmac
import math
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import ValidationError

from rl360.harbor.verdict import JudgeReceipt, Verdict, receipt_problem, run_key, sign, signed_bytes
from rl360.harbor.verifier import VerifyOrder
from rl360.store.codec import pack, unpack
from tests.unit.product_sources import ROOT, files, nodes_of, text_of
from tests.unit.verdict_data import TOKEN, verdict

KEY = run_key(TOKEN, "demo")
GOOD = verdict("s000000-g000-a00-t0", 0.5)


def test_a_receipt_verifies_however_it_travelled() -> None:
    ways = [
        GOOD,
        Verdict.model_validate(orjson.loads(GOOD.model_dump_json())),
        Verdict.model_validate(unpack(pack(GOOD.model_dump()), "k")),
    ]
    rewards = (1, 0.1 + 0.2, 1 / 3, -0.0, 5e-324, 1.7976931348623157e308)
    ways += [Verdict.model_validate_json(verdict("a", reward).model_dump_json()) for reward in rewards]
    assert [receipt_problem(way, KEY, "demo") for way in ways] == [None] * len(ways)


@pytest.mark.parametrize(
    "changes",
    [
        {"task_id": "chores-renamf"},
        {"attempt_id": "s000000-g000-a00-t1"},
        {"task_id": "chores-renam", "attempt_id": "es000000-g000-a00-t0"},
        {"reward": 1.0},
        {"reward": math.nextafter(0.5, 1)},
        {"reward": -0.5},
        {"verifier_digest": "ab" * 31 + "ac"},
        {"finished_at": 1.5},
        {"signature": ("0" if GOOD.signature[0] != "0" else "1") + GOOD.signature[1:]},
        {"signature": "0" * 64},
    ],
)
def test_any_changed_field_is_refused(changes: dict[str, Any]) -> None:
    changed = Verdict.model_validate(GOOD.model_dump() | changes)
    problem = receipt_problem(changed, KEY, "demo")
    assert problem is not None and "is not signed by the verifier of run demo" in problem and "\n" not in problem


def test_every_field_is_signed() -> None:
    """`written_by_verifier` has one value; whatever else is added to a verdict must be signed too."""
    signed = {"run", "task_id", "attempt_id", "verifier_digest", "finished_at", "reward", "judge"}
    assert set(Verdict.model_fields) - {"signature", "written_by_verifier"} == signed


JUDGE = JudgeReceipt(
    model="judge-1", served_model="judge-1-0301", host="judge.example", prompt_digest="cd" * 32, reply_id="r-1",
    score=7.0, script_reward=1.0, prompt_tokens=812, completion_tokens=9,
)  # fmt: skip
JUDGED = sign(
    KEY, judge=JUDGE, **{n: v for n, v in GOOD if n not in ("signature", "written_by_verifier", "judge")}
)  # fmt: skip


def test_a_judges_receipt_is_signed_field_by_field() -> None:
    ways = [
        Verdict.model_validate_json(JUDGED.model_dump_json()),
        Verdict.model_validate(unpack(pack(JUDGED.model_dump()), "k")),
    ]
    assert [receipt_problem(way, KEY, "demo") for way in (JUDGED, *ways)] == [None] * 3
    others: dict[str, Any] = {"prompt_digest": "ce" * 32, "score": 7.5, "script_reward": None, "prompt_tokens": 813}
    for name, value in JUDGE:
        other = others.get(name, f"{value}x" if isinstance(value, str) else 0)
        changed = JUDGED.model_copy(update={"judge": JUDGE.model_copy(update={name: other})})
        assert "is not signed" in str(receipt_problem(changed, KEY, "demo")), name
    for taken in (JUDGED.model_copy(update={"judge": None}), GOOD.model_copy(update={"judge": JUDGE})):
        assert "is not signed" in str(receipt_problem(taken, KEY, "demo")), "put there or taken away"


def test_an_unjudged_verdict_says_nothing_of_judges() -> None:
    """Its bytes are those of before there were judges, so that steps of then are collected and replayed alike."""
    assert "judge" not in GOOD.model_dump() and b"judge" not in GOOD.model_dump_json().encode()
    assert Verdict.model_validate(GOOD.model_dump()) == GOOD


def test_the_signed_bytes_of_a_judged_verdict_are_these() -> None:
    plain = signed_bytes("r", "t", "a", "d", 1.0, 0.5)
    said = (
        b'{"completion_tokens":9,"host":"judge.example","model":"judge-1","prompt_digest":"' + b"cd" * 32 + b'",'
        b'"prompt_tokens":812,"reply_id":"r-1","score":7.0,"script_reward":1.0,"served_model":"judge-1-0301"}'
    )
    assert (
        signed_bytes("r", "t", "a", "d", 1.0, 0.5, JUDGE)
        == b"rl360 verdict 2" + plain[len(b"rl360 verdict 1") :] + said
    )


def test_receipts_of_another_run_or_deployment_do_not_count() -> None:
    other = verdict(GOOD.attempt_id, 0.5, run="other")
    assert "is of run 'other', not of 'demo'" in str(receipt_problem(other, KEY, "demo"))
    for taken in (
        other.model_copy(update={"run": "demo"}),
        verdict(GOOD.attempt_id, 0.5, token="u" * 16),
        sign(run_key(TOKEN, "other"), **{n: v for n, v in GOOD if n not in ("signature", "written_by_verifier")}),
    ):
        assert "is not signed by the verifier of run demo" in str(receipt_problem(taken, KEY, "demo"))


@pytest.mark.parametrize("lacks", [{"signature": None}, {"signature": ""}, {"signature": "0" * 63}, {}])
def test_unsigned_is_no_verdict(lacks: dict[str, Any]) -> None:
    wire = GOOD.model_dump(exclude={"signature"}) | lacks
    with pytest.raises(ValidationError, match="signature"):
        Verdict.model_validate(wire)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, True, False, "1", None, 10**400])
def test_what_is_no_number_cannot_be_signed(reward: Any) -> None:
    with pytest.raises(ValueError, match="a reward is a finite number"):
        verdict("a", reward)
    with pytest.raises(ValidationError, match="reward"):
        Verdict.model_validate(GOOD.model_dump() | {"reward": reward})
    forced = GOOD.model_copy(update={"reward": reward})
    assert "a reward is a finite number" in str(receipt_problem(forced, KEY, "demo"))


@pytest.mark.parametrize("when", [math.nan, math.inf])
def test_nor_at_no_time(when: float) -> None:
    fields = {name: value for name, value in GOOD if name not in ("signature", "written_by_verifier", "finished_at")}
    with pytest.raises(ValueError, match="a verdict's time is a finite number"):
        sign(KEY, finished_at=when, **fields)


def test_the_signed_bytes_are_these() -> None:
    """Written out, for whoever signs or checks in another language."""
    said = signed_bytes("r", "t\u00e9", "a", "d", 1.0, 0.5)
    texts = "00000001" + "72" + "00000003" + "74c3a9" + "00000001" + "61" + "00000001" + "64"
    assert said == b"rl360 verdict 1\n" + bytes.fromhex(texts + "3ff0000000000000" + "3fe0000000000000")
    key = hmac.new(TOKEN.encode(), b"rl360 verdict key 1\ndemo", hashlib.sha256).digest()
    assert key == KEY
    whole = signed_bytes("demo", GOOD.task_id, GOOD.attempt_id, GOOD.verifier_digest, 1.0, 0.5)
    assert hmac.new(key, whole, hashlib.sha256).hexdigest() == GOOD.signature


def test_no_field_runs_into_the_next() -> None:
    assert signed_bytes("ab", "c", "d", "e", 1.0, 1.0) != signed_bytes("a", "bc", "d", "e", 1.0, 1.0)


def _uses(path: Path) -> set[str]:
    """Which of `sign`, `Signature` and a call of `Verdict` a module has."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.module == "rl360.harbor.verdict":
            found |= {alias.name for alias in node.names} & {"sign", "Signature"}
        called = getattr(node, "func", None)
        if getattr(called, "attr", getattr(called, "id", "")) in ("Verdict", "model_construct"):
            found.add(ast.unparse(called))
    return found


def test_only_the_verifier_makes_verdicts() -> None:
    """The benchmarks stand in for a sandbox server, under a token of their own."""
    product = files("rl360", "tasks", "flows", "infra", "scripts")
    makes = {str(path.relative_to(ROOT)): uses for path in product if (uses := _uses(path))}
    assert makes.pop("rl360/bench/peers.py") == {"sign"}
    assert makes == {"rl360/harbor/verdict.py": {"Verdict"}, "rl360/harbor/verifier.py": {"sign"}}


def test_only_the_judge_makes_what_a_judge_said() -> None:
    calls = [path for path in files("rl360") if "JudgeReceipt(" in text_of(path).replace("class Judge", "")]
    assert [path.name for path in calls] == ["judge.py"]


def test_the_key_is_in_no_text() -> None:
    """What a log line, an error or a debugger's dump of an order would say."""
    assert not VerifyOrder.__dataclass_fields__["key"].repr
    shown = repr(GOOD) + str(receipt_problem(GOOD, KEY, "other")) + str(GOOD.model_dump())
    assert KEY.hex() not in shown and TOKEN not in shown
