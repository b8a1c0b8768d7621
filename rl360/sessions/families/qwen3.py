"""Family `qwen3`: Qwen3 and Qwen3-MoE checkpoints that think on request (`enable_thinking`).

Their own template is not append-only: it drops the thinking of turns before the last user message, adds an empty
thinking block to some of them, and writes a line break after `<|im_end|>`, which the model never samples. Here every
turn keeps the thinking it had, and the line break opens the next message. With thinking off, the empty block belongs to
the prompt of every turn, and reasoning of earlier turns is not rendered. Calls are `{"name", "arguments"}` objects;
what the arguments mean is the agent's to judge. Checkpoints that never or always think (Instruct-2507, Thinking-2507)
and Qwen3-Coder write other formats and are not recognised.
"""

from __future__ import annotations

from collections.abc import Sequence

from rl360.sessions.families.base import CALL_CLOSE, CALL_OPEN, Family, ParsedCall, Piece, Pieces, find, plain
from rl360.sessions.messages import Tool, json_object

THINK, UNTHINK = "<think>", "</think>"


def read_call(inside: Sequence[Piece], tools: dict[str, Tool]) -> ParsedCall | None:
    """The JSON object between the call tokens."""
    value = json_object(plain(inside))
    if value is None or value.keys() != {"name", "arguments"}:
        return None
    name, arguments = value["name"], value["arguments"]
    known = isinstance(name, str) and name in tools and isinstance(arguments, dict)
    return ParsedCall(name, arguments) if known else None


def split_reasoning(pieces: Pieces) -> tuple[str | None, Pieces] | None:
    """`<think>\\n…\\n</think>\\n\\n` at the start of a turn."""
    if not pieces or pieces[0] != Piece(True, THINK):
        return None, pieces
    close = find(pieces, UNTHINK)
    text = plain(pieces[1:close]) if close > 0 else None
    if text is None:
        return None
    rest = pieces[close + 1 :]
    if rest and not rest[0].token:
        said = rest[0].text
        rest = [Piece(False, said[2:] if said.startswith("\n\n") else said.removeprefix("\n")), *rest[1:]]
    return text.removeprefix("\n").removesuffix("\n"), rest


def trim(content: str, called: bool) -> str:
    """Without the line break before the first call."""
    return content.removesuffix("\n") if called else content


FAMILY = Family(
    name="qwen3",
    about="ends a message with <|im_end|>, a line break opens the next; JSON calls; thinking on or off",
    template_file="qwen3.jinja",
    model_types=frozenset({"qwen3", "qwen3_moe"}),
    stock_marks=("enable_thinking", "<tool_response>", '"arguments": '),
    tokens=(
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>", CALL_OPEN, CALL_CLOSE),
        *("<tool_response>", "</tool_response>", THINK, UNTHINK),
    ),
    stops=("<|im_end|>", "<|endoftext|>"),
    read_call=read_call,
    openers=(("<|im_start|>", "assistant\n"), (UNTHINK, "\n\n")),
    split_reasoning=split_reasoning,
    trim=trim,
    between_calls="\n",
)
