"""Runs any push plan in memory, without engines and without payloads: who waits for whom, what arrives where, how long.

Every trainer rank and every engine works through its own list of operations (`weights/calls.py`).
A join ends when all members of the group are in it, a transfer when everybody in its group takes part in it, matched in
order as a process group does. Afterwards each engine rank must hold exactly what it needs, once, with what belongs
together in one bucket. `PlanBroken` names the first thing that is not so. Time is a model (`Wire`), not a measurement.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rl360.errors import Rl360Error
from rl360.weights.calls import Call, CallKind, Send, engine_side, source_side
from rl360.weights.messages import Bucket, EngineLayout, PushPlan, TensorSpec
from rl360.weights.plan import expert_number, rank_needs, together

Ranges = NDArray[np.int64]  # [pieces, 4]: tensor, axis, first row, row after the last
_Scope = tuple[object, ...]  # what operations are matched by: the group, or both ends where there is none
_Member = tuple[str, int, int | None]  # kind and number of an actor, and the engine's rank
_SHOWN = 4


class PlanBroken(Rl360Error):
    """The plan does not do what a push must do."""


@dataclass(frozen=True)
class Wire:
    """How fast things are taken to be. A broadcast is a pipeline: all receivers get it at the speed of one."""

    call_s: float = 0.05  # an engine's answer, without the tensors
    link_bytes_per_s: float = 25e9  # out of a trainer rank, and into an engine rank
    fetch_bytes_per_s: float = 5e9  # files into an engine's host
    load_bytes_per_s: float = 10e9  # from there into the engine


@dataclass(frozen=True)
class Simulated:
    """What a plan did."""

    seconds: float
    paused_s: float  # of the engine that was paused longest
    transfers: int
    calls: tuple[int, ...]  # by engine, those that carry weights
    control_calls: tuple[int, ...]  # by engine, the others, joining and leaving groups included
    sent_bytes: tuple[int, ...]  # by trainer rank; a broadcast counts once
    received_bytes: tuple[int, ...]  # by engine, all its ranks


@dataclass(eq=False)
class _Actor:
    """One side: the operations before it, and when it is free for the next."""

    kind: str  # "source" or "engine"
    number: int
    ops: deque[Call | Send]
    free_s: float = 0.0
    until_s: float = 0.0
    waits_for: int = 0  # joins and transfers of the operation at the head
    place: Counter[_Scope] = field(default_factory=Counter)  # operations so far on each group

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"


@dataclass(frozen=True)
class _Part:
    """An actor's part in a join (`bucket` None) or a transfer. `rank` None: an engine as a whole, or a trainer rank."""

    group: str
    source: int
    engine: int | None
    rank: int | None
    bucket: Bucket | None
    members: int = 0


@dataclass
class _Meeting:
    """A join or a transfer that waits for its members."""

    came: dict[_Member, Bucket | None] = field(default_factory=dict)
    actors: list[_Actor] = field(default_factory=list)
    start_s: float = 0.0
    members: int = 0


