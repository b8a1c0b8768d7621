"""Host directories of attempts: copies, hostile trees and tars."""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from rl360.errors import BadInput
from rl360.harbor.dockerfile import tree_files
from rl360.harbor.task import tree_digest
from rl360.sandboxes import cgroups, rooted, workspace
from rl360.sandboxes.bubblewrap import safe_name
from rl360.sandboxes.provider import Sandbox, SandboxGone
from rl360.sandboxes.rooted import Rooted, copy_files, held_bytes, publish_tree, tree_bytes
from rl360.sandboxes.workspace import remove_tree

MB = 1 << 20


def test_copy_keeps_content_links_and_scripts(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "deep" / "Dockerfile").write_text("mine")
    (source / "run.sh").write_text("echo")
    (source / "run.sh").chmod(0o700)
    (source / "deep" / "er" / "f").write_bytes(b"\0x")
    (source / "secret").symlink_to("/etc/hostname")
    (source / "dirlink").symlink_to("deep")
    old = os.umask(0o077)
    try:
        copy_files(tree_files(source), tmp_path / "t", None)
    finally:
        os.umask(old)
    made = tmp_path / "t"
    assert (made / "deep" / "Dockerfile").read_text() == "mine"
    assert (made / "deep" / "er" / "f").read_bytes() == b"\0x"
    assert (made / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (made / "deep").stat().st_mode & 0o777 == 0o755
    assert (made / "secret").readlink() == Path("/etc/hostname") and (made / "dirlink").is_symlink()


def test_copy_refuses_devices(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    os.mkfifo(tmp_path / "s" / "pipe")
    with pytest.raises(BadInput, match="neither"):
        copy_files(tree_files(tmp_path / "s"), tmp_path / "t", None)


def tree_of(folder: Path, text: str) -> tuple[Path, Path]:
    """A tree, and where its copy belongs."""
    (folder / "s").mkdir(exist_ok=True)
    (folder / "s" / "f").write_text(text)
    return folder / "s", folder / "shared" / tree_digest(folder / "s")


def test_publish_is_made_once(tmp_path: Path) -> None:
    source, target = tree_of(tmp_path, "1")
    publish_tree(source, target)
    (source / "f").write_text("2")
    publish_tree(source, target)
    assert (target / "f").read_text() == "1"
    assert list((tmp_path / "shared").iterdir()) == [target]


def test_what_is_published_has_its_digest(tmp_path: Path) -> None:
    source, target = tree_of(tmp_path, "1")
    (source / "f").write_text("2")
    with pytest.raises(BadInput, match="changed since the attempt was asked for"):
        publish_tree(source, target)
    assert list((tmp_path / "shared").iterdir()) == []
    shutil.copytree(source, target)  # left by whomever
    (source / "f").write_text("1")
    publish_tree(source, target)
    assert (target / "f").read_text() == "1" and list((tmp_path / "shared").iterdir()) == [target]


def test_a_publish_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tree_of(tmp_path, "1")

    def full(_source: object, made: Path, *_: object) -> None:
        made.mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rooted, "copy_files", full)
    with pytest.raises(OSError, match="No space left"):
        publish_tree(source, target)
    assert list((tmp_path / "shared").iterdir()) == []


def test_publish_by_many_at_once(tmp_path: Path) -> None:
    source, target = tree_of(tmp_path, "1")
    for name in range(50):
        (source / str(name)).write_text("1")
    target = tmp_path / "shared" / tree_digest(source)
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(publish_tree, source, target) for _ in range(16)]:
            done.result()
    assert list((tmp_path / "shared").iterdir()) == [target]
    assert len(list(target.iterdir())) == 51


