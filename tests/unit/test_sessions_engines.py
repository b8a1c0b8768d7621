"""What engines and gateways do wrong, late or in their own way, over real HTTP: none of it changes a session unless it
was taken as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pybase64
import pytest
import uvicorn

from rl360.errors import BadInput
from rl360.sessions import upstream
from rl360.sessions.core import Session
from rl360.sessions.merge import Pick, merge, snapshot
from rl360.sessions.refusals import Refusal, SessionRefusal
from rl360.sessions.upstream import Upstream
from tests.unit.sessions_data import (
    BASH_SCHEMA,
    OPENING,
    SHAPE,
    encode_turn,
    new_session,
    request,
    rows_of,
    state_of,
    template,
)
from tests.unit.sessions_server import Bench, Engine, engine_reply, serving, session_bench

MESSAGES = [{"role": "system", "content": "Use bash."}, {"role": "user", "content": "Create hello.txt"}]
CHAT = {"model": "policy", "messages": MESSAGES, "tools": [BASH_SCHEMA]}
BASH = BASH_SCHEMA["function"]
TOOL = {"name": "bash", "description": BASH["description"], "input_schema": BASH["parameters"]}  # type: ignore[index]


@pytest.fixture(scope="module")
def _plain() -> Iterator[Bench]:
    with session_bench() as bench:
        yield bench


@pytest.fixture(scope="module")
def _routed() -> Iterator[Bench]:
    with session_bench(routing=SHAPE) as bench:
        yield bench


def _fresh(bench: Bench) -> Bench:
    bench.engine.script = engine_reply
    bench.engine.headers = {}
    bench.engine.bodies.clear()
    return bench


@pytest.fixture
def bench(_plain: Bench) -> Bench:
    return _fresh(_plain)


@pytest.fixture
def moe(_routed: Bench) -> Bench:
    return _fresh(_routed)


def _meta(**changes: Any) -> Any:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        reply = engine_reply(body)
        reply["meta_info"].update(changes)
        return reply

    return answer


def _top(**changes: Any) -> Any:
    return lambda body: {**engine_reply(body), **changes}


def _rows(change: Any) -> Any:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        reply = engine_reply(body)
        reply["meta_info"]["output_token_logprobs"] = change(reply["meta_info"]["output_token_logprobs"])
        return reply

    return answer


def _retokenised(body: dict[str, Any]) -> dict[str, Any]:
    """The last two characters of the prompt as bytes of their own: the same text, other ids."""
    ids = body["input_ids"]
    return {**engine_reply(body), "prompt_token_ids": [*ids[:-1], *encode_turn("a"), ids[-1]]}


def _unlike_json(number: bytes) -> Any:
    return lambda body: (200, orjson.dumps(engine_reply(body)).replace(b"-0.5", number))


BAD_REPLIES: dict[str, Any] = {
    "status 400": lambda body: (400, b'{"error": "no"}'),
    "status 500": lambda body: (500, b""),
    "status 503": lambda body: (503, b"no worker"),
    "redirect": lambda body: (307, b""),
    "not json": lambda body: (200, b"{"),
    "not utf-8": lambda body: (200, orjson.dumps(engine_reply(body)).replace(b"run:0", b"run\xff")),
    "deep": lambda body: (200, b'{"meta_info":' + b"[" * 5000 + b"]" * 5000 + b"}"),
    "a list": lambda body: [1],
    "no meta": lambda body: {"output_ids": [2]},
    "abort": _meta(finish_reason={"type": "abort", "message": "gone"}),
    "no reason": _meta(finish_reason=None),
    "re-tokenised prompt": _retokenised,
    "other prompt": _top(prompt_token_ids=[1, 2]),
    "prompt as floats": lambda body: {**engine_reply(body), "prompt_token_ids": [float(i) for i in body["input_ids"]]},
    "no prompt ids": _top(prompt_token_ids=None),
    "prompt in the text only": lambda body: {
        **engine_reply(body),
        "text": f'"prompt_token_ids":{orjson.dumps(body["input_ids"]).decode()}',
        "prompt_token_ids": [1],
    },
    "no ids": _top(output_ids=[]),
    "null ids": _top(output_ids=None),
    "one id more": _top(output_ids=[9, 9, 9, 9, 9, 9, 9, 2]),
    "ids of strings": _top(output_ids="ab"),
    "ids of 40 bits": lambda body: {
        **_rows(lambda rows: [[-1.0, 1 << 40, None], *rows[1:]])(body),
        "output_ids": [1 << 40, *engine_reply(body)["output_ids"][1:]],
    },
    "no logprobs": _meta(output_token_logprobs=None),
    "fewer logprobs": _rows(lambda rows: rows[:-1]),
    "more logprobs": _rows(lambda rows: [*rows, [-1.0, 2, None]]),
    "a null logprob": _rows(lambda rows: [[None, rows[0][1], None], *rows[1:]]),
    "a logprob of NaN": _unlike_json(b"NaN"),
    "an infinite logprob": _unlike_json(b"-Infinity"),
    "a huge logprob": _unlike_json(b"-1e999"),
    "a positive logprob": _rows(lambda rows: [[0.5, rows[0][1], None], *rows[1:]]),
    "odd logprobs": _meta(output_token_logprobs=[[None, 2, None]]),
    "logprobs of other ids": lambda body: {
        **engine_reply(body),
        "output_ids": engine_reply(body, "dead<|im_end|>")["output_ids"],
    },
    "no versions": _meta(weight_versions=None, weight_version=None),
    "odd versions": _meta(weight_versions=[{"version": "run:0"}]),
    "versions of no list": _meta(weight_versions=7),
    "versions with a hole": _meta(weight_versions=[{"version": "run:0", "start": 0, "end": 1}]),
    "another version": _meta(weight_versions=None, weight_version="run:1"),
    "other versions than it started with": _meta(
        weight_versions=[{"version": "run:0", "start": 0, "end": 1}, {"version": "run:1", "start": 1, "end": 3}]
    ),
    "a generation twice": lambda body: engine_reply(body, "done<|im_end|>done<|im_end|>"),
    "not ended": lambda body: engine_reply(body, "done"),
    "cut at the end": lambda body: engine_reply(body, finish="length"),
    "more retractions than a count can have": lambda body: (
        200,
        orjson.dumps(engine_reply(body)).replace(b'"cached_tokens"', b'"num_retractions":%d,"cached_tokens"' % 10**30),
    ),
    "fewer retractions than none": _meta(num_retractions=-1),
    "an absurd version": _meta(weight_versions=None, weight_version="v" * 201),
    "an absurd version of a span": _meta(weight_versions=[{"version": "v" * 10**6, "start": 0, "end": 3}]),
    "more than asked": lambda body: engine_reply(body, "a" * 60 + "<|im_end|>"),
    "a flood": lambda body: (200, b" " * (2 << 20)),
}
CODES = {
    **dict.fromkeys(("a null logprob", "odd logprobs"), "nonfinite"),
    **dict.fromkeys(("a logprob of NaN", "an infinite logprob", "a huge logprob"), "nonfinite"),
    "another version": "wrong_version",
    "other versions than it started with": "wrong_version",
    "status 503": "no_engine",
}


BOOKED = {"nonfinite": "nonfinite", "wrong_version": "stale", "bad_routing": "routing_misaligned"}


def _held(session: Session) -> tuple[dict[str, Any], Counter[str], int]:
    """What a session holds, and what it has counted of refused replies: sampled tokens by bucket, silent engines."""
    held = state_of(session)
    dropped, unanswered = Counter(held.pop("dropped")), held.pop("requests_unanswered")
    assert held.pop("sampled_tokens") == sum(turn.sampled for turn in session.turns) + sum(dropped.values())
    return held, dropped, unanswered


def _named(answer: Any) -> int | None:
    """How many sampled ids a reply names."""
    told = json.loads(answer[1]) if isinstance(answer, tuple) and b"output_ids" in answer[1] else answer
    ids = told.get("output_ids") if isinstance(told, dict) else None
    return len(ids) if isinstance(ids, list) else None


@pytest.mark.parametrize("name", BAD_REPLIES)
def test_a_reply_that_is_not_exactly_what_was_asked_is_only_counted(bench: Bench, name: str) -> None:
    session_id, _ = bench.create(expected_weight_version="run:0", attempt_id=f"bad-{name}".replace(" ", "_"))
    session = bench.service.registry.get(session_id).session
    for _ in range(2):  # before the first turn, and after it
        before, dropped, unanswered = _held(session)
        bench.engine.script = BAD_REPLIES[name]
        reply = bench.chat(session_id, CHAT)
        error, code = reply.json()["error"], CODES.get(name, "bad_upstream")
        assert (reply.status_code, error["code"]) == (502, code), reply.text
        assert error["message"] and "\n" not in error["message"]
        assert bench.get(f"/sessions/{session_id}").status_code == 200
        sampled = None if name == "not utf-8" else _named(BAD_REPLIES[name](bench.engine.bodies[-1]))
        counted = Counter({BOOKED.get(code, "infra"): sampled} if sampled else {})
        silent = code == "bad_upstream" and sampled is None
        assert _held(session) == (before, dropped + counted, unanswered + silent)
        bench.engine.script = engine_reply
        assert bench.chat(session_id, CHAT).status_code == 200


TAKEN: dict[str, Any] = {
    "null text": _top(text=None),
    "no text": lambda body: {key: value for key, value in engine_reply(body).items() if key != "text"},
    "fields nobody knows": _top(new={"a": [1]}),
    "spaces in its JSON": lambda body: (200, orjson.dumps(engine_reply(body), option=orjson.OPT_INDENT_2)),
    "no cached tokens": _meta(cached_tokens=None),
    "no retractions field": _meta(num_retractions=None),
    "routing that was not asked for": _meta(routed_experts="AAAA"),
    "one version for all": _meta(weight_versions=None),
}


@pytest.mark.parametrize("name", TAKEN)
def test_habits_that_change_no_meaning_are_taken(bench: Bench, name: str) -> None:
    session_id, _ = bench.create(expected_weight_version="run:0", attempt_id=f"taken-{name}".replace(" ", "_"))
    bench.engine.script = TAKEN[name]
    reply = bench.chat(session_id, CHAT)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == "done"
    assert reply.json()["usage"]["prompt_tokens_details"] in ({"cached_tokens": 3}, {})
    assert bench.get(f"/sessions/{session_id}").json()["upstream_malformed"] == {}


@pytest.mark.parametrize("odd", [-1, 1 << 20, True, False, 2.0, "3", [3], {"tokens": 3}])
def test_a_statistic_that_makes_no_sense_is_unknown_and_counted(bench: Bench, odd: Any) -> None:
    """The turn is none the worse for it; what would be computed from it leaves the turn out."""
    session_id, _ = bench.create()
    said = bench.chat(session_id, CHAT).json()["choices"][0]["message"]
    bench.engine.script = _meta(cached_tokens=odd)
    more = {**CHAT, "messages": [*MESSAGES, said, MESSAGES[1]]}
    reply = bench.chat(session_id, more)
    assert reply.status_code == 200 and reply.json()["usage"]["prompt_tokens_details"] == {}
    usage = bench.say(session_id, {"system": "Use bash.", "messages": more["messages"][1:], "tools": [TOOL]}).json()
    assert usage["usage"]["cache_read_input_tokens"] is None
    told = bench.get(f"/sessions/{session_id}").json()
    assert told["upstream_malformed"] == {"cached_tokens": 2}
    assert [turn["cached_tokens"] for turn in told["turns"]] == [3, None, None]
    (sample,) = merge(snapshot(bench.service.registry.get(session_id).session))
    assert (sample.cached_tokens, sample.prompt_tokens) == (3, told["turns"][0]["prompt_tokens"])


def test_versions_are_kept_once_and_counted(bench: Bench) -> None:
    session_id, _ = bench.create(expected_weight_version=None)
    spans = [{"version": "v" * 190 + str(i), "start": i, "end": i + 1} for i in range(3)]
    for versions in (spans[:1], spans):
        bench.engine.script = _meta(weight_versions=[*versions[:-1], {**versions[-1], "end": 3}])
        assert bench.chat(session_id, CHAT).status_code == 200
    first, second = bench.service.registry.get(session_id).session.turns
    assert first.spans[0][2] is second.spans[0][2]
    assert second.held_bytes() - first.held_bytes() > 2 * 190


def test_a_generation_that_the_gateway_sent_twice_is_one_turn(bench: Bench) -> None:
    """SMG sends an in-flight request again when its worker dies: the reply is the second generation, and only that."""
    session_id, _ = bench.create()
    generated = []

    def gateway(body: dict[str, Any]) -> dict[str, Any]:
        generated.extend([engine_reply(body, "once<|im_end|>"), engine_reply(body, "twice<|im_end|>")])
        return generated[-1]

    bench.engine.script = gateway
    assert bench.chat(session_id, CHAT).json()["choices"][0]["message"]["content"] == "twice"
    (sample,) = merge(snapshot(bench.service.registry.get(session_id).session))
    assert sample.sampled_tokens == int(sample.loss_mask.sum()) == len(encode_turn("twice<|im_end|>"))


def test_versions_that_changed_while_sampling_are_kept_where_any_is_taken(bench: Bench) -> None:
    session_id, _ = bench.create(expected_weight_version=None)
    spans = [{"version": "run:0", "start": 0, "end": 1}, {"version": "run:1", "start": 1, "end": 3}]
    bench.engine.script = _meta(weight_versions=spans, num_retractions=1)
    bench.engine.headers = {"x-smg-routed-worker-id": "worker-7"}
    assert bench.chat(session_id, CHAT).status_code == 200
    (turn,) = bench.get(f"/sessions/{session_id}").json()["turns"]
    assert (turn["weight_versions"], turn["retractions"], turn["worker"]) == (["run:0", "run:1"], 1, "worker-7")
    (sample,) = merge(snapshot(bench.service.registry.get(session_id).session))
    at = sample.loss_mask.argmax()
    assert sample.version_spans == [(at, at + 1, "run:0"), (at + 1, at + 3, "run:1")]


COMPLAINTS: dict[str, Any] = {
    "the question": lambda body: (400, orjson.dumps({"detail": [{"input": body}]})),
    "the question, no worker": lambda body: (503, orjson.dumps({"detail": [{"input": body}]})),
    "an answer": lambda body: (500, orjson.dumps(engine_reply(body))),
    "ids in words": lambda body: (500, "ids {} are bad".format(", ".join(map(str, body["input_ids"])))),
    "an aborted one": lambda body: _meta(finish_reason={"type": "abort", "message": str(body["input_ids"])})(body),
    "no routing": lambda body: _meta(routed_experts=body["input_ids"])(body),
    "routing": lambda body: (500, routed_reply(body)["meta_info"]["routed_experts"].encode()),
}


@pytest.mark.parametrize("name", COMPLAINTS)
def test_what_an_engine_complains_of_tells_no_ids(moe: Bench, name: str, caplog: pytest.LogCaptureFixture) -> None:
    session_id, _ = moe.create()
    moe.engine.script = COMPLAINTS[name]
    reply = moe.chat(session_id, CHAT)
    assert reply.status_code == 502 and caplog.text
    ids = moe.engine.bodies[-1]["input_ids"]
    answer = COMPLAINTS[name](moe.engine.bodies[-1])
    experts = answer[1][:40].decode() if name == "routing" else "routed_experts="
    for told in (reply.json()["error"]["message"], caplog.text):
        assert session_id not in told and experts not in told
        assert not any(f"{a}{comma}{b}" in told for a, b in itertools.pairwise(ids) for comma in (",", ", "))


def test_a_gateway_whose_header_is_no_text_breaks_nothing(bench: Bench) -> None:
    session_id, _ = bench.create()
    bench.engine.headers = {"x-smg-routed-worker-id": "w\xff"}
    assert bench.chat(session_id, CHAT).status_code == 200
    assert bench.get(f"/sessions/{session_id}").json()["turns"][0]["worker"].startswith("w?")


def test_an_address_that_takes_no_connection_is_no_engine(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "CONNECT_S", 0.2)
    with contextlib.ExitStack() as open_:
        full = open_.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # what is not accepted fills it: further connections get no answer at all
        for _ in range(4):
            waiting = open_.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        fresh = Upstream(f"http://127.0.0.1:{full.getsockname()[1]}", 1024, (2,), 20.0)
        monkeypatch.setattr(bench.service, "upstream", fresh)
        session_id, _ = bench.create()
        began = time.monotonic()
        reply = bench.chat(session_id, CHAT)
        assert time.monotonic() - began > 3 * 0.2  # nothing was sent: it may be tried again
        assert (reply.status_code, reply.json()["error"]["code"]) == (502, "no_engine"), reply.text
        assert "took none of 3 connections within 0.2 s" in reply.json()["error"]["message"]
        assert bench.service.registry.get(session_id).session.requests_unanswered == 0


def routed_reply(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A reply with the rows of routed experts that were asked for."""
    reply = engine_reply(body)
    end = len(body["input_ids"]) + len(reply["output_ids"])
    rows = rows_of(body["routed_experts_start_len"], end - 1).astype("<i4")
    reply["meta_info"]["routed_experts"] = pybase64.b64encode(rows.tobytes()).decode()
    reply["meta_info"].update(changes)
    return reply


