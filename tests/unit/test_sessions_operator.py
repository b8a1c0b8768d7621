"""The operator's side of a session server: storing, draining, budgets, the OpenAPI document, `rl360 sessions`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import uvicorn

from infra.local.plan import UpOptions, build_specs
from rl360.cli import main
from rl360.config.services import Secrets
from rl360.errors import BadInput
from rl360.sessions import described
from rl360.sessions.openapi import ENDPOINTS
from rl360.sessions.refusals import HTTP_STATUS, Refusal, SessionRefusal
from rl360.sessions.registry import Limits, Registry
from rl360.sessions.routes import create_app
from rl360.sessions.sample import SampleRef, decode_samples
from rl360.sessions.server import DrainingServer, ServeOptions, build_service, load_matcher
from rl360.store.layout import merged_key
from tests.unit.memory_store import MemoryStore
from tests.unit.sessions_data import (
    BASH_SCHEMA,
    OPENING,
    completion,
    encode_turn,
    new_session,
    request,
    spec,
    template,
    write_model_dir,
)
from tests.unit.sessions_server import BEARER, CREATE, TOKEN, Bench, engine_reply, session_bench

ATTEMPT = CREATE["attempt_id"]
KEY = merged_key("run-1", 3, 0, ATTEMPT)
MESSAGES = [{"role": "system", "content": "Use bash."}, {"role": "user", "content": "Create hello.txt"}]
CHAT = {"model": "policy", "messages": MESSAGES, "tools": [BASH_SCHEMA]}


class Store(MemoryStore):
    endpoint_url = "memory:"


@pytest.fixture(scope="module")
def _shared() -> Iterator[Bench]:
    with session_bench() as bench:
        yield bench


@pytest.fixture
def bench(_shared: Bench) -> Bench:
    service = _shared.service
    for held in list(service.registry):
        service.registry.delete(held.session.session_id)
    service.store_in = Store()
    service.stored = 0
    service.registry.draining, service.drain_until_s = False, None
    _shared.engine.script = engine_reply
    _shared.engine.gate.set()
    _shared.engine.bodies.clear()
    return _shared


def spoken(bench: Bench, **changes: Any) -> str:
    session_id, _ = bench.create(**changes)
    assert bench.chat(session_id, CHAT).status_code == 200
    return session_id


def refusal(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, described.Error.model_validate(reply.json()).error.code


def test_storing_seals_merges_and_answers_the_same_again(bench: Bench) -> None:
    session_id = spoken(bench)
    store = bench.service.store_in
    merged = bench.get(f"/sessions/{session_id}/merged").content
    first = bench.post(f"/sessions/{session_id}/store", {"key": KEY, "pick": "last"})
    assert first.status_code == 200, first.text
    described.StoreReply.model_validate(first.json())
    ref = SampleRef.from_wire(first.json(), "reply")
    assert (ref.key, ref.size_bytes, len(ref.leaves)) == (KEY, len(merged), 1)
    assert store.objects == {KEY: merged} and ref.sha256 == hashlib.sha256(merged).hexdigest()
    assert ref.sampled_tokens == decode_samples(merged, KEY)[0].sampled_tokens
    assert bench.post(f"/sessions/{session_id}/store", {"key": KEY}).json() == first.json()
    assert refusal(bench.chat(session_id, CHAT)) == (409, "sealed")
    for body in ({"key": merged_key("run-1", 3, 1, ATTEMPT)}, {"key": KEY, "pick": "all"}):
        assert refusal(bench.post(f"/sessions/{session_id}/store", body)) == (409, "conflict")
    told = bench.get(f"/sessions/{session_id}").json()
    assert told["sealed"] is True and told["stored"] == first.json()
    assert bench.http.get("/health").json()["stored"] == 1


def test_an_object_that_is_there_must_be_the_same(bench: Bench) -> None:
    session_id = spoken(bench)
    same = bench.get(f"/sessions/{session_id}/merged").content
    bench.service.store_in.objects[KEY] = same  # an earlier try whose reply was lost
    assert bench.post(f"/sessions/{session_id}/store", {"key": KEY}).status_code == 200
    other = spoken(bench)
    reply = bench.post(f"/sessions/{other}/store", {"key": KEY})
    assert refusal(reply) == (409, "conflict") and KEY in reply.json()["error"]["message"]
    assert bench.service.store_in.objects == {KEY: same}


def test_a_store_that_is_away_can_be_asked_again(bench: Bench) -> None:
    session_id = spoken(bench)
    bench.service.store_in.down = True
    reply = bench.post(f"/sessions/{session_id}/store", {"key": KEY})
    assert refusal(reply) == (503, "store_unavailable") and "x-should-retry" not in reply.headers
    bench.service.store_in.down = False
    elsewhere = bench.post(f"/sessions/{session_id}/store", {"key": merged_key("run-1", 3, 1, ATTEMPT)})
    assert refusal(elsewhere) == (409, "conflict")  # the lost call may have written
    assert bench.post(f"/sessions/{session_id}/store", {"key": KEY}).status_code == 200
    assert list(bench.service.store_in.objects) == [KEY]


def test_an_object_that_vanishes_while_it_is_compared(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    session_id = spoken(bench)
    monkeypatch.setattr(bench.service.store_in, "put_once", lambda key, data: False)
    assert refusal(bench.post(f"/sessions/{session_id}/store", {"key": KEY})) == (503, "store_unavailable")
    monkeypatch.undo()
    assert bench.post(f"/sessions/{session_id}/store", {"key": KEY}).status_code == 200


def test_calls_at_once_store_one_session_once(bench: Bench) -> None:
    session_id = spoken(bench, mode="tree")
    picks = ["last", "all"] * 4
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(bench.post, f"/sessions/{session_id}/store", {"key": KEY, "pick": pick}) for pick in picks]
    replies = {pick: {call.result().status_code for call in calls[i::2]} for i, pick in enumerate(("last", "all"))}
    assert sorted(replies.values(), key=min) == [{200}, {409}]
    assert bench.http.get("/health").json()["stored"] == 1


@pytest.mark.parametrize(
    "key",
    [
        "",
        "hello",
        KEY + "x",
        "/" + KEY,
        KEY.replace("run-1", ".."),
        KEY.replace("run-1", "RUN"),
        KEY.replace("000003", "3"),
        KEY.replace("merged", "attempts"),
        KEY.replace(ATTEMPT, "s000000-g000-a01-t0"),
        KEY.replace("/0000/", "/0/"),
        KEY.replace("000003", "٠٠٠٠٠٣"),
        "x" * 2000,
    ],
)
def test_only_the_place_of_this_attempt_is_written(bench: Bench, key: str) -> None:
    session_id = spoken(bench)
    assert refusal(bench.post(f"/sessions/{session_id}/store", {"key": key})) == (400, "bad_body")
    assert not bench.service.store_in.objects
    assert bench.chat(session_id, CHAT).status_code == 200  # and it was not sealed


def test_storing_many_answers_each_and_null_for_what_is_not_stored(bench: Bench) -> None:
    session_id, (empty, _) = spoken(bench), bench.create()
    asked = [
        {"session_id": empty, "key": KEY},
        {"session_id": session_id, "key": KEY, "pick": "last"},
        {"session_id": "nobody", "key": KEY},
        {"session_id": session_id, "key": merged_key("run-1", 3, 1, ATTEMPT)},
        {"session_id": session_id, "key": KEY},
    ]
    reply = bench.post("/sessions/store", {"sessions": asked})
    stored = described.StoreManyReply.model_validate(reply.json()).stored
    alone = bench.post(f"/sessions/{session_id}/store", {"key": KEY}).json()
    assert [None if one is None else one.model_dump() for one in stored] == [None, alone, None, None, alone]
    assert list(bench.service.store_in.objects) == [KEY] and bench.get("/health").json()["stored"] == 1
    assert refusal(bench.chat(empty, CHAT)) == (409, "sealed"), "as when it is asked for alone"


def test_storing_many_refuses_a_malformed_list_and_stores_nothing(bench: Bench) -> None:
    one = {"session_id": spoken(bench), "key": KEY}
    for body in (None, [one], {"sessions": []}, {"sessions": [one] * 65}, {"sessions": [one, {"key": KEY}]}):
        assert refusal(bench.post("/sessions/store", body)) == (400, "bad_body")
    reply = bench.http.post("/sessions/store", json={"sessions": [one]}, headers={"Authorization": "Bearer wrong"})
    assert refusal(reply) == (401, "unauthorized")
    assert not bench.service.store_in.objects


def test_storing_what_cannot_be_stored(bench: Bench) -> None:
    empty, _ = bench.create()
    assert refusal(bench.post(f"/sessions/{empty}/store", {"key": KEY})) == (422, "cannot_merge")
    for body in (None, [], {}, {"key": 5}, {"key": KEY, "pick": "some"}, {"key": KEY, "more": 1}):
        assert refusal(bench.post(f"/sessions/{empty}/store", body)) == (400, "bad_body")
    assert refusal(bench.get(f"/sessions/{empty}/merged?pick=some")) == (400, "bad_body")
    bench.service.store_in = None
    reply = bench.post(f"/sessions/{empty}/store", {"key": KEY})
    assert refusal(reply) == (501, "no_store") and reply.headers["x-should-retry"] == "false"


def test_storing_twice_at_once_writes_once(bench: Bench) -> None:
    session_id = spoken(bench)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda _n: bench.post(f"/sessions/{session_id}/store", {"key": KEY}), range(4)))
    assert [reply.status_code for reply in replies] == [200] * 4
    assert len({reply.content for reply in replies}) == 1
    assert list(bench.service.store_in.objects) == [KEY]


def store_in_mid_turn(bench: Bench, session_id: str, meanwhile: Callable[[], Any]) -> tuple[httpx.Response, SampleRef]:
    """Ask for a turn, then to store; `meanwhile` is done while both wait. The turn's reply, and the reference."""
    bench.engine.gate.clear()
    held = bench.service.registry.get(session_id)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        turn = pool.submit(bench.chat, session_id, CHAT)
        while len(bench.engine.bodies) < 2:
            time.sleep(0.005)
        stored = pool.submit(bench.post, f"/sessions/{session_id}/store", {"key": KEY})
        while held.store_as is None:
            time.sleep(0.005)
        meanwhile()
        reply, told = turn.result(), stored.result()
    assert bench.post(f"/sessions/{session_id}/store", {"key": KEY}).json() == told.json()
    ref = SampleRef.from_wire(told.json(), KEY)
    assert ref.sampled_tokens == bench.get(f"/sessions/{session_id}").json()["sampled_tokens"]
    return reply, ref


