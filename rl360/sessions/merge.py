"""One session to training samples, with every sampled token accounted for.

`snapshot` is cheap (turns never change); `merge` then checks and joins, anywhere, one sample a kept leaf:
- full prefix check: from the root on, each turn's digests must follow from its parent's digest and the ids it holds: of
  what was *sent*, and of that plus what was sampled; ids that changed after they were sent refuse the merge;
- mask 1 exactly on sampled ids, and each completion under the mask of one leaf only, the first that holds it;
- rows of routed experts stay the pieces they came in; they are joined when they are written;
- what no kept leaf holds is counted (`prefix_break`), as is what was sampled and not recorded, in the bucket of its
  reason: sampled = under a mask + counted, or the merge is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from rl360.errors import CorruptObject
from rl360.ledger.outcomes import DROPPED, Bucket
from rl360.sessions.core import Session
from rl360.sessions.history import path
from rl360.sessions.refusals import Refusal, SessionRefusal
from rl360.sessions.routing import rows_written
from rl360.sessions.sample import MergedSample
from rl360.sessions.turns import SessionMode, SessionSpec, Turn, chain_digest

MAX_SAMPLES_BYTES = 2 << 30  # half of what an object can hold; who reads it has it in memory whole
_ROW_BYTES = 4 + 4 + 1 + 1  # id, log-probability, mask, which forward


MAX_LEAVES = 16  # kept of one session: how often an agent tries again must not decide how large its reference gets


class Pick(StrEnum):
    """Which leaves of a tree become samples. A linear session has one: the path of its last turn."""

    LAST = "last"  # the path of the latest turn
    ROOTS = "roots"  # of each root the latest leaf
    ALL = "all"


@dataclass(frozen=True)
class SessionSnapshot:
    """A session at one epoch, detached from it."""

    session_id: str
    spec: SessionSpec
    turns: tuple[Turn, ...]
    sampled_tokens: int
    dropped: dict[str, int]


def snapshot(session: Session) -> SessionSnapshot:
    """What merging needs; copies no array."""
    return SessionSnapshot(
        session_id=session.session_id,
        spec=session.spec,
        turns=tuple(session.turns),
        sampled_tokens=session.sampled_tokens,
        dropped=dict(session.dropped),
    )


def merge(held: SessionSnapshot, pick: Pick = Pick.LAST) -> tuple[MergedSample, ...]:
    """The samples of a session, at least one; `SessionRefusal(cannot_merge)` names what does not hold and carries what
    the session sampled."""
    try:
        return _merge(held, pick)
    except SessionRefusal as refusal:
        refusal.sampled = held.sampled_tokens
        raise


def _merge(held: SessionSnapshot, pick: Pick) -> tuple[MergedSample, ...]:
    if not held.turns:
        raise SessionRefusal(Refusal.CANNOT_MERGE, f"session {held.session_id} has no recorded turn")
    pick = Pick.LAST if held.spec.mode is SessionMode.LINEAR else pick
    paths = [path(held.turns, leaf) for leaf in _leaves(held.turns, pick)]
    size = sum(_ROW_BYTES * line[-1].end + sum(turn.routing_bytes for turn in line) for line in paths)
    if size > MAX_SAMPLES_BYTES:
        problem = f"{len(paths)} kept leaves are {size} bytes of samples, at most {MAX_SAMPLES_BYTES} are written"
        raise SessionRefusal(Refusal.CANNOT_MERGE, f"session {held.session_id}: {problem}; pick fewer")
    kept: set[int] = set()
    owned = []
    for line in paths:
        owned.append([turn for turn in line if turn.index not in kept])
        _check_prefix(held, line, kept)
        kept.update(turn.index for turn in line)
    left = [turn for turn in held.turns if turn.index not in kept]
    samples = [
        _sample(held, number, line, mine, left if number == 0 else [])
        for number, (line, mine) in enumerate(zip(paths, owned, strict=True))
    ]
    total = sum(sample.sampled_tokens for sample in samples)
    if total != held.sampled_tokens:
        problem = f"its samples account for {total} tokens of the {held.sampled_tokens} sampled"
        raise SessionRefusal(Refusal.CANNOT_MERGE, f"session {held.session_id}: {problem}")
    try:
        return tuple(sample.check(f"session {held.session_id} leaf {sample.leaf}") for sample in samples)
    except CorruptObject as error:
        raise SessionRefusal(Refusal.CANNOT_MERGE, str(error)) from None


def _leaves(turns: tuple[Turn, ...], pick: Pick) -> list[Turn]:
    """The kept leaves in the order they were recorded, of more than `MAX_LEAVES` the latest."""
    if pick is Pick.LAST:
        return [turns[-1]]
    parents = {turn.parent for turn in turns}
    leaves = [turn for turn in turns if turn.index not in parents]
    if pick is Pick.ALL:
        return leaves[-MAX_LEAVES:]
    root_of: dict[int, int] = {}
    for turn in turns:  # parents come before their children
        root_of[turn.index] = turn.index if turn.parent is None else root_of[turn.parent]
    latest = {root_of[leaf.index]: leaf.index for leaf in leaves}
    return [leaf for leaf in leaves if latest[root_of[leaf.index]] == leaf.index][-MAX_LEAVES:]


def _sample(held: SessionSnapshot, number: int, line: list[Turn], owned: list[Turn], left: list[Turn]) -> MergedSample:
    """The sample of one path; `owned` of its turns train here, `left` are the turns in no sample, counted here."""
    length = line[-1].end
    tokens = np.concatenate([turn.ids for turn in line])
    mask = np.zeros(length, dtype=np.uint8)
    logprobs = np.zeros(length, dtype=np.float32)
    for turn in owned:
        mask[turn.prompt_end : turn.end] = 1
        logprobs[turn.prompt_end : turn.end] = turn.logprobs
    pieces = tuple(turn.routing for turn in line if turn.routing is not None)
    taken = Counter(held.dropped if number == 0 else {})
    taken[Bucket.PREFIX_BREAK] += sum(turn.sampled for turn in left)
    dropped = {str(bucket): taken[bucket] for bucket in DROPPED if taken[bucket]}
    counted = [*owned, *left]
    return MergedSample(
        attempt_id=held.spec.attempt_id,
        group_id=held.spec.group_id,
        task_id=held.spec.task_id,
        session_id=held.session_id,
        leaf=number,
        tokens=tokens,
        loss_mask=mask,
        logprobs=logprobs,
        version_spans=[span for turn in owned for span in turn.spans],
        routing_pieces=pieces,
        row_forward=_row_forward(line) if pieces else None,
        sampled_tokens=sum(turn.sampled for turn in owned) + sum(dropped.values()),
        dropped=dropped,
        truncated=line[-1].cut,
        turns=len(line),
        # of both, turns of which the engine said what it found cached: their ratio is a hit rate
        cached_tokens=sum(turn.cached_tokens or 0 for turn in counted),
        prompt_tokens=sum(turn.prompt_end for turn in counted if turn.cached_tokens is not None),
        reprefilled_rows=sum(turn.reprefilled_rows for turn in counted),
        sampling_differs=sum(turn.sampling_differs for turn in owned),
        canonical=dict(Counter(str(turn.canonical) for turn in counted)),
        matches=dict(Counter(str(match) for turn in counted for match in turn.loose)),
    )


def _row_forward(line: Sequence[Turn]) -> np.ndarray:
    return np.concatenate(
        [rows_written(turn.routing_from, turn.prompt_end, turn.end, turn.spans, turn.retractions) for turn in line]
    )


def _check_prefix(held: SessionSnapshot, line: list[Turn], checked: set[int]) -> None:
    """Turns tile the context, nothing follows a cut, and every digest follows from the ids; `checked` turns did."""
    before: Turn | None = None
    for turn in line:
        if turn.index not in checked:
            start = 0 if before is None else before.end
            ids = turn.ids
            sent = turn.prompt_end - turn.start
            if turn.start != start or not start <= turn.prompt_end < turn.end or len(ids) != turn.end - start:
                raise _broken(held, turn, f"holds {len(ids)} ids for [{turn.start}, {turn.end}) after {start}")
            if before is not None and before.cut:
                raise _broken(held, turn, f"follows turn {before.index + 1}, which was cut by length")
            if chain_digest(b"" if before is None else before.end_digest, ids[:sent]) != turn.prompt_digest:
                raise _broken(held, turn, f"the first {turn.prompt_end} ids are not the ids it sent")
            if chain_digest(turn.prompt_digest, ids[sent:]) != turn.end_digest:
                raise _broken(held, turn, f"ids [{turn.prompt_end}, {turn.end}) are not the ids it sampled")
        before = turn


def _broken(held: SessionSnapshot, turn: Turn, problem: str) -> SessionRefusal:
    return SessionRefusal(Refusal.CANNOT_MERGE, f"session {held.session_id} turn {turn.index + 1}: {problem}")
