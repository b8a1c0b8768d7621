"""Tars that come out of a sandbox: nothing in them reaches outside their folder, whatever order it stands in."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rl360.sandboxes.providers import tars
from rl360.sandboxes.providers.tars import Hostile, Part, pack, unpack

MB = 1 << 20


def tar_of(*entries: tuple[str, bytes | str | None, bytes]) -> io.BytesIO:
    """(name, content or link, type)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content, kind in entries:
            info = tarfile.TarInfo(name)
            info.type = kind
            if isinstance(content, str):
                info.linkname = content
            data = content if isinstance(content, bytes) else b""
            info.size = len(data) if kind == tarfile.REGTYPE else 0
            archive.addfile(info, io.BytesIO(data))
    out.seek(0)
    return out


DIR, REG, SYM, LNK, FIFO = tarfile.DIRTYPE, tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE


@pytest.mark.parametrize(
    "entries",
    [
        [("app/../../escaped", b"x", REG)],
        [("app/a/../../../escaped", b"x", REG)],
        [("app/l", "../outside", SYM), ("app/l/escaped", b"x", REG)],
        [("app/f", b"x", REG), ("app/f/escaped", b"x", REG)],
        [("app/h", "app/../../outside/secret", LNK)],
        [("app/h", "/etc/passwd", LNK)],
        [("app/l", "/etc", SYM), ("app/h", "app/l/passwd", LNK)],
        [("app/l", "../outside", SYM), ("app/l/escaped", "x", SYM)],
        [("app/l", "../outside", SYM), ("app/l/deep/escaped", "x", SYM)],
        [("app/l", "../outside", SYM), ("app/f", b"x", REG), ("app/l/escaped", "app/f", LNK)],
        [("app/" + "d/" * 200 + "f", b"x", REG)],
        [("app/" + "x" * 300, b"x", REG)],
    ],
    ids=[
        "dots",
        "deep-dots",
        "through-link",
        "through-file",
        "hard-dots",
        "hard-absolute",
        "hard-link",
        "link-under-link",
        "folder-under-link",
        "hard-under-link",
        "deep",
        "long",
    ],
)
def test_names_that_lead_outside_are_refused(
    tmp_path: Path, entries: list[tuple[str, bytes | str | None, bytes]]
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("s")
    with pytest.raises(Hostile):
        unpack(tar_of(*entries), tmp_path / "in", MB)
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["secret"]
    assert all("in" in path.relative_to(tmp_path).parts[:1] for path in tmp_path.rglob("escaped"))
    assert os.stat(tmp_path / "outside" / "secret").st_nlink == 1


def test_links_stay_links_and_devices_are_left_out(tmp_path: Path) -> None:
    made = tar_of(
        ("app", None, DIR),
        ("app/l", "/etc/passwd", SYM),
        ("app/f", b"one", REG),
        ("app/f", b"two", REG),
        ("app/h", "app/f", LNK),
        ("app/p", None, FIFO),
    )
    unpack(made, tmp_path / "in", MB)
    assert (tmp_path / "in" / "l").readlink() == Path("/etc/passwd")
    assert (tmp_path / "in" / "f").read_bytes() == (tmp_path / "in" / "h").read_bytes() == b"two"
    assert not (tmp_path / "in" / "p").exists()


def test_limits_are_counted_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Hostile, match="more than 1 MB"):
        unpack(tar_of(*((f"app/{n}", b"x" * 400_000, REG) for n in range(3))), tmp_path / "in", MB)
    monkeypatch.setattr(tars, "MAX_FILES", 20)
    with pytest.raises(Hostile):
        unpack(tar_of(*((f"app/{n}", b"", REG) for n in range(21))), tmp_path / "many", MB)
    whole = tar_of(("app/f", b"x" * 5000, REG)).getvalue()
    with pytest.raises(tarfile.TarError):
        unpack(io.BytesIO(whole[:2000]), tmp_path / "cut", MB)
    with pytest.raises(tarfile.TarError):
        unpack(io.BytesIO(b"no tar at all" * 100), tmp_path / "none", MB)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_what_this_host_lacks_is_nobodys_tar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    data = tar_of(("app/f", b"x", REG))

    def fails(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fails)
        with pytest.raises(OSError, match=os.strerror(code)):
            unpack(data, tmp_path / "in", MB)