def test_storing_lets_a_turn_end_and_takes_no_other(bench: Bench) -> None:
    session_id = spoken(bench)

    def meanwhile() -> None:
        assert refusal(bench.chat(session_id, CHAT)) == (409, "sealed")
        assert not bench.service.store_in.objects
        bench.engine.gate.set()

    reply, ref = store_in_mid_turn(bench, session_id, meanwhile)
    assert reply.status_code == 200
    assert (ref.sampled_tokens, ref.leaves[0].dropped) == (6, {"prefix_break": 3})


def test_what_a_refused_turn_sampled_is_in_what_is_stored(bench: Bench) -> None:
    session_id = spoken(bench)

    def meanwhile() -> None:
        bench.engine.script = lambda body: engine_reply(body, "done done<|im_end|>", finish="abort")
        bench.engine.gate.set()

    reply, ref = store_in_mid_turn(bench, session_id, meanwhile)
    assert refusal(reply) == (502, "bad_upstream")
    lost = len(encode_turn("done done<|im_end|>"))
    assert (ref.sampled_tokens, ref.leaves[0].dropped) == (3 + lost, {"infra": lost})


def test_a_turn_that_storing_cannot_wait_for_is_cancelled(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl360.sessions.routes.STORE_WAITS_S", 0.2)
    bench.engine.cancelled.clear()
    session_id = spoken(bench)
    reply, ref = store_in_mid_turn(bench, session_id, lambda: None)
    assert refusal(reply) == (409, "sealed") and reply.headers["x-should-retry"] == "false"
    assert bench.engine.cancelled.wait(10)
    assert (ref.sampled_tokens, ref.leaves[0].dropped) == (3, {})
    assert bench.get(f"/sessions/{session_id}").json()["requests_unanswered"] == 1


def test_a_session_that_cannot_be_merged_tells_what_it_sampled(bench: Bench) -> None:
    session_id, _ = bench.create()
    bench.engine.script = lambda body: engine_reply(body, finish="abort")
    assert refusal(bench.chat(session_id, CHAT)) == refusal(bench.chat(session_id, CHAT)) == (502, "bad_upstream")
    assert bench.say(session_id, {"messages": MESSAGES[1:], "max_tokens": 9}).status_code == 502
    told = bench.get(f"/sessions/{session_id}").json()
    assert (told["dropped"], told["sampled_tokens"]) == ({"infra": 9}, 9)
    for reply in (
        bench.get(f"/sessions/{session_id}/merged"),
        bench.post(f"/sessions/{session_id}/store", {"key": KEY}),
    ):
        assert refusal(reply) == (422, "cannot_merge") and reply.json()["error"]["sampled_tokens"] == 9


def test_branches_of_a_tree_are_picked(bench: Bench) -> None:
    session_id, _ = bench.create(mode="tree")
    said = bench.chat(session_id, CHAT).json()["choices"][0]["message"]
    for word in ("one", "two"):
        messages = [*MESSAGES, said, {"role": "user", "content": word}]
        assert bench.chat(session_id, {**CHAT, "messages": messages}).status_code == 200
    found = [bench.get(f"/sessions/{session_id}/merged?pick={pick}").content for pick in ("last", "roots", "all")]
    assert [len(decode_samples(data, "merged")) for data in found] == [1, 1, 2]
    ref = bench.post(f"/sessions/{session_id}/store", {"key": KEY, "pick": "all"}).json()
    assert len(ref["leaves"]["tokens"]) == 2 and len(orjson.dumps(ref)) < 2048


def test_draining_takes_no_new_sessions_and_ends_when_the_others_are_done(bench: Bench) -> None:
    stored, deleted = spoken(bench, expected_weight_version="run:0"), spoken(bench)
    assert bench.post("/drain").json() == {"status": "draining", "unfinished": 2}
    assert bench.http.get("/health").json()["status"] == "draining"
    reply = bench.http.post("/sessions", json=CREATE, headers=BEARER)
    assert refusal(reply) == (503, "draining") and reply.headers["retry-after"] == "1"
    # a task that was killed finds its session, and agents go on
    assert bench.create(expected_weight_version="run:0")[0] == stored
    assert bench.chat(stored, CHAT).status_code == 200
    bench.service.drain_until_s = time.monotonic() + 60
    assert not bench.service.drained
    assert bench.post(f"/sessions/{stored}/store", {"key": KEY}).status_code == 200
    assert not bench.service.drained
    assert bench.http.delete(f"/sessions/{deleted}", headers=BEARER).status_code == 204
    assert bench.service.drained
    bench.service.drain_until_s = time.monotonic() - 1
    spoken_after = bench.chat(stored, CHAT)
    assert refusal(spoken_after) == (409, "sealed") and bench.service.drained


def test_sigterm_drains_and_a_second_one_ends_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    session_id, _ = bench.create()
    monkeypatch.setattr(bench.service, "drain_s", 60.0)
    server = DrainingServer(uvicorn.Config(lambda: None), bench.service)
    server.handle_exit(signal.SIGTERM, None)
    assert bench.service.registry.draining and not server.should_exit
    assert asyncio.run(server.on_tick(1)) is False
    bench.http.delete(f"/sessions/{session_id}", headers=BEARER)
    assert asyncio.run(server.on_tick(1)) is True
    assert not server.should_exit
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit


def test_rl360_up_starts_it_with_options_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    options = UpOptions(home="/h", model_dir="/m", sessions=2, matchers=("a:b", "c:d"))
    secrets = Secrets(token=TOKEN, s3_access_key="a", s3_secret_key="b")
    specs = [item for item in build_specs(options, secrets, "i") if item.name.startswith("sessions-")]
    seen: list[ServeOptions] = []
    monkeypatch.setattr("rl360.sessions.server.serve", seen.append)
    for item in specs:
        assert item.argv[1:3] == ("-m", "rl360.cli")
        with pytest.raises(SystemExit) as ended:
            main(list(item.argv[3:]))
        assert not ended.value.code
    assert [one.port for one in seen] == [13_200, 13_201] and seen[0].limits == Limits()
    assert (seen[0].upstream, seen[0].store, seen[0].drain_s) == ("http://127.0.0.1:13100", True, 0.0)
    assert (seen[0].model_dir, seen[0].matchers) == (Path("/m"), ("a:b", "c:d"))


def test_over_the_budget_dead_sessions_are_given_up_and_counted() -> None:
    now = [0.0]
    limits = Limits(total_bytes=3 * new_session().held_bytes, dead_s=10.0)
    registry = Registry(template(), limits, clock=lambda: now[0])
    oldest, busy, recent = (registry.create(spec(attempt_id=name)) for name in "abc")
    with pytest.raises(SessionRefusal, match="3 sessions hold") as caught:
        registry.create(spec(attempt_id="d"))
    assert caught.value.code is Refusal.SERVER_FULL
    with registry.using(busy.session_id):
        now[0] = 11.0
        registry.get(recent.session_id)
        registry.create(spec(attempt_id="d"))
        assert (oldest.closed, busy.closed, recent.closed) == (True, False, False)
        with pytest.raises(SessionRefusal):  # one is in flight, the others were just used
            registry.create(spec(attempt_id="e"))
    assert (registry.evicted_for_room, registry.evicted_idle, len(registry)) == (1, 0, 3)
    assert registry.total_bytes == sum(held.session.held_bytes for held in registry)


def test_a_full_server_is_not_the_end_of_a_sequence() -> None:
    with session_bench(Limits(total_bytes=6000)) as bench:
        session_id = spoken(bench)
        for reply in (bench.chat(session_id, CHAT), bench.post("/sessions", CREATE)):
            assert refusal(reply) == (503, "server_full")
            assert "x-should-retry" not in reply.headers and reply.headers["retry-after"] == "1"
        assert bench.say(session_id, {"messages": MESSAGES[1:], "max_tokens": 9}).status_code == 503


def test_what_an_agent_holds_or_has_in_flight_does_not_keep_its_session_from_being_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rl360.sessions.routes.STORE_WAITS_S", 0.2)
    limits = Limits(session_requests=4)
    with session_bench(limits, store=Store()) as bench:
        session_id = spoken(bench)
        held = bench.service.registry.get(session_id)
        bench.engine.gate.clear()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(bench.chat, session_id, CHAT) for _ in range(4)]
            while len(bench.engine.bodies) < 5 and not any(reply.done() for reply in waiting):
                time.sleep(0.005)
            assert refusal(bench.chat(session_id, CHAT)) == (429, "too_many_requests")
            said = bench.say(session_id, {"messages": MESSAGES[1:], "max_tokens": 9})
            assert (said.status_code, said.json()["error"]["type"]) == (429, "rate_limit_error")
            held.body_bytes += limits.session_bytes  # as many bodies as it may have
            assert bench.get(f"/sessions/{session_id}/merged").status_code == 200
            stored = bench.post(f"/sessions/{session_id}/store", {"key": KEY})
            held.body_bytes -= limits.session_bytes
            assert stored.status_code == 200, stored.text
            assert [refusal(reply.result()) for reply in waiting] == [(409, "sealed")] * 4


