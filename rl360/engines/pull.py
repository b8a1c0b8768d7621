"""Versions of the weights as directories on an engine's host: fetched, checked and applied before an engine loads one.

One folder a version, made by `rl360.weights.delta.apply`: whole and checked, or not there. One pull at a time; a pull
that is asked for again while it runs is joined, one that was done before is checked and not made again.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from rl360.engines.client import Pulled
from rl360.errors import CorruptObject
from rl360.weights import delta
from rl360.weights.messages import parse_version


class Puller:
    """`root` is this engine's alone; `model_dir` has the config files that a version lacks and its base misses."""

    def __init__(self, root: Path, model_dir: Path) -> None:
        self.root, self.model_dir = root, model_dir
        self._running: dict[tuple[str, str, str | None], asyncio.Task[Pulled]] = {}
        self._turn = asyncio.Lock()

    def folder_of(self, version: str) -> Path:
        parse_version(version)  # a version names a folder: nothing else may
        return self.root / version.replace(":", "-")

    async def pull(self, folder: str, version: str, base_version: str | None, keep: Collection[str] = ()) -> Pulled:
        """The directory of `version`, of the files in `folder`. `WrongBase` when the base is not held here."""
        key = (folder, version, base_version)
        task = self._running.get(key)
        if task is None:
            task = asyncio.create_task(self._one(folder, version, base_version, keep))
            self._running[key] = task
            task.add_done_callback(lambda _: self._running.pop(key, None))
        return await asyncio.shield(task)  # a caller that leaves does not undo the work

    async def _one(self, folder: str, version: str, base_version: str | None, keep: Collection[str]) -> Pulled:
        async with self._turn:
            return await asyncio.to_thread(self._pull, folder, version, base_version, keep)

    def _pull(self, folder: str, version: str, base_version: str | None, keep: Collection[str]) -> Pulled:
        began = time.monotonic()
        into = self.folder_of(version)
        base = self.model_dir if base_version is None else self.folder_of(base_version)
        if not base.is_dir():
            raise delta.WrongBase(f"{base_version} is not held here ({base} is missing)")
        self._sweep({into, *(self.folder_of(each) for each in keep)})
        files = delta.open_folder(folder)
        told = delta.read_version(files)
        if (told.version, told.base_version) != (version, base_version):
            raise CorruptObject(
                f"{folder}/{delta.MANIFEST}",
                f"is {told.version} on {told.base_version}, asked for {version} on {base_version}",
            )
        if not delta.holds(into, told):
            shutil.rmtree(into, ignore_errors=True)  # damaged since: no engine loads it
            delta.apply(base, files, into)
        return Pulled(str(into), told.size_bytes, round(time.monotonic() - began, 6))

    def _sweep(self, kept: Collection[Path]) -> None:
        """Remove other versions, and what killed pulls left; whatever else is there is somebody's."""
        for path in self.root.iterdir() if self.root.is_dir() else ():
            if path not in kept and (delta.is_version(path) or delta.is_unfinished(path)):
                shutil.rmtree(path, ignore_errors=True)
