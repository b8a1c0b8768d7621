"""A program's way to its session: both formats counted, streams passed on, limits refused so that nobody asks again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from rl360.agents import base
from rl360.agents.base import AgentContext, AgentEnd, AgentFailure, ModelCalls
from rl360.agents.harness import CONNECTIONS, PARALLEL, Relay, Terms, ended, listening, listening_here
from rl360.harbor.outcome import ExitStatus

SESSION = "http://session/sessions/ID/v1"


def asked(
    answer: Callable[[httpx.Request], httpx.Response], *calls: tuple[str, dict[str, Any]], max_turns: int = 9
) -> tuple[Relay, list[httpx.Response]]:
    """The relay after these calls (place, body) of a program, and what the program got."""

    async def go() -> tuple[Relay, list[httpx.Response]]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            deadline = asyncio.get_running_loop().time() + 20
            relay = Relay(AgentContext("Do.", SESSION, "openai/policy", {}, max_turns, deadline, print, http))  # type: ignore[arg-type]
            async with listening_here(relay) as base_url, httpx.AsyncClient(trust_env=False) as program:
                guessed = base_url.replace(base_url.split("/")[3], "guess")
                assert (await program.post(f"{guessed}/chat/completions", json={})).status_code == 404
                return relay, [await program.post(f"{base_url}/{place}", json=body) for place, body in calls]

    return asyncio.run(go())


def streamed(data: bytes, kind: str = "application/json") -> httpx.Response:
    """As a server sends it: read once, in parts."""

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 50):
            yield data[start : start + 50]

    return httpx.Response(200, content=parts(), headers={"content-type": kind})


def openai(text: str, finish: str = "stop", tokens: int = 3) -> httpx.Response:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
    return streamed(json.dumps({"choices": [choice], "usage": {"completion_tokens": tokens}}).encode())


def over(relay: Relay, code: int) -> AgentEnd:
    """How a program ends with this code, and nothing under way."""
    return asyncio.run(ended(relay, "x", code, ""))


def test_both_formats_and_a_stream_are_counted() -> None:
    events = [
        {"type": "message_start", "message": {"usage": {"output_tokens": 1}}},
        {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 7}},
    ]
    stream = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)

    def answer(request: httpx.Request) -> httpx.Response:
        assert str(request.url).startswith(SESSION) and "authorization" not in request.headers
        if request.url.path.endswith("/messages"):
            return streamed(stream.encode(), "text/event-stream")
        return openai('a text that says "finish_reason": "length"')

    calls: list[tuple[str, dict[str, Any]]] = [("chat/completions", {"a": 1}), ("messages", {}), ("models", {})]
    relay, got = asked(answer, calls[0])
    assert not relay.cut and relay.context.metrics.completion_tokens == 3
    relay, got = asked(answer, *calls)
    assert (relay.context.metrics.turns, relay.context.metrics.completion_tokens, relay.cut) == (2, 10, True)
    assert got[1].text == stream and got[1].headers["content-type"] == "text/event-stream"
    assert over(relay, 0).exit_status is ExitStatus.LENGTH_LIMIT


def test_a_limit_is_refused_once_and_for_all() -> None:
    seen = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        full = {"error": {"code": "length", "message": "no room"}}
        return openai("a") if len(seen) == 1 else httpx.Response(409, json=full)

    ask: tuple[str, dict[str, Any]] = ("chat/completions", {})
    relay, got = asked(answer, ask, ask, ask, ask)
    assert [reply.status_code for reply in got] == [200, 409, 400, 400] and len(seen) == 2
    assert over(relay, 1).exit_status is ExitStatus.LENGTH_LIMIT
    seen.clear()
    relay, got = asked(answer, ask, ask, ask, max_turns=1)
    assert [reply.status_code for reply in got] == [200, 400, 400] and len(seen) == 1
    assert got[1].json()["error"]["code"] == "turn_limit"
    assert over(relay, 1).exit_status is ExitStatus.TURN_LIMIT


@pytest.mark.parametrize("place", ["a/../b", "chat%2f..%2fx", "Chat", "", "a//b", "a?x=1&y"])
def test_places_outside_are_not_asked_for(place: str) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path in ("/sessions/ID/v1/b", "/sessions/ID/v1/a") and not request.url.query
        return openai("a")

    relay, _ = asked(answer, (place, {}))
    assert relay.context.metrics.turns == 0


def answering(*replies: httpx.Response, session: int = 200) -> Callable[[httpx.Request], httpx.Response]:
    """These to requests for turns, one by one; `session` to who asks whether the session is there."""
    left = list(replies)
    return lambda request: httpx.Response(session, json={}) if request.method == "GET" else left.pop(0)


def refused(status: int, code: str, **headers: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"code": code, "message": code}}, headers=headers)


ASK: tuple[str, dict[str, Any]] = ("chat/completions", {})
OWN = [(400, "bad_history"), (409, "lost_race"), (409, "sealed"), (422, "cannot_merge"), (429, "too_many_requests")]


@pytest.mark.parametrize(("status", "code"), [*OWN, (404, "model_not_found")])
def test_a_bad_request_of_what_the_model_wrote_voids_nothing(status: int, code: str) -> None:
    """It may have been the program's, or a command's of the policy: the work that is there is judged."""
    relay, got = asked(answering(openai("a"), refused(status, code)), ASK, ASK)
    assert got[1].status_code == status and relay.context.calls == ModelCalls(turn_at=relay.context.calls.turn_at)
    assert over(relay, 137).exit_status is ExitStatus.SANDBOX_LIMIT
    assert over(relay, 1).exit_status is ExitStatus.AGENT_EXITED
    assert over(relay, 0).exit_status is ExitStatus.SUBMITTED
    relay, _ = asked(answering(refused(status, code)), ASK)
    assert over(relay, 1).exit_status is ExitStatus.AGENT_ERROR, "no turn was taken, and nothing is there to judge"


@pytest.mark.parametrize("code", ["cut_turn", "length", "over_budget"])
def test_a_cut_turn_that_is_extended_is_the_end_of_the_sequence(code: str) -> None:
    relay, _ = asked(answering(openai("a", "length"), refused(413 if code == "over_budget" else 409, code)), ASK, ASK)
    assert {over(relay, exit_code).exit_status for exit_code in (0, 1, 77)} == {ExitStatus.LENGTH_LIMIT}


@pytest.mark.parametrize("exit_code", [0, 1, 77])
@pytest.mark.parametrize(
    ("reply", "session", "status"),
    [
        (refused(404, "not_found"), 404, ExitStatus.SESSION_LOST),
        (refused(503, "draining"), 200, ExitStatus.SESSION_LOST),
        (refused(502, "no_engine"), 200, ExitStatus.NO_ENGINE),
        (refused(502, "bad_upstream"), 200, ExitStatus.GENERATION_ERROR),
        (refused(500, "internal_error"), 200, ExitStatus.GENERATION_ERROR),
    ],
)
def test_what_infrastructure_refused_is_no_exit_of_the_program(
    reply: httpx.Response, session: int, status: ExitStatus, exit_code: int
) -> None:
    """Whatever the program made of it: one that swallows the error and ends with 0 did not submit."""
    answer = answering(openai("a"), reply, refused(400, "bad_history"), session=session)
    relay, _ = asked(answer, ASK, ASK, ASK)
    with pytest.raises(AgentFailure) as failure:
        over(relay, exit_code)
    assert failure.value.exit_status is status
    relay, _ = asked(answering(openai("a"), reply, openai("b"), session=session), ASK, ASK, ASK)
    assert over(relay, 1).exit_status is ExitStatus.AGENT_EXITED, "the model answered since"


def test_a_refusal_within_a_stream_is_one() -> None:
    """A stream of a long turn begins before its end is known: its status says nothing then."""
    told = json.dumps({"error": {"message": "a \n\nevent: error\ndata: {}", "type": "x", "code": "no_engine"}})
    beats = ": keep-alive\n\n" * 3
    late = streamed(f"{beats}event: error\ndata: {told}\n\n".encode(), "text/event-stream")
    relay, got = asked(answering(openai("a"), late), ASK, ASK)
    assert got[1].status_code == 200 and got[1].text.endswith(f"data: {told}\n\n")
    assert relay.context.metrics.turns == 1
    with pytest.raises(AgentFailure) as failure:
        over(relay, 0)
    assert failure.value.exit_status is ExitStatus.NO_ENGINE
    said = json.dumps({"choices": [{"delta": {"content": f"\n\nevent: error\ndata: {told}\n\n"}}]})
    relay, _ = asked(answering(streamed(f"data: {said}\n\ndata: [DONE]\n\n".encode(), "text/event-stream")), ASK)
    assert over(relay, 0).exit_status is ExitStatus.SUBMITTED, "a policy that says so has said something, no more"


def test_bad_requests_side_by_side_are_no_silence() -> None:
    """One is always under way, none is a turn: nothing is owed for longer than the oldest of them."""

    async def go() -> AgentFailure | None:
        now = asyncio.get_running_loop().time()
        calls = ModelCalls()
        context = AgentContext("Do.", SESSION, "m", {}, 9, now + 9, print, None, time_s=0.2, calls=calls)  # type: ignore[arg-type]
        last = calls.asked()
        for _ in range(6):
            await asyncio.sleep(0.05)
            asked = calls.asked()
            calls.refused(last, None)
            last = asked
        return context.kept_by()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "SILENT_S", 0.0)
        assert asyncio.run(go()) is None


@pytest.mark.parametrize(
    ("owed_s", "turn_s", "time_s", "silent"),
    [
        ([55], 70, 100, True),
        ([45], 70, 100, False),  # asked at the end of its time
        ([], 55, 100, False),  # nothing was asked for
        ([4], 5, 6, False),  # time is too short to tell
        ([55, 30, 1], 90, 100, True),
        ([90, 30], 10, 100, False),  # another request was answered meanwhile
    ],
)
def test_a_silent_model_is_one_that_took_most_of_the_time(
    owed_s: list[int], turn_s: int, time_s: int, silent: bool
) -> None:
    """`owed_s`: how long ago what is not answered was asked for; `turn_s`: how long ago the last turn came."""

    async def go() -> AgentFailure | None:
        now = asyncio.get_running_loop().time()
        calls = ModelCalls(owed=[now - each for each in owed_s], turn_at=now - turn_s)
        context = AgentContext("Do.", SESSION, "m", {}, 9, now, print, None, time_s=time_s, calls=calls)  # type: ignore[arg-type]
        return context.kept_by()

    kept = asyncio.run(go())
    assert (kept is not None) is silent
    if kept is not None:
        assert kept.exit_status is ExitStatus.GENERATION_ERROR
        assert str(kept) == f"its model was silent for the last {min(turn_s, max(owed_s))} s of the agent's {time_s} s"


def test_a_signal_is_a_limit_whatever_failed_before() -> None:
    gone = {"error": {"code": "no_engine", "message": "none"}}
    relay, _ = asked(lambda _: httpx.Response(503, json=gone), ("chat/completions", {}))
    assert over(relay, 137).exit_status is ExitStatus.SANDBOX_LIMIT
    with pytest.raises(AgentFailure):
        over(relay, 1)


@pytest.mark.parametrize("works", [True, False])
def test_turns_are_taken_one_by_one_though_asked_for_at_once(works: bool) -> None:
    """20 requests side by side: no more of them under way than have a place, no more turns than there are."""
    under_way, most, seen = 0, 0, 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal under_way, most, seen
        under_way, seen = under_way + 1, seen + 1
        most = max(most, under_way)
        await asyncio.sleep(0.005)
        under_way -= 1
        return openai("a") if works else httpx.Response(502, json={"error": {"code": "engine_error"}})

    async def go() -> Relay:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            deadline = asyncio.get_running_loop().time() + 20
            relay = Relay(AgentContext("Do.", SESSION, "openai/policy", {}, 2, deadline, print, http))  # type: ignore[arg-type]
            async with listening_here(relay) as base_url, httpx.AsyncClient(trust_env=False) as program:
                calls = [program.post(f"{base_url}/chat/completions", json={}) for _ in range(20)]
                got = [reply.status_code for reply in await asyncio.gather(*calls)]
                assert got.count(200) == (2 if works else 0) and set(got) <= {200, 400, 502}
            return relay

    relay = asyncio.run(go())
    assert most <= PARALLEL and relay.over_turns is works
    assert relay.context.metrics.turns == (2 if works else 0) and (seen == 2 or not works)


def test_a_sandbox_has_so_many_connections_and_no_more(tmp_path: Path) -> None:
    """Descriptors are the server's: what one sandbox opens may not cost the others theirs."""
    (tmp_path / "work").mkdir()
    (tmp_path / "agent").mkdir()

    async def go() -> None:
        relay = Relay(AgentContext("Do.", SESSION, "m", {}, 9, 0.0, print, None))  # type: ignore[arg-type]
        async with listening(relay, tmp_path / "agent"):
            before, address = len(os.listdir("/proc/self/fd")), str(tmp_path / "agent" / "session.sock")
            with contextlib.ExitStack() as stack:
                links = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(300)]
                waits = 0
                for link in links:
                    link.setblocking(False)
                    try:
                        link.connect(address)
                    except BlockingIOError:  # its own kernel queue is full
                        waits += 1
                    await asyncio.sleep(0.002)
                await asyncio.sleep(0.2)
                held = len(os.listdir("/proc/self/fd")) - before - len(links)
                assert held == CONNECTIONS and waits > 100
            transport = httpx.AsyncHTTPTransport(uds=address)
            async with httpx.AsyncClient(transport=transport) as program:  # and when they are closed, on it goes
                assert (await program.get("http://x/v1/No")).status_code == 404

    asyncio.run(go())


def test_mounts_that_hold_the_secrets_by_another_name_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real" / "home").mkdir(parents=True)
    (tmp_path / "beside").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real" / "home")
    monkeypatch.setenv("RL360_HOME", str(tmp_path / "link"))
    assert Terms(command=("x",), mounts=(str(tmp_path / "beside"),)).mounts
    with pytest.raises(ValidationError, match="holds the deployment's secrets"):
        Terms(command=("x",), mounts=(str(tmp_path / "real"),))
