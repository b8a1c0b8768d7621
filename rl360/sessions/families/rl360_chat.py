"""Family `rl360-chat`: the laptop policy's own short format.

Nothing stands between `<|im_end|>` and the next `<|im_start|>`. A call with one string argument carries it raw, any
other a compact JSON object; reading a sampled call, raw text is taken for tools with exactly one parameter, a string.
Unknown tools and unknown or missing parameters are malformed calls. No thinking.
"""

from __future__ import annotations

from collections.abc import Sequence

from rl360.sessions.families.base import CALL_CLOSE, CALL_OPEN, Family, ParsedCall, Piece, plain
from rl360.sessions.messages import Tool, json_object

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (PAD, START, END, CALL_OPEN, CALL_CLOSE)


def read_call(inside: Sequence[Piece], tools: dict[str, Tool]) -> ParsedCall | None:
    """`name newline args` to a call."""
    text = plain(inside)
    name, newline, rest = (text or "").partition("\n")
    tool = tools.get(name)
    if not newline or tool is None:
        return None
    if tool.raw_parameter is not None:
        return ParsedCall(name, {tool.raw_parameter: rest})
    arguments = json_object(rest)
    allowed = {parameter for parameter, _kind in tool.parameters}
    if arguments is None or not tool.required <= set(arguments) <= allowed:
        return None
    return ParsedCall(name, arguments)


FAMILY = Family(
    name="rl360-chat",
    about="ends a message with <|im_end|>, nothing before the next; calls as name, newline, arguments; no thinking",
    template_file="rl360_chat.jinja",
    model_types=frozenset(),  # recognised by its template alone
    stock_marks=(),
    tokens=SPECIALS,
    stops=(END,),
    read_call=read_call,
    openers=((START, "assistant\n"),),
)


def template_text() -> str:
    """The packaged `chat_template.jinja`; a model directory of this family ships the same bytes."""
    return FAMILY.template_text()