def test_remove_follows_no_link_and_survives_hostile_trees(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_text("x")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "link").symlink_to(outside)
    folder = os.open(tree, os.O_RDONLY)
    for _ in range(400):  # deeper than we recurse and than a path name may be
        os.mkdir("d" * 20, dir_fd=folder)
        below = os.open("d" * 20, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(folder)
    (tree / "shut").mkdir()
    (tree / "shut" / "f").write_text("x")
    (tree / "shut").chmod(0)
    assert remove_tree(tree) is None
    assert not tree.exists() and (outside / "keep").exists()
    assert remove_tree(tree) is None


def test_many_files_are_deleted_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "MAX_HERE", 10)
    for name in range(30):
        (tmp_path / "t" / f"d{name % 3}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "t" / f"d{name % 3}" / str(name)).write_text("x")
    assert remove_tree(tmp_path / "t") is None and not (tmp_path / "t").exists()


def test_tree_bytes_counts_disk_and_stops(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 10_000)
    (tmp_path / "l").symlink_to("/usr")
    assert 10_000 <= tree_bytes(tmp_path, 1 << 20) < 40_000
    assert tree_bytes(tmp_path, 100) > 100


def test_no_path_hides_what_is_stored(tmp_path: Path) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(25):  # beyond the longest path there is
        os.mkdir("d" * 200, dir_fd=here)
        here = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
    os.write(os.open("f", os.O_WRONLY | os.O_CREAT, dir_fd=here), b"x" * MB)
    assert MB <= tree_bytes(tmp_path, 2 * MB) < 2 * MB and tree_bytes(tmp_path, MB // 2) > MB // 2
    for _ in range(90):
        os.mkdir("d", dir_fd=here)
        here = os.open("d", os.O_RDONLY, dir_fd=here)
    assert tree_bytes(tmp_path, 2 * MB) > 2 * MB, "too many levels"
    assert remove_tree(tmp_path / ("d" * 200)) is None


def test_what_goes_while_it_is_counted_hides_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in range(20):
        (tmp_path / f"d{name}").mkdir()
        (tmp_path / f"d{name}" / "f").write_bytes(b"x" * 100_000)
    opened = os.open

    def removing(path: Any, *args: Any, **more: Any) -> int:
        if path == "d7":
            shutil.rmtree(tmp_path / "d7")
        return opened(path, *args, **more)

    monkeypatch.setattr(os, "open", removing)
    assert 1_900_000 <= tree_bytes(tmp_path, 1 << 30) < 2_100_000


def test_what_is_held_open_or_mapped_without_a_name_is_counted(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    before = held_bytes([os.getpid()], device)  # by who runs this
    with (tmp_path / "f").open("wb+") as file, (tmp_path / "g").open("wb+") as named:
        file.write(b"x" * MB), named.write(b"x" * MB), file.flush(), named.flush()
        os.unlink(tmp_path / "f")
        assert MB <= held_bytes([os.getpid()], device) - before < 2 * MB
        assert held_bytes([os.getpid()], device + 1) == held_bytes([0, 1 << 30], device) == 0
        mapped = mmap.mmap(file.fileno(), 4096)
    if os.geteuid() == 0:
        assert MB <= held_bytes([os.getpid()], device, strict=True) - before < 2 * MB
    mapped.close()
    assert held_bytes([os.getpid()], device, strict=True) == before


def emptied(folder: Path) -> None:
    give_up_at = time.monotonic() + 10
    while any(folder.iterdir()):
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def test_a_setup_that_is_given_up_waits_for_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, fill = threading.Event(), Rooted._fill

    def slow(self: Rooted, *given: Any) -> None:
        go_on.wait(20)
        fill(self, *given)

    monkeypatch.setattr(Rooted, "_fill", slow)

    async def go() -> None:
        provider, started = Rooted(tmp_path, None), time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await provider.new_workspace("a", None)
        assert time.monotonic() - started < 5
        assert list((tmp_path / "live").iterdir()) == []
        go_on.set()
        await asyncio.to_thread(emptied, tmp_path / "trash")
        await asyncio.get_running_loop().shutdown_default_executor()
        assert list((tmp_path / "live").iterdir()) == [], "what was discarded does not come back"
        provider.close()

    asyncio.run(go())


def test_what_comes_after_its_attempts_end_is_not_measured(tmp_path: Path) -> None:
    class Late:
        def pids(self) -> list[int]:
            return []

    async def go() -> None:
        provider = Rooted(tmp_path, None)
        meter = provider.meter(await provider.new_workspace("a", None), 10)
        meter.close()
        with pytest.raises(SandboxGone, match="the attempt is over"):
            await meter.exec(cast(Sandbox, Late()), "true", 1.0)
        assert not provider._disk.meters
        provider.close()

    asyncio.run(go())


def test_an_rm_that_no_signal_ends_keeps_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "chmod").write_text("#!/bin/sh\nexec /bin/sleep 6\n")
    (tmp_path / "bin" / "chmod").chmod(0o755)
    (tmp_path / "t").mkdir()
    monkeypatch.setattr(workspace, "MAX_HERE", 0)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    (tmp_path / "t" / "f").touch()
    made, begin = list[subprocess.Popen[bytes]](), time.monotonic()
    monkeypatch.setattr(
        subprocess.Popen, "kill", lambda job: made.append(job) or None
    )  # as in the kernel, which only this stands for
    assert "t: not deleted: " in (remove_tree(tmp_path / "t", 0.2) or "")
    assert time.monotonic() - begin < 4
    assert made[0].wait(10) == 0


def test_deleting_is_nobodys_wait_and_is_gone_on_with_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(rooted, "CLOSE_S", 0.1)
    monkeypatch.setattr(rooted, "remove_tree", lambda path, *_: (go_on.wait(20), remove_tree(path))[1])

    async def go() -> None:
        provider = Rooted(tmp_path, None)
        made = [await provider.new_workspace(str(n), None) for n in range(4)]
        assert [await provider.remove_workspace(item) for item in made] == [None] * 4
        assert list((tmp_path / "live").iterdir()) == [] and not any(item.deleting[0].done() for item in made)
        assert await provider.remove_workspace(made[0]) is None
        provider.close()
        os.mkdir(tmp_path / "trash" / "left")
        again = Rooted(tmp_path, None)
        assert again._bin._asked.empty(), "whoever only looks deletes nothing"
        again._reap_trash()
        go_on.set()
        await asyncio.to_thread(emptied, tmp_path / "trash")
        assert len(again.reaped) == 5 and {end.result(20) for end in again.reaped} == {None}
        again.close()

    asyncio.run(go())


def test_names_stay_unique_and_plain() -> None:
    names = {safe_name(text) for text in ("a/b", "a_b", "a b", "../..", "x" * 300, "x" * 299)}
    assert len(names) == 6
    assert all("/" not in name and "." not in name and len(name) < 100 for name in names)


def test_groups_of_two_servers_have_no_name_in_common(tmp_path: Path) -> None:
    roots = [tmp_path / home / "sandboxes" / port for home in ("one", "two") for port in ("13300", "13301")]
    prefixes = [cgroups.prefix(root) for root in roots]
    assert len(set(prefixes)) == 4 and all(name.startswith("rl360-") and "/" not in name for name in prefixes)
    assert all(len(name + safe_name("x" * 300)) < 255 for name in prefixes)
    (tmp_path / "one").mkdir()
    (tmp_path / "link").symlink_to("one")  # the same server, started again by another path
    assert cgroups.prefix(tmp_path / "link" / "sandboxes" / "13300") == prefixes[0]


def test_mapped_libraries_are_no_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a low disk mappings are looked at too; only descriptors, without end, are over."""
    few = len(os.listdir("/proc/self/fd")) + 5
    monkeypatch.setattr("rl360.sandboxes.rooted.MAX_FILES", few)
    assert len(Path("/proc/self/maps").read_text().splitlines()) > few, "nothing is shown otherwise"
    assert held_bytes([os.getpid()], os.stat(tmp_path).st_dev, strict=True) < sys.maxsize
    monkeypatch.setattr("rl360.sandboxes.rooted.MAX_FILES", 1)
    assert held_bytes([os.getpid()], os.stat(tmp_path).st_dev) == sys.maxsize
