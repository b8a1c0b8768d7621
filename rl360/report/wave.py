"""What the log says of a wave that ended: outcomes in words, and what infrastructure cost it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from typing import Any

from rl360.harbor.outcome import boundary_of
from rl360.ledger.outcomes import INFRA
from rl360.sessions.sample import AttemptRecord

_TOP = 3
Log = logging.Logger | logging.LoggerAdapter[Any]


def tell(log: Log, wave: str, seconds: float, records: Collection[AttemptRecord], run: str, step: int) -> None:
    """One line of what it became, and a warning of what was lost."""
    log.info("%s ended after %.1f s: %s", wave, seconds, in_words(records))
    if lost := losses(records, run, step):
        log.warning("%s: %s", wave, lost)


def in_words(records: Collection[AttemptRecord]) -> str:
    """`3 attempts in 4 tries: 2 passed, 1 failed, 1 sandbox lost`."""
    slots = {_slot(record) for record in records}
    tries = f" in {len(records)} tries" if len(records) > len(slots) else ""
    outcomes = Counter(record.outcome for record in records).most_common()
    said = ", ".join(f"{count} {outcome.replace('_', ' ')}" for outcome, count in outcomes)
    return f"{len(slots)} attempts{tries}: {said or 'nothing'}"


def losses(records: Collection[AttemptRecord], run: str, step: int) -> str:
    """One line on what was lost: share, cause, what became of it, where to look. Empty when nothing was."""
    lost = [record for record in records if record.outcome in INFRA]
    if not lost:
        return ""
    said = {record.outcome: record.detail for record in lost}
    causes = [
        f"{count} {outcome.replace('_', ' ')} ({boundary_of(outcome)}: {said[outcome][:120] or 'no detail'})"
        for outcome, count in Counter(record.outcome for record in lost).most_common(_TOP)
    ]
    newest: dict[str, int] = {}
    for record in records:
        newest[_slot(record)] = max(record.try_index, newest.get(_slot(record), 0))
    again = sum(record.try_index < newest[_slot(record)] for record in lost)
    return (
        f"{len(lost)} of {len(records)} tries ({len(lost) / len(records):.0%}) were lost to infrastructure: "
        f"{'; '.join(causes)}. {again} of them were tried again, {len(lost) - again} stay lost (the limits are "
        "rollout.infra_retries and rollout.group_retries); they change no gradient. Look: `rl360 status`, "
        f"`rl360 ledger {run} --attempt {lost[-1].attempt_id}`, after the step `rl360 ledger {run} --why infra --step "
        f"{step}`"
    )


def _slot(record: AttemptRecord) -> str:
    return record.attempt_id.rpartition("-t")[0]
