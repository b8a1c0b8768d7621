"""How `rl360 run` reads a config: file, single fields, options; and what a resume may change."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl360.commands.run import changed_config, read_config, read_fields
from rl360.config.run import ObjectiveConfig, RunConfig
from rl360.errors import BadInput
from rl360.objective.presets import PRESETS


def test_nothing_given_is_the_demo() -> None:
    assert read_config(None, None) == RunConfig()
    assert read_config(None, [], run=None, seed=None, steps=None) == RunConfig()


@pytest.mark.parametrize("text", ['{"run": "r1", "trainer": {"lr": 0.01}}', "run: r1\ntrainer:\n  lr: 0.01\n"])
def test_a_file_may_be_json_or_yaml(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.conf"
    path.write_text(text)
    config = read_config(path, None)
    assert (config.run, config.trainer.lr) == ("r1", 0.01)


def test_fields_win_over_the_file_and_options_over_fields(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("seed: 1\nsteps: 2\nrollout: {wave_size: 3, max_turns: 4}\n")
    config = read_config(path, ["seed=10", "steps=20", "rollout.wave_size=30"], steps=200)
    assert (config.seed, config.steps, config.rollout.wave_size, config.rollout.max_turns) == (10, 200, 30, 4)


@pytest.mark.parametrize(
    ("item", "path", "value"),
    [
        ("objective.veto=null", ("objective", "veto"), None),
        ("objective.normalize_std=true", ("objective", "normalize_std"), True),
        ("trainer.lr=3e-4", ("trainer", "lr"), 3e-4),
        ("taskset.path=/my/tasks", ("taskset", "path"), "/my/tasks"),
        ("taskset.path=/a=b", ("taskset", "path"), "/a=b"),
        ("taskset.path=builtin:chores", ("taskset", "path"), "builtin:chores"),
        ("taskset.path=my/tasks", ("taskset", "path"), str(Path("my/tasks").absolute())),  # the flow runs elsewhere
        (
            'taskset.path=["builtin:chores", "human-eval", "my/tasks"]',
            ("taskset", "path"),
            ["builtin:chores", "human-eval", str(Path("my/tasks").absolute())],
        ),
        ("taskset.path=human-eval", ("taskset", "path"), "human-eval"),
        ("model.path=m", ("model", "path"), str(Path("m").absolute())),
        ('run="r1"', ("run",), "r1"),
    ],
)
def test_values_are_json_or_else_text(item: str, path: tuple[str, ...], value: object) -> None:
    held = read_config(None, [item]).model_dump()
    for name in path:
        held = held[name]
    assert held == value


def test_a_reference_policy_is_where_this_directory_says() -> None:
    found = read_config(None, ["objective.kl_coef=0.1", "objective.reference=m"])
    assert found.objective.reference == str(Path("m").absolute())


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("rollout.wave_size", "write it as field=value"),
        ("=3", "write it as field=value"),
        ("rollout.wavesize=3", "unknown key rollout.wavesize"),
        ("rolout.wave_size=3", "unknown key rolout"),
        ("rollout.wave_size=many", "rollout.wave_size: .*'many'"),
        ("rollout.wave_size=0", "rollout.wave_size: .*'0'"),
        ("rollout=3", "rollout: "),
        ("a..b=3", "unknown key a"),
    ],
)
def test_a_bad_field_is_one_line(item: str, words: str) -> None:
    with pytest.raises(BadInput, match=words) as error:
        read_config(None, [item])
    assert "\n" not in str(error.value)


def test_a_value_is_not_a_section() -> None:
    with pytest.raises(BadInput, match="seed is a value, not a section"):
        read_config(None, ["seed=3", "seed.x=4"])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "cannot read config"),
        (b"\xff\xfe\x00", "cannot read config"),
        (b"a: [", "cannot read config"),
        (b"", "holds NoneType, expected a map"),
        (b"- 1", "holds list, expected a map"),
        (b"rollout: 3", "rollout: "),
        (b"rolout: {}", "unknown key rolout"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, data: bytes | None, words: str) -> None:
    path = tmp_path / "run.yaml"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(BadInput, match=words) as error:
        read_config(path, None)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_resume_changes_what_is_named_and_keeps_the_rest() -> None:
    frozen = RunConfig.parse({"run": "r1", "seed": 4, "rollout": {"wave_size": 8, "max_turns": 3}})
    changed = changed_config(frozen, read_fields(None, ["rollout.wave_size=16"], run="r1", steps=60))
    assert changed == frozen.model_copy(
        update={"steps": 60, "rollout": frozen.rollout.model_copy(update={"wave_size": 16})}
    )


def test_a_resume_is_checked_against_its_own_fields_not_against_defaults() -> None:
    """900 s of queueing do not fit into the default client deadline, but they fit into this run's."""
    frozen = RunConfig.parse({"run": "r1", "deadlines": {"client_s": 2000}})
    assert changed_config(frozen, read_fields(None, ["deadlines.queue_s=900"])).deadlines.queue_s == 900
    with pytest.raises(BadInput, match="client_s 2000 is less than queue 1900"):
        changed_config(frozen, read_fields(None, ["deadlines.queue_s=1900"]))
    with pytest.raises(BadInput, match=r"unknown key deadlines\.queue"):
        changed_config(frozen, read_fields(None, ["deadlines.queue=1"]))


def test_another_preset_takes_the_place_of_the_frozen_one() -> None:
    """Frozen, every field is given; had they won, the run would be named after a recipe that it does not follow."""
    given = {"format_error_penalty": 0.1, "clip_low": 0.3}
    frozen = RunConfig.parse(RunConfig.parse({"objective": {"preset": "grpo", **given}}).to_json())
    for name in sorted(PRESETS.keys() - {"gspo", "cispo"}):
        found = changed_config(frozen, read_fields(None, [f"objective.preset={name}", "objective.clip_high=0.5"]))
        assert found.objective == ObjectiveConfig(preset=name, clip_high=0.5, **given), name
    found = changed_config(frozen, read_fields(None, ["objective.preset=gspo"])).objective
    assert (found.loss, found.clip_low, found.clip_high) == ("gspo", 0.3, 4e-4)
    with pytest.raises(BadInput, match=r"normalize_std belongs to estimator grpo; rloo .*\(preset grpo sets"):
        changed_config(frozen, read_fields(None, ["objective.estimator=rloo"]))
    with pytest.raises(BadInput, match=r"objective.preset: Input should be 'rl360', .*\(got 'pppo'\)"):
        changed_config(frozen, read_fields(None, ["objective.preset=pppo"]))