def test_only_rows_that_are_not_held_are_asked_for(moe: Bench) -> None:
    session_id, _ = moe.create()
    moe.engine.script = routed_reply
    message = moe.chat(session_id, CHAT).json()["choices"][0]["message"]
    messages = [*MESSAGES, message, {"role": "user", "content": "more"}]
    reply = moe.chat(session_id, {**CHAT, "messages": messages})
    assert reply.status_code == 200, reply.text
    assert "routed" not in reply.text
    first, second = moe.engine.bodies
    assert (first["return_routed_experts"], first["routed_experts_start_len"]) == (True, 0)
    assert second["routed_experts_start_len"] == len(first["input_ids"]) + 3 - 1
    (sample,) = merge(snapshot(moe.service.registry.get(session_id).session))
    assert sample.routing is not None
    assert np.array_equal(sample.routing, rows_of(0, len(sample.tokens) - 1))


BAD_ROUTING: dict[str, Any] = {
    "none": engine_reply,
    "null": lambda body: routed_reply(body, routed_experts=None),
    "a list": lambda body: routed_reply(body, routed_experts=[1]),
    "not base64": lambda body: routed_reply(body, routed_experts="é" * 4),
    "a row less": lambda body: routed_reply({**body, "routed_experts_start_len": body["routed_experts_start_len"] + 1}),
    "all rows": lambda body: routed_reply({**body, "routed_experts_start_len": body["routed_experts_start_len"] - 1}),
    "an expert that is none": lambda body: routed_reply(
        body, routed_experts=routed_reply(body)["meta_info"]["routed_experts"].replace("AAAA", "////", 1)
    ),
}


