"""Where attempts' seconds, sampled tokens and money went: kept (trained), dropped, lost to infrastructure.

Everything is summed from the rows of ledgers; the three classes, the buckets and the outcomes each sum to the same
tokens and seconds. Tokens follow their own bucket; an attempt's seconds, which no token owns, follow the attempt.

Money, only when prices are given:

    cost             = gpu_hour * gpus * wall_s / 3600 + sandbox_hour * sandbox_s / 3600
    per trained token = cost / trained tokens

wall_s: seconds of the steps' tasks; sandbox_s: seconds in which attempts held a sandbox, all their phases but the
queue. Of the GPUs' cost, what `train`, `push_weights` and `checkpoint` took is the class `update`; the rest is shared
among the classes by the tokens each step sampled for them (a step without any: by its attempts' seconds). Sandbox
cost goes where the attempt's seconds go.
"""

from __future__ import annotations

import math
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from rl360.errors import BadInput
from rl360.ledger.outcomes import SAMPLED, Bucket, Outcome

if TYPE_CHECKING:
    from rl360.ledger.step import AttemptRow, StepLedger

CLASSES = ("kept", "dropped", "infra")
UPDATE = "update"
UPDATE_TASKS = ("train", "push_weights", "checkpoint")
QUEUE, UNPHASED = "queue", "other"
FORMULA = (
    "cost = gpu_hour x gpus x wall_s / 3600 + sandbox_hour x sandbox_s / 3600; "
    "per trained token = cost / trained tokens"
)


@dataclass(frozen=True)
class Prices:
    """What an hour of one GPU and of one sandbox costs, in any one currency, and how many GPUs the run holds."""

    gpu_hour: float = 0.0
    sandbox_hour: float = 0.0
    gpus: float = 1.0


