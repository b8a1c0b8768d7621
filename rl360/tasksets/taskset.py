"""Task sets and the data cursor.

A task set is a sorted collection of Harbor task directories, wherever they come from (rl360.tasksets.sources). Broken
or duplicate tasks are refused with one line each; none is skipped. The cursor `draw` has no state: what step `k` draws
follows from (seed, k, n) alone, or with difficulty also from the results of earlier steps, so a resumed or replayed run
draws the same tasks.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from rl360.errors import BadInput
from rl360.harbor.dockerfile import tree_files
from rl360.harbor.task import Task, image_group, load_task
from rl360.tasksets.mix import domains_at, undecided
from rl360.tasksets.sources import folder_of

MAX_TASKS = 1_000_000


@dataclass(frozen=True)
class TaskEntry:
    """One task of a set: where it lies, which domain its reward counts for, whether an LLM gives it, its image group
    where it is not alone in one, the name of the source it is from."""

    task_id: str
    path: Path
    domain: str
    judged: bool = False
    image: str = ""
    source: str = ""


@dataclass(frozen=True)
class TaskSet:
    """`entries` by task id, sorted; `digest` names ids, domains, instructions, verifiers and what COPY lines leave out
    or put elsewhere, so that a changed set is noticed.
    """

    spec: str
    entries: Mapping[str, TaskEntry]
    digest: str

    @property
    def task_ids(self) -> list[str]:
        return list(self.entries)

    def by(self, part: Literal["domain", "source"]) -> dict[str, list[str]]:
        pools: dict[str, list[str]] = {}
        for task_id, entry in self.entries.items():
            pools.setdefault(entry.domain if part == "domain" else entry.source, []).append(task_id)
        return dict(sorted(pools.items()))

    def pools(self, weights: Mapping[str, float] | None) -> dict[str, list[str]]:
        """Task ids by what `weights` weigh: all domains, or all sources."""
        pools, sources = self.by("domain"), self.by("source")
        if weights and weights.keys() != pools.keys() and weights.keys() <= sources.keys():
            pools = sources
        if weights and (odd := weights.keys() ^ pools.keys()):
            said = ", ".join(f"{name} is {'missing' if name in pools else 'unknown'}" for name in sorted(odd))
            other = f", or each source ({', '.join(sources)})" if len(sources) > 1 else ""
            raise BadInput(f"taskset.weights: {said}; weigh each domain ({', '.join(self.by('domain'))}){other}")
        return pools

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, task_id: str) -> TaskEntry:
        try:
            return self.entries[task_id]
        except KeyError:
            raise BadInput(f"task {task_id!r} is not in task set {self.spec} ({len(self)} tasks)") from None


def _domain(task: Task, default: str) -> str:
    """What rewards are reported by: `metadata.domain` of task.toml, else `metadata.family`, else the source's name."""
    metadata = task.config.metadata
    key = next((key for key in ("domain", "family") if key in metadata), "domain")
    if not isinstance(value := metadata.get(key, default), str) or not value:
        raise BadInput(f"{task.path / 'task.toml'}: metadata.{key} = {value!r} is not a name; give a text")
    return value


def load_taskset(spec: str | Sequence[str]) -> TaskSet:
    """Load and check every task of a source (rl360.tasksets.sources), or of several: then the name of its source comes
    before the name of each task."""
    found: dict[str, TaskEntry] = {}
    digest, named = hashlib.sha256(), dict[str, str]()
    for source in [spec] if isinstance(spec, str) else spec:
        root = folder_of(source)
        name = source.removeprefix("builtin:") if source.startswith("builtin:") else root.name
        if name in named:
            raise BadInput(f"taskset.path: {named[name]} and {source} are both named {name}; rename one")
        named[name] = source
        folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
        if not folders:
            raise BadInput(f"task set {source!r} holds no task directory")
        if len(found) + len(folders) > MAX_TASKS:
            raise BadInput(f"task set {source!r} holds {len(folders)} tasks, the limit is {MAX_TASKS}; split it")
        for folder in folders:
            task = load_task(folder)
            task_id = task.id if isinstance(spec, str) else f"{name}/{task.id}"
            if task_id in found:
                raise BadInput(f"task {task_id!r} is there twice: {found[task_id].path} and {folder}; rename one")
            image = "" if image_group(task) == task.id else image_group(task)
            entry = TaskEntry(task_id, folder, _domain(task, name), task.judge is not None, image, name)
            found[task_id] = entry
            digest.update(f"{task_id}\0{entry.domain}\0{task.instruction}\0{task.verifier_digest}\n".encode())
            there = tree_files(task.path / "environment")
            there.pop("Dockerfile", None)
            if task.files != there:
                placed = (f"{file}\0{given and given.relative_to(task.path)}\n" for file, given in task.files.items())
                digest.update("".join(["\0files\n", *placed]).encode())  # also where nothing is placed
    return TaskSet(", ".join(named.values()), dict(sorted(found.items())), digest.hexdigest())


@lru_cache(maxsize=64)
def _epoch_order(size: int, seed: int, epoch: int, domain: str) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(f"cursor:{seed}:{epoch}" + (f":{domain}" if domain else "")).shuffle(order)
    return tuple(order)


def draw(
    taskset: TaskSet,
    seed: int,
    step: int,
    n: int,
    weights: Mapping[str, float] | None = None,
    history: Mapping[str, Sequence[float]] | None = None,
) -> list[str]:
    """Task ids of the `n` groups of `step`: positions step*n .. step*n+n-1 of an endless sequence of shuffled passes
    over the set, or with `weights` over each domain, which then comes by its weight. With `history` (passed, tried) a
    position keeps its domain and takes a task of it whose attempts disagree.
    """
    if step < 0 or n < 1:
        raise BadInput(f"cannot draw {n} tasks for step {step}: the step is at least 0 and the number at least 1")
    pools, places = {"": taskset.task_ids}, [("", position) for position in range(step * n, step * n + n)]
    if weights:
        pools = taskset.pools(weights)
        places = domains_at(weights, step * n, n)
    if history is None:
        orders = ((pools[domain], domain, place) for domain, place in places)
        return [
            ids[_epoch_order(len(ids), seed, place // len(ids), domain)[place % len(ids)]]
            for ids, domain, place in orders
        ]
    counts = Counter(domain for domain, _ in places)
    chosen = {
        domain: iter(undecided(pools[domain], history, count, f"difficulty:{seed}:{step}:{domain}"))
        for domain, count in counts.items()
    }
    return [next(chosen[domain]) for domain, _ in places]


def instead(taskset: TaskSet, drawn: list[str], without: Collection[str], weights: Mapping[str, float]) -> list[str]:
    """`drawn` with others in the places of those in `without`: of the same pool, of any that is drawn from where it
    has none left; those that came least often in the step, and among them by chance."""
    if not without:
        return drawn
    pools = taskset.pools(weights)
    left = {
        of: [name for name in ids if name not in without] for of, ids in pools.items() if not weights or weights[of]
    }
    pool_of = {name: of for of, ids in pools.items() for name in ids}
    anywhere = [name for ids in left.values() for name in ids]
    if not anywhere:
        raise BadInput(f"all tasks of {taskset.spec} are in quarantine: `rl360 tasks release` lets a run try one again")
    rng, seen, drawn = random.Random(f"instead:{drawn}"), Counter(drawn), [*drawn]
    for place, name in enumerate(drawn):
        if name in without:
            pool = left[pool_of[name]] or anywhere
            drawn[place] = min(pool, key=lambda other: (seen[other], rng.random()))
            seen[drawn[place]] += 1
    return drawn
