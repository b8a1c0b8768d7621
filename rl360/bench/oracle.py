"""The row `oracle_sweep` of `rl360 bench sandboxes`: each task of a folder is run twice in real sandboxes, with its
oracle and with nothing done; all must discriminate, and no process, folder or cgroup of theirs may be left."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rl360.bench.rows import Options, Row
from rl360.harbor.check import TaskCheck, check_tasks, task_dirs
from rl360.harbor.server import raise_open_files
from rl360.sandboxes import cgroups
from rl360.sandboxes.bubblewrap import ENV_NAME, BubblewrapProvider


def oracle_rows(options: Options) -> Iterator[Row]:
    """One row; none without `options.tasks`."""
    if options.tasks is None:
        options.say("oracle_sweep is left out: give --tasks DIR")
        return
    directories = task_dirs(options.tasks)[: 8 if options.quick else None]
    options.say(f"oracle_sweep: {len(directories)} tasks of {options.tasks}")
    raise_open_files()
    with tempfile.TemporaryDirectory(prefix="rl360-oracle-") as folder:
        provider = BubblewrapProvider(Path(folder))
        started = time.monotonic()
        try:
            results = asyncio.run(check_tasks(provider, directories, os.cpu_count() or 2))
            left = left_of(provider.root)
        finally:
            provider.close()
    yield sweep_row(results, left, time.monotonic() - started)


def sweep_row(results: list[TaskCheck], left: list[str], seconds: float) -> Row:
    bad = [result for result in results if result.problem is not None]
    good, count = len(results) - len(bad), len(results)
    notes = [f"{seconds:.0f} s, {2 * count} attempts", f"left behind: {', '.join(left) or 'nothing'}"]
    notes += [f"{result.task}: {result.problem}" for result in bad[:3]]
    goal = f"{count} of {count}, nothing left"
    return Row("oracle_sweep", None, good, "tasks", goal, not bad and not left, "; ".join(notes))


def left_of(root: Path) -> list[str]:
    """What sandboxes of a provider's folder left: attempts' folders, processes, cgroups."""
    found = [path.name for path in (root / "live").iterdir()]
    marker = f"{ENV_NAME}={root}/".encode()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if marker in Path("/proc", entry, "environ").read_bytes():
                found.append(f"pid {entry}")
        except OSError:
            continue  # ended meanwhile, or another user's
    own = cgroups.prefix(root)
    parents = {parent.parent for parent in cgroups.planned(f"{own}x").paths}
    return found + [str(path) for parent in parents if parent.is_dir() for path in parent.glob(f"{own}*")]
