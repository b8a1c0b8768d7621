"""Task sets and the data cursor.

A task set is a sorted collection of Harbor task directories: the builtin chores or any directory that holds such
directories. Broken or duplicate tasks are refused with one line each; none is skipped. The cursor `draw` has no
state: what step `k` draws follows from (seed, k, n) alone, so a resumed, replayed or forked run draws the same tasks.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rl360.errors import BadInput
from rl360.harbor.task import Task, load_task
from rl360.tasksets.harbor_files import BUILTIN_DIR

BUILTIN = {"builtin:chores": BUILTIN_DIR}
MAX_TASKS = 1_000_000


@dataclass(frozen=True)
class TaskEntry:
    """One task of a set: where it lies, which domain its reward counts for, whether an LLM gives it."""

    task_id: str
    path: Path
    domain: str
    judged: bool = False


@dataclass(frozen=True)
class TaskSet:
    """`entries` by task id, sorted; `digest` names ids, domains and instructions and verifiers, so that a changed set
    is noticed.
    """

    spec: str
    entries: Mapping[str, TaskEntry]
    digest: str

    @property
    def task_ids(self) -> list[str]:
        return list(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, task_id: str) -> TaskEntry:
        try:
            return self.entries[task_id]
        except KeyError:
            raise BadInput(f"task {task_id!r} is not in task set {self.spec} ({len(self)} tasks)") from None


def _root(spec: str) -> Path:
    if spec in BUILTIN:
        return BUILTIN[spec]
    if spec.startswith("builtin:"):
        raise BadInput(f"task set {spec!r} is unknown; builtin ones: {', '.join(BUILTIN)}")
    root = Path(spec).expanduser()
    if not root.is_dir():
        raise BadInput(
            f"task set {spec!r} is not a directory; give {' or '.join(BUILTIN)} or a directory of Harbor tasks"
        )
    return root.resolve()


def _domain(task: Task, default: str) -> str:
    """What the reward is reported by: `metadata.family` or `metadata.domain` of task.toml, else the set's own name."""
    for key in ("family", "domain"):
        if key in task.config.metadata:
            value = task.config.metadata[key]
            if not isinstance(value, str) or not value:
                raise BadInput(f"{task.path / 'task.toml'}: metadata.{key} = {value!r} is not a name; give a text")
            return value
    return default


def load_taskset(spec: str) -> TaskSet:
    """Load and check every task of `spec`: `builtin:chores` or a directory whose sub-directories are Harbor tasks."""
    root = _root(spec)
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not folders:
        raise BadInput(f"task set {spec!r} holds no task directory")
    if len(folders) > MAX_TASKS:
        raise BadInput(f"task set {spec!r} holds {len(folders)} tasks, the limit is {MAX_TASKS}; split it")
    found: dict[str, TaskEntry] = {}
    digest = hashlib.sha256()
    for folder in folders:
        task = load_task(folder)
        if task.id in found:
            raise BadInput(f"task {task.id!r} is there twice: {found[task.id].path} and {folder}; rename one")
        domain = _domain(task, root.name)
        entry = TaskEntry(task_id=task.id, path=folder, domain=domain, judged=task.judge is not None)
        found[task.id] = entry
        digest.update(f"{task.id}\0{entry.domain}\0{task.instruction}\0{task.verifier_digest}\n".encode())
    return TaskSet(spec=spec, entries=dict(sorted(found.items())), digest=digest.hexdigest())


@lru_cache(maxsize=8)
def _epoch_order(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(f"cursor:{seed}:{epoch}").shuffle(order)
    return tuple(order)


def draw(taskset: TaskSet, seed: int, step: int, n: int) -> list[str]:
    """Task ids of the `n` groups of `step`: positions step*n .. step*n+n-1 of an endless sequence of shuffled passes
    over the set.
    """
    if step < 0 or n < 1:
        raise BadInput(f"cannot draw {n} tasks for step {step}: the step is at least 0 and the number at least 1")
    ids, size = taskset.task_ids, len(taskset)
    return [
        ids[_epoch_order(size, seed, position // size)[position % size]] for position in range(step * n, step * n + n)
    ]
