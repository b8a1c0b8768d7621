"""When the engines' caches held less than in the steps before, and what a step says of it then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rl360.report.alerts import CACHE_STEPS, cache_fall


def steps(*shares: float | None) -> list[dict[str, Any]]:
    return [{"cache_share": share} for share in shares]


@pytest.mark.parametrize(
    ("earlier", "now", "fell"),
    [
        ((0.8, 0.9, 0.8), 0.5, True),
        ((0.8, 0.9, 0.8), 0.57, False),  # not below 0.7 x 0.8
        ((0.8, 0.9), 0.1, False),  # too few to compare with
        ((0.8, None, 0.9, None), 0.1, False),
        ((0.8, None, 0.9, None, 0.8), 0.5, True),  # steps that do not know are none
        ((0.8, 0.9, 0.8), None, False),
        ((0.0, 0.0, 0.0), 0.0, False),
        ((0.04, 0.04, 0.04), 0.0, False),  # a cache that never held anything did not fall
        ((0.9, 0.2, 0.9, 0.9), 0.5, True),  # one bad step moves no median
        ((0.3, 0.3, 0.3), 0.9, False),
    ],
)
def test_a_share_far_below_the_steps_before_is_a_fall(
    earlier: tuple[float | None, ...], now: float | None, fell: bool
) -> None:
    assert (cache_fall(steps(*earlier), steps(now)[0]) is not None) is fell


def test_steps_of_earlier_versions_have_no_share() -> None:
    assert cache_fall([{}] * 5, {}) is None


def test_it_says_what_to_look_at() -> None:
    fall = cache_fall(steps(*[0.8] * CACHE_STEPS), {"cache_share": 0.2})
    assert fall is not None
    assert fall.event("demo", 3)["payload"] == {"share": 0.2, "baseline": 0.8, "steps": CACHE_STEPS, "step": 3}
    assert "held 20% of the prompts, the median of the 3 steps before is 80%" in str(fall)


def test_the_step_tells_it_in_its_log_its_artifact_and_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks import report

    told: dict[str, Any] = {"log": [], "events": []}
    now = {"cache_share": 0.1}
    job: Any = SimpleNamespace(
        store=None,
        config=None,
        run="demo",
        step=3,
        log=SimpleNamespace(warning=lambda form, *more: told["log"].append(form % more)),
    )
    monkeypatch.setattr(report.step_work, "close_books", lambda *_: (SimpleNamespace(info=now), None))
    monkeypatch.setattr(report, "quarantined", lambda *_: {}, raising=False)
    monkeypatch.setattr(report, "run_figures", lambda *_, **__: {})
    monkeypatch.setattr(report, "step_markdown", lambda *_, warnings: told.update(warnings=warnings) or "text")
    monkeypatch.setattr(report, "create_markdown_artifact", lambda **_: None)
    monkeypatch.setattr(report, "emit_event", lambda **event: told["events"].append(event))
    monkeypatch.setattr(report, "_earlier", lambda _: steps(0.8, 0.8))
    report._report(job)
    assert (told["log"], told["events"], told["warnings"]) == ([], [], [])
    monkeypatch.setattr(report, "_earlier", lambda _: steps(0.8, 0.8, 0.8))
    report._report(job)
    (line,), (event,) = told["log"], told["events"]
    assert "held 10%" in line and told["warnings"] == [line]
    assert event["event"] == "rl360.run.cache-hit-rate" and event["resource"]["prefect.resource.id"] == "rl360.run.demo"
    assert event["payload"] == {"share": 0.1, "baseline": 0.8, "steps": 3, "step": 3}
