"""A step as the product computes it, on a model small enough to do it thousands of times: records -> filter -> batch
object -> samples -> rectangles -> loss -> gradient -> ledger.

All but the model is the product's own code; the model is one block of causal attention in float64. A batch is read off
a string of bytes, one byte a choice, 0 the plainest: hypothesis draws it in one go and shrinks it to what is at fault.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import strategies as st

from rl360.config.run import ObjectiveConfig
from rl360.ledger.outcomes import HAS_VERDICT, INFRA, Outcome
from rl360.ledger.step import StepLedger, build_step_ledger
from rl360.objective.filters import FilterResult, filter_groups
from rl360.objective.presets import PRESETS
from rl360.sessions.sample import AttemptRecord, SampleRef
from rl360.store.codec import pack, sha256_hex
from rl360.store.layout import merged_key
from rl360.training import results
from rl360.training.objective import policy_sums
from rl360.training.packing import MicroBatch, TrainSequence, build, plan
from rl360.training.results import Batch, parse_batch, read_samples
from tests.unit.ledger_data import PHASES_S, PUSH, train_result
from tests.unit.objective_data import OBJECTS, VOCAB, attempt, sample_of, store_samples

torch.set_num_threads(1)
RUN, STEP, VERSION, MAX_SEQ_LEN, CONSTANT = "demo", 0, "demo:0", 24, 640.0
WHOLE = 1 << 20  # tokens a micro-batch: everything in one rectangle
SUMS = ("loss", "weight", "tokens", "samples", "clipped", "tis", "masked", "abs_dlogp", "entropy", "kl")

FIELDS: list[dict[str, Any]] = [{"preset": name} for name in PRESETS]
FIELDS += [{"entropy_coef": 0.1}, {"veto": 0.2, "off_policy_delta": 0.05}, {"reduction": "sample_mean"}]
FIELDS += [{"correction": "clip", "correction_low": 0.8, "correction_level": "sequence"}, {"filter_on": "raw"}]
FIELDS += [{"kl_coef": 0.1, "kl_estimator": "low_variance", "correction_low": 0.5, "correction": "mask"}]
FIELDS += [{"format_error_penalty": 0.25, "filter_on": "shaped"}, {"estimator": "rloo", "reduction": "sample_mean"}]
CONFIGS = tuple(ObjectiveConfig.model_validate(each) for each in FIELDS)
configs = st.sampled_from(CONFIGS)

# what a sample can be: the common ones first
LEAVES: tuple[dict[str, Any], ...] = (
    {"trained": 3, "prompt": 2, "observed": 1},
    {"trained": 5, "prompt": 1, "observed": 2},
    {"trained": 1, "prompt": 4, "observed": 0},
    {"trained": 8, "prompt": 3, "observed": 4, "truncated": True, "dropped": {"after_truncation": 3}},
    {"trained": 2, "prompt": 2, "dropped": {"prefix_break": 2, "duplicate": 1}},
    {"trained": 0, "prompt": 6, "observed": 0, "dropped": {"infra": 4}},
    {"trained": 0, "prompt": 5, "observed": 0},
    {"trained": 4, "prompt": 2, "version": "run:9"},
    {"trained": 4, "prompt": 2, "differs": 1},
    {"trained": 9, "prompt": 12, "observed": 5},  # over length
)
REWARDS = (1.0, 0.0, 0.0, 0.25, 1 / 3, -1.0, 2.0)


class Choices:
    """One choice a byte; the first option when the bytes are used up."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def below(self, count: int) -> int:
        self.at += 1
        return self.data[self.at - 1] % count if self.at <= len(self.data) else 0

    def of(self, options: Sequence[Any]) -> Any:
        return options[self.below(len(options))]


@cache
def stored(attempt_id: str, group_id: str, leaves: tuple[int, ...], seed: int) -> SampleRef:
    """The samples of an attempt, made once."""
    merged = [
        sample_of(attempt_id, group_id, leaf=at, seed=seed + at, **{"version": VERSION, **LEAVES[kind]})
        for at, kind in enumerate(leaves)
    ]
    return store_samples(merged, merged_key(RUN, STEP, 0, attempt_id))


