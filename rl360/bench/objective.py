"""The rows of `rl360 bench objective`: what lies between a step's records and its optimizer step.

`advantages_ms`: from rewards and group numbers, 512 groups of 8, to advantages.
  Baseline: a loop over dicts, as one writes it first. From ids in any order, as the filter asks for them, is told in
  the detail: ours sorts them first, so that any order gives the same bits.
`packing_ms`: a step of 2.7M tokens to the arrays of its micro-batches.
  Baseline: every sample padded to the step's longest.
`trainer_tokens`: tokens of samples per CPU second through the trainer's optimizer step, on the laptop policy.
  Baseline: `bare_trainer`, the same model, samples and micro-batch budget.

Both ways must agree (advantages, the content of each sample's row, loss and gradient norm), or the benchmark fails.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl360.bench.rows import Options, Row, at_most, chosen_rows
from rl360.config.run import ObjectiveConfig, RunConfig
from rl360.errors import Rl360Error
from rl360.objective.advantages import attempt_advantages, group_index, scope_advantages
from rl360.training.logprobs import sequence_logprobs
from rl360.training.packing import MicroBatch, TrainSequence, build, plan

GROUPS, SIZE = 512, 8
STEP_TOKENS, LONGEST, MICRO_BATCH = 2_700_000, 58_000, 65_536
SPREAD = 0.6  # of log-normal lengths around a sixth of the longest
SAMPLES = 256
RTOL = 1e-4  # of loss and gradient norm: fp32 sums in another order


def measure(names: tuple[str, ...], options: Options) -> Iterator[Row]:
    """Each row as soon as it is measured; one name may give several."""
    for name in names:
        yield from ROWS[name](options)


def chosen(text: str | None) -> tuple[str, ...]:
    """Names from `a,b`; None means all."""
    return chosen_rows(text, tuple(ROWS), tuple(ROWS))


def _cpu_ms(work: Callable[[], object], times: int, calls: int = 1) -> float:
    """Median CPU milliseconds of one call, each measurement over `calls` of them."""
    spent = []
    for _ in range(times):
        before = time.process_time_ns()
        for _ in range(calls):
            work()
        spent.append((time.process_time_ns() - before) / calls / 1e6)
    return statistics.median(spent)


# advantages


def dict_advantages(rewards: Sequence[float], groups: Sequence[Any]) -> list[float]:
    """Reward less its group's mean."""
    members: dict[Any, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        members.setdefault(group, []).append(reward)
    means = {group: sum(values) / len(values) for group, values in members.items()}
    return [reward - means[group] for reward, group in zip(rewards, groups, strict=True)]


def advantages_ms(options: Options, groups: int = GROUPS) -> Iterator[Row]:
    options.say(f"advantages_ms: {groups} groups of {SIZE}")
    rng = np.random.default_rng(0)
    names = [f"s000000-g{group:03}" for group in range(groups) for _ in range(SIZE)]
    ids = [f"{name}-a{index % SIZE:02}-t0" for index, name in enumerate(names)]
    rewards = rng.random(len(names))
    _, index = group_index(names)
    plain, numbers = rewards.tolist(), index.tolist()
    shuffled = rng.permutation(len(names))
    mixed = rewards[shuffled], [names[i] for i in shuffled], [ids[i] for i in shuffled]

    ours = scope_advantages(rewards, index, "grpo", False)
    by_id = attempt_advantages(*mixed)
    if not np.allclose(ours, dict_advantages(plain, numbers), rtol=1e-12, atol=1e-15):
        raise Rl360Error("advantages_ms: the two ways give different advantages: nothing to compare")
    if (by_id != ours[shuffled]).any():
        raise Rl360Error("advantages_ms: another order of attempts gave other bits")
    times, calls = (3, 5) if options.quick else (15, 20)
    plain_mixed = mixed[0].tolist()
    by_id_ms = _cpu_ms(lambda: attempt_advantages(*mixed), times, calls)
    plain_by_id_ms = _cpu_ms(lambda: dict_advantages(plain_mixed, mixed[1]), times, calls)
    yield at_most(
        "advantages_ms",
        baseline=_cpu_ms(lambda: dict_advantages(plain, numbers), times, calls),
        ours=_cpu_ms(lambda: scope_advantages(rewards, index, "grpo", False), times, calls),
        unit="ms of CPU",
        limit=0.1,
        detail=f"from ids in random order {by_id_ms:.2f} ms, sorting included; the loop, which sorts nothing, "
        f"{plain_by_id_ms:.2f} ms",
    )


# packing


def drawn_step(tokens: int, longest: int, seed: int = 0) -> list[TrainSequence]:
    """Samples of `tokens` in all, lengths log-normal up to `longest`, a quarter of them sampled ids."""
    rng = np.random.default_rng(seed)
    samples: list[TrainSequence] = []
    while tokens > 1:
        drawn = rng.lognormal(np.log(longest / 6) - SPREAD**2 / 2, SPREAD)
        length = min(tokens, longest, max(int(drawn), longest // 1000, 2))
        tokens -= length
        mask = (rng.random(length) < 0.25).astype(np.uint8)
        mask[0] = 0
        ids = rng.integers(0, 1024, length).astype(np.int32)
        logprobs = np.where(mask, -rng.random(length), 0).astype(np.float32)
        samples.append(TrainSequence(ids, mask, logprobs, float(rng.normal()), f"sample {len(samples)}"))
    return samples


def packed(samples: Sequence[TrainSequence], budget: int) -> list[MicroBatch]:
    """As the trainer's one rank does it."""
    return [build(samples, indices) for indices in plan([len(s.tokens) for s in samples], budget)[0]]


def padded(samples: Sequence[TrainSequence], budget: int) -> Iterator[MicroBatch]:
    """In the order they came, every row as wide as the step's longest sample. One after the other: all would not fit
    into a small machine's memory."""
    width = max(len(s.tokens) for s in samples) - 1
    rows = max(1, budget // width)
    for start in range(0, len(samples), rows):
        indices = tuple(range(start, min(start + rows, len(samples))))
        shape = (len(indices), width)
        inputs, targets = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        mask = np.zeros(shape, np.uint8)
        logprobs, advantages, weights = (np.zeros(shape, np.float32) for _ in range(3))
        for row, sample in enumerate(samples[start : start + rows]):
            end = len(sample.tokens) - 1
            inputs[row, :end], targets[row, :end] = sample.tokens[:-1], sample.tokens[1:]
            mask[row, :end] = sample.loss_mask[1:]
            if sample.logprobs is not None:
                logprobs[row, :end] = sample.logprobs[1:]
            advantages[row], weights[row] = sample.advantage, sample.weight
        yield MicroBatch(indices, inputs, targets, mask, logprobs, advantages, weights)


def same_rows(samples: Sequence[TrainSequence], ours: Sequence[MicroBatch], theirs: Iterator[MicroBatch]) -> None:
    """Every sample is in exactly one row of either, with the same content."""
    where = {index: (batch, row) for batch in ours for row, index in enumerate(batch.indices)}
    if sorted(where) != list(range(len(samples))) or sum(len(batch.indices) for batch in ours) != len(samples):
        raise Rl360Error("packing_ms: not every sample is in exactly one micro-batch")
    for other in theirs:
        for row, index in enumerate(other.indices):
            batch, held = where[index]
            end = len(samples[index].tokens) - 1
            for name in ("inputs", "targets", "mask", "logprobs", "advantages", "weights"):
                if not np.array_equal(getattr(batch, name)[held, :end], getattr(other, name)[row, :end]):
                    raise Rl360Error(f"packing_ms: the two ways give sample {index} different {name}")
            if batch.mask[held, end:].any():
                raise Rl360Error(f"packing_ms: padding after sample {index} is under the loss mask")


def packing_ms(
    options: Options, tokens: int = STEP_TOKENS, longest: int = LONGEST, budget: int = MICRO_BATCH
) -> Iterator[Row]:
    samples = drawn_step(tokens, longest)
    options.say(f"packing_ms: {tokens:,} tokens in {len(samples)} samples")
    ours = packed(samples, budget)
    same_rows(samples, ours, padded(samples, budget))
    cells = sum(batch.inputs.size for batch in ours)
    naive = len(samples) * (max(len(s.tokens) for s in samples) - 1)
    del ours
    times = 2 if options.quick else 9
    yield at_most(
        "packing_ms",
        baseline=_cpu_ms(lambda: [None for _ in padded(samples, budget)], times),
        ours=_cpu_ms(lambda: packed(samples, budget), times),
        unit="ms of CPU",
        limit=100,
        detail=f"{len(samples)} samples of up to {max(len(s.tokens) for s in samples):,} tokens; {cells:,} cells, "
        f"{tokens / cells:.0%} of them tokens, against {naive:,} ({tokens / naive:.0%})",
    )


# the trainer


def trainer_tokens(options: Options, samples: int = SAMPLES) -> Iterator[Row]:
    """Starts from the laptop policy's fresh weights; the samples are its demonstrations."""
    from rl360.policy.demonstrations import demonstrations
    from rl360.policy.model import write_model
    from rl360.policy.tokenizer import RawEncoder, train_tokenizer

    steps = 2 if options.quick else 7
    options.say(f"trainer_tokens: {steps} optimizer steps of {samples} samples each way")
    tokenizer = train_tokenizer()
    rng = np.random.default_rng(0)
    data = [
        TrainSequence(ids, mask, advantage=float(rng.normal()), name=f"sample {index}")
        for index, (ids, mask) in enumerate(demonstrations(0, samples, 0.4, RawEncoder(tokenizer)))
    ]
    with tempfile.TemporaryDirectory(prefix="rl360-bench-") as folder:
        model = write_model(Path(folder) / "model", tokenizer, 0)
        ours, bare, padding = _train(model, data, steps, rng)
    tokens = sum(len(sample.tokens) for sample in data)
    by_ours, by_bare = (tokens / statistics.median(seconds) for seconds in (ours, bare))
    yield Row(
        "trainer_tokens",
        baseline=by_bare,
        ours=by_ours,
        unit="tokens/s of CPU",
        goal="ratio >= 1",
        holds=by_ours >= by_bare,
        detail=f"{samples} samples, {tokens:,} tokens, one thread; {padding}",
    )


def _train(
    model: Path, data: list[TrainSequence], steps: int, rng: np.random.Generator
) -> tuple[list[float], list[float], str]:
    """CPU seconds of each optimizer step, ours and bare by turns, from the same weights; refused when they differ."""
    import torch

    from rl360.bench.bare_trainer import BareTrainer, in_order
    from rl360.training.megatron import alone
    from rl360.training.megatron.model import Layout
    from rl360.training.megatron.policy import Optim, Policy
    from rl360.training.objective import policy_sums

    config, budget = ObjectiveConfig(), RunConfig().trainer.max_tokens_per_micro_batch
    trained = sum(int(sample.loss_mask.sum()) for sample in data)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    spent: tuple[list[float], list[float]] = [], []
    try:
        with alone.single_process():
            optim = Optim(RunConfig().trainer.lr)
            policy, bare = Policy(model, Layout(), optim), BareTrainer(model, optim)
            data = _with_rollout(data, sequence_logprobs(policy, data, budget), rng)
            for step in range(steps + 1):
                before = time.process_time()
                found = policy.step(policy.micro_batches(data, budget), policy_sums(config), trained)
                between = time.process_time()
                loss, norm = bare.step(data, budget, config.correction_high)
                after = time.process_time()
                if step:  # the first step of each sets up its memory
                    spent[0].append(between - before)
                    spent[1].append(after - between)
                pairs = (found.sums["loss"] / trained, loss), (found.grad_norm, norm)
                if not all(np.isclose(one, other, rtol=RTOL, atol=1e-7) for one, other in pairs):
                    raise Rl360Error(f"trainer_tokens: the two ways differ at step {step} (ours, bare): {pairs}")
            sorted_cells = sum(batch.inputs.size for batch in policy.micro_batches(data, budget))
    finally:
        torch.set_num_threads(threads)
    lengths = [len(sample.tokens) - 1 for sample in data]
    cells = sum(len(batch) * max(lengths[index] for index in batch) for batch in in_order(lengths, budget))
    return *spent, f"{sum(lengths) / sorted_cells:.0%} of the cells are tokens, in order {sum(lengths) / cells:.0%}"


def _with_rollout(
    data: list[TrainSequence], logprobs: list[np.ndarray], rng: np.random.Generator
) -> list[TrainSequence]:
    """The samples as if an engine had sampled them: the policy's log-probs, a little off."""
    return [
        TrainSequence(
            sample.tokens,
            sample.loss_mask,
            np.concatenate([[0], held + rng.normal(0, 0.01, len(held))]).astype(np.float32),
            sample.advantage,
            sample.name,
        )
        for sample, held in zip(data, logprobs, strict=True)
    ]


ROWS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "advantages_ms": advantages_ms,
    "packing_ms": packing_ms,
    "trainer_tokens": trainer_tokens,
}
