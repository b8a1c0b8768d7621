"""One session without HTTP: what was sent, what was sampled, and what may come next.

A session is a linear conversation held as ids. A request names the whole history; only the messages after what is
held are rendered, so the engine always sees the very ids it sampled. The life of one turn:

    plan(messages, tools) -> Plan            checks the history, changes nothing
    assemble(plan, delta_ids) -> Prepared    the ids to send; checks length and byte budget, changes nothing
    commit(prepared, completion) -> Turn     validates everything, then records; refuses a stale epoch

Every commit raises the epoch, so of two requests prepared on one epoch exactly one is recorded. Resending the last
request word for word rolls one generated turn back; its sampled tokens stay counted (`prefix_break`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl360.sessions.families.base import ChatTemplate
from rl360.sessions.messages import Message, Tool, ToolCall
from rl360.sessions.refusals import Refusal, SessionRefusal

_TOKEN_BYTES = 4 + 4 + 1  # token, log-probability, mask
_SESSION_BYTES = 4096
_TURN_BYTES = 512
_POSITIVE_LOGPROB = 1e-3  # rounding above 0 that a correct engine may show for a certain token


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a session: pinned when it is created, whatever a request asks for."""

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int


@dataclass(frozen=True)
class SessionSpec:
    """What a session is created with. `expected_weight_version` None accepts (and records) any version."""

    attempt_id: str
    group_id: str
    task_id: str
    sampling: Sampling
    max_seq_len: int
    expected_weight_version: str | None = None


@dataclass(frozen=True)
class Plan:
    """A request that fits the history. `base` is how many held ids stay; `new_messages` are still to be rendered."""

    epoch: int
    base: int
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    new_messages: tuple[Message, ...]
    first: bool
    rollback: bool


@dataclass(frozen=True)
class PreparedTurn:
    """What to send: `input_ids` int32 `[tokens]`, at most `max_new_tokens` to sample, valid on `epoch` only."""

    epoch: int
    input_ids: np.ndarray
    max_new_tokens: int
    plan: Plan


@dataclass(frozen=True)
class Completion:
    """What the engine answered. `output_ids` int32 and `logprobs` float32 `[sampled]`, the end token included;
    `spans` are (start, end, weight version) over `output_ids`; `finish_reason` is stop or length."""

    output_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    spans: tuple[tuple[int, int, str], ...]
    cached_tokens: int = 0


@dataclass(frozen=True)
class Turn:
    """One recorded turn: ids `[:prompt_end]` were sent, `[prompt_end:end]` sampled. Digests cover the ids as sent and
    as sent plus sampled; spans are over the session's ids; `messages_before` messages were in the request."""

    prompt_end: int
    end: int
    messages_before: int
    finish_reason: str
    spans: tuple[tuple[int, int, str], ...]
    prompt_digest: bytes
    end_digest: bytes
    reply: Message
    format_errors: int
    cached_tokens: int

    @property
    def sampled(self) -> int:
        return self.end - self.prompt_end

    @property
    def cut(self) -> bool:
        return self.finish_reason == "length"


class GrowBuffer:
    """A one-dimensional array that grows by doubling; `view` is `[length]`, valid until the next append."""

    def __init__(self, dtype: type[np.generic], capacity: int = 256) -> None:
        self._data = np.zeros(capacity, dtype=dtype)
        self.length = 0

    def append(self, values: np.ndarray) -> None:
        end = self.length + len(values)
        if end > len(self._data):
            grown = np.zeros(max(end, 2 * len(self._data)), dtype=self._data.dtype)
            grown[: self.length] = self._data[: self.length]
            self._data = grown
        self._data[self.length : end] = values
        self.length = end

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)

    @property
    def view(self) -> np.ndarray:
        return self._data[: self.length]

    @property
    def held_bytes(self) -> int:
        return self._data.nbytes