@cache
def made(
    group: int, index: int, outcome: Outcome, reward: float | None, leaves: tuple[int, ...], unmerged: int, errors: int
) -> AttemptRecord:
    """An attempt; the same arguments make it once only. Without `leaves` it has no samples."""
    record = attempt(group, index, reward, outcome=outcome, sample=False, unmerged=0 if leaves else unmerged)
    held = stored(record.attempt_id, record.group_id, leaves, 97 * group + 7 * index) if leaves else None
    return replace(record, stored=held, agent_metrics={"format_errors": float(errors)}).check("made")


def _one(choose: Choices, group: int, index: int, outcomes: Sequence[Outcome]) -> AttemptRecord:
    outcome = choose.of(outcomes)
    reward = choose.of(REWARDS) if outcome in HAS_VERDICT else None
    leaves: tuple[int, ...] = (choose.of((0, 0, 0, 1, 1, 2, *range(len(LEAVES)))),)
    leaves = choose.of((leaves, leaves, leaves, (*leaves, choose.of((2, 0, 3, 6))), ()))
    return made(group, index, outcome, reward, leaves, choose.below(4), choose.below(2))


# passed and failed stand before the others and more than once: most attempts have a verdict
ANY = (Outcome.PASSED, Outcome.FAILED) * 7 + tuple(Outcome)
LOST = tuple(sorted(INFRA))


def records_of(choose: Choices, outcomes: Sequence[Outcome] = ANY) -> list[AttemptRecord]:
    """Up to 3 groups of up to 4 attempts of up to 2 samples."""
    sizes = [2 + choose.below(3) for _ in range(1 + choose.below(3))]
    return [_one(choose, group, index, outcomes) for group, size in enumerate(sizes) for index in range(size)]


def lost_of(choose: Choices, *, timeouts: bool) -> list[AttemptRecord]:
    """Up to 6 attempts that infrastructure lost, in groups that are there and in others; `timeouts`: of those too."""
    outcomes = [outcome for outcome in LOST if timeouts or outcome is not Outcome.AGENT_TIMEOUT]
    return [_one(choose, choose.below(5), 50 + index, outcomes) for index in range(1 + choose.below(6))]


batches = st.binary(min_size=80, max_size=80).map(Choices)


def decided(
    records: Sequence[AttemptRecord], config: ObjectiveConfig, score_timeouts: bool, constant: float
) -> FilterResult:
    return filter_groups(
        records,
        config,
        expected_version=VERSION,
        max_seq_len=MAX_SEQ_LEN,
        loss_constant=constant,
        score_timeouts=score_timeouts,
    )


class _Objects:
    """The objects that the records refer to, as a store gives them."""

    def __init__(self, records: Sequence[AttemptRecord]) -> None:
        self.held = {record.stored.key: OBJECTS[record.stored.sha256] for record in records if record.stored}

    def get_required(self, key: str) -> bytes:
        return self.held[key]


class _Inline:
    """In place of the pool that reads objects: to start threads thousands of times would take most of the time."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.map = map

    def __enter__(self) -> _Inline:
        return self

    def __exit__(self, *_: object) -> None:
        return


def read_batch(records: Sequence[AttemptRecord], data: bytes) -> tuple[Batch, list[TrainSequence]]:
    """What the trainer reads of the batch object `data`, weights in units of the mean's as it takes them."""
    batch = parse_batch(data, "filter.msgpack", sha256_hex(data), RUN, STEP)
    with patch.object(results, "ThreadPoolExecutor", _Inline):
        found = read_samples(cast(Any, _Objects(records)), batch.rows, VOCAB)
    for sample, row in zip(found, batch.rows, strict=True):
        object.__setattr__(sample, "weight", row.weight * batch.trained_tokens)
    return batch, found


