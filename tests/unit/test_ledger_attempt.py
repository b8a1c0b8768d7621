"""`rl360 ledger RUN --attempt ID`: everything about one attempt, from what its step has committed so far."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, cast

import pytest

from rl360.agents.records import put_table
from rl360.commands.ledger_page import page
from rl360.errors import BadInput
from rl360.harbor.protocol import Phases
from rl360.harbor.verdict import JudgeReceipt, run_key
from rl360.ledger.outcomes import INFRA, Bucket, Outcome
from rl360.ledger.read import read_step
from rl360.report.attempt import Told, attempt_life
from rl360.sessions.sample import AttemptRecord
from rl360.step_work import read_records
from rl360.store.layout import attempts_key
from tests.unit import ledger_run
from tests.unit.ledger_run import KEY, add_step, finished_run
from tests.unit.memory_store import MemoryStore
from tests.unit.verdict_data import DIGEST

SERVERS = ("http://127.0.0.1:1", "http://127.0.0.1:2")
STORE = finished_run(2)


def life(attempt_id: str, store: MemoryStore = STORE, told: Told = Told(KEY, SERVERS)) -> dict[str, Any]:  # noqa: B008
    return attempt_life(cast(Any, store), "demo", attempt_id, told)


def test_an_attempt_without_a_suffix_is_all_its_tries() -> None:
    found = life("s000001-g000-a00")
    assert [each["attempt_id"] for each in found["tries"]] == ["s000001-g000-a00-t0", "s000001-g000-a00-t1"]
    lost, passed = found["tries"]
    assert (lost["outcome"], lost["verdict"], lost["session"]["sample"]) == ("sandbox_lost", None, None)
    assert lost["sandbox"]["cleanup_confirmed"] is False
    assert passed["sandbox"]["phases_s"] == {"queue": 0.1, "setup": 0.2, "agent": 2.0, "verify": 0.3, "teardown": 0.1}
    assert passed["sandbox"]["cleanup_evidence"] == "cgroup removed"
    for name in ("S000001-G000-A00-T1", " s000001-g000-a00-t1 "):
        assert life(name)["tries"] == [passed]


def test_every_figure_is_the_records_or_the_ledgers() -> None:
    ledger = read_step(cast(Any, STORE), "demo", 1)
    records = {record.attempt_id: record for record in read_records(cast(Any, STORE), "demo", 1)}
    for row in ledger.attempts:
        found = life(row.attempt_id)
        (each,) = found["tries"]
        record = records[row.attempt_id]
        assert (found["group_id"], found["task_id"], found["step"]) == (row.group_id, row.task_id, 1)
        assert each["sampled_tokens"] == row.sampled_tokens == sum(each["tokens"].values())
        assert each["seconds"] == row.seconds and each["turns"] == row.turns
        assert each["context"] == {"prompt": 0, "observation": 0} | {str(k): v for k, v in row.context.items()}
        assert each["versions"] == list(row.versions)
        books = each["books"]
        assert (books["from"], books["bucket"], books["score"]) == ("ledger", row.bucket.value, row.score)
        assert books["loss_weight"] == row.loss_weight and books["token_weight"] == row.token_weight
        if record.stored is not None:
            assert each["session"]["sample"]["sha256"] == record.stored.sha256
        if row.reward is not None:
            assert (each["verdict"]["reward"], each["verdict"]["verifies"]) == (row.reward, True)
            assert each["verdict"]["verifier_digest"] == DIGEST
        if row.trains:
            assert books["baseline"] + books["advantage"] == row.score
    weights = [life(row.attempt_id)["tries"][0]["books"]["loss_weight"] for row in ledger.attempts]
    assert sum(weights) == pytest.approx(ledger.train.loss_weight_sum, rel=1e-12)


def test_its_group_its_step_and_its_push() -> None:
    found = life("s000000-g000-a02-t0")
    group = found["group"]
    assert (group["fate"], group["mean_score"], found["wave"], found["waves"]) == ("trained", 0.5, 0, 2)
    assert [row["reward"] for row in group["members"]] == [None, 1.0, 0.0, 1.0, 0.0]
    assert [row["advantage"] for row in group["members"]] == [None, 0.5, -0.5, 0.5, -0.5]
    assert {row["baseline"] for row in group["members"][1:]} == {0.5}
    step = found["trained"]
    assert (step["status"], step["version_before"], step["version_after"]) == ("trained", 0, 1)
    assert step["push"]["version"] == 1 and step["push"]["path"] == "broadcast"
    assert found["tries"][0]["tokens"] == {"trained": 6, "after_truncation": 3}


def test_leaves_have_a_reason_each() -> None:
    (each,) = life("s000000-g000-a01")["tries"]
    assert [(leaf["bucket"], leaf["trainable"]) for leaf in each["leaves"]] == [("trained", 6), ("trained", 4)]
    assert "sample 1" in page(life("s000000-g000-a01"))


@pytest.mark.parametrize(
    ("key", "verifies", "said"),
    [
        (KEY, True, "signature verifies"),
        (run_key("another-token-of-someone", "demo"), False, "SIGNATURE DOES NOT VERIFY"),
        (None, None, "signature not checked, no key"),
    ],
)
def test_a_verdicts_signature_is_checked_when_the_key_is_at_hand(key: Any, verifies: Any, said: str) -> None:
    found = life("s000000-g001-a00", told=Told(key))
    assert found["tries"][0]["verdict"]["verifies"] is verifies
    assert said in page(found)
    assert found["tries"][0]["session"]["server"] is None


@pytest.mark.parametrize(
    ("attempt_id", "message"),
    [
        ("s000000-g000-a09", r"no attempt s000000-g000-a09; nearest: s000000-g000-a0\d, s000000-g00"),
        ("s0-g1-a1", r"'s0-g1-a1' is no attempt id: they look like s000001-g000-a00 or s000001-g000-a00-t0"),
        ("s000007-g000-a00", "step 7 is not planned, steps 0 to 1 are; nearest in step 1: s000001-g000-a00"),
        ("s000000-g000-a00-t2", "has no try 2; recorded tries: s000000-g000-a00-t0, s000000-g000-a00-t1"),
    ],
)
def test_an_unknown_attempt_is_refused_with_the_nearest(attempt_id: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as error:
        life(attempt_id)
    assert "\n" not in str(error.value)


def test_a_step_at_work_shows_what_there_is() -> None:
    """As does one whose books were refused: this is where one looks at the attempt that the refusal names."""
    known = {}
    for until in ("sample_groups", "roll_out", "collect", "filter_groups", "train"):
        store = MemoryStore()
        add_step(store, 0, until=until)
        if until == "roll_out":
            with pytest.raises(BadInput, match="has no try 0; recorded tries: none yet"):
                life("s000000-g000-a02-t0", store)
        found = life("s000000-g000-a02", store)
        books = [each["books"] and each["books"]["from"] for each in found["tries"]]
        known[until] = (len(found["tries"]), books, found["trained"])
        assert "its books are not closed" in page(found)
    # the waves' tables are not what is read before collect, but the records as they come: none are stored here
    assert known["sample_groups"] == known["roll_out"] == (0, [], None)
    assert known["collect"] == (1, [None], None)
    assert known["filter_groups"] == known["train"] == (1, ["filter"], None)


def test_a_try_that_is_stored_is_shown_while_its_wave_runs() -> None:
    store = MemoryStore()
    add_step(store, 0, until="sample_groups")
    done = read_records(cast(Any, STORE), "demo", 0)[:1]
    put_table(cast(Any, store), attempts_key("demo", 0, 0, 0), done)
    (each,) = life("s000000-g000-a00", store)["tries"]
    assert (each["attempt_id"], each["outcome"], each["books"]) == ("s000000-g000-a00-t0", "sandbox_lost", None)
    assert "the filter has not decided yet" in page(life("s000000-g000-a00", store))


def test_the_page_holds_it_all() -> None:
    text = page(life("s000001-g000-a00"))
    for part in (
        "plan          step 1, wave 0 of 2, group s000001-g000",
        "tries         2: s000001-g000-a00-t0 sandbox_lost, s000001-g000-a00-t1 passed",
        "cleanup       NOT CONFIRMED",
        "what there is of it now: `rl360 sandboxes list --attempt s000001-g000-a00-t0`",
        "cleanup       every process proven gone: cgroup removed",
        "sample        demo/steps/000001/merged/0000/s000001-g000-a00-t1.msgpack",
        "versions      demo:1",
        "agent         reported nothing",
        f"verifier sha256 {DIGEST}",
        "verdict       none: it has no reward",
        "advantage     +0.500: score 1.000, baseline 0.500 (grpo)",
        "= 0.130434783",
        "  > s000001-g000-a00-t1     passed            trained               1.000  1.000    0.500    +0.500",
        "push          version 2 by broadcast to 2 engines",
    ):
        assert part in text, part
    assert re.search(r"session       server http://127.0.0.1:[12]", text)
    assert "session-s0000" not in text, "whoever holds a session's id may speak in it"
    assert Bucket.TRAINED in text


def test_one_try_of_several_says_which_it_is_and_how_the_others_ended() -> None:
    text = page(life("s000001-g000-a00-t0"))
    assert text.startswith("s000001-g000-a00 of run demo, try 0 alone\n")
    assert "tries         2: s000001-g000-a00-t0 sandbox_lost, s000001-g000-a00-t1 passed\n" in text
    assert "  > s000001-g000-a00-t0" in text and "\ntry 1" not in text
    assert page(life("s000001-g000-a00")).startswith("s000001-g000-a00 of run demo\n")


NOTHING = dict.fromkeys(("queue", "setup", "agent", "verify", "judge", "teardown"), 0.0)


@pytest.mark.parametrize(
    ("record", "said", "not_said"),
    [
        ({"session_id": "", "stored": None, "phases_s": {}, "outcome": Outcome.SANDBOX_START, "exit_status": ""},
         ("sandbox_start, no exit status (no sandbox was asked for), ", "sandbox       no sandbox was asked for\n",
          "cleanup       nothing to clean up: no sandbox was asked for\n"),
         ("NOT CONFIRMED", "sandboxes list", "exit status -")),
        ({"phases_s": NOTHING, "outcome": Outcome.SANDBOX_LOST, "exit_status": "SandboxLost",
          "cleanup_evidence": "the sandbox server one ended under it; its next start ends what is left"},
         ("sandbox       how long each phase took is not known\n",
          "cleanup       NOT CONFIRMED: the sandbox server one ended under it; its next start ends what is left\n",
          "now: `rl360 sandboxes list --attempt s000000-g003-a03-t0`\n", "(`rl360 logs sandbox-0`)\n"),
         ("0.00 s, setup",)),
        ({"phases_s": {}, "outcome": Outcome.SANDBOX_LOST, "exit_status": ""},
         ("no exit status (its sandbox server gave no reply)", "NOT CONFIRMED: its sandbox server gave no reply\n"),
         ("nothing to clean up",)),
    ],
)  # fmt: skip
def test_what_had_no_sandbox_is_no_leak_and_what_may_be_one_says_where_to_look(
    record: dict[str, Any], said: tuple[str, ...], not_said: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = ledger_run.tries
    lost = {"session_id": "of it", "cleanup_confirmed": False, "cleanup_evidence": "", **record}

    def changed(*given: Any) -> list[AttemptRecord]:
        return [replace(each, **lost) if each.outcome is Outcome.NO_ENGINE else each for each in tries(*given)]

    monkeypatch.setattr(ledger_run, "tries", changed)
    text = page(life("s000000-g003-a03", finished_run(1)))
    for part in said:
        assert part in text, part
    for part in not_said:
        assert part not in text, part


def test_where_each_token_has_its_own_advantage_it_is_said() -> None:
    found = life("s000000-g000-a01")
    found["tries"][0]["books"].update(advantage=None, baseline=None, estimator="gae")
    assert "advantage     each token its own: score 0.000, baseline - (gae)" in page(found)


def test_a_judges_receipt_is_shown() -> None:
    found = life("s000000-g001-a00")
    judge = {"model": "grader-1", "host": "judge:80", "score": 7.0, "script_reward": 1.0, "prompt_digest": "cd" * 32}
    found["tries"][0]["verdict"]["judge"] = JudgeReceipt(served_model="x", reply_id="y", **judge).model_dump()
    assert "judge         grader-1 at judge:80: score 7, after a script's 1\n" in page(found)
    assert f"answered as x, reply y\n                prompt sha256 {'cd' * 32}" in page(found)


@pytest.mark.parametrize("outcome", sorted(INFRA))
def test_what_infrastructure_lost_is_shown_with_where_and_why(
    outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every outcome without a verdict; a judge's failure with the seconds it took and the calls that were made."""
    tries = ledger_run.tries
    phases_s = Phases(queue=0.1, setup=0.2, agent=2.0, verify=0.3, judge=9.0, teardown=0.1).model_dump()
    ended: dict[str, Any] = {"outcome": outcome, "exit_status": "Submitted", "detail": f"why it was {outcome}"}
    ended |= {"phases_s": phases_s, "agent_metrics": {"judge_calls": 4.0}}

    def lost(*given: Any) -> list[AttemptRecord]:
        return [replace(each, **ended) if each.outcome is Outcome.NO_ENGINE else each for each in tries(*given)]

    monkeypatch.setattr(ledger_run, "tries", lost)
    found = life("s000000-g003-a03", finished_run(1))
    (each,) = found["tries"]
    assert (each["outcome"], each["detail"], each["verdict"]) == (outcome.value, f"why it was {outcome}", None)
    assert each["sandbox"]["phases_s"] == phases_s
    assert (each["books"]["bucket"], each["books"]["reward"], each["books"]["score"]) == ("infra", None, None)
    (member,) = [row for row in found["group"]["members"] if row["attempt_id"] == each["attempt_id"]]
    assert (member["outcome"], member["reward"], member["advantage"]) == (outcome.value, None, None)
    text = page(found)
    for part in (
        f"outcome       {outcome.value}, exit status Submitted, 11.70 s",
        f"detail        why it was {outcome}",
        "verify 0.30 s, judge 9.00 s, teardown 0.10 s",
        "agent         judge calls 4",
        "verdict       none: it has no reward",
        f"  > s000000-g003-a03-t0     {outcome.value:<18}infra",
    ):
        assert part in text, part


def test_a_run_that_has_planned_nothing() -> None:
    store = MemoryStore()
    store.objects["demo/config.json"] = STORE.objects["demo/config.json"]
    with pytest.raises(BadInput, match="run demo has planned no attempt yet"):
        life("s000000-g000-a00", store)
