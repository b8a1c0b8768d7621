"""The benchmark measures what it says: both ways make one sample, rows keep the fixed format, misses are told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rl360.bench import local_rows, trajectory
from rl360.bench import sessions as suite
from rl360.bench.rows import Options, Row, at_least, ratio_at_most, table
from rl360.bench.shape import Shape
from rl360.bench.trajectory import draw, draw_routing
from rl360.cli import main
from rl360.errors import BadInput, Rl360Error

TINY = Shape(turns=5, tokens=900, opening=200, sampled=200, layers=3, top_k=2, experts=128)
OPTIONS = Options(quick=True, shape=TINY)
FIELDS = ["row", "baseline", "ours", "ratio", "unit", "goal", "holds"]


@pytest.fixture(scope="module", autouse=True)
def _small_corpus() -> Iterator[None]:
    """A tokenizer trained on less text: how good it is at English is not what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trajectory, "_CORPUS_CHARS", 300_000)
        yield
    for cached in (trajectory.corpus, trajectory.tokenizer_json, local_rows.played, local_rows.merged):
        cached.cache_clear()


def test_a_trajectory_is_the_same_every_time_and_of_its_shape() -> None:
    script, again = draw(TINY), draw(TINY)
    assert all(np.array_equal(a, b) for a, b in zip(script.outputs, again.outputs, strict=True))
    assert script.observations == again.observations
    assert np.array_equal(script.outputs[1], script.outputs[-1]) and script.observations[0] == script.observations[-1]
    held = local_rows.played(TINY)
    assert len(held.edges) == TINY.turns
    assert abs(held.edges[-1][1] - TINY.tokens) < TINY.tokens // 10


@pytest.mark.parametrize("experts", [64, 128, 256])
def test_drawn_experts_are_in_range_and_distinct(experts: int) -> None:
    rows = draw_routing(replace(TINY, top_k=8, experts=experts), 200)
    assert rows.dtype == np.uint8 and rows.max() < experts
    assert len(np.unique(rows)) == experts
    assert (np.diff(np.sort(rows, axis=2), axis=2) > 0).all()


def test_both_ways_make_the_same_sample() -> None:
    ordinary, cpu_s = local_rows.ordinary_sample(TINY)
    ours = local_rows.merged(TINY)
    local_rows.same(ours, ordinary)
    assert cpu_s > 0 and ours.turns == TINY.turns
    assert ordinary["tokens"] == ours.tokens.tolist() and ordinary["loss_mask"] == ours.loss_mask.tolist()
    for name in ("tokens", "loss_mask", "logprobs"):
        changed = [*ordinary[name][:-1], ordinary[name][-1] + 1]
        with pytest.raises(Rl360Error, match="different"):
            local_rows.same(ours, {**ordinary, name: changed})
    routing = ordinary["routed_experts"].copy()
    routing[7, 1, 0] += 1
    with pytest.raises(Rl360Error, match="different routing"):
        local_rows.same(ours, {**ordinary, "routed_experts": routing})


def test_rows_of_this_process() -> None:
    names = ("coordinator_cpu", "merge_pipeline_ms", "routing_bytes_mb")
    rows = {row.row: row for row in suite.measure(names, OPTIONS)}
    assert set(rows) == {
        "coordinator_cpu",
        "coordinator_cpu_orjson",
        "merge_pipeline_ms",
        "routing_bytes_mb",
        "routing_bytes_mb_engine",
        "routing_bytes_mb_store",
    }
    for row in rows.values():
        wire = row.to_json()
        assert list(wire) == FIELDS and wire["ours"] > 0 and wire["baseline"] > 0
        assert wire["ratio"] == pytest.approx(wire["ours"] / wire["baseline"], rel=1e-3)
        assert row.row in table([row]) and row.goal in table([row])
    assert rows["routing_bytes_mb"].holds and rows["merge_pipeline_ms"].holds
    assert rows["routing_bytes_mb_store"].ratio == pytest.approx(3 / 16, rel=0.01)


def _measured(*rows: Row) -> Any:
    def measure(_names: tuple[str, ...], _options: Options) -> Iterator[Row]:
        yield from rows

    return measure


def test_json_lines_and_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    good = ratio_at_most("a", baseline=4.0, ours=2.0, unit="ms", limit=0.5)
    missed = at_least("b", ours=1.0, unit="turns", limit=2)
    for rows, code in (((good,), 0), ((good, missed), 1)):
        monkeypatch.setattr(suite, "measure", _measured(*rows))
        with pytest.raises(SystemExit) as left:
            main(["bench", "sessions", "--json"])
        assert left.value.code == code
        printed = capsys.readouterr()
        lines = [json.loads(line) for line in printed.out.splitlines()]
        assert lines == [row.to_json() for row in rows]
        assert all(f"{row.row}: {row.detail}" in printed.err for row in rows)
    assert lines[1] == {
        "row": "b", "baseline": None, "ours": 1.0, "ratio": None, "unit": "turns", "goal": ">= 2 turns", "holds": False
    }  # fmt: skip
    with pytest.raises(SystemExit):
        main(["bench", "sessions"])
    shown = capsys.readouterr().out
    assert "cores" in shown and "MISSED" in shown


def test_names_of_rows() -> None:
    assert suite.chosen(None) == suite.DEFAULT and "collection" not in suite.DEFAULT
    assert suite.chosen("collection, hit_rate") == ("collection", "hit_rate")
    assert suite.chosen("rss_growth_per_1k_sessions,turns_per_s") == ("turns_per_s",)
    with pytest.raises(BadInput, match="no such row"):
        suite.chosen("")
    with pytest.raises(BadInput, match="nope"):
        suite.chosen("turns_per_s,nope")


@pytest.mark.parametrize("row", ["hit_rate", "collection"])
def test_without_services_one_line_says_what_to_start(
    row: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RL360_HOME", str(tmp_path))
    with pytest.raises(SystemExit) as left:
        main(["bench", "sessions", "--rows", row])
    assert left.value.code == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "rl360 up" in said
