"""One session without HTTP: what was sent, what was sampled, and what may come next.

A session is a tree of turns held as ids. A turn is one completion: the ids its request added to its parent's context,
then the ids that were sampled. It never changes, and a context is one concatenation of the turns on a path, so the
engine always sees the very ids it sampled. The life of one turn:

    read(raw messages, tools) -> Request      parses only what the last recorded request did not hold
    plan(request, asked) -> Plan              finds what it continues, changes nothing
    assemble(plan, delta_ids) -> PreparedTurn the ids to send; checks length and byte budget, changes nothing
    commit(prepared, completion) -> Turn      validates everything, then records

*Tree* sessions are append-only: a request extends any turn, repeats any request (a sibling) or starts a new root.
*Linear* ones are trees with one constraint: a request extends the last turn, repeats its request, or goes one turn back
and says something else; a turn left behind that way is no longer continued, its sampled tokens are `prefix_break`.
Every commit raises the epoch, and of two linear requests prepared on one epoch exactly one is recorded. Nothing
continues a turn that was cut by length.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from rl360.errors import BadInput
from rl360.ledger.outcomes import Bucket
from rl360.sessions.families.base import ChatTemplate
from rl360.sessions.history import MATCHERS, Match, Matcher, Place, difference, history, locate, path
from rl360.sessions.messages import Message, Tool, check_sequence, openai_message, parse_tools
from rl360.sessions.refusals import BUCKETS, Refusal, SessionRefusal
from rl360.sessions.routing import RoutingShape, check_rows
from rl360.sessions.turns import (
    TURN_BYTES,
    Canonical,
    Completion,
    Parse,
    Plan,
    PreparedTurn,
    Request,
    Sampling,
    SamplingPolicy,
    SessionMode,
    SessionSpec,
    Turn,
    chain_digest,
)

_SESSION_BYTES = 4096
_TOKEN_BYTES = 4 + 4  # id and log-probability
_POSITIVE_LOGPROB = 1e-3  # rounding above 0 that a correct engine may show for a certain token
_REMEMBERED = 8  # recorded requests of a tree session whose messages are recognised by their bytes; of a linear one 1
_NAMES_KEPT = 32


class Session:
    """State of one session. Not thread-safe: one event loop owns it (`read` and `render` may run in a thread)."""

    def __init__(
        self,
        session_id: str,
        spec: SessionSpec,
        template: ChatTemplate,
        budget_bytes: int,
        *,
        matcher: Matcher = MATCHERS["strict"],
        routing: RoutingShape | None = None,
    ) -> None:
        self.session_id = session_id
        self.spec = spec
        self._template = template
        self._budget_bytes = budget_bytes
        self._matcher = matcher
        self._routing = routing
        self.linear = spec.mode is SessionMode.LINEAR
        self.epoch = 0
        self.closed = False
        self.sealed = False
        self.turns: list[Turn] = []
        self._children: dict[int | None, list[Turn]] = {}
        self._remembered: tuple[tuple[Request, Turn], ...] = ()
        self._toolsets: dict[tuple[Tool, ...], tuple[Tool, ...]] = {(): ()}  # equal tools are kept once
        self._turn_bytes = 0
        self._raw_bytes = 0
        self.sampled_tokens = 0
        self.dropped: Counter[str] = Counter()
        self.requests_after_cut = 0
        self.requests_unanswered = 0
        self.upstream_malformed: Counter[str] = Counter()
        self.ignored_params: Counter[str] = Counter()
        self.recorded_params: Counter[str] = Counter()

    @property
    def head(self) -> Turn | None:
        """The latest turn: in a linear session the only one that can be continued."""
        return self.turns[-1] if self.turns else None

    @property
    def held_bytes(self) -> int:
        """What this session keeps in memory, roughly and from above."""
        return _SESSION_BYTES + self._turn_bytes + self._raw_bytes

    def read(
        self,
        raws: Sequence[bytes],
        tools_raw: bytes | None,
        parse: Parse = openai_message,
        parse_all_tools: Callable[[Any], tuple[Tool, ...]] = parse_tools,
    ) -> Request:
        """Parse a request given as the JSON of each message. Messages whose bytes a recorded request had at the same
        place are taken from there; only new ones are parsed. Refuses (`bad_body`) what is no conversation. May run in a
        thread: it reads nothing that changes in place."""
        raws = tuple(raws)
        known, same = self._recall(raws, parse)
        ends = list(known.ends[:same]) if known else []
        messages = list(known.messages[: ends[-1]]) if known and same else []
        for index in range(same, len(raws)):
            where = f"messages[{index}]"
            messages += parse(_decode(raws[index], where), where)
            ends.append(len(messages))
        check_sequence(messages)
        same_tools = next((held for held, _turn in self._remembered if held.tools_raw == tools_raw), None)
        if tools_raw is None:
            tools: tuple[Tool, ...] = ()
        elif same_tools is not None:
            tools = same_tools.tools
        else:
            tools = parse_all_tools(_decode(tools_raw, "tools"))
        return Request(tuple(messages), tools, raws, tuple(ends), tools_raw, parse)

    @property
    def last_raws(self) -> tuple[bytes, ...]:
        """The JSON of the last recorded request's messages."""
        return self._remembered[0][0].raws if self._remembered else ()

    def unread_bytes(self, raws: Sequence[bytes], tools_raw: bytes | None, parse: Parse) -> int:
        """JSON that `read` would parse."""
        _known, same = self._recall(tuple(raws), parse)
        new_tools = all(held.tools_raw != tools_raw for held, _turn in self._remembered)
        return sum(map(len, raws[same:])) + (len(tools_raw or b"") if new_tools else 0)

    def _recall(self, raws: tuple[bytes, ...], parse: Parse) -> tuple[Request | None, int]:
        """The remembered request that shares most leading messages with `raws`, and how many."""
        best, most = None, 0
        for held, _turn in self._remembered:
            if held.parse is not parse:
                continue
            same = len(held.raws)
            if raws[:same] != held.raws:
                pairs = zip(held.raws, raws, strict=False)
                same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(same, len(raws)))
            if same > most:
                best, most = held, same
        return best, most

    def prepare(self, request: Request, asked: Mapping[str, Any] | None = None) -> PreparedTurn:
        """plan, render and assemble in one go (a server may render a long delta off its event loop instead)."""
        plan = self.plan(request, asked)
        return self.assemble(plan, self.render(plan))

    def plan(self, request: Request, asked: Mapping[str, Any] | None = None) -> Plan:
        """Find what the request continues; refuse with the place where it does not fit.

        `asked` holds the sampling parameters the client named, under their names in `Sampling`.
        """
        self._require_open()
        head = self.head if self.linear else None
        if head is not None and head.cut:
            raise _cut(head, self.spec.mode)
        sampling, differs = self._sampling(asked or {})
        if head is not None and request.tools != head.tools:
            raise SessionRefusal(
                Refusal.TOOLS_CHANGED,
                f"tools changed after turn {head.index + 1}: had {[t.name for t in head.tools]}, got "
                f"{[t.name for t in request.tools]} (names or definitions differ); send the same tools every turn",
            )
        base, repeats, loose = self._place(request, head)
        messages = request.messages
        on_path = path(self.turns, base)
        stored = history(on_path) + (list(repeats.new_messages) if repeats is not None else [])
        return Plan(
            epoch=self.epoch,
            base=base,
            repeats=repeats,
            request=request,
            messages=(*stored, *messages[len(stored) :]),
            new_messages=messages[len(stored) :] if repeats is None else repeats.new_messages,
            sampling=sampling,
            asked=differs,
            loose=loose,
        )

    def _place(self, request: Request, head: Turn | None) -> tuple[Turn | None, Turn | None, tuple[Match, ...]]:
        """(base, repeats, loose matches) of a request that may be answered."""
        place = self._locate(request, head)
        base, repeats = place.base, place.repeats
        if repeats is not None:
            base = None if repeats.parent is None else self.turns[repeats.parent]
        if head is not None and not (repeats is head or base is head or (base and base.index == head.parent)):
            raise SessionRefusal(Refusal.BAD_HISTORY, self._divergence(head, request.messages))
        if base is None or repeats is not None:
            return base, repeats, place.loose
        if base.cut:
            raise _cut(base, self.spec.mode)
        wrong = self._not_appended(base, request.messages)
        if wrong is None:
            return base, None, place.loose
        if head is None:
            return None, None, ()
        if base is not head:
            raise SessionRefusal(Refusal.BAD_HISTORY, self._divergence(head, request.messages))
        roles = " or ".join(sorted(self._template.appended_roles))
        raise SessionRefusal(
            Refusal.BAD_HISTORY,
            f"messages[{wrong}] is a new {request.messages[wrong].role} message; after a reply send {roles} messages",
        )

    def _locate(self, request: Request, head: Turn | None) -> Place:
        """Where the request stands: looked for first where its bytes were seen last, then everywhere it may stand."""
        messages = request.messages
        seen = self._last_seen(request)
        if seen is not None and head in (None, seen):
            place = locate((seen,), self._children_of, messages, self._matcher)
            base = place.base
            # with only appended roles left there is no reply left to match: no turn lies deeper
            if place.repeats or (base and not base.cut and self._not_appended(base, messages) is None):
                return place
        if head is None:
            roots = [turn for turn in self._children.get(None, ()) if turn.tools == request.tools]
            return locate(roots, self._children_of, messages, self._matcher)
        after = {turn.parent: (turn,) for turn in path(self.turns, head)}
        return locate(after[None], lambda turn: after.get(turn.index, ()), messages, self._matcher)

    def _last_seen(self, request: Request) -> Turn | None:
        """The turn with the longest remembered request that `request` begins with, object for object."""
        messages, found = request.messages, None
        for held, turn in self._remembered:
            if len(held.messages) > len(messages) or (found and found.request_end >= turn.request_end):
                continue
            if turn.tools == request.tools and all(map(operator.is_, held.messages, messages)):
                found = turn
        return found

    def _children_of(self, turn: Turn) -> list[Turn]:
        return self._children.get(turn.index, [])

    def _not_appended(self, base: Turn, messages: Sequence[Message]) -> int | None:
        """Index of the first message after the reply of `base` that cannot be rendered there; None when all can."""
        roles = self._template.appended_roles
        return next((i for i in range(base.request_end + 1, len(messages)) if messages[i].role not in roles), None)

    def _sampling(self, asked: Mapping[str, Any]) -> tuple[Sampling, tuple[str, ...]]:
        """The parameters to sample with, and the names of those that were asked for and are not the session's."""
        pinned = self.spec.sampling
        differs = {k: v for k, v in asked.items() if v is not None and v != getattr(pinned, k)}
        if not differs or self.spec.sampling_policy is SamplingPolicy.PIN:
            return pinned, tuple(differs)
        if self.spec.sampling_policy is SamplingPolicy.REFUSE:
            told = ", ".join(f"{k} {str(v)[:40]} (it is {getattr(pinned, k)})" for k, v in differs.items())
            raise SessionRefusal(Refusal.PARAMS, f"this session's sampling parameters are fixed: {told}")
        for name, value in differs.items():
            allowed = _ALLOWED[name]
            if isinstance(value, bool) or not isinstance(value, int if name in _WHOLE else int | float):
                raise SessionRefusal(Refusal.PARAMS, f"{name} {str(value)[:40]!r} is not a number it can have")
            if not allowed(value):
                raise SessionRefusal(Refusal.PARAMS, f"{name} {value} is out of range")
        limit = min(differs.get("max_new_tokens", pinned.max_new_tokens), pinned.max_new_tokens)
        return replace(pinned, **{**differs, "max_new_tokens": limit}), tuple(differs)

    def render(self, plan: Plan) -> np.ndarray:
        """Ids int32 of what the plan adds; reads nothing of the session that changes, so it may run in a thread."""
        if plan.repeats is not None:
            return plan.repeats.delta
        thinking = self.spec.thinking
        if plan.base is None:
            return self._template.render_prompt(plan.messages, plan.request.tools, thinking)
        return self._template.render_delta(int(plan.base.ids[-1]), plan.new_messages, thinking)

    def assemble(self, plan: Plan, delta_ids: np.ndarray) -> PreparedTurn:
        """The ids to send for a plan made on this epoch; refuses what does not fit the length or the byte budget."""
        self._require_open()
        self._require_epoch(plan.epoch)
        total = plan.held + len(delta_ids)
        room = self.spec.max_seq_len - total
        if room <= 0:
            raise SessionRefusal(
                Refusal.LENGTH,
                f"the prompt has {total} tokens and max_seq_len is {self.spec.max_seq_len}: no room to reply",
            )
        max_new = min(plan.sampling.max_new_tokens, room)
        added = len(delta_ids) + max_new
        grown = TURN_BYTES + added * (_TOKEN_BYTES + (self._routing.row_bytes if self._routing else 0))
        grown += sum(message.held_bytes() for message in plan.new_messages)
        grown += self._new_tool_bytes(plan.request.tools)
        if self.held_bytes + grown > self._budget_bytes:
            raise SessionRefusal(
                Refusal.OVER_BUDGET,
                f"session holds {self.held_bytes} bytes, this turn may add {grown}; the budget is {self._budget_bytes}",
            )
        input_ids = np.concatenate([*(turn.ids for turn in path(self.turns, plan.base)), delta_ids])
        input_ids.flags.writeable = False
        routing_from = None if self._routing is None else max(plan.held - 1, 0)
        salt = self.spec.expected_weight_version
        return PreparedTurn(self.epoch, input_ids, max_new, plan.sampling, routing_from, plan, salt)

    def commit(self, prepared: PreparedTurn, completion: Completion, ignored_params: Sequence[str] = ()) -> Turn:
        """Record the turn. Everything is checked first: a refusal changes nothing and tells what was sampled for it."""
        self._require_open()
        try:
            self._check(prepared, completion)
            self._require_epoch(prepared.epoch)
            turn = self._turn(prepared, completion)
        except SessionRefusal as refusal:
            refusal.sampled = completion.output_ids.size
            raise
        except Exception:  # a bug in reading it, whatever that raises: what was sampled counts all the same
            self.count_refused(SessionRefusal(Refusal.INTERNAL, "", completion.output_ids.size))
            raise
        self._record(prepared.plan, turn)
        self.upstream_malformed.update(completion.malformed)
        ignored = list(ignored_params)
        if self.spec.sampling_policy is SamplingPolicy.PIN:
            ignored += prepared.plan.asked
        else:
            _count(self.recorded_params, prepared.plan.asked)
        _count(self.ignored_params, ignored)
        return turn

    def count_refused(self, refusal: SessionRefusal) -> None:
        """Book what was sampled for a refused request: all that is left of it. Not when the session is over."""
        if self.sealed or self.closed:
            return
        self.requests_after_cut += refusal.code is Refusal.CUT_TURN
        self.requests_unanswered += refusal.code is Refusal.BAD_UPSTREAM and refusal.sampled is None
        if refusal.sampled:
            lost_to_cut = refusal.code is Refusal.LOST_RACE and self.head is not None and self.head.cut
            bucket = Bucket.AFTER_TRUNCATION if lost_to_cut else BUCKETS.get(refusal.code, Bucket.INFRA)
            self.dropped[str(bucket)] += refusal.sampled
            self.sampled_tokens += refusal.sampled

    def _turn(self, prepared: PreparedTurn, completion: Completion) -> Turn:
        plan = prepared.plan
        parsed = self._template.parse_assistant(completion.output_ids, plan.request.tools, self.spec.thinking)
        reply = parsed.message(f"call_{self.epoch}")
        cut = completion.finish_reason == "length"
        errors = 0 if cut else parsed.format_errors  # a call cut in half is the limit's fault
        at = len(prepared.input_ids)
        ids = np.concatenate([prepared.input_ids[plan.held :], completion.output_ids])
        logprobs = completion.logprobs.copy()
        routing = None if completion.routing is None or self._routing is None else completion.routing.view()
        for array in (ids, logprobs, routing):
            if array is not None:
                array.flags.writeable = False
        sent = chain_digest(b"" if plan.base is None else plan.base.end_digest, prepared.input_ids[plan.held :])
        return Turn(
            index=len(self.turns),
            parent=None if plan.base is None else plan.base.index,
            start=plan.held,
            prompt_end=at,
            end=at + len(completion.output_ids),
            ids=ids,
            logprobs=logprobs,
            spans=tuple((at + a, at + b, version) for a, b, version in completion.spans),
            finish_reason=completion.finish_reason,
            prompt_digest=sent,
            end_digest=chain_digest(sent, completion.output_ids),
            request_end=len(plan.messages),
            new_messages=plan.new_messages,
            reply=reply,
            tools=self._toolsets.get(plan.request.tools, plan.request.tools),
            format_errors=errors,
            canonical=Canonical.CUT if cut else self._spelling(reply, completion.output_ids, errors),
            cached_tokens=completion.cached_tokens,
            routing=routing,
            retractions=completion.retractions,
            sampling_differs=replace(plan.sampling, max_new_tokens=0) != replace(self.spec.sampling, max_new_tokens=0),
            loose=plan.loose,
            worker=completion.worker,
        )

    def _spelling(self, reply: Message, ids: np.ndarray, format_errors: int) -> Canonical:
        if format_errors:
            return Canonical.UNPARSED
        try:
            own = self._template.render_reply(reply, self.spec.thinking)
        except BadInput:  # the template itself would not say it
            return Canonical.RESPELLED
        if np.array_equal(ids[:-1], own[:-1]):
            return Canonical.EXACT if ids[-1] == own[-1] else Canonical.BOUNDARY
        same_text = self._template.decode(ids[:-1]) == self._template.decode(own[:-1])
        return Canonical.RETOKENISED if same_text else Canonical.RESPELLED

    def _check(self, prepared: PreparedTurn, completion: Completion) -> None:
        ids, logprobs = completion.output_ids, completion.logprobs
        if ids.dtype != np.int32 or logprobs.dtype != np.float32 or ids.ndim != 1 or ids.shape != logprobs.shape:
            raise _bad(f"ids {ids.dtype} {ids.shape} and log-probs {logprobs.dtype} {logprobs.shape} do not pair")
        if not 0 < len(ids) <= prepared.max_new_tokens:
            raise _bad(f"{len(ids)} tokens sampled, expected 1 to {prepared.max_new_tokens}")
        if int(ids.min()) < 0 or int(ids.max()) >= self._template.vocab_size:
            raise _bad(f"ids span {ids.min()} to {ids.max()}, the vocabulary has {self._template.vocab_size}")
        if not np.isfinite(logprobs).all():
            raise SessionRefusal(Refusal.NONFINITE, "upstream reply refused: a log-prob is not finite")
        if float(logprobs.max()) > _POSITIVE_LOGPROB:
            raise _bad(f"log-probs span {logprobs.min()} to {logprobs.max()}, expected at most 0")
        stops = self._template.stop_ids
        ends = np.flatnonzero(np.isin(ids, stops))
        if completion.finish_reason == "stop":
            if ends.tolist() != [len(ids) - 1]:
                raise _bad(f"finish_reason stop with last id {ids[-1]}, expected one end of turn {list(stops)} there")
        elif completion.finish_reason == "length":
            if len(ends):
                raise _bad(f"finish_reason length but the end of turn {ids[ends[0]]} is at {ends[0]}")
        else:
            raise _bad(f"finish_reason {completion.finish_reason!r}, expected stop or length")
        edge = 0
        for start, end, version in completion.spans:
            if start != edge or end <= start:
                raise _bad(f"weight version span [{start}, {end}) does not start at {edge}")
            edge = end
            expected = self.spec.expected_weight_version
            if expected is not None and version != expected:
                raise SessionRefusal(
                    Refusal.WRONG_VERSION,
                    f"the engine sampled with weights {version!r}, this session expects {expected!r}",
                )
        if edge != len(ids):
            raise _bad(f"weight version spans cover {edge} of {len(ids)} tokens")
        if self._routing is not None and prepared.routing_from is not None:
            rows = len(prepared.input_ids) + len(ids) - 1 - prepared.routing_from
            check_rows(completion.routing, self._routing, rows)

    def _record(self, plan: Plan, turn: Turn) -> None:
        self.turns.append(turn)
        self._children.setdefault(turn.parent, []).append(turn)
        if plan.request.raws:
            kept = self._remembered[: 0 if self.linear else _REMEMBERED - 1]
            self._remembered = ((replace(plan.request, messages=plan.messages, tools=turn.tools), turn), *kept)
            self._raw_bytes = sum(request.raw_bytes for request, _turn in self._remembered)
        self._turn_bytes += turn.held_bytes() + self._new_tool_bytes(turn.tools)
        self._toolsets.setdefault(turn.tools, turn.tools)
        self.sampled_tokens += turn.sampled
        self.epoch += 1

    def _new_tool_bytes(self, tools: tuple[Tool, ...]) -> int:
        """What keeping `tools` adds: nothing when a turn has the same ones."""
        return 0 if tools in self._toolsets else sum(tool.held_bytes() for tool in tools)

    def seal(self) -> None:
        """No more turns: what is merged from now on stays the same. Safe to call again."""
        self._require_exists()
        self.sealed = True

    def close(self) -> None:
        """After this nothing is recorded, also not what is in flight."""
        self.closed = True
        self.epoch += 1

    def describe(self) -> dict[str, Any]:
        """Records and metadata for a person or a task; no ids and no message text."""
        turns = self.turns
        return {
            "session_id": self.session_id,
            "attempt_id": self.spec.attempt_id,
            "group_id": self.spec.group_id,
            "task_id": self.spec.task_id,
            "expected_weight_version": self.spec.expected_weight_version,
            "max_seq_len": self.spec.max_seq_len,
            "mode": str(self.spec.mode),
            "epoch": self.epoch,
            "sealed": self.sealed,
            "tokens": turns[-1].end if turns else 0,
            "leaves": sum(turn.index not in self._children for turn in turns),
            "sampled_tokens": self.sampled_tokens,
            "dropped": self._dropped(),
            "prompt_tokens": sum(turn.prompt_end for turn in turns),
            "cached_tokens": sum(turn.cached_tokens or 0 for turn in turns),
            "reprefilled_rows": sum(turn.reprefilled_rows for turn in turns),
            "requests_after_cut": self.requests_after_cut,
            "requests_unanswered": self.requests_unanswered,
            "upstream_malformed": dict(self.upstream_malformed),
            "held_bytes": self.held_bytes,
            "cut": bool(turns and turns[-1].cut),
            "format_errors": sum(turn.format_errors for turn in turns),
            "canonical": dict(Counter(str(turn.canonical) for turn in turns)),
            "loose_matches": dict(Counter(str(match) for turn in turns for match in turn.loose)),
            "ignored_params": dict(self.ignored_params),
            "recorded_params": dict(self.recorded_params),
            "sampling_differs": sum(turn.sampling_differs for turn in turns),
            "turns": [_describe(turn) for turn in turns],
        }

    def _dropped(self) -> dict[str, int]:
        """Sampled tokens that no sample will train; of a tree without what the pick of its leaves will leave out."""
        kept = path(self.turns, self.head) if self.linear else self.turns
        left = sum(turn.sampled for turn in self.turns) - sum(turn.sampled for turn in kept)
        return dict(self.dropped + Counter({str(Bucket.PREFIX_BREAK): left}))

    def _require_exists(self) -> None:
        if self.closed:
            raise SessionRefusal(Refusal.NOT_FOUND, f"session {self.session_id} was deleted or has expired")

    def _require_open(self) -> None:
        self._require_exists()
        if self.sealed:
            raise SessionRefusal(Refusal.SEALED, f"session {self.session_id} is sealed: its samples are being stored")

    def _require_epoch(self, epoch: int) -> None:
        if self.linear and epoch != self.epoch:
            raise SessionRefusal(
                Refusal.LOST_RACE,
                f"another request was recorded first (epoch {self.epoch}, this one was prepared on {epoch}); "
                "nothing of this one is kept",
            )

    def _divergence(self, head: Turn, messages: tuple[Message, ...]) -> str:
        held = history(path(self.turns, head))
        found = difference(held, messages, self._matcher)
        if found is not None:
            return f"{found}; a linear session only extends, repeats its last request or goes one turn back"
        return (
            f"history ends after {len(messages)} messages, the session holds {len(held)} and can only go back to "
            f"{head.request_end} (its last request)"
        )


