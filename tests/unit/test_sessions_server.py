"""The session server over HTTP: the agent's path, the operator's path, and everything that must be refused."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest

from rl360.sessions.registry import Limits, Registry
from rl360.sessions.sample import decode_samples
from tests.unit.sessions_data import BASH_SCHEMA, EDIT_SCHEMA, call_turn, spec, state_of, template
from tests.unit.sessions_server import BEARER, CREATE, Bench, engine_reply, session_bench

MESSAGES = [{"role": "system", "content": "Use bash."}, {"role": "user", "content": "Create hello.txt"}]
CHAT = {"model": "openai/policy", "messages": MESSAGES, "tools": [BASH_SCHEMA]}


@pytest.fixture(scope="module")
def _shared() -> Iterator[Bench]:
    with session_bench(Limits(session_bytes=200_000, body_bytes=300_000)) as bench:
        yield bench


@pytest.fixture
def bench(_shared: Bench) -> Bench:
    _shared.engine.script = engine_reply
    _shared.engine.gate.set()
    _shared.engine.bodies.clear()
    return _shared


def _wait(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"waited 10 s for {what}"
        time.sleep(0.005)


def test_a_whole_attempt(bench: Bench) -> None:
    session_id, base_url = bench.create()
    assert base_url == f"{bench.url}/sessions/{session_id}/v1"
    bench.engine.script = lambda body: engine_reply(body, call_turn("ls"))
    first = bench.chat(session_id, CHAT).json()
    message = first["choices"][0]["message"]
    assert first["choices"][0]["finish_reason"] == "tool_calls"
    assert message["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"command":"ls"}'}
    bench.engine.script = engine_reply
    tool = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "a.txt"}
    second = bench.chat(session_id, {**CHAT, "messages": [*MESSAGES, message, tool]}).json()
    assert second["choices"][0]["message"] == {"role": "assistant", "content": "done"}
    assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    sent = [body["input_ids"] for body in bench.engine.bodies]
    assert bench.engine.keys[-2:] == [session_id, session_id]
    merged = bench.get(f"/sessions/{session_id}/merged")
    (sample,) = decode_samples(merged.content, "merged")
    assert merged.headers["content-type"] == "application/msgpack"
    assert sample.tokens.tolist()[: len(sent[1])] == sent[1]
    assert (sample.turns, sample.session_id, sample.attempt_id) == (2, session_id, CREATE["attempt_id"])
    as_json = bench.get(f"/sessions/{session_id}/merged", Accept="application/json").json()
    assert as_json["samples"][0]["tokens"] == sample.tokens.tolist()
    assert bench.get(f"/sessions/{session_id}").json()["turns"][1]["prompt_tokens"] == len(sent[1])
    assert bench.http.delete(f"/sessions/{session_id}", headers=BEARER).status_code == 204
    assert bench.get(f"/sessions/{session_id}").status_code == 404


def test_everything_that_decides_sampling_is_assigned(bench: Bench) -> None:
    session_id, _ = bench.create(max_seq_len=64)
    wanted = {"temperature": 0.1, "top_p": 0.2, "max_tokens": 3, "seed": 7, "stop": ["x"], "logprobs": True}
    bench.chat(session_id, {**CHAT, **wanted, "top_k": -1, "input_ids": [1], "user": "me"})
    body = bench.engine.bodies[-1]
    prompt = len(body["input_ids"])
    assert body["return_logprob"] is True and body["return_prompt_token_ids"] is True and body["stream"] is False
    assert body["sampling_params"]["max_new_tokens"] == 64 - prompt < 48
    assert (body["sampling_params"]["temperature"], body["sampling_params"]["top_p"]) == (1.0, 1.0)
    assert body["sampling_params"]["stop_token_ids"] == [2]
    assert body["sampling_params"]["no_stop_trim"] is False
    ignored = bench.get(f"/sessions/{session_id}").json()["ignored_params"]
    assert ignored == dict.fromkeys(
        ("temperature", "top_p", "max_new_tokens", "seed", "stop", "logprobs", "input_ids"), 1
    )


@pytest.mark.parametrize(
    ("fields", "counted"),
    [
        ({"seed": 0, "min_tokens": 0, "ignore_eos": False}, {"seed", "min_tokens", "ignore_eos"}),
        ({"seed": 7, "stop": "x", "logprobs": True, "top_logprobs": 2}, {"seed", "stop", "logprobs", "top_logprobs"}),
        ({"presence_penalty": 0, "frequency_penalty": 0.0, "logprobs": False, "top_logprobs": 0}, set()),
        ({"presence_penalty": 0.1, "frequency_penalty": -1}, {"presence_penalty", "frequency_penalty"}),
        ({"seed": None, "stop": [], "logit_bias": {}, "suffix": "", "store": False, "user": "me"}, set()),
    ],
)
def test_a_field_that_says_something_and_does_nothing_is_counted(
    bench: Bench, fields: dict[str, Any], counted: set[str]
) -> None:
    """Zero and false say something; null, nothing in it, and the protocol's own default do not."""
    session_id, _ = bench.create()
    assert bench.chat(session_id, {**CHAT, **fields}).status_code == 200
    assert bench.get(f"/sessions/{session_id}").json()["ignored_params"] == dict.fromkeys(counted, 1)