def test_leaves_that_no_object_holds_are_refused_before_they_are_made(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id = spoken(bench, mode="tree")
    assert bench.chat(session_id, CHAT).status_code == 200
    tokens = bench.get(f"/sessions/{session_id}").json()["tokens"]
    monkeypatch.setattr("rl360.sessions.merge.MAX_SAMPLES_BYTES", 15 * tokens)  # one leaf takes 10 bytes a token
    monkeypatch.setattr("rl360.sessions.merge._sample", None)
    reply = bench.post(f"/sessions/{session_id}/store", {"key": KEY, "pick": "all"})
    assert refusal(reply) == (422, "cannot_merge") and reply.json()["error"]["sampled_tokens"] == 6
    assert "2 kept leaves" in reply.json()["error"]["message"]
    monkeypatch.undo()
    assert bench.post(f"/sessions/{session_id}/store", {"key": KEY, "pick": "last"}).status_code == 200


def test_bytes_stay_counted_through_many_sessions() -> None:
    registry = Registry(template(), Limits())
    for number in range(50):
        session = registry.create(spec(attempt_id=f"a{number}"))
        with registry.using(session.session_id) as held:
            held.session.commit(held.session.prepare(request(OPENING)), completion())
        assert registry.total_bytes == sum(item.session.held_bytes for item in registry)
        if number % 3:
            registry.delete(session.session_id)
    for held in list(registry):
        registry.delete(held.session.session_id)
    assert (registry.total_bytes, len(registry), registry.in_flight, registry._by_spec) == (0, 0, 0, {})


@pytest.mark.parametrize(
    ("policy", "status", "temperature"), [("pin", 200, 1.0), ("record", 200, 0.5), ("refuse", 400, None)]
)
def test_sampling_policies(bench: Bench, policy: str, status: int, temperature: float | None) -> None:
    session_id, _ = bench.create(sampling_policy=policy)
    reply = bench.chat(session_id, {**CHAT, "temperature": 0.5, "max_tokens": 4000})
    assert reply.status_code == status
    told = bench.get(f"/sessions/{session_id}").json()
    if status == 400:
        error = reply.json()["error"]
        assert error["code"] == "sampling_params" and reply.headers["x-should-retry"] == "false"
        assert "temperature 0.5 (it is 1.0)" in error["message"]
        assert not bench.engine.bodies and told["epoch"] == 0
        return
    sent = bench.engine.bodies[0]["sampling_params"]
    assert (sent["temperature"], sent["max_new_tokens"]) == (temperature, 48)
    where = "ignored_params" if policy == "pin" else "recorded_params"
    assert told[where] == {"temperature": 1, "max_new_tokens": 1}
    assert told["sampling_differs"] == (policy == "record")


def test_a_session_names_a_matcher_this_server_knows(bench: Bench) -> None:
    assert refusal(bench.post("/sessions", {**CREATE, "matcher": "os:system"})) == (400, "bad_body")
    assert refusal(bench.post("/sessions", {**CREATE, "mode": "graph"})) == (400, "bad_body")
    assert refusal(bench.post("/sessions", {**CREATE, "thinking": True})) == (400, "bad_body")
    bench.create(matcher="role_content", mode="tree")


def same_words(stored: Any, sent: Any) -> bool:
    return stored.content.split() == sent.content.split()


def broken(stored: Any, sent: Any) -> bool:
    raise ValueError(sent.content)


def test_a_matcher_that_raises_is_told_without_what_was_said(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{__name__}:broken"
    monkeypatch.setattr(bench.service.registry, "matchers", {name: load_matcher(name)})
    session_id = spoken(bench, matcher=name)
    turned = [{"role": "user", "content": "a secret"}]
    for call in (bench.chat, bench.say):
        reply = call(session_id, {**CHAT, "messages": turned})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], reply.headers["x-should-retry"]) == (500, "bad_matcher", "false")
        assert f"matcher {name} of this server raised ValueError (" in error["message"]
        assert "secret" not in reply.text and "\n" not in error["message"]
    assert bench.get(f"/sessions/{session_id}").json()["epoch"] == 1


