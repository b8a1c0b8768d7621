"""Real bubblewrap sandboxes: how fast many start, what one costs, what a heavy neighbour takes.

`starts_per_s`, `ready_p95_ms`: 500 starts (workspace and sandbox) by the product's waves against all at once, all alive
  together at the end; a start's time runs from when it begins.
`cpu_per_sandbox`: CPU of this process and of all it started, from the workspace to its proven end, against a bare
  `bwrap ... true` with the same namespaces and mounts.
`neighbour_slowdown`: a fixed piece of work in one sandbox, alone and while others build in more sandboxes than
  there are cores. Ours: the reservations the product writes; baseline: the same without control groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from rl360.bench.rows import Options, Row, at_least, at_most, ratio_at_most
from rl360.errors import Rl360Error
from rl360.harbor.protocol import SandboxLimits
from rl360.sandboxes import cgroups
from rl360.sandboxes.bubblewrap import BubblewrapProvider
from rl360.sandboxes.provider import Sandbox, SandboxSpec
from rl360.sandboxes.waves import Pace, Waves

STARTS = ("starts_per_s", "ready_p95_ms")
CPU = "cpu_per_sandbox"
NEIGHBOUR = "neighbour_slowdown"
ROWS = (*STARTS, CPU, NEIGHBOUR)
PACE = Pace(size=8, interval_s=0.05, max_concurrent=1024, per_group=1024, ready_goal_s=0.15)
START_S = 120.0
HEAVY = "for i in 1 2 3 4; do (while :; do :; done) & done; wait"
BY_CORE = 2  # builds: kernels give each session a share, so one build alone would take little even without groups
WORK = "i=0; while [ $i -lt {turns} ]; do i=$((i+1)); done"


@contextlib.asynccontextmanager
async def provider() -> AsyncIterator[BubblewrapProvider]:
    """A provider of its own folder; nothing of it may be left at the end."""
    with tempfile.TemporaryDirectory(prefix="rl360-bench-") as folder:
        made = BubblewrapProvider(Path(folder))
        try:
            yield made
            if left := list((made.root / "live").iterdir()):
                raise Rl360Error(f"{len(left)} sandboxes were left behind, the first is {left[0].name}")
        finally:
            await made.reap()
            made.close()


async def start(made: BubblewrapProvider, name: str, limits: SandboxLimits | None = None) -> Sandbox:
    workspace = await made.new_workspace(name, None)
    spec = SandboxSpec(name, {"run": "bench"}, limits or SandboxLimits(), workspace, start_timeout_s=START_S)
    return await made.create(spec)


async def finish(made: BubblewrapProvider, sandbox: Sandbox) -> None:
    proof = await sandbox.stop()
    if not proof.confirmed:
        raise Rl360Error(proof.evidence)
    problem = await made.remove_workspace(sandbox.spec.workspace)
    if problem:
        raise Rl360Error(problem)


# many starts


async def all_at_once(made: BubblewrapProvider, count: int) -> tuple[list[Sandbox], list[float], float]:
    return await _timed(made, [asyncio.sleep(0) for _ in range(count)])


async def _timed(made: BubblewrapProvider, gates: list[Any]) -> tuple[list[Sandbox], list[float], float]:
    """Sandboxes, seconds to ready of each, seconds in all; a start begins when its gate opens."""
    took: list[float] = []

    async def one(number: int, gate: Any) -> Sandbox:
        await gate
        began = time.monotonic()
        sandbox = await start(made, f"s{number}")
        took.append(time.monotonic() - began)
        return sandbox

    began = time.monotonic()
    sandboxes = await asyncio.gather(*(one(number, gate) for number, gate in enumerate(gates)))
    return sandboxes, took, time.monotonic() - began


async def in_waves(made: BubblewrapProvider, count: int) -> tuple[list[Sandbox], list[float], float]:
    """Whoever waits is let go when the policy says so: at the next wave, or when a start is over."""
    waves, took, sandboxes = Waves(PACE), [], []
    changed = asyncio.Event()

    async def one(key: str) -> None:
        began = time.monotonic()
        sandboxes.append(await start(made, key))
        took.append(time.monotonic() - began)
        waves.settle(key, time.monotonic(), ok=True)
        changed.set()

    began = time.monotonic()
    jobs = []
    for number in range(count):
        while not waves.free(now := time.monotonic()):
            changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), max(0.001, waves.next_wave_at() - now))
        key = f"s{number}"
        waves.begin(key, "bench", time.monotonic())
        jobs.append(asyncio.ensure_future(one(key)))
    await asyncio.gather(*jobs)
    return sandboxes, took, time.monotonic() - began


async def many(options: Options) -> Iterator[Row]:
    count = 100 if options.quick else 500
    found = {}
    for name, way in (("waves", in_waves), ("at once", all_at_once)):
        options.say(f"starts: {count} {name}")
        async with provider() as made:
            sandboxes, took, seconds = await way(made, count)
            p50, p95 = (1e3 * statistics.quantiles(took, n=100)[at] for at in (49, 94))
            found[name] = (count / seconds, p50, p95)
            for sandbox in sandboxes:
                await finish(made, sandbox)
    ours, other = found["waves"], found["at once"]
    detail = f"{count} starts, all alive at the end; median to ready {ours[1]:.0f} ms, all at once {other[1]:.0f} ms"
    rows = [
        at_least(STARTS[0], baseline=other[0], ours=ours[0], unit="/s", limit=60, detail=detail),
        at_most(STARTS[1], baseline=other[2], ours=ours[2], unit="ms", limit=300, detail=detail),
    ]
    return iter(rows)


def starts_rows(options: Options) -> Iterator[Row]:
    yield from asyncio.run(many(options))


# what one costs


def cpu_s() -> float:
    """CPU of this process and of every process it has waited for, with theirs."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(item.ru_utime + item.ru_stime for item in used)