def test_the_agent_is_told_no_ids_and_no_logprobs(bench: Bench) -> None:
    session_id, _ = bench.create()
    reply = bench.chat(session_id, {**CHAT, "logprobs": True, "stream": False}).json()
    assert set(reply) == {"id", "object", "created", "model", "choices", "usage"}
    assert reply["choices"][0]["logprobs"] is None
    text = orjson.dumps(reply).decode()
    assert session_id not in text and "_ids" not in text and "-0.5" not in text


def test_a_stream_carries_usage_only_when_asked(bench: Bench) -> None:
    session_id, _ = bench.create()
    reply = bench.chat(session_id, {**CHAT, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text.endswith("data: [DONE]\n\n")
    chunks = [orjson.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, "stop"]


def test_bearer_guards_all_but_health_and_the_agent_path(bench: Bench) -> None:
    session_id, _ = bench.create()
    for method, path in (
        ("POST", "/sessions"),
        ("GET", f"/sessions/{session_id}"),
        ("GET", f"/sessions/{session_id}/merged"),
        ("DELETE", f"/sessions/{session_id}"),
    ):
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "é"},
            {"Authorization": BEARER["Authorization"][7:]},
        ):
            encoded = {key: value.encode() for key, value in headers.items()}
            reply = bench.http.request(method, path, headers=encoded)
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "unauthorized")
    assert bench.chat(session_id, CHAT).status_code == 200
    told = bench.http.get("/health").json()
    assert (told["status"], told["service"], len(told["incarnation"])) == ("ok", "sessions", 32)
    assert told["refused"]["unauthorized"] >= 16


HOSTILE_BODIES: list[Any] = [
    b"",
    b"{",
    b"\xff\xfe",
    b"[1]",
    b"null",
    b'{"messages": "x"}',
    b'{"messages": []}',
    b'{"messages": [1]}',
    b'{"messages": [{}]}',
    b'{"messages": [{"role": "user"}]}',
    b'{"messages": [{"role": ["user"], "content": "x"}]}',
    b'{"messages": [{"role": "developer", "content": "x"}]}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": {"a": 1}}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
    b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "prefill"}]}',
    {**CHAT, "messages": [*MESSAGES, MESSAGES[0], MESSAGES[1]]},
    b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    {**CHAT, "messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}, *MESSAGES[1:]]},
    {**CHAT, "messages": [{"role": "assistant", "tool_calls": 7}, *MESSAGES[1:]]},
    {**CHAT, "messages": [{"role": "assistant", "reasoning_content": 5}, *MESSAGES[1:]]},
    {
        **CHAT,
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "a", "function": {"name": "bash", "arguments": '{"a":' + "[" * 300 + "]" * 300 + "}"}}
                ],
            },
            *MESSAGES[1:],
        ],
    },
    {**CHAT, "messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]},
    {**CHAT, "messages": [{"role": "user", "content": "x"}] * 5000},
    {**CHAT, "tools": "x"},
    {**CHAT, "tools": [1]},
    {**CHAT, "tools": [{"type": "function", "function": {"name": "a\nb"}}]},
    {**CHAT, "tools": [BASH_SCHEMA, BASH_SCHEMA]},
    {**CHAT, "tools": [{"type": "function", "function": {"name": "x", "parameters": {"properties": [1]}}}]},
    {**CHAT, "tools": [{"type": "function", "function": {"name": "x", "parameters": {"required": ["a"]}}}]},
    {**CHAT, "tools": [{"type": "function", "function": {"name": "x", "parameters": {"required": [[1]]}}}]},
    {**CHAT, "n": 2},
    {**CHAT, "n": True},
    {**CHAT, "stream": "yes"},
    {**CHAT, "stream_options": [1]},
    {**CHAT, "tool_choice": "required"},
    {**CHAT, "response_format": {"type": "json_object"}},
    {**CHAT, "model": 5},
]


