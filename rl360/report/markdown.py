"""The markdown of one step, shown as a Prefect artifact: outcomes, losses, reward, tokens, phases, push, pictures."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl360.ledger import metrics
from rl360.report.numbers import fixed, percent, short

if TYPE_CHECKING:
    from rl360.ledger.step import StepLedger

# Prefect keeps artifacts in its database and sends them whole to the browser: pictures stay small.
PICTURE_BUDGET_BYTES = 300 * 1024
ARTIFACT_DPI = 80


def step_markdown(
    ledger: StepLedger,
    figures: Mapping[str, bytes],
    quarantined: Mapping[str, Mapping[str, Any]] | None = None,
    warnings: Sequence[str] = (),
) -> str:
    """Markdown of one step. `figures`: PNG bytes by name (`run_figures(steps, dpi=ARTIFACT_DPI)`); `quarantined`: the
    run's tasks that are not tried any more (rl360.agents.budgets); `warnings` stand above all else.

    Pictures are inlined as base64 in the order given while they fit into 300 KB together; one that does not is named.
    """
    step = metrics.step_json(ledger)
    return "\n\n".join(
        part
        for part in (
            f"# {ledger.run}, step {ledger.step}",
            *(f"**Warning**: {warning}" for warning in warnings),
            _reward(step),
            _attempts(step),
            _losses(step["losses_by_cause"]),
            _quarantined(ledger.run, quarantined or {}),
            _tokens(step),
            _training(ledger, step),
            _phases(step["phases_s"]),
            _pictures(figures),
        )
        if part
    )


def _reward(step: Mapping[str, Any]) -> str:
    reward = step["reward"]
    rows = [
        ("all verified attempts", fixed(reward["unfiltered_mean_valid"], 3)),
        ("kept (trained) attempts", fixed(reward["kept_mean"], 3)),
        *((f"pass@{k} ({found['groups']} groups)", fixed(found["mean"], 3)) for k, found in step["pass_at_k"].items()),
        ("infra rate (no reward, not in the means)", percent(reward["infra_rate"])),
        *_scored(reward),
        *((f"domain {_cell(name)}", fixed(value, 3)) for name, value in reward["by_domain"].items()),
    ]
    return "## Reward\n" + _table(("mean over", "value"), rows)


def _scored(reward: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Where what was trained on is not what the verifier wrote."""
    if not (reward["penalised"] or reward["timeouts_scored"]):
        return []
    return [
        ("kept attempts, as scored", fixed(reward["kept_mean_score"], 3)),
        ("passes penalised for format errors", f"{reward['penalised']:,}"),
        ("timeouts scored 0 without a verdict", f"{reward['timeouts_scored']:,}"),
    ]


def _attempts(step: Mapping[str, Any]) -> str:
    groups = {name: count for name, count in step["groups"].items() if count and name != "total"}
    fates = ", ".join(f"{count} {_words(name)}" for name, count in groups.items())
    table = _table(("outcome", "attempts"), [(_words(name), f"{count:,}") for name, count in step["outcomes"].items()])
    agreed = step["zero_disagreement"]
    head = f"{step['attempts']:,} attempts in {step['groups']['total']:,} groups: {fates or 'none'}."
    if agreed["share"] is not None:
        where = ", ".join(f"{percent(agreed[name])} {_words(name)}" for name in metrics.AGREED)
        head += f" Of the groups that could disagree {percent(agreed['share'])} did not ({where})."
    return f"## Attempts\n{head}\n\n{table}"


def _losses(causes: Sequence[Mapping[str, Any]]) -> str:
    if not causes:
        return ""
    rows = [
        (_words(cause["cause"]), f"{cause['attempts']:,}", f"{cause['seconds']:.1f}", f"{cause['sampled_tokens']:,}")
        for cause in causes
    ]
    return "## Losses by cause\n" + _table(("cause", "attempts", "seconds", "tokens"), rows)


def _quarantined(run: str, tasks: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        (_cell(task), str(said["step"]), str(said["starts"]), _cell(str(said["detail"])[:200]))
        for task, said in sorted(tasks.items())
    ]
    if not rows:
        return ""
    table = _table(("task", "since step", "failed starts", "last one"), rows)
    why = f"Their sandboxes do not start. `rl360 tasks release {run} TASK` tries one again."
    return f"## Tasks in quarantine\n{why}\n\n{table}"


def _tokens(step: Mapping[str, Any]) -> str:
    sampled = step["sampled_tokens"]
    rows = [(_words(name), f"{count:,}", percent(count / sampled)) for name, count in step["tokens"].items()]
    return f"## Sampled tokens\n{sampled:,} sampled.\n\n" + _table(("bucket", "tokens", "share"), rows)


def _training(ledger: StepLedger, step: Mapping[str, Any]) -> str:
    train, push = ledger.train, step["push"]
    if train.status == "empty":
        trained = "Nothing to train: no optimizer step was taken and the weights are unchanged."
    elif train.status != "trained":
        trained = (
            f"The trainer refused the batch ({_words(train.status)}): no optimizer step, the weights are unchanged."
        )
    else:
        trained = (
            f"{train.trained_samples:,} samples, {train.trained_tokens:,} tokens, loss weights sum to "
            f"{train.loss_weight_sum:.6f}; loss {fixed(train.loss, 4)}, gradient norm {fixed(train.grad_norm, 3)}, "
            f"entropy {fixed(train.entropy, 3)}. Over trained tokens: clipped {percent(train.clip_fraction)}, without "
            f"weight {percent(train.masked_fraction)}, importance weight {fixed(train.tis_mean, 3)}, "
            f"|dlogp| {short(train.mean_abs_dlogp)}, staleness {fixed(step['staleness']['mean'], 2)} "
            f"(at most {short(step['staleness']['max'])})."
        )
    pushed = "No push."
    if push is not None:
        pushed = (
            f"Pushed version {train.version_after} by {_cell(push['path'])} to {push['engines']} engines: "
            f"{push['calls_per_engine']:g} calls per engine, {push['bytes']:,} bytes, paused {push['paused_s']:.2f} s."
        )
    return f"## Training and push\n{trained}\n\n{pushed}"


def _phases(phases_s: Mapping[str, float]) -> str:
    total = sum(phases_s.values())
    rows = [
        (_words(name), f"{value:.2f}", percent(value / total if total else None)) for name, value in phases_s.items()
    ]
    return f"## Phases\n{total:.1f} s in all.\n\n" + _table(("phase", "seconds", "share"), rows)


def _pictures(figures: Mapping[str, bytes]) -> str:
    shown, left_out, used = [], [], 0
    for name, data in figures.items():
        encoded = base64.b64encode(data).decode()
        if used + len(encoded) > PICTURE_BUDGET_BYTES:
            left_out.append(name)
            continue
        used += len(encoded)
        shown.append(f"![{name}](data:image/png;base64,{encoded})")
    if left_out:
        shown.append(f"Left out for size (see the run's report): {', '.join(left_out)}.")
    return "## Run so far\n" + "\n\n".join(shown) if shown else ""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _words(name: str) -> str:
    return name.replace("_", " ")


def _cell(text: str) -> str:
    """Text of foreign origin inside a table: a pipe or a newline would break it, markup would render."""
    return "".join(f"\\{char}" if char in "|\\`*_[]<>" else char for char in " ".join(text.split()))
