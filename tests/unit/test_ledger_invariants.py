"""Each invariant of a step, broken on purpose: closing the books fails by its name, and no ledger is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import orjson
import pytest

from rl360 import step_work
from rl360.ledger.checks import TRAIN_FIGURES, LedgerBroken, refuse_broken
from rl360.ledger.metrics import step_json
from rl360.ledger.read import audit_run, read_run, read_step
from rl360.ledger.step import write_ledger
from rl360.store.codec import pack, sha256_hex, unpack
from rl360.store.layout import manifest_key, step_key
from rl360.store.manifest import read_manifest
from tasks.durable import SAFE_TO_REPEAT
from tests.unit.ledger_run import CONFIG, add_step, finished_run
from tests.unit.memory_store import MemoryStore

SAME = "same weights where no step was taken"
LEDGER = step_key("demo", 0, "ledger.msgpack")
Wire = dict[str, Any]


def first(wire: Wire, **wanted: Any) -> Wire:
    """The first decision with these values."""
    return next(each for each in wire["decisions"] if wanted.items() <= each.items())


def move_tokens(wire: Wire) -> None:
    decision = first(wire, bucket="zero_disagreement")
    decision["tokens"]["zero_disagreement"] -= 1


def swap_tokens(wire: Wire) -> None:
    """Faults of two attempts that cancel in the sum."""
    move_tokens(wire)
    wire["decisions"][-1]["tokens"]["infra"] += 1


def lower_weight(wire: Wire) -> None:
    first(wire, bucket="trained")["token_weight"] *= 1 + 2e-5


def drop_reward(wire: Wire) -> None:
    first(wire, bucket="trained", reward=1.0).update(reward=None)


def drop_score(wire: Wire) -> None:
    first(wire, bucket="trained", reward=0.0).update(score=None)


def leave_out(wire: Wire) -> None:
    wire["decisions"].pop()


def twice(wire: Wire) -> None:
    wire["decisions"][1] = wire["decisions"][0]


def untrain(wire: Wire) -> None:
    """The books say a sample did not train that the trainer trained."""
    decision = first(wire, bucket="trained", leaves=["trained"])
    decision.update(leaves=["stale"], bucket="stale", advantage=None, token_weight=None)
    decision["tokens"]["stale"] = decision["tokens"].pop("trained")


BROKEN_DECISIONS: list[tuple[Callable[[Wire], None], str]] = [
    (move_tokens, r"every sampled token in one bucket: tokens in buckets 101 != tokens sampled 102 .*s000000-g001-a00"),
    (swap_tokens, r"every sampled token in one bucket: tokens in buckets 102 != tokens sampled 102 .*s000000-g001-a00"),
    (lower_weight, r"loss weights: booked 1\.00000\d+ != trainer 1"),
    (drop_reward, r"recorded as passed .* reward 1.0, decided as passed .* reward None"),
    (drop_score, r"a score of every reward, else of scored timeouts: scores 14 != verdicts and scored timeouts 15"),
    (leave_out, r"17 attempts were recorded and 16 decided, and the two differ"),
    (twice, r"17 attempts were recorded and 17 decided, and the two differ .*s000000-g000-a00"),
    (untrain, r"trained samples: booked 7 != trainer 8"),
]
BROKEN_RESULTS: list[tuple[Wire, str]] = [
    ({"loss_weight_sum": 1 + 2e-6}, r"loss weights: booked 1 != trainer 1\.000002"),
    ({"loss_weight_sum": 0.0}, r"loss weights: booked 1 != trainer 0"),
    ({"trained_tokens": 45}, r"trained tokens: booked 46 != trainer 45"),
    ({"trained_samples": 7}, r"trained samples: booked 8 != trainer 7"),
    ({"status": "empty"}, r"an optimizer step exactly where something trained: optimizer steps 0 != expected 1"),
    ({"loss": None}, r"an optimizer step exactly where something trained: .*status trained, grad_norm"),
    ({"version_after": 2}, r"one version on: version after 2 != expected 1"),
    ({"version_after": 0}, r"one version on: version after 0 != expected 1"),
    ({"batch_digest": "0" * 64}, r"step 0: the trainer's result is of batch_digest '0000.*it trained something else"),
    ({"step": 1}, r"step 0: the trainer's result is of step 1, not 0"),
    ({"run": "other"}, r"step 0: the trainer's result is of run 'other', not 'demo'"),
]


def refused(message: str, **edits: Any) -> None:
    store = MemoryStore()
    add_step(store, 0, until="push_weights", **edits)
    with pytest.raises(LedgerBroken, match=message) as error:
        step_work.close_books(cast(Any, store), CONFIG, 0)
    assert "\n" not in str(error.value)
    assert LEDGER not in store.objects and manifest_key("demo", 0, "report") not in store.objects
    assert not isinstance(error.value, SAFE_TO_REPEAT), "what is broken stays broken: no retry"


@pytest.mark.parametrize(("edit", "message"), BROKEN_DECISIONS, ids=lambda value: getattr(value, "__name__", None))
def test_decisions_that_break_an_invariant(edit: Callable[[Wire], None], message: str) -> None:
    refused(message, decisions=edit)


@pytest.mark.parametrize(
    ("changes", "message"), BROKEN_RESULTS, ids=[str(changes)[:40] for changes, _ in BROKEN_RESULTS]
)
def test_results_that_break_an_invariant(changes: Wire, message: str) -> None:
    refused(message, train=lambda result: result.update(changes))


def test_a_loss_that_is_no_number_is_no_step() -> None:
    """JSON has no NaN, so a stored result cannot hold one."""
    ledger = read_step(cast(Any, finished_run(1)), "demo", 0)
    broken = replace(ledger, train=replace(ledger.train, loss=float("nan")))
    with pytest.raises(LedgerBroken, match="an optimizer step exactly where something trained: optimizer steps 0"):
        refuse_broken(broken)


def test_the_weights_agree_within_one_in_a_million_and_not_beyond() -> None:
    store = MemoryStore()
    add_step(store, 0, train=lambda result: result.update(loss_weight_sum=1 + 0.9e-6))
    assert LEDGER in store.objects
    refused("loss weights", train=lambda result: result.update(loss_weight_sum=1 - 1.1e-6))


def test_a_token_of_weights_that_did_not_exist_yet_is_refused() -> None:
    """As is a trained token whose version nobody recorded, and one whose version is no version."""
    for versions, message in (
        (["demo:1"], r"sampled before it trained: trained tokens of later weights 6 != allowed 0"),
        ([], r"a weight version of every trained token: with a version 40 != trained 46 .*s000000-g000-a00-t1"),
        (["newest"], r"weight version 'newest' is not of the form run:k"),
    ):
        store = MemoryStore()
        add_step(store, 0, until="push_weights")
        records = step_work.committed(cast(Any, store), "demo", 0, "collect").objects[0]
        wire = unpack(store.objects[records.key], records.key)
        tried = next(each for each in wire["attempts"] if each["attempt_id"] == "s000000-g000-a00-t1")
        tried["stored"]["leaves"]["versions"] = [versions]
        store.objects[records.key] = data = pack(wire)
        key = manifest_key("demo", 0, "collect")
        manifest = orjson.loads(store.objects[key])
        manifest["objects"][0].update(sha256=sha256_hex(data), size_bytes=len(data))
        store.objects[key] = orjson.dumps(manifest)
        with pytest.raises(LedgerBroken, match=message):
            step_work.close_books(cast(Any, store), CONFIG, 0)
        assert LEDGER not in store.objects


def test_what_a_person_sees_is_computed_from_the_ledger_alone() -> None:
    """The step's summary, which the report's manifest holds and every picture is drawn from, is that of the bytes."""
    store = finished_run(2)
    for step in range(2):
        manifest = read_manifest(cast(Any, store), "demo", step, "report")
        assert manifest is not None
        read_back = step_json(read_step(cast(Any, store), "demo", step))
        assert manifest.info == json.loads(json.dumps(read_back))


def test_a_run_trains_no_attempt_twice_and_a_resumed_one_neither() -> None:
    """Killed between the ledger and its manifest, a step is closed again: the same bytes, the same ids, once."""
    store = finished_run(2)
    written = store.objects[step_key("demo", 1, "ledger.msgpack")]
    del store.objects[manifest_key("demo", 1, "report")]
    produced, ledger = step_work.close_books(cast(Any, store), CONFIG, 1)
    assert store.objects[step_key("demo", 1, "ledger.msgpack")] == written
    assert write_ledger(cast(Any, store), ledger) == produced.objects[0]
    add_step(store, 2)
    ledgers = read_run(cast(Any, store), "demo")
    trained = [attempt_id for ledger in ledgers for attempt_id in ledger.trained_ids]
    assert len(trained) == len(set(trained)) == 3 * 7
    assert all(name.startswith(f"s{ledger.step:06}-") for ledger in ledgers for name in ledger.trained_ids)
    assert all(check.holds for _, checks in audit_run(ledgers) for check in checks)
    assert [ledger.version_before for ledger in ledgers] == [0, 1, 2]


@pytest.mark.parametrize("status", ["empty", "nonfinite"])
def test_a_step_that_took_no_optimizer_step_left_the_weights_it_found(status: str) -> None:
    first, second = read_run(cast(Any, finished_run(2)), "demo")
    none = dict.fromkeys(TRAIN_FIGURES)
    for digest, faults in ((first.train.weights_digest, []), ("f" * 64, [SAME])):
        changes: dict[str, Any] = none | {"status": status, "weights_digest": digest}
        refused = replace(second, train=replace(second.train, **changes))
        checks = list(audit_run([first, refused]))[1][1]
        assert [check.name for check in checks if check.name == SAME and not check.holds] == faults
