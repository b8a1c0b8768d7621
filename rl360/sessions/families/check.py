"""Is a chat template append-only? Checked on ids, over many shapes of conversation, without an engine.

A session sends prompt ids, keeps the sampled ids and appends deltas. That is the training context only if, turn by
turn, prompt + sampled reply + delta are the very ids a full render of the longer conversation gives. `check_template`
demands that of a family with a model's tokenizer; `check_stock` asks it of the template a model directory ships.
Findings name the shape, the turn and the first place that differs, in words.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from rl360.errors import BadInput
from rl360.sessions.families.base import ChatTemplate, jinja_environment
from rl360.sessions.messages import Message, Tool, ToolCall, parse_tools

_BASH = {"command": {"type": "string", "description": "what to run <b>&</b> é"}}
_EDIT = {
    "path": {"type": "string"},
    "line": {"type": "integer"},
    "marks": {"type": "array"},
    "deep": {"type": "object"},
}
TOOLS = parse_tools(
    [
        {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}
        for name, schema in (
            ("bash", {"type": "object", "properties": _BASH, "required": ["command"]}),
            ("edit", {"type": "object", "properties": _EDIT, "required": ["path"]}),
        )
    ]
)


@dataclass(frozen=True)
class Shape:
    """One conversation that starts with a user message and holds at least one reply."""

    name: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    thinking: bool

    def turns(self) -> Iterator[tuple[int, int]]:
        """(index of a reply, index after the messages that follow it)."""
        replies = [i for i, message in enumerate(self.messages) if message.role == "assistant"]
        yield from zip(replies, [*replies[1:], len(self.messages)], strict=True)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, with its place."""

    shape: str
    turn: int
    problem: str


@dataclass
class Report:
    """How much was looked at and what was found. `never_sampled`: what a model's own template writes after a reply."""

    shapes: int = 0
    turns: int = 0
    findings: list[Finding] = field(default_factory=list)
    never_sampled: set[str] = field(default_factory=set)

    @property
    def failing(self) -> int:
        """Shapes with a finding."""
        return len({finding.shape for finding in self.findings})


def _call(name: str = "bash", **arguments: object) -> ToolCall:
    return ToolCall.make("call_0", name, arguments)


def _says(content: str = "", *calls: ToolCall, reasoning: str | None = None) -> Message:
    return Message("assistant", content, calls, reasoning=reasoning)


def _conversations(special: str) -> dict[str, tuple[Message, ...]]:
    """`special` spells every token of the family, as plain characters."""
    user, tool = partial(Message, "user"), partial(Message, "tool")
    edit = _call("edit", path="a/<b>&'\"", line=3, marks=[1, 2.5, None, True, "x"], deep={"k": {"é": []}})
    odd = " \u200b é 漢 🙂 \u00a0 e\u0301 \r\n\ttab  "
    strange = f"{special} a{special}b \ufdd0{special}"
    hard = _call(command=strange)
    loop = (user("go"), _says("", _call(command="ls")), tool("a\nb\n"), _says("", _call(command="pwd")), tool("/"))
    return {
        "questions": (user("hi"), _says("hello"), user("more"), _says("bye"), user("again")),
        "tool loop": (*loop, _says("done"), user("thanks")),
        "parallel calls": (user("go"), _says("", _call(command="ls"), edit, _call(command="")), *map(tool, "abc")),
        "text before calls": (user("go"), _says("Look:", _call(command="ls"), _call(command="w")), tool("x"), tool("")),
        "several user messages": (user("a"), user("b"), _says("c"), user("d"), user("e"), user("f")),
        "results, then a user": (user("a"), _says("", _call(command="x")), tool("1"), user("b"), _says("c"), user("d")),
        "retry after an error": (*loop[:2], tool("error: timed out"), *loop[1:3], _says("ok"), user("next")),
        "no result for a call": (*loop[:2], user("never mind"), _says("fine"), user("next")),
        "empty content": (user(""), _says(""), user(""), _says("", _call(command="")), tool(""), _says(""), user("")),
        "special tokens as text": (
            *(user(strange), _says(strange, hard, _call("edit", path="p", deep={strange: strange}))),
            *(tool(strange), tool(strange), _says("ok"), user(strange)),
        ),
        "unicode": (user(odd), _says(odd, _call(command=odd)), tool(odd), _says(odd.strip()), user(odd)),
        "line breaks first": (user("a"), _says("\n\n b\n"), user("c"), _says("\n", _call(command="\n")), tool("")),
        "white space only": (user("a"), _says(" "), user("b"), _says("\n"), user("c"), _says("\t\n \n"), user("d")),
        "thinking": (
            user("a"),
            _says("b", reasoning="one\n\ntwo"),
            user("c"),
            _says("d", reasoning="three"),
            user("e"),
        ),
        "thinking between calls": (
            *(user("a"), _says("", _call(command="x"), reasoning="first"), tool("1")),
            *(_says("so", _call(command="y"), reasoning="\nthen\n"), tool("2"), user("b"), _says("c"), user("d")),
        ),
        "empty thinking": (user("a"), _says("b", reasoning=""), user("c"), _says("\n", reasoning=" "), user("d")),
        "long": (user("start"), *(_says("", _call(command="x")), tool("y")) * 12),
    }


