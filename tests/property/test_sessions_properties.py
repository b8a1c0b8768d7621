"""Random agents against a session, judged by an oracle of plain lists that shares no code with it."""

from __future__ import annotations

import functools
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rl360.errors import CorruptObject
from rl360.sessions import messages as messages_module
from rl360.sessions import wire
from rl360.sessions.families.rl360_chat import SPECIALS
from rl360.sessions.merge import Pick, merge, snapshot
from rl360.sessions.messages import Message, ToolCall, check_sequence, openai_message, parse_tools
from rl360.sessions.refusals import Refusal, SessionRefusal
from rl360.sessions.routing import decode_rows
from rl360.sessions.sample import LeafCounts, MergedSample, SampleRef, decode_samples, encode_samples
from rl360.sessions.turns import Completion, PreparedTurn, SessionMode
from rl360.store.codec import pack, unpack
from tests.unit.sessions_data import (
    BASH,
    BASH_SCHEMA,
    EDIT_SCHEMA,
    SHAPE,
    TOOLS,
    build_tokenizer,
    new_session,
    refused,
    request,
    template,
    to_raw,
)

START, END, OPEN, CLOSE = 1, 2, 3, 4
MAX_SEQ_LEN = 200
MAX_NEW = 48
TEXTS = ("", "a", "b", " a\n", "\t b ", "é漢🙂", "<|_/|>", "ab <b> ab", *SPECIALS)
VERSIONS = ["run:0", "run:1"]


@functools.cache
def _stock() -> Tokenizer:
    return build_tokenizer()


@functools.cache
def _plain() -> Tokenizer:
    tokenizer = build_tokenizer()
    tokenizer.encode_special_tokens = True
    return tokenizer


def text_ids(text: str) -> list[int]:
    return _plain().encode(text, add_special_tokens=False).ids


def message_ids(message: Message) -> list[int]:
    """The format written out by hand."""
    if message.role != "assistant":
        return [START, *text_ids(f"{message.role}\n{message.content}"), END]
    ids = [START, *text_ids("assistant\n"), *text_ids(message.content)]
    for call in message.tool_calls:
        values = list(json.loads(call.arguments).values())
        raw = values[0] if len(values) == 1 and isinstance(values[0], str) else call.arguments
        ids += [OPEN, *text_ids(f"{call.name}\n{raw}"), CLOSE]
    return [*ids, END]


def prompt_ids(messages: Sequence[Message], tools: Any) -> list[int]:
    first = messages[0].content if messages[0].role == "system" else ""
    told = "".join(f"\n# {tool.name}({', '.join(name for name, _kind in tool.parameters)})" for tool in tools)
    ids = [START, *text_ids(f"system\n{first}{told}"), END]
    for message in messages[1:] if messages[0].role == "system" else messages:
        ids += message_ids(message)
    return [*ids, START, *text_ids("assistant\n")]


@dataclass(eq=False)
class Node:
    """One recorded turn, everything on its path written out in full."""

    number: int
    parent: Node | None
    asked: list[Message]  # the whole request, in stored spelling
    reply: Message
    tools: Any
    context: list[int]
    prompt: int  # how many ids of the context were sent
    logprobs: list[float]  # of the whole context, 0 where nothing was sampled on this path
    rows: list[Any]  # of the whole context but its last id
    forward: list[int]
    spans: list[tuple[int, int, str]]
    cut: bool

    @property
    def sampled(self) -> int:
        return len(self.context) - self.prompt

    def line(self) -> list[Node]:
        return [*(self.parent.line() if self.parent else []), self]


