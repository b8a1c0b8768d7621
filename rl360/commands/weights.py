"""`rl360 weights`: what a push of a model would be, by transport, without weights and without engines."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl360.weights.messages import PushPlan, TensorSpec
    from rl360.weights.shapes import ModelShape

app = typer.Typer(no_args_is_help=True, help="Weight pushes: plan one for a model's shape.")
SMALL_BYTES = 100_000_000  # a smaller model's sizes are shown in MB


def register(root: typer.Typer) -> None:
    """Add `weights` to the program."""
    root.add_typer(app, name="weights")


@app.callback()
def weights() -> None:
    """Weight pushes: plan one for a model's shape."""


def kept_together(tensors: Sequence[TensorSpec], bucket_bytes: int) -> list[dict[str, Any]]:
    """What lands in one bucket because engines keep it as one: engine parameter, how many, tensors in each."""
    from rl360.weights.plan import units

    found: Counter[tuple[str, int, bool]] = Counter()
    for name, unit, whole in units(tensors, bucket_bytes):
        if len(unit) > 1:
            found[name, len(unit), whole] += 1
    rows = sorted(found.items(), key=lambda row: row[0])
    return [{"parameter": n, "groups": count, "tensors_each": each, "whole": w} for (n, each, w), count in rows]


def summary(plan: PushPlan) -> dict[str, Any]:
    """A plan's figures. Sent: leaves the trainer, a broadcast once. Wire: what all engine ranks take in over it.
    Order: the first engine's calls, groups made anew."""
    from rl360.weights.calls import engine_side
    from rl360.weights.messages import Transport

    by_engine: Counter[int] = Counter()
    for delivery in plan.deliveries:
        by_engine[delivery.engine] += sum(bucket.size_bytes for bucket in delivery.buckets)
    alike = sum(bucket.size_bytes for bucket in plan.buckets)
    readers = 1 if plan.folder is not None else plan.layout.tp  # files are fetched once for a host
    per_engine = alike * readers + max(by_engine.values(), default=0)
    wire = alike * readers * len(plan.engine_set.engines) + by_engine.total()
    senders = {delivery.source for delivery in plan.deliveries} | ({0} if plan.buckets else set())
    buckets = (*plan.buckets, *(bucket for delivery in plan.deliveries for bucket in delivery.buckets))
    return {
        "transport": str(plan.transport),
        "calls_per_engine": plan.calls_per_engine,
        "control_calls": plan.control_calls,
        "sent_bytes": plan.total_bytes,
        "wire_bytes": 0 if plan.transport is Transport.COLOCATED else wire,
        "bytes_per_engine": per_engine,
        "largest_bucket_bytes": max(bucket.size_bytes for bucket in buckets),
        "groups": len(plan.groups),
        "senders": len(senders),
        "order": [[name, len(list(calls))] for name, calls in groupby(call.name for call in engine_side(plan)[0])],
    }


def _plan(model: ModelShape, transport: str, options: dict[str, Any]) -> PushPlan:
    from rl360.engines.fleet import EngineIdentity
    from rl360.weights.messages import EngineSet, Transport
    from rl360.weights.plan import plan_push

    engines = (EngineIdentity(url=f"http://engine-{n}", incarnation="planned") for n in range(options["engines"]))
    return plan_push(
        model.tensors,
        EngineSet(epoch=1, engines=tuple(engines)),
        run="planned",
        version="planned:1",
        bucket_bytes=options["bucket_bytes"],
        call_deadline_s=60,
        transport=transport,
        layout=options["layout"],
        sources=options["sources"],
        folder="s3://bucket/prefix" if Transport(transport).on_disk else None,
        base_version="planned:0" if transport == Transport.DISK_DELTA else None,
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):,.6g} MiB"


