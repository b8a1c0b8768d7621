"""Does a request continue what a session holds? Matchers compare one message, `locate` a whole history.

A matcher says how a message a client sent matches the stored one, or that it does not (None). Whatever the matcher, the
stored spelling stays: a looser match decides that a turn is continued, never what was sent or sampled. Matchers try the
stricter comparisons first and report the tightest that holds.
"""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rl360.sessions.messages import Message
from rl360.sessions.refusals import Refusal, SessionRefusal

if TYPE_CHECKING:
    from rl360.sessions.turns import Turn


class Match(StrEnum):
    """How a sent message matches a stored one, tightest first."""

    EXACT = "exact"
    TOOL_CALL_JSON = "tool_call_json"
    ROLE_CONTENT = "role_content"
    CUSTOM = "custom"


Matcher = Callable[[Message, Message], "Match | None"]  # (stored, sent)


def _same_text(stored: Message, sent: Message) -> bool:
    """Role, content, and reasoning where the client states any (most clients do not echo it)."""
    return (stored.role, stored.content) == (sent.role, sent.content) and (
        sent.reasoning is None or sent.reasoning == stored.reasoning
    )


def strict(stored: Message, sent: Message) -> Match | None:
    """The same message: null content is empty content, tool arguments are the same JSON values of the same types."""
    same = (
        _same_text(stored, sent) and stored.tool_calls == sent.tool_calls and stored.tool_call_id == sent.tool_call_id
    )
    return Match.EXACT if same else None


def loose_tool_calls(stored: Message, sent: Message) -> Match | None:
    """Call ids may differ; names and arguments (any key order, types kept: 1, 1.0, true and "1" differ) may not."""
    if strict(stored, sent):
        return Match.EXACT
    if not _same_text(stored, sent) or len(stored.tool_calls) != len(sent.tool_calls):
        return None
    same = all(
        (a.name, a.arguments_key) == (b.name, b.arguments_key)
        for a, b in zip(stored.tool_calls, sent.tool_calls, strict=True)
    )
    return Match.TOOL_CALL_JSON if same else None


def role_content(stored: Message, sent: Message) -> Match | None:
    """Role and content decide; tool calls and reasoning may differ."""
    tighter = loose_tool_calls(stored, sent)
    if tighter:
        return tighter
    return Match.ROLE_CONTENT if (stored.role, stored.content) == (sent.role, sent.content) else None


MATCHERS: dict[str, Matcher] = {each.__name__: each for each in (strict, loose_tool_calls, role_content)}


def custom_matcher(name: str, function: Callable[[Message, Message], Any]) -> Matcher:
    """Of a function that takes (stored, sent) and answers whether they match; when it raises, that is `bad_matcher`."""

    def custom(stored: Message, sent: Message) -> Match | None:
        if strict(stored, sent):
            return Match.EXACT
        try:
            return Match.CUSTOM if function(stored, sent) else None
        except Exception as error:  # its text may hold what was said: only its type and its place are told
            at = traceback.extract_tb(error.__traceback__)[-1]
            problem = f"matcher {name} of this server raised {type(error).__name__} ({at.filename}:{at.lineno})"
            raise SessionRefusal(Refusal.BAD_MATCHER, problem) from None

    return custom


@dataclass(frozen=True)
class Place:
    """Where a request stands in a session: it adds to the whole history of `base`, or it `repeats` the request of that
    turn word for word, or neither. `loose` are the matches that were not exact."""

    base: Turn | None = None
    repeats: Turn | None = None
    loose: tuple[Match, ...] = ()


def path(turns: Sequence[Turn], last: Turn | None) -> list[Turn]:
    """The turns from a root to `last`."""
    found = []
    while last is not None:
        found.append(last)
        last = None if last.parent is None else turns[last.parent]
    return found[::-1]


def history(turns: Iterable[Turn]) -> list[Message]:
    """The messages of a path, replies included."""
    messages: list[Message] = []
    for turn in turns:
        messages += turn.new_messages
        messages.append(turn.reply)
    return messages


def locate(
    roots: Iterable[Turn], children: Callable[[Turn], Iterable[Turn]], messages: Sequence[Message], matcher: Matcher
) -> Place:
    """The deepest place in a tree of turns that `messages` continue or repeat; among equals one that was not cut, then
    the latest."""
    best, best_rank = Place(), (0, False, -1)
    waiting: list[tuple[Turn, tuple[Match, ...]]] = [(turn, ()) for turn in roots]
    while waiting:
        turn, loose = waiting.pop()
        start = turn.request_end - len(turn.new_messages)
        found = _align(turn.new_messages, messages[start : turn.request_end], matcher)
        if found is None:
            continue
        loose += found
        if turn.request_end == len(messages):
            rank = (turn.request_end, True, turn.index)
            if rank > best_rank:
                best, best_rank = Place(None, turn, loose), rank
        elif turn.request_end < len(messages):
            found = _align((turn.reply,), messages[turn.request_end : turn.request_end + 1], matcher)
            if found is None:
                continue
            loose += found
            rank = (turn.request_end + 1, not turn.cut, turn.index)
            if rank > best_rank:
                best, best_rank = Place(turn, None, loose), rank
            waiting += [(child, loose) for child in children(turn)]
    return best


def _align(stored: Sequence[Message], sent: Sequence[Message], matcher: Matcher) -> tuple[Match, ...] | None:
    """The matches that are not exact; None when one message does not match."""
    if len(stored) != len(sent):
        return None
    if all(map(operator.is_, stored, sent)):  # a client repeats the bytes it sent before: the very same objects
        return ()
    loose = []
    for held, got in zip(stored, sent, strict=True):
        found = Match.EXACT if held is got else matcher(held, got)
        if found is None:
            return None
        if found is not Match.EXACT:
            loose.append(found)
    return tuple(loose)


def difference(stored: Sequence[Message], sent: Sequence[Message], matcher: Matcher) -> str | None:
    """The first message in which `sent` is not what is stored, in words; None when one merely ends before the other."""
    for index, (held, got) in enumerate(zip(stored, sent, strict=False)):
        if held is got or matcher(held, got):
            continue
        fields = ("role", "content", "tool_calls", "tool_call_id", "reasoning")
        field = next((name for name in fields if getattr(got, name) != getattr(held, name)), "meaning")
        return f"messages[{index}].{field} ({got.role}) differs from what this session holds ({held.role})"
    return None
