"""`rl360 bench push`: what a changed engine set costs the next push, calls at the 375B shape, and what a delta saves.

`push_after_swap`, `push_after_swap_direct`: three real engines on a tiny mixture of experts, steady pushes, then one
  engine is lost and replaced in several orders; the next push on the new set, median over the orders, against the same
  run's median steady push; by broadcast, and with experts sent directly. It must take the same path with as many calls
  per engine, or the row misses whatever it took.
`calls_direct`, `calls_broadcast`: the planner's calls per engine for a 375B mixture of experts; no weights are needed.
`delta_bytes`, `delta_time`: an optimizer step of the trainer as a difference, written and applied, against full.
`delta_push`: pushes of such steps to the three engines as a difference, against full, by turns.
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

from rl360.bench.push_fleet import EngineProcess, Fleet, answers, fleet, write_moe
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

SWAPS = {"push_after_swap": Transport.BROADCAST, "push_after_swap_direct": Transport.DIRECT_EXPERTS}
CALLS, DELTA, DELTA_PUSH = ("calls_direct", "calls_broadcast"), ("delta_bytes", "delta_time"), "delta_push"
KNOWN = (*SWAPS, *CALLS, *DELTA, DELTA_PUSH)
SHAPE = Path(__file__).resolve().parents[1] / "weights" / "moe_375b.json"
ROUND_BYTES = 512 << 20
CALLS_GOAL = {"calls_direct": 41, "calls_broadcast": 1432}
HIDDEN = 256
ORDERS = ("before", "pause", "transfer", "confirmed", "during", "twice")
SLOWER = 1.2
LEARNING_RATE, OTHER_RATES = 1e-5, (1e-6, 3e-4)
SAMPLES = 64


def chosen(text: str | None) -> tuple[str, ...]:
    return chosen_rows(text, KNOWN, KNOWN)


def measure(names: tuple[str, ...], options: Options) -> Iterator[Row]:
    """The rows, quickest first."""
    if set(names) & set(CALLS):
        yield from (row for row in calls_rows() if row.row in names)
    if set(names) & set(DELTA):
        with tempfile.TemporaryDirectory() as folder:
            yield from (row for row in delta_rows(Path(folder)) if row.row in names)
    swaps = [name for name in SWAPS if name in names]
    if swaps or DELTA_PUSH in names:
        with tempfile.TemporaryDirectory() as folder, fleet(Path(folder), hidden=HIDDEN) as running:
            options.say("push: three engines are up")
            for name in swaps:
                yield swap_row(name, running, options)
            if DELTA_PUSH in names:
                yield delta_push_row(running, options)


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
    told, costs = [], []
    for rate in (LEARNING_RATE, *OTHER_RATES):
        before, after = trained_steps(folder / "model", rate, 2)
        cost = compare(folder / "model", _held(before), _held(after), folder / f"files-{rate:g}")
        costs.append(cost)
        changed = sum(int((before[n] != after[n]).sum()) for n in after) / sum(t.numel() for t in after.values())
        told.append(f"{cost.delta.bytes / 1e6:.2f} MB at a rate of {rate:g} ({changed:.1%} of the elements differ)")
    full, part = costs[0].full, costs[0].delta
    detail = f"the trainer's step: {'; '.join(told)}"
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


def delta_push_row(running: Fleet, options: Options) -> Row:
    """Pushes of consecutive steps, full and as a difference by turns; each engine fetches from a shared folder."""
    ways = Transport.DISK_FULL, Transport.DISK_DELTA
    done: dict[Transport, list[tuple[float, PushRecord]]] = {way: [] for way in ways}
    steady = running.config
    for index, tensors in enumerate(trained_steps(running.model_dir, LEARNING_RATE, 4 if options.quick else 10)):
        way = ways[index % 2]
        running.config = steady.model_copy(update={"transport": way, "folder": str(running.home / "files")})
        running.weights.tensors = tensors
        running.step += 1
        record, took = running.push_again()
        if record.path != way or len(record.serving) != len(running.engines):
            raise Rl360Error(f"a push by {way} went by {record.path} to {len(record.serving)} engines")
        done[way].append((took, record))
    running.config = steady
    full, part = (statistics.median(took for took, _ in done[way]) for way in ways)
    sent = [statistics.median(record.bytes for _, record in done[way]) / 1e6 for way in ways]
    paused = [statistics.median(record.paused_s for _, record in done[way]) for way in ways]
    detail = (
        f"{len(done[ways[1]])} of each; {sent[1]:.2f} MB on the wire against {sent[0]:.2f}, "
        f"{paused[1]:.3f} s paused against {paused[0]:.3f}"
    )
    return ratio_at_most(DELTA_PUSH, baseline=full, ours=part, unit="s", limit=2.0, detail=detail)


def _held(tensors: dict[str, torch.Tensor]) -> dict[str, Held]:
    """As the trainer's disk transport hands them over."""
    from rl360.weights.checksum import raw_bytes, tensor_specs
    from rl360.weights.delta import Held

    return {
        spec.name: Held(spec, np.frombuffer(raw_bytes(tensor), np.uint8).copy())
        for spec, tensor in zip(tensor_specs(tensors), tensors.values(), strict=True)
    }