def read_prices(path: Path | None, **given: float | None) -> Prices | None:
    """Prices of a TOML or JSON file (by its suffix) with the fields of `Prices`, under those `given` (None: not given).
    None when there are none at all; `BadInput` naming the field, its value and what is allowed."""
    fields: dict[str, Any] = {}
    if path is not None:
        try:
            data = path.read_bytes()
            fields = orjson.loads(data) if path.suffix == ".json" else tomllib.loads(data.decode())
        except OSError as error:
            raise BadInput(f"cannot read prices {path} ({error.strerror})") from None
        except ValueError as error:
            kind = "JSON" if path.suffix == ".json" else "TOML"
            raise BadInput(f"prices {path} is not {kind} ({error})") from None
        if not isinstance(fields, dict):
            raise BadInput(f"prices {path} holds {type(fields).__name__}, expected a map of fields")
    fields |= {name: value for name, value in given.items() if value is not None}
    allowed = tuple(Prices.__dataclass_fields__)
    for name, value in fields.items():
        if name not in allowed:
            raise BadInput(f"prices: unknown field {name}; allowed are {', '.join(allowed)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise BadInput(f"prices: {name} is {value!r}, a finite number of at least 0 is needed")
    if fields and not {"gpu_hour", "sandbox_hour"} & fields.keys():
        raise BadInput("prices: gpus alone has no price; give gpu_hour or sandbox_hour too")
    return Prices(**fields) if fields else None


def class_of(row: AttemptRow) -> str:
    """The class of an attempt: kept when it trained, infra without a score, else dropped."""
    return "kept" if row.trains else "infra" if row.score is None else "dropped"


def token_class(row: AttemptRow, bucket: Bucket) -> str:
    """The class of an attempt's tokens in one bucket: of a kept attempt, those that did not train are dropped."""
    return "infra" if row.score is None else "kept" if bucket is Bucket.TRAINED else "dropped"


def waste(ledgers: Iterable[StepLedger], prices: Prices | None = None) -> dict[str, Any]:
    """The books of `rl360 ledger RUN --waste`, over all `ledgers`, which are taken one at a time.

    `by_bucket` counts an attempt and its seconds under its own reason, and tokens under theirs. `by_phase` splits
    seconds by class; `UNPHASED` is what no phase accounts for. `money` is None without prices.
    """
    classes, buckets, outcomes = ({name: _entry() for name in names} for names in (CLASSES, SAMPLED, Outcome))
    crossed = {outcome: dict.fromkeys(CLASSES, 0) for outcome in Outcome}
    phases: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(CLASSES, 0.0))
    gpu_s = dict.fromkeys((*CLASSES, UPDATE), 0.0)
    sandbox_s = dict.fromkeys(CLASSES, 0.0)
    steps, attempts, sampled, seconds, wall_s = 0, 0, 0, 0.0, 0.0
    for ledger in ledgers:
        steps += 1
        shares = dict.fromkeys(CLASSES, 0.0)
        for row in ledger.attempts:
            name = class_of(row)
            for entry in (classes[name], buckets[row.bucket], outcomes[row.outcome]):
                entry["attempts"] += 1
                entry["seconds"] += row.seconds
            for bucket, count in row.tokens.items():
                where = token_class(row, bucket)
                for entry in (classes[where], buckets[bucket], outcomes[row.outcome]):
                    entry["tokens"] += count
                crossed[row.outcome][where] += count
                shares[where] += count
            for phase, spent in {**row.phases_s, UNPHASED: row.seconds - sum(row.phases_s.values())}.items():
                phases[phase][name] += spent
            sandbox_s[name] += sum(spent for phase, spent in row.phases_s.items() if phase != QUEUE)
            attempts, sampled, seconds = attempts + 1, sampled + row.sampled_tokens, seconds + row.seconds
        step_s = sum(ledger.phases_s.values())
        update_s = sum(ledger.phases_s.get(task, 0.0) for task in UPDATE_TASKS)
        wall_s += step_s
        gpu_s[UPDATE] += update_s
        for name, share in _shares(shares, ledger).items():
            gpu_s[name] += share * (step_s - update_s)
    for outcome, entry in outcomes.items():
        entry.update({f"{name}_tokens": crossed[Outcome(outcome)][name] for name in CLASSES})
    trained = buckets[Bucket.TRAINED]["tokens"]
    return {
        "steps": steps,
        "attempts": attempts,
        "sampled_tokens": sampled,
        "trained_tokens": trained,
        "seconds": seconds,
        "wall_s": wall_s,
        "sandbox_s": sum(sandbox_s.values()),
        "by_class": classes,
        "by_bucket": _present(buckets),
        "by_outcome": _present(outcomes),
        "by_phase": dict(phases),
        "money": None if prices is None else _money(prices, gpu_s, sandbox_s, trained),
    }


def _entry() -> dict[str, Any]:
    return {"attempts": 0, "tokens": 0, "seconds": 0.0}


def _present(entries: Mapping[Any, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {str(name): entry for name, entry in entries.items() if entry["attempts"] or entry["tokens"]}


def _shares(tokens: Mapping[str, float], ledger: StepLedger) -> dict[str, float]:
    """Each class's part of the step, summing to 1; a step without an attempt is nobody's, and counted as dropped."""
    parts = dict(tokens)
    if not any(parts.values()):
        for row in ledger.attempts:
            parts[class_of(row)] += row.seconds
    total = sum(parts.values())
    return {name: part / total for name, part in parts.items()} if total else {"dropped": 1.0}


def _money(prices: Prices, gpu_s: Mapping[str, float], sandbox_s: Mapping[str, float], trained: int) -> dict[str, Any]:
    gpu = {name: prices.gpu_hour * prices.gpus * spent / 3600 for name, spent in gpu_s.items()}
    sandbox = {name: prices.sandbox_hour * spent / 3600 for name, spent in sandbox_s.items()}
    total = math.fsum([*gpu.values(), *sandbox.values()])
    return {
        "prices": asdict(prices),
        "formula": FORMULA,
        "by_class": {name: gpu[name] + sandbox.get(name, 0.0) for name in gpu},
        "gpu": sum(gpu.values()),
        "sandbox": sum(sandbox.values()),
        "total": total,
        "per_trained_token": total / trained if trained else None,
    }
