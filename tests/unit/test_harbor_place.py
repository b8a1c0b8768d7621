"""`rl360 harbor setup`: what is there already, what is made again, and what it cannot be made with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rl360.errors import BadInput
from rl360.harbor.real import place


def test_an_environment_of_other_versions_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    for stamp in (None, "of others"):
        if stamp:
            (tmp_path / place.STAMP).write_text(stamp)
        with pytest.raises(BadInput, match="run `rl360 harbor setup`"):
            place.require_ready(tmp_path)
    (tmp_path / place.STAMP).write_text(place._wanted())
    place.require_ready(tmp_path)
    assert place.make(tmp_path, "no-such-python") == (False, tmp_path)
    monkeypatch.setattr(place, "REQUIREMENTS", tmp_path / "requirements.txt")
    (tmp_path / "requirements.txt").write_text("harbor==9\n")
    assert not place.ready(tmp_path)


@pytest.mark.parametrize(("python", "words"), [("no-such-python", "is not there"), (sys.executable, "is Python 3.11")])
def test_it_needs_its_own_python(tmp_path: Path, python: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        place.make(tmp_path / "new", python)
    assert not (tmp_path / "new").exists()


def test_the_versions_are_pinned() -> None:
    lines = [line for line in place.REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    assert all("==" in line for line in lines)
    assert {"harbor==0.26.0", "mini-swe-agent==2.4.6"} <= set(lines)
