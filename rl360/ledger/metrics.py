"""Every figure a person sees of a step, computed from its ledger. Formulas: docs/metrics.md.

All functions are pure. A mean over nothing is None, never 0: a step without a verdict has no reward, not a bad one.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rl360.ledger.checks import TRAIN_FIGURES, version_number
from rl360.ledger.outcomes import HAS_VERDICT, INFRA, SAMPLED, Bucket, Outcome

if TYPE_CHECKING:
    from rl360.ledger.step import AttemptRow, StepLedger

GROUP_FATES = ("trained", "all_pass", "all_fail", "agree_between", "insufficient_valid", "dropped", "infra")
AGREED = ("all_pass", "all_fail", "agree_between")
PASS_REWARD = 1.0
FAIL_REWARD = 0.0


def outcome_counts(ledger: StepLedger) -> dict[str, int]:
    """Attempts by outcome, in the order of `Outcome`, zero counts left out."""
    counts = Counter(row.outcome for row in ledger.attempts)
    return {outcome.value: counts[outcome] for outcome in Outcome if counts[outcome]}


def token_counts(ledger: StepLedger) -> dict[str, int]:
    """Sampled tokens by bucket, zero counts left out; the values sum to `sampled_tokens`."""
    return _summed((row.tokens for row in ledger.attempts), SAMPLED)


def context_counts(ledger: StepLedger) -> dict[str, int]:
    """Tokens nobody sampled: prompt and observation."""
    return _summed((row.context for row in ledger.attempts), (Bucket.PROMPT, Bucket.OBSERVATION))


def forward_counts(ledger: StepLedger) -> dict[str, int]:
    """What the engines did for the step's attempts, by `FORWARD_COUNTS`, zero counts left out."""
    total: Counter[str] = Counter()
    for row in ledger.attempts:
        total.update(row.forwards)
    return dict(total)


def sampled_tokens(ledger: StepLedger) -> int:
    return sum(row.sampled_tokens for row in ledger.attempts)


def group_fates(ledger: StepLedger) -> dict[str, str]:
    """What became of each group, by group id: one of `GROUP_FATES`.

    A group that trained at least one attempt is `trained`. One that agreed is named by its highest reward (a scored
    timeout counts as 0): `all_pass` (>= 1), `all_fail` (<= 0) or `agree_between`. `insufficient_valid` had one score,
    `infra` none; `dropped` disagreed but none of its samples could train (stale, over length, broken).
    """
    return {group_id: _fate(rows) for group_id, rows in _groups(ledger).items()}


def group_counts(ledger: StepLedger) -> dict[str, int]:
    """Groups in all and by fate; the fates sum to `total`."""
    counts = Counter(group_fates(ledger).values())
    return {"total": sum(counts.values()), **{fate: counts[fate] for fate in GROUP_FATES}}


def zero_disagreement(ledger: StepLedger) -> dict[str, float | None]:
    """Shares of the groups that could have disagreed (two scores or more): those that did not, in all and by where they
    agreed."""
    counts = group_counts(ledger)
    compared = sum(counts[fate] for fate in ("trained", *AGREED, "dropped"))
    shares = {fate: _share(counts[fate], compared) for fate in AGREED}
    return {"share": _share(sum(counts[fate] for fate in AGREED), compared), **shares}


def pass_at_k(ledger: StepLedger) -> dict[str, dict[str, Any]]:
    """By k (1, 2, 4, .. up to the largest group): the chance that at least one of k attempts at a task passes.

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, section 2.1), 1 - C(n - c, k) / C(n, k) for a group of
    n verdicts of which c pass, as its mean over the `groups` with n >= k; None over none.
    """
    verdicts, size = [], 0
    for rows in _groups(ledger).values():
        rewards = [row.reward for row in rows if row.reward is not None]
        verdicts.append((len(rewards), sum(reward >= PASS_REWARD for reward in rewards)))
        size = max(size, len({row.attempt_id.rpartition("-t")[0] for row in rows}))
    found = {}
    for k in (1 << power for power in range(size.bit_length())):
        chances = [1.0 - math.comb(n - c, k) / math.comb(n, k) for n, c in verdicts if n >= k]
        found[str(k)] = {"mean": mean(chances), "groups": len(chances)}
    return found


def staleness(ledger: StepLedger) -> dict[str, float | None]:
    """Optimizer steps between the weights that sampled a token and those it trained, over trained tokens; None where
    the ledger says no versions."""
    if ledger.version_before is None:
        return {"mean": None, "max": None}
    counts: Counter[int] = Counter()
    for row in ledger.attempts:
        for version, tokens in (row.trained_versions or {}).items():
            counts[ledger.version_before - version_number(version)] += tokens
    total = sum(counts.values())
    return {"mean": _share(sum(lag * n for lag, n in counts.items()), total), "max": max(counts, default=None)}


def reward_metrics(ledger: StepLedger) -> dict[str, Any]:
    """Reward before and after the filter, what was trained on in its place, and the share of attempts that have none.
    Means of rewards are over verdicts alone; what the run's policy scored is counted apart."""
    valid = [row for row in ledger.attempts if row.reward is not None]
    scored = [row for row in ledger.attempts if row.score is not None]
    domains: dict[str, list[AttemptRow]] = defaultdict(list)
    for row in ledger.attempts:
        domains[row.domain].append(row)
    by_domain = {name: _domain(rows) for name, rows in sorted(domains.items())}
    return {
        "unfiltered_mean_valid": mean([row.reward or 0.0 for row in valid]),
        "kept_mean": mean([row.reward or 0.0 for row in valid if row.trains]),
        "kept_mean_score": mean([row.score or 0.0 for row in scored if row.trains]),
        "penalised": sum(row.score != row.reward for row in valid),
        "timeouts_scored": len(scored) - len(valid),
        "infra_rate": _share(len(ledger.attempts) - len(scored), len(ledger.attempts)),
        "by_domain": {name: of["valid"] for name, of in by_domain.items() if of["valid"] is not None},
        "kept_by_domain": {name: of["kept"] for name, of in by_domain.items() if of["kept"] is not None},
        "infra_rate_by_domain": {name: of["infra"] for name, of in by_domain.items()},
    }


