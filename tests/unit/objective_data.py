"""Builders of attempt records for the objective, ledger and report tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rl360.ledger.outcomes import Outcome
from rl360.objective.filters import TrainRow
from rl360.sessions.routing import RowForward
from rl360.sessions.sample import (
    AttemptRecord,
    LeafCounts,
    MergedSample,
    SampleRef,
    decode_samples,
    encode_samples,
)
from rl360.store.codec import sha256_hex
from rl360.store.layout import merged_key
from tests.unit.verdict_data import verdict

VOCAB = 64
OBJECTS: dict[str, bytes] = {}  # the sample objects made here, by their sha256


def sample_of(
    attempt_id: str,
    group_id: str,
    *,
    trained: int = 6,
    prompt: int = 4,
    observed: int = 3,
    dropped: dict[str, int] | None = None,
    version: str = "run:0",
    truncated: bool = False,
    differs: int = 0,
    sent: int = 0,
    cached: int = 0,
    routed: bool = False,
    leaf: int = 0,
    seed: int = 0,
) -> MergedSample:
    """A sample of `prompt` ids, then `trained` sampled ids with `observed` ids of tool output in the middle."""
    rng = np.random.default_rng(seed)
    first = trained // 2
    mask = np.array([0] * prompt + [1] * first + [0] * observed + [1] * (trained - first), dtype=np.uint8)
    logprobs = np.where(mask == 1, -rng.random(len(mask)) - 0.05, 0.0).astype(np.float32)
    spans = [(prompt, prompt + first, version)] if first else []
    if trained - first:
        spans.append((prompt + first + observed, len(mask), version))
    forward = np.where(mask[:-1] == 1, RowForward.DECODE, RowForward.PREFILL).astype(np.uint8)
    return MergedSample(
        attempt_id=attempt_id,
        group_id=group_id,
        task_id="chores-rename",
        session_id=f"session-{attempt_id}",
        leaf=leaf,
        tokens=rng.integers(0, VOCAB, len(mask)).astype(np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        version_spans=spans,
        sampled_tokens=trained + sum((dropped or {}).values()),
        dropped=dropped or {},
        truncated=truncated,
        sampling_differs=differs,
        routing_pieces=(np.zeros((len(mask) - 1, 2, 2), np.uint8),) if routed else (),
        row_forward=forward if routed else None,
        prompt_tokens=sent,
        cached_tokens=cached,
        turns=2,
    ).check(attempt_id)


def store_samples(samples: Sequence[MergedSample], key: str) -> SampleRef:
    """What a session server answers after it stored these under `key`."""
    data = encode_samples(samples)
    digest = sha256_hex(data)
    OBJECTS[digest] = data
    return SampleRef(key, digest, len(data), tuple(LeafCounts.of(sample) for sample in samples))


def sample_at(row: TrainRow) -> MergedSample:
    """The sample that a row of the batch refers to."""
    return decode_samples(OBJECTS[row.sha256], row.key)[row.leaf]


def attempt(
    group: int,
    index: int,
    reward: float | None,
    *,
    step: int = 0,
    outcome: Outcome | None = None,
    sample: bool = True,
    unmerged: int = 0,
    leaves: Sequence[dict[str, Any]] = ({},),
    domain: str = "files",
    wave: int = 0,
    **sample_args: Any,
) -> AttemptRecord:
    """One attempt record; `reward` None makes it an infra loss (agent_timeout unless `outcome` says otherwise).

    leaves: one map of arguments a sample, over `sample_args`, which are those of all; unmerged: tokens without any.
    """
    group_id = f"s{step:06}-g{group:03}"
    attempt_id = f"{group_id}-a{index:02}-t0"
    if outcome is None:
        outcome = Outcome.AGENT_TIMEOUT if reward is None else Outcome.PASSED if reward >= 1 else Outcome.FAILED
    stored = None
    if sample:
        merged = [sample_of(attempt_id, group_id, leaf=i, **{**sample_args, **own}) for i, own in enumerate(leaves)]
        stored = store_samples(merged, merged_key("demo", step, wave, attempt_id))
    return AttemptRecord(
        attempt_id=attempt_id,
        group_id=group_id,
        task_id="chores-rename",
        try_index=0,
        outcome=outcome,
        verdict=None if reward is None else verdict(attempt_id, reward),
        exit_status="ok" if reward is not None else outcome.value,
        session_id=f"session-{attempt_id}",
        stored=stored,
        unmerged_tokens=0 if sample else unmerged,
        domain=domain,
        phases_s={"queue": 0.1, "setup": 0.2, "agent": 2.0, "verify": 0.3, "teardown": 0.1},
    ).check(attempt_id)
