"""One session to one training sample, with every sampled token accounted for.

`snapshot` copies what is needed (cheap, on the owner's event loop); `merge` then checks and cuts, anywhere:
- full prefix check: one running digest over the merged ids must meet every turn's digest of the ids it *sent*, and of
  those plus what it sampled; a held id that changed after it was sent refuses the merge;
- mask 1 exactly on sampled ids, log-probs 0 elsewhere, version spans over the sampled ids;
- a turn cut by length stays; sampled ids after it are dropped and counted (`after_truncation`);
- sampled = mask sum + dropped, or the merge is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rl360.errors import CorruptObject
from rl360.sessions.core import Session, SessionSpec, Turn, digest_ids
from rl360.sessions.refusals import Refusal, SessionRefusal
from rl360.sessions.sample import MergedSample


@dataclass(frozen=True)
class SessionSnapshot:
    """A session at one epoch, detached from it. Arrays are `[tokens]`."""

    session_id: str
    spec: SessionSpec
    tokens: np.ndarray
    logprobs: np.ndarray
    mask: np.ndarray
    turns: tuple[Turn, ...]
    sampled_tokens: int
    prefix_break_tokens: int
    cached_tokens: int
    prompt_tokens: int


def snapshot(session: Session) -> SessionSnapshot:
    """Copy a session's arrays and records."""
    return SessionSnapshot(
        session_id=session.session_id,
        spec=session.spec,
        tokens=session.tokens.view.copy(),
        logprobs=session.logprobs.view.copy(),
        mask=session.mask.view.copy(),
        turns=tuple(session.turns),
        # a turn that lost its race was sampled too: its ids broke with the history that was recorded
        sampled_tokens=session.sampled_tokens + session.lost_race_tokens,
        prefix_break_tokens=session.prefix_break_tokens + session.lost_race_tokens,
        cached_tokens=session.cached_tokens,
        prompt_tokens=session.prompt_tokens,
    )


def merge(state: Session | SessionSnapshot) -> MergedSample:
    """The sample of a session; `SessionRefusal(cannot_merge)` names what does not hold."""
    held = snapshot(state) if isinstance(state, Session) else state
    if not held.turns:
        raise SessionRefusal(Refusal.CANNOT_MERGE, f"session {held.session_id} has no recorded turn")
    _check_prefixes(held)
    first_cut = next((i for i, turn in enumerate(held.turns) if turn.cut), len(held.turns) - 1)
    kept = held.turns[: first_cut + 1]
    end = kept[-1].end
    sample = MergedSample(
        attempt_id=held.spec.attempt_id,
        group_id=held.spec.group_id,
        task_id=held.spec.task_id,
        session_id=held.session_id,
        tokens=held.tokens[:end],
        loss_mask=held.mask[:end],
        logprobs=held.logprobs[:end],
        version_spans=[span for turn in kept for span in turn.spans],
        sampled_tokens=held.sampled_tokens,
        after_truncation_tokens=sum(turn.sampled for turn in held.turns[first_cut + 1 :]),
        prefix_break_tokens=held.prefix_break_tokens,
        truncated=kept[-1].cut,
        turns=len(kept),
        cached_tokens=held.cached_tokens,
        prompt_tokens=held.prompt_tokens,
    )
    try:
        return sample.check(f"session {held.session_id}")
    except CorruptObject as error:
        raise SessionRefusal(Refusal.CANNOT_MERGE, str(error)) from None


def _check_prefixes(held: SessionSnapshot) -> None:
    """Turns tile the ids, every digest is met, and the mask is 1 exactly inside the turns."""
    hasher = digest_ids(held.tokens[:0])
    mask = np.zeros_like(held.mask)
    edge = 0
    for number, turn in enumerate(held.turns, start=1):
        if not edge <= turn.prompt_end < turn.end <= len(held.tokens):
            raise _broken(
                held, number, f"covers ids [{turn.prompt_end}, {turn.end}) of {len(held.tokens)} after {edge}"
            )
        digest_ids(held.tokens[edge : turn.prompt_end], hasher)
        if hasher.digest() != turn.prompt_digest:
            raise _broken(held, number, f"the first {turn.prompt_end} ids are not the ids it sent")
        digest_ids(held.tokens[turn.prompt_end : turn.end], hasher)
        if hasher.digest() != turn.end_digest:
            raise _broken(held, number, f"ids [{turn.prompt_end}, {turn.end}) are not the ids it sampled")
        mask[turn.prompt_end : turn.end] = 1
        edge = turn.end
    if edge != len(held.tokens) or not np.array_equal(mask, held.mask):
        raise _broken(held, len(held.turns), "the loss mask is not 1 exactly on the sampled ids")


def _broken(held: SessionSnapshot, number: int, problem: str) -> SessionRefusal:
    return SessionRefusal(Refusal.CANNOT_MERGE, f"session {held.session_id} turn {number}: {problem}")
