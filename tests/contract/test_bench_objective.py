"""`rl360 bench objective` at a tiny size: both ways do the same work, differences end it, rows keep their format."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import numpy as np
import pytest

from rl360.bench import objective as suite
from rl360.bench.bare_trainer import in_order
from rl360.bench.rows import Options, Row
from rl360.cli import main
from rl360.errors import BadInput, Rl360Error
from rl360.policy import tokenizer

pytestmark = pytest.mark.contract  # the real Megatron-core

OPTIONS = Options(quick=True)


def test_advantages_of_both_ways_are_the_same_and_timed() -> None:
    assert suite.dict_advantages([1.0, 0.0, 0.5, 0.5], ["a", "b", "a", "b"]) == [0.25, -0.25, -0.25, 0.25]
    (row,) = suite.advantages_ms(OPTIONS, groups=16)
    assert row.row == "advantages_ms" and row.ours > 0 and row.baseline is not None and "random order" in row.detail


def test_other_advantages_end_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "dict_advantages", lambda rewards, _groups: [0.0] * len(rewards))
    with pytest.raises(Rl360Error, match="different advantages"):
        list(suite.advantages_ms(OPTIONS, groups=4))


def test_packing_holds_every_sample_once_and_the_same() -> None:
    (row,) = suite.packing_ms(OPTIONS, tokens=5000, longest=300, budget=512)
    assert row.holds and row.baseline is not None and "cells" in row.detail
    samples = suite.drawn_step(5000, 300)
    assert sum(len(sample.tokens) for sample in samples) in (4999, 5000)
    ours = suite.packed(samples, 512)
    suite.same_rows(samples, ours, suite.padded(samples, 512))
    with pytest.raises(Rl360Error, match="not every sample"):
        suite.same_rows(samples, ours[1:], suite.padded(samples, 512))
    changed = [replace(ours[0], mask=np.ones_like(ours[0].mask)), *ours[1:]]
    with pytest.raises(Rl360Error, match="different mask"):
        suite.same_rows(samples, changed, suite.padded(samples, 512))


def test_in_order_keeps_the_order_and_the_budget() -> None:
    assert in_order([3, 1, 4, 1, 5, 9], 10) == [[0, 1], [2, 3], [4], [5]]
    lengths = [len(sample.tokens) for sample in suite.drawn_step(3000, 200)]
    batches = in_order(lengths, 400)
    assert [index for batch in batches for index in batch] == list(range(len(lengths)))
    assert all(len(batch) * max(lengths[index] for index in batch) <= 400 for batch in batches)


def test_the_bare_loop_takes_the_same_steps_as_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "train_tokenizer", functools.cache(tokenizer.train_tokenizer))  # twice the same
    (row,) = suite.trainer_tokens(OPTIONS, samples=12)
    assert row.goal == "ratio >= 1" and row.ours > 0 and row.baseline is not None
    monkeypatch.setattr(suite, "RTOL", 1e-12)
    with pytest.raises(Rl360Error, match="the two ways differ at step"):
        list(suite.trainer_tokens(OPTIONS, samples=12))


def test_names_lines_and_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.chosen(None) == ("advantages_ms", "packing_ms", "trainer_tokens")
    with pytest.raises(BadInput, match="nope"):
        suite.chosen("packing_ms,nope")
    missed = Row("packing_ms", 2.0, 4.0, "ms", "<= 1 ms", False)
    monkeypatch.setitem(suite.ROWS, "packing_ms", lambda _options: iter([missed]))
    with pytest.raises(SystemExit) as left:
        main(["bench", "objective", "--rows", "packing_ms", "--json"])
    assert left.value.code == 1
    assert json.loads(capsys.readouterr().out) == missed.to_json()
