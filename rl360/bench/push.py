"""`rl360 bench push`: what a changed engine set costs the next push, calls at the 375B shape, and what a delta saves.

`push_after_swap`: three real engines on a tiny mixture of experts, steady pushes, then one engine is lost and replaced
  in several orders; the next push on the new set, median over the orders, against the same run's median steady push.
  It must take the same path with as many calls per engine, or the row misses whatever it took.
`calls_direct`, `calls_broadcast`: the planner's calls per engine for a 375B mixture of experts; no weights are needed.
`delta_bytes`, `delta_time`: one real AdamW step on the tiny model as a difference, written and applied, against full.
"""

from __future__ import annotations

import signal
import statistics
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rl360.bench.push_fleet import EngineProcess, Fleet, SentWeights, answers, fleet, write_moe
from rl360.bench.rows import Options, Row, chosen_rows, ratio_at_most
from rl360.engines.fleet import EngineIdentity
from rl360.errors import Rl360Error
from rl360.weights import fence
from rl360.weights.messages import EngineLayout, EngineSet, PushPlan, PushRecord, Transport
from rl360.weights.plan import plan_push
from rl360.weights.shapes import read_shape

if TYPE_CHECKING:
    import torch

    from rl360.weights.delta import Held

SWAP, CALLS, DELTA = "push_after_swap", ("calls_direct", "calls_broadcast"), ("delta_bytes", "delta_time")
KNOWN = (SWAP, *CALLS, *DELTA)
SHAPE = Path(__file__).resolve().parents[1] / "weights" / "moe_375b.json"
ROUND_BYTES = 512 << 20
CALLS_GOAL = {"calls_direct": 41, "calls_broadcast": 1432}
HIDDEN = 256
ORDERS = ("before", "pause", "transfer", "confirmed", "during", "twice")
SLOWER = 1.2
LEARNING_RATE = 1e-5


def chosen(text: str | None) -> tuple[str, ...]:
    return chosen_rows(text, KNOWN, KNOWN)


def measure(names: tuple[str, ...], options: Options) -> Iterator[Row]:
    """The rows, quickest first."""
    if set(names) & set(CALLS):
        yield from (row for row in calls_rows() if row.row in names)
    if set(names) & set(DELTA):
        with tempfile.TemporaryDirectory() as folder:
            yield from (row for row in delta_rows(Path(folder)) if row.row in names)
    if SWAP in names:
        yield swap_row(options)


def planned(transport: Transport) -> PushPlan:
    """The plan for the 375B shape and 8 engines of 32 ranks."""
    shape = read_shape(SHAPE)
    engines = tuple(EngineIdentity(url=f"http://{n}:1", incarnation=f"{n:016}") for n in range(8))
    return plan_push(
        shape.tensors,
        EngineSet(epoch=1, engines=engines),
        run="bench",
        version="bench:1",
        bucket_bytes=ROUND_BYTES,
        call_deadline_s=60,
        transport=transport,
        layout=EngineLayout(tp=32, ep=32, kv_heads=shape.kv_heads),
        sources=8,
    )


def calls_rows() -> Iterator[Row]:
    direct = planned(Transport.DIRECT_EXPERTS)
    broadcast = planned(Transport.BROADCAST)
    for name, plan in (("calls_direct", direct), ("calls_broadcast", broadcast)):
        goal = CALLS_GOAL[name]
        off = abs(plan.calls_per_engine - goal)
        holds = off == 0 if plan is direct else off <= 0.01 * goal
        detail = f"{plan.total_bytes / 1e9:,.0f} GB leave the trainer for 8 engines, {plan.control_calls} control calls"
        says = f"= {goal}" if plan is direct else f"about {goal:,} (within 1%)"
        baseline = float(broadcast.calls_per_engine) if plan is direct else None
        yield Row(name, baseline, float(plan.calls_per_engine), "calls", says, holds, detail)


def delta_rows(folder: Path) -> Iterator[Row]:
    """The files of one optimizer step, in full and as a difference."""
    from rl360.bench.delta import compare

    write_moe(folder / "model", HIDDEN)
    before = SentWeights(folder / "model").tensors
    after = _one_step(folder / "model")
    costs = compare(folder / "model", _held(before), _held(after), folder / "files")
    full, part = costs.full, costs.delta
    changed = sum(int((before[name] != after[name]).sum()) for name in after) / sum(t.numel() for t in after.values())
    detail = f"{changed:.1%} of the elements differ after one AdamW step of {LEARNING_RATE:g}"
    yield ratio_at_most(
        "delta_bytes", baseline=full.bytes / 1e6, ours=part.bytes / 1e6, unit="MB", limit=0.5, detail=detail
    )
    times = [cost.write_s + cost.apply_s for cost in (full, part)]
    yield ratio_at_most(
        "delta_time",
        baseline=times[0],
        ours=times[1],
        unit="s",
        limit=2.0,
        detail="write, fetch, check, apply; local disk",
    )


