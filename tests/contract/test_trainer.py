"""The trainer service against a real store: each step once, whatever fails or is killed when; empty and non-finite
steps; checkpoints, replay, export and what a push asks for. One trainer for the module; the kills restart it.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from rl360.store.layout import actor_prefix, checkpoint_prefix, merged_key, step_key
from rl360.training.results import TrainResult
from tests.contract.trainer_rig import Rig, Trap
from tests.unit.training_data import sample, samples_of, untrained

pytestmark = [pytest.mark.contract, pytest.mark.timeout(900)]
BATCH_READ = re.compile(rb"GET /\S*/filter\.msgpack")
SAMPLE_READ = re.compile(rb"GET /\S*/merged/0000/\S*-a05-t0\.msgpack")
ACTOR_WRITE = re.compile(rb"PUT /\S*/actors/000001/manifest\.json")
RECORD_WRITE = re.compile(rb"PUT /\S*/train\.json")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = Rig(tmp_path_factory.mktemp("trainer"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference(rig: Rig) -> list[dict[str, Any]]:
    """Results of steps 0 to 3 of an undisturbed run: any other run on the same samples must end in these weights."""
    run = rig.new_run("reference")
    return [rig.train(run, step) for step in range(4)]


def test_auth_and_unknown(rig: Rig) -> None:
    health = rig.ask("GET", "/health", token="wrong").json()
    assert (health["status"], health["service"]) == ("ok", "trainer")
    assert rig.ask("GET", "/runs/reference", token="wrong").status_code == 401
    assert rig.ask("GET", "/runs/nobody").status_code == 404
    assert rig.ask("GET", "/runs/Bad_Name").status_code == 400
    assert rig.ask("PUT", "/steps/0", {"run": "x"}).status_code == 400


def test_steps_train_and_are_recorded(rig: Rig, reference: list[dict[str, Any]]) -> None:
    assert [r["status"] for r in reference] == ["trained"] * 4
    assert [r["version_after"] for r in reference] == [1, 2, 3, 4]
    assert len({r["weights_digest"] for r in reference}) == 4
    for step, result in enumerate(reference):
        rows = samples_of(step)
        assert result["trained_samples"] == len(rows)
        assert result["trained_tokens"] == sum(int(row["loss_mask"].sum()) for row in rows)
        assert result["loss_weight_sum"] == pytest.approx(1.0, abs=1e-9)
        assert result["clip_fraction"] == 0.0
        assert np.isfinite([result["loss"], result["grad_norm"], result["tis_mean"], result["entropy"]]).all()
        stored = orjson.loads(rig.store.get(step_key("reference", step, "train.json")))
        assert stored == result


def test_asking_again_and_asking_wrong(rig: Rig, reference: list[dict[str, Any]]) -> None:
    rig.state("reference")
    assert rig.train("reference", 2) == reference[2]
    other = rig.put_batch("reference", 2) | {"batch_digest": "0" * 64}
    reply = rig.ask("PUT", "/steps/2", other)
    assert reply.status_code == 409
    assert "was trained on" in reply.json()["error"]
    reply = rig.ask("PUT", "/steps/9", rig.put_batch("reference", 9))
    assert reply.status_code == 409
    assert "next step is 4" in reply.json()["error"]
    assert rig.state("reference")["weights_digest"] == reference[3]["weights_digest"]


def test_equal_requests_at_once_train_once(rig: Rig, reference: list[dict[str, Any]]) -> None:
    run = rig.new_run("joined")
    body = rig.put_batch(run, 0)
    replies: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: replies.append(rig.ask("PUT", "/steps/0", body))) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {r.content for r in replies} == {replies[0].content}
    assert replies[0].json()["weights_digest"] == reference[0]["weights_digest"]
    assert rig.state(run)["version"] == 1


def test_empty_and_nonfinite_steps_leave_the_weights(rig: Rig, reference: list[dict[str, Any]]) -> None:
    run = rig.new_run("odd-steps", objective={"old_policy": "rollout", "correction": "off"})
    start = rig.state(run)
    for step, rows in enumerate(([], [untrained(sample(7, "none"))])):
        empty = rig.train(run, step, rows)
        assert (empty["status"], empty["loss"], empty["grad_norm"], empty["version_after"]) == ("empty", None, None, 0)
        assert (empty["trained_tokens"], empty["loss_weight_sum"]) == (0, 0.0)
        assert empty["weights_digest"] == start["weights_digest"]
    poisoned = samples_of(2)
    # finite, or the sample is refused; yet the ratio to it is not
    poisoned[0]["logprobs"] = np.where(poisoned[0]["loss_mask"], -3e38, 0).astype(np.float32)
    poisoned[0]["advantage"] = -1.0
    refused = rig.train(run, 2, poisoned)
    assert (refused["status"], refused["loss"], refused["version_after"]) == ("nonfinite", None, 0)
    assert refused["weights_digest"] == start["weights_digest"]
    trained = rig.train(run, 3)
    assert (trained["status"], trained["version_after"]) == ("trained", 1)
    rig.state("reference")  # makes the trainer forget the run, so that it replays all four
    again = rig.state(run)
    assert (again["version"], again["next_step"]) == (1, 4)
    assert again["weights_digest"] == trained["weights_digest"]


def test_a_corrupt_batch_is_refused_and_nothing_is_applied(rig: Rig, reference: list[dict[str, Any]]) -> None:
    run = rig.new_run("corrupt")
    body = rig.put_batch(run, 0)
    good = rig.store.get(body["batch_key"])
    rig.store.put(body["batch_key"], good[:-3] + b"xyz")
    before = rig.state(run)
    reply = rig.ask("PUT", "/steps/0", body)
    assert reply.status_code == 422
    assert body["batch_key"] in reply.json()["error"]
    rig.store.delete(body["batch_key"])
    reply = rig.ask("PUT", "/steps/0", body)
    assert reply.status_code == 422
    assert "is missing" in reply.json()["error"]
    assert rig.state(run) == before
    rig.store.put(body["batch_key"], good)
    assert rig.train(run, 0)["weights_digest"] == reference[0]["weights_digest"]


def test_a_corrupt_sample_is_refused_and_nothing_is_applied(rig: Rig, reference: list[dict[str, Any]]) -> None:
    run = rig.new_run("corrupt-sample")
    body = rig.put_batch(run, 0)
    key = merged_key(run, 0, 0, samples_of(0)[3]["attempt_id"])
    good, before = rig.store.get(key), rig.state(run)
    for spoil in (lambda: rig.store.put(key, good[:-1] + bytes([good[-1] ^ 1])), lambda: rig.store.delete(key)):
        spoil()
        reply = rig.ask("PUT", "/steps/0", body)
        assert reply.status_code == 422 and f"object {key}: " in reply.json()["error"]
        assert rig.state(run) == before
    rig.store.put(key, good)
    reply = rig.ask("PUT", "/steps/0", body)
    assert reply.json()["weights_digest"] == reference[0]["weights_digest"]


def test_a_record_that_could_not_be_written_is_written_later(rig: Rig, reference: list[dict[str, Any]]) -> None:
    run = rig.new_run("no-commit")
    rig.train(run, 0)
    body = rig.put_batch(run, 1)
    rig.wire.sprung, rig.wire.trap = 0, Trap(RECORD_WRITE, lambda: None, times=1000)  # every try of the client
    reply = rig.ask("PUT", "/steps/1", body)
    rig.wire.trap = None
    assert reply.status_code == 503, reply.text
    assert "applied in memory and not recorded" in reply.json()["error"]
    assert not rig.store.exists(step_key(run, 1, "train.json"))
    held = rig.state(run)
    assert (held["uncommitted_step"], held["version"]) == (1, 2)
    assert rig.ask("PUT", "/steps/2", rig.put_batch(run, 2)).status_code == 409
    assert rig.ask("POST", f"/runs/{run}/checkpoints/1").status_code == 409
    assert rig.ask("POST", "/push/checksums", {"run": run, "version": f"{run}:2"}).status_code == 409
    result = rig.train(run, 1)
    assert result["weights_digest"] == reference[1]["weights_digest"] == held["weights_digest"]
    assert rig.train(run, 2)["weights_digest"] == reference[2]["weights_digest"]


def test_a_lost_answer_of_the_record_is_no_second_step(rig: Rig, reference: list[dict[str, Any]]) -> None:
    run = rig.new_run("lost-answer")
    rig.wire.sprung, rig.wire.trap = 0, Trap(RECORD_WRITE, lambda: None, on_reply=True)
    result = rig.train(run, 0)  # the store's client repeats the put, is told that the object exists, and reads it
    assert rig.wire.sprung == 1
    assert result["weights_digest"] == reference[0]["weights_digest"]
    assert rig.train(run, 1)["weights_digest"] == reference[1]["weights_digest"]


def test_checkpoint_export_and_push_agree(rig: Rig, tmp_path: Path) -> None:
    from rl360.engines.fleet import EngineIdentity
    from rl360.training.megatron.hf_dir import read_tensors
    from rl360.training.megatron.hf_map import digest_of
    from rl360.weights.checksum import expected_checksums
    from rl360.weights.messages import ChecksumReply, EngineSet
    from rl360.weights.plan import plan_push

    run = rig.new_run("saved")
    results = [rig.train(run, step) for step in range(2)]
    saved = rig.ask("POST", f"/runs/{run}/checkpoints/1").json()
    assert (saved["version"], saved["next_step"], saved["weights_digest"]) == (2, 2, results[1]["weights_digest"])
    assert rig.ask("POST", f"/runs/{run}/checkpoints/1").json() == saved
    assert rig.ask("POST", f"/runs/{run}/checkpoints/0").status_code == 409
    assert len(rig.store.list(checkpoint_prefix(run, 1))) == 5
    out = tmp_path / "exported"
    reply = rig.ask("POST", f"/runs/{run}/export", {"dir": str(out), "dtype": "float32"})
    assert reply.status_code == 200, reply.text
    assert digest_of(read_tensors(out)) == results[1]["weights_digest"]
    assert rig.ask("POST", f"/runs/{run}/export", {"dir": str(out)}).status_code == 400
    bf16 = tmp_path / "bf16"
    rig.ask("POST", f"/runs/{run}/export", {"dir": str(bf16)})
    from safetensors.torch import load_file

    held = rig.ask("POST", "/push/checksums", {"run": run, "version": f"{run}:2"}).json()
    assert held["checksums"] == expected_checksums(load_file(bf16 / "model.safetensors"))
    assert rig.ask("POST", "/push/checksums", {"run": run, "version": f"{run}:1"}).status_code == 409
    gone = EngineSet(epoch=1, engines=(EngineIdentity(url="http://127.0.0.1:9", incarnation="none"),))
    shapes = ChecksumReply.model_validate(held).tensors
    plan = plan_push(shapes, gone, run=run, version=f"{run}:2", bucket_bytes=1 << 16, call_deadline_s=3.0)
    report = rig.ask("POST", "/push/transfer", plan.model_dump(mode="json"))
    assert report.status_code == 200, report.text
    assert (report.json()["ok"], report.json()["engines"][0]["answered"]) == (False, False)
    third = rig.train(run, 2)
    rig.state("reference")
    assert rig.state(run)["weights_digest"] == third["weights_digest"]  # restored and one step replayed


def test_a_replay_that_differs_is_an_error(rig: Rig) -> None:
    run = rig.new_run("tampered")
    result = TrainResult.model_validate(rig.train(run, 0))
    key = step_key(run, 0, "train.json")
    rig.store.put(key, result.model_copy(update={"weights_digest": "f" * 64}).model_dump_json().encode())
    reply = rig.ask("GET", f"/runs/{run}")
    assert reply.status_code == 422
    assert "replay of step 0 of tampered" in reply.json()["error"]
    assert rig.ask("PUT", "/steps/1", rig.put_batch(run, 1)).status_code == 422


def test_a_damaged_checkpoint_is_named(rig: Rig) -> None:
    run = rig.new_run("damaged")
    rig.train(run, 0)
    assert rig.ask("POST", f"/runs/{run}/checkpoints/0").status_code == 200
    key = next(k for k in rig.store.list(checkpoint_prefix(run, 0)) if "exp_avg-" in k)
    rig.store.put(key, rig.store.get(key)[:-1])
    rig.state("reference")
    reply = rig.ask("GET", f"/runs/{run}")
    assert reply.status_code == 422
    assert key in reply.json()["error"]


@pytest.mark.chaos
@pytest.mark.parametrize("when", ["batch_read", "sample_read", "before_record", "after_record"])
def test_killed_trainer_goes_on_as_if_nothing_happened(rig: Rig, reference: list[dict[str, Any]], when: str) -> None:
    run = rig.new_run(f"killed-{when.replace('_', '-')}")
    rig.train(run, 0)
    assert rig.ask("POST", f"/runs/{run}/checkpoints/0").status_code == 200
    assert rig.train(run, 1)["weights_digest"] == reference[1]["weights_digest"]
    body = rig.put_batch(run, 2)
    trap = {
        "batch_read": Trap(BATCH_READ, rig.kill_rank),
        "sample_read": Trap(SAMPLE_READ, rig.kill_rank),
        "before_record": Trap(RECORD_WRITE, rig.kill_rank),
        "after_record": Trap(RECORD_WRITE, rig.kill_rank, on_reply=True),
    }[when]
    rig.wire.sprung, rig.wire.trap = 0, trap
    with pytest.raises(httpx.HTTPError):
        rig.ask("PUT", "/steps/2", body)
    assert rig.wire.sprung == 1
    time.sleep(0.5)
    assert rig.store.exists(step_key(run, 2, "train.json")) == (when == "after_record")
    rig.restart()
    state = rig.state(run)
    recorded = when == "after_record"
    assert (state["next_step"], state["version"]) == ((3, 3) if recorded else (2, 2))
    reply = rig.ask("PUT", "/steps/2", body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["weights_digest"] == reference[2]["weights_digest"]
    assert reply.json()["version_after"] == 3
    assert rig.train(run, 3)["weights_digest"] == reference[3]["weights_digest"]


@pytest.mark.chaos
def test_a_trainer_killed_while_it_keeps_an_actor_keeps_it_again(rig: Rig) -> None:
    """Version 1 is trained and recorded, its actor half written; the restart replays, keeps the same and goes on."""
    fields: dict[str, Any] = {"objective": {"old_policy": "kept", "kl_coef": 0.1}}
    fields["trainer"] = {"lr": 1e-3, "kept_versions": 2}
    calm, run = rig.new_run("kept-calm", **fields), rig.new_run("kept-killed", **fields)
    expected = [rig.train(calm, step) for step in range(3)]
    assert [each["actors_used"] for each in expected] == [[], [0], [0]]
    rig.train(run, 0)
    body = rig.put_batch(run, 1)
    rig.wire.sprung, rig.wire.trap = 0, Trap(ACTOR_WRITE, rig.kill_rank)
    with pytest.raises(httpx.HTTPError):
        rig.ask("PUT", "/steps/1", body)
    assert rig.wire.sprung == 1
    rig.restart()
    assert not rig.store.exists(actor_prefix(run, 1) + "manifest.json")
    reply = rig.ask("PUT", "/steps/1", body)
    assert reply.status_code == 200, reply.text
    for found, wanted in ((reply.json(), expected[1]), (rig.train(run, 2), expected[2])):
        assert (found["weights_digest"], found["loss"]) == (wanted["weights_digest"], wanted["loss"])
    for version in range(3):
        kept = [orjson.loads(rig.store.get(actor_prefix(each, version) + "manifest.json")) for each in (calm, run)]
        assert kept[0]["weights_digest"] == kept[1]["weights_digest"]
        assert kept[0]["weights"]["sha256"] == kept[1]["weights"]["sha256"]


@pytest.mark.chaos
def test_ranks_do_not_outlive_torchrun(rig: Rig) -> None:
    rig.kill()
    rig.restart()
    assert rig.ask("GET", "/health").status_code == 200
