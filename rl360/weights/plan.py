"""How a set of tensors travels to a frozen set of engines. Pure: same input, same plan.

Tensors that an engine keeps as one parameter (q/k/v, gate/up, MLA's two down-projections, the experts of one layer's
w13 or w2) stay in one bucket. Buckets are filled in the given order up to `bucket_bytes`. A layer's experts that don't
fit into one are divided between experts, never inside one; any other group that is larger makes a bucket of its own.
Why it matters: SGLang loses MLA's pair without an error when its halves come in two calls; experts it takes one by one.
What an engine rank needs follows SGLang's loaders (`rank_needs`). `weights/calls.py` spells a plan out, call by call.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence

from rl360.errors import BadInput
from rl360.weights.messages import Bucket, Delivery, EngineLayout, EngineSet, PushPlan, TensorSpec, Transport

_FUSED = (
    (re.compile(r"\.(?:q|k|v)_proj\."), ".qkv_proj."),
    (re.compile(r"\.experts\.\d+\.(?:gate|up)_proj\."), ".experts.w13_"),
    (re.compile(r"\.experts\.\d+\.down_proj\."), ".experts.w2_"),
    (re.compile(r"\.(?:gate|up)_proj\."), ".gate_up_proj."),
)
_MLA = re.compile(r"\.(?:q_a_proj|kv_a_proj_with_mqa)\.")
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(.+)$")
_LAYER = re.compile(r"^.*\.layers\.\d+\.")
_VOCAB_MULTIPLE = 64  # SGLang pads a vocabulary to this before it cuts it
_CUTS = (  # (name, axis that tensor parallelism cuts); whatever is not named here is whole on every rank
    (re.compile(r"\.(?:q|k|v|q_b|kv_b|gate|up)_proj\.(?:weight|bias)$"), 0),
    (re.compile(r"\.(?:o|down)_proj\.weight$"), 1),
    (re.compile(r"(?:^|\.)(?:embed_tokens|lm_head)\.weight$"), 0),
)
_KV = re.compile(r"\.(?:k|v)_proj\.")
_VOCAB = re.compile(r"(?:^|\.)(?:embed_tokens|lm_head)\.weight$")


def engine_name(name: str) -> str:
    """The engine's parameter that this Hugging Face tensor is part of, e.g. `…q_proj.weight` -> `…qkv_proj.weight`."""
    for pattern, fused in _FUSED:
        replaced, count = pattern.subn(fused, name)
        if count:
            return replaced
    return name


def together(name: str) -> str:
    """Tensors with the same answer land in one call where a bucket can hold them."""
    return _MLA.sub(".fused_qkv_a_proj_with_mqa.", engine_name(name))


def expert_number(name: str) -> int | None:
    """Number of the routed expert that this tensor belongs to; None for everything else, shared experts too."""
    found = _EXPERT.match(name)
    return int(found[2]) if found else None


def _digest_name(*members: str) -> str:
    digest = hashlib.sha256("\n".join(members).encode()).hexdigest()
    return f"rl360-{digest[:16]}"


def group_name(engine_set: EngineSet) -> str:
    """The process group of an engine set: the same receivers in the same order, the same name, whatever the epoch."""
    return _digest_name(*(f"{engine.url} {engine.incarnation}" for engine in engine_set.engines))


def units(tensors: Iterable[TensorSpec], bucket_bytes: int) -> Iterator[tuple[str, list[TensorSpec], bool]]:
    """What must not be divided, in order of first appearance: kind of engine parameter, tensors, and whether they are
    all of it (False: one expert's part of a layer that doesn't fit into a bucket)."""
    groups: dict[str, list[TensorSpec]] = {}
    for tensor in tensors:
        groups.setdefault(together(tensor.name), []).append(tensor)
    for name, group in groups.items():
        kind = _LAYER.sub("", name)
        if expert_number(group[0].name) is None or sum(tensor.size_bytes for tensor in group) <= bucket_bytes:
            yield kind, group, True
            continue
        experts: dict[int | None, list[TensorSpec]] = {}
        for tensor in group:
            experts.setdefault(expert_number(tensor.name), []).append(tensor)
        for expert in experts.values():
            yield kind, expert, False