@pytest.mark.parametrize("name", BAD_ROUTING)
def test_rows_that_do_not_line_up_are_only_counted(moe: Bench, name: str) -> None:
    session_id, _ = moe.create()
    session = moe.service.registry.get(session_id).session
    moe.engine.script = routed_reply
    message = moe.chat(session_id, CHAT).json()["choices"][0]["message"]
    before, dropped, unanswered = _held(session)
    moe.engine.script = BAD_ROUTING[name]
    body = {**CHAT, "messages": [*MESSAGES, message, {"role": "user", "content": "more"}]}
    reply = moe.chat(session_id, body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "bad_routing"), reply.text
    assert _held(session) == (before, dropped + Counter(routing_misaligned=3), unanswered)
    moe.engine.script = routed_reply
    assert moe.chat(session_id, body).status_code == 200


def test_megabytes_of_routing_are_read_and_a_flood_is_not(moe: Bench) -> None:
    session_id, _ = moe.create(max_seq_len=1 << 17)
    moe.engine.script = routed_reply
    long = {**CHAT, "messages": [{"role": "user", "content": "x y " * 20_000}]}
    reply = moe.chat(session_id, long)
    assert reply.status_code == 200, reply.text
    (sample,) = merge(snapshot(moe.service.registry.get(session_id).session), Pick.ALL)
    assert sample.routing is not None and len(sample.routing) == len(sample.tokens) - 1 > 40_000
    before = _held(moe.service.registry.get(session_id).session)
    moe.engine.script = lambda body: routed_reply(body, routed_experts="A" * (16 << 20))
    flooded = moe.chat(session_id, long)
    assert (flooded.status_code, flooded.json()["error"]["code"]) == (502, "bad_upstream")
    assert "the limit for this turn" in flooded.json()["error"]["message"]
    assert _held(moe.service.registry.get(session_id).session) == (*before[:2], 1)


