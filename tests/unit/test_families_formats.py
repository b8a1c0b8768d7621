"""Families qwen3 and glm4: their wording and ids by hand, what follows a turn, and reading what was sampled."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from rl360.errors import BadInput
from rl360.sessions.families import base
from rl360.sessions.families.base import ParsedTurn
from rl360.sessions.families.check import TOOLS, shapes
from rl360.sessions.families.registry import FAMILIES
from rl360.sessions.messages import Message, ToolCall, parse_tools
from rl360.sessions.refusals import Refusal, SessionRefusal
from tests.unit.families_data import family_template, stock_tokenizer, token_ids
from tests.unit.late import Late

transformers = Late("transformers")
BASH = parse_tools([{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}])
BASH_TEXT = '{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}'
LS = ToolCall.make("c", "bash", {"command": "ls"})
EDIT = ToolCall.make("c", "edit", {"path": "3", "line": 3})
HISTORY = (
    Message("system", "Be brief."),
    Message("user", "go"),
    Message("assistant", "Look:", (LS, EDIT), reasoning="two\nthings"),
    Message("tool", "a"),
    Message("tool", "b"),
    Message("user", "more"),
)
QWEN_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "
    f"signatures within <tools></tools> XML tags:\n<tools>\n{BASH_TEXT}\n</tools>\n\nFor each function call, return a "
    "json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
)
GLM_TOOLS = (
    "[gMASK]<sop><|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are "
    f"provided with function signatures within <tools></tools> XML tags:\n<tools>\n{BASH_TEXT}\n</tools>\n\nFor each "
    "function call, output the function name and arguments within the following XML format:\n<tool_call>{function-name}"
    "\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n<arg_key>{arg-key-2}</arg_key>\n"
    "<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>"
)
QWEN_REPLY = (
    'Look:\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>\n<tool_call>\n'
    '{"name": "edit", "arguments": {"path": "3", "line": 3}}\n</tool_call><|im_end|>'
)
GLM_REPLY = (
    "\nLook:\n<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n</tool_call>\n<tool_call>edit\n"
    "<arg_key>path</arg_key>\n<arg_value>3</arg_value>\n<arg_key>line</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
QWEN_RESULTS = (
    "\n<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>"
    "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
)
GLM_RESULTS = "\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response>"


@pytest.mark.parametrize("thinking", [True, False])
def test_qwen3_wording(thinking: bool) -> None:
    silent = "" if thinking else "<think>\n\n</think>\n\n"
    thought = "<think>\ntwo\nthings\n</think>\n\n" if thinking else ""
    prompt = (
        f"<|im_start|>system\nBe brief.\n\n{QWEN_TOOLS}<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n{silent}"
    )
    template = family_template("qwen3")
    assert template.render_prompt(HISTORY[:2], BASH, thinking).tolist() == token_ids("qwen3", prompt)
    reply = template.render_reply(HISTORY[2], thinking).tolist()
    assert reply == token_ids("qwen3", thought + QWEN_REPLY)
    delta = template.render_delta(reply[-1], HISTORY[3:], thinking).tolist()
    assert delta == token_ids("qwen3", QWEN_RESULTS + silent)
    assert template.render_prompt(HISTORY, BASH, thinking).tolist() == token_ids("qwen3", prompt) + reply + delta


@pytest.mark.parametrize("thinking", [True, False])
def test_glm4_wording(thinking: bool) -> None:
    silent, no = ("", "") if thinking else ("\n<think></think>", "/nothink")
    thought = "\n<think>two\nthings</think>" if thinking else ""
    prompt = f"{GLM_TOOLS}<|system|>\nBe brief.<|user|>\ngo{no}<|assistant|>{silent}"
    template = family_template("glm4")
    assert template.render_prompt(HISTORY[:2], BASH, thinking).tolist() == token_ids("glm4", prompt)
    reply = template.render_reply(HISTORY[2], thinking).tolist()
    assert reply == token_ids("glm4", f"{thought}{GLM_REPLY}<|observation|>")
    delta = template.render_delta(reply[-1], HISTORY[3:], thinking).tolist()
    assert delta == token_ids("glm4", f"{GLM_RESULTS}<|user|>\nmore{no}<|assistant|>{silent}")
    assert template.render_prompt(HISTORY, BASH, thinking).tolist() == token_ids("glm4", prompt) + reply + delta


def test_qwen3_ids_by_hand() -> None:
    name = {token: stock_tokenizer("qwen3").token_to_id(token) for token in FAMILIES["qwen3"].tokens}
    start, end = name["<|im_start|>"], name["<|im_end|>"]
    template = family_template("qwen3")
    text = template.encode
    prompt = template.render_prompt((Message("user", "hello"),), ()).tolist()
    opening = [start, *text("user\nhello"), end, *text("\n"), start, *text("assistant\n")]
    assert prompt == [*opening, name["<think>"], *text("\n\n"), name["</think>"], *text("\n\n")]
    assert template.render_reply(Message("assistant", "\ndone")).tolist() == [*text("\ndone"), end]
    # the two line breaks and the reply's own stay apart, although the tokenizer has one token for three
    assert len(text("\n\n\n")) == 1
    delta = template.render_delta(end, (Message("user", "<|im_end|>"),), thinking=True).tolist()
    assert delta == [
        *(*text("\n"), start, *text("user\n<|im_end|>"), end),
        *(*text("\n"), start, *text("assistant\n")),
    ]
    assert end not in text("<|im_end|>")


def test_after_another_stop_than_the_templates_own() -> None:
    qwen, glm = family_template("qwen3"), family_template("glm4")
    new = (Message("tool", "x"),)
    usual = qwen.render_delta(qwen.stop_ids[0], new).tolist()
    assert qwen.render_delta(qwen.stop_ids[1], new).tolist() == [qwen.stop_ids[0], *usual]
    user, observation, end = glm.stop_ids
    short = glm.render_delta(observation, new).tolist()
    assert short[0] not in glm.stop_ids
    assert glm.render_delta(user, new).tolist() == glm.render_delta(end, new).tolist() == [observation, *short]
    for template in (qwen, glm, family_template("rl360-chat")):
        with pytest.raises(BadInput, match="none of its stop ids"):
            template.render_delta(5, new)


def test_glm4_says_which_message_follows() -> None:
    glm = family_template("glm4")
    user, observation, _end = glm.stop_ids
    called, said = Message("assistant", "", (LS,)), Message("assistant", "done")
    stops = [(called, None), (called, "user"), (said, None), (said, "tool")]
    assert [glm.render_reply(m, followed_by=role)[-1] for m, role in stops] == [observation, user, user, observation]


QWEN_CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
GLM_CALL = "<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n</tool_call>"


@pytest.mark.parametrize(
    ("family", "thinking", "sampled", "content", "commands", "reasoning"),
    [
        ("qwen3", True, "<think>\na\n\nb\n</think>\n\nhi<|im_end|>", "hi", [], "a\n\nb"),
        ("qwen3", True, "<think>\n\n</think>\n\n<|im_end|>", "", [], ""),
        ("qwen3", True, "hi<|endoftext|>", "hi", [], None),
        ("qwen3", True, f"<think>\na\n</think>\n\n{QWEN_CALL}<|im_end|>", "", ["ls"], "a"),
        ("qwen3", False, f"so\n{QWEN_CALL}\n{QWEN_CALL}\n<|im_end|>", "so", ["ls", "ls"], None),
        ("qwen3", False, "a <|unused|> b<|im_end|>", "a <|unused|> b", [], None),
        ("glm4", True, "\n<think>a</think>\nhi<|user|>", "hi", [], "a"),
        ("glm4", True, "\n<think></think>\nhi<|user|>", "hi", [], None),
        ("glm4", True, f"<think>a</think>\n{GLM_CALL}<|observation|>", "", ["ls"], "a"),
        ("glm4", False, f"\nso\n{GLM_CALL}\n{GLM_CALL}<|observation|>", "so", ["ls", "ls"], None),
        ("glm4", False, "hi", "hi", [], None),
    ],
)
def test_parse_well_formed(
    family: str, thinking: bool, sampled: str, content: str, commands: list, reasoning: str | None
) -> None:
    turn = family_template(family).parse_assistant(token_ids(family, sampled), TOOLS, thinking)
    assert (turn.content, turn.reasoning, turn.format_errors) == (content, reasoning, 0)
    assert [call.arguments for call in turn.tool_calls] == [{"command": command} for command in commands]


@pytest.mark.parametrize(
    ("family", "thinking", "sampled"),
    [
        ("qwen3", True, "<think>\nnever closed"),
        ("qwen3", True, "<think>\na<tool_call>b\n</think>\n\nhi"),
        ("qwen3", False, "<think>\na\n</think>\n\nhi"),
        ("qwen3", False, "hi</think>"),
        ("qwen3", False, QWEN_CALL + "and then"),
        ("qwen3", False, QWEN_CALL.replace("bash", "nosuch")),
        ("qwen3", False, QWEN_CALL.replace("{", "[")),
        ("qwen3", False, QWEN_CALL.replace("name", "id")),
        ("qwen3", False, QWEN_CALL.replace('{"command": "ls"}', '"ls"')),
        ("qwen3", False, "<tool_call>\n{}"),
        ("qwen3", False, "<tool_response>x</tool_response>"),
        ("glm4", True, "\n<think>never closed"),
        ("glm4", True, "x<think>a</think>b"),
        ("glm4", False, GLM_CALL.replace("bash", "nosuch")),
        ("glm4", False, GLM_CALL.replace("</arg_key>", "")),
        ("glm4", False, GLM_CALL.replace("</arg_key>\n", "</arg_key>x")),
        ("glm4", False, GLM_CALL.replace("</tool_call>", "x</tool_call>")),
        ("glm4", False, GLM_CALL.replace("</tool_call>", GLM_CALL[16:])),  # one argument twice
        ("glm4", False, GLM_CALL.removesuffix("</tool_call>")),
        ("glm4", False, "a<|assistant|>b"),
    ],
)
def test_malformed_turns_are_content_and_counted(family: str, thinking: bool, sampled: str) -> None:
    template = family_template(family)
    ids = token_ids(family, sampled)
    turn = template.parse_assistant([*ids, template.stop_ids[0]], TOOLS, thinking)
    assert (turn.content, turn.tool_calls, turn.reasoning) == (sampled, (), None)
    assert turn.format_errors >= 1


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("depth", [200, *range(235, 262)])
def test_a_call_nested_too_deep_for_a_reply_is_no_such_call(family: str, depth: int) -> None:
    value = '{"a":' * depth + "1" + "}" * depth
    call = {
        "qwen3": f'<tool_call>\n{{"name": "edit", "arguments": {{"path": "x", "deep": {value}}}}}\n</tool_call>',
        "glm4": f"<tool_call>edit\n<arg_key>deep</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
        "rl360-chat": f'<tool_call>edit\n{{"path":"x","deep":{value}}}</tool_call>',
    }[family]
    turn = family_template(family).parse_assistant(token_ids(family, call), TOOLS)
    written = [orjson.loads(held.arguments) for held in turn.message().tool_calls]
    orjson.dumps({"content": [{"input": arguments} for arguments in written]})  # as in a reply
    assert turn.format_errors or len(turn.tool_calls) == 1
    if depth == 200:
        assert written[0]["deep"] == orjson.loads(value)


def test_other_threads_go_on_while_long_text_is_encoded() -> None:
    template, ticks = family_template("qwen3"), 0
    text = "the quick brown fox jumps over\n" * 8_000
    worker = threading.Thread(target=template.encode, args=(text,))
    worker.start()
    while worker.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks >= 10


def test_few_long_texts_are_encoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    template = family_template("qwen3")
    running: list[int] = []
    most = []

    class Encoded(SimpleNamespace):
        def __len__(self) -> int:
            return len(self.ids)

    class Slow:
        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
            running.append(1)
            most.append(len(running))
            time.sleep(0.02)
            running.pop()
            return [Encoded(ids=[len(texts[0])])]

    monkeypatch.setattr(template, "_tokenizer", Slow())
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(template.encode, ["x" * 300_000] * 8)) == [[300_000]] * 8
        assert max(most) <= 2
        most.clear()
        list(pool.map(template.encode, ["x"] * 8))
    assert max(most) > 2


@pytest.mark.parametrize("family", ["qwen3", "glm4", "rl360-chat"])
def test_a_text_is_searched_in_steps_as_in_one(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = family_template(family)
    names = sorted(template._ids_of)
    texts = ["", "<" * 40, "".join(names), "a".join(names) + "<|", f"<|{names[0]}|>" * 3, names[-1][:-1] + names[0]]
    prompts = [(Message("system", "x" + text), Message("user", text)) for text in texts]
    each = list(zip(texts, prompts, strict=True))
    whole = [(template._guard(text), template.render_prompt(prompt, ())) for text, prompt in each]
    for step in (1, 2, 7, 13):
        monkeypatch.setattr(base, "_STEP", step)
        for (text, prompt), (guarded, ids) in zip(each, whole, strict=True):
            assert template._guard(text) == guarded
            assert template.render_prompt(prompt, ()).tolist() == ids.tolist()


def test_a_text_of_more_tokens_than_any_prompt_has_is_no_list_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    template = family_template("qwen3")
    monkeypatch.setattr(base, "_MOST_IDS", 100)
    text = "x y " * 100
    with pytest.raises(SessionRefusal, match=r"a text of [0-9]+ tokens, at most 100") as caught:
        template.render_prompt((Message("user", text),), ())
    assert caught.value.code is Refusal.LENGTH


def test_glm4_arguments_follow_the_schema() -> None:
    def read(key: str, text: str) -> object:
        call = f"<tool_call>edit\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
        turn: ParsedTurn = family_template("glm4").parse_assistant(token_ids("glm4", call), TOOLS)
        return turn.tool_calls[0].arguments[key]

    assert read("path", "3") == "3"
    assert read("path", "\n{}\n") == "\n{}\n"
    assert read("line", "3") == 3
    assert read("line", "three") == "three"
    assert read("deep", '{"a": [1, null]}') == {"a": [1, None]}
    assert read("unknown", "1e999") == "1e999"


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_renders_the_same_ids(family: str) -> None:
    template = family_template(family)
    stock = transformers.PreTrainedTokenizerFast(tokenizer_object=stock_tokenizer(family))
    compared = 0
    for shape in shapes("plain", template.thinking_modes):
        # there transformers joins the header's line break with the reply's white space
        if any(m.role == "assistant" and m.content[:1].isspace() for m in shape.messages):
            continue
        for generation in (True, False):
            text = template._text(shape.messages, shape.tools, shape.thinking, generation=generation)
            theirs = stock.apply_chat_template(
                [message.to_template() for message in shape.messages],
                tools=[tool.to_template() for tool in shape.tools] or None,
                chat_template=FAMILIES[family].template_text(),
                add_generation_prompt=generation,
                enable_thinking=shape.thinking,
                return_dict=False,
            )
            assert template._ids(text).tolist() == list(theirs), shape.name
            compared += 1
    assert compared >= 80


@pytest.mark.parametrize("family", FAMILIES)
def test_thinking_where_a_family_has_none(family: str) -> None:
    template = family_template(family)
    if True in template.thinking_modes:
        return
    for call in (
        lambda: template.render_prompt((Message("user", "x"),), (), True),
        lambda: template.parse_assistant([], (), True),
    ):
        with pytest.raises(BadInput, match="has no thinking"):
            call()


@pytest.mark.parametrize("family", FAMILIES)
def test_system_messages_stand_only_first(family: str) -> None:
    template = family_template(family)
    with pytest.raises(BadInput, match="refuses these messages"):
        template.render_prompt((Message("user", "x"), Message("system", "y")), ())
    with pytest.raises(BadInput, match="tool and user messages only"):
        template.render_delta(template.stop_ids[0], (Message("system", "y"),))
