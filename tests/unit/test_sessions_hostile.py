"""A hostile agent: whatever it sends, the server answers in its own shape or hangs up, and no session changes that is
not its own, nor its own by a refused request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import socket
import time
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl360.sessions import routes, server
from rl360.sessions.core import Session
from rl360.sessions.families.base import ChatTemplate
from rl360.sessions.registry import Limits, Registry
from rl360.sessions.routes import Service, create_app
from rl360.sessions.turns import Completion, PreparedTurn
from tests.unit.sessions_data import BASH_SCHEMA, completion, spec, state_of, template
from tests.unit.sessions_server import BEARER, TOKEN, Bench, engine_reply, serving, session_bench

MESSAGES: list[Any] = [{"role": "system", "content": "Use bash."}, {"role": "user", "content": "Create hello.txt"}]
CHAT: dict[str, Any] = {"model": "policy", "messages": MESSAGES, "tools": [BASH_SCHEMA]}
LIMIT = 300_000


@pytest.fixture(scope="module")
def _shared() -> Iterator[Bench]:
    with session_bench(Limits(body_bytes=LIMIT, session_requests=16)) as bench:
        yield bench


@pytest.fixture
def bench(_shared: Bench) -> Bench:
    _shared.engine.script = engine_reply
    _shared.engine.gate.set()
    _shared.engine.bodies.clear()
    _shared.engine.keys.clear()
    return _shared


@contextlib.contextmanager
def connected(bench: Bench) -> Iterator[socket.socket]:
    host, port = bench.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        yield connection


def raw(bench: Bench, data: bytes) -> bytes:
    """What the server says to these bytes; empty when it hangs up."""
    with connected(bench) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(data)
        return connection.recv(1 << 16)
    return b""


def post(path: str, body: bytes = b"", headers: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def test_bodies_over_the_limit_are_not_kept(bench: Bench) -> None:
    session_id, _ = bench.create()
    path = f"/sessions/{session_id}/v1/chat/completions"
    stated = raw(bench, post(path).replace(b"Content-Length: 0", b"Content-Length: 10000000000") + b"x" * 2 * LIMIT)
    assert b" 413 " in stated.split(b"\r\n")[0] and b"over_budget" in stated
    piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    assert b" 413 " in raw(bench, head + piece * 8).split(b"\r\n")[0]
    # without the token nothing of a body is read
    assert b" 401 " in raw(bench, post("/sessions").replace(b"Content-Length: 0", b"Content-Length: 99999999999"))
    held = bench.service.registry.get(session_id)
    assert (held.body_bytes, held.in_flight, held.session.epoch) == (0, 0, 0)


def test_bodies_of_requests_in_flight_are_limited_together(bench: Bench) -> None:
    session_id, _ = bench.create()
    bench.engine.gate.clear()
    big = orjson.dumps({**CHAT, "metadata": "x" * 250_000})
    with contextlib.ExitStack() as open_:
        waiting = [open_.enter_context(connected(bench)) for _ in range(4)]
        for connection in waiting:
            connection.sendall(post(f"/sessions/{session_id}/v1/chat/completions", big))
        _wait(lambda: len(bench.engine.bodies) == 4)
        reply = bench.chat(session_id, big)
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "too_many_requests")
    bench.engine.gate.set()
    _wait(lambda: bench.service.registry.in_flight == 0)
    assert bench.service.registry.get(session_id).body_bytes == 0
    assert bench.chat(session_id, CHAT).status_code == 200


def _wait(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _bulky() -> dict[str, tuple[str, Any]]:
    """Bodies that cost much more than their size says, by what they are made of."""
    user, count = {"role": "user", "content": "a"}, 10_000
    text, result = {"type": "text", "text": "x" * 20}, {"type": "tool_result", "tool_use_id": "x"}
    call = {"id": "", "function": {"name": "bash", "arguments": "{}"}}
    use = {"type": "tool_use", "id": "", "name": "bash", "input": {}}
    schema = {"type": "object", "properties": {f"p{i}": {} for i in range(count)}}
    function = {"name": "bash", "parameters": schema}
    return {
        "a long text": ("chat/completions", {"messages": [{"role": "user", "content": "a " * 50_000}]}),
        "parts": ("chat/completions", {"messages": [{"role": "user", "content": [text] * count}]}),
        "calls": ("chat/completions", {"messages": [user, {"role": "assistant", "tool_calls": [call] * count}, user]}),
        "parameters": ("chat/completions", {"messages": [user], "tools": [{"type": "function", "function": function}]}),
        "blocks": ("messages", {"messages": [{"role": "user", "content": [text] * 8 * count}]}),
        "results": ("messages", {"messages": [{"role": "user", "content": [result] * count}]}),
        "system": ("messages", {"messages": [user], "system": [text] * count}),
        "uses": ("messages/count_tokens", {"messages": [user, {"role": "assistant", "content": [use] * count}, user]}),
    }


@pytest.mark.parametrize("made_of", list(_bulky()))
def test_bulky_bodies_are_worked_on_apart_from_the_event_loop(made_of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_loop: list[str] = []

    def watch(owner: Any, name: str) -> None:
        work = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop()
                on_loop.append(name)
            return work(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    path, body = _bulky()[made_of]
    data = orjson.dumps(body)
    for owner, name in ((Session, "read"), (Session, "render"), (ChatTemplate, "render_prompt")):
        watch(owner, name)
    if len(data) > 1 << 20:  # splitting is cheap, but for blocks that become one text
        watch(routes.anthropic, "read")
    registry = Registry(template(), Limits())
    app = create_app(Service(template(), registry, _Upstream(), TOKEN))  # type: ignore[arg-type]
    session = registry.create(spec())
    began = time.process_time()
    status, _reply = ask(app, f"/sessions/{session.session_id}/v1/{path}", data)
    assert status in (200, 400, 409, 413) and on_loop == []
    assert time.process_time() - began < 6.0  # in proportion to its size


def test_a_slow_body_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "BODY_S", 0.2)
    session_id, _ = bench.create()
    said = raw(bench, post(f"/sessions/{session_id}/v1/messages").replace(b"Length: 0", b"Length: 100") + b'{"mess')
    assert b" 408 " in said.split(b"\r\n")[0] and b'"type":"error"' in said and b"slow_body" in said
    assert bench.service.registry.in_flight == 0


DEEP = b"[" * 20_000 + b"]" * 20_000


@pytest.mark.parametrize(
    "body",
    [
        DEEP,
        b'{"messages":[{"role":"user","content":%b}]}' % DEEP,
        b'{"messages":[{"role":"user","content":"x"}],"tools":%b}' % DEEP,
        b'{"messages":[{"role":"user","content":"x"}],"metadata":%b}' % DEEP,
        b'{"messages":[{"role":"user","content":"x"}],"messages":%b}' % DEEP,
        b'{"messages":[{"role":"user","content":"\xff"}]}',
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"messages":[{"role":"user","content":"x"}],"\\ud800":1}',
        b'\xef\xbb\xbf{"messages":[{"role":"user","content":"x"}]}',
        b'{"messages":[{"role":"user","content":"x"}]}{}',
        b'{"messages":[{"role":"user","content":"x"}],"seed":1e999}',
        b'{"messages":[{"role":"user","content":"x"}],"seed":NaN}',
        b"\x00" * 100,
        gzip.compress(orjson.dumps(CHAT)),
        b"messages=x",
    ],
    ids=range(15),
)
@pytest.mark.parametrize("path", ["chat/completions", "messages", "messages/count_tokens"])
def test_nests_bytes_and_encodings(bench: Bench, body: bytes, path: str) -> None:
    session_id, _ = bench.create()
    before = state_of(bench.service.registry.get(session_id).session)
    reply = bench.http.post(f"/sessions/{session_id}/v1/{path}", content=body)
    assert reply.status_code in (400, 413), reply.text
    assert reply.json()["error"]["code"] == "bad_body"
    assert state_of(bench.service.registry.get(session_id).session) == before and not bench.engine.bodies


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "é"])
def test_the_body_decides_not_its_declared_type(bench: Bench, kind: str) -> None:
    session_id, _ = bench.create()
    assert bench.chat(session_id, CHAT, headers={"content-type": kind.encode()}).status_code == 200
    assert bench.chat(session_id, b"a=b", headers={"content-type": kind.encode()}).status_code == 400


def test_headers_of_an_agent_decide_nothing(bench: Bench) -> None:
    mine, _ = bench.create()
    other, _ = bench.create()
    tricks = {"X-SMG-Routing-Key": other, "X-Session-Id": other, "x-api-key": "k", "Authorization": "Bearer nonsense"}
    tricks |= {"X-HTTP-Method-Override": "DELETE", "X-Original-URL": f"/sessions/{other}", "X-Forwarded-Host": "evil"}
    assert bench.chat(mine, CHAT, headers=tricks).status_code == 200
    assert bench.engine.keys == [mine]
    assert bench.service.registry.get(other).session.epoch == 0
    evil = bench.http.post("/sessions", content=orjson.dumps({}), headers={**BEARER, "Host": "evil"})
    assert evil.status_code == 400
    # two lengths, or a length and chunks: refused, never one request inside another
    smuggled = f"POST /sessions/{mine}/v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
    for second in ("Content-Length: 50\r\n", "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n"):
        said = raw(bench, f"{smuggled}{second}\r\n0\r\n\r\nDELETE /sessions/{other} HTTP/1.1\r\n\r\n".encode())
        assert b" 400 " in said.split(b"\r\n")[0]
    assert bench.service.registry.get(mine).session.epoch == 1


def test_only_the_very_id_opens_a_session(bench: Bench) -> None:
    ids = {bench.create()[0] for _ in range(50)}
    assert len(ids) == 50 and all(len(session_id) >= 32 for session_id in ids)
    session_id = ids.pop()
    guesses = [session_id[:-1], session_id + "=", session_id.swapcase(), session_id[::-1], "", "*", "None", "%00", "."]
    guesses += [f"{session_id}%20", f"x/../{session_id}x", "é", "a" * 5000]
    for guess in guesses:
        for path in (f"/sessions/{guess}/v1/chat/completions", f"/sessions/{guess}/v1/messages"):
            assert bench.http.post(path, content=orjson.dumps(CHAT)).status_code == 404, guess
    assert bench.service.registry.get(session_id).session.epoch == 0


def test_paths_lead_nowhere_else(bench: Bench) -> None:
    mine, _ = bench.create()
    other, _ = bench.create()
    for path in (
        f"/sessions/{mine}/v1/../../{other}",
        f"/sessions/{mine}/v1/%2e%2e/%2e%2e/{other}/store",
        f"/sessions/{mine}%2f..%2f{other}/v1/chat/completions",
        f"//sessions/{mine}/v1/chat/completions",
        f"/sessions/{mine}/v1/chat/completions/",
        f"/sessions/{mine}/v1/chat/completions;{other}",
        f"/sessions/{mine}\\v1/chat/completions",
        "/../../etc/passwd",
        "/sessions/" + "a/" * 2000,
        "*",
    ):
        said = raw(bench, post(path, orjson.dumps(CHAT)))
        assert said.split(b" ")[1] in (b"404", b"405", b"400", b"401"), path
    for method in ("GET", "PUT", "PATCH", "OPTIONS", "TRACE", "CONNECT", "DELETE"):
        said = raw(bench, post(f"/sessions/{mine}/v1/chat/completions").replace(b"POST", method.encode(), 1))
        assert said.split(b" ")[1] in (b"404", b"405", b"400"), method
    assert {bench.service.registry.get(key).session.epoch for key in (mine, other)} == {0}


def test_an_agent_s_id_opens_nothing_of_the_operator_s(bench: Bench) -> None:
    mine, _ = bench.create()
    calls = [("GET", "/sessions"), ("POST", "/sessions"), ("POST", "/drain"), ("GET", f"/sessions/{mine}")]
    calls += [("GET", f"/sessions/{mine}/merged"), ("POST", f"/sessions/{mine}/store"), ("DELETE", f"/sessions/{mine}")]
    for method, path in calls:
        for value in ("", "Bearer", f"Bearer {mine}", f"bearer {TOKEN}", f"Bearer {TOKEN}x", f"Basic {TOKEN}"):
            reply = bench.http.request(method, path, headers={"Authorization": value}, content=b"{}")
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "unauthorized"), (path, value)
    assert bench.service.registry.get(mine).session.epoch == 0 and not bench.service.registry.draining


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST\r\n\r\n",
        b"\r\n" * 1000,
        b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 100_000,
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 1_000_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    ],
    ids=range(7),
)
def test_what_is_not_http_ends_only_its_own_connection(bench: Bench, data: bytes) -> None:
    with connected(bench) as connection, contextlib.suppress(ConnectionError, TimeoutError):
        connection.settimeout(0.3)
        connection.sendall(data)
        connection.recv(1 << 16)
    assert bench.http.get("/health").json()["status"] == "ok"


def test_a_head_that_never_ends_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_TICKS_PER_SWEEP", 2)
    service = Service(template(), Registry(template(), Limits()), _Upstream(), TOKEN)  # type: ignore[arg-type]
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with contextlib.ExitStack() as open_:
        url = open_.enter_context(
            serving(create_app(service), functools.partial(server.DrainingServer, service=service))
        )
        host, port = url.removeprefix("http://").split(":")
        silent, first, second, idle = (
            open_.enter_context(socket.create_connection((host, int(port)), timeout=10)) for _ in range(4)
        )
        first.sendall(whole[:10])
        for connection in (second, idle):
            connection.sendall(whole)
            assert b" 200 " in connection.recv(1 << 16)
        second.sendall(whole[:10])
        assert [connection.recv(1 << 16) for connection in (silent, first, second)] == [b""] * 3
        idle.sendall(whole)
        assert b" 200 " in idle.recv(1 << 16)


def test_who_does_not_read_a_reply_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the kernel takes, before and after the reply's last piece; who reads, however slowly, gets it all."""
    size = 24 << 20
    monkeypatch.setattr(server, "_TICKS_PER_SWEEP", 3)
    monkeypatch.setattr(server, "_UNSENT_BYTES", 1 << 16)
    monkeypatch.setattr(routes, "page", lambda: b"x" * size)
    service = Service(template(), Registry(template(), Limits()), _Upstream(), TOKEN)  # type: ignore[arg-type]
    with contextlib.ExitStack() as open_:
        app = create_app(service)
        url = open_.enter_context(serving(app, functools.partial(server.DrainingServer, service=service)))
        host, port = url.removeprefix("http://").split(":")
        deaf, slow = (open_.enter_context(socket.socket()) for _ in range(2))
        for connection in (deaf, slow):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            connection.settimeout(10)
            connection.connect((host, int(port)))
            connection.sendall(b"GET /docs HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        got = 0
        while piece := slow.recv(1 << 18):
            got += len(piece)
            time.sleep(0.005)
        assert got > size
        _wait(lambda: service.disconnects == 1)
        got = 0
        with contextlib.suppress(ConnectionError):
            while piece := deaf.recv(1 << 20):
                got += len(piece)
        assert got < size  # what was on its way


def test_hanging_up_anywhere_leaves_nothing_behind(bench: Bench) -> None:
    session_id, _ = bench.create()
    session = bench.service.registry.get(session_id).session
    whole = post(f"/sessions/{session_id}/v1/chat/completions", orjson.dumps({**CHAT, "stream": True}))
    bench.engine.gate.clear()
    for cut in (10, whole.index(b"\r\n\r\n") + 4, len(whole) - 20, len(whole)):
        with connected(bench) as connection:
            connection.sendall(whole[:cut])
            time.sleep(0.03)
    _wait(lambda: bench.service.registry.in_flight == 0)
    bench.engine.gate.set()
    assert session.epoch == 0 and bench.service.registry.get(session_id).body_bytes == 0
    with connected(bench) as connection:  # and while the events of a stream come
        connection.sendall(whole)
        connection.recv(1)
    _wait(lambda: bench.service.registry.in_flight == 0)
    assert session.epoch == 1
    assert bench.chat(session_id, CHAT).status_code == 200


def test_a_thousand_requests_at_once_reach_the_engine_as_a_few(bench: Bench) -> None:
    session_id, _ = bench.create()
    other, _ = bench.create()
    bench.engine.gate.clear()
    whole = post(f"/sessions/{session_id}/v1/chat/completions", orjson.dumps(CHAT), "Connection: close\r\n")
    host, port = bench.url.removeprefix("http://").split(":")

    statuses: list[bytes] = []

    async def one() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(whole)
        statuses.append((await reader.read()).split(b" ")[1])
        writer.close()
        if len(statuses) == 984:
            bench.engine.gate.set()

    async def flood() -> None:
        await asyncio.gather(*[one() for _ in range(1000)])

    asyncio.run(flood())
    assert {status: statuses.count(status) for status in set(statuses)} == {b"429": 984, b"409": 15, b"200": 1}
    assert len(bench.engine.bodies) == 16
    assert bench.service.registry.get(session_id).session.epoch == 1
    assert bench.chat(other, CHAT).status_code == 200


class _Upstream:
    """Answers every turn at once."""

    url = "in this process"

    async def aclose(self) -> None:
        pass

    async def generate(self, _session_id: str, _prepared: PreparedTurn) -> Completion:
        return completion()


def ask(app: Any, path: str, body: bytes) -> tuple[int, bytes]:
    """One POST over plain ASGI."""
    sent: list[dict[str, Any]] = []
    received = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        message = next(received, None)
        return message if message is not None else await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": []}
    scope |= {"query_string": b"", "root_path": "", "scheme": "http", "server": ("x", 1), "http_version": "1.1"}
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


json_value = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
words = st.sampled_from(["role", "content", "type", "text", "tool_calls", "tool_use", "tool_result", "id", "input"])
blocks = st.dictionaries(words, st.sampled_from(["user", "assistant", "tool", "text", "x"]) | json_value, max_size=4)
fields = st.sampled_from(
    ["messages", "tools", "system", "stream", "n", "model", "max_tokens", "temperature", "tool_choice", "thread", "x"]
)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """A good body with one thing replaced, cut, or spliced; or anything at all."""
    body = {key: orjson.loads(orjson.dumps(value)) for key, value in CHAT.items()}
    where = draw(st.sampled_from(["field", "message", "part", "tool", "bytes", "any"]))
    if where == "field":
        body[draw(fields)] = draw(json_value)
    elif where == "message":
        body["messages"][draw(st.integers(0, 1))] = draw(json_value | blocks)
    elif where == "part":
        body["messages"].append(
            {"role": draw(st.sampled_from(["user", "assistant"])), "content": draw(st.lists(blocks))}
        )
    elif where == "tool":
        body["tools"][0][draw(st.sampled_from(["type", "function", "name", "input_schema"]))] = draw(json_value)
    elif where == "any":
        return draw(st.binary(max_size=60))
    data = orjson.dumps(_writable(body))
    if where == "bytes":
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=4)) + data[at + draw(st.integers(0, 3)) :]
    return data