def test_a_late_engine_is_given_up_and_recorded_nowhere() -> None:
    with session_bench(deadline_s=0.3) as bench:
        session_id, _ = bench.create()
        bench.engine.gate.clear()
        reply = bench.chat(session_id, CHAT)
        assert (reply.status_code, reply.json()["error"]["code"]) == (502, "bad_upstream")
        assert "within 0.3 s" in reply.json()["error"]["message"]
        assert bench.service.registry.get(session_id).session.epoch == 0


def test_a_refused_connection_is_tried_again_and_then_502(bench: Bench) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        url, deadline_s = bench.service.upstream.url, bench.service.upstream._deadline_s
        bench.service.upstream.url = f"http://127.0.0.1:{taken.getsockname()[1]}/generate"
        try:
            session_id, _ = bench.create()
            reply = bench.chat(session_id, CHAT)
            assert (reply.status_code, reply.json()["error"]["code"]) == (502, "no_engine")
            assert "refused 3 connections" in reply.json()["error"]["message"]
            assert reply.headers.get("x-should-retry") is None
            threading.Timer(0.15, taken.listen).start()  # from now on it accepts and never answers: no second send
            bench.service.upstream._deadline_s = 1.0
            late = bench.chat(session_id, CHAT)
            assert "within 1 s" in late.json()["error"]["message"]
        finally:
            bench.service.upstream.url, bench.service.upstream._deadline_s = url, deadline_s


