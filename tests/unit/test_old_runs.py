"""Runs that began under a config which today's rules refuse: they can be looked at, not gone on with, and forked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
from typer.testing import CliRunner

from rl360.commands import follow as follow_module
from rl360.commands import run as run_command
from rl360.commands.ledger_page import page
from rl360.commands.prefect_api import FlowRun
from rl360.commands.run import changed_config, forked_config
from rl360.config.freeze import load_frozen, settle_config
from rl360.config.run import CRITIC_FIELDS, RunConfig
from rl360.errors import BadInput
from rl360.ledger.read import list_runs, read_run
from rl360.report.attempt import Told, attempt_life
from rl360.store.layout import checkpoint_prefix, run_config_key
from rl360.store.object_store import ObjectStore
from rl360.training.saved import CheckpointManifest
from tests.unit.ledger_run import CONFIG, finished_run
from tests.unit.memory_store import MemoryStore

# one of every rule about fields together, in every section that has any
REFUSED: dict[str, dict[str, Any]] = {
    "pick all says nothing with session_mode linear": {"rollout": {"pick": "all"}},
    "pick roots says nothing with session_mode linear": {"rollout": {"pick": "roots"}},
    "client_s 20 is less than": {"deadlines": {"client_s": 20}},
    "filter_on shaped says nothing": {"objective": {"filter_on": "shaped"}},
    "k1 in the loss is no penalty": {"objective": {"kl_coef": 0.1, "kl_estimator": "k1"}},
    "value_clip needs critic_updates": {"objective": {"estimator": "gae", "value_clip": 0.2}},
    "gamma says nothing with estimator grpo": {"objective": {"gamma": 0.5}},
    "does not fit into": {"rollout": {"max_seq_len": 9000}},
    "go together": {"trainer": {"kept_versions": 2}},
    "critic_warmup_steps 2 is all of the run's steps 2": {"objective": {"estimator": "gae", "critic_warmup_steps": 2}},
    "judge.model is set and deadlines.judge_s is not": {"judge": {"model": "m"}},
    "weights {'a': 0.0} are all 0: nothing could be drawn": {"taskset": {"weights": {"a": 0.0}}},
    "reserved_cpus 2 is more than cpus 1; lower it": {"sandbox": {"reserved_cpus": 2.0}},
    "folder says nothing with transport broadcast": {"push": {"folder": "/w"}},
    "trainer.witness with estimator gae": {"objective": {"estimator": "gae"}, "trainer": {"witness": True}},
}


def frozen_as(fields: dict[str, Any], **unknown: Any) -> MemoryStore:
    """A finished run of two steps whose `config.json` has these fields."""
    store = finished_run(2)
    value = orjson.loads(CONFIG.to_json())
    for section, changes in {**fields, **unknown}.items():
        value[section] = value.get(section, {}) | changes
    store.objects[run_config_key("demo")] = orjson.dumps(value)
    return store


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_refused_today_is_read_and_not_started(why: str) -> None:
    store = cast(Any, frozen_as(REFUSED[why]))
    assert [(row["run"], row["steps"], row["state"]) for row in list_runs(store)] == [("demo", 2, "done")]
    assert [ledger.step for ledger in read_run(store, "demo")] == [0, 1]
    assert "s000001-g000-a00-t1" in page(attempt_life(store, "demo", "s000001-g000-a00", Told(None)))
    config = load_frozen(store, "demo")
    assert orjson.loads(config.to_json()) == orjson.loads(store.get(run_config_key("demo"))), "and nothing is mended"
    for start in (
        lambda: RunConfig.parse(store.get(run_config_key("demo"))),
        lambda: changed_config(config, {}),
        lambda: RunConfig.parse(config.to_json()),
    ):
        with pytest.raises(BadInput) as error:
            start()
        assert why in str(error.value) and "\n" not in str(error.value)
    if not set(REFUSED[why]) & {"deadlines", "sandbox", "push"}:  # whose fields may change
        with pytest.raises(BadInput, match="was started under another config"):
            settle_config(store, CONFIG, default_model="/m")


def test_a_resume_says_why_and_that_a_fork_may_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store = frozen_as({"rollout": {"pick": "all"}})
    monkeypatch.setattr(run_command, "load_services", lambda: cast(Any, None))
    monkeypatch.setattr(ObjectStore, "from_services", lambda _services: store)
    found = CliRunner().invoke(run_command.app, ["resume", "demo", "--steps", "5"])
    assert isinstance(found.exception, BadInput)
    said = str(found.exception)
    assert said.startswith("run demo cannot go on under this config: rollout: pick all says nothing with session_mode")
    assert said.endswith("`rl360 run fork demo NEW -s FIELD=VALUE`") and "\n" not in said
    manifest = CheckpointManifest(
        run="demo", step=1, next_step=2, version=2, weights_digest="0" * 64, layout="l", objects={}
    )
    store.put(checkpoint_prefix("demo", 1) + "manifest.json", manifest.model_dump_json().encode())
    s3 = cast(Any, store)
    with pytest.raises(BadInput, match="pick all says nothing"):
        forked_config(s3, "demo", "f1", None, {"steps": 3})
    forked = forked_config(s3, "demo", "f1", None, {"steps": 3, "rollout": {"pick": "last"}})
    assert (forked.run, forked.rollout.pick, forked.rollout.session_mode) == ("f1", "last", "linear")


@pytest.mark.parametrize(("asked", "target"), [(None, 2), ("CANCELLED", 2), ("COMPLETED", 2), ("FAILED", 9)])
def test_to_be_watched_a_run_needs_its_number_of_steps_and_no_more(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, target: int
) -> None:
    store = frozen_as({"rollout": {"pick": "all"}}, gone={"x": 1})
    newest = None if asked is None else FlowRun("1", "n", asked, asked, "", {"config": {"run": "demo", "steps": 9}})
    shown: list[Any] = []
    monkeypatch.setattr(run_command, "load_services", lambda: cast(Any, None))
    monkeypatch.setattr(ObjectStore, "from_services", lambda _services: store)
    monkeypatch.setattr(run_command, "_api", lambda _services: SimpleNamespace(newest_of=lambda _run: newest))
    monkeypatch.setattr(follow_module, "follow", lambda _services, *given: shown.append(given))
    found = CliRunner().invoke(run_command.app, ["watch", "demo"], catch_exceptions=False)
    assert found.exit_code == 0
    assert shown == [("demo", target, "1" if asked == "FAILED" else None)]


def test_more_steps_make_a_warm_up_that_filled_the_run_fit() -> None:
    config = load_frozen(cast(Any, frozen_as({"objective": {"estimator": "gae", "critic_warmup_steps": 2}})), "demo")
    assert changed_config(config, {"steps": 3}).objective.critic_warmup_steps == 2


def test_fields_that_are_gone_are_left_out_of_what_is_looked_at_and_of_nothing_else() -> None:
    """The ledger, the list and an attempt's life; whoever would go on with the run is told the field."""
    store = cast(Any, frozen_as({}, rollout={"top_p": 0.9}, gone={"x": 1}))
    assert list_runs(store)[0]["steps"] == len(read_run(store, "demo")) == 2
    assert attempt_life(store, "demo", "s000001-g000-a00", Told(None))["tries"]
    for go_on in (
        lambda: load_frozen(store, "demo"),
        lambda: settle_config(store, CONFIG, default_model="/m"),
        lambda: forked_config(store, "demo", "f1", None, {}),
    ):
        with pytest.raises(BadInput, match=r"demo/config\.json: unknown key rollout\.top_p; unknown key gone"):
            go_on()