def test_what_is_refused_before_listening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    monkeypatch.setenv("RL360_TOKEN_FILE", str(token))
    model = write_model_dir(tmp_path / "model")
    options = {"upstream": "http://127.0.0.1:9", "model_dir": model}
    name = f"{__name__}:same_words"
    service = build_service(ServeOptions(**options, matchers=(name,)))
    assert service.registry.create(spec(matcher=name)).held_bytes > 0
    for wrong, said in (
        ({"upstream": "9"}, "not an address"),
        ({"model_dir": tmp_path}, "config.json"),
        ({"matchers": ("no_such_module:x",)}, "cannot be imported"),
        ({"return_routed_experts": True}, "dense model"),
        ({"family": "no-such"}, "no-such"),
    ):
        with pytest.raises(BadInput, match=said):
            build_service(ServeOptions(**{**options, **wrong}))


def test_the_document_says_what_is_served(bench: Bench) -> None:
    told = bench.http.get("/openapi.json").json()
    assert told["openapi"] == "3.1.0"
    served = {
        (route.path, method.lower())
        for route in create_app(bench.service).routes
        for method in route.methods - {"HEAD"}
    }
    assert served == {(path, method) for path, methods in told["paths"].items() for method in methods}
    schemas = told["components"]["schemas"]
    names = set(re.findall(r"#/components/schemas/(\w+)", orjson.dumps(told).decode()))
    assert names <= schemas.keys()
    turn = told["paths"]["/sessions/{session_id}/v1/chat/completions"]["post"]
    assert turn["security"] == [] and {"400", "404", "409", "413", "429", "502"} <= turn["responses"].keys()
    page = bench.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert all(f"{e.method} {e.path}" in page.text for e in ENDPOINTS)
    assert all(f"id='{name}'" in page.text for name in schemas)
    assert "<script" not in page.text and "http://" not in page.text.replace(bench.url, "")


