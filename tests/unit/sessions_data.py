"""A small tokenizer and model directory, messages and engine replies for the session tests; nothing random."""

from __future__ import annotations

import functools
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rl360.ledger.outcomes import DROPPED
from rl360.sessions.core import Session
from rl360.sessions.families.base import ChatTemplate
from rl360.sessions.families.registry import load_template
from rl360.sessions.families.rl360_chat import SPECIALS, template_text
from rl360.sessions.messages import Message, Tool, parse_tools
from rl360.sessions.refusals import Refusal, SessionRefusal
from rl360.sessions.routing import RoutingShape
from rl360.sessions.server import load_matcher
from rl360.sessions.turns import Completion, PreparedTurn, Request, Sampling, SessionSpec, Turn

VERSION = "run:0"
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=48)
BASH_SCHEMA = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
EDIT_SCHEMA = {
    "type": "function",
    "function": {
        "name": "edit",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "line": {"type": "integer"}, "text": {"type": "string"}},
            "required": ["path", "text"],
        },
    },
}
TOOLS: tuple[Tool, ...] = parse_tools([BASH_SCHEMA, EDIT_SCHEMA])
BASH: tuple[Tool, ...] = parse_tools([BASH_SCHEMA])
SHAPE = RoutingShape(layers=3, top_k=2, experts=8)
History = tuple[Message, ...]
OPENING: History = (Message("system", "Use bash."), Message("user", "Create hello.txt"))


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE over a fixed corpus with the family's special tokens; every byte has a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [
        "Use bash.\n# bash(command)\nassistant user system tool echo hello > hello.txt cat done ok (exit 1)",
        "\n\n\n\n x\n\n y",
    ] * 20
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def write_model_dir(folder: Path, vocab_size: int = 512) -> Path:
    """What a session server reads of a model directory."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_bytes(orjson.dumps({"vocab_size": vocab_size}))
    (folder / "chat_template.jinja").write_text(template_text())
    return folder


@functools.cache
def template() -> ChatTemplate:
    """The template every test shares (immutable after load)."""
    with tempfile.TemporaryDirectory() as folder:
        return load_template(write_model_dir(Path(folder)))


def spec(**changes: Any) -> SessionSpec:
    fields: dict[str, Any] = {
        "attempt_id": "s000000-g000-a00-t0",
        "group_id": "s000000-g000",
        "task_id": "hello",
        "sampling": SAMPLING,
        "max_seq_len": 1024,
        "expected_weight_version": VERSION,
    }
    return SessionSpec(**{**fields, **changes})


def new_session(
    budget_bytes: int = 1 << 20, *, routing: RoutingShape | None = None, matcher: str = "strict", **changes: Any
) -> Session:
    held = spec(matcher=matcher, **changes)
    return Session("session-1", held, template(), budget_bytes, matcher=load_matcher(matcher), routing=routing)


def request(messages: Sequence[Message], tools: tuple[Tool, ...] = BASH) -> Request:
    """A request as if parsed from nowhere; `raw_request` makes one that a session reads."""
    return Request(tuple(messages), tools)


def to_raw(message: Message) -> bytes:
    """The message as a client of the OpenAI format sends it."""
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        body["tool_calls"] = [call.to_openai() for call in message.tool_calls]
    if message.tool_call_id is not None:
        body["tool_call_id"] = message.tool_call_id
    return orjson.dumps(body)


def raw_request(session: Session, messages: Sequence[Message], tools: Any = (BASH_SCHEMA,)) -> Request:
    return session.read([to_raw(message) for message in messages], orjson.dumps(list(tools)))


def encode_turn(text: str) -> list[int]:
    """Sampled ids of a turn; special tokens written out in `text` are the real ones."""
    return _stock().encode(text, add_special_tokens=False).ids


@functools.cache
def _stock() -> Tokenizer:
    return build_tokenizer()


def completion(
    text: str = "done<|im_end|>", finish: str = "stop", version: str = VERSION, **changes: Any
) -> Completion:
    """An engine's answer; log-probabilities are -1, -2, ... so that a shift shows."""
    ids = np.array(encode_turn(text), dtype=np.int32)
    fields: dict[str, Any] = {
        "output_ids": ids,
        "logprobs": -np.arange(1, len(ids) + 1, dtype=np.float32),
        "finish_reason": finish,
        "spans": ((0, len(ids), version),),
        "cached_tokens": 0,
    }
    return Completion(**{**fields, **changes})


def call_turn(command: str) -> str:
    return f"<tool_call>bash\n{command}</tool_call><|im_end|>"


def take(session: Session, messages: History, text: str = "done<|im_end|>", **changes: Any) -> History:
    """Run one turn; the history the agent now holds."""
    turn = session.commit(session.prepare(request(messages)), completion(text, **changes))
    return (*messages, turn.reply)


def told(history: History, text: str = "a.txt") -> History:
    return (*history, Message("tool", text))


def two_turns(**changes: Any) -> tuple[Session, History]:
    session = new_session(**changes)
    return session, take(session, told(take(session, OPENING, call_turn("ls"))))


def context(session: Session, turn: Turn | None = None) -> list[int]:
    """The ids on the path of a turn, joined by hand."""
    turn = session.turns[-1] if turn is None else turn
    before = [] if turn.parent is None else context(session, session.turns[turn.parent])
    return before + turn.ids.tolist()


def rows_of(start: int, end: int, seed: int = 0) -> np.ndarray:
    """Routed experts of positions [start, end) under `SHAPE`; a row names its position, so that a shift shows."""
    at = np.arange(start, end)[:, None, None] * 7 + np.arange(3)[None, :, None] * 3 + np.arange(2)[None, None, :]
    return ((at + seed) % SHAPE.experts).astype(SHAPE.dtype)


def routed(prepared: PreparedTurn, answer: Completion, seed: int = 0) -> Completion:
    """The answer with the rows of routed experts that were asked for."""
    assert prepared.routing_from is not None
    end = len(prepared.input_ids) + len(answer.output_ids)
    return replace(answer, routing=rows_of(prepared.routing_from, end - 1, seed))


def state_of(session: Session) -> dict[str, Any]:
    """Everything a session holds, detached from it: what a refused request must leave alone."""
    state = {}
    for name, value in vars(session).items():
        if isinstance(value, dict):
            value = {key: list(item) if isinstance(item, list) else item for key, item in value.items()}
        elif isinstance(value, list | deque):
            value = list(value)
        state[name] = value
    contents = [(turn.ids.tobytes(), turn.logprobs.tobytes(), turn.new_messages, turn.reply) for turn in session.turns]
    return {**state, "contents": contents, "held_bytes": session.held_bytes}


def refused(session: Session, code: Refusal, match: str, call: Callable[[], Any], **counted: int) -> None:
    """`call` is refused and changes nothing. Told of it, the session books what is `counted`, counter or bucket of
    sampled tokens -> its growth, and nothing else."""
    before = state_of(session)
    with pytest.raises(SessionRefusal, match=match) as caught:
        call()
    assert caught.value.code is code
    assert state_of(session) == before
    session.count_refused(caught.value)
    tokens = {name: counted.pop(name) for name in (*counted,) if name in DROPPED}
    grown = {**counted, "sampled_tokens": sum(tokens.values())}
    after = {**before, **{name: before[name] + growth for name, growth in grown.items()}}
    assert state_of(session) == {**after, "dropped": Counter(before["dropped"]) + Counter(tokens)}
