"""Admission: order, who may pass, who may not be passed any more, and turns under asyncio."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import Future
from pathlib import Path

import pytest

from rl360.errors import BadInput
from rl360.harbor.turns import Turns
from rl360.sandboxes.admission import LOOK_AHEAD, Gate, Reservations, Room
from rl360.sandboxes.host import FLOOR_BYTES, FLOOR_SHARE, host_room
from rl360.sandboxes.waves import Pace, Waves

NODE = Room(4_000, 4_000, 400, 4_000)


def need(milli_cpus: int = 1_000, memory_mb: int = 100) -> Room:
    return Room(milli_cpus, memory_mb, 10, 10)


def gate(size: int = 100, interval_s: float = 0.0, per_group: int = 100, patience_s: float = 30.0) -> Gate:
    return Gate(Waves(Pace(size, interval_s, 100, per_group, 1e9)), Reservations(NODE), patience_s)


def test_in_the_order_of_asking_while_it_fits() -> None:
    waits = gate()
    for number in range(6):
        waits.ask(f"k{number}", "g", need())
    assert waits.due(0.0) == ["k0", "k1", "k2", "k3"]
    assert waits.due(1.0) == []
    waits.leave("k2")
    assert waits.due(2.0) == ["k4"] and waits.waiting == 1


@pytest.mark.parametrize("part", Room._fields)
def test_every_resource_is_promised_once(part: str) -> None:
    waits = gate()
    for number in range(3):
        waits.ask(f"k{number}", "g", Room(0, 0, 0, 0)._replace(**{part: getattr(NODE, part) // 2}))
    assert waits.due(0.0) == ["k0", "k1"]


def test_more_than_the_node_has_is_refused_with_what_to_lower() -> None:
    with pytest.raises(BadInput, match=r"milli_cpus 4,001.*more than this node has.*4,000.*lower milli_cpus"):
        gate().ask("k", "g", need(4_001))


def test_one_that_does_not_fit_is_passed_until_its_patience_ends() -> None:
    waits = gate(patience_s=5.0)
    waits.ask("light0", "g", need())
    waits.ask("heavy", "g", need(4_000))
    waits.ask("light1", "g", need())
    assert waits.due(0.0) == ["light0", "light1"]
    waits.ask("light2", "g", need())
    waits.leave("light0")
    assert waits.due(4.9) == ["light2"]
    waits.ask("light3", "g", need())
    assert waits.due(5.0) == [], "from now on what ends makes room for the heavy one"
    waits.leave("light1")
    assert waits.due(6.0) == []
    waits.leave("light2")
    assert waits.due(7.0) == ["heavy"]
    waits.leave("heavy")
    assert waits.due(8.0) == ["light3"]


def test_a_full_group_is_passed_and_keeps_nobody_back() -> None:
    waits = gate(per_group=1, patience_s=0.0)
    for key, group in (("a0", "a"), ("a1", "a"), ("b0", "b")):
        waits.ask(key, group, need())
    assert waits.due(0.0) == ["a0", "b0"]
    waits.leave("a0")
    assert waits.due(1.0) == ["a1"]


def test_many_of_one_full_group_do_not_leave_the_node_idle() -> None:
    waits = gate(size=2, per_group=1)
    for number in range(LOOK_AHEAD + 2):
        waits.ask(f"a{number}", "a", need(1))
    waits.ask("b", "b", need(1))
    assert waits.due(0.0) == ["a0", "b"]


def test_a_call_looks_at_so_many_and_comes_to_all() -> None:
    waits = gate(per_group=1)
    for number in range(3 * LOOK_AHEAD):
        waits.ask(f"a{number}", "a", need(1))
    waits.ask("b", "b", need(1))
    done = []
    for second in range(3 * LOOK_AHEAD + 1):
        for key in waits.due(float(second)):
            done.append(key)
            waits.leave(key)
    assert set(done) == {*(f"a{number}" for number in range(3 * LOOK_AHEAD)), "b"} and waits.waiting == 0


def test_a_next_sandbox_goes_before_all_that_wait_and_within_the_pace() -> None:
    waits = gate(size=2, interval_s=1.0)
    for number in range(6):
        waits.ask(f"k{number}", "g", need())
    assert waits.due(0.0) == ["k0", "k1"]
    for key in ("k0", "k1"):
        waits.waves.settle(key, 0.5, ok=True)
        waits.ask_again(key)
    assert waits.due(0.9) == [] and waits.again_at(0.9) == 1.0, "the wave is over"
    assert waits.due(1.0) == ["k0", "k1"]
    assert waits.due(2.0) == [] and waits.waves.starting == 2, "they fill the window"
    waits.leave("k0")
    assert waits.due(3.0) == ["k2"]
    waits.leave("k1")
    waits.waves.settle("k2", 3.5, ok=True)
    waits.ask_again("k2")
    waits.withdraw("k2")
    waits.ask_again("k2")
    waits.leave("k2")
    assert waits.due(4.0, most=2) == ["k3", "k4"], "one that left wants nothing"


def test_what_is_wrong_to_do_raises() -> None:
    waits = gate()
    waits.ask("k", "g", need())
    with pytest.raises(ValueError, match="waits or runs already"):
        waits.ask("k", "g", need())
    waits.due(0.0)
    with pytest.raises(ValueError, match="waits or runs already"):
        waits.ask("k", "g", need())
    with pytest.raises(ValueError, match="holds a reservation"):
        waits.reservations.hold("k", need())
    with pytest.raises(KeyError):
        waits.leave("unknown")


def test_turns_keep_the_pace_by_themselves() -> None:
    async def go() -> list[float]:
        turns, loop = Turns(gate(size=2, interval_s=0.05)), asyncio.get_running_loop()
        began = loop.time()
        times: list[float] = []

        async def one(number: int) -> None:
            await turns.wait(f"k{number}", "g", need(500))
            times.append(loop.time() - began)
            turns.settle(f"k{number}", True, False)
            turns.leave(f"k{number}")

        await asyncio.gather(*(one(number) for number in range(6)))
        assert turns.gate.reservations.left == NODE and turns.gate.waves.live == 0
        return times

    times = asyncio.run(go())
    assert times[1] < times[2] and times[2] >= 0.05 and times[4] >= 0.1


@pytest.mark.parametrize("when", ["waiting", "granted", "unfit"])
def test_a_turn_that_is_given_up_leaves_nothing(when: str) -> None:
    async def go() -> None:
        turns = Turns(gate())
        if when == "unfit":
            with pytest.raises(BadInput):
                await turns.wait("big", "g", need(9_999))
            return
        await turns.wait("holder", "g", need(4_000))
        job = asyncio.create_task(turns.wait("k", "g", need()))
        await asyncio.sleep(0)
        if when == "granted":
            turns.leave("holder")  # told in this very round of the loop, and has not seen it
            assert turns.gate.waves.live == 1
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        if when == "waiting":
            assert turns.gate.waiting == 0
            turns.leave("holder")
        assert turns.gate.reservations.left == NODE and turns.gate.waves.live == 0

    asyncio.run(go())


def test_disk_is_free_when_its_files_are_deleted_and_withheld_where_they_cannot_be() -> None:
    async def go() -> None:
        turns, ends = Turns(gate()), [Future[str | None](), Future[str | None]()]
        reservations = turns.gate.reservations
        for key, end in zip("ab", ends, strict=True):
            await turns.wait(key, "g", need())
            turns.leave(key, [end])
        assert (reservations.withheld_mb, reservations.left.disk_mb) == (20, NODE.disk_mb - 20)
        ends[0].set_result("a: could not be deleted")
        ends[1].set_result(None)
        await asyncio.sleep(0.01)
        assert (reservations.withheld_mb, reservations.left.disk_mb) == (10, NODE.disk_mb - 10)

    asyncio.run(go())


def test_a_host_can_promise_what_it_has(tmp_path: Path) -> None:
    room = host_room(tmp_path)
    assert min(room) > 0 and room.milli_cpus % 1000 == 0 and room.memory_mb < 1 << 30 and room.pids < 1 << 31


def test_nobody_is_promised_the_disk_below_which_a_host_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = list(os.statvfs(tmp_path))
    for blocks, floor_mb in ((10 << 20, FLOOR_BYTES >> 20), (100 << 8, 100 // FLOOR_SHARE)):
        now[1:5] = 4096, blocks, blocks, 500 << 8
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(now))
        assert host_room(tmp_path).disk_mb == 500 - floor_mb


V1 = {"memory/memory.limit_in_bytes": "1073741824", "pids/pids.max": "300"}
QUOTA = {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("files", "milli_cpus", "memory_mb", "pids"),
    [
        ({"memory.max": "536870912", "pids.max": "200", "cpu.max": "25000 100000"}, 250, 512, 200),
        ({"memory.max": "max", "pids.max": "200", "cpu.max": "max 100000"}, None, None, 200),
        ({**V1, **QUOTA}, 500, 1024, 300),
        ({**V1, **QUOTA, "cpu/cpu.cfs_quota_us": "-1"}, None, 1024, 300),
        ({}, None, None, 1234),
    ],
    ids=["v2", "v2 without limits", "v1", "v1 without a quota", "none"],
)
def test_a_container_can_promise_what_it_may_use(
    tmp_path: Path, files: dict[str, str], milli_cpus: int | None, memory_mb: int | None, pids: int
) -> None:
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/pid_max").write_text("1234\n")
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    whole, room = host_room(tmp_path, tmp_path / "nothing"), host_room(tmp_path, tmp_path)
    assert room.milli_cpus == (milli_cpus or whole.milli_cpus)
    assert room.memory_mb == (memory_mb or whole.memory_mb) and room.pids == pids
