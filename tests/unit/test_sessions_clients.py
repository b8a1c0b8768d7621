"""Stock clients, unchanged: openai and anthropic, sync and async, streaming and not, and agents' loops with them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import orjson
import pytest

from rl360.sessions import routes
from rl360.sessions.described import AnthropicError, ChatReply, CountReply, MessagesReply
from rl360.sessions.formats import anthropic as anthropic_format
from rl360.sessions.formats import openai as openai_format
from rl360.sessions.merge import merge, snapshot
from rl360.sessions.messages import Message
from tests.unit.late import Late
from tests.unit.sessions_data import BASH_SCHEMA, call_turn, encode_turn, state_of
from tests.unit.sessions_server import Bench, engine_reply, session_bench

anthropic, openai = Late("anthropic"), Late("openai")
MESSAGES: list[Any] = [{"role": "system", "content": "Use bash."}, {"role": "user", "content": "Create hello.txt"}]
ASKED: list[Any] = [{"role": "user", "content": "Create hello.txt"}]
TOOL: Any = {
    "name": "bash",
    "description": "Run a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
TWO_CALLS = "Look: " + call_turn("ls")[:-10] + call_turn("pwd")


@pytest.fixture(scope="module")
def _shared() -> Iterator[Bench]:
    with session_bench() as bench:
        yield bench


@pytest.fixture
def bench(_shared: Bench) -> Bench:
    _shared.engine.script = engine_reply
    _shared.engine.gate.set()
    _shared.engine.bodies.clear()
    return _shared


@pytest.fixture
def calling(bench: Bench) -> Bench:
    """The first turn of a conversation makes two calls, every other says done."""
    bench.engine.script = lambda body: engine_reply(
        body, TWO_CALLS if len(bench.engine.bodies) == 1 else "done<|im_end|>"
    )
    return bench


def turns(bench: Bench, session_id: str) -> int:
    return merge(snapshot(bench.service.registry.get(session_id).session))[0].turns


def openai_results(message: Any) -> list[Any]:
    """What a loop sends back: the message as the library dumps it, null fields included, and the results."""
    echoed = orjson.loads(message.model_dump_json(exclude={"parsed"}))
    for call in echoed["tool_calls"]:
        call["function"].pop("parsed_arguments", None)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "x"} for call in message.tool_calls]
    return [*MESSAGES, echoed, *results]


def check_openai_calls(bench: Bench, reply: Any) -> None:
    choice = reply.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Look: ")
    called = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert called == [("bash", '{"command":"ls"}'), ("bash", '{"command":"pwd"}')]
    assert reply.usage is not None and reply.usage.prompt_tokens == len(bench.engine.bodies[-1]["input_ids"])


@pytest.mark.parametrize("stream", [False, True])
def test_openai(calling: Bench, stream: bool) -> None:
    session_id, base_url = calling.create()
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        asked: Any = {"model": "policy", "tools": [BASH_SCHEMA]}
        if stream:
            usage: Any = {"include_usage": True}
            with client.chat.completions.stream(messages=MESSAGES, stream_options=usage, **asked) as events:
                reply: Any = events.get_final_completion()
        else:
            reply = client.chat.completions.create(messages=MESSAGES, **asked)
        check_openai_calls(calling, reply)
        last = client.chat.completions.create(messages=openai_results(reply.choices[0].message), stream=stream, **asked)
        content = "".join(c.choices[0].delta.content or "" for c in last) if stream else last.choices[0].message.content
        assert content == "done"
        assert [model.id for model in client.models.list()] == ["policy"]
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(messages=MESSAGES[:1], **asked)
        assert caught.value.code == "bad_body"
    assert turns(calling, session_id) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_async_openai(calling: Bench, stream: bool) -> None:
    session_id, base_url = calling.create()

    async def loop() -> str:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            asked: Any = {"model": "policy", "tools": [BASH_SCHEMA]}
            if stream:
                events = await client.chat.completions.create(messages=MESSAGES, stream=True, **asked)
                chunks = [chunk async for chunk in events]
                assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "tool_calls"]
                calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
                message: Any = {"role": "assistant", "content": "Look: ", "tool_calls": [c.model_dump() for c in calls]}
                results = [{"role": "tool", "tool_call_id": call.id, "content": "x"} for call in calls]
                history = [*MESSAGES, message, *results]
            else:
                reply = await client.chat.completions.create(messages=MESSAGES, **asked)
                check_openai_calls(calling, reply)
                history = openai_results(reply.choices[0].message)
            last = await client.chat.completions.create(messages=history, **asked)
            return last.choices[0].message.content

    assert asyncio.run(loop()) == "done"
    assert turns(calling, session_id) == 2


def check_anthropic_calls(bench: Bench, reply: Any) -> None:
    assert (reply.stop_reason, reply.type, reply.role) == ("tool_use", "message", "assistant")
    assert [block.type for block in reply.content] == ["text", "tool_use", "tool_use"]
    assert reply.content[0].text == "Look: "
    assert [block.input for block in reply.content[1:]] == [{"command": "ls"}, {"command": "pwd"}]
    assert reply.usage.input_tokens + reply.usage.cache_read_input_tokens == len(bench.engine.bodies[-1]["input_ids"])
    assert reply.usage.output_tokens > 3


def anthropic_results(reply: Any) -> list[Any]:
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "x"}]}
        for block in reply.content
        if block.type == "tool_use"
    ]
    return [*ASKED, {"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic(calling: Bench, stream: bool) -> None:
    session_id, base_url = calling.create()
    asked: Any = {"model": "policy", "max_tokens": 48, "system": "Use bash.", "tools": [TOOL]}
    with anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="anything", max_retries=0) as client:
        if stream:
            with client.messages.stream(messages=ASKED, **asked) as events:
                assert "".join(events.text_stream) == "Look: "
                reply: Any = events.get_final_message()
        else:
            reply = client.messages.create(messages=ASKED, **asked)
        check_anthropic_calls(calling, reply)
        counted = client.messages.count_tokens(
            model="policy", system="Use bash.", tools=[TOOL], messages=anthropic_results(reply)
        )
        last = client.messages.create(messages=anthropic_results(reply), **asked)
        assert (last.content[0].text, last.stop_reason) == ("done", "end_turn")
        assert counted.input_tokens == last.usage.input_tokens + last.usage.cache_read_input_tokens
        assert [model.id for model in client.models.list()] == ["policy"]
        with pytest.raises(anthropic.BadRequestError, match="an image block is not supported in a user message"):
            client.messages.create(messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}], **asked)
        other = anthropic.Anthropic(base_url=f"{calling.url}/sessions/none", api_key="x", max_retries=0)
        with pytest.raises(anthropic.NotFoundError, match="no such session"):
            other.messages.create(messages=ASKED, **asked)
    assert turns(calling, session_id) == 2
    told = calling.get(f"/sessions/{session_id}").json()
    assert told["ignored_params"] == {}  # max_tokens is what the session's own limit is


@pytest.mark.parametrize("stream", [False, True])
def test_async_anthropic(calling: Bench, stream: bool) -> None:
    session_id, base_url = calling.create()

    async def loop() -> Any:
        asked: Any = {"model": "policy", "max_tokens": 48, "system": "Use bash.", "tools": [TOOL]}
        base = base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=base, api_key="anything", max_retries=0) as client:
            if stream:
                async with client.messages.stream(messages=ASKED, **asked) as events:
                    reply: Any = await events.get_final_message()
            else:
                reply = await client.messages.create(messages=ASKED, **asked)
            check_anthropic_calls(calling, reply)
            return await client.messages.create(messages=anthropic_results(reply), **asked)

    assert asyncio.run(loop()).content[0].text == "done"
    assert turns(calling, session_id) == 2


def test_the_anthropic_library_runs_its_own_agent_loop(calling: Bench) -> None:
    ran = []

    @anthropic.beta_tool
    def bash(command: str) -> str:
        """Run a command.

        Args:
            command: what to run
        """
        ran.append(command)
        return f"ran {command}"

    session_id, base_url = calling.create()
    with anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="x", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(model="policy", max_tokens=48, tools=[bash], messages=ASKED)
        last = runner.until_done()
    assert ran == ["ls", "pwd"]
    assert last.content[0].text == "done"  # type: ignore[union-attr]
    assert turns(calling, session_id) == 2


def test_one_session_may_be_spoken_to_in_both_formats(calling: Bench) -> None:
    session_id, _ = calling.create(matcher="loose_tool_calls")
    body = {"system": [{"type": "text", "text": "Use "}, {"type": "text", "text": "bash."}], "messages": ASKED}
    first = calling.say(session_id, {**body, "tools": [TOOL]}).json()
    MessagesReply.model_validate(first)
    calls = [
        {
            "id": b["id"],
            "type": "function",
            "function": {"name": b["name"], "arguments": orjson.dumps(b["input"]).decode()},
        }
        for b in first["content"][1:]
    ]
    said = {"role": "assistant", "content": first["content"][0]["text"], "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in calls]
    second = calling.chat(session_id, {"messages": [*MESSAGES, said, *results], "tools": [BASH_SCHEMA]})
    assert second.status_code == 200, second.text
    ChatReply.model_validate(second.json())
    assert turns(calling, session_id) == 2


def test_an_anthropic_client_with_one_v1_too_many_is_told(bench: Bench) -> None:
    client = anthropic.Anthropic(base_url=bench.create()[1], api_key="x")
    with pytest.raises(anthropic.NotFoundError, match="base_url ends before /v1"):
        client.messages.create(model="policy", max_tokens=48, messages=ASKED)


def test_the_events_of_an_anthropic_stream(calling: Bench) -> None:
    session_id, _ = calling.create()
    reply = calling.say(session_id, {"messages": ASKED, "tools": [TOOL], "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = reply.text.splitlines()
    events = [orjson.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [line[7:] for line in lines if line.startswith("event: ")] == [event["type"] for event in events]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [event["type"] for event in events] == ["message_start", *block * 3, "message_delta", "message_stop"]
    assert events[0]["message"]["content"] == [] and events[0]["message"]["stop_reason"] is None
    assert events[4]["content_block"]["input"] == {}
    assert orjson.loads(events[5]["delta"]["partial_json"]) == {"command": "ls"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use" and events[-2]["usage"]["output_tokens"] > 3


@contextlib.contextmanager
def later(bench: Bench, monkeypatch: pytest.MonkeyPatch, script: Any = engine_reply) -> Iterator[None]:
    """The engine takes several intervals of keep-alive, and longer than a client waits for a sign of life."""
    monkeypatch.setattr(routes, "KEEP_ALIVE_S", 0.05)
    bench.engine.script = script
    bench.engine.gate.clear()
    opener = threading.Timer(0.8, bench.engine.gate.set)
    opener.start()
    try:
        yield
    finally:
        opener.join()


@pytest.mark.parametrize("library", ["openai", "async openai", "anthropic", "async anthropic"])
@pytest.mark.parametrize("broken", [False, True])
def test_a_stream_s_client_is_kept_waiting(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, library: str, broken: bool
) -> None:
    """A turn may take longer than a client waits for a byte. What is refused after that is an error event, which the
    libraries raise."""
    session_id, base_url = bench.create()
    asked: Any = {"model": "policy", "messages": ASKED}
    kind = openai if "openai" in library else anthropic
    options: Any = {"api_key": "x", "max_retries": 0, "timeout": kind.Timeout(10.0, read=0.5)}
    options["base_url"] = base_url if kind is openai else base_url.removesuffix("/v1")

    def plain() -> str:
        if kind is openai:
            with openai.OpenAI(**options).chat.completions.stream(**asked) as chunks:
                return chunks.get_final_completion().choices[0].message.content or ""
        with anthropic.Anthropic(**options).messages.stream(max_tokens=48, **asked) as events:
            return events.get_final_message().content[0].text  # type: ignore[union-attr]

    async def loop() -> str:
        if kind is openai:
            chunks = await openai.AsyncOpenAI(**options).chat.completions.create(stream=True, **asked)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
        async with anthropic.AsyncAnthropic(**options).messages.stream(max_tokens=48, **asked) as events:
            return (await events.get_final_message()).content[0].text  # type: ignore[union-attr]

    def ask() -> str:
        return asyncio.run(loop()) if library.startswith("async") else plain()

    session = bench.service.registry.get(session_id).session
    refused = bench.service.refused["bad_upstream"]
    with later(bench, monkeypatch, (lambda _body: (500, b"broken on purpose")) if broken else engine_reply):
        if not broken:
            assert ask() == "done" and session.epoch == 1
            return
        with pytest.raises(kind.APIError, match="broken on purpose"):
            ask()
    assert (session.epoch, bench.service.refused["bad_upstream"]) == (0, refused + 1)
    assert bench.service.registry.in_flight == 0


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
def test_what_a_stream_says_while_its_turn_is_sampled(bench: Bench, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    session_id, _ = bench.create()
    url, body = f"/sessions/{session_id}/v1/{path}", {"messages": ASKED, "stream": True}
    beat = ": keep-alive" if path == "chat/completions" else 'event: ping\ndata: {"type": "ping"}'
    with later(bench, monkeypatch), bench.http.stream("POST", url, json=body) as reply:
        began = time.monotonic()
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
        assert "content-length" not in reply.headers
        parts = list(reply.iter_text())
    assert time.monotonic() - began > 0.3, "the headers did not wait for the turn"
    events = "".join(parts).split("\n\n")
    assert events[:2] == [beat] * 2 and events[-1] == ""
    quick = bench.http.post(url, json=body)  # the same turn again, at once
    assert [e.split('"')[0] for e in quick.text.split("\n\n")] == [
        e.split('"')[0] for e in events if e != beat
    ] and "content-length" in quick.headers
    # not for who did not ask for a stream, whose reply has one status
    with later(bench, monkeypatch, lambda _body: (500, b"")):
        whole = bench.http.post(url, json={"messages": ASKED})
    assert whole.status_code == 502 and "content-length" in whole.headers
    bench.engine.script = lambda _body: (500, b"")
    assert bench.http.post(url, json=body).status_code == 502  # nothing was sent yet: a status
    with later(bench, monkeypatch, lambda _body: (500, b"gone")), bench.http.stream("POST", url, json=body) as reply:
        events = "".join(reply.iter_text()).split("\n\n")
    assert events[0] == beat and events[-2].startswith('event: error\ndata: {"') and "bad_upstream" in events[-2]


@pytest.mark.parametrize("library", [openai, anthropic], ids=["openai", "anthropic"])
def test_a_bug_is_told_in_the_client_s_shape_and_its_ids_are_counted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, library: Any
) -> None:
    """Whether a stream has begun, has not, or none was asked for."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("a secret of this conversation")

    session_id, base_url = bench.create()
    session = bench.service.registry.get(session_id).session
    monkeypatch.setattr(type(bench.service.template), "parse_assistant", broken)
    asked: Any = {"model": "policy", "messages": ASKED}
    if library is openai:
        ask = openai.OpenAI(base_url=base_url, api_key="x").chat.completions.create
    else:
        ask = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="x").messages.create
        asked["max_tokens"] = 48
    for stream in (True, False):
        with pytest.raises(library.InternalServerError, match="has a bug: its log") as caught:
            ask(stream=stream, **asked)
        body = caught.value.response.json()
        assert body["error"]["code"] == "internal_error" and (body.get("type") == "error") == (library is anthropic)
    with later(bench, monkeypatch), pytest.raises(library.APIError, match="has a bug: its log") as caught:
        list(ask(stream=True, **asked))
    assert "secret" not in str(caught.value) and "has a bug" in caplog.text and "RuntimeError" in caplog.text
    assert len(bench.engine.bodies) == 3  # the libraries do not ask again
    sampled = 3 * len(encode_turn("done<|im_end|>"))
    assert (session.epoch, session.sampled_tokens, session.dropped["infra"]) == (0, sampled, sampled)
    assert bench.service.registry.in_flight == 0


