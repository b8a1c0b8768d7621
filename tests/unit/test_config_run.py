"""The run's config: closed, explained in one line, with nothing in it that the rest of the product does not read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from rl360.config.run import CRITIC_FIELDS, DeadlinesConfig, RunConfig, frozen_differences
from rl360.errors import BadInput
from tests.unit.product_sources import ROOT, files, text_of


def leaves(section: type[BaseModel] = RunConfig, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Path of every field that holds a value."""
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from leaves(info.annotation, (*prefix, name))
        else:
            yield (*prefix, name)


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    return {path[0]: nested(path[1:], value) if len(path) > 1 else value}


def test_the_default_is_a_config_and_survives_its_own_bytes() -> None:
    config = RunConfig()
    assert RunConfig.parse(config.to_json()) == config
    assert RunConfig.parse({}) == config


def test_the_bytes_are_canonical() -> None:
    one = RunConfig.parse({"seed": 3, "run": "r1"})
    other = RunConfig.parse(b'{"run": "r1", "seed": 3}')
    assert one.to_json() == other.to_json()
    assert list(orjson.loads(one.to_json())) == sorted(orjson.loads(one.to_json()))


@pytest.mark.parametrize("path", list(leaves()), ids=".".join)
def test_every_field_is_read_somewhere(path: tuple[str, ...]) -> None:
    """A field that nothing reads is a switch that is not connected."""
    if path == ("objective", "preset"):
        return  # it fills in the others while the config is read, and stays for the record in config.json
    word = re.compile(rf"\.{path[-1]}\b")
    readers = [
        file
        for file in files("rl360", "tasks", "flows")
        if file.name != "run.py" or file.parent.name != "config"
        if word.search(text_of(file))
    ]
    within = path[0] == "deadlines" or path[-1] == "reduction_constant"  # by a sum or a property of the config
    own = word.search(text_of(ROOT / "rl360/config/run.py")) if within else None
    assert readers or own, f"nothing reads {'.'.join(path)}"