def test_idle_connections_are_left_before_a_server_leaves_them() -> None:
    """A request sent on a connection that the engine is just closing is lost, and a turn is not sent twice."""
    engines_leave_s = inspect.signature(uvicorn.Config).parameters["timeout_keep_alive"].default

    async def kept_s() -> float:
        client = Upstream("http://127.0.0.1:9", 10, (), 1.0)
        try:
            connector = client._pool().connector
            assert connector is not None
            return float(connector._keepalive_timeout)
        finally:
            await client.aclose()

    assert asyncio.run(kept_s()) <= engines_leave_s / 2


@pytest.mark.parametrize(
    ("kept_s", "left_s", "stall", "lost"),
    [(0.2, 0.4, "before", False), (15, 0.4, "before", True), (0.2, 0.4, "between", True), (0.2, 75, "between", False)],
)
def test_when_a_turn_is_sent_on_a_connection_that_its_engine_has_left(
    monkeypatch: pytest.MonkeyPatch, kept_s: float, left_s: float, stall: str, lost: bool
) -> None:
    """A server too busy to read that the engine hung up. Before it takes a connection only the connection's age can
    tell; between taking and writing nothing can, but an engine that waits longer than any server is busy."""
    monkeypatch.setattr(upstream, "KEEP_S", kept_s)

    def leaving_early(config: uvicorn.Config) -> uvicorn.Server:
        config.timeout_keep_alive = left_s  # type: ignore[assignment]
        return uvicorn.Server(config)

    async def twice(url: str) -> list[int]:
        client = Upstream(url, template().vocab_size, template().stop_ids, 5.0)
        prepared = new_session().prepare(request(OPENING))
        try:
            answers = [await client.generate("s", prepared)]
            if stall == "before":
                time.sleep(0.8)  # noqa: ASYNC251 - this loop is at something else
            else:
                asyncio.get_running_loop().call_soon(time.sleep, 0.8)
            answers.append(await client.generate("s", prepared))
            return [len(answer.output_ids) for answer in answers]
        finally:
            await client.aclose()

    engine = Engine()
    engine.gate.set()
    with serving(engine.app(), leaving_early) as url:
        if not lost:
            assert asyncio.run(twice(url)) == [len(encode_turn("done<|im_end|>"))] * 2
        else:  # what is told then, for an engine may have got it: nothing is sent a second time
            with pytest.raises(SessionRefusal, match="ServerDisconnected") as caught:
                asyncio.run(twice(url))
            assert caught.value.code is Refusal.BAD_UPSTREAM and caught.value.sampled is None
        assert len(engine.bodies) == (1 if lost else 2)


