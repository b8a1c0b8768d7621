"""Claims and replies of steps that are over go, and no others."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest

from rl360.errors import StoreUnavailable
from rl360.harbor import retention
from rl360.store.layout import manifest_key, reply_key
from rl360.store.progress import LAST_TASK
from tests.unit.memory_store import MemoryStore


def kept(store: MemoryStore) -> set[str]:
    return {key.partition("/replies/")[2] for key in store.list("") if "/replies/" in key}


@pytest.fixture
def store() -> MemoryStore:
    """Of a run whose steps 0 to 2 are finished, of one that has only begun, and of somebody else's attempts."""
    store = MemoryStore()
    for step in range(3):
        store.put(manifest_key("demo", step, LAST_TASK), b"{}")
    for run, steps in (("demo", range(5)), ("other", range(1))):
        for step in steps:
            key = reply_key(run, f"s{step:06}-g000-a00-t0")
            store.put(key, b"{}")
            store.put(f"{key}.claim", b"{}")
    for name in ("trial-7", "s000000", "s00000-g0"):
        store.put(reply_key("demo", name), b"{}")
    store.put(reply_key("Not/A run", "s000000-g000-a00-t0"), b"{}")
    return store


def test_those_of_finished_steps_but_the_last_are_deleted(store: MemoryStore) -> None:
    before = kept(store)
    assert retention.prune(cast(Any, store), "demo") == 4
    gone = {f"s{step:06}-g000-a00-t0.json{part}" for step in (0, 1) for part in ("", ".claim")}
    assert before - kept(store) <= gone and f"s{2:06}-g000-a00-t0.json" in kept(store)
    assert not [key for key in store.list("demo/replies/") if key.endswith(tuple(gone))]
    assert {"trial-7.json", "s000000.json", "s00000-g0.json"} <= kept(store)
    assert retention.prune(cast(Any, store), "demo") == retention.prune(cast(Any, store), "other") == 0


def test_it_goes_on_when_the_store_was_away(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rounds: list[float] = []

    def sleep(seconds: float) -> None:
        store.down = len(rounds) == 0
        rounds.append(seconds)
        if len(rounds) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(retention.time, "sleep", sleep)
    with caplog.at_level(logging.INFO, "rl360.sandbox"), pytest.raises(KeyboardInterrupt):
        retention.keep_pruned(cast(Any, store))
    assert all(0.5 * retention.EVERY_S <= pause <= 1.5 * retention.EVERY_S for pause in rounds)
    said = [record.message for record in caplog.records]
    assert "were not deleted" in said[0] and said[1:] == ["run demo: 4 claims and replies of finished steps deleted"]
    assert store.list("other/replies/") and len(store.list("_replies/")) == 1


def test_a_store_that_is_away_ends_nothing_else(store: MemoryStore) -> None:
    store.down = True
    with pytest.raises(StoreUnavailable):
        retention.prune(cast(Any, store), "demo")