def _domain(rows: Sequence[AttemptRow]) -> dict[str, float | None]:
    valid = [row for row in rows if row.reward is not None]
    return {
        "valid": mean([row.reward or 0.0 for row in valid]),
        "kept": mean([row.reward or 0.0 for row in valid if row.trains]),
        "infra": _share(sum(row.score is None for row in rows), len(rows)),
    }


def truncation_share(ledger: StepLedger) -> float | None:
    """Share of valid attempts that were cut by a length limit."""
    valid = [row for row in ledger.attempts if row.outcome in HAS_VERDICT]
    return _share(sum(row.truncated for row in valid), len(valid))


def losses_by_cause(ledger: StepLedger) -> list[dict[str, Any]]:
    """What infrastructure cost: per infra outcome the attempts, their seconds and their sampled tokens, worst first."""
    rows: dict[Outcome, list[AttemptRow]] = defaultdict(list)
    for row in ledger.attempts:
        if row.outcome in INFRA and row.score is None:
            rows[row.outcome].append(row)
    causes = [
        {
            "cause": outcome.value,
            "attempts": len(lost),
            "seconds": sum(row.seconds for row in lost),
            "sampled_tokens": sum(row.sampled_tokens for row in lost),
        }
        for outcome, lost in rows.items()
    ]
    return sorted(causes, key=lambda cause: (-cause["attempts"], cause["cause"]))


def attempt_bars(ledger: StepLedger) -> dict[str, int]:
    """Every attempt in one of the classes the picture stacks; sums to the number of attempts.

    `trained_pass` and `trained_fail` trained (a pass is a reward >= 1); `all_pass` and `all_fail` are valid attempts of
    groups that agreed there; `timeout_scored` has no verdict and a score, trained or not; `infra` has neither; `other`
    is valid and dropped for another reason.
    """
    fates = group_fates(ledger)
    bars = Counter(_bar(row, fates[row.group_id]) for row in ledger.attempts)
    names = ("trained_pass", "trained_fail", "all_pass", "all_fail", "other", "timeout_scored", "infra")
    return {name: bars[name] for name in names}


def step_json(ledger: StepLedger) -> dict[str, Any]:
    """One entry of `rl360 ledger RUN --json`: all that tables, pictures and pages need, in a few KB."""
    forwards = forward_counts(ledger)
    return {
        "step": ledger.step,
        "attempts": len(ledger.attempts),
        "outcomes": outcome_counts(ledger),
        "attempt_bars": attempt_bars(ledger),
        "groups": group_counts(ledger),
        "zero_disagreement": zero_disagreement(ledger),
        "pass_at_k": pass_at_k(ledger),
        "sampled_tokens": sampled_tokens(ledger),
        "tokens": token_counts(ledger),
        "context_tokens": context_counts(ledger),
        "forwards": forwards,
        "cache_share": _share(forwards.get("cached_tokens", 0), forwards.get("prompt_tokens", 0)),
        "decode_row_share": _share(forwards.get("decode_rows", 0), forwards.get("routing_rows", 0)),
        "status": ledger.train.status,
        "trained_samples": ledger.train.trained_samples,
        "loss_weight_sum": ledger.train.loss_weight_sum,
        "trained_tokens": ledger.train.trained_tokens,
        **{name: getattr(ledger.train, name) for name in TRAIN_FIGURES},
        "staleness": staleness(ledger),
        "version_before": ledger.version_before,
        "version_after": ledger.train.version_after,
        "weights_digest": ledger.train.weights_digest,
        "truncation_share": truncation_share(ledger),
        "reward": reward_metrics(ledger),
        "losses_by_cause": losses_by_cause(ledger),
        "push": None if ledger.push is None else asdict(ledger.push),
        "phases_s": dict(ledger.phases_s),
    }


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean, None of nothing."""
    return sum(values) / len(values) if values else None


def _groups(ledger: StepLedger) -> dict[str, list[AttemptRow]]:
    groups: dict[str, list[AttemptRow]] = defaultdict(list)
    for row in ledger.attempts:
        groups[row.group_id].append(row)
    return groups


def _fate(rows: Sequence[AttemptRow]) -> str:
    buckets = {row.bucket for row in rows}
    if Bucket.TRAINED in buckets:
        return "trained"
    if Bucket.ZERO_DISAGREEMENT in buckets:
        reward = max(FAIL_REWARD if row.reward is None else row.reward for row in rows if row.score is not None)
        return "all_pass" if reward >= PASS_REWARD else "all_fail" if reward <= FAIL_REWARD else "agree_between"
    if Bucket.INSUFFICIENT_VALID in buckets:
        return "insufficient_valid"
    return "dropped" if any(row.score is not None for row in rows) else "infra"


def _bar(row: AttemptRow, fate: str) -> str:
    if row.reward is None:
        return "infra" if row.score is None else "timeout_scored"
    if row.trains:
        return "trained_pass" if row.reward >= PASS_REWARD else "trained_fail"
    return fate if fate in ("all_pass", "all_fail") else "other"


def _summed(counts: Iterable[dict[Bucket, int]], order: Iterable[Bucket]) -> dict[str, int]:
    total: Counter[Bucket] = Counter()
    for count in counts:
        total.update(count)
    return {bucket.value: total[bucket] for bucket in order if total[bucket]}


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