class _World:
    """The run: actors, groups and what arrived."""

    def __init__(self, calls: Sequence[Sequence[Call]], sends: Sequence[Sequence[Send]], wire: Wire) -> None:
        self.wire = wire
        self.actors = [_Actor("source", number, deque(ops)) for number, ops in enumerate(sends)]
        self.actors += [_Actor("engine", number, deque(ops)) for number, ops in enumerate(calls)]
        self.groups: dict[str, set[_Member]] = {}
        self.meetings: dict[tuple[_Scope, int], _Meeting] = {}
        self.arrived: dict[tuple[int, int | None], list[Bucket]] = defaultdict(list)  # (engine, rank or all)
        self.sent_bytes = [0] * len(sends)
        self.paused_s = [0.0] * len(calls)
        self.transfers = 0

    def run(self) -> None:
        """Until everybody is done; `PlanBroken` when those that are left wait for each other."""
        ready = deque(self.actors)
        while ready:
            actor = ready.popleft()
            while actor.ops and not actor.waits_for:
                ready.extend(freed for freed in self.begin(actor) if freed is not actor)
        stuck = [actor for actor in self.actors if actor.ops]
        if stuck:
            said = "; ".join(f"{actor} waits in {_told(actor.ops[0])}" for actor in stuck[:_SHOWN])
            raise PlanBroken(f"deadlock: {len(stuck)} of {len(self.actors)} never end: {said}")

    def begin(self, actor: _Actor) -> list[_Actor]:
        """Start the operation at the actor's head. Returns whose operation ends by that."""
        op = actor.ops[0]
        if isinstance(op, Send):
            parts = [_Part(op.group, actor.number, op.engine, op.rank, op.bucket, op.members)]
        elif op.kind is CallKind.JOIN:
            parts = [_Part(op.group, op.source, actor.number, op.rank, None, op.members)]
        else:
            from_trainer = [piece for piece in op.pieces if piece.source is not None]
            parts = [_Part(p.group, p.source or 0, actor.number, p.rank, p.bucket) for p in from_trainer]
            if not parts:
                self.end_alone(actor, op)
                return [actor]
        actor.until_s, actor.waits_for = actor.free_s, len(parts)
        return [freed for part in parts for freed in self.come(actor, part)]

    def end_alone(self, actor: _Actor, op: Call) -> None:
        """A call that nobody else takes part in: a control call, or one about files."""
        size = sum(piece.bucket.size_bytes for piece in op.pieces)
        took = self.wire.call_s
        if op.name == "fetch":
            took += size / self.wire.fetch_bytes_per_s
        elif op.pieces:
            took += size / self.wire.load_bytes_per_s
            self.arrived[actor.number, None] += [piece.bucket for piece in op.pieces]
        if op.name == "pause":
            self.paused_s[actor.number] = -actor.free_s
        actor.free_s += took
        if op.name == "resume":
            self.paused_s[actor.number] += actor.free_s
        actor.ops.popleft()

    def come(self, actor: _Actor, part: _Part) -> list[_Actor]:
        """Take part in the next join or transfer of a group. Returns whose operation ends by that."""
        scope: _Scope = ("join" if part.bucket is None else "transfer", part.group)
        if not part.group:
            scope = (*scope, part.source, part.engine, part.rank)
        number = actor.place[scope]
        actor.place[scope] += 1
        meeting = self.meetings.setdefault((scope, number), _Meeting())
        member: _Member = (actor.kind, actor.number, part.rank if actor.kind == "engine" else None)
        meeting.came[member] = part.bucket
        meeting.actors.append(actor)
        meeting.start_s = max(meeting.start_s, actor.free_s)
        complete = self.joined(meeting, part) if part.bucket is None else self.moved(meeting, part, member)
        if not complete:
            return []
        del self.meetings[scope, number]
        return self.end(meeting, part.bucket.size_bytes if part.bucket else 0)

    def joined(self, meeting: _Meeting, part: _Part) -> bool:
        """Whether the group is complete; then it exists."""
        if meeting.members not in (0, part.members):
            raise PlanBroken(f"group {part.group}: one waits for {part.members} members, another for {meeting.members}")
        meeting.members = part.members
        if len(meeting.came) < part.members:
            return False
        if part.group in self.groups:
            raise PlanBroken(f"group {part.group} is made twice: its name belongs to two sets of members")
        self.groups[part.group] = set(meeting.came)
        return True

    def moved(self, meeting: _Meeting, part: _Part, member: _Member) -> bool:
        """Whether the whole group takes part; then the bucket is sent and arrives."""
        pair: set[_Member] = {("source", part.source, None), ("engine", part.engine or 0, part.rank)}
        expected = self.groups.get(part.group, set()) if part.group else pair
        if member not in expected:
            told = f"{member[0]} {member[1]}" + ("" if member[2] is None else f", rank {member[2]}")
            raise PlanBroken(f"{told}: takes part in a transfer of group {part.group or 'none'}, but is not in it")
        if set(meeting.came) != expected:
            return False
        first, *others = meeting.came.values()
        assert first is not None  # a transfer
        if any(other is not first and other != first for other in others):
            raise PlanBroken(f"group {part.group or 'none'}: sender and receivers of a transfer name different tensors")
        self.transfers += 1
        for kind, number, rank in meeting.came:
            if kind == "source":
                self.sent_bytes[number] += first.size_bytes
            else:
                self.arrived[number, rank].append(first)
        return True

    def end(self, meeting: _Meeting, size: int) -> list[_Actor]:
        """End a join or transfer for everybody in it. Returns those whose operation is over by that."""
        end_s = meeting.start_s + self.wire.call_s + size / self.wire.link_bytes_per_s
        freed = []
        for actor in meeting.actors:
            actor.until_s = max(actor.until_s, end_s)
            actor.waits_for -= 1
            if not actor.waits_for:
                actor.free_s = actor.until_s
                actor.ops.popleft()
                freed.append(actor)
        return freed