class Oracle:
    """What a session must do, found by trying every turn with every rule."""

    def __init__(self, linear: bool, loose: bool) -> None:
        self.linear, self.loose = linear, loose
        self.nodes: list[Node] = []
        self.dropped: Counter[str] = Counter()
        self.refused_after_cut = 0

    def meaning(self, message: Message) -> Any:
        calls = [
            (call.name, json.dumps(json.loads(call.arguments), sort_keys=True), None if self.loose else call.id)
            for call in message.tool_calls
        ]
        return message.role, message.content, calls, None if self.loose else message.tool_call_id

    def same(self, one: Sequence[Message], other: Sequence[Message]) -> bool:
        return [self.meaning(m) for m in one] == [self.meaning(m) for m in other]

    def place(self, messages: list[Message], tools: Any) -> tuple[Refusal | None, Node | None, Node | None]:
        """(refusal, turn that is extended, turn that is repeated) for a request."""
        head = self.nodes[-1] if self.nodes and self.linear else None
        if head and head.cut:
            return Refusal.CUT_TURN, None, None
        if head and head.tools != tools:
            return Refusal.TOOLS_CHANGED, None, None
        found: list[tuple[int, bool, int, bool]] = []
        for node in head.line() if head else self.nodes:
            history = [*node.asked, node.reply]
            if node.tools != tools:
                continue
            if len(messages) > len(history) and self.same(history, messages[: len(history)]):
                found.append((len(history), not node.cut, node.number, False))
            if self.same(node.asked, messages):
                found.append((len(messages), True, node.number, True))
        length, fine, number, repeats = max(found, default=(0, True, -1, False))
        node = self.nodes[number] if found else None
        appended = all(m.role in ("user", "tool") for m in messages[length:])
        if head:
            back = node is head if repeats else node is head or (node is not None and node is head.parent)
            if not back or not appended:
                return Refusal.BAD_HISTORY, None, None
        if node is None or repeats:
            return None, node.parent if node else None, node
        if not fine:
            return Refusal.CUT_TURN, None, None
        return (None, node, None) if appended else (None, None, None)


