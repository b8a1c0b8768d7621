"""A plan spelt out: every call to every engine, and what every trainer rank does, each in order.

Both sides go through the groups in the plan's order, then through broadcast buckets, then round by round: the first
bucket of each delivery, the second, and so on. That is one order over all, so no two sides can wait for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest

from rl360.weights.messages import Bucket, Delivery, PushPlan


class CallKind(StrEnum):
    """What a call to an engine does."""

    CONTROL = "control"  # nothing moves; the engine answers by itself
    JOIN = "join"  # make a group: the call ends when all members are there
    WEIGHTS = "weights"  # tensors arrive


@dataclass(frozen=True)
class Piece:
    """A bucket on its way to one rank of an engine. `rank` None: to all its ranks, `source` None: from files."""

    group: str
    source: int | None
    rank: int | None
    bucket: Bucket


@dataclass(frozen=True)
class Call:
    """One call to an engine. All its pieces move side by side, and it ends when all are there. To join a group names
    its two ends, `rank` None for the group of all engines, and how many members it waits for."""

    kind: CallKind
    name: str
    group: str = ""
    source: int = 0
    rank: int | None = None
    members: int = 0
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Send:
    """One operation of a trainer rank: join a group (`bucket` None), or send a bucket to one engine rank or to all."""

    group: str
    engine: int | None
    rank: int | None
    bucket: Bucket | None
    members: int = 0


def engine_calls(plan: PushPlan, mine: Sequence[Delivery], kept_groups: Container[str] = ()) -> list[Call]:
    """The calls to one engine, `mine` the plan's deliveries to it. A group that is not kept is left (should the engine
    hold one of that name) and joined first."""
    joins: dict[str, Call] = {}
    if plan.buckets and plan.folder is None:
        size = 1 + len(plan.engine_set.engines)
        joins[plan.group_name] = Call(CallKind.JOIN, "join", plan.group_name, members=size)
    for each in mine:
        if each.group_name:
            joins.setdefault(each.group_name, Call(CallKind.JOIN, "join", each.group_name, each.source, each.rank, 2))
    joins = {name: call for name, call in joins.items() if name not in kept_groups}
    calls = [Call(CallKind.CONTROL, "pause"), Call(CallKind.CONTROL, "loading mark")]
    calls += [Call(CallKind.CONTROL, "leave", group) for group in sorted({*plan.stale_groups, *joins})]
    calls += joins.values()
    if plan.folder is not None:
        files = tuple(Piece("", None, None, bucket) for bucket in plan.buckets)
        # files are fetched before the pause
        calls = [Call(CallKind.WEIGHTS, "fetch", pieces=files), *calls, Call(CallKind.WEIGHTS, "load", pieces=files)]
    else:
        calls.append(Call(CallKind.CONTROL, "begin"))
        for bucket in plan.buckets:
            calls.append(Call(CallKind.WEIGHTS, "broadcast", pieces=(Piece(plan.group_name, 0, None, bucket),)))
        for row in zip_longest(*(d.buckets for d in mine)):
            pieces = [Piece(d.group_name, d.source, d.rank, b) for d, b in zip(mine, row, strict=True) if b is not None]
            calls.append(Call(CallKind.WEIGHTS, "deliver", pieces=tuple(pieces)))
        calls.append(Call(CallKind.CONTROL, "end"))
    after = ("checksums", "version", "version read back", "flush", "admit", "resume")
    return calls + [Call(CallKind.CONTROL, name) for name in after]


def engine_side(plan: PushPlan, kept_groups: Container[str] = ()) -> list[list[Call]]:
    """Each engine's calls."""
    mine: dict[int, list[Delivery]] = defaultdict(list)
    for delivery in plan.deliveries:
        mine[delivery.engine].append(delivery)
    return [engine_calls(plan, mine[engine], kept_groups) for engine in range(len(plan.engine_set.engines))]


def source_side(plan: PushPlan) -> list[list[Send]]:
    """What each trainer rank does on groups made for this plan. Rank 0 sends what is broadcast."""
    mine: dict[int, list[Delivery]] = defaultdict(list)
    for delivery in plan.deliveries:
        mine[delivery.source].append(delivery)
    sides = []
    for source in range(plan.sources):
        groups = {d.group_name: Send(d.group_name, d.engine, d.rank, None, 2) for d in mine[source] if d.group_name}
        joins, sends = list(groups.values()), []
        if source == 0 and plan.buckets and plan.folder is None:
            joins.insert(0, Send(plan.group_name, None, None, None, 1 + len(plan.engine_set.engines)))
            sends = [Send(plan.group_name, None, None, bucket) for bucket in plan.buckets]
        for row in zip_longest(*(delivery.buckets for delivery in mine[source])):
            for d, bucket in zip(mine[source], row, strict=True):
                if bucket is not None:
                    sends.append(Send(d.group_name, d.engine, d.rank, bucket))
        sides.append([*joins, *sends])
    return sides