def test_a_stream_s_client_that_leaves_while_it_waits_changes_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id, _ = bench.create()
    body = {"messages": ASKED, "stream": True}
    bench.engine.cancelled.clear()
    with later(bench, monkeypatch), bench.http.stream("POST", f"/sessions/{session_id}/v1/messages", json=body) as said:
        assert next(said.iter_text()).startswith("event: ping")
    assert bench.engine.cancelled.wait(10)
    session = bench.service.registry.get(session_id).session
    deadline = time.monotonic() + 10
    while bench.service.registry.in_flight and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (session.epoch, session.requests_unanswered, bench.service.registry.in_flight) == (0, 1, 0)


def test_reasoning_is_a_thinking_block_and_a_field(bench: Bench) -> None:
    session_id, _ = bench.create()
    bench.chat(session_id, {"messages": MESSAGES})
    session = bench.service.registry.get(session_id).session
    turn = replace(session.turns[0], reply=Message("assistant", "hi", reasoning="hm"))
    asked = anthropic_format.read(orjson.dumps({"messages": ASKED}))
    message = orjson.loads(anthropic_format.body(session, turn, asked))
    assert message["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "hi"},
    ]
    assert b'"thinking_delta","thinking":"hm"' in anthropic_format.events(session, turn, asked)
    assert asked.parse({"role": "assistant", "content": message["content"]}, "messages[1]") == (turn.reply,)
    chat = openai_format.read(orjson.dumps({"messages": MESSAGES, "stream": True}))
    said = orjson.loads(openai_format.body(session, turn, chat))["choices"][0]["message"]
    assert said["reasoning_content"] == "hm"
    assert chat.parse(said, "messages[1]") == (turn.reply,)
    assert b'"delta":{"reasoning_content":"hm"}' in openai_format.events(session, turn, chat)


