"""A run is computed under the config it was started with, or refused with the difference; nothing is overwritten."""

from __future__ import annotations

import pytest

from rl360.config.freeze import freeze_config, load_frozen, note_target
from rl360.config.run import RunConfig
from rl360.errors import BadInput, CorruptObject, StoreUnavailable
from rl360.ledger.read import load_target
from tests.unit.memory_store import MemoryStore

MODEL = "/models/a"


def config(**changes: object) -> RunConfig:
    return RunConfig.parse({"run": "r1", **changes})


def test_the_first_start_freezes_the_model_too() -> None:
    store = MemoryStore()
    started = freeze_config(store, config(), default_model=MODEL)
    assert started.model.path == MODEL
    assert load_frozen(store, "r1") == started
    assert list(store.objects) == ["r1/config.json"]


def test_a_resume_keeps_the_model_whatever_the_engines_were_started_with() -> None:
    store = MemoryStore()
    freeze_config(store, config(), default_model=MODEL)
    assert freeze_config(store, config(), default_model="/models/b").model.path == MODEL


def test_operational_fields_are_as_given_and_the_stored_config_stays() -> None:
    store = MemoryStore()
    freeze_config(store, config(), default_model=MODEL)
    before = dict(store.objects)
    resumed = freeze_config(store, config(steps=77, rollout={"wave_size": 8}), default_model=MODEL)
    assert (resumed.steps, resumed.rollout.wave_size) == (77, 8)
    assert store.objects == before


def test_the_target_is_the_last_one_asked_for() -> None:
    store = MemoryStore()
    freeze_config(store, config(steps=5), default_model=MODEL)
    assert load_target(store, "r1") == 5
    note_target(store, freeze_config(store, config(steps=9), default_model=MODEL))
    assert load_target(store, "r1") == 9
    assert load_frozen(store, "r1").steps == 5
    store.put("r1/target.json", b"{}")
    with pytest.raises(CorruptObject, match="does not say the steps"):
        load_target(store, "r1")


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"seed": 9}, "seed: 0 -> 9"),
        ({"model": {"path": "/models/b"}}, "model.path: '/models/a' -> '/models/b'"),
        ({"objective": {"veto": 1e-4}}, "objective.veto: None -> 0.0001"),
    ],
)
def test_another_config_is_refused_with_the_difference(changes: dict[str, object], difference: str) -> None:
    store = MemoryStore()
    freeze_config(store, config(), default_model=MODEL)
    before = dict(store.objects)
    with pytest.raises(BadInput) as error:
        freeze_config(store, config(**changes), default_model=MODEL)
    assert difference in str(error.value)
    assert "start a run under another name" in str(error.value) and "\n" not in str(error.value)
    assert store.objects == before


def test_no_such_run_and_a_damaged_one() -> None:
    store = MemoryStore()
    with pytest.raises(BadInput, match="no run 'r1' in bucket test"):
        load_frozen(store, "r1")
    store.objects["r1/config.json"] = b"{"
    with pytest.raises((BadInput, CorruptObject), match=r"r1/config\.json: not JSON"):
        load_frozen(store, "r1")


def test_a_store_that_is_away_is_not_a_new_run() -> None:
    store = MemoryStore()
    freeze_config(store, config(), default_model=MODEL)
    store.down = True
    with pytest.raises(StoreUnavailable):
        freeze_config(store, config(seed=9), default_model=MODEL)
    store.down = False
    assert load_frozen(store, "r1").seed == 0
