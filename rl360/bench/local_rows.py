"""Rows that are measured in this process: the merge pipeline, the routing bytes.

`merge_pipeline_ms`: CPU from the session's recorded turns to its line in the books.
  Ours: snapshot, merge with the full prefix check, encode, decode and check as the trainer does, counts, reference to
  its wire form and back, attempt record, filter, ledger. Not in it: the object's sha256 (in the detail) and the put.
  Baseline: deep copies per turn with a full prefix compare, and counting. No encoding and decoding at all.
`routing_bytes_mb`: routing bytes per trajectory, engine to session server plus session server to store.
  Baseline: full history with every turn, int32 in base64, and the last one stored. Ours: each row once, in the engine's
  int32 base64, and one byte an id stored. `_engine` and `_store` are its two parts.

In each row both ways must have made the identical sample, or the benchmark fails.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from rl360.bench import baseline
from rl360.bench.peers import verdict_of
from rl360.bench.rows import Options, Row, at_most, median_of
from rl360.bench.shape import Shape
from rl360.bench.trajectory import VERSION, Played, draw, model_dir, new_session, play
from rl360.config.run import ObjectiveConfig
from rl360.errors import Rl360Error
from rl360.harbor.verdict import Verdict
from rl360.ledger.outcomes import Outcome
from rl360.ledger.step import build_step_ledger
from rl360.objective.filters import filter_groups
from rl360.sessions.families.registry import load_template
from rl360.sessions.merge import merge, snapshot
from rl360.sessions.sample import AttemptRecord, LeafCounts, MergedSample, SampleRef, decode_samples, encode_samples
from rl360.store.codec import sha256_hex
from rl360.store.layout import merged_key

RUN = "bench"
_PHASES_S = {"queue_s": 0.1, "setup_s": 0.5, "agent_s": 300.0, "verifier_s": 20.0}


@functools.cache
def played(shape: Shape) -> Played:
    """The trajectory, gone through once in this process."""
    with model_dir(shape) as model:
        return play(shape, draw(shape), new_session(shape, load_template(model)))


@functools.cache
def merged(shape: Shape) -> MergedSample:
    return merge(snapshot(played(shape).session))[0]


def ordinary_sample(shape: Shape) -> tuple[dict[str, Any], float]:
    """The baseline's sample, and the CPU seconds its merge and counting took."""
    ours, run = merged(shape), played(shape)
    routing = None if run.routing is None else run.routing.astype(np.int32)
    turns = baseline.turn_records(ours.tokens, ours.logprobs, routing, run.edges)
    before = time.process_time()
    sample = baseline.deep_copy_merge(turns)
    counts = baseline.token_counts(sample)
    cpu_s = time.process_time() - before
    leaf = LeafCounts.of(ours)
    if counts != {"prompt": leaf.prompt, "sampled": leaf.sampled_tokens, "observation": leaf.observation}:
        raise Rl360Error(f"the two ways count differently: {counts} and {leaf}")
    same(ours, sample)
    return sample, cpu_s


def same(ours: MergedSample, ordinary: dict[str, Any]) -> None:
    """Refuse a comparison of two different samples."""
    for name in ("tokens", "loss_mask", "logprobs"):
        array = getattr(ours, name)
        if not np.array_equal(array, np.array(ordinary[name], dtype=array.dtype)):
            raise Rl360Error(f"the two ways made different {name}: nothing to compare")
    theirs = ordinary["routed_experts"]
    if (ours.routing is None) != (theirs is None):
        raise Rl360Error("only one of the two ways has routing: nothing to compare")
    if ours.routing is not None and not np.array_equal(ours.routing, np.asarray(theirs)):
        raise Rl360Error("the two ways made different routing: nothing to compare")


# the merge pipeline


