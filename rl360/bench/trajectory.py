"""One synthetic trajectory for every row: a coding agent's session, drawn with a fixed seed.

Text is Python's own standard library, cut at random places, under a byte-level BPE of 32,768 tokens trained on it here
(no download; about four characters a token, as for models in use). Lengths are log-normal like those of real agents:
many short turns, a few long ones. Sampled turns are a passage of text and a tool call, ended by the template's stop id.
Turn 2 and the last turn add the very same tokens, so that their costs compare.
"""

from __future__ import annotations

import contextlib
import functools
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rl360.bench.baseline import as_base64
from rl360.bench.shape import Shape
from rl360.sessions.core import Completion, Sampling, Session, SessionSpec
from rl360.sessions.families.base import CALL_CLOSE, CALL_OPEN, ChatTemplate
from rl360.sessions.families.rl360_chat import END, SPECIALS, template_text
from rl360.sessions.messages import Message
from rl360.sessions.routing import RoutingShape, decode_rows

VOCAB_SIZE = 32_768
VERSION = "bench:0"
_CORPUS_CHARS = 4_000_000
_FRAMING_TOKENS = 9  # what the chat template adds around one turn and its observation
_CALL_SHARE = 0.6  # of a sampled turn; the rest is text before the call
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a shell command.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    }
]


def routing_shape(shape: Shape) -> RoutingShape | None:
    """None for a dense model."""
    return RoutingShape(shape.layers, shape.top_k, shape.experts) if shape.layers else None


@dataclass(frozen=True)
class Script:
    """What is said in a trajectory. `observations` has one text fewer than `outputs`; ids are int32 `[sampled]`."""

    opening: tuple[dict[str, Any], ...]
    observations: tuple[str, ...]
    outputs: tuple[np.ndarray, ...]
    logprobs: tuple[np.ndarray, ...]

    def messages(self, turn: int, reply: dict[str, Any] | None) -> list[dict[str, Any]]:
        """What the agent appends for turn `turn` (from 0), given the reply to the turn before."""
        if reply is None:
            return list(self.opening)
        calls = reply.get("tool_calls") or []
        result = {"role": "tool", "content": self.observations[turn - 1], "tool_call_id": calls[0]["id"]}
        return [reply, result]


@functools.cache
def corpus() -> str:
    """Sources of the standard library, in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = "".join(path.read_text("utf-8", errors="replace") for path in sorted(folder.glob("*.py")))
    return text[:_CORPUS_CHARS]


@functools.cache
def tokenizer_json() -> str:
    """The trained tokenizer, special tokens first; about a second of training."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus().splitlines(keepends=True), trainer)
    return tokenizer.to_str()


@contextlib.contextmanager
def model_dir(shape: Shape) -> Iterator[Path]:
    """What a session server reads of a model directory: tokenizer, chat template, and a config with the experts."""
    config: dict[str, Any] = {"vocab_size": VOCAB_SIZE}
    if shape.layers:
        config |= {"num_hidden_layers": shape.layers, "num_experts_per_tok": shape.top_k, "num_experts": shape.experts}
    with tempfile.TemporaryDirectory(prefix="rl360-bench-") as name:
        folder = Path(name)
        (folder / "tokenizer.json").write_text(tokenizer_json())
        (folder / "config.json").write_bytes(orjson.dumps(config))
        (folder / "chat_template.jinja").write_text(template_text())
        yield folder


