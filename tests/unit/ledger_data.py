"""Synthetic but realistic runs: the filter and the ledger are the real ones, only the attempts are made up."""

from __future__ import annotations

from typing import Any

import numpy as np

from rl360.config.run import ObjectiveConfig
from rl360.ledger.outcomes import Outcome
from rl360.ledger.step import StepLedger, build_step_ledger
from rl360.objective.filters import FilterResult, filter_groups
from rl360.sessions.sample import AttemptRecord
from tests.unit.objective_data import attempt

PHASES_S = {
    "sample_groups": 0.05,
    "launch_waves": 0.1,
    "roll_out": 8.0,
    "collect": 0.3,
    "filter": 0.2,
    "train": 4.0,
    "push": 0.9,
}
PUSH = {"path": "broadcast", "calls_per_engine": 1, "bytes": 3_600_000, "paused_s": 0.21, "engines": 2}
DOMAINS = ("files", "text", "search")


def train_result(result: FilterResult, step: int, **changes: Any) -> dict[str, Any]:
    """What a correct trainer answers for this batch."""
    trained = result.trained_tokens
    means = {"loss": -0.01, "grad_norm": 0.8, "clip_fraction": 0.01, "tis_mean": 1.0, "mean_abs_dlogp": 4e-7}
    return {
        "step": step,
        "run": "demo",
        "status": "trained" if trained else "empty",
        "version_after": step + 1 if trained else step,
        **(means if trained else dict.fromkeys(means)),
        "entropy": 1.2 if trained else None,
        "trained_samples": len(result.kept),
        "trained_tokens": trained,
        "loss_weight_sum": 1.0 if trained else 0.0,
        "weights_digest": "cd" * 32,
        "seconds": 3.9,
        **changes,
    }


def ledger_of(
    attempts: list[AttemptRecord],
    step: int = 0,
    run: str = "demo",
    *,
    objective: ObjectiveConfig | None = None,
    score_timeouts: bool = False,
    **changes: Any,
) -> StepLedger:
    result = filter_groups(
        attempts,
        objective or ObjectiveConfig(),
        expected_version=f"run:{step}",
        max_seq_len=384,
        score_timeouts=score_timeouts,
    )
    return build_step_ledger(
        run=run,
        step=step,
        attempts=attempts,
        decisions=result.decisions,
        train=train_result(result, step, **changes),
        push=PUSH if result.trained_tokens else None,
        phases_s=PHASES_S,
    )


def made_up_attempts(step: int, rng: np.random.Generator, groups: int = 32, size: int = 8) -> list[AttemptRecord]:
    """Groups whose pass rate rises with the step, with 3% infra losses, some cuts and a stale sample now and then."""
    attempts = []
    infra = [
        Outcome.AGENT_TIMEOUT,
        Outcome.AGENT_TIMEOUT,
        Outcome.SANDBOX_LOST,
        Outcome.GENERATION_ERROR,
        Outcome.NO_ENGINE,
    ]
    level = 0.38 + 0.36 * (1 - np.exp(-step / 9))
    for group in range(groups):
        chance = float(np.clip(rng.normal(level, 0.28), 0.0, 1.0))
        for index in range(size):
            trained = int(rng.integers(12, 60))
            common = {
                "step": step,
                "domain": DOMAINS[group % 3],
                "trained": trained,
                "observed": int(rng.integers(4, 40)),
            }
            version = f"run:{step}" if rng.random() > 0.005 else f"run:{step + 7}"
            common |= {"prompt": int(rng.integers(40, 80)), "version": version, "seed": int(rng.integers(1 << 30))}
            if rng.random() < (0.14 if step == 17 else 0.03):
                attempts.append(attempt(group, index, None, outcome=infra[int(rng.integers(len(infra)))], **common))
            elif rng.random() < 0.02:
                late = int(rng.integers(0, 20))
                cut = {"truncated": True, "dropped": {"after_truncation": late} if late else {}}
                attempts.append(attempt(group, index, 0.0, outcome=Outcome.TRUNCATED, **common, **cut))
            else:
                attempts.append(attempt(group, index, float(rng.random() < chance), **common))
    return attempts


def made_up_run(steps: int, groups: int = 32, size: int = 8) -> list[StepLedger]:
    rng = np.random.default_rng(0)
    ledgers = []
    for step in range(steps):
        ledger = ledger_of(made_up_attempts(step, rng, groups, size), step)
        phases = {name: seconds * float(rng.uniform(0.8, 1.3)) for name, seconds in PHASES_S.items()}
        ledgers.append(StepLedger(**{**ledger.__dict__, "phases_s": phases}))
    return ledgers