def _writable(value: Any) -> Any:
    """What orjson writes: numbers of 64 bits, text without lone surrogates."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if -(1 << 63) <= value < 1 << 64 else float(value)
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_writable(item) for item in value]
    if isinstance(value, dict):
        return {_writable(key): _writable(item) for key, item in value.items()}
    return value


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    data=bodies(), path=st.sampled_from(["chat/completions", "messages", "messages/count_tokens"]), held=st.booleans()
)
def test_no_body_breaks_the_server_or_changes_a_session_by_its_refusal(data: bytes, path: str, held: bool) -> None:
    registry = Registry(template(), Limits())
    app = create_app(Service(template(), registry, _Upstream(), TOKEN))  # type: ignore[arg-type]
    session = registry.create(spec())
    base = f"/sessions/{session.session_id}/v1"
    if held:
        assert ask(app, f"{base}/chat/completions", orjson.dumps(CHAT))[0] == 200
    before = state_of(session)
    status, reply = ask(app, f"{base}/{path}", data)
    assert status in (200, 400, 409, 413), reply
    if status != 200 or path.endswith("count_tokens"):
        assert state_of(session) == before
    if status != 200:
        error = orjson.loads(reply)["error"]
        assert error["message"] and error["code"] and "\n" not in error["message"]
    assert (registry.in_flight, registry.get(session.session_id).body_bytes) == (0, 0)
    assert registry.total_bytes == session.held_bytes