@pytest.mark.parametrize("body", HOSTILE_BODIES, ids=range(len(HOSTILE_BODIES)))
def test_hostile_bodies_are_refused_and_change_nothing(bench: Bench, body: Any) -> None:
    session_id, _ = bench.create()
    session = bench.service.registry.get(session_id).session
    for _ in range(2):  # before the first turn, and after it
        before, sent = state_of(session), len(bench.engine.bodies)
        reply = bench.chat(session_id, body)
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert error["code"] == "bad_body" and error["message"] and "\n" not in error["message"]
        assert state_of(session) == before
        assert len(bench.engine.bodies) == sent
        bench.chat(session_id, CHAT)


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": {"temperature": 1.0}},
        {"sampling": {**CREATE["sampling"], "temperature": -1}},
        {"sampling": {**CREATE["sampling"], "top_k": 0}},
        {"sampling": {**CREATE["sampling"], "top_p": 0}},
        {"sampling": {**CREATE["sampling"], "max_new_tokens": "48"}},
        {"sampling": {**CREATE["sampling"], "seed": 1}},
        {"max_seq_len": 0},
        {"max_seq_len": None},
        {"attempt_id": ""},
        {"attempt_id": "x" * 300},
        {"surprise": 1},
        {"expected_weight_version": 3},
    ],
)
def test_bad_session_bodies(bench: Bench, changes: dict[str, Any]) -> None:
    reply = bench.http.post("/sessions", json={**CREATE, **changes}, headers=BEARER)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "bad_body")
    for raw in (b"", b"[]", b'{"sampling": NaN}'):
        assert bench.http.post("/sessions", content=raw, headers=BEARER).status_code == 400


def test_unknown_paths_answer_in_the_same_shape(bench: Bench) -> None:
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("PUT", "/sessions", 405),
        ("GET", "/sessions/nope", 404),
        ("GET", "/sessions/%00%ff/merged", 404),
        ("DELETE", "/sessions/nope", 404),
    ):
        reply = bench.http.request(method, path, headers=BEARER)
        assert reply.status_code == status
        assert set(reply.json()["error"]) == {"message", "type", "code", "param"}
    assert bench.chat("nope", CHAT).status_code == 404


def test_budgets(bench: Bench) -> None:
    session_id, _ = bench.create(max_seq_len=1 << 20)
    over = bench.chat(session_id, {**CHAT, "messages": [{"role": "user", "content": "x" * 400_000}]})
    assert (over.status_code, over.json()["error"]["code"]) == (413, "over_budget")
    # long enough to be rendered in a thread, too long for this session's budget
    big = bench.chat(session_id, {**CHAT, "messages": [{"role": "user", "content": "x" * 70_000}]})
    assert (big.status_code, big.json()["error"]["code"]) == (413, "over_budget")
    small, _ = bench.create(max_seq_len=16)
    full = bench.chat(small, CHAT)
    assert (full.status_code, full.json()["error"]["code"]) == (409, "length")
    assert full.headers["x-should-retry"] == "false"
    unmerged = bench.get(f"/sessions/{small}/merged").json()["error"]
    assert (unmerged["code"], unmerged["sampled_tokens"]) == ("cannot_merge", 0)
    assert bench.get(f"/sessions/{small}/merged").status_code == 422


def test_racing_turns_of_a_tree_have_ids_of_their_own(bench: Bench) -> None:
    session_id, _ = bench.create(mode="tree")
    bench.engine.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        racing = [pool.submit(bench.chat, session_id, CHAT) for _ in range(8)]
        _wait(lambda: len(bench.engine.bodies) == 8, "eight generations")
        bench.engine.gate.set()
        ids = {future.result().json()["id"] for future in racing}
    assert len(ids) == 8


def test_of_racing_requests_exactly_one_is_recorded(bench: Bench) -> None:
    session_id, _ = bench.create()
    bench.engine.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        racing = [pool.submit(bench.chat, session_id, CHAT) for _ in range(8)]
        _wait(lambda: len(bench.engine.bodies) == 8, "eight generations")
        bench.engine.gate.set()
        replies = [future.result() for future in racing]
    assert sorted(reply.status_code for reply in replies) == [200] + [409] * 7
    lost = [reply for reply in replies if reply.status_code == 409]
    assert {reply.json()["error"]["code"] for reply in lost} == {"lost_race"}
    # the stock client would resend a 409, and its resend would roll the winner back
    assert all(reply.headers["x-should-retry"] == "false" for reply in lost)
    session = bench.service.registry.get(session_id).session
    assert (session.epoch, len(session.turns)) == (1, 1)
    assert session.dropped == {"duplicate": 7 * session.turns[0].sampled}


def test_a_client_that_goes_away_changes_nothing_and_stops_the_engine(bench: Bench) -> None:
    session_id, _ = bench.create()
    session = bench.service.registry.get(session_id).session
    bench.engine.gate.clear()
    bench.engine.cancelled.clear()
    with pytest.raises(httpx.ReadTimeout):
        bench.chat(session_id, CHAT, timeout=httpx.Timeout(5, read=0.3))
    assert bench.engine.cancelled.wait(10)
    _wait(lambda: bench.service.registry.in_flight == 0, "the request to end")
    bench.engine.gate.set()
    assert (session.epoch, session.sampled_tokens, session.requests_unanswered) == (0, 0, 1)
    assert bench.chat(session_id, CHAT).status_code == 200


