"""`rl360 bench faults`: the demo's run with sandboxes killed at random beside the same run without, seed by seed.

A share of all sandboxes is ended by SIGKILL at a random moment, drawn by the seed; tries are not repeated
(`rollout.infra_retries` 0), so that what is killed is lost to its group.

`killed_reward`: mean verified reward of a run's last third, over the seeds; its baseline is the clean runs'. Holds when
  the two differ by no more than two standard errors of a difference between seeds, and by no more than 0.1.
`killed_in_baselines`: attempts without a verdict that have a score, an advantage or a weight, and attempts that train
  with another advantage than their reward less the mean of their group's verified rewards, recomputed from the rows of
  the ledger alone.
Both want the services (`rl360 up` or `rl360 demo`), whose sandboxes they kill: no other run should be under way.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import secrets
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rl360.bench.rows import Row
from rl360.config.services import Services, load_services
from rl360.errors import BadInput, Rl360Error
from rl360.ledger.metrics import mean, reward_metrics
from rl360.ledger.outcomes import INFRA
from rl360.ledger.read import read_run
from rl360.ledger.step import StepLedger
from rl360.sandboxes.bubblewrap import marked_pids
from rl360.store.object_store import ObjectStore

LOOK_EVERY_S = 0.05
LATEST_S = 1.0  # a demo's attempt lives a second or two
GIVE_UP_S = 10.0
RUN_DEADLINE_S = 3600.0
TOLERANCE = 1e-9
NOISE, FARTHEST = 2.0, 0.1


@dataclass(frozen=True)
class FaultOptions:
    """`share` of the sandboxes is killed; each seed is run twice, `steps` steps of `groups` x `size` attempts."""

    seeds: int = 3
    steps: int = 12
    groups: int = 16
    size: int = 8
    share: float = 0.1


class Killer(threading.Thread):
    """Ends sandboxes of the services' home while it runs: each new one with probability `share`, at a random moment."""

    def __init__(self, home: Path, share: float, seed: int) -> None:
        super().__init__(daemon=True)
        self.live, self.share, self.draw = home / "sandboxes", share, random.Random(seed)
        self.seen, self.killed = self._folders(), 0
        self.stopping = threading.Event()

    def _folders(self) -> set[Path]:
        return set(self.live.glob("*/live/*"))

    def run(self) -> None:
        doomed: dict[Path, float] = {}
        while not self.stopping.wait(LOOK_EVERY_S):
            now = time.monotonic()
            fresh = sorted(self._folders() - self.seen)
            self.seen.update(fresh)
            doomed |= {path: now + self.draw.uniform(0, LATEST_S) for path in fresh if self.draw.random() < self.share}
            for path in [path for path, at in doomed.items() if at <= now]:
                pids = marked_pids(path)
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                self.killed += bool(pids)
                if pids or now > doomed[path] + GIVE_UP_S:  # not started yet: looked for again
                    del doomed[path]

    def __enter__(self) -> Killer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self.join(timeout=GIVE_UP_S)


def measure(options: FaultOptions, say: Callable[[str], None]) -> Iterator[Row]:
    """Both rows, after all runs."""
    if not 0 < options.share < 1 or options.seeds < 2 or options.steps < 3:
        raise BadInput(f"{options}: share must be in (0, 1), seeds at least 2, steps at least 3")
    services = load_services()
    store = ObjectStore.from_services(services)
    token = secrets.token_hex(2)
    ends: dict[str, list[float]] = {"clean": [], "killed": []}
    wrong, lost, attempts, killed = 0, 0, 0, 0
    for seed in range(options.seeds):
        for arm in ends:
            with Killer(Path(services.home), options.share if arm == "killed" else 0.0, seed) as killer:
                ledgers = _run(services, store, f"faults-{token}-{arm}-{seed}", seed, options)
            end = _last_third(ledgers)
            ends[arm].append(end)
            killed += killer.killed
            rows = [row for ledger in ledgers for row in ledger.attempts]
            infra = sum(row.outcome in INFRA for row in rows)
            if arm == "killed":
                lost, attempts = lost + infra, attempts + len(rows)
            wrong += sum(map(wrong_baselines, ledgers))
            say(f"faults: seed {seed} {arm}: reward {end:.3f}, {infra} of {len(rows)} attempts lost")
    if killed < options.share * attempts / 2 or not lost:
        raise Rl360Error(
            f"{killed} of {attempts} sandboxes were killed and {lost} attempts lost: too few to say anything"
        )
    clean, with_kills = statistics.mean(ends["clean"]), statistics.mean(ends["killed"])
    noise = math.sqrt(sum(statistics.variance(values) for values in ends.values()) / options.seeds)
    limit = min(FARTHEST, NOISE * noise)
    listed = "; ".join(f"{arm} {', '.join(f'{value:.3f}' for value in values)}" for arm, values in ends.items())
    yield Row(
        "killed_reward",
        clean,
        with_kills,
        "mean reward",
        f"within {limit:.3f}",
        abs(clean - with_kills) <= limit,
        f"{options.steps} steps of {options.groups} x {options.size}, last third; by seed: {listed}; "
        f"standard error of the difference {noise:.3f}; {killed} sandboxes killed, {lost} of {attempts} attempts lost",
    )
    yield Row(
        "killed_in_baselines",
        None,
        wrong,
        "attempts",
        "0",
        wrong == 0,
        f"of {attempts} in the runs with kills, and in the clean runs",
    )


def _run(services: Services, store: ObjectStore, name: str, seed: int, options: FaultOptions) -> list[StepLedger]:
    """A whole run by `rl360 run start`, as a user starts one."""
    fields = {
        "seed": seed,
        "taskset.groups_per_step": options.groups,
        "taskset.attempts_per_group": options.size,
        "rollout.infra_retries": 0,
    }
    argv = [sys.executable, "-m", "rl360.cli", "run", "start", "--name", name, "--steps", str(options.steps)]
    argv += [part for key, value in fields.items() for part in ("-s", f"{key}={value}")]
    env = os.environ | {"RL360_HOME": services.home}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=RUN_DEADLINE_S, check=False)
    if done.returncode != 0:
        raise Rl360Error(f"run {name} failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return read_run(store, name)


def _last_third(ledgers: list[StepLedger]) -> float:
    tail = ledgers[-max(1, len(ledgers) // 3) :]
    means = [reward_metrics(ledger)["unfiltered_mean_valid"] for ledger in tail]
    end = mean([value for value in means if value is not None])
    if end is None:
        raise Rl360Error("the run's last steps have no verified attempt")
    return end


def wrong_baselines(ledger: StepLedger) -> int:
    """Attempts whose advantage is not what the verified rewards of their group give, from the rows alone: for runs with
    the default objective."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for row in ledger.attempts:
        if row.reward is not None:
            rewards[row.group_id].append(row.reward)
    wrong = 0
    for row in ledger.attempts:
        if row.reward is None:
            wrong += row.score is not None or row.advantage is not None or row.loss_weight != 0
        elif row.trains:
            of_group = rewards[row.group_id]
            expected = row.reward - sum(of_group) / len(of_group)
            wrong += row.advantage is None or abs(row.advantage - expected) > TOLERANCE
    return wrong