def _told(op: Call | Send) -> str:
    if isinstance(op, Send):
        return f"{'joining' if op.bucket is None else 'sending on'} group {op.group or 'none'}"
    groups = sorted({piece.group for piece in op.pieces}) or [op.group]
    return f"{op.name} on group {', '.join(group or 'none' for group in groups[:_SHOWN])}"


class _Ledger:
    """What ranks need, and whether what arrived is that. Engines that got the same buckets are looked at once."""

    def __init__(self, shapes: Sequence[TensorSpec], layout: EngineLayout, *, by_rank: bool) -> None:
        self.specs = list(shapes)
        self.index = {tensor.name: number for number, tensor in enumerate(shapes)}
        units: dict[tuple[str, int | None], int] = {}
        keys = ((together(tensor.name), expert_number(tensor.name)) for tensor in shapes)
        self.unit = np.array([units.setdefault(key, len(units)) for key in keys], np.int64)
        self.needs = [self.ranges(rank) for rank in rank_needs(shapes, layout)] if by_rank else []
        self.whole = self.ranges(shapes)
        self.known: dict[int, Ranges] = {}
        self.seen: dict[tuple[object, ...], int] = {}

    def ranges(self, tensors: Iterable[TensorSpec]) -> Ranges:
        """Where these tensors, or the parts of them that travel, lie in the model."""
        rows = []
        for tensor in tensors:
            number = self.index.get(tensor.name)
            if number is None:
                raise PlanBroken(f"tensor {tensor.name} is not in the model")
            spec = self.specs[number]
            if (tensor.shape, tensor.dtype) != (spec.shape, spec.dtype):
                raise PlanBroken(f"tensor {tensor.name}: {tensor.shape} {tensor.dtype}, has {spec.shape} {spec.dtype}")
            axis, first, count = tensor.part or (0, 0, tensor.shape[0] if tensor.shape else 1)
            rows.append((number, axis, first, first + count))
        return np.array(rows, np.int64).reshape(-1, 4)

    def of(self, bucket: Bucket) -> Ranges:
        found = self.known.get(id(bucket))
        if found is None:
            found = self.known[id(bucket)] = self.ranges(bucket.tensors)
        return found

    def check(self, who: str, rank: int | None, shared: list[Bucket], own: list[Bucket]) -> int:
        """Bytes that came. `shared` brings whole tensors to every rank, `own` exactly what `rank` needs of the others;
        without a rank, `shared` is all there is."""
        key = (rank, tuple(map(id, shared)), tuple(map(id, own)))
        if key not in self.seen:
            got = [self.of(bucket) for bucket in (*shared, *own)]
            common = _joined(got[: len(shared)])
            need = self.whole if rank is None else self.needs[rank]
            both = self.whole[np.isin(self.whole[:, 0], common[:, 0])]
            _same(who, self.specs, common, self.whole if rank is None else both)
            _same(who, self.specs, _joined(got[len(shared) :]), need[~np.isin(need[:, 0], common[:, 0])])
            self._together(who, got)
            self.seen[key] = sum(bucket.size_bytes for bucket in (*shared, *own))
        return self.seen[key]

    def _together(self, who: str, got: list[Ranges]) -> None:
        """What belongs together comes in one bucket."""
        units = np.concatenate([self.unit[ranges[:, 0]] for ranges in got]) if got else np.empty(0, np.int64)
        places = np.repeat(np.arange(len(got)), [len(ranges) for ranges in got])
        pairs = np.unique(np.stack([units, places], axis=1), axis=0)
        torn = pairs[1:][pairs[1:, 0] == pairs[:-1, 0]]
        if len(torn):
            name = self.specs[int(np.flatnonzero(self.unit == torn[0, 0])[0])].name
            raise PlanBroken(f"{who}: the parts of {together(name)} come in more than one bucket")