@pytest.mark.parametrize("value", [b"{", b"[]", b'{"rollout": {"wave_size": "many"}}', b'{"steps": 0}'])
def test_what_was_frozen_is_checked_field_by_field_all_the_same(value: bytes) -> None:
    store = finished_run(1)
    store.objects[run_config_key("demo")] = value
    with pytest.raises(BadInput, match=r"demo/config\.json: "):
        load_frozen(cast(Any, store), "demo")


@pytest.mark.parametrize(("warmup", "steps"), [(1, 1), (2, 2), (5, 3), (30, 30)])
def test_a_warm_up_of_all_steps_is_refused_with_both_numbers(warmup: int, steps: int) -> None:
    fields = {"steps": steps, "objective": {"preset": "ppo", "critic_warmup_steps": warmup}}
    with pytest.raises(BadInput) as error:
        RunConfig.parse(fields)
    said = f"objective.critic_warmup_steps {warmup} is all of the run's steps {steps}, so the policy would never move"
    assert said in str(error.value) and "lower it or raise steps" in str(error.value)
    assert RunConfig.parse({**fields, "steps": warmup + 1}).objective.critic_warmup_steps == warmup
    assert "critic_warmup_steps" in CRITIC_FIELDS


def test_the_whole_list_of_rules_is_above() -> None:
    """A section that gets its first rule gets a run above that breaks it."""
    kinds = {name: info.annotation for name, info in RunConfig.model_fields.items()}
    sections = {name for name, kind in kinds.items() if isinstance(kind, type) and "_rules" in vars(kind)}
    broken = {section for fields in REFUSED.values() for section in fields}
    assert sections <= broken and sections == {"taskset", "rollout", "sandbox", "deadlines", "objective", "push"}
