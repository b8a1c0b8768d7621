"""What one agent, or many at once, can take from a session server: memory, threads, the event loop's time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import orjson
import pytest

from rl360.sessions import routes
from rl360.sessions.families.base import ChatTemplate
from rl360.sessions.registry import Limits, Registry
from rl360.sessions.routes import Service, create_app
from rl360.sessions.turns import Completion, PreparedTurn
from tests.unit.sessions_data import completion, spec, template
from tests.unit.sessions_server import TOKEN

PATHS = ("chat/completions", "messages", "messages/count_tokens")
PIECE = 1 << 16
LONG = "x" * 2000  # where `slow_renders` is used


class Upstream:
    """Answers every turn at once."""

    url = "in this process"

    async def aclose(self) -> None:
        pass

    async def generate(self, _session_id: str, _prepared: PreparedTurn) -> Completion:
        return completion()


class Server:
    """The app in this process, without sockets."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.registry = Registry(template(), limits or Limits())
        self.app = create_app(Service(template(), self.registry, Upstream(), TOKEN))  # type: ignore[arg-type]

    def session(self, number: int = 0, **changes: Any) -> str:
        return self.registry.create(spec(attempt_id=f"a{number}", max_seq_len=1 << 20, **changes)).session_id

    async def post(
        self, path: str, body: bytes, before_last: Callable[[], Awaitable[Any]] | None = None
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        """Status, headers and body of one POST, whose body comes in pieces; `before_last` before the last of them."""
        sent: list[Any] = []
        pieces = [body[at : at + PIECE] for at in range(0, len(body), PIECE)]
        left = iter(range(len(pieces)))

        async def receive() -> Any:
            number = next(left, None)
            if number is None:
                return await asyncio.Event().wait()
            last = number == len(pieces) - 1
            if last and before_last is not None:
                await before_last()
            await asyncio.sleep(0)
            return {"type": "http.request", "body": pieces[number], "more_body": not last}

        async def send(message: Any) -> None:
            sent.append(message)

        head = [(b"authorization", f"Bearer {TOKEN}".encode())]
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": head}
        scope |= {"query_string": b"", "root_path": "", "scheme": "http", "server": ("x", 1), "http_version": "1.1"}
        await self.app(scope, receive, send)
        body = b"".join(message.get("body", b"") for message in sent)
        return sent[0]["status"], dict(sent[0]["headers"]), body


def said(text: str, **fields: Any) -> bytes:
    return orjson.dumps({"messages": [{"role": "user", "content": text}], **fields})


@pytest.mark.parametrize("path", PATHS)
def test_bodies_in_flight_have_a_share_of_the_server_s_budget(path: str) -> None:
    """A hundred large bodies at once: as many as fit are read, the others are told to come again."""
    budget, count = 6 << 20, 100
    server = Server(Limits(total_bytes=budget))
    sessions = [server.session(number) for number in range(count)]
    body = said("a", metadata={"x": "y" * 300_000})
    seen: list[int] = []

    async def flood() -> list[Any]:
        full = asyncio.Event()
        waiting = 0

        async def last_piece() -> None:
            nonlocal waiting
            waiting += 1
            seen.append(server.registry.body_bytes + server.registry.total_bytes)
            await full.wait()

        calls = [asyncio.create_task(server.post(f"/sessions/{one}/v1/{path}", body, last_piece)) for one in sessions]
        await _until(lambda: waiting + sum(call.done() for call in calls) == count, "all bodies")
        full.set()
        return await asyncio.gather(*calls)

    replies = asyncio.run(flood())
    statuses = [status for status, _headers, _body in replies]
    room = (budget - server.registry.total_bytes) // len(body)
    assert set(statuses) == {200, 503} and 10 < statuses.count(200) <= room + 1
    assert max(seen) < budget
    for status, headers, said_back in replies:
        if status == 503:
            error = orjson.loads(said_back)["error"]
            assert error["code"] == "server_full" and headers[b"retry-after"] == b"1"
            assert "bodies in flight" in error["message"] and b"x-should-retry" not in headers
    assert server.registry.body_bytes == 0
    assert all(held.body_bytes == 0 for held in server.registry)
    again = asyncio.run(server.post(f"/sessions/{sessions[-1]}/v1/{path}", body))
    assert again[0] == 200


def test_a_full_server_still_reads_what_makes_room() -> None:
    server = Server(Limits(total_bytes=5000))
    session_id = server.session()
    assert asyncio.run(server.post(f"/sessions/{session_id}/v1/chat/completions", said("a" * 2000)))[0] == 503
    status, _, body = asyncio.run(server.post(f"/sessions/{session_id}/store", b'{"key":"k"}'))
    assert (status, orjson.loads(body)["error"]["code"]) == (501, "no_store")


def test_no_session_is_given_up_for_a_body_that_does_not_fit_then_either() -> None:
    """An agent may run one command for longer than `dead_s`."""
    server = Server(Limits(total_bytes=1 << 20))
    now = 0.0
    server.registry.clock = lambda: now
    idle = [server.session(number) for number in range(5)]
    now = 700.0
    busy = server.session(9)
    path = f"/sessions/{busy}/v1/chat/completions"
    assert asyncio.run(server.post(path, said("a", metadata={"x": "y" * (1 << 20)})))[0] == 503
    assert all(server.registry.get(session_id) for session_id in idle)
    assert (server.registry.evicted_for_room, server.registry.body_bytes) == (0, 0)


def test_a_history_that_is_held_already_is_not_counted_twice() -> None:
    """Of a request in flight only what is new takes room."""
    server = Server()
    session_id = server.session()
    path = f"/sessions/{session_id}/v1/chat/completions"
    messages: list[Any] = [{"role": "user", "content": "a" * 50_000}]
    reply = orjson.loads(asyncio.run(server.post(path, orjson.dumps({"messages": messages})))[2])
    held = server.registry.get(session_id)
    messages += [reply["choices"][0]["message"], {"role": "user", "content": "more"}]
    counted: list[int] = []
    held.session.plan, plan = lambda *args: counted.append(held.body_bytes) or plan(*args), held.session.plan  # type: ignore[method-assign,func-returns-value]
    assert asyncio.run(server.post(path, orjson.dumps({"messages": messages})))[0] == 200
    assert 0 < counted[0] < 500
    assert [turn.request_end for turn in held.session.turns] == [1, 3]
    first, second = held.session.last_raws[0], held.session.turns[0].new_messages[0]
    assert orjson.loads(first)["content"] == second.content


@contextlib.contextmanager
def slow_renders(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[str], threading.Event]]:
    """Long texts that start with `slow` are rendered when the event is set; their first words, as they begin."""
    began: list[str] = []
    go = threading.Event()
    render = ChatTemplate.render_prompt

    def slowly(self: ChatTemplate, messages: Any, *args: Any) -> Any:
        text = messages[-1].content
        if text.startswith("slow"):
            began.append(text.split(".")[0])
            assert go.wait(20)
        return render(self, messages, *args)

    monkeypatch.setattr(ChatTemplate, "render_prompt", slowly)
    monkeypatch.setattr(routes, "_READ_IN_THREAD_BYTES", len(LONG) // 2)
    try:
        yield began, go
    finally:
        go.set()


async def _until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, f"waited 20 s for {what}"
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("path", PATHS)
def test_long_texts_of_one_session_delay_no_other(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    greedy, other = server.session(0, mode="tree"), server.session(1)

    async def both(began: list[str], go: threading.Event) -> tuple[list[Any], Any]:
        calls = [
            asyncio.create_task(server.post(f"/sessions/{greedy}/v1/{path}", said(f"slow {number}. {LONG}")))
            for number in range(50)
        ]
        await _until(lambda: bool(began), "the first long text")
        reply = await asyncio.wait_for(server.post(f"/sessions/{other}/v1/{path}", said(LONG)), 20)
        assert began == ["slow 0"] and not any(call.done() for call in calls)
        go.set()
        return await asyncio.gather(*calls), reply

    with slow_renders(monkeypatch) as (began, go):
        replies, reply = asyncio.run(both(began, go))
    assert reply[0] == 200 and {status for status, _, _ in replies} == {200}
    assert began == [f"slow {number}" for number in range(50)]


def test_who_goes_away_keeps_its_place_until_its_thread_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    session_id = server.session(mode="tree")
    path = f"/sessions/{session_id}/v1/chat/completions"

    async def leave(began: list[str], go: threading.Event) -> None:
        for number in range(3):
            call = asyncio.create_task(server.post(path, said(f"slow {number}. {LONG}")))
            await _until(lambda: bool(began), "the first long text")
            await asyncio.sleep(0.01)
            call.cancel()
            assert (await call)[0] == 503
        assert began == ["slow 0"] and server.registry.in_flight == 0
        last = asyncio.create_task(server.post(path, said(LONG)))
        await asyncio.sleep(0.01)
        assert not last.done()
        go.set()
        assert (await last)[0] == 200

    with slow_renders(monkeypatch) as (began, go):
        asyncio.run(leave(began, go))
    assert began == ["slow 0"]


SIZE = 8 * 10**6
USER = b'{"role":"user","content":"a"}'
ONE = b'{"messages":[' + USER
PART = b'{"type":"text","text":""}'
TEXT = b'{"messages":[{"role":"user","content":'
CALL = b',{"role":"assistant","tool_calls":[{"id":"","function":{"name":"b","arguments":"{\\"a\\":['


def _filled(lead: bytes, unit: bytes, tail: bytes, between: bytes = b",") -> bytes:
    return lead + between.join([unit] * (SIZE // len(unit + between))) + tail


def _named(count: int) -> bytes:
    return b"{" + b",".join(b'"%x":1' % i for i in range(count)) + b"," + ONE[1:] + b"]}"


# bodies near the limit that cost most: many small values, or a text that is long in an odd way
COSTLY: dict[str, tuple[str, Callable[[], bytes]]] = {
    "fields": ("chat/completions", lambda: _named(600_000)),
    "some fields": ("messages", lambda: _named(24_000)),
    "messages": ("messages/count_tokens", lambda: _filled(b'{"messages":[', b"1", b"]}")),
    "a field": ("chat/completions", lambda: _filled(ONE + b'],"seed":[', b"1", b"]}")),
    "parts": ("chat/completions", lambda: _filled(TEXT + b"[", PART, b"]}]}")),
    "blocks": ("messages", lambda: _filled(TEXT + b"[", PART, b"]}]}")),
    "tools": ("chat/completions", lambda: _filled(ONE + b'],"tools":[', b"{}", b"]}")),
    "arguments": ("chat/completions", lambda: _filled(ONE + CALL, b"1", b']}"}}]},' + USER + b"]}")),
    "escaped arguments": (
        "chat/completions",
        lambda: _filled(ONE + CALL, b"1", b']}"}}]},' + USER + b"]}", b"\\u002c"),
    ),
    "strings": ("chat/completions", lambda: _filled(b'{"messages":[', b'","', b"]}")),
    "an operator's": ("", lambda: _filled(b"{", b'"a":1', b"}")),
}


@pytest.mark.parametrize("made_of", COSTLY)
def test_no_body_stops_the_event_loop_for_long(made_of: str) -> None:
    path, make = COSTLY[made_of]
    body = make()
    server = Server()
    session_id = server.session()
    stops: list[float] = []

    async def watch() -> None:
        while True:
            before = time.process_time()
            await asyncio.sleep(0.001)
            stops.append(time.process_time() - before)

    async def ask() -> int:
        watching = asyncio.create_task(watch())
        await asyncio.sleep(0.005)
        stops.clear()
        status, _, _ = await server.post(f"/sessions/{session_id}/v1/{path}" if path else "/sessions", body)
        await asyncio.sleep(0.005)
        watching.cancel()
        return status

    status = asyncio.run(ask())
    assert status in (400, 409, 413)
    assert server.registry.get(session_id).session.epoch == 0
    assert max(stops) < 0.2  # of CPU; 0.05 where nothing else runs