_WHOLE = frozenset({"top_k", "max_new_tokens"})
_ALLOWED: dict[str, Callable[[Any], bool]] = {
    "temperature": lambda value: 0.0 <= value <= 2.0,
    "top_p": lambda value: 0.0 < value <= 1.0,
    "top_k": lambda value: value == -1 or 1 <= value <= 1 << 30,
    "max_new_tokens": lambda value: value >= 1,
}


def _describe(turn: Turn) -> dict[str, Any]:
    return {
        "parent": turn.parent,
        "prompt_tokens": turn.prompt_end,
        "sampled_tokens": turn.sampled,
        "cached_tokens": turn.cached_tokens,
        "finish_reason": turn.finish_reason,
        "tool_calls": len(turn.reply.tool_calls),
        "format_errors": turn.format_errors,
        "canonical": str(turn.canonical),
        "weight_versions": sorted({version for _a, _b, version in turn.spans}),
        "retractions": turn.retractions,
        "worker": turn.worker,
    }


def _count(counter: Counter[str], names: Sequence[str]) -> None:
    for name in names:
        known = name in counter or len(counter) < _NAMES_KEPT
        counter[name if known else "other"] += 1


def _decode(raw: bytes, where: str) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise SessionRefusal(Refusal.BAD_BODY, f"{where}: is not JSON: {error}") from None


def _cut(turn: Turn, mode: SessionMode) -> SessionRefusal:
    if mode is SessionMode.LINEAR:
        now = "this linear session takes no further request; open a new session"
        other = " or use mode tree, where the request may be repeated"
    else:
        now, other = "nothing adds to it; repeat its request, or open a new session", ""
    raised = "raise max_new_tokens or max_seq_len"
    return SessionRefusal(
        Refusal.CUT_TURN,
        f"turn {turn.index + 1} was cut by length after {turn.sampled} tokens: {now} ({raised}{other})",
    )


def _bad(problem: str) -> SessionRefusal:
    return SessionRefusal(Refusal.BAD_UPSTREAM, f"upstream reply refused: {problem}")