def test_every_refusal_has_a_status_and_is_documented_somewhere() -> None:
    assert set(HTTP_STATUS) == set(Refusal)
    documented = {code for endpoint in ENDPOINTS for code in endpoint.refusals}
    assert documented | {Refusal.METHOD} == set(Refusal)


def test_replies_are_what_the_document_says(bench: Bench) -> None:
    session_id, _ = bench.create()
    described.CreateReply.model_validate(bench.http.post("/sessions", json=CREATE, headers=BEARER).json())
    described.ChatReply.model_validate(bench.chat(session_id, CHAT).json())
    rows = described.SessionRows.model_validate(bench.get("/sessions").json()).sessions
    assert [row.turns for row in rows] == [0, 1]
    described.Health.model_validate(bench.http.get("/health").json())
    described.ModelsReply.model_validate(bench.http.get(f"/sessions/{session_id}/v1/models").json())
    described.Drained.model_validate(bench.post("/drain").json())
    described.Health.model_validate(bench.http.get("/health").json())


def test_who_still_waits_when_the_process_ends_is_told_so(bench: Bench) -> None:
    session_id = spoken(bench)
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    async def ended() -> None:
        path = f"/sessions/{session_id}/v1/messages"
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": []}
        scope |= {"query_string": b"", "root_path": "", "scheme": "http", "server": ("x", 1), "http_version": "1.1"}
        waiting = asyncio.create_task(create_app(bench.service)(scope, receive, send))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await waiting

    asyncio.run(ended())
    assert sent[0]["status"] == 503 and b"draining" in sent[1]["body"]
    assert bench.service.registry.in_flight == 0
