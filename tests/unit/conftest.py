"""The order of the files: those that take longest come first, so that two workers end at about the same time."""

from __future__ import annotations

import pytest

LONGEST = (
    "test_weights_push",
    "test_push_set_changes",
    "test_sessions_hostile",
    "test_sessions_load",
    "test_families_check",
    "test_sessions_core",
    "test_sessions_clients",
    "test_sessions_engines",
    "test_families_formats",
    "test_bad_input",
    "test_report_page",
    "test_packaging",
    "test_follow",
    "test_house_limits",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
