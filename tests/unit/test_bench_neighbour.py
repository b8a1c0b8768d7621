"""The builds beside which work is measured can slow it down: no cap of their own, more of them than cores."""

from __future__ import annotations

import pytest

from rl360.bench.sandbox_starts import builds


@pytest.mark.parametrize("cores", [1, 2, 64])
def test_the_builds_may_use_every_core_and_are_more_than_there_are(cores: int) -> None:
    found = builds(cores)
    assert len(found) > cores and all(limits.cpus == cores and limits.reserved_cpus < 1 for limits in found)