def digest_ids(ids: np.ndarray, hasher: Any = None) -> Any:
    """Feed int32 ids into a (new) running digest."""
    hasher = hashlib.blake2b(digest_size=16) if hasher is None else hasher
    hasher.update(np.ascontiguousarray(ids, dtype="<i4"))
    return hasher


class Session:
    """State of one linear session. Not thread-safe: one event loop owns it."""

    def __init__(self, session_id: str, spec: SessionSpec, template: ChatTemplate, budget_bytes: int) -> None:
        self.session_id = session_id
        self.spec = spec
        self._template = template
        self._budget_bytes = budget_bytes
        self.epoch = 0
        self.closed = False
        self.tokens = GrowBuffer(np.int32)
        self.logprobs = GrowBuffer(np.float32)
        self.mask = GrowBuffer(np.uint8)
        self.turns: list[Turn] = []
        self.messages: list[Message] = []
        self.tools: tuple[Tool, ...] = ()
        self.sampled_tokens = 0
        self.prefix_break_tokens = 0
        self.lost_race_tokens = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.rollbacks = 0
        self.ignored_params: Counter[str] = Counter()
        self._message_bytes = 0

    @property
    def held_bytes(self) -> int:
        """What this session keeps in memory, roughly and from above."""
        arrays = self.tokens.held_bytes + self.logprobs.held_bytes + self.mask.held_bytes
        return _SESSION_BYTES + arrays + self._message_bytes + _TURN_BYTES * len(self.turns)

    def prepare(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> PreparedTurn:
        """plan, render and assemble in one go (a server may render a long delta off its event loop instead)."""
        plan = self.plan(messages, tools)
        return self.assemble(plan, self.render(plan))

    def plan(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> Plan:
        """Check that the request continues this session; refuse with the place where it does not."""
        self._require_open()
        if not self.turns:
            return Plan(self.epoch, 0, messages, tools, messages, first=True, rollback=False)
        if tools != self.tools:
            raise SessionRefusal(
                Refusal.TOOLS_CHANGED,
                f"tools changed after turn {len(self.turns)}: had {[t.name for t in self.tools]}, got "
                f"{[t.name for t in tools]} (names or parameters differ); send the same tools every turn",
            )
        last = self.turns[-1]
        if last.cut:
            raise SessionRefusal(
                Refusal.CUT_TURN,
                f"turn {len(self.turns)} was cut by length after {last.sampled} tokens; the session cannot be extended",
            )
        held = len(self.messages)
        if messages == tuple(self.messages[: last.messages_before]):
            return Plan(self.epoch, last.prompt_end, messages, tools, (), first=False, rollback=True)
        if len(messages) > held and messages[:held] == tuple(self.messages):
            new = messages[held:]
            for index, message in enumerate(new, start=held):
                if message.role not in ("user", "tool"):
                    raise SessionRefusal(
                        Refusal.BAD_HISTORY,
                        f"messages[{index}] is a new {message.role} message; after a reply send tool or user messages",
                    )
            return Plan(self.epoch, last.end, messages, tools, new, first=False, rollback=False)
        raise SessionRefusal(Refusal.BAD_HISTORY, self._divergence(messages))

    def render(self, plan: Plan) -> np.ndarray:
        """Ids of what the plan adds; reads nothing of the session that changes, so it may run in a thread."""
        if plan.first:
            return self._template.render_prompt(plan.messages, plan.tools)
        if plan.rollback:
            return np.zeros(0, dtype=np.int32)
        return self._template.render_delta(self._template.stop_ids[0], plan.new_messages)

    def assemble(self, plan: Plan, delta_ids: np.ndarray) -> PreparedTurn:
        """The ids to send for a plan made on this epoch; refuses what does not fit the length or the byte budget."""
        self._require_epoch(plan.epoch)
        total = plan.base + len(delta_ids)
        room = self.spec.max_seq_len - total
        if room <= 0:
            raise SessionRefusal(
                Refusal.LENGTH,
                f"the prompt has {total} tokens and max_seq_len is {self.spec.max_seq_len}: no room to reply",
            )
        max_new = min(self.spec.sampling.max_new_tokens, room)
        grown = sum(message.held_bytes() for message in plan.new_messages)
        grown += 2 * _TOKEN_BYTES * (len(delta_ids) + max_new)  # doubling keeps up to twice what is used
        if self.held_bytes + grown > self._budget_bytes:
            raise SessionRefusal(
                Refusal.OVER_BUDGET,
                f"session holds {self.held_bytes} bytes, this turn may add {grown}; the budget is {self._budget_bytes}",
            )
        input_ids = np.concatenate([self.tokens.view[: plan.base], delta_ids])
        return PreparedTurn(self.epoch, input_ids, max_new, plan)

    def commit(self, prepared: PreparedTurn, completion: Completion, ignored_params: tuple[str, ...] = ()) -> Turn:
        """Record the turn. Everything is checked first: a refusal leaves the session as it was."""
        if self.closed or prepared.epoch != self.epoch:
            self.lost_race_tokens += len(completion.output_ids)  # sampled, and kept in no history
        self._require_open()
        self._require_epoch(prepared.epoch)
        self._check(prepared, completion)
        plan = prepared.plan
        parsed = self._template.parse_assistant(completion.output_ids, plan.tools)
        calls = tuple(
            ToolCall.make(f"call_{self.epoch}_{i}", call.name, call.arguments)
            for i, call in enumerate(parsed.tool_calls)
        )
        start = len(prepared.input_ids)
        hasher = digest_ids(prepared.input_ids)
        prompt_digest = hasher.digest()
        cut = completion.finish_reason == "length"
        turn = Turn(
            prompt_end=start,
            end=start + len(completion.output_ids),
            messages_before=len(plan.messages),
            finish_reason=completion.finish_reason,
            spans=tuple((start + a, start + b, version) for a, b, version in completion.spans),
            prompt_digest=prompt_digest,
            end_digest=digest_ids(completion.output_ids, hasher).digest(),
            reply=Message("assistant", parsed.content, tool_calls=calls),
            format_errors=0 if cut else parsed.format_errors,  # a call cut in half is the limit's fault
            cached_tokens=completion.cached_tokens,
        )
        self._record(prepared, completion, turn)
        self._count_ignored(ignored_params)
        return turn

    def close(self) -> None:
        """After this nothing is recorded, also not what is in flight."""
        self.closed = True
        self.epoch += 1

    def describe(self) -> dict[str, Any]:
        """Records and metadata for a person or a task; no ids and no message text."""
        return {
            "session_id": self.session_id,
            "attempt_id": self.spec.attempt_id,
            "group_id": self.spec.group_id,
            "task_id": self.spec.task_id,
            "expected_weight_version": self.spec.expected_weight_version,
            "max_seq_len": self.spec.max_seq_len,
            "epoch": self.epoch,
            "tokens": self.tokens.length,
            "sampled_tokens": self.sampled_tokens,
            "prefix_break_tokens": self.prefix_break_tokens,
            "lost_race_tokens": self.lost_race_tokens,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "rollbacks": self.rollbacks,
            "held_bytes": self.held_bytes,
            "cut": bool(self.turns and self.turns[-1].cut),
            "format_errors": sum(turn.format_errors for turn in self.turns),
            "ignored_params": dict(self.ignored_params),
            "turns": [
                {
                    "prompt_tokens": turn.prompt_end,
                    "sampled_tokens": turn.sampled,
                    "cached_tokens": turn.cached_tokens,
                    "finish_reason": turn.finish_reason,
                    "tool_calls": len(turn.reply.tool_calls),
                    "format_errors": turn.format_errors,
                    "weight_versions": sorted({version for _a, _b, version in turn.spans}),
                }
                for turn in self.turns
            ],
        }

    def _require_open(self) -> None:
        if self.closed:
            raise SessionRefusal(Refusal.NOT_FOUND, f"session {self.session_id} was deleted or has expired")

    def _require_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise SessionRefusal(
                Refusal.LOST_RACE,
                f"another request was recorded first (epoch {self.epoch}, this one was prepared on {epoch}); "
                "nothing of this one is kept",
            )

    def _divergence(self, messages: tuple[Message, ...]) -> str:
        for index, (got, held) in enumerate(zip(messages, self.messages, strict=False)):
            if got != held:
                field = next(
                    name
                    for name in ("role", "content", "tool_calls", "tool_call_id")
                    if getattr(got, name) != getattr(held, name)
                )
                return (
                    f"messages[{index}].{field} ({got.role}) differs from what this session holds ({held.role}); "
                    "a linear session only extends, or resends its last request unchanged"
                )
        return (
            f"history ends after {len(messages)} messages, the session holds {len(self.messages)} and can only go back "
            f"to {self.turns[-1].messages_before} (its last request)"
        )

    def _check(self, prepared: PreparedTurn, completion: Completion) -> None:
        ids, logprobs = completion.output_ids, completion.logprobs
        if ids.dtype != np.int32 or logprobs.dtype != np.float32 or ids.ndim != 1 or ids.shape != logprobs.shape:
            raise _bad(f"ids {ids.dtype} {ids.shape} and log-probs {logprobs.dtype} {logprobs.shape} do not pair")
        if not 0 < len(ids) <= prepared.max_new_tokens:
            raise _bad(f"{len(ids)} tokens sampled, expected 1 to {prepared.max_new_tokens}")
        if int(ids.min()) < 0 or int(ids.max()) >= self._template.vocab_size:
            raise _bad(f"ids span {ids.min()} to {ids.max()}, the vocabulary has {self._template.vocab_size}")
        if not np.isfinite(logprobs).all() or float(logprobs.max()) > _POSITIVE_LOGPROB:
            raise _bad(f"log-probs span {logprobs.min()} to {logprobs.max()}, expected finite and at most 0")
        ends = np.flatnonzero(ids == self._template.stop_ids[0])
        if completion.finish_reason == "stop":
            if ends.tolist() != [len(ids) - 1]:
                raise _bad(
                    f"finish_reason stop with last id {ids[-1]}, expected end of turn {self._template.stop_ids[0]} once"
                )
        elif completion.finish_reason == "length":
            if len(ends):
                raise _bad(f"finish_reason length but the end of turn {self._template.stop_ids[0]} is at {ends[0]}")
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

    def _record(self, prepared: PreparedTurn, completion: Completion, turn: Turn) -> None:
        plan = prepared.plan
        if plan.rollback:
            gone = self.turns.pop()
            self.rollbacks += 1
            self.prefix_break_tokens += gone.sampled
            self._message_bytes -= gone.reply.held_bytes()
            del self.messages[gone.messages_before :]
        for buffer in (self.tokens, self.logprobs, self.mask):
            buffer.truncate(plan.base)
        delta = prepared.input_ids[plan.base :]
        self.tokens.append(delta)
        self.logprobs.append(np.zeros(len(delta), dtype=np.float32))
        self.mask.append(np.zeros(len(delta), dtype=np.uint8))
        self.tokens.append(completion.output_ids)
        self.logprobs.append(completion.logprobs)
        self.mask.append(np.ones(turn.sampled, dtype=np.uint8))
        self.messages.extend([*plan.new_messages, turn.reply])
        self._message_bytes += sum(message.held_bytes() for message in (*plan.new_messages, turn.reply))
        self.tools = plan.tools
        self.turns.append(turn)
        self.sampled_tokens += turn.sampled
        self.prompt_tokens += turn.prompt_end
        self.cached_tokens += turn.cached_tokens
        self.epoch += 1

    def _count_ignored(self, names: tuple[str, ...]) -> None:
        for name in names:
            known = name in self.ignored_params or len(self.ignored_params) < 32
            self.ignored_params[name if known else "other"] += 1


def _bad(problem: str) -> SessionRefusal:
    return SessionRefusal(Refusal.BAD_UPSTREAM, f"upstream reply refused: {problem}")
