"""How a set of tensors travels to a frozen set of engines. Pure: same input, same plan.

Tensors that an engine keeps as one parameter (q/k/v, gate/up, the experts of one layer's projection pair) stay in one
bucket, so no bucket boundary leaves a parameter half new. Buckets are filled in the given order up to `bucket_bytes`;
only a group that is larger by itself makes a bucket that exceeds it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from rl360.errors import BadInput
from rl360.weights.messages import Bucket, EngineSet, PushPlan, TensorSpec, Transport

_FUSED = (
    (re.compile(r"\.(?:q|k|v)_proj\."), ".qkv_proj."),
    (re.compile(r"\.experts\.\d+\.(?:gate|up)_proj\."), ".experts.w13_"),
    (re.compile(r"\.experts\.\d+\.down_proj\."), ".experts.w2_"),
    (re.compile(r"\.(?:gate|up)_proj\."), ".gate_up_proj."),
)


def engine_name(name: str) -> str:
    """The engine's parameter that this Hugging Face tensor is part of, e.g. `…q_proj.weight` -> `…qkv_proj.weight`."""
    for pattern, fused in _FUSED:
        replaced, count = pattern.subn(fused, name)
        if count:
            return replaced
    return name


def group_name(engine_set: EngineSet) -> str:
    """The process group of an engine set: the same receivers in the same order, the same name, whatever the epoch."""
    members = "\n".join(f"{engine.url} {engine.incarnation}" for engine in engine_set.engines)
    return f"rl360-{hashlib.sha256(members.encode()).hexdigest()[:16]}"


def fill_buckets(tensors: Sequence[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Group tensors by engine parameter, then fill buckets in order of first appearance."""
    groups: dict[str, list[TensorSpec]] = {}
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise BadInput(f"tensor {tensor.name} appears twice among those to push; each must travel once")
        seen.add(tensor.name)
        groups.setdefault(engine_name(tensor.name), []).append(tensor)
    buckets: list[Bucket] = []
    current: list[TensorSpec] = []
    current_bytes = 0
    for group in groups.values():
        group_bytes = sum(tensor.size_bytes for tensor in group)
        if current and current_bytes + group_bytes > bucket_bytes:
            buckets.append(Bucket(tensors=tuple(current)))
            current, current_bytes = [], 0
        current.extend(group)
        current_bytes += group_bytes
    if current:
        buckets.append(Bucket(tensors=tuple(current)))
    return tuple(buckets)


def plan_push(
    shapes: Sequence[TensorSpec],
    engines: EngineSet,
    *,
    run: str,
    version: str,
    bucket_bytes: int,
    call_deadline_s: float,
    transport: str = "broadcast",
    stale_groups: Sequence[str] = (),
) -> PushPlan:
    """The plan that brings every tensor to every engine of the set exactly once."""
    if not shapes:
        raise BadInput(f"push of {version}: the trainer named no tensors")
    if bucket_bytes < 1:
        raise BadInput(f"bucket_bytes {bucket_bytes}: use at least 1")
    if transport != Transport.BROADCAST:
        raise BadInput(f"transport {transport!r} is unknown; use 'broadcast'")
    return PushPlan(
        run=run,
        version=version,
        transport=Transport.BROADCAST,
        engine_set=engines,
        group_name=group_name(engines),
        stale_groups=tuple(sorted(set(stale_groups))),
        buckets=fill_buckets(shapes, bucket_bytes),
        call_deadline_s=call_deadline_s,
    )