def trained_steps(model_dir: Path, learning_rate: float, count: int) -> list[dict[str, torch.Tensor]]:
    """What the trainer pushes after each of `count` steps of its own objective and optimizer on demonstrations.

    A step before them is not told: AdamW's first moves every element by the learning rate, whatever its gradient.
    """
    import torch
    from tokenizers import Tokenizer

    from rl360.config.run import ObjectiveConfig, RunConfig
    from rl360.policy.demonstrations import demonstrations
    from rl360.policy.tokenizer import RawEncoder
    from rl360.training.logprobs import sequence_logprobs
    from rl360.training.megatron import alone
    from rl360.training.megatron.model import Layout
    from rl360.training.megatron.policy import Optim, Policy
    from rl360.training.objective import policy_sums
    from rl360.training.packing import TrainSequence

    rng, budget = np.random.default_rng(0), RunConfig().trainer.max_tokens_per_micro_batch
    tokenizer = RawEncoder(Tokenizer.from_file(str(model_dir / "tokenizer.json")))
    drawn = [(ids, mask, float(rng.normal())) for ids, mask in demonstrations(0, SAMPLES, 0.4, tokenizer)]
    pushed = []
    with alone.single_process():
        policy = Policy(model_dir, Layout(), Optim(learning_rate))
        for _ in range(count + 1):
            data = [TrainSequence(ids, mask, advantage=advantage) for ids, mask, advantage in drawn]
            held = sequence_logprobs(policy, data, budget)
            data = [
                TrainSequence(ids, mask, np.concatenate([[0], old]).astype(np.float32), advantage)
                for (ids, mask, advantage), old in zip(drawn, held, strict=True)
            ]
            trained = sum(int(mask.sum()) for _, mask, _ in drawn)
            policy.step(policy.micro_batches(data, budget), policy_sums(ObjectiveConfig()), trained)
            pushed.append({name: tensor.to(torch.bfloat16) for name, tensor in policy.weights().items()})
    return pushed[1:]


def swap_row(name: str, running: Fleet, options: Options) -> Row:
    """Steady pushes, swaps in each order, the push after each."""
    orders = ORDERS[2:3] if options.quick else ORDERS
    running.config = running.config.model_copy(update={"transport": SWAPS[name]})
    steady: list[float] = []
    after: dict[str, float] = {}
    different: list[str] = []
    first, _ = running.next_push()
    for order in orders:
        steady += [_steady(running) for _ in range(3)]
        lost = running.engines[len(after) % len(running.engines)]
        _swap(running, lost, order)
        record, after[order] = running.next_push()
        before = [past for past in running.records[:-1] if past.group_reused][-1]
        options.say(
            f"{name}: {order}: {after[order]:.3f} s after, steady {statistics.median(steady):.3f} s; "
            f"phases {_phases(record)}, in the steady one before {_phases(before)}"
        )
        if record.way != first.way or len(record.serving) != len(running.engines):
            different.append(f"{order}: {record.way} to {len(record.serving)} engines")
    baseline, ours = statistics.median(steady), statistics.median(after.values())
    each = ", ".join(f"{order} {took:.3f}" for order, took in after.items())
    worst = max(after.values()) / baseline
    detail = f"{first.way}; {each} s, at worst {worst:.2f} times" + "".join(f"; CHANGED {d}" for d in different)
    holds = ours <= SLOWER * baseline and not different
    goal = f"ratio <= {SLOWER:g}, same path, same calls"
    return Row(name, baseline, ours, "s", goal, holds, detail)


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
