"""Waves: the pace is kept, the window follows what starts take, and refusals are answered."""

from __future__ import annotations

import pytest

from rl360.sandboxes.waves import Pace, Waves


def pace(**parts: float) -> Pace:
    given = {"size": 4, "interval_s": 1.0, "max_concurrent": 100, "per_group": 100, "ready_goal_s": 2.0} | parts
    return Pace(**given)  # type: ignore[arg-type]


def begin(waves: Waves, count: int, now: float, group: str = "g") -> list[str]:
    keys = [f"{now}-{number}" for number in range(count)]
    for key in keys:
        waves.begin(key, group, now)
    return keys


def test_a_wave_is_so_large_and_the_next_so_much_later() -> None:
    waves = Waves(pace(size=4))
    waves.window = 100.0
    begin(waves, 4, 10.0)
    assert (waves.free(10.0), waves.free(10.99), waves.free(11.0)) == (0, 0, 4)
    assert waves.next_wave_at() == 11.0
    with pytest.raises(ValueError, match="may not start now"):
        waves.begin("more", "g", 10.5)


def test_caps_of_all_and_of_a_group() -> None:
    waves = Waves(pace(size=10, max_concurrent=5, per_group=2))
    keys = begin(waves, 2, 0.0, "a")
    assert not waves.open("a") and waves.open("b")
    with pytest.raises(ValueError, match="may not start now"):
        waves.begin("third", "a", 0.0)
    waves.end(keys[0])
    assert waves.open("a") and waves.free(0.0) == 4
    begin(waves, 2, 0.5, "b")
    begin(waves, 1, 0.6, "c")
    assert waves.free(0.7) == 1


def test_the_window_grows_while_starts_are_quick_and_the_window_is_what_holds_them_back() -> None:
    waves = Waves(pace(size=4))
    keys = begin(waves, 4, 0.0)
    waves.settle(keys[0], 0.5, ok=True)
    assert waves.window == 4.25
    waves.settle(keys[1], 0.5, ok=True)  # three under way in a window of four: it was not full
    assert waves.window == 4.25


@pytest.mark.parametrize(("took", "window"), [(0.9, 4.25), (1.5, 4.0), (2.1, 3.2)])
def test_quick_starts_widen_slow_ones_hold_late_ones_narrow(took: float, window: float) -> None:
    waves = Waves(pace(size=4))
    keys = begin(waves, 4, 0.0)
    waves.settle(keys[0], took, ok=True)
    assert waves.window == pytest.approx(window)


def test_a_round_narrows_it_once_and_never_below_one() -> None:
    waves = Waves(pace(size=4))
    for key in begin(waves, 4, 0.0):
        waves.settle(key, 0.1, ok=False, refused=True)
    assert waves.window == 2.0
    for second in range(1, 20):
        waves.settle(begin(waves, 1, float(second))[0], second + 0.1, ok=False, refused=True)
    assert waves.window == 1.0 and waves.free(30.0) == 1


def test_after_a_refusal_it_comes_back_slowly_to_what_was_refused() -> None:
    waves = Waves(pace(size=8, max_concurrent=1000))
    keys = begin(waves, 8, 0.0)
    waves.settle(keys[0], 0.1, ok=False, refused=True)
    for key in keys[1:]:
        waves.settle(key, 0.1, ok=True)
    assert waves.window == pytest.approx(4.0, abs=1.0)
    start, now = waves.window, 10.0
    for _round in range(4):
        for key in begin(waves, int(waves.window), now):
            waves.settle(key, now + 0.1, ok=True)
        now += 10.0
    assert start < waves.window <= start + 4 * 0.25, "a quarter of a start a round, not a quarter more of them"


def test_a_failure_that_is_nobodys_load_changes_nothing() -> None:
    waves = Waves(pace())
    waves.settle(begin(waves, 4, 0.0)[0], 0.1, ok=False)
    assert waves.window == 4.0


def test_one_that_ends_while_it_starts_leaves_nothing() -> None:
    waves = Waves(pace())
    for key in begin(waves, 4, 0.0):
        waves.end(key)
    assert (waves.live, waves.starting) == (0, 0)
    with pytest.raises(KeyError):
        waves.end("0.0-0")


def test_warm_is_a_group_that_was_started_before() -> None:
    waves = Waves(pace())
    for group in ("a", "a", "b", "a"):
        waves.end(begin(waves, 1, float(waves.begun), group)[0])
    assert (waves.begun, waves.warm) == (4, 2)


def test_late_starts_leave_a_quarter_of_a_wave() -> None:
    waves = Waves(pace(size=16))
    for second in range(0, 200, 10):
        waves.settle(begin(waves, 1, float(second))[0], second + 5.0, ok=True)
    assert waves.window == 4.0, "a busy host makes starts late however few there are"


def test_a_start_that_failed_late_is_late() -> None:
    waves = Waves(pace(size=4))
    waves.settle(begin(waves, 4, 0.0)[0], 3.0, ok=False)
    assert waves.window == pytest.approx(3.2), "a start that ran out of time tells of a crowd"


def test_one_that_runs_and_starts_another_sandbox_counts_as_a_start_and_as_nothing_else() -> None:
    waves = Waves(pace(size=2, max_concurrent=2, per_group=2))
    first, second = begin(waves, 2, 0.0)
    with pytest.raises(ValueError, match="starts already"):
        waves.begin_again(first, 0.1)
    waves.settle(first, 0.1, ok=True)
    waves.settle(second, 0.1, ok=True)
    assert (waves.paced(1.0), waves.free(1.0)) == (2, 0)
    waves.begin_again(first, 1.0)
    assert (waves.paced(1.0), waves.starting, waves.live, waves.begun) == (1, 1, 2, 2)
    waves.window = 4.0
    waves.settle(first, 1.5, ok=False, refused=True)
    assert waves.window == 2.0
    waves.end(first)
    with pytest.raises(ValueError, match="does not live"):
        waves.begin_again(first, 2.0)
