"""Host directories of attempts: copies, hostile trees and tars."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rl360.errors import BadInput
from rl360.sandboxes import cgroups
from rl360.sandboxes.bubblewrap import safe_name
from rl360.sandboxes.rooted import copy_tree, publish_tree
from rl360.sandboxes.workspace import remove_tree, tree_bytes


def test_copy_keeps_content_links_and_scripts(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "Dockerfile").write_text("FROM x")
    (source / "deep" / "Dockerfile").write_text("mine")
    (source / "run.sh").write_text("echo")
    (source / "run.sh").chmod(0o700)
    (source / "deep" / "er" / "f").write_bytes(b"\0x")
    (source / "secret").symlink_to("/etc/hostname")
    (source / "dirlink").symlink_to("deep")
    old = os.umask(0o077)
    try:
        copy_tree(source, tmp_path / "t", None, skip=frozenset({"Dockerfile"}))
    finally:
        os.umask(old)
    made = tmp_path / "t"
    assert not (made / "Dockerfile").exists() and (made / "deep" / "Dockerfile").read_text() == "mine"
    assert (made / "deep" / "er" / "f").read_bytes() == b"\0x"
    assert (made / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (made / "deep").stat().st_mode & 0o777 == 0o755
    assert (made / "secret").readlink() == Path("/etc/hostname") and (made / "dirlink").is_symlink()


def test_copy_refuses_devices(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    os.mkfifo(tmp_path / "s" / "pipe")
    with pytest.raises(BadInput, match="neither"):
        copy_tree(tmp_path / "s", tmp_path / "t", None)


def test_publish_is_made_once(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "f").write_text("1")
    publish_tree(tmp_path / "s", tmp_path / "shared" / "d")
    (tmp_path / "s" / "f").write_text("2")
    publish_tree(tmp_path / "s", tmp_path / "shared" / "d")
    assert (tmp_path / "shared" / "d" / "f").read_text() == "1"
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["d"]


def test_publish_by_many_at_once(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    for name in range(50):
        (tmp_path / "s" / str(name)).write_text("1")
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(publish_tree, tmp_path / "s", tmp_path / "shared" / "d") for _ in range(16)]:
            done.result()
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["d"]
    assert len(list((tmp_path / "shared" / "d").iterdir())) == 50


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


def test_tree_bytes_counts_disk_and_stops(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 10_000)
    (tmp_path / "l").symlink_to("/usr")
    assert 10_000 <= tree_bytes(tmp_path, 1 << 20) < 40_000
    assert tree_bytes(tmp_path, 100) > 100


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