def fill_buckets(tensors: Sequence[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Group tensors by engine parameter, then fill buckets in order of first appearance."""
    buckets: list[Bucket] = []
    current: list[TensorSpec] = []
    current_bytes = 0
    for _, unit, _ in units(tensors, bucket_bytes):
        unit_bytes = sum(tensor.size_bytes for tensor in unit)
        if current and current_bytes + unit_bytes > bucket_bytes:
            buckets.append(Bucket(tensors=tuple(current)))
            current, current_bytes = [], 0
        current.extend(unit)
        current_bytes += unit_bytes
    if current:
        buckets.append(Bucket(tensors=tuple(current)))
    return tuple(buckets)


def check_shapes(shapes: Sequence[TensorSpec], layout: EngineLayout) -> None:
    """Refuse what no engine could hold: a tensor named twice, an empty one, experts not all there or not alike."""
    seen: set[str] = set()
    experts: dict[tuple[str, str], dict[int, TensorSpec]] = {}
    for tensor in shapes:
        if tensor.name in seen:
            raise BadInput(f"tensor {tensor.name} appears twice among those to push; each must travel once")
        seen.add(tensor.name)
        if any(dim < 1 for dim in tensor.shape) or tensor.part is not None:
            raise BadInput(f"tensor {tensor.name} has shape {tensor.shape}, part {tensor.part}: name whole tensors")
        if found := _EXPERT.match(tensor.name):
            experts.setdefault((found[1], found[3]), {})[int(found[2])] = tensor
    sizes: dict[str, tuple[int, str]] = {}
    for (layer, part), members in experts.items():
        missing = next((n for n in range(len(members)) if n not in members), None)
        if missing is not None:
            raise BadInput(
                f"{layer}: expert {missing} has no {part}, expert {max(members)} has; name all experts from 0"
            )
        first = members[0]
        for tensor in members.values():
            if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
                raise BadInput(
                    f"{tensor.name} is {tensor.shape} {tensor.dtype}, {first.name} {first.shape} {first.dtype}"
                )
        count, other = sizes.setdefault(layer, (len(members), part))
        if count != len(members):
            raise BadInput(
                f"{layer}: {count} experts have {other}, {len(members)} have {part}; name all of every expert"
            )
        if count % layout.ep:
            raise BadInput(f"{layer}: ep {layout.ep} does not divide its {count} experts")


def _pieces(tensor: TensorSpec, holders: int, layout: EngineLayout) -> list[TensorSpec | None]:
    """What each of these ranks holds of a tensor; None: nothing of it."""
    axis = next((axis for pattern, axis in _CUTS if pattern.search(tensor.name)), None) if holders > 1 else None
    if axis is None:
        return [tensor] * holders
    if axis >= len(tensor.shape):
        raise BadInput(
            f"tensor {tensor.name} has shape {tensor.shape}: tensor parallelism cuts axis {axis}, it has none"
        )
    size, different, unit = tensor.shape[axis], holders, 1
    if _VOCAB.search(tensor.name):
        multiple = _VOCAB_MULTIPLE
        if -(-size // multiple) * multiple % holders:
            multiple *= holders
        rows = -(-size // multiple) * multiple // holders
    else:
        if _KV.search(tensor.name):
            if layout.kv_heads is None:
                raise BadInput(f"tensor {tensor.name} is cut by heads at tp {layout.tp}: name the model's kv_heads")
            if size % layout.kv_heads:
                raise BadInput(
                    f"tensor {tensor.name} has shape {tensor.shape}: kv_heads {layout.kv_heads} don't divide it"
                )
            different, unit = min(holders, layout.kv_heads), size // layout.kv_heads
        if (size // unit) % different or holders % different:
            of = f"its {layout.kv_heads} heads" if unit > 1 else f"axis {axis}"
            raise BadInput(f"tensor {tensor.name} has shape {tensor.shape}: {holders} ranks do not divide {of}")
        rows = size // different
    if different == 1:
        return [tensor] * holders
    named = {"name": tensor.name, "shape": tensor.shape, "dtype": tensor.dtype}
    cuts = [
        TensorSpec.model_validate({**named, "part": (axis, first, min(rows, size - first))}) if first < size else None
        for first in range(0, rows * different, rows)
    ]
    copies = holders // different
    return [cuts[place // copies] for place in range(holders)]


def rank_needs(shapes: Sequence[TensorSpec], layout: EngineLayout) -> list[list[TensorSpec]]:
    """What each rank of an engine holds, in the given order. As SGLang cuts it: attention heads, MLP widths and the
    vocabulary (padded) over all ranks, k/v heads copied when there are fewer than ranks; rank r is in expert-parallel
    group r // moe_tp, which owns a contiguous block of each layer's experts."""
    experts: dict[str, int] = {}
    for tensor in shapes:
        if found := _EXPERT.match(tensor.name):
            experts[found[1]] = max(experts.get(found[1], 0), int(found[2]) + 1)
    ranks: list[list[TensorSpec]] = [[] for _ in range(layout.tp)]
    for tensor in shapes:
        first, holders = 0, layout.tp
        if found := _EXPERT.match(tensor.name):
            first = int(found[2]) // (experts[found[1]] // layout.ep) * layout.moe_tp
            holders = layout.moe_tp
        for rank, piece in enumerate(_pieces(tensor, holders, layout), start=first):
            if piece is not None:
                ranks[rank].append(piece)
    return ranks


def _deliveries(
    parcels: Sequence[tuple[Bucket, ...]], engines: EngineSet, sources: int, *, grouped: bool
) -> tuple[Delivery, ...]:
    """Every rank's parcel to every engine, the senders taking turns: as many as there are, but no more than targets.
    An engine replaced in its place changes its own deliveries only."""
    targets = [
        (index, engine, rank)
        for index, engine in enumerate(engines.engines)
        for rank in range(len(parcels))
        if parcels[rank]
    ]
    made = []
    for number, (index, engine, rank) in enumerate(targets):
        source = number % min(sources, len(targets))
        name = _digest_name(f"source {source}", f"{engine.url} {engine.incarnation}", f"rank {rank}") if grouped else ""
        made.append(Delivery(engine=index, rank=rank, source=source, group_name=name, buckets=parcels[rank]))
    return tuple(made)


def _check_files(transport: Transport, version: str, folder: str | None, base_version: str | None) -> None:
    if transport.on_disk != (folder is not None):
        raise BadInput(f"transport {transport}, folder {folder!r}: disk transports need one, the others take none")
    if folder is not None and not folder.startswith(("/", "s3://")):
        raise BadInput(f"folder {folder!r}: use an absolute path that engines can read, or s3://bucket/prefix")
    if (transport is Transport.DISK_DELTA) != (base_version is not None):
        raise BadInput(f"transport {transport}, base_version {base_version!r}: a delta needs one, the others take none")
    if base_version == version:
        raise BadInput(f"disk_delta from {base_version} to {version}: the base must be another version")


def plan_push(
    shapes: Sequence[TensorSpec],
    engines: EngineSet,
    *,
    run: str,
    version: str,
    bucket_bytes: int,
    call_deadline_s: float,
    transport: str = Transport.BROADCAST,
    stale_groups: Sequence[str] = (),
    layout: EngineLayout | None = None,
    sources: int = 1,
    folder: str | None = None,
    base_version: str | None = None,
) -> PushPlan:
    """The plan that brings every tensor to every engine rank that needs it, exactly once. `folder` and `base_version`
    belong to the disk transports."""
    layout = layout or EngineLayout()
    if not shapes:
        raise BadInput(f"push of {version}: the trainer named no tensors")
    if bucket_bytes < 1 or sources < 1:
        raise BadInput(f"bucket_bytes {bucket_bytes}, sources {sources}: use at least 1")
    if transport not in list(Transport):
        raise BadInput(f"transport {transport!r} is unknown; use one of {', '.join(Transport)}")
    if len({engine.url for engine in engines.engines}) < len(engines.engines):
        raise BadInput(f"the engine set of epoch {engines.epoch} names an engine twice")
    kind = Transport(transport)
    _check_files(kind, version, folder, base_version)
    check_shapes(shapes, layout)
    buckets: tuple[Bucket, ...] = ()
    deliveries: tuple[Delivery, ...] = ()
    if kind is Transport.DIRECT_EXPERTS:
        experts = [tensor for tensor in shapes if expert_number(tensor.name) is not None]
        if not experts:
            raise BadInput("transport direct_experts: the model has no routed experts; use broadcast")
        buckets = fill_buckets([tensor for tensor in shapes if expert_number(tensor.name) is None], bucket_bytes)
        owned = [(Bucket(tensors=tuple(rank)),) for rank in rank_needs(experts, layout)]
        deliveries = _deliveries(owned, engines, sources, grouped=True)
    elif kind in (Transport.P2P, Transport.COLOCATED):
        parcels = [fill_buckets(rank, bucket_bytes) for rank in rank_needs(shapes, layout)]
        deliveries = _deliveries(parcels, engines, sources, grouped=kind is Transport.P2P)
    else:
        buckets = fill_buckets(shapes, bucket_bytes)
    return PushPlan(
        run=run,
        version=version,
        transport=kind,
        engine_set=engines,
        group_name=group_name(engines),
        stale_groups=tuple(sorted(set(stale_groups))),
        buckets=buckets,
        call_deadline_s=call_deadline_s,
        layout=layout,
        sources=sources,
        deliveries=deliveries,
        base_version=base_version,
        folder=folder,
    )
