"""The simulator: the policies it drives are the product's, the world it models keeps its own books."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rl360.bench import sandboxes as suite
from rl360.bench.rows import Options
from rl360.cli import main
from rl360.commands import sandboxes as command
from rl360.sandboxes.admission import Room
from rl360.sandboxes.comparisons import NAMES, Setting, admission, compare, placement, rounds, waves
from rl360.sandboxes.pictures import picture
from rl360.sandboxes.simulate import Cluster, Load, Policy, World
from rl360.sandboxes.waves import Pace

SMALL = Setting(starts=400, nodes=8, pulls_per_s=20, pulls_at_once=60, wave_size=24, images=16, ready_goal_s=4)
WORLD = World(nodes=4, room=Room(8_000, 1 << 20, 1 << 20, 1 << 20), pulls_per_s=10, pulls_at_once=30, work_s=20)
PACE = Pace(8, 0.5, 40, 40, 6.0)


def load(count: int, images: int, cpus: float = 0.5) -> Load:
    return Load(np.arange(count) % images, np.full(count, cpus))


@pytest.mark.parametrize("policy", [Policy(), Policy(PACE), Policy(PACE, reserved=False, pinned=False)])
def test_the_books_of_a_world(policy: Policy) -> None:
    world = replace(WORLD, fail_share=0.1, seed=3)
    cluster = Cluster(world, policy)
    told = cluster.play(load(200, 20))
    assert np.isfinite(told.ready_s).all() and (told.ended_s > told.ready_s).all()
    assert (told.slowdown > 0.999).all()
    held = sum(len(node.images) for node in cluster.nodes.values())
    assert told.pulls == held, "a node pulls an image once, however many wait for it"
    assert told.failures == pytest.approx(20, abs=15)
    assert told.most_live <= (policy.pace.max_concurrent if policy.pace else 200)
    assert not any(node.running or node.pulling or node.using for node in cluster.nodes.values())
    again = Cluster(world, policy).play(load(200, 20))
    assert (again.ready_s == told.ready_s).all() and again.refused_s == told.refused_s
    other = Cluster(replace(world, seed=4), policy).play(load(200, 20))
    assert (other.ready_s != told.ready_s).any()


def test_no_node_promises_more_than_it_has() -> None:
    told = Cluster(WORLD, Policy(Pace(200, 0.0, 200, 200, 1e9))).play(load(200, 4, cpus=3.0))
    assert told.most_live <= 4 * 2, "two of three cpus on each node of eight"


def test_a_cache_drops_what_was_used_longest_ago() -> None:
    cluster = Cluster(replace(WORLD, nodes=2, cache_mb=2 * 600, image_sigma=0.0), Policy(PACE))
    for _ in range(2):
        told = cluster.play(load(12, 6))
    assert told.pulls > 0 and all(len(node.images) == 2 for node in cluster.nodes.values())


def test_waves_meet_no_refusal_and_are_near_the_bound() -> None:
    figures = waves(SMALL).figures
    ours, plain = figures["waves"], figures["all at once"]
    assert ours["refusals"] == 0 < plain["refusals"]
    assert ours["pulls"] == plain["pulls"] == SMALL.starts
    bound = SMALL.starts / SMALL.pulls_per_s
    assert bound <= ours["ready_last_s"] < 1.25 * bound < plain["ready_last_s"]


def test_a_goal_that_notices_nothing_meets_refusals_and_backs_off() -> None:
    blind = waves(replace(SMALL, ready_goal_s=1e9)).figures["waves"]
    plain = waves(SMALL).figures["all at once"]
    assert 0 < blind["refusals"] < plain["refusals"] / 4


def test_reservations_keep_neighbours_as_fast_as_alone() -> None:
    figures = admission(replace(SMALL, starts=1500, heavy_share=0.2)).figures
    assert figures["reservations"]["neighbours_slowdown_max"] == pytest.approx(1.0)
    assert figures["no reservations"]["neighbours_slowdown_p95"] > 1.5
    assert figures["reservations"]["heavy_ready_p95_s"] > figures["no reservations"]["heavy_ready_p95_s"]


def test_pinned_images_are_warm_and_stay_so_when_a_node_is_lost() -> None:
    setting = replace(SMALL, starts=128, rounds=4, lose_at=2)
    figures = placement(setting).figures
    pinned, anywhere = figures["pinned"], figures["anywhere"]
    assert min(pinned["warm_share"][1:]) >= 0.9
    assert pinned["pulls_total"] < anywhere["pulls_total"] / 2
    assert sum(len(one.warm) for one in rounds(setting, pinned=True)) == 4 * 128


def test_the_rows_of_the_benchmark() -> None:
    rows = {row.row: row for row in suite.measure(("warm_share",), Options(quick=True))}
    assert rows["warm_share"].holds and rows["warm_share"].ours > (rows["warm_share"].baseline or 1)
    assert suite.chosen(None)[:3] == ("sim_refusals", "sim_makespan", "warm_share")


def test_the_command_prints_figures_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["sandboxes", "simulate", "--starts", "100", "--nodes", "4", "--images", "8", "--heavy-share", "0.2"]
    with pytest.raises(SystemExit) as left:
        main([*common, "--json"])
    assert left.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"seed", "pictures", *NAMES}
    with pytest.raises(SystemExit) as left:
        main([*common, "--only", "waves", "--out", str(tmp_path / "p")])
    printed = capsys.readouterr().out
    assert left.value.code == 0 and "bound_s" in printed
    assert Path(printed.split()[-1]).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", NAMES)
def test_every_comparison_has_its_picture(name: str) -> None:
    assert picture(compare(name, replace(SMALL, starts=60)), dpi=20).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "nothing"], "no comparison 'nothing'; choose among waves, admission, placement"),
        (["--only", "admission", "--heavy-cpus", "65"], "--heavy-cpus 65: more than the 64 of a node; give at most 64"),
        (["--only", "admission", "--heavy-cpus", "inf"], "--heavy-cpus inf: more than the 64"),
        (["--only", "admission", "--heavy-share", "1"], "--heavy-share 1 of 10 starts: all of them are heavy"),
        (["--only", ""], "no comparison ''; choose among"),
        (["--pulls-per-s", "inf"], "--pulls-per-s 'inf': must be less than or equal to 1000000"),
        (["--wave-interval-s", "inf"], "--wave-interval-s 'inf': must be less than or equal to 3600"),
        (["--nodes", "1"], "--nodes '1': must be greater than or equal to 2"),
        (["--images", "-5"], "--images '-5': must be greater than or equal to 1"),
        (["--starts", "100001"], "--starts '100001': must be less than or equal to 100000"),
        (["--out", "/proc/x"], "--out /proc/x: cannot be written (No such file or directory); name another folder"),
    ],
)
def test_a_bad_option_is_one_line(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["sandboxes", "simulate", "--starts", "10", *options])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_a_long_comparison_is_told_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of its own, as a person has it."""
    monkeypatch.setattr(command, "SILENT_S", 0.01)
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal, contextlib.redirect_stderr(terminal):
        with command._progress("waves (1 of 3)"):
            time.sleep(0.2)
        monkeypatch.setattr(command, "SILENT_S", 60.0)
        with command._progress("placement (3 of 3)"):
            pass
    told = ""
    with contextlib.suppress(OSError):  # its other end is closed
        while part := os.read(master, 4096):
            told += part.decode()
    os.close(master)
    assert told.startswith("\rwaves (1 of 3): 0 s") and told.endswith("\r\x1b[K") and "placement" not in told
    pipe = io.StringIO()
    with contextlib.redirect_stderr(pipe), command._progress("waves (1 of 3)"):
        time.sleep(0.05)
    assert pipe.getvalue() == ""
