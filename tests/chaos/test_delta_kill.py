"""SIGKILL between any two acts on files, of the trainer that writes a version and of the host that applies it.

A child counts the acts (opening, renaming, linking, removing, syncing) under the test's folder and kills itself before
the n-th, for every n until it gets through. After each: the old version loads, the new one is whole or not there, and
doing it again ends well.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl360.engines.pull import Puller
from rl360.weights import delta
from rl360.weights.delta import Held, SharedFolder, Weights
from rl360.weights.messages import TensorSpec

pytestmark = pytest.mark.chaos

SHARD = 400
_ACTS = ("open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")


def weights(seed: int) -> dict[str, Held]:
    rng = np.random.default_rng(seed)
    return {
        f"t{i}": Held(TensorSpec(name=f"t{i}", shape=(10, 10)), rng.integers(0, 256, 200, dtype=np.uint8))
        for i in range(6)
    }


def contents(held: Weights) -> dict[str, bytes]:
    return {name: each.data.tobytes() for name, each in held.items()}


def dies_before(act: int, folder: Path, work: Callable[[], Any]) -> bool:
    """Run `work` in a child that kills itself before its `act`-th act on files of `folder`. False: it got through."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def seen(_path: object = "") -> None:
            nonlocal count
            count += 1
            if count == act:
                os.kill(os.getpid(), signal.SIGKILL)

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if event in _ACTS and str(args[0]).startswith(str(folder)):
                seen()

        original = os.fsync

        def syncing(fd: Any) -> None:
            seen()
            original(fd)

        os.fsync = syncing  # between the bytes of a file and the proof that they are on the disk
        sys.addaudithook(hook)
        delta._THREADS = 1
        try:
            work()
        except BaseException:  # the parent is told by the exit code alone
            os._exit(9)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the work failed by itself"
    return False


def at_every_act(folder: Path, work: Callable[[], Any], check: Callable[[], None], undo: Callable[[], None]) -> int:
    for act in range(1, 500):
        if not dies_before(act, folder, work):
            return act
        check()
        undo()
    raise AssertionError("no end of acts")


def test_killed_while_applying(tmp_path: Path) -> None:
    old, new = weights(1), weights(2)
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")
    delta.write_version(SharedFolder(tmp_path / "v1"), old, "r1:1")
    delta.write_version(SharedFolder(tmp_path / "v2"), new, "r1:2", old, "r1:1", shard_bytes=SHARD)
    puller = Puller(tmp_path / "weights", tmp_path / "model")
    puller._pull(str(tmp_path / "v1"), "r1:1", None, ())
    one, two = puller.folder_of("r1:1"), puller.folder_of("r1:2")
    told = delta.read_version(SharedFolder(tmp_path / "v2"))
    whole = []

    def pull() -> None:
        puller._pull(str(tmp_path / "v2"), "r1:2", "r1:1", ("r1:1",))

    def check() -> None:
        assert contents(delta.open_tensors(one)) == contents(old) and (one / "config.json").exists()
        assert delta.version_of(one) == "r1:1"
        if two.exists():
            assert delta.holds(two, told) and (two / "tokenizer.json").exists()
            whole.append(True)

    def undo() -> None:
        pull()  # again, over whatever the killed one left
        assert contents(delta.open_tensors(two)) == contents(new)
        assert sorted(path.name for path in puller.root.iterdir()) == ["r1-1", "r1-2"]
        for path in two.iterdir():
            path.unlink()
        two.rmdir()

    acts = at_every_act(tmp_path / "weights", pull, check, undo)
    assert acts > 20 and len(told.shards) == 3
    assert 0 < len(whole) < acts - 1  # it was killed on both sides of the rename


def test_killed_while_writing(tmp_path: Path) -> None:
    old, new = weights(1), weights(2)
    files = SharedFolder(tmp_path / "v2")
    (tmp_path / "model").mkdir()
    delta.write_version(SharedFolder(tmp_path / "v1"), old, "r1:1")
    delta.apply(tmp_path / "model", SharedFolder(tmp_path / "v1"), tmp_path / "one")
    committed = []

    def write() -> None:
        delta.write_version(files, new, "r1:2", old, "r1:1", shard_bytes=SHARD)

    def check() -> None:
        told = delta.find_version(files)
        committed.append(told is not None)
        if told is not None:
            delta.apply(tmp_path / "one", files, tmp_path / f"two-{len(committed)}")
        else:
            with pytest.raises(delta.CorruptObject, match="not to its end"):
                delta.apply(tmp_path / "one", files, tmp_path / "two")

    def undo() -> None:
        write()  # the trainer is started again and writes the same version
        into = tmp_path / f"again-{len(committed)}"
        delta.apply(tmp_path / "one", files, into)
        assert contents(delta.open_tensors(into)) == contents(new)
        files.delete_all()

    acts = at_every_act(tmp_path / "v2", write, check, undo)
    assert acts > 10
    assert committed == sorted(committed)  # the manifest came last
    assert {True, False} == set(committed)