@pytest.mark.parametrize(
    "entries",
    [
        [("app/h", "app/none", LNK)],
        [("app/d/f", b"x", REG), ("app/h", "app/d", LNK)],
        [("app/d/f", b"x", REG), ("app/d", b"x", REG)],
        [("app/f", b"x", REG), ("app/f", None, DIR)],
        [("app/l", "x", SYM), ("app/l", "y", SYM)],
        [("app/l", "", SYM)],
        [("app/l", "x" * 5000, SYM)],
    ],
    ids=["none", "of-folder", "file-for-folder", "folder-for-file", "twice", "empty", "long"],
)
def test_names_that_cannot_be_are_the_tars_doing(tmp_path: Path, entries: list) -> None:
    with pytest.raises(Hostile, match="cannot be unpacked"):
        unpack(tar_of(*entries), tmp_path / "in", MB)


def test_what_is_packed_is_unpacked(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "deep" / "er" / "f").write_bytes(b"\0x")
    (source / "run.sh").write_text("echo")
    (source / "run.sh").chmod(0o755)
    (source / "l").symlink_to("deep")
    out = io.BytesIO()
    pack([Part(source, "/app/x", 7), Part(source, "/tests", 0, writable=False)], out, roots=True)
    out.seek(0)
    with tarfile.open(fileobj=out) as archive:
        found = {member.name: member for member in archive}
    assert {"app", "app/x", "tests", "app/x/deep/er/f", "tests/l"} <= found.keys()
    assert (found["app"].uid, found["app/x"].uid, found["app/x/deep/er/f"].uid, found["tests/l"].uid) == (0, 7, 7, 0)
    assert found["tests/run.sh"].mode == 0o555 and found["app/x/run.sh"].mode == 0o755
    out.seek(0)
    unpack(out, tmp_path / "all", MB, 0)
    assert (tmp_path / "all" / "app" / "x" / "deep" / "er" / "f").read_bytes() == b"\0x"
    assert (tmp_path / "all" / "app" / "x" / "l").is_symlink()
    bare = io.BytesIO()
    pack([Part(source, "/app/x", 7)], bare, roots=False)
    bare.seek(0)
    with tarfile.open(fileobj=bare) as archive:
        assert {"app", "app/x"}.isdisjoint(archive.getnames())


NAMES = st.lists(st.sampled_from(["a", "b", "..", ".", "", "c/d"]), min_size=1, max_size=4).map("/".join)
NESTED = st.sampled_from(["x/l", "x/l/a", "x/l/a/b"])  # so that names lie under one another, also under links
LINKS = st.sampled_from(["../outside", "x/l", "x/l/a"]) | NAMES
KINDS = st.sampled_from([DIR, REG, SYM, SYM, LNK, FIFO])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(NESTED | NAMES, LINKS, KINDS), max_size=6))
@example([("x/l", "../outside", SYM), ("x/l/a", "x", SYM)])
@example([("x/l/a/b", "x", SYM), ("x/l", "../outside", SYM)])
def test_no_order_of_entries_reaches_outside(tmp_path_factory: pytest.TempPathFactory, drawn: list) -> None:
    base = tmp_path_factory.mktemp("tar")
    (base / "a").write_text("mine")
    (base / "outside").mkdir()
    entries = [(name or "x", b"theirs" if kind == REG else link, kind) for name, link, kind in drawn]
    with contextlib.suppress(Hostile):
        unpack(tar_of(*entries), base / "in", MB)
    assert (base / "a").read_text() == "mine" and {path.name for path in base.iterdir()} <= {"a", "in", "outside"}
    assert os.stat(base / "a").st_nlink == 1 and not list((base / "outside").iterdir())