def _print(model: dict[str, Any], rows: list[dict[str, Any]], together: list[dict[str, Any]], bucket: str) -> None:
    per, unit, digits = (1e6, "MB", 3) if model["bytes"] < SMALL_BYTES else (1e9, "GB", 1)
    count = f"{model['parameters'] / 1e9:.1f} B" if model["parameters"] >= 1e8 else f"{model['parameters'] / 1e6:.2f} M"
    typer.echo(
        f"{count} parameters in {model['tensors']:,} tensors, {model['bytes'] / per:.{digits}f} {unit}, "
        f"{model['other_bytes'] / per:.{digits}f} {unit} of it outside routed experts; {bucket}"
    )
    columns = ("calls", "control", *(f"{name} {unit}" for name in ("sent", "wire", "engine")))
    columns += ("largest MB", "groups", "senders", *(("seconds", "paused s") if "simulated_s" in rows[0] else ()))
    typer.echo(f"{'transport':<15}" + "".join(f"{name:>11}" for name in columns))
    for row in rows:
        cells = [f"{row['calls_per_engine']:,}", f"{row['control_calls']}"]
        cells += [f"{row[name] / per:,.{digits}f}" for name in ("sent_bytes", "wire_bytes", "bytes_per_engine")]
        largest = row["largest_bucket_bytes"] / 1e6
        cells += [f"{largest:,.0f}" if largest >= 10 else f"{largest:.3f}", f"{row['groups']}", f"{row['senders']}"]
        cells += [f"{row[name]:,.1f}" for name in ("simulated_s", "simulated_paused_s") if name in row]
        typer.echo(f"{row['transport']:<15}" + "".join(f"{cell:>11}" for cell in cells))
    typer.echo("calls and control calls are to one engine, on groups that exist; disk_delta: at most")
    typer.echo("largest: the largest bucket; one that is over the size is a single tensor, or all experts of a rank")
    if all(row["transport"] != "direct_experts" for row in rows) and model["bytes"] == model["other_bytes"]:
        typer.echo("direct_experts is left out: a dense model has no routed experts to send")
    if "simulated_s" in rows[0]:
        typer.echo(
            f"simulated: {len(rows)} plans were run in memory and are right: every engine rank ended with "
            "exactly what it holds, each tensor once, and nobody waits for ever; seconds are those of a model of links"
        )
    typer.echo("lands in one bucket:")
    for group in together:
        note = "" if group["whole"] else " (by expert: a layer's do not fit into one bucket)"
        typer.echo(f"  {group['groups']:>7,} x {group['parameter']}, {group['tensors_each']} tensors each{note}")


@app.command(
    "plan",
    epilog="Example: rl360 weights plan --model-shape rl360/weights/moe_375b.json --engines 24 --tp 8 --ep 8",
)
def plan(
    model_shape: Annotated[Path, typer.Option(help="A config.json of a known family, or a JSON list of tensors.")],
    transport: Annotated[str, typer.Option(help="One of the transports, or all.")] = "all",
    engines: Annotated[int, typer.Option(min=1, max=10_000, help="How many engines take part.")] = 8,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks of each engine.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel groups within them.")] = 1,
    sources: Annotated[int, typer.Option(min=1, help="Trainer ranks that can send.")] = 1,
    bucket_bytes: Annotated[int, typer.Option(min=1, help="Size of a bucket; a run's is push.bucket_bytes.")] = 512
    << 20,
    simulate: Annotated[bool, typer.Option("--simulate", help="Run each plan in memory and check it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """Show what a push would be: calls, bytes, groups and senders by transport, and what stays together.

    With --simulate, a plan that does not bring every rank exactly what it needs is exit 1; its time is a model's.
    """
    from rl360.config.run import PushConfig
    from rl360.errors import BadInput
    from rl360.weights.messages import EngineLayout, Transport
    from rl360.weights.plan import expert_number
    from rl360.weights.shapes import read_shape
    from rl360.weights.simulate import simulate as run

    if transport != "all" and transport not in list(Transport):
        raise BadInput(f"transport {transport!r} is unknown; use all or one of {', '.join(Transport)}")
    if tp % ep:
        raise BadInput(f"--ep {ep} does not divide --tp {tp}; expert-parallel groups lie inside an engine's ranks")
    model = read_shape(model_shape)
    experts = sum(tensor.size_bytes for tensor in model.tensors if expert_number(tensor.name) is not None)
    if transport == "all":
        # a dense model has no experts to send
        wanted = [kind for kind in Transport if experts or kind is not Transport.DIRECT_EXPERTS]
    else:
        wanted = [Transport(transport)]
    options = {
        "engines": engines,
        "layout": EngineLayout(tp=tp, ep=ep, kv_heads=model.kv_heads),
        "sources": sources,
        "bucket_bytes": bucket_bytes,
    }
    rows = []
    for kind in wanted:
        made = _plan(model, kind, options)
        row = summary(made)
        if simulate:
            done = run(made, model.tensors)
            row |= {"simulated_s": round(done.seconds, 3), "simulated_paused_s": round(done.paused_s, 3)}
        rows.append(row)
    total = sum(tensor.size_bytes for tensor in model.tensors)
    described = {"parameters": model.parameters, "tensors": len(model.tensors), "bytes": total}
    described["other_bytes"] = total - experts
    together = kept_together(model.tensors, bucket_bytes)
    if as_json:
        typer.echo(orjson.dumps({"model": described, "plans": rows, "together": together}).decode())
    else:
        usual = int(PushConfig.model_fields["bucket_bytes"].default)
        _print(described, rows, together, f"buckets of {_mib(bucket_bytes)} (a run's default: {_mib(usual)})")