class Model:
    """One block of causal attention over `VOCAB` ids, float64; logits are made of the hidden states alone."""

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)

        def matrix(*shape: int) -> torch.Tensor:
            return (0.6 * torch.randn(*shape, dtype=torch.float64, generator=draw)).requires_grad_()

        self.embedding, self.mix, self.head = matrix(VOCAB, 4), matrix(4, 12), matrix(4, VOCAB)
        self.parameters = (self.embedding, self.mix, self.head)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states `[rows, width, 4]` and logits of ids `[rows, width]`."""
        x = self.embedding[inputs]
        query, key, value = (x @ self.mix).chunk(3, -1)
        scores = query @ key.transpose(-1, -2)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        hidden = x + scores.masked_fill(later, -torch.inf).softmax(-1) @ value
        return hidden, hidden @ self.head

    @torch.no_grad()
    def logprobs(self, batch: Any) -> torch.Tensor:
        return self.forward(batch.inputs)[1].log_softmax(-1).gather(-1, batch.targets[..., None])[..., 0]


MODEL, REFERENCE = Model(7), Model(8)


@dataclass
class Trained:
    """What training a batch gives: sums by name, the gradient over all parameters float64 `[numbers]`, and for each
    sample the columns whose hidden state the loss reached."""

    sums: dict[str, float]
    gradient: np.ndarray
    reached: dict[int, np.ndarray]

    def bits(self) -> tuple[bytes, bytes]:
        return np.array([*self.sums.values()]).tobytes(), self.gradient.tobytes()


def _tensors(batch: MicroBatch) -> Any:
    held = {each.name: getattr(batch, each.name) for each in fields(batch) if each.name != "indices"}
    return SimpleNamespace(
        **{
            name: None if value is None else torch.from_numpy(np.ascontiguousarray(value))
            for name, value in held.items()
        }
    )


def train(
    samples: Sequence[TrainSequence],
    tokens: int,
    config: ObjectiveConfig,
    *,
    max_tokens: int = WHOLE,
    ranks: int = 1,
    multiple: int = 1,
) -> Trained:
    """Gradient of the step's loss: over micro-batches and ranks, divided once by `tokens`."""
    loss_sums, totals, reached = policy_sums(config), np.zeros(len(SUMS)), {}
    gradient = [torch.zeros_like(each) for each in MODEL.parameters]
    for share in plan([len(sample.tokens) for sample in samples], max_tokens, ranks, multiple):
        for indices in share:
            batch = _tensors(build(samples, indices, multiple))
            batch.reference = REFERENCE.logprobs(batch) if config.kl_coef else None
            hidden, logits = MODEL.forward(batch.inputs)
            hidden.retain_grad()
            spread = logits.log_softmax(-1)
            logprobs = spread.gather(-1, batch.targets[..., None])[..., 0]
            sums = loss_sums(logprobs, -(spread.exp() * spread).sum(-1), batch)
            found = torch.autograd.grad(sums[0] / max(tokens, 1), (hidden, *MODEL.parameters))
            gradient = [one + other for one, other in zip(gradient, found[1:], strict=True)]
            totals += np.array([float(each.detach()) for each in sums])
            lit = (found[0] != 0).any(-1).numpy()
            reached.update({index: lit[row] for row, index in enumerate(indices)})
            assert not lit[len(indices) :].any(), "a row that holds no sample has a gradient"
    flat = torch.cat([each.flatten() for each in gradient]).numpy()
    return Trained(dict(zip(SUMS, totals.tolist(), strict=True)), flat, reached)


@dataclass
class Step:
    """A step from its records to its gradient, and on to its ledger; `data` is the batch object's bytes."""

    records: Sequence[AttemptRecord]
    result: FilterResult
    data: bytes
    batch: Batch
    samples: list[TrainSequence]
    trained: Trained

    @property
    def batch_rows(self) -> bytes:
        """The part of the batch object that the trainer reads."""
        return pack([vars(row) for row in self.result.kept])

    def report(self) -> dict[str, Any]:
        """What the trainer answers; tokens, samples and weights as the loss counted them."""
        tokens, sums = self.batch.trained_tokens, self.trained.sums
        seen = {"trained_tokens": round(sums["tokens"]), "trained_samples": round(sums["samples"])}
        seen |= {"loss_weight_sum": sums["weight"] / max(tokens, 1), "batch_digest": sha256_hex(self.data)}
        return train_result(self.result, STEP, **seen) | {"loss": sums["loss"] / tokens if tokens else None}

    def ledger(self) -> StepLedger:
        report = self.report()
        return build_step_ledger(
            run=RUN,
            step=STEP,
            attempts=self.records,
            decisions=self.result.decisions,
            train=report,
            push=PUSH if self.batch.trained_tokens else None,
            phases_s=PHASES_S,
        )


def take(
    records: Sequence[AttemptRecord],
    config: ObjectiveConfig,
    score_timeouts: bool = False,
    constant: float = CONSTANT,
) -> Step:
    """A step of these records, in the order given."""
    result = decided(records, config, score_timeouts, constant)
    data = pack(result.to_wire(RUN, STEP))
    batch, samples = read_batch(records, data)
    trained = train(samples, batch.trained_tokens, config)
    assert all(map(math.isfinite, trained.sums.values()))
    return Step(list(records), result, data, batch, samples, trained)