class RandomAgent:
    """Makes one request after another and holds the session to the oracle.

    Its choices come from one seed: drawing each from hypothesis takes longer than all they test.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.mode = self.random.choice(list(SessionMode))
        self.loose = self.often(5)
        self.moe = self.often(5)
        self.one_version = self.often(5)
        self.session = new_session(
            max_seq_len=MAX_SEQ_LEN,
            mode=self.mode,
            matcher="loose_tool_calls" if self.loose else "strict",
            routing=SHAPE if self.moe else None,
            expected_weight_version=VERSIONS[1] if self.one_version else None,
        )
        self.oracle = Oracle(self.mode is SessionMode.LINEAR, self.loose)
        self.rows = np.random.default_rng(seed)

    def often(self, tenths: int = 8) -> bool:
        return self.random.randrange(10) < tenths

    def text(self) -> str:
        return self.random.choice(TEXTS)

    # --- requests ---

    def message(self) -> Message:
        role = self.random.choice(["tool", "user"])
        return Message(role, self.text(), tool_call_id="c" if role == "tool" and self.often(5) else None)

    def spoken(self) -> Message:
        calls = [ToolCall.make(f"c{i}", "bash", {"command": self.text()}) for i in range(self.random.randrange(3))]
        return Message("assistant", self.text(), tuple(calls))

    def opening(self) -> list[Message]:
        system = [Message("system", "Use bash.")] if self.often() else []
        earlier = [] if self.often(7) else [Message("user", "a"), self.spoken()]
        return [*system, *earlier, Message("user", self.text())]

    def request(self) -> list[Message]:
        """Mostly something a session takes: an extension of a turn or its request again; sometimes altered."""
        nodes = self.oracle.nodes
        if not nodes or (self.mode is SessionMode.TREE and not self.often()):
            return self.opening()
        node = nodes[-1] if self.often(7) else self.random.choice(nodes)
        messages = list(node.asked)
        if self.often():
            messages.append(self.echo(node.reply))
            messages += [self.message() for _ in range(self.random.randint(1, 2))]
        elif self.often(4):
            messages[-1] = self.message()
        if not self.often():
            self.alter(messages)
        return messages

    def echo(self, reply: Message) -> Message:
        """The reply as a client may send it back: other call ids, arguments in another order."""
        if not reply.tool_calls or self.often(7):
            return reply
        calls = []
        for call in reply.tool_calls:
            arguments = dict(reversed(list(json.loads(call.arguments).items())))
            calls.append(ToolCall.make(call.id if self.often(5) else "toolu_1", call.name, arguments))
        return replace(reply, tool_calls=tuple(calls))

    def alter(self, messages: list[Message]) -> None:
        where = self.random.randrange(len(messages))
        how = self.random.choice(["content", "call", "drop", "insert"])
        if how == "content":
            messages[where] = replace(messages[where], content=messages[where].content + "!")
        elif how == "call" and messages[where].role == "assistant":
            call = ToolCall.make("call_x", "bash", {"command": "rm"})
            messages[where] = replace(messages[where], tool_calls=(*messages[where].tool_calls, call))
        elif how == "drop" and 0 < where < len(messages) - 1:
            del messages[where]
        elif how == "insert":
            messages.insert(max(where, 1), self.spoken())
            if messages[-1].role == "assistant":
                messages.append(self.message())

    # --- answers ---

    def engine(self, prepared: PreparedTurn) -> tuple[Completion, list[Any]]:
        """Any ids an engine may sample, special tokens and ids without text included; and its rows as lists."""
        limit = prepared.max_new_tokens
        body = [
            self.random.choice([*range(END), *range(END + 1, 512)]) for _ in range(min(limit, self.random.randrange(7)))
        ]
        if self.often(7):
            text = self.random.choice(
                ["done", "ok", "<tool_call>bash\nls</tool_call>", "x<tool_call>bash\nls</tool_call>"]
            )
            body = _stock().encode(text, add_special_tokens=False).ids[:limit]
        cut = len(body) == limit or (bool(body) and not self.often(9))
        ids = body if cut else [*body, END]
        logprobs = [-self.random.randrange(40) / 4 for _ in ids]
        split = 0 if self.one_version or self.often() else self.random.randrange(len(ids))
        spans = [(0, split, VERSIONS[0]), (split, len(ids), VERSIONS[1])][0 if split else 1 :]
        rows: list[Any] = []
        if self.moe:
            total = len(prepared.input_ids) + len(ids) - 1 - (prepared.routing_from or 0)
            rows = self.rows.integers(0, SHAPE.experts, (total, SHAPE.layers, SHAPE.top_k)).tolist()
        return (
            Completion(
                output_ids=np.array(ids, dtype=np.int32),
                logprobs=np.array(logprobs, dtype=np.float32),
                finish_reason="length" if cut else "stop",
                spans=tuple(spans),
                cached_tokens=self.random.randint(0, len(prepared.input_ids)),
                routing=np.array(rows, dtype=np.uint8) if self.moe else None,
                retractions=0 if self.often() else 1,
            ),
            rows,
        )

    def spoilt(self, good: Completion) -> tuple[Refusal, str, Completion]:
        """A reply that must be refused, why, and the bucket of what was sampled for it."""
        ids, logprobs = good.output_ids, good.logprobs.copy()
        logprobs[self.random.randrange(len(ids))] = self.random.choice([np.nan, np.inf, -np.inf])
        ways = [
            (Refusal.BAD_UPSTREAM, "infra", replace(good, finish_reason="abort")),
            (Refusal.BAD_UPSTREAM, "infra", replace(good, logprobs=good.logprobs + 1000)),
            (Refusal.BAD_UPSTREAM, "infra", replace(good, output_ids=ids + 512)),
            (Refusal.BAD_UPSTREAM, "infra", replace(good, spans=good.spans[:-1])),
            (Refusal.NONFINITE, "nonfinite", replace(good, logprobs=logprobs)),
        ]
        if self.one_version:
            ways += [(Refusal.WRONG_VERSION, "stale", replace(good, spans=((0, len(ids), VERSIONS[0]),)))] * 3
        if good.routing is not None:
            rows = self.random.choice([None, good.routing[1:], good.routing[:, :1]])
            ways += [(Refusal.BAD_ROUTING, "routing_misaligned", replace(good, routing=rows))] * 3
        return self.random.choice(ways)

    def refuse(self, prepared: PreparedTurn, good: Completion) -> None:
        code, bucket, bad = self.spoilt(good)
        self.oracle.dropped[bucket] += len(bad.output_ids)
        counted = {bucket: len(bad.output_ids)}
        refused(self.session, code, ".", lambda: self.session.commit(prepared, bad), **counted)

    # --- one request ---

    def step(self) -> None:
        messages = self.request()
        tools, schemas = (BASH, [BASH_SCHEMA]) if self.often(9) else (TOOLS, [BASH_SCHEMA, EDIT_SCHEMA])
        if self.mode is SessionMode.TREE or self.often(7):
            asked = self.session.read([to_raw(message) for message in messages], orjson.dumps(schemas))
            assert [self.oracle.meaning(m) for m in asked.messages] == [self.oracle.meaning(m) for m in messages]
        else:
            asked = request(messages, tools)
        refusal, base, repeats = self.oracle.place(messages, tools)
        if refusal is not None:
            cut = refusal is Refusal.CUT_TURN
            self.oracle.refused_after_cut += cut
            refused(self.session, refusal, ".", lambda: self.session.prepare(asked), requests_after_cut=int(cut))
            return
        stored = [*base.asked, base.reply] if base else []
        full = [*stored, *messages[len(stored) :]] if repeats is None else repeats.asked
        sent = [*base.context] if base else prompt_ids(full, tools)
        if base:
            sent += [i for m in full[len(stored) :] for i in message_ids(m)] + [START, *text_ids("assistant\n")]
        if len(sent) >= MAX_SEQ_LEN:
            refused(self.session, Refusal.LENGTH, ".", lambda: self.session.prepare(asked))
            return
        prepared = self.session.prepare(asked)
        assert prepared.input_ids.tolist() == sent
        assert prepared.max_new_tokens == min(MAX_NEW, MAX_SEQ_LEN - len(sent))
        assert prepared.routing_from == ((max(len(base.context) - 1, 0) if base else 0) if self.moe else None)
        assert [self.oracle.meaning(m) for m in prepared.plan.messages] == [self.oracle.meaning(m) for m in full]
        self.answer(prepared, full, base, tools)
        if not self.often():
            self.race(prepared, full, base, tools)

    def answer(self, prepared: PreparedTurn, full: list[Message], base: Node | None, tools: Any) -> None:
        good, rows = self.engine(prepared)
        while not self.often():
            self.refuse(prepared, good)
        turn = self.session.commit(prepared, good)
        self.take(prepared, good, rows, turn.reply, full, base, tools)

    def race(self, prepared: PreparedTurn, full: list[Message], base: Node | None, tools: Any) -> None:
        """The same request was on its way a second time."""
        late, rows = self.engine(prepared)
        if not self.often(5):
            self.refuse(prepared, late)
        if self.mode is SessionMode.TREE:
            self.take(prepared, late, rows, self.session.commit(prepared, late).reply, full, base, tools)
            return
        lost = len(late.output_ids)
        counted = {"after_truncation" if self.oracle.nodes[-1].cut else "duplicate": lost}
        self.oracle.dropped.update(counted)
        refused(self.session, Refusal.LOST_RACE, ".", lambda: self.session.commit(prepared, late), **counted)

    def take(
        self,
        prepared: PreparedTurn,
        answer: Completion,
        rows: list[Any],
        reply: Message,
        full: list[Message],
        base: Node | None,
        tools: Any,
    ) -> None:
        sent, sampled = prepared.input_ids.tolist(), answer.output_ids.tolist()
        held = base.logprobs if base else []
        spans = [(a + len(sent), b + len(sent), version) for a, b, version in answer.spans]
        written = [1] * (len(sampled) - 1)
        if answer.retractions and len(spans) > 1:
            written = [2 if len(sent) + i < spans[-1][0] else 1 for i in range(len(written))]
        elif answer.retractions:
            written = [3] * len(written)
        forward = list(base.forward) if base else []
        self.oracle.nodes.append(
            Node(
                number=len(self.oracle.nodes),
                parent=base,
                asked=full,
                reply=reply,
                tools=tools,
                context=sent + sampled,
                prompt=len(sent),
                logprobs=held + [0.0] * (len(sent) - len(held)) + answer.logprobs.tolist(),
                rows=(base.rows if base else []) + rows,
                forward=forward + [0] * (len(sent) - len(forward)) + written,
                spans=spans,
                cut=answer.finish_reason == "length",
            )
        )

    # --- samples ---

    def check(self) -> None:
        oracle, session = self.oracle, self.session
        assert [turn.ids.tolist() for turn in session.turns] == [
            node.context[len(node.parent.context) if node.parent else 0 :] for node in oracle.nodes
        ]
        assert session.requests_after_cut == oracle.refused_after_cut
        total = sum(node.sampled for node in oracle.nodes) + sum(oracle.dropped.values())
        assert session.sampled_tokens == total
        if not oracle.nodes:
            return
        parents = [node.parent for node in oracle.nodes]
        leaves = [node for node in oracle.nodes if node not in parents]
        latest = {id(leaf.line()[0]): leaf for leaf in leaves}
        picked = {
            Pick.LAST: [oracle.nodes[-1]],
            Pick.ROOTS: [leaf for leaf in leaves if leaf in latest.values()],
            Pick.ALL: leaves,
        }
        for pick, kept in picked.items():
            if self.mode is SessionMode.LINEAR:
                kept = [oracle.nodes[-1]]
            samples = merge(snapshot(session), pick)
            self.check_samples(samples, kept, total)

    def check_samples(self, samples: Sequence[MergedSample], kept: list[Node], total: int) -> None:
        assert len(samples) == len(kept)
        trained: list[Node] = []
        for sample, leaf in zip(samples, kept, strict=True):
            mine = [node for node in leaf.line() if node not in trained]
            trained += mine
            mask = [0] * len(leaf.context)
            for node in mine:
                mask[node.prompt : len(node.context)] = [1] * node.sampled
            assert sample.tokens.tolist() == leaf.context
            assert sample.loss_mask.tolist() == mask
            assert sample.logprobs.tolist() == [p * m for p, m in zip(leaf.logprobs, mask, strict=True)]
            assert sample.version_spans == [span for node in mine for span in node.spans]
            assert (sample.truncated, sample.turns) == (leaf.cut, len(leaf.line()))
            assert (sample.routing is None) == (sample.row_forward is None) == (not self.moe)
            if sample.routing is not None and sample.row_forward is not None:
                assert sample.routing.tolist() == leaf.rows
                assert sample.row_forward.tolist() == leaf.forward
        dropped = sum(node.sampled for node in self.oracle.nodes if node not in trained)
        assert samples[0].dropped == self.oracle.dropped + Counter(prefix_break=dropped)
        assert not any(sample.dropped for sample in samples[1:])
        if self.mode is SessionMode.LINEAR:
            assert self.session.describe()["dropped"] == samples[0].dropped
        counts = [LeafCounts.of(sample).check("k") for sample in samples]
        assert sum(leaf.sampled_tokens for leaf in counts) == total
        assert sum(leaf.trainable + sum(leaf.dropped.values()) for leaf in counts) == total
        self.check_travel(samples, counts)

    def check_travel(self, samples: Sequence[MergedSample], counts: list[LeafCounts]) -> None:
        data = encode_samples(samples)
        back = decode_samples(data, "k")
        for one, other in zip(samples, back, strict=True):
            wire, found = one.to_wire(), other.to_wire()
            assert wire.keys() == found.keys()
            assert all(np.array_equal(wire[name], found[name]) for name in wire)
        assert [LeafCounts.of(sample) for sample in back] == counts
        ref = SampleRef("k/x.msgpack", "0" * 64, len(data), tuple(counts))
        assert SampleRef.from_wire(unpack(pack(ref.to_wire()), "k"), "k") == ref


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 60), st.integers(1, 12))
def test_a_session_does_what_the_oracle_does(seed: int, requests: int) -> None:
    agent = RandomAgent(seed)
    for _ in range(requests):
        agent.step()
    agent.check()


# --- whatever arrives is read or refused ---


def code_of(call: Callable[[], Any]) -> Refusal | None:
    """Why a call is refused; None when it is not. Anything else it raises fails the test."""
    try:
        call()
    except SessionRefusal as error:
        return error.code
    return None


KEYS = ["role", "content", "tool_calls", "tool_call_id", "function", "name", "arguments", "type", "text", "id"]
KEYS += ["reasoning_content", "parameters", "properties", "required"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda c: st.lists(c, max_size=3) | st.dictionaries(st.sampled_from(KEYS), c, max_size=4),
    max_leaves=12,
)
NEARLY = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
    optional={"content": JSON, "tool_calls": JSON, "tool_call_id": JSON, "name": JSON, "reasoning_content": JSON},
)
NEARLY_A_TOOL = st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": st.text(max_size=3)})}) | JSON


@settings(max_examples=80, deadline=None)
@given(st.lists(JSON | NEARLY, max_size=4))
def test_any_json_is_messages_or_a_refusal(raws: list[Any]) -> None:

    def read() -> tuple[Message, ...]:
        messages = tuple(m for i, raw in enumerate(raws) for m in openai_message(raw, f"messages[{i}]"))
        check_sequence(messages)
        return messages

    code = code_of(read)
    assert code in (None, Refusal.BAD_BODY)
    if code is None:
        messages = read()
        assert messages[-1].role in ("user", "tool")
        template().render_prompt(messages, BASH)
        again = tuple(m for raw in map(to_raw, messages) for m in openai_message(orjson.loads(raw), "again"))
        assert [replace(m, reasoning=None) for m in messages] == list(again)


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=12), st.binary(max_size=12) | st.none())
def test_any_bytes_are_a_request_or_a_refusal(raw: bytes, tools: bytes | None) -> None:
    assert code_of(lambda: new_session().read([raw], tools)) in (None, Refusal.BAD_BODY)


@settings(max_examples=80, deadline=None)
@given(JSON | st.lists(NEARLY_A_TOOL, max_size=3))
def test_any_json_is_tools_or_a_refusal(raw: Any) -> None:
    code = code_of(lambda: parse_tools(raw))
    assert code in (None, Refusal.BAD_BODY)
    if code is None:
        tools = parse_tools(raw)
        assert parse_tools([tool.to_template() for tool in tools]) == tools


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=60), st.integers(0, 3))
def test_any_bytes_are_rows_or_a_refusal(data: Any, rows: int) -> None:
    code = code_of(lambda: decode_rows(data, SHAPE, rows))
    assert code in (None, Refusal.BAD_ROUTING)
    if code is None:
        assert decode_rows(data, SHAPE, rows).shape == (rows, SHAPE.layers, SHAPE.top_k)


@functools.cache
def _object() -> bytes:
    mask = np.array([0, 1, 1, 0, 1], np.uint8)
    sample = MergedSample(
        *("a", "g", "t", "s"),
        tokens=np.arange(5, dtype=np.int32),
        loss_mask=mask,
        logprobs=-mask.astype(np.float32),
        version_spans=[(1, 3, "v"), (4, 5, "v")],
        sampled_tokens=5,
        dropped={"infra": 2},
        truncated=False,
        turns=2,
        routing_pieces=(np.ones((4, 2, 2), np.uint8),),
        row_forward=np.ones(4, np.uint8),
    )
    return encode_samples((sample.check("k"),))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=3), st.integers(-8, 8))
def test_a_damaged_object_is_read_whole_or_refused(flips: list[tuple[int, int]], resize: int) -> None:
    data = bytearray(_object())
    for where, value in flips:
        data[where % len(data)] = value
    damaged = bytes(data[: len(data) + resize] if resize < 0 else data + bytes(resize))
    try:
        samples = decode_samples(damaged, "k")
    except CorruptObject as error:
        told = str(error)
    else:
        told = "object k: whole"
        for sample in samples:
            LeafCounts.of(sample.check("k")).check("k")
    assert told.startswith("object k: ") and "\n" not in told


# --- bodies: read in parts as they would be read whole ---

small_json = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(alphabet='a,"\\[{:é', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='a"\\,', max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


def _counted(text: str) -> int:
    """Commas and openings outside strings, one character at a time."""
    found, quoted, escaped = 0, False, False
    for character in text:
        if quoted:
            quoted = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            quoted = True
        else:
            found += character in ",[{"
    return found


@given(value=st.lists(small_json, min_size=1, max_size=8), step=st.integers(2, 40), ascii_only=st.booleans())
def test_values_are_counted_outside_strings_wherever_the_steps_end(
    value: list[Any], step: int, ascii_only: bool
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    found = _counted(text)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(messages_module, "_STEP", step)
        for most in (found - 1, found):
            patched.setattr(messages_module, "MAX_VALUES", most)
            assert messages_module.too_many_values(text.encode()) == (most < found and len(text.encode()) > step)


@example(history=[[]], more=[None], other=[None, []], shape="twice", style={"separators": (",", ":")})
@given(
    history=st.lists(small_json.filter(lambda value: value is not None), min_size=1, max_size=5),
    more=st.lists(small_json, max_size=2),
    other=st.lists(small_json, max_size=2),
    shape=st.sampled_from(["first", "last", "nested", "twice", "named", "absent"]),
    style=st.sampled_from([{"separators": (",", ":")}, {}, {"indent": 1}]),
)
def test_a_body_cut_at_what_is_known_reads_as_the_whole_one(
    history: list[Any], more: list[Any], other: list[Any], shape: str, style: dict[str, Any]
) -> None:
    def written(messages: list[Any]) -> bytes:
        listed, rest = {"messages": messages}, {"model": 'x"messages', "seed": 1, "metadata": {"messages": other}}
        bodies = {
            "first": {**listed, **rest},
            "last": {"seed": 2, "metadata": [1], **listed},
            "nested": {**rest, **listed},
            "named": {'x\\"messages': history, **listed},
            "absent": rest,
        }
        text = json.dumps(bodies.get(shape, bodies["first"]), ensure_ascii=False, **style)
        return (text[:-1] + f',"messages":{json.dumps(other)}}}' if shape == "twice" else text).encode()

    def read(data: bytes, known: tuple[bytes, ...] = ()) -> Any:
        try:
            return wire.split(data, known)
        except SessionRefusal as refusal:
            return refusal.code

    first = read(written(history))
    assume(not isinstance(first, Refusal))
    held = tuple(first[0])
    for data in (written(history), written([*history, *more]), written([*history[:-1], *more, {}]), written(other)):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(wire, "_CUT_BYTES", 0)
            known, rest = wire.cut(data, held)
        found, whole = read(rest, known), read(data)
        assert found == whole or (shape == "twice" and known and found is Refusal.BAD_BODY)
        # an Anthropic body has its system prompt elsewhere: what it begins with may be held from the second on
        assert known in (held[: len(known)], held[1 : 1 + len(known)]) and (known or rest is data)