def _joined(parts: list[Ranges]) -> Ranges:
    return np.concatenate(parts) if parts else np.empty((0, 4), np.int64)


def _same(who: str, specs: list[TensorSpec], got: Ranges, need: Ranges) -> None:
    """Both cover the same rows of the same tensors, `got` without an overlap."""
    got = got[np.lexsort((got[:, 2], got[:, 0]))]
    again = (got[1:, 0] == got[:-1, 0]) & (got[1:, 2] < got[:-1, 3])
    if again.any():
        raise PlanBroken(f"{who}: {specs[int(got[1:][again][0, 0])].name} arrives twice")
    # pieces that touch are one
    starts = np.ones(len(got), bool)
    starts[1:] = (got[1:, 0] != got[:-1, 0]) | (got[1:, 1] != got[:-1, 1]) | (got[1:, 2] != got[:-1, 3])
    ends = np.ones(len(got), bool)
    ends[:-1] = starts[1:]
    merged = np.concatenate([got[starts, :3], got[ends, 3:]], axis=1)
    need = need[np.lexsort((need[:, 2], need[:, 0]))]
    if np.array_equal(merged, need):
        return
    arrived, wanted = {tuple(row) for row in merged.tolist()}, {tuple(row) for row in need.tolist()}
    for row in sorted(wanted - arrived):
        raise PlanBroken(
            f"{who}: {specs[row[0]].name}, axis {row[1]}, rows {row[2]} to {row[3]}: does not arrive whole"
        )
    row = min(arrived - wanted)
    raise PlanBroken(f"{who}: {specs[row[0]].name}, axis {row[1]}, rows {row[2]} to {row[3]}: is not needed there")


def execute(
    plan: PushPlan,
    shapes: Sequence[TensorSpec],
    calls: Sequence[Sequence[Call]],
    sends: Sequence[Sequence[Send]],
    wire: Wire,
) -> Simulated:
    """Run these operations of the plan's engines and trainer ranks, and check what they leave."""
    world = _World(calls, sends, wire)
    world.run()
    ledger = _Ledger(shapes, plan.layout, by_rank=bool(plan.deliveries))
    received = []
    for engine in range(len(calls)):
        shared = world.arrived.get((engine, None), [])
        total = 0
        for rank in range(plan.layout.tp):
            own = world.arrived.get((engine, rank), [])
            owner = rank if plan.deliveries else None
            total += ledger.check(f"engine {engine}, rank {rank}", owner, shared, own)
        received.append(total)
    carrying = [sum(call.kind is CallKind.WEIGHTS for call in each) for each in calls]
    return Simulated(
        seconds=max(actor.free_s for actor in world.actors),
        paused_s=max(world.paused_s),
        transfers=world.transfers,
        calls=tuple(carrying),
        control_calls=tuple(len(each) - weights for each, weights in zip(calls, carrying, strict=True)),
        sent_bytes=tuple(world.sent_bytes),
        received_bytes=tuple(received),
    )


def simulate(plan: PushPlan, shapes: Sequence[TensorSpec], wire: Wire | None = None) -> Simulated:
    """Run a plan on groups that are made for it."""
    done = execute(plan, shapes, engine_side(plan), source_side(plan), wire or Wire())
    if max(done.calls) != plan.calls_per_engine:
        raise PlanBroken(f"{max(done.calls)} calls carry weights, the plan says {plan.calls_per_engine}")
    if plan.folder is None and sum(done.sent_bytes) != plan.total_bytes:
        raise PlanBroken(f"{sum(done.sent_bytes)} bytes leave the trainer, the plan says {plan.total_bytes}")
    return done
