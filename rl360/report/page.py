"""The report of a run: one HTML page that needs nothing beside itself, and the pictures as PNG files.

Everything on it comes from the run's ledgers. The page has no script and loads nothing: pictures are inlined, text is
escaped by the template, so a task or run name cannot inject anything.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from rl360.errors import BadInput
from rl360.ledger import metrics
from rl360.ledger.checks import Check
from rl360.ledger.read import audit_run
from rl360.report.figures import ROLLING_STEPS, run_figures
from rl360.report.numbers import DASH, fixed, percent, run_losses, short
from rl360.report.waste import waste

if TYPE_CHECKING:
    from rl360.ledger.step import StepLedger

Step = Mapping[str, Any]
CAPTIONS = {
    "reward": "Green counts every attempt a verifier judged; orange only those that trained, which is not the pass "
    "rate: groups that agree are left out of it. Attempts lost to infrastructure have no reward and are in neither.",
    "attempts": "Only groups whose attempts disagree carry a gradient (strong colours). Pale colours are verified "
    "attempts of groups that all passed or all failed.",
    "tokens": "Each sampled token is in exactly one bucket; the buckets of a step sum to what its engines sampled.",
    "anatomy": "Wall-clock seconds of each task of the step's flow.",
}


@dataclass(frozen=True)
class ReportPaths:
    """Where a report was written."""

    html: Path
    pngs: dict[str, Path]


def render_run(ledgers: Iterable[StepLedger], out_dir: Path) -> ReportPaths:
    """Write `report.html` and the PNGs of a run into `out_dir` (made when missing), replacing an earlier report.

    Takes the ledgers one at a time, in step order.
    """
    run = ""
    steps: list[Step] = []
    checked: list[tuple[int, Check]] = []

    def audited() -> Iterator[StepLedger]:
        nonlocal run
        for ledger, checks in audit_run(ledgers):
            run = ledger.run
            steps.append(metrics.step_json(ledger))
            checked.extend((ledger.step, check) for check in checks)
            yield ledger

    books = waste(audited())
    if not steps:
        raise BadInput("no step has a ledger yet: there is nothing to report; wait for the first step to finish")
    html = out_dir / "report.html"
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        figures = run_figures(steps)
        pngs = {name: out_dir / f"{name}.png" for name in figures}
        for name, data in figures.items():
            pngs[name].write_bytes(data)
        html.write_text(run_page(run, steps, checked, figures, books), encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot write the report to {out_dir} ({error.strerror}); give another --out") from None
    return ReportPaths(html=html, pngs=pngs)


def run_page(
    run: str,
    steps: Sequence[Step],
    checked: Sequence[tuple[int, Check]],
    figures: Mapping[str, bytes],
    books: Mapping[str, Any],
) -> str:
    """The HTML of the report. `steps`: the run's `step_json`; `checked`: (step, check) of its ledgers; `books`: their
    `waste`."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(files("rl360.report").joinpath("page.html").read_text(encoding="utf-8"))
    pictures = [
        (name, CAPTIONS[name], base64.b64encode(figures[name]).decode()) for name in CAPTIONS if name in figures
    ]
    return template.render(
        run=run,
        first=steps[0]["step"],
        last=steps[-1]["step"],
        figures=key_figures(steps),
        rows=[step_row(step, largest_k(steps)) for step in steps],
        losses=run_losses(steps),
        classes=run_classes(books),
        largest=largest_k(steps),
        tokens=run_tokens(steps),
        domains=run_domains(steps),
        checks=check_summary(checked),
        pictures=pictures,
    )