def test_a_connection_cut_in_mid_reply_records_nothing(bench: Bench) -> None:
    def half(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{")

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        threading.Thread(target=half, args=(listener,), daemon=True).start()
        url = bench.service.upstream.url
        bench.service.upstream.url = f"http://127.0.0.1:{listener.getsockname()[1]}/generate"
        try:
            session_id, _ = bench.create()
            reply = bench.chat(session_id, CHAT)
        finally:
            bench.service.upstream.url = url
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "bad_upstream")
    assert bench.service.registry.get(session_id).session.epoch == 0


@pytest.mark.parametrize("url", ["", "127.0.0.1:1", "ftp://x", "http://"])
def test_an_address_that_is_none_is_refused_at_start(url: str) -> None:
    with pytest.raises(BadInput, match="not an address"):
        Upstream(url, 512, (2,), 1.0)


@pytest.mark.parametrize(
    ("status", "code", "hopeless"),
    [
        *((status, "bad_upstream", True) for status in (400, 404, 413)),
        *((status, "bad_upstream", False) for status in (408, 429, 500)),
        (503, "no_engine", False),
    ],
)
def test_what_an_engine_refuses_for_good_is_not_sent_again(
    bench: Bench, status: int, code: str, hopeless: bool
) -> None:
    session_id, _ = bench.create()
    bench.engine.script = lambda body: (status, b'{"error": {"message": "input is longer than the context length"}}')
    for call in (bench.chat, bench.say):
        reply = call(session_id, {**CHAT, "messages": [{"role": "user", "content": "x"}], "tools": None})
        assert (reply.status_code, reply.json()["error"]["code"]) == (502, code)
        assert reply.headers.get("x-should-retry") == ("false" if hopeless else None)
        assert "context length" in reply.json()["error"]["message"]


def test_a_gateway_without_engines_says_when_they_join(bench: Bench) -> None:
    session_id, _ = bench.create()
    bench.engine.headers = {"x-smg-error-code": "model_not_found"}
    bench.engine.script = lambda body: (404, b'{"error": "no worker"}')
    reply = bench.chat(session_id, CHAT)
    bench.engine.headers = {}
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "no_engine")
    assert "first step has pushed its weights, see `rl360 fleet status`" in reply.json()["error"]["message"]
    assert "x-should-retry" not in reply.headers