def test_blocks_become_messages(bench: Bench) -> None:
    parse = anthropic_format.read(orjson.dumps({"messages": ASKED})).parse
    user = [
        {"type": "tool_result", "tool_use_id": "a", "content": "one", "is_error": True},
        {"type": "tool_result", "tool_use_id": "b"},
        {"type": "text", "text": "and ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "two"},
    ]
    assert parse({"role": "user", "content": user}, "messages[0]") == (
        Message("tool", "one", tool_call_id="a"),
        Message("tool", "", tool_call_id="b"),
        Message("user", "and two"),
    )
    assert parse({"role": "assistant", "content": "hi"}, "messages[0]") == (Message("assistant", "hi"),)


HOSTILE: list[Any] = [
    b"",
    b"[]",
    b'{"messages": [',
    {"messages": []},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": []}]},
    {"messages": [{"role": "user", "content": [5]}]},
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 5}]}]},
    {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
    {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": 5}]}]},
    {"messages": [{"role": "tool", "content": "x"}]},
    {"messages": [*ASKED, {"role": "system", "content": "x"}, *ASKED]},
    {"messages": [{"role": "assistant", "content": "prefill"}]},
    {"messages": [*ASKED, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, *ASKED]},
    {"messages": [*ASKED, {"role": "assistant", "content": [{"type": "tool_use", "input": "x"}]}, *ASKED]},
    {"messages": [*ASKED, {"role": "assistant", "content": [{"type": "tool_use", "input": {}, "id": 1}]}, *ASKED]},
    {"messages": [*ASKED, {"role": "assistant", "content": [{"type": "thinking", "thinking": 1}]}, *ASKED]},
    {"messages": ASKED, "system": 5},
    {"messages": ASKED, "system": [{"type": "image"}]},
    {"messages": ASKED, "tools": {}},
    {"messages": ASKED, "tools": [5]},
    {"messages": ASKED, "tools": [{"type": "bash_20250124", "name": "bash"}]},
    {"messages": ASKED, "tools": [{"name": "bash", "input_schema": 5}]},
    {"messages": ASKED, "tool_choice": {"type": "any"}},
    {"messages": ASKED, "tool_choice": "auto"},
    {"messages": ASKED, "stream": "yes"},
    {"messages": ASKED, "model": 5},
]


@pytest.mark.parametrize("body", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("path", ["messages", "messages/count_tokens"])
def test_hostile_anthropic_bodies(bench: Bench, body: Any, path: str) -> None:
    session_id, _ = bench.create()
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    reply = bench.http.post(f"/sessions/{session_id}/v1/{path}", content=content)
    assert reply.status_code == 400, reply.text
    error = AnthropicError.model_validate(reply.json()).error
    assert (error.type, error.code) == ("invalid_request_error", "bad_body")
    assert bench.service.registry.get(session_id).session.epoch == 0 and not bench.engine.bodies


def test_counting_tokens_changes_nothing_and_needs_no_history(bench: Bench) -> None:
    session_id, base_url = bench.create(max_seq_len=64)
    path = f"/sessions/{session_id}/v1/messages/count_tokens"
    opening = {"system": "Use bash.", "messages": ASKED, "tools": [TOOL]}
    first = CountReply.model_validate(bench.http.post(path, json=opening).json()).input_tokens
    bench.say(session_id, opening)
    assert first == len(bench.engine.bodies[-1]["input_ids"])
    other = {"messages": [{"role": "user", "content": "something else " * 60}]}  # another history, and over the limit
    assert bench.http.post(path, json=other).json()["input_tokens"] > 64
    assert bench.service.registry.get(session_id).session.epoch == 1
    assert base_url.endswith("/v1")
    bench.engine.script = lambda body: engine_reply(body, "half", finish="length")
    bench.say(session_id, opening)
    before = state_of(bench.service.registry.get(session_id).session)
    longer = {**opening, "messages": [*ASKED, {"role": "assistant", "content": "half"}, *ASKED]}
    assert bench.http.post(path, json=longer).json()["input_tokens"] > first
    assert state_of(bench.service.registry.get(session_id).session) == before
    assert bench.say(session_id, longer).status_code == 409
    assert bench.service.registry.get(session_id).session.requests_after_cut == 1


def test_a_count_is_rendered_once_and_given_up_when_nobody_waits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    session_id, _ = bench.create(max_seq_len=64)
    path = f"/sessions/{session_id}/v1/messages/count_tokens"
    long = {"messages": [{"role": "user", "content": "x" * 100_000}]}
    render, calls, go = bench.service.template.render_prompt, [], threading.Event()

    def slow(*args: Any) -> Any:
        calls.append(args)
        go.wait(10)
        return render(*args)

    monkeypatch.setattr(bench.service.template, "render_prompt", slow)
    with pytest.raises(httpx.ReadTimeout):
        bench.http.post(path, json=long, timeout=0.5)
    deadline = time.monotonic() + 5
    while bench.service.registry.in_flight and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (bench.service.registry.in_flight, go.is_set()) == (0, False)
    go.set()
    calls.clear()
    assert bench.http.post(path, json=long).json()["input_tokens"] > 64
    assert len(calls) == 1