def test_a_session_deleted_in_flight_records_nothing(bench: Bench) -> None:
    session_id, _ = bench.create()
    session = bench.service.registry.get(session_id).session
    bench.engine.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pending = pool.submit(bench.chat, session_id, CHAT)
        _wait(lambda: bench.engine.bodies, "the generation")
        assert bench.http.delete(f"/sessions/{session_id}", headers=BEARER).status_code == 204
        bench.engine.gate.set()
        assert pending.result().status_code == 404
    assert session.turns == []


def test_changed_tools_and_cut_turns_over_http(bench: Bench) -> None:
    session_id, _ = bench.create()
    message = bench.chat(session_id, CHAT).json()["choices"][0]["message"]
    longer = [*MESSAGES, message, {"role": "user", "content": "more"}]
    changed = bench.chat(session_id, {**CHAT, "messages": longer, "tools": [EDIT_SCHEMA]})
    assert (changed.status_code, changed.json()["error"]["code"]) == (400, "tools_changed")
    bench.engine.script = lambda body: engine_reply(body, "half", finish="length")
    cut = bench.chat(session_id, {**CHAT, "messages": longer}).json()["choices"][0]
    assert cut["finish_reason"] == "length"
    after = bench.chat(session_id, {**CHAT, "messages": [*longer, cut["message"], {"role": "user", "content": "x"}]})
    assert (after.status_code, after.json()["error"]["code"]) == (409, "cut_turn")
    for said in ("takes no further request", "open a new session", "max_new_tokens", "max_seq_len", "mode tree"):
        assert said in after.json()["error"]["message"]


def test_what_is_wrong_with_a_new_session_is_told_in_one_line(bench: Bench) -> None:
    missing = {name: value for name, value in CREATE.items() if name not in ("group_id", "task_id")}
    sampling = {**CREATE["sampling"], "top_k": 0}
    for body, said in (
        ({**CREATE, "mode": "graph"}, "mode: Input should be 'linear' or 'tree' (got 'graph')"),
        ({**CREATE, "sampling": sampling}, "sampling.top_k: top_k 0 samples nothing; use -1 for off"),
        (missing, "group_id: Field required; task_id: Field required"),
        ({**CREATE, "moed": "tree", "a\nb": 1}, "unknown key moed; unknown key a b"),
        ({**CREATE, "attempt_id": "a b/../c"}, "attempt_id: use letters, digits, dot"),
        ({**CREATE, "attempt_id": "a b/../c"}, "(got 'a b/../c')"),
        ({**CREATE, "attempt_id": "a" * 201}, "attempt_id: String should have at most 200 characters"),
    ):
        reply = bench.post("/sessions", body)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (400, "bad_body") and said in error["message"], error
        assert "\n" not in error["message"]
    many = bench.post("/sessions", CREATE | {f"key{number}": 1 for number in range(4_000)}).json()["error"]["message"]
    assert len(many) < 2100 and many.endswith("...")
    for name in (".hidden", "-x", "a\n", "ä", ""):
        assert bench.post("/sessions", {**CREATE, "attempt_id": name}).status_code == 400
    bench.create(attempt_id="A.b_c-9")


def test_creating_twice_finds_the_session_again() -> None:
    with session_bench() as bench:
        first, _ = bench.create(expected_weight_version="run:0")
        assert bench.create(expected_weight_version="run:0")[0] == first
        assert bench.create(expected_weight_version="run:1")[0] != first
        assert bench.create()[0] != bench.create()[0]  # no version, no run: never shared
        bench.http.delete(f"/sessions/{first}", headers=BEARER)
        assert bench.create(expected_weight_version="run:0")[0] != first


def test_idle_sessions_are_evicted_but_never_in_flight() -> None:
    now = [0.0]
    registry = Registry(template(), Limits(idle_ttl_s=10), clock=lambda: now[0])
    busy, idle = registry.create(spec(attempt_id="a")), registry.create(spec(attempt_id="b"))
    assert registry.total_bytes == busy.held_bytes + idle.held_bytes
    with registry.using(busy.session_id):
        now[0] = 11.0
        assert registry.evict_idle() == 1
    assert idle.closed and not busy.closed
    assert registry.total_bytes == busy.held_bytes
    now[0] = 20.0
    assert registry.evict_idle() == 0
    now[0] = 21.0
    assert registry.evict_idle() == 1
    assert (len(registry), registry.total_bytes, registry.evicted_idle) == (0, 0, 2)