def merge_pipeline_ms(options: Options) -> Iterator[Row]:
    shape = options.shape
    options.say(
        f"merge_pipeline_ms: {shape.turns} turns, {shape.tokens} tokens, routing {shape.layers} x {shape.top_k}"
    )
    held = played(shape)
    _, ordinary_s = ordinary_sample(shape)
    parts: dict[str, list[float]] = {}
    totals = []
    for _ in range(5 if options.quick else 25):
        before = time.process_time()
        data = _pipeline(held, parts)
        totals.append(1e3 * (time.process_time() - before))
    digest_ms = 1e3 * median_of(lambda: _cpu_s(lambda: sha256_hex(data)), 5)
    spent = ", ".join(f"{name} {1e3 * statistics.median(values):.2f}" for name, values in parts.items())
    yield at_most(
        "merge_pipeline_ms",
        baseline=1e3 * ordinary_s,
        ours=statistics.median(totals),
        unit="ms of CPU",
        limit=15,
        detail=f"{spent} ms; sha256 of the {len(data) / 1e6:.1f} MB, not in it, {digest_ms:.1f} ms",
    )


def _cpu_s(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


def _pipeline(held: Played, parts: dict[str, list[float]]) -> Any:
    """One pass, its CPU seconds by part; the encoded object."""

    def timed(name: str, work: Callable[[], Any]) -> Any:
        before = time.process_time()
        result = work()
        parts.setdefault(name, []).append(time.process_time() - before)
        return result

    samples = timed("merge", lambda: merge(snapshot(held.session)))
    data = timed("encode", lambda: encode_samples(samples))
    decoded = timed("decode", lambda: decode_samples(data, "bench"))
    timed("books", lambda: _books(_record(decoded, len(data))))
    return data


def _record(samples: tuple[MergedSample, ...], size: int) -> AttemptRecord:
    leaves = tuple(LeafCounts.of(sample) for sample in samples)
    key = merged_key(RUN, 0, 0, samples[0].attempt_id)
    ref = SampleRef(key=key, sha256="0" * 64, size_bytes=size, leaves=leaves)
    verdict = verdict_of(RUN, "bench", samples[0].attempt_id, 1.0)
    return record_of(SampleRef.from_wire(ref.to_wire(), key), verdict)


def record_of(ref: SampleRef | None, verdict: Verdict) -> AttemptRecord:
    """The record of an attempt that ran well and was verified."""
    attempt_id = verdict.attempt_id
    return AttemptRecord(
        attempt_id=attempt_id,
        group_id=attempt_id.rsplit("-a", 1)[0],
        task_id="bench",
        try_index=0,
        outcome=Outcome.PASSED if verdict.reward else Outcome.FAILED,
        verdict=verdict,
        exit_status="submitted",
        session_id="A" * 32,
        stored=ref,
        domain="bench",
        started_at=1_700_000_000.0,
        finished_at=1_700_000_321.0,
        phases_s=dict(_PHASES_S),
        agent_metrics={"turns": 61.0, "completion_tokens": 14_000.0},
        cleanup_confirmed=True,
    ).check(attempt_id)


def _books(record: AttemptRecord) -> None:
    """Filter and ledger of one attempt."""
    result = filter_groups([record], ObjectiveConfig(), expected_version=VERSION, max_seq_len=1 << 20)
    empty = {"status": "empty", "version_after": 0, "loss": None, "grad_norm": None}
    train = {**empty, "trained_samples": 0, "trained_tokens": 0, "loss_weight_sum": 0.0}
    record = replace(record, agent_metrics={})
    build_step_ledger(
        run=RUN, step=0, attempts=[record], decisions=result.decisions, train=train, push=None, phases_s={}
    )


# routing bytes


def routing_bytes_mb(options: Options) -> Iterator[Row]:
    shape = options.shape
    held, sample = played(shape), merged(shape)
    if sample.routing is None:
        raise Rl360Error("routing_bytes_mb needs a trajectory with routing")
    rows = len(sample.tokens) - 1
    ids = rows * shape.layers * shape.top_k
    engine = baseline.full_history_bytes(held.edges, shape.layers, shape.top_k), held.engine_bytes
    once = baseline.len64(4 * ids)
    store = once, sample.routing.nbytes
    goal = "each row once, one byte an id stored"
    # every turn's part is padded to whole base64 groups
    each_once = engine[1] <= once + 4 * shape.turns and store[1] == ids and len(sample.routing) == rows
    for name, (before, after) in {
        "routing_bytes_mb": (engine[0] + store[0], engine[1] + store[1]),
        "routing_bytes_mb_engine": engine,
        "routing_bytes_mb_store": store,
    }.items():
        yield Row(name, before / 1e6, after / 1e6, "MB", goal, each_once)
