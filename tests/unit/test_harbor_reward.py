"""Reading what a verifier wrote: a reward, nothing, or an error; never a guess."""

from __future__ import annotations

import os
import socket
import stat
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


def left_by(folder: Path, name: str, kind: str) -> None:
    """What a test.sh, or the agent's code that it ran, may leave under the name of a reward."""
    path, target = folder / name, folder.parent / "target"
    target.write_text('{"reward": 1}' if name.endswith("json") else "1")
    if kind == "link":
        path.symlink_to(target)
    elif kind == "broken link":
        path.symlink_to(folder / "nowhere")
    elif kind == "link to itself":
        path.symlink_to(path)
    elif kind == "second name":
        os.link(target, path)
    elif kind == "second name of its own":
        path.write_text(target.read_text())
        os.link(path, folder / "other")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.path.relpath(path))
    elif kind == "folder":
        path.mkdir()
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    elif kind == "just too large":
        path.write_bytes(target.read_bytes() + b" " * MAX_REWARD_BYTES)
    elif kind == "NUL":
        path.write_bytes(b"1\0")
    elif kind == "byte order mark":
        path.write_bytes(b"\xef\xbb\xbf" + target.read_bytes())
    else:
        path.write_bytes(b"\xff\xfe\x31")


KINDS = ["link", "broken link", "link to itself", "second name", "second name of its own", "fifo", "socket", "folder"]
KINDS += ["sparse", "just too large", "NUL", "byte order mark", "no text"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["reward.json", "reward.txt"])
def test_nothing_but_a_plain_file_is_a_reward(tmp_path: Path, name: str, kind: str) -> None:
    """Nor does what is wrong with the one make the other count."""
    folder = tmp_path / "logs"
    folder.mkdir()
    left_by(folder, name, kind)
    if name == "reward.json":
        (folder / "reward.txt").write_text("1")
    with pytest.raises(RewardError, match=name.replace(".", r"\.")):
        read_reward(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "reward.txt").write_text("1")
    (tmp_path / "reward.txt").chmod(0)
    with pytest.raises(RewardError, match=r"reward\.txt"):
        read_reward(tmp_path)


def test_a_device_is_none(tmp_path: Path) -> None:
    try:
        os.mknod(tmp_path / "reward.txt", stat.S_IFCHR | 0o666, os.makedev(1, 5))  # zeros without end
    except PermissionError:
        pytest.skip("only root makes devices")
    with pytest.raises(RewardError, match=r"reward\.txt"):
        read_reward(tmp_path)
