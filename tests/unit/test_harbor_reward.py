"""Reading what a verifier wrote: a reward, nothing, or an error; never a guess."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rl360.harbor.verifier import MAX_REWARD_BYTES, RewardError, read_reward


@pytest.mark.parametrize(
    ("text", "reward"), [("1\n", 1.0), ("0", 0.0), (" 0.25 \n", 0.25), ("-1", -1.0), ("1e-3", 1e-3), (".5", 0.5)]
)
def test_text(tmp_path: Path, text: str, reward: float) -> None:
    (tmp_path / "reward.txt").write_text(text)
    assert read_reward(tmp_path) == reward


@pytest.mark.parametrize("text", ["", "nan", "inf", "-Infinity", "true", "1 2", "1e999", "0x1", "1_0", "\u0661", "{}"])
def test_text_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "reward.txt").write_text(text)
    with pytest.raises(RewardError, match=r"reward\.txt"):
        read_reward(tmp_path)


@pytest.mark.parametrize("text", ['{"reward": 1}', '{"reward": 1.0, "tests": {"a": 0}}'])
def test_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "reward.json").write_text(text)
    (tmp_path / "reward.txt").write_text("0")
    assert read_reward(tmp_path) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        *("", "1", "NaN", '{"reward": NaN}', '{"reward": Infinity}', '{"reward": true}', '{"reward": "1"}', "[1]"),
        *('{"score": 1}', '{"reward": 1e999}', "{", '{"reward": null}', "[" * 50_000, '{"reward": 1' + "0" * 400 + "}"),
    ],
)
def test_json_refused_even_beside_a_good_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "reward.json").write_text(text)
    (tmp_path / "reward.txt").write_text("1")
    with pytest.raises(RewardError, match=r"reward\.json"):
        read_reward(tmp_path)


def test_nothing(tmp_path: Path) -> None:
    assert read_reward(tmp_path) is None


def test_planted_kinds_are_refused(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_text("1")
    folder = tmp_path / "logs"
    folder.mkdir()
    reward = folder / "reward.txt"
    reward.symlink_to(target)
    with pytest.raises(RewardError, match="plain file"):
        read_reward(folder)
    reward.unlink()
    os.link(target, reward)
    with pytest.raises(RewardError, match="one name"):
        read_reward(folder)
    reward.unlink()
    os.mkfifo(reward)
    with pytest.raises(RewardError, match="regular file"):
        read_reward(folder)
    reward.unlink()
    reward.mkdir()
    with pytest.raises(RewardError, match="regular file"):
        read_reward(folder)


def test_size_cap(tmp_path: Path) -> None:
    (tmp_path / "reward.txt").write_text("1" + " " * MAX_REWARD_BYTES)
    with pytest.raises(RewardError, match="limit"):
        read_reward(tmp_path)


def test_linked_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(OSError, match="Not a directory"):
        read_reward(tmp_path / "link")
