"""Keys are part of the stored format; a run's name can neither leave its folder nor be another's."""

from __future__ import annotations

import pytest

from rl360.errors import BadInput
from rl360.store import layout


def test_the_documented_keys() -> None:
    assert layout.run_config_key("r1") == "r1/config.json"
    assert layout.step_key("r1", 7, "train.json") == "r1/steps/000007/train.json"
    assert layout.attempts_prefix("r1", 7, 2) == "r1/steps/000007/attempts/0002/"
    assert layout.attempts_key("r1", 7, 2, 14) == "r1/steps/000007/attempts/0002/000014.msgpack"
    assert layout.merged_key("r1", 7, 2, "s000007-g000-a00-t0") == (
        "r1/steps/000007/merged/0002/s000007-g000-a00-t0.msgpack"
    )
    assert layout.wave_key("r1", 7, 2) == "r1/steps/000007/waves/0002.msgpack"
    assert layout.manifest_key("r1", 7, "roll_out-0001") == "r1/steps/000007/manifests/roll_out-0001.json"
    assert layout.checkpoint_prefix("r1", 7) == "r1/checkpoints/000007/"


def test_keys_sort_as_their_numbers() -> None:
    steps = [0, 9, 10, 99, 100, 12_345, 999_999]
    keys = [layout.step_prefix("r1", step) for step in steps]
    assert keys == sorted(keys)


@pytest.mark.parametrize("run", ["r1", "0a", "demo-s0-1", "a" * 41])
def test_good_names(run: str) -> None:
    assert layout.check_run(run) == run


@pytest.mark.parametrize("run", ["", "a", "-ab", "A1", "a_b", "a/b", "../x", "a b", "a" * 42, "r1\n", "é1"])
@pytest.mark.parametrize("key", [layout.check_run, layout.run_config_key, lambda run: layout.step_key(run, 0, "x")])
def test_bad_names_are_one_line(key: object, run: str) -> None:
    with pytest.raises(BadInput, match=r"run name .*: use 2 to 41") as error:
        key(run)  # type: ignore[operator]
    assert "\n" not in str(error.value)
