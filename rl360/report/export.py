"""A run's ledgers as tables that DuckDB reads: JSON lines, and the views that give their columns types.

`attempts.jsonl` a row an attempt (every try), `tokens.jsonl` a row an attempt and bucket, `steps.jsonl` a row a step,
`phases.jsonl` a row a step and task. docs/ledger.md names the columns. Written beside each other and moved into place
together at the end, so a reader sees no half table.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import orjson

from rl360.errors import BadInput
from rl360.ledger.metrics import group_fates, step_json
from rl360.ledger.outcomes import Bucket
from rl360.ledger.step import FORWARD_COUNTS
from rl360.report.waste import class_of, token_class

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rl360.ledger.step import AttemptRow, StepLedger

TEXT, COUNT, NUMBER, YES_NO = "VARCHAR", "BIGINT", "DOUBLE", "BOOLEAN"
SANDBOX_PHASES = ("queue", "setup", "agent", "verify", "judge", "teardown")
PLACE = {"run": TEXT, "step": COUNT}
ATTEMPT = {"attempt_id": TEXT, "group_id": TEXT, "task_id": TEXT, "domain": TEXT}
COLUMNS: dict[str, dict[str, str]] = {
    "attempts": {
        **PLACE,
        **ATTEMPT,
        "slot_id": TEXT,
        "try_index": COUNT,
        "group_fate": TEXT,
        "outcome": TEXT,
        "exit_status": TEXT,
        "bucket": TEXT,
        "class": TEXT,
        "reward": NUMBER,
        "score": NUMBER,
        "advantage": NUMBER,
        "sampled_tokens": COUNT,
        "trained_tokens": COUNT,
        "samples": COUNT,
        "trained_samples": COUNT,
        "prompt_tokens": COUNT,
        "observation_tokens": COUNT,
        "agent_tokens": COUNT,
        **{f"engine_{name}": COUNT for name in FORWARD_COUNTS},
        "token_weight": NUMBER,
        "loss_weight": NUMBER,
        "truncated": YES_NO,
        "turns": COUNT,
        "versions": "VARCHAR[]",
        "seconds": NUMBER,
        **{f"{phase}_s": NUMBER for phase in SANDBOX_PHASES},
    },
    "tokens": {**PLACE, **ATTEMPT, "outcome": TEXT, "bucket": TEXT, "class": TEXT, "sampled": YES_NO, "tokens": COUNT},
    "steps": {
        **PLACE,
        "status": TEXT,
        "attempts": COUNT,
        "groups": COUNT,
        "groups_trained": COUNT,
        "groups_all_pass": COUNT,
        "groups_all_fail": COUNT,
        "reward": NUMBER,
        "reward_kept": NUMBER,
        "infra_rate": NUMBER,
        "truncation_share": NUMBER,
        "sampled_tokens": COUNT,
        "trained_tokens": COUNT,
        "trained_samples": COUNT,
        "loss": NUMBER,
        "loss_weight_sum": NUMBER,
        "grad_norm": NUMBER,
        "entropy": NUMBER,
        "kl_mean": NUMBER,
        "mean_abs_dlogp": NUMBER,
        "tis_mean": NUMBER,
        "clip_fraction": NUMBER,
        "masked_fraction": NUMBER,
        "staleness_mean": NUMBER,
        "staleness_max": COUNT,
        "version_before": COUNT,
        "version_after": COUNT,
        "push_paused_s": NUMBER,
        "push_bytes": COUNT,
        "seconds": NUMBER,
        "metrics": "JSON",
    },
    "phases": {**PLACE, "task": TEXT, "seconds": NUMBER},
}
VIEWS = "views.sql"


def export(ledgers: Iterable[StepLedger], out_dir: Path) -> dict[str, int]:
    """Write the tables and `views.sql` into `out_dir` (made when missing), replacing an earlier export. Takes the
    ledgers one at a time; returns rows by table."""
    rows = dict.fromkeys(COLUMNS, 0)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        parts = {name: out_dir / f".{name}.jsonl.part" for name in COLUMNS}
        with ExitStack() as open_files:
            files: dict[str, BinaryIO] = {
                name: open_files.enter_context(path.open("wb")) for name, path in parts.items()
            }
            for ledger in ledgers:
                for name, row in table_rows(ledger):
                    files[name].write(orjson.dumps(row) + b"\n")
                    rows[name] += 1
        (out_dir / VIEWS).write_text(views(), encoding="utf-8")
        for name, path in parts.items():
            os.replace(path, out_dir / f"{name}.jsonl")
    except OSError as error:
        raise BadInput(f"cannot write the export to {out_dir} ({error.strerror}); give another folder") from None
    return rows


def views() -> str:
    """SQL that gives the tables names and their columns types; it is read from the folder of the export."""
    made = []
    for name, columns in COLUMNS.items():
        types = ", ".join(f"'{column}': '{kind}'" for column, kind in columns.items())
        made.append(
            f"CREATE OR REPLACE VIEW {name} AS SELECT * FROM\n"
            f"  read_json('{name}.jsonl', format = 'newline_delimited', columns = {{{types}}});\n"
        )
    return "".join(made)


def table_rows(ledger: StepLedger) -> Iterator[tuple[str, dict[str, Any]]]:
    """(table, row) of everything in one ledger; the keys of a row are the table's columns."""
    place = {"run": ledger.run, "step": ledger.step}
    fates = group_fates(ledger)
    for row in ledger.attempts:
        yield "attempts", {**place, **_attempt(row), "group_fate": fates[row.group_id]}
        who = {name: getattr(row, name) for name in ATTEMPT} | {"outcome": row.outcome}
        for bucket, count in row.tokens.items():
            named = {"bucket": bucket, "class": token_class(row, bucket), "sampled": True, "tokens": count}
            yield "tokens", {**place, **who, **named}
        for bucket, count in row.context.items():
            yield "tokens", {**place, **who, "bucket": bucket, "class": "context", "sampled": False, "tokens": count}
    step = step_json(ledger)
    yield "steps", {**place, **_step(step), "metrics": step}
    for task, seconds in ledger.phases_s.items():
        yield "phases", {**place, "task": task, "seconds": seconds}