@pytest.mark.parametrize("path", [*leaves(), *((*p[:-1], p[-1] + "x") for p in leaves())], ids=".".join)
def test_misspelt_keys_and_wrong_types_are_one_line(path: tuple[str, ...]) -> None:
    with pytest.raises(BadInput) as error:
        RunConfig.parse(nested(path, {"not": "a value"}), where="r.yaml")
    assert str(error.value).startswith("r.yaml: ")
    assert ".".join(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_every_fault_is_named_with_its_value() -> None:
    with pytest.raises(BadInput) as error:
        RunConfig.parse({"seed": -1, "rolout": {}, "trainer": {"lr": "fast"}, "run": "Bad Name"})
    text = str(error.value)
    for part in ("seed", "'-1'", "unknown key rolout", "trainer.lr", "'fast'", "run", "'Bad Name'"):
        assert part in text, part
    assert "\n" not in text


@pytest.mark.parametrize("data", [b"{", "nope", b"[1]", b"null", b'{"seed": 1e999}'])
def test_what_is_no_config_at_all_is_one_line(data: bytes | str) -> None:
    with pytest.raises(BadInput) as error:
        RunConfig.parse(data, where="x")
    assert str(error.value).startswith("x: ") and "\n" not in str(error.value)


@pytest.mark.parametrize("path", list(leaves()), ids=".".join)
@pytest.mark.parametrize("value", [float("inf"), float("nan"), "Infinity", "NaN", "1e999"], ids=repr)
def test_no_field_takes_what_config_json_cannot_hold(path: tuple[str, ...], value: float | str) -> None:
    try:
        config = RunConfig.parse(nested(path, value))
    except BadInput:
        return
    assert RunConfig.parse(config.to_json()) == config
    assert isinstance(value, str)  # a name may be any text


def test_a_client_that_gives_up_before_its_attempt_ends_is_refused_with_the_sum() -> None:
    parts = DeadlinesConfig()
    total = parts.queue_s + parts.setup_s + parts.agent_s + parts.verifier_s + parts.collect_s + parts.slack_s
    assert RunConfig.parse({"deadlines": {"client_s": total}}).deadlines.client_s == total
    with pytest.raises(BadInput) as error:
        RunConfig.parse({"deadlines": {"client_s": total - 1}})
    for part in (f"client_s {total - 1:g}", "queue 120", "agent 60", f"= {total:g}", "raise client_s or lower a part"):
        assert part in str(error.value)


def test_a_sample_that_no_micro_batch_holds_is_refused_before_it_is_sampled() -> None:
    limits = {"rollout": {"max_seq_len": 8192}, "trainer": {"max_tokens_per_micro_batch": 8192}}
    assert RunConfig.parse(limits).rollout.max_seq_len == 8192
    with pytest.raises(BadInput, match=r"rollout\.max_seq_len 8192 does not fit into .* 4096; lower the one"):
        RunConfig.parse({"rollout": {"max_seq_len": 8192}})


def test_frozen_fields_differ_with_both_values_operational_ones_do_not() -> None:
    frozen = RunConfig()
    wanted = RunConfig.parse(
        {"seed": 7, "steps": 99, "trainer": {"lr": 0.01, "checkpoint_every": 2}, "rollout": {"wave_size": 8}}
    )
    assert frozen_differences(frozen, wanted) == ["seed: 0 -> 7", "trainer.lr: 0.0003 -> 0.01"]
    assert frozen_differences(frozen, frozen) == []


@pytest.mark.parametrize("matcher", ["strikt", "", "agents.echo", "agents.echo:", ":same", "a b:c", "strict:x:y"])
def test_a_matcher_is_a_known_name_or_a_function_by_its_import_path(matcher: str) -> None:
    with pytest.raises(BadInput, match=r"rollout\.matcher"):
        RunConfig.parse({"rollout": {"matcher": matcher}})
    assert RunConfig.parse({"rollout": {"matcher": "agents.echo:same"}}).rollout.matcher == "agents.echo:same"


def test_a_pick_of_branches_belongs_to_trees() -> None:
    with pytest.raises(BadInput, match="pick all says nothing with session_mode linear"):
        RunConfig.parse({"rollout": {"pick": "all"}})
    tree = {"rollout": {"pick": "all", "session_mode": "tree"}}
    assert len(frozen_differences(RunConfig(), RunConfig.parse(tree))) == 2


def test_a_run_with_a_parent_is_another_run() -> None:
    origin = {"run": "r1", "step": 4, "weights_digest": "0" * 64, "steps_before": 5, "updates_before": 5}
    fork, moved = (RunConfig.parse({"parent": origin | change}) for change in ({}, {"step": 9}))
    assert frozen_differences(fork, fork) == []
    assert frozen_differences(fork, moved) == ["parent.step: 4 -> 9"]
    assert any(line.startswith("parent.run: 'r1' -> None") for line in frozen_differences(fork, RunConfig()))


def test_operational_means_it_cannot_change_what_is_computed() -> None:
    """The whole list, so that marking one more field is a decision that this test sees."""
    config = RunConfig()
    changed = {
        "steps": 31,
        "rollout": {
            "wave_size": 1,
            "wave_interval_s": 1,
            "max_concurrent": 1,
            "infra_retries": 2,
            "group_retries": 1,
            "quarantine_after": 2,
            "max_infra_rate": 0.25,
        },
        "sandbox": {"reserved_cpus": 0.5},
        "deadlines": {"queue_s": 1, "setup_s": 1, "collect_s": 1, "slack_s": 16, "client_s": 999, "train_s": 1},
        "judge": {"call_s": 1, "retries": 1},
        "trainer": {"checkpoint_every": 1, "keep_checkpoints": 0, "max_nonfinite_steps": 1},
        # whatever carries the weights, an engine serves only what has the trainer's checksums
        "push": {
            "bucket_bytes": 2048,
            "call_deadline_s": 1,
            "deadline_s": 100,
            "min_engines": 2,
            "transport": "disk_delta",
            "folder": "/w",
        },
    }
    assert frozen_differences(config, RunConfig.parse(changed)) == []
    operational = {path for path in leaves() if path[0] in changed and _in(changed, path)}
    for path in set(leaves()) - operational:
        value = config.model_dump()
        for name in path:
            value = value[name]
        other = {
            "clip_low": 0.1,
            "preset": None,  # fills in other fields, which then differ too
            "correction_low": None,  # belongs to another correction
            "correction_level": "sequence",
            "correction": "off",
            "filter_on": None,  # belongs to a penalty
            "format_error_penalty": 0.3,
            "unverified_timeout": "score_zero",
            "loss": None,  # the others belong to another old policy
            "dual_clip": None,
            "estimator": "rloo",
            "veto": 1e-4,
            "off_policy_delta": 0.1,
            "reduction": "sample_mean",
            "reduction_constant": None,  # belongs to another reduction
            "old_policy": None,  # belongs to no correction
            "kept_versions": None,  # belongs to a kept old policy
            "kl_estimator": None,  # belong to a KL
            "kl_in": None,
            "reference": None,
            **dict.fromkeys(CRITIC_FIELDS),  # belong to gae
            "pause_mode": "abort",
            "session_mode": "tree",
            "pick": None,  # belongs to trees
            "parent": None,  # a whole section
            "matcher": "agents.echo:same",
            "sampling_params": "refuse",
            "model": None,  # of a judge: belongs to judge_s, and judge_s to it
            "judge_s": None,
            "response_format": "none",
            "run": "other",
            "difficulty": "history",
            "weights": {"easy": 1.0},
            "generate": "agents.echo:generate",
            "function": "agents.echo:play",
        }.get(path[-1], _another(value))
        if other is not None:
            assert len(frozen_differences(config, RunConfig.parse(nested(path, other)))) == 1, path


JUDGED = {"judge": {"model": "j", "call_s": 20}, "deadlines": {"judge_s": 40, "client_s": 400}}


def test_a_judges_clocks_nest_and_may_change() -> None:
    config = RunConfig.parse(JUDGED)
    longer = {**JUDGED, "deadlines": {"judge_s": 60, "client_s": 400}}
    assert frozen_differences(config, RunConfig.parse(longer)) == []
    other = RunConfig.parse({**JUDGED, "judge": {"model": "k"}})
    assert frozen_differences(config, other) == ["judge.model: 'j' -> 'k'"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"judge": {"model": "j"}}, "judge.model is set and deadlines.judge_s is not"),
        ({"deadlines": {"judge_s": 40}}, "deadlines.judge_s is set and judge.model is not"),
        (
            {"judge": {"model": "j"}, "deadlines": {"judge_s": 46}},
            "client_s 300 is less than queue 120 + setup 20 + agent 60 + verifier 20 + judge 46 + collect 20",
        ),
        ({**JUDGED, "judge": {"model": "j", "call_s": 41}}, "call_s 41 is more than deadlines.judge_s 40"),
    ],
)
def test_a_judges_clocks_that_do_not_nest_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput) as error:
        RunConfig.parse(fields)
    assert words in str(error.value)


def _in(changed: dict[str, Any], path: tuple[str, ...]) -> bool:
    held: Any = changed
    for name in path:
        if not isinstance(held, dict) or name not in held:
            return False
        held = held[name]
    return True


def _another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value / 2 if 0 < value < 1 else value + 1 if value > 1 or value <= 0 else 0.5
    return f"{value}x"


@settings(max_examples=60, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "seed": st.integers(0, 2**31 - 1),
            "steps": st.integers(1, 10**6),
            "rollout": st.fixed_dictionaries(
                {}, optional={"temperature": st.floats(0.01, 2), "max_turns": st.integers(1, 99)}
            ),
            "objective": st.fixed_dictionaries({}, optional={"veto": st.none() | st.floats(0.01, 0.9)}),
        },
    )
)
def test_any_config_survives_its_bytes(fields: dict[str, Any]) -> None:
    config = RunConfig.parse(fields)
    again = RunConfig.parse(config.to_json())
    assert again == config
    assert again.to_json() == config.to_json()
    assert frozen_differences(config, again) == []