def compared_steps(steps: int) -> int:
    """How many first steps are compared with as many last ones: never the same steps twice, but for a run of one."""
    return max(1, min(ROLLING_STEPS, steps // 2))


def key_figures(steps: Sequence[Step]) -> list[tuple[str, str, str]]:
    """(label, value, note) of the figures at the top of the page."""
    rewards = [step["reward"]["unfiltered_mean_valid"] for step in steps]
    window = compared_steps(len(rewards))
    first = metrics.mean([reward for reward in rewards[:window] if reward is not None])
    last = metrics.mean([reward for reward in rewards[-window:] if reward is not None])
    attempts = sum(step["attempts"] for step in steps)
    lost = sum(cause["attempts"] for step in steps for cause in step["losses_by_cause"])
    sampled = sum(step["sampled_tokens"] for step in steps)
    trained = sum(step["tokens"].get("trained", 0) for step in steps)
    seconds = sum(sum(step["phases_s"].values()) for step in steps)
    empty = sum(step["status"] != "trained" for step in steps)
    return [
        (
            "reward",
            f"{fixed(first, 2)} → {fixed(last, 2)}",
            f"mean of verified attempts, first and last {window} steps",
        ),
        (
            "steps",
            f"{len(steps):,}",
            f"{empty} of them without an optimizer step" if empty else "an optimizer step each",
        ),
        ("attempts", f"{attempts:,}", f"{percent(lost / attempts if attempts else None)} lost to infrastructure"),
        ("sampled tokens", f"{sampled:,}", f"{percent(trained / sampled if sampled else None)} trained"),
        ("wall time", duration(seconds), f"{seconds / len(steps):.1f} s per step"),
    ]


def largest_k(steps: Sequence[Step]) -> str:
    """The largest k of pass@k that any step has a group for."""
    return str(max((int(k) for step in steps for k, found in step["pass_at_k"].items() if found["groups"]), default=1))


def step_row(step: Step, largest: str = "1") -> dict[str, Any]:
    """One row of the step table, all cells as text but the reward, which also draws a bar. largest: k of its pass@k."""
    groups, reward, push = step["groups"], step["reward"], step["push"]
    trained = step["tokens"].get("trained", 0)
    return {
        "step": step["step"],
        "reward": fixed(reward["unfiltered_mean_valid"], 3),
        "reward_share": max(0.0, min(1.0, reward["unfiltered_mean_valid"] or 0.0)),
        "kept": fixed(reward["kept_mean"], 3),
        "pass_at_k": fixed(step["pass_at_k"].get(largest, {}).get("mean"), 3),
        "infra": percent(reward["infra_rate"]),
        "attempts": f"{step['attempts']:,}",
        "groups": f"{groups['trained']} / {groups['all_pass']} / {groups['all_fail']}",
        "sampled": f"{step['sampled_tokens']:,}",
        "trained": percent(trained / step["sampled_tokens"] if step["sampled_tokens"] else None),
        "truncated": percent(step["truncation_share"]),
        "loss": fixed(step["loss"], 4),
        "grad_norm": fixed(step["grad_norm"], 3),
        "entropy": fixed(step["entropy"], 3),
        "dlogp": short(step["mean_abs_dlogp"]),
        "stale": fixed(step["staleness"]["mean"], 2),
        "push": DASH if push is None else f"{push['path']}, {push['paused_s']:.2f} s",
        "seconds": f"{sum(step['phases_s'].values()):.1f}",
    }


def run_tokens(steps: Sequence[Step]) -> list[tuple[str, int, float]]:
    """(bucket, tokens, share of the sampled) over the whole run, most first."""
    total: dict[str, int] = {}
    for step in steps:
        for bucket, count in step["tokens"].items():
            total[bucket] = total.get(bucket, 0) + count
    sampled = sum(total.values())
    return [(bucket, count, count / sampled) for bucket, count in sorted(total.items(), key=lambda item: -item[1])]


def run_classes(books: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """(class, attempts, seconds, share, tokens, share): what was kept, dropped and lost over the whole run."""
    seconds, sampled = books["seconds"], books["sampled_tokens"]
    return [
        (
            name,
            f"{each['attempts']:,}",
            f"{each['seconds']:,.1f}",
            percent(each["seconds"] / seconds if seconds else None),
            f"{each['tokens']:,}",
            percent(each["tokens"] / sampled if sampled else None),
        )
        for name, each in books["by_class"].items()
    ]


def run_domains(steps: Sequence[Step]) -> list[tuple[str, str, str]]:
    """(domain, first, last): mean reward of verified attempts by domain over the first and last steps of the run."""
    window = compared_steps(len(steps))
    by_step = [step["reward"]["by_domain"] for step in steps]
    names = sorted({name for domains in by_step for name in domains})

    def over(part: list[dict[str, float]], name: str) -> str:
        return fixed(metrics.mean([domains[name] for domains in part if name in domains]), 3)

    return [(name, over(by_step[:window], name), over(by_step[-window:], name)) for name in names]


def check_summary(checked: Sequence[tuple[int, Check]]) -> dict[str, Any]:
    """How many of the ledgers' sums hold, and the lines of those that do not."""
    broken = [f"step {step}: {check.name}: {check.line()}" for step, check in checked if not check.holds]
    return {"total": len(checked), "broken": broken}


def duration(seconds: float) -> str:
    """Seconds for a person: 42 s, 7 min 05 s, 3 h 20 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.0f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