class _Texts:
    """Passages of the corpus by their number of tokens."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._tokenizer = Tokenizer.from_str(tokenizer_json())
        self.special = {name: self._tokenizer.token_to_id(name) for name in SPECIALS}

    def ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def passage(self, tokens: int) -> str:
        text = corpus()
        start = int(self._rng.integers(0, len(text) - 16 * tokens - 64))
        found = self._tokenizer.encode(text[start : start + 16 * tokens + 64], add_special_tokens=False)
        return text[start : start + found.offsets[tokens - 1][1]]


def _lengths(rng: np.random.Generator, count: int, total: int, low: int) -> np.ndarray:
    """`count` log-normal lengths of at least `low` that sum to about `total`; the first and the last are alike."""
    drawn = rng.lognormal(0.0, 0.9, count)
    drawn[0] = drawn[-1] = np.median(drawn)
    return np.maximum(low, np.rint(drawn * total / drawn.sum())).astype(int)


def draw(shape: Shape, seed: int = 0) -> Script:
    """The trajectory of this shape and seed."""
    rng = np.random.default_rng(seed)
    texts = _Texts(rng)
    observed = shape.tokens - shape.opening - shape.sampled - _FRAMING_TOKENS * shape.turns
    system = "You are a coding agent. Work in the repository with the tool bash until the task is done."
    opening = (
        {"role": "system", "content": system},
        {"role": "user", "content": texts.passage(max(8, shape.opening - 40))},
    )
    later = shape.turns - 1
    observations = [texts.passage(n) for n in _lengths(rng, later, observed, 4)] if later else []
    outputs = [_sampled(texts, n) for n in _lengths(rng, later, shape.sampled * later // shape.turns, 12)]
    outputs.insert(0, _sampled(texts, max(12, shape.sampled // shape.turns)))
    if later > 1:
        observations[-1], outputs[-1] = observations[0], outputs[1]
    logprobs = [-rng.gamma(0.3, 1.0, len(ids)).astype(np.float32) for ids in outputs]
    return Script(opening, tuple(observations), tuple(outputs), tuple(logprobs))


def _sampled(texts: _Texts, tokens: int) -> np.ndarray:
    """Ids of one turn: a passage, then one call of the tool with a passage as its command."""
    call = max(4, int(_CALL_SHARE * (tokens - 6)))
    said = texts.ids(texts.passage(max(1, tokens - 6 - call)).strip())
    command = texts.ids("bash\n" + texts.passage(call).strip())
    special = texts.special
    return np.array([*said, special[CALL_OPEN], *command, special[CALL_CLOSE], special[END]], dtype=np.int32)


def draw_routing(shape: Shape, rows: int, seed: int = 0) -> np.ndarray:
    """Experts of every position, uint8 `[rows, layers, top_k]`: evenly spread, no expert twice in a layer."""
    rng = np.random.default_rng([seed, 1])
    gaps = rng.integers(1, max(2, shape.experts // shape.top_k), (rows, shape.layers, shape.top_k), dtype=np.uint8)
    gaps[..., 0] = rng.integers(0, shape.experts, (rows, shape.layers), dtype=np.uint8)
    np.cumsum(gaps, axis=2, dtype=np.uint8, out=gaps)
    return gaps if shape.experts == 256 else gaps % np.uint8(shape.experts)


def new_session(shape: Shape, template: ChatTemplate, attempt_id: str = "s000000-g000-a00-t0") -> Session:
    """An empty session that a trajectory of this shape fits."""
    spec = SessionSpec(
        attempt_id=attempt_id,
        group_id=attempt_id.rsplit("-a", 1)[0],
        task_id="bench",
        sampling=SAMPLING,
        max_seq_len=2 * shape.tokens + 4096,
        expected_weight_version=VERSION,
    )
    return Session("bench", spec, template, 1 << 30, routing=routing_shape(shape))


SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=8192)


@dataclass(frozen=True)
class Played:
    """A session after its last turn. `edges`: (prompt end, end) by turn; `engine_bytes`: routing that the engine sent
    for it, as base64 text; `routing`: what was drawn, uint8 `[tokens - 1, layers, top_k]`."""

    session: Session
    edges: list[tuple[int, int]]
    engine_bytes: int
    routing: np.ndarray | None


def play(shape: Shape, script: Script, session: Session) -> Played:
    """Take a session through its turns in this process, the engine's routing through its wire form."""
    experts = routing_shape(shape)
    routing = draw_routing(shape, 2 * shape.tokens + 4096) if experts else None
    tools, raws, reply, sent = orjson.dumps(TOOLS), [], None, 0
    edges: list[tuple[int, int]] = []
    for turn, output in enumerate(script.outputs):
        raws += [orjson.dumps(message) for message in script.messages(turn, reply)]
        prepared = session.prepare(session.read(raws, tools))
        end = len(prepared.input_ids) + len(output)
        rows = None
        if experts and routing is not None and prepared.routing_from is not None:
            text = as_base64(routing[prepared.routing_from : end - 1])
            sent += len(text)
            rows = decode_rows(text, experts, end - 1 - prepared.routing_from)
        completion = Completion(
            output_ids=output,
            logprobs=script.logprobs[turn],
            finish_reason="stop",
            spans=((0, len(output), VERSION),),
            cached_tokens=edges[-1][1] - 1 if edges else 0,
            routing=rows,
        )
        reply = echo(session.commit(prepared, completion).reply)
        edges.append((len(prepared.input_ids), end))
    return Played(session, edges, sent, None if routing is None else routing[: edges[-1][1] - 1])


def echo(reply: Message) -> dict[str, Any]:
    """A reply as the agent sends it back in its history."""
    calls = [call.to_openai() for call in reply.tool_calls]
    return {"role": "assistant", "content": reply.content or None, "tool_calls": calls}