async def _cost(times: int) -> tuple[float, float]:
    """Median CPU seconds of one sandbox, and of one bare bwrap."""
    ours, bare = [], []
    async with provider() as made:
        workspace = await made.new_workspace("bare", None)
        argv = made.bare_argv(SandboxSpec("bare", {}, SandboxLimits(), workspace))
        for number in range(times):
            before = cpu_s()
            await finish(made, await start(made, f"c{number}"))
            ours.append(cpu_s() - before)
            before = cpu_s()
            subprocess.run(argv, check=True, timeout=START_S, stdin=subprocess.DEVNULL)  # noqa: ASYNC221
            bare.append(cpu_s() - before)
        await made.remove_workspace(workspace)
    return statistics.median(ours), statistics.median(bare)


def cpu_rows(options: Options) -> Iterator[Row]:
    options.say("cpu_per_sandbox: one at a time")
    ours, bare = asyncio.run(_cost(20 if options.quick else 200))
    yield ratio_at_most(CPU, baseline=1e3 * bare, ours=1e3 * ours, unit="ms of CPU", limit=3)


# a heavy neighbour


def builds(cores: int) -> list[SandboxLimits]:
    """Neighbours that may use every core and try to: only what is reserved for others holds them back."""
    return [SandboxLimits(cpus=cores, reserved_cpus=0.05, cpu_time_s=600)] * (BY_CORE * cores)


async def _slowdown(turns: int, repeats: int) -> float:
    """Seconds of the work beside heavy builds over its seconds alone."""
    promised = SandboxLimits(cpus=1.0, reserved_cpus=1.0, cpu_time_s=600)
    async with provider() as made:
        worker = await start(made, "worker", promised)
        builders = [await start(made, f"builder{n}", limits) for n, limits in enumerate(builds(os.cpu_count() or 1))]

        async def work() -> float:
            done = await worker.exec(WORK.format(turns=turns), START_S)
            if done.exit_code:
                raise Rl360Error(f"the measured work ended with {done.exit_code}")
            return done.seconds

        await work()
        alone = statistics.median([await work() for _ in range(repeats)])
        at_work = [asyncio.ensure_future(builder.exec(HEAVY, START_S)) for builder in builders]
        await asyncio.sleep(0.5)
        beside = statistics.median([await work() for _ in range(repeats)])
        for job in at_work:
            job.cancel()
        await asyncio.gather(*at_work, return_exceptions=True)
        for builder in builders:
            await finish(made, builder)
        await finish(made, worker)
    return beside / alone


@contextlib.contextmanager
def without_groups() -> Iterator[None]:
    """As on a host whose control groups can't be written."""
    known = cgroups.parents
    cgroups.parents = lambda: cgroups.Parents((), None, frozenset())  # type: ignore[assignment]
    try:
        yield
    finally:
        cgroups.parents = known


def neighbour_rows(options: Options) -> Iterator[Row]:
    if "cpu" not in cgroups.parents().controllers:
        options.say("neighbour_slowdown: no cpu control group to write here; left out")
        return
    options.say("neighbour_slowdown: work alone and beside builds that may use every core")
    turns, repeats = (100_000, 3) if options.quick else (400_000, 9)
    ours = asyncio.run(_slowdown(turns, repeats))
    with without_groups():
        baseline = asyncio.run(_slowdown(turns, repeats))
    yield at_most(NEIGHBOUR, baseline=baseline, ours=ours, unit="x", limit=1.1)