def _attempt(row: AttemptRow) -> dict[str, Any]:
    plain = (*ATTEMPT, "try_index", "outcome", "exit_status", "bucket", "reward", "score", "advantage")
    plain += ("sampled_tokens", "trained_samples", "agent_tokens", "token_weight", "loss_weight", "truncated", "turns")
    return {
        **{name: getattr(row, name) for name in (*plain, "versions", "seconds")},
        "slot_id": row.attempt_id.rpartition("-t")[0],
        "class": class_of(row),
        "trained_tokens": row.tokens.get(Bucket.TRAINED, 0),
        "samples": len(row.leaves),
        "prompt_tokens": row.context.get(Bucket.PROMPT, 0),
        "observation_tokens": row.context.get(Bucket.OBSERVATION, 0),
        **{f"engine_{name}": row.forwards.get(name, 0) for name in FORWARD_COUNTS},
        **{f"{phase}_s": row.phases_s.get(phase, 0.0) for phase in SANDBOX_PHASES},
    }


def _step(step: dict[str, Any]) -> dict[str, Any]:
    groups, reward, push = step["groups"], step["reward"], step["push"] or {}
    same = [name for name in COLUMNS["steps"] if name in step and name != "groups"]
    return {
        **{name: step[name] for name in same},
        "groups": groups["total"],
        **{f"groups_{fate}": groups[fate] for fate in ("trained", "all_pass", "all_fail")},
        "reward": reward["unfiltered_mean_valid"],
        "reward_kept": reward["kept_mean"],
        "infra_rate": reward["infra_rate"],
        **{f"staleness_{name}": value for name, value in step["staleness"].items()},
        "push_paused_s": push.get("paused_s"),
        "push_bytes": push.get("bytes"),
        "seconds": sum(step["phases_s"].values()),
    }
