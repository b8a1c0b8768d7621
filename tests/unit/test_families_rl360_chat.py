"""Family rl360-chat: append-only, no injection, one wording, and parsing back what was sampled."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from rl360.errors import BadInput
from rl360.sessions.families.registry import load_template
from rl360.sessions.families.rl360_chat import SPECIALS, template_text
from rl360.sessions.messages import Message, ToolCall
from tests.unit.sessions_data import (
    BASH,
    OPENING,
    TOOLS,
    build_tokenizer,
    call_turn,
    encode_turn,
    template,
    write_model_dir,
)


def _call(command: str) -> ToolCall:
    return ToolCall.make("call_0", "bash", {"command": command})


CONVERSATIONS = [
    ((Message("user", "hi"),), ()),
    ((Message("user", ""),), BASH),
    (OPENING, ()),
    (OPENING, BASH),
    (OPENING, TOOLS),
    ((*OPENING, Message("assistant", "", (_call("ls"),)), Message("tool", "a\nb\n")), BASH),
    (
        (
            *OPENING,
            Message("assistant", "Look:", (_call("ls"), _call("pwd"))),
            Message("tool", "x"),
            Message("tool", ""),
        ),
        TOOLS,
    ),
    ((Message("user", "é 漢 🙂 \u00a0\r\n\ttab  "), Message("assistant", "done"), Message("user", "more")), ()),
    (
        (
            Message("user", "edit"),
            Message("assistant", "", (ToolCall.make("c", "edit", {"path": "é/<b>&'\"", "line": 3, "text": "a\nb"}),)),
            Message("tool", "ok"),
        ),
        TOOLS,
    ),
]


def test_exact_wording() -> None:
    messages = (*OPENING, Message("assistant", "", (_call("ls -l"),)), Message("tool", "ok"))
    ids = template().render_prompt(messages, BASH)
    assert build_tokenizer().decode(ids.tolist(), skip_special_tokens=False) == (
        "<|im_start|>system\nUse bash.\n# bash(command)<|im_end|><|im_start|>user\nCreate hello.txt<|im_end|>"
        "<|im_start|>assistant\n<tool_call>bash\nls -l</tool_call><|im_end|><|im_start|>tool\nok<|im_end|>"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(("messages", "tools"), CONVERSATIONS)
def test_longer_history_only_appends(messages: tuple, tools: tuple) -> None:
    # a text whose first character has a token together with the header's last one
    assert len(encode_turn("\n\n")) == 1
    longer = (*messages, Message("assistant", "\n x", (_call("ls"),)), Message("tool", "out"), Message("user", "go on"))
    before = template().render_prompt(messages, tools).tolist()
    after = template().render_prompt(longer, tools).tolist()
    sampled = encode_turn("\n x" + call_turn("ls"))
    delta = template().render_delta(2, longer[-2:]).tolist()
    assert after == before + sampled + delta
    assert len(after) > len(before)


def _everywhere(text: str, key: str) -> tuple[Message, ...]:
    call = ToolCall.make("c", "edit", {key: text, "line": 1})
    return (Message("system", text), Message("user", text), Message("assistant", text, (call,)), Message("tool", text))


@pytest.mark.parametrize("special", SPECIALS)
@pytest.mark.parametrize("around", ["{}", "a{}b", "{0}{0}", "\ufdd0{}\ufdd01", "{}\ufdd0"])
def test_special_tokens_in_text_stay_text(special: str, around: str) -> None:
    text = around.format(special)
    stock = build_tokenizer()
    special_ids = {stock.token_to_id(name) for name in SPECIALS}
    ids = template().render_prompt(_everywhere(text, text), ()).tolist()
    plain = template().render_prompt(_everywhere("t", "k"), ()).tolist()
    assert [i for i in ids if i in special_ids] == [i for i in plain if i in special_ids]
    assert stock.decode([i for i in ids if i not in special_ids]).count(text) == 6
    delta = template().render_delta(2, (Message("tool", text),)).tolist()
    assert [i for i in delta if i in special_ids] == [1, 2, 1]


@pytest.mark.parametrize(
    ("sampled", "content", "calls"),
    [
        ("done<|im_end|>", "done", []),
        ("done", "done", []),
        ("<|im_end|>", "", []),
        (call_turn("ls -l\n  | wc"), "", [("bash", {"command": "ls -l\n  | wc"})]),
        ("I see. " + call_turn(""), "I see. ", [("bash", {"command": ""})]),
        (call_turn('{"command":"x"}'), "", [("bash", {"command": '{"command":"x"}'})]),
        (call_turn("a")[:-10] + call_turn("b"), "", [("bash", {"command": "a"}), ("bash", {"command": "b"})]),
        ('<tool_call>edit\n{"path":"p","text":"t"}</tool_call>', "", [("edit", {"path": "p", "text": "t"})]),
    ],
)
def test_parse_well_formed(sampled: str, content: str, calls: list) -> None:
    turn = template().parse_assistant(encode_turn(sampled), TOOLS)
    assert (turn.content, [(c.name, c.arguments) for c in turn.tool_calls], turn.format_errors) == (content, calls, 0)


@pytest.mark.parametrize(
    "sampled",
    [
        "<tool_call>bash\nls",  # never closed
        "<tool_call>bash ls</tool_call>",  # no newline
        "<tool_call>nosuch\nls</tool_call>",
        "</tool_call>",
        "<tool_call><tool_call>bash\nls</tool_call>",
        "<tool_call>bash\nls</tool_call>and then",
        "x<|im_start|>y",
        "<tool_call>bash\nls<|endoftext|></tool_call>",
        "<tool_call>edit\n[1]</tool_call>",
        "<tool_call>edit\n{</tool_call>",
        '<tool_call>edit\n{"path":"p"}</tool_call>',  # text is required
        '<tool_call>edit\n{"path":"p","text":"t","mode":1}</tool_call>',
        '<tool_call>edit\n{"path":"p","text":"t","line":1e999}</tool_call>',
        '<tool_call>edit\n{"path":"p","text":' + "[" * 400 + "]" * 400 + "}</tool_call>",
    ],
)
def test_malformed_calls_are_content_and_counted(sampled: str) -> None:
    turn = template().parse_assistant(encode_turn(sampled + "<|im_end|>"), TOOLS)
    assert turn.tool_calls == ()
    assert turn.content == sampled
    assert turn.format_errors == 1


def test_ids_the_tokenizer_lacks_decode_to_nothing() -> None:
    assert template().parse_assistant([511, *encode_turn("ok<|im_end|>")], ()).content == "ok"
    assert template().textless([511, 5, 511]) == 2


def test_delta_refuses_other_roles() -> None:
    with pytest.raises(BadInput, match="assistant"):
        template().render_delta(2, (Message("assistant", "x"),))
    with pytest.raises(BadInput, match="none"):
        template().render_delta(2, ())


def test_load_refuses_with_the_reason(tmp_path: Path) -> None:
    folder = write_model_dir(tmp_path / "model")
    load_template(folder)
    (folder / "chat_template.jinja").write_text("{#- family: chatml-think -#}{{ messages }}")
    with pytest.raises(
        BadInput, match="names family chatml-think and is not a template of this rl360; copy one of rl360-chat"
    ):
        load_template(folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(BadInput, match=r"no known family \(rl360-chat: needs its own chat_template.jinja"):
        load_template(folder)
    (folder / "chat_template.jinja").write_text(template_text())
    (folder / "config.json").write_bytes(orjson.dumps({"vocab_size": 10}))
    with pytest.raises(BadInput, match="vocab_size 10 is below"):
        load_template(folder)
    (folder / "config.json").write_bytes(orjson.dumps({"vocab_size": 512}))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(BadInput, match="not a tokenizers file"):
        load_template(folder)


def test_load_refuses_tokenizers_that_would_break_the_rules(tmp_path: Path) -> None:
    folder = write_model_dir(tmp_path / "model")
    raw = orjson.loads((folder / "tokenizer.json").read_bytes())

    def refused(reason: str, **changes: object) -> None:
        (folder / "tokenizer.json").write_bytes(orjson.dumps({**raw, **changes}))
        with pytest.raises(BadInput, match=reason):
            load_template(folder)

    spaced = {**raw["pre_tokenizer"], "add_prefix_space": True}
    refused("as plain text", pre_tokenizer=spaced)
    refused("as plain text", normalizer={"type": "Lowercase"})
    tokens = [{**t, "content": t["content"].replace("<tool_call>", "<call>")} for t in raw["added_tokens"]]
    refused("lacks the tokens", added_tokens=tokens)
    stripping = [{**t, "lstrip": True} for t in raw["added_tokens"]]
    refused("differently", added_tokens=stripping)
