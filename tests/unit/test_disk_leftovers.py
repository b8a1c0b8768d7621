"""Files of a push by disk: at its first push a trainer deletes what an earlier process of the run left."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl360.weights.delta import StoreFolder
from rl360.weights.transports import disk
from rl360.weights.transports.disk import DiskTransport
from tests.unit.memory_store import MemoryStore

KEPT = ["demo/00000003/full/a", "demo/00000007/full/a", "demo/notes/a", "other/00000001/full/a"]
LEFT = ["demo/00000001/full/a", "demo/00000002/demo-1/a"]


def test_of_a_shared_folder(tmp_path: Path) -> None:
    """The last version before stays, as do versions that a run resumed from an older checkpoint will write again."""
    for name in KEPT + LEFT:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    DiskTransport()._sweep(f"{tmp_path}/demo/00000005")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("a")) == KEPT
    DiskTransport()._sweep(f"{tmp_path}/new/00000001")


def test_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    store.objects = dict.fromkeys([f"w/{name}" for name in KEPT + LEFT], b"")
    opened = lambda url: StoreFolder(store, url.removeprefix("s3://b/"))  # type: ignore[arg-type]  # noqa: E731
    monkeypatch.setattr(disk, "open_folder", opened)
    DiskTransport()._sweep("s3://b/w/demo/00000005")
    assert sorted(store.objects) == [f"w/{name}" for name in KEPT]


def test_a_store_that_does_not_answer_costs_no_push(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    store.down = True
    monkeypatch.setattr(disk, "open_folder", lambda url: StoreFolder(store, "w"))  # type: ignore[arg-type]
    DiskTransport()._sweep("s3://b/w/demo/00000005")
    assert "are not looked for" in caplog.text