def shapes(special: str, modes: Sequence[bool]) -> Iterator[Shape]:
    """Every conversation with and without a system message and tools, in every thinking mode."""
    for (name, messages), system, tools, thinking in product(_conversations(special).items(), (0, 1), (0, 1), modes):
        extras = [text for text, on in (("system", system), ("tools", tools), ("thinking on", thinking)) if on]
        opening = (Message("system", f"Rules {special}"),) if system else ()
        yield Shape(", ".join([name, *extras]), (*opening, *messages), TOOLS if tools else (), thinking)


def difference(held: list[int], full: list[int], template: ChatTemplate) -> str | None:
    """Where and how the ids a session holds depart from a full render; None when they do not."""
    if held == full:
        return None
    pairs = zip(held, full, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(held), len(full)))
    before = template.decode(full[max(0, place - 6) : place])
    ours, theirs = template.decode(held[place : place + 20]), template.decode(full[place : place + 20])
    if ours == theirs:  # other ids for the same characters
        ours, theirs = f"{ours} {held[place : place + 3]}", f"{theirs} {full[place : place + 3]}"
    return f"at id {place}, after {before!r}, the session holds {ours[:60]!r}, the longer conversation {theirs[:60]!r}"


def check_template(template: ChatTemplate) -> Report:
    """Every shape, turn by turn: held ids equal the full render, each reply ends with one stop id and is read back."""
    report = Report()
    for shape in shapes("".join(template.tokens), template.thinking_modes):
        report.shapes += 1
        held: list[int] = []
        for number, (at, end) in enumerate(shape.turns(), start=1):
            report.turns += 1
            try:
                problem = _check_turn(template, shape, at, end, held)
            except BadInput as error:
                problem = str(error)
            if problem:
                report.findings.append(Finding(shape.name, number, problem))
                break
    return report


def _check_turn(template: ChatTemplate, shape: Shape, at: int, end: int, held: list[int]) -> str | None:
    """Grow `held` by one turn, as a session does; what is wrong with it, or None."""
    messages, thinking = shape.messages, shape.thinking
    if not held:
        held.extend(template.render_prompt(messages[:at], shape.tools, thinking).tolist())
    reply = template.render_reply(messages[at], thinking, followed_by=messages[at + 1].role).tolist()
    if [i for i in reply if i in template.stop_ids] != reply[-1:]:
        return f"a rendered reply is {template.decode(reply)[-60:]!r} and does not end with its only stop id"
    parsed = template.parse_assistant(reply, TOOLS, thinking)
    again = parsed.message()
    same = template.render_reply(again, thinking, messages[at + 1].role).tolist() == reply
    if parsed.format_errors or not same or _said(again) != _said(messages[at]):
        return f"a rendered reply is read as {str(parsed)[:200]}"
    held += reply + template.render_delta(reply[-1], messages[at + 1 : end], thinking).tolist()
    return difference(held, template.render_prompt(messages[:end], shape.tools, thinking).tolist(), template)


def _said(message: Message) -> str:
    """Content and calls, in the normal form that a tokenizer may write text in."""
    calls = [(call.name, call.arguments_key) for call in message.tool_calls]
    return unicodedata.normalize("NFC", f"{message.content} {calls}")


def check_stock(jinja_text: str, tokenizer_path: Path, template: ChatTemplate) -> Report:
    """The same question to a model's own template: is the prompt of each turn, and the reply the template itself
    writes after it, what the next prompt begins with?"""
    try:
        compiled = jinja_environment(ImmutableSandboxedEnvironment).from_string(jinja_text)
    except TemplateError as error:
        raise BadInput(f"the model's chat template does not compile: {error}") from None
    tokenizer = Tokenizer.from_file(str(tokenizer_path))

    def render(shape: Shape, end: int, generation: bool) -> list[int]:
        text = compiled.render(
            messages=[message.to_template() for message in shape.messages[:end]],
            tools=[tool.to_template() for tool in shape.tools] or None,
            add_generation_prompt=generation,
            enable_thinking=shape.thinking,
        )
        return tokenizer.encode(text, add_special_tokens=False).ids

    report = Report()
    for shape in shapes("", template.thinking_modes):
        report.shapes += 1
        for number, (at, end) in enumerate(shape.turns(), start=1):
            report.turns += 1
            try:
                prompt, spoken, longer = render(shape, at, True), render(shape, at + 1, False), render(shape, end, True)
            except TemplateError as error:
                report.findings.append(Finding(shape.name, number, f"the template refuses it: {error}"))
                break
            stop = next((i for i in range(len(prompt), len(spoken)) if spoken[i] in template.stop_ids), len(spoken) - 1)
            held = prompt + spoken[len(prompt) : stop + 1]
            problem = difference(prompt, spoken[: len(prompt)], template) or difference(
                held, longer[: len(held)], template
            )
            if stop + 1 < len(spoken):
                report.never_sampled.add(template.decode(spoken[stop + 1 :]))
            if problem:
                report.findings.append(Finding(shape.name, number, problem))
                break
    return report
