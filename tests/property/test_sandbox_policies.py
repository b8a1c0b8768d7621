"""Whatever happens in whatever order: never over a cap, never over-promised, released once, nobody waits for ever."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rl360.errors import BadInput
from rl360.sandboxes.admission import Gate, Reservations, Room
from rl360.sandboxes.placement import Placement
from rl360.sandboxes.waves import Pace, Waves

NODE = Room(8_000, 4_000, 500, 10_000)
NEEDS = st.builds(Room, st.integers(0, 9_000), st.integers(0, 4_400), st.integers(0, 500), st.integers(0, 10_000))
GROUPS = st.sampled_from("abc")


class GateLife(RuleBasedStateMachine):
    """Two nodes under one pace."""

    @initialize(
        size=st.integers(1, 5),
        interval_s=st.sampled_from([0.0, 0.5, 3.0]),
        at_once=st.integers(1, 12),
        per_group=st.integers(1, 12),
    )
    def begin(self, size: int, interval_s: float, at_once: int, per_group: int) -> None:
        self.pace = Pace(size, interval_s, at_once, per_group, ready_goal_s=2.0)
        self.waves = Waves(self.pace)
        self.gates = [Gate(self.waves, Reservations(NODE), patience_s=5.0) for _ in range(2)]
        self.now = 100.0
        self.number = 0
        self.waiting: dict[str, tuple[int, str, Room]] = {}
        self.starting: dict[str, tuple[int, str, Room]] = {}
        self.running: dict[str, tuple[int, str, Room]] = {}
        self.wave_at, self.in_wave = -1e9, 0

    @rule(node=st.integers(0, 1), group=GROUPS, need=NEEDS)
    def ask(self, node: int, group: str, need: Room) -> None:
        self.number += 1
        key = f"k{self.number}"
        if any(n > has for n, has in zip(need, NODE, strict=True)):
            with pytest.raises(BadInput, match="more than this node has"):
                self.gates[node].ask(key, group, need)
            return
        self.gates[node].ask(key, group, need)
        self.waiting[key] = (node, group, need)

    @rule(seconds=st.floats(0, 4))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(node=st.integers(0, 1))
    def start(self, node: int) -> None:
        free = self.waves.free(self.now)
        started = self.gates[node].due(self.now)
        assert len(started) <= free
        for key in started:
            self.starting[key] = self.waiting.pop(key)
            assert self.starting[key][0] == node
            if self.now >= self.wave_at + self.pace.interval_s:
                self.wave_at, self.in_wave = self.now, 0
            self.in_wave += 1
        assert self.in_wave <= self.pace.size
        assert len(self.starting) <= max(1, int(self.waves.window)) or not started
        if started:
            again = self.gates[node].due(self.now)  # what could start has started
            for key in again:
                self.starting[key] = self.waiting.pop(key)
            assert again == []

    @precondition(lambda self: self.starting)
    @rule(data=st.data(), how=st.sampled_from(["ok", "failed", "refused"]))
    def settle(self, data: st.DataObject, how: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.starting)))
        before = self.waves.window
        self.waves.settle(key, self.now, ok=how == "ok", refused=how == "refused")
        with pytest.raises(KeyError):
            self.waves.settle(key, self.now, ok=True)
        if how == "refused":
            assert self.waves.window <= before
        self.running[key] = self.starting.pop(key)

    @precondition(lambda self: self.waiting or self.starting or self.running)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted([*self.waiting, *self.starting, *self.running])))
        self.leave_one(key)

    def leave_one(self, key: str) -> None:
        place = next(place for place in (self.waiting, self.starting, self.running) if key in place)
        node, _, _ = place.pop(key)
        self.gates[node].leave(key)
        with pytest.raises(KeyError):
            self.gates[node].leave(key)

    @invariant()
    def nothing_is_over_its_bound(self) -> None:
        if not hasattr(self, "gates"):
            return
        live = {**self.starting, **self.running}
        assert self.waves.live == len(live) <= self.pace.max_concurrent
        assert self.waves.starting == len(self.starting)
        assert max(Counter(group for _, group, _ in live.values()).values(), default=0) <= self.pace.per_group
        assert 1 <= self.waves.window <= max(1, self.pace.max_concurrent)
        for number, gate in enumerate(self.gates):
            held = [need for node, _, need in live.values() if node == number]
            promised = Room(*(sum(part) for part in zip(Room(0, 0, 0, 0), *held, strict=True)))
            assert all(p <= has for p, has in zip(promised, NODE, strict=True))
            assert tuple(p + left for p, left in zip(promised, gate.reservations.left, strict=True)) == NODE
            assert gate.waiting == sum(node == number for node, _, _ in self.waiting.values())

    def teardown(self) -> None:
        """Everybody gets a turn when those before come to their end."""
        if not hasattr(self, "gates"):
            return
        rounds = 0
        while self.waiting:
            for key in [*self.starting, *self.running]:
                self.leave_one(key)
            self.now = max(self.now + 1e-3, self.waves.next_wave_at())
            before = len(self.waiting)
            for node in (0, 1):
                self.start(node)
            assert len(self.waiting) < before, "an empty cluster starts somebody"
            rounds += 1
        for key in [*self.starting, *self.running]:
            self.leave_one(key)
        self.nothing_is_over_its_bound()
        assert [gate.reservations.left for gate in self.gates] == [NODE, NODE]


TestGateLife = GateLife.TestCase
TestGateLife.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@settings(max_examples=300, deadline=None)
@given(
    data=st.data(),
    nodes=st.integers(1, 6),
    homes=st.integers(1, 3),
    expected=st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 30)),
)
def test_a_lost_node_moves_only_what_it_must(
    data: st.DataObject, nodes: int, homes: int, expected: dict[str, int]
) -> None:
    names = [f"n{number}" for number in range(nodes)]
    placement = Placement(names, expected, homes=homes)
    at: dict[str, tuple[str, str]] = {}
    for number in range(data.draw(st.integers(0, 60))):
        group = data.draw(st.sampled_from("abcdef"))
        limit = placement.limit(group)
        node = placement.place(f"k{number}", group)
        at[f"k{number}"] = group, node
        load = Counter(where for _, where in at.values())
        assert load[node] <= limit
    pins = {group: placement.homes(group) for group in "abcdef"}
    lost = data.draw(st.sampled_from(names))
    if nodes == 1:
        with pytest.raises(BadInput, match="no other node"):
            placement.lose(lost)
        assert all(placement.node_of(key) == node for key, (_, node) in at.items())
        return
    moved = placement.lose(lost)
    assert set(moved) == {key for key, (_, node) in at.items() if node == lost}
    for key, (_, node) in at.items():
        assert placement.node_of(key) == moved.get(key, node) != lost
    for group, before in pins.items():
        kept = [node for node in before if node != lost]
        assert placement.homes(group) == kept or not kept, "its other home is warm"
        assert lost not in placement.homes(group) != []
    back = Placement(names, expected, homes=homes)
    assert {group: back.homes(group) for group in "abcdef"} == pins, "a node that is back has its groups"
    away = Placement(names, expected, homes=homes, lost=[lost])
    assert all(away.homes(group) == placement.homes(group) for group in "abcdef")


@settings(max_examples=60, deadline=None)
@given(light=st.integers(1, 4), every_s=st.floats(0.1, 1.0), lasts_s=st.floats(1.0, 6.0))
def test_a_heavy_build_starts_though_light_ones_never_stop_coming(light: int, every_s: float, lasts_s: float) -> None:
    gate = Gate(Waves(Pace(8, 0.0, 8, 8, 1e9)), Reservations(Room(8_000, 8_000, 800, 800)), patience_s=5.0)
    small, heavy = Room(1_000, 100, 1, 1), Room(8_000, 100, 1, 1)
    ends: dict[str, float] = {}
    now, number = 0.0, 0
    while True:
        for _ in range(light):
            number += 1
            gate.ask(f"light{number}", "g", small)
        if number == light:
            gate.ask("heavy", "h", heavy)
        for key in [key for key, end in ends.items() if end <= now]:
            del ends[key]
            gate.leave(key)
        started = gate.due(now)
        for key in started:
            gate.waves.settle(key, now, ok=True)
            ends[key] = now + lasts_s
        if "heavy" in started:
            return
        assert now < 5.0 + lasts_s + 2 * every_s + 1, "it waited for its patience and for those that ran"
        now += every_s