def _held(tensors: dict[str, torch.Tensor]) -> dict[str, Held]:
    """As the trainer's disk transport hands them over."""
    from rl360.weights.checksum import raw_bytes, tensor_specs
    from rl360.weights.delta import Held

    return {
        spec.name: Held(spec, np.frombuffer(raw_bytes(tensor), np.uint8).copy())
        for spec, tensor in zip(tensor_specs(tensors), tensors.values(), strict=True)
    }


def _one_step(model_dir: Path) -> dict[str, torch.Tensor]:
    """The model's weights in bfloat16 after one AdamW step in float32 on its own random text."""
    import torch
    from transformers import Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    ids = torch.randint(5, model.config.vocab_size, (4, 128))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    saved = model_dir.parent / "after"
    model.to(torch.bfloat16).save_pretrained(saved)
    return SentWeights(saved).tensors


def swap_row(options: Options) -> Row:
    """Steady pushes, swaps in each order, the push after each."""
    orders = ORDERS[2:3] if options.quick else ORDERS
    steady: list[float] = []
    after: dict[str, float] = {}
    different: list[str] = []
    with tempfile.TemporaryDirectory() as folder, fleet(Path(folder), hidden=HIDDEN) as running:
        options.say("push: three engines are up")
        first, _ = running.next_push()
        for order in orders:
            steady += [_steady(running) for _ in range(3)]
            lost = running.engines[len(after) % len(running.engines)]
            _swap(running, lost, order)
            record, after[order] = running.next_push()
            before = [past for past in running.records[:-1] if past.group_reused][-1]
            options.say(
                f"push: {order}: {after[order]:.3f} s after, steady {statistics.median(steady):.3f} s; "
                f"phases {_phases(record)}, in the steady one before {_phases(before)}"
            )
            if record.way != first.way or len(record.serving) != len(running.engines):
                different.append(f"{order}: {record.way} to {len(record.serving)} engines")
        paused = statistics.median(record.paused_s for record in running.records)
    each = ", ".join(f"{order} {took:.3f}" for order, took in after.items())
    detail = f"{first.way}; {each} s; median pause {paused:.3f} s" + "".join(f"; CHANGED {d}" for d in different)
    baseline, ours = statistics.median(steady), statistics.median(after.values())
    holds = ours <= SLOWER * baseline and not different
    goal = f"ratio <= {SLOWER:g}, same path, same calls"
    return Row(SWAP, baseline, ours, "s", goal, holds, detail)


def _phases(record: PushRecord) -> str:
    return " ".join(f"{name} {seconds:.2f}" for name, seconds in record.phases_s.items())


def _steady(running: Fleet) -> float:
    record, took = running.next_push()
    if not record.group_reused or len(record.serving) != len(running.engines):
        raise Rl360Error(f"a steady push was none: {record.way}, {len(record.serving)} engines, {record.reason}")
    return took


def _swap(running: Fleet, lost: EngineProcess, order: str) -> None:
    """Lose an engine as `order` says, and have another incarnation answer at its URL."""

    def kill(*_: object) -> None:
        running.weights.before = running.weights.asked = running.store.asked = None
        lost.strike(signal.SIGKILL)

    if order == "before":
        kill()
    elif order == "pause":  # it answered when the set was frozen, and is gone before it is paused
        running.weights.asked = kill
    elif order == "transfer":
        running.weights.before = lambda _plan: threading.Timer(0.02, kill).start()
    elif order == "confirmed":  # between the checksums and the resume a push asks the store whether it is still its own
        own = fence.end_key(fence.next_epoch(running.store))
        running.store.asked = lambda key: kill() if key == own else None
    else:
        kill()
    if order != "before":
        record, _ = running.next_push()
        if [engine.identity.url for engine in record.serving].count(lost.url):
            raise Rl360Error(f"{order}: {lost.url} serves though it was killed")
    for _ in range(2 if order == "twice" else 1):
        lost.end()
        lost.start()
        if order == "during":  # it comes up under a push that does not know it
            while lost.alive and not answers(f"{lost.url}/ping"):
                running.next_push()
        lost.wait()
