"""Messages and tools of an untrusted agent: brought to one form, or refused with the place."""

from __future__ import annotations

from typing import Any

import pytest

from rl360.sessions.messages import (
    MAX_MESSAGES,
    Message,
    ToolCall,
    check_sequence,
    json_object,
    openai_message,
    parse_tools,
)
from rl360.sessions.refusals import Refusal, SessionRefusal
from tests.unit.sessions_data import BASH_SCHEMA, EDIT_SCHEMA

CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{ "command" : "ls" }'}}


def message(raw: Any) -> Message:
    (found,) = openai_message(raw, "messages[0]")
    return found


def test_empty_content_has_one_form() -> None:
    call = ToolCall.make("c1", "bash", {"command": "ls"})
    for content in ({"content": None}, {}, {"content": ""}, {"content": []}):
        assert message({"role": "assistant", "tool_calls": [CALL], **content}) == Message("assistant", "", (call,))
    assert message({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}) == (
        Message("user", "ab")
    )


def test_empty_fields_that_clients_echo_are_no_difference() -> None:
    echoed = {"role": "assistant", "content": "x", "refusal": None, "audio": None, "tool_calls": None, "name": "bot"}
    assert message({**echoed, "function_call": None, "annotations": [], "reasoning_content": ""}) == (
        Message("assistant", "x")
    )


def test_reasoning_is_kept_where_it_is_stated() -> None:
    found = message({"role": "assistant", "content": "x", "reasoning_content": "because"})
    assert found.reasoning == "because"
    assert found.to_template()["reasoning_content"] == "because"
    assert "reasoning_content" not in Message("assistant", "x").to_template()


def test_arguments_keep_their_order_and_compare_without_it() -> None:
    one = ToolCall.make("c", "edit", {"path": "p", "text": "t"})
    assert one.arguments == '{"path":"p","text":"t"}'
    assert one == ToolCall.make("c", "edit", {"text": "t", "path": "p"})
    for other in ({"path": "p", "text": "u"}, {"path": "p"}, {"path": "p", "text": "t", "line": None}):
        assert one != ToolCall.make("c", "edit", other)


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        ("x", r"messages\[0\]: is str, expected an object"),
        ({"content": "x"}, "role None is not system, user, assistant or tool"),
        ({"role": ["user"], "content": "x"}, "role .* is not"),
        ({"role": "developer", "content": "x"}, "role 'developer'"),
        ({"role": "user"}, "a user message needs content"),
        ({"role": "user", "content": 5}, "content is int"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"content\[0\]: only"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "a user message with tool_calls is not supported"),
        ({"role": "user", "content": "x", "reasoning_content": "y"}, "with reasoning_content is not supported"),
        ({"role": "assistant", "content": "x", "reasoning_content": 1}, "reasoning_content 1 is not a string"),
        ({"role": "assistant", "tool_calls": "x"}, "tool_calls is str"),
        ({"role": "assistant", "tool_calls": ["x"]}, r"tool_calls\[0\]: is not a function call"),
        ({"role": "assistant", "tool_calls": [{**CALL, "id": None}]}, "needs a string id and name"),
        ({"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[]"}}]}, "not the JSON"),
        ({"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]}, "not the JSON"),
        ({"role": "tool", "content": "x", "tool_call_id": 1}, "tool_call_id 1 is not a string"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "function_call is not supported"),
    ],
)
def test_what_is_no_message_is_refused(raw: Any, match: str) -> None:
    with pytest.raises(SessionRefusal, match=match) as caught:
        openai_message(raw, "messages[0]")
    assert caught.value.code is Refusal.BAD_BODY and not caught.value.retry


@pytest.mark.parametrize(
    ("roles", "match"),
    [
        ([], "messages: is empty"),
        (["user", "system", "user"], r"messages\[1\]: a system message stands only first"),
        (["system", "assistant"], r"messages\[1\]: the last message is assistant"),
        (["system"], "the last message is system"),
        (["user"] * (MAX_MESSAGES + 1), "at most"),
    ],
)
def test_an_order_no_conversation_has_is_refused(roles: list[str], match: str) -> None:
    with pytest.raises(SessionRefusal, match=match):
        check_sequence([Message(role, "x") for role in roles])
    check_sequence([Message(role, "x") for role in ("system", "user", "assistant", "user", "tool")])


def test_a_tool_is_its_whole_definition() -> None:
    (bash,) = parse_tools([BASH_SCHEMA])
    assert bash.to_template() == BASH_SCHEMA
    assert (bash.name, bash.parameters, bash.raw_parameter) == ("bash", (("command", "string"),), "command")
    told = {**BASH_SCHEMA, "function": {**BASH_SCHEMA["function"], "description": "Another text."}}  # type: ignore[dict-item]
    assert parse_tools([told]) != (bash,)
    assert parse_tools(None) == parse_tools([]) == ()
    assert parse_tools([BASH_SCHEMA, EDIT_SCHEMA])[1].raw_parameter is None


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        ({}, "tools: {} is not a list"),
        ([1], r"tools\[0\]: is not a function tool"),
        ([{"type": "web_search"}], "is not a function tool"),
        ([{"function": {"name": "a\nb"}}], "one-line string"),
        ([{"function": {"name": "f", "parameters": []}}], "not a JSON schema object"),
        ([{"function": {"name": "f", "parameters": {"properties": {"x": 1}}}}], "parameter 'x' has no schema"),
        ([{"function": {"name": "f", "parameters": {"required": ["x"]}}}], "names a parameter that properties lacks"),
        ([{"function": {"name": "f"}}] * 2, "names repeat"),
        ([{"function": {"name": "f"}, "deep": {1: 2}}], "cannot be written back as JSON"),
    ],
)
def test_what_is_no_tool_is_refused(raw: Any, match: str) -> None:
    with pytest.raises(SessionRefusal, match=match) as caught:
        parse_tools(raw)
    assert caught.value.code is Refusal.BAD_BODY


def test_json_that_cannot_be_written_back_is_no_object() -> None:
    assert json_object('{"a": 1.5}') == {"a": 1.5}
    for text in ("[]", "1", "{", '{"a": 1e999}', "{}x", None, 5, "{" + '"a":{' * 2000 + "}" * 2001):
        assert json_object(text) is None


def test_what_a_message_holds_is_counted_in_bytes() -> None:
    small, big = Message("user", "x"), Message("user", "x" * 10_000)
    assert 10_000 <= big.held_bytes() - small.held_bytes() + 1 <= 10_100
    called = Message("assistant", "", (ToolCall.make("c", "bash", {"command": "y" * 5_000}),))
    assert called.held_bytes() > 2 * 5_000  # the arguments are kept as given and sorted
