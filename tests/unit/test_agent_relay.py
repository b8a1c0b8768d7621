"""A program's way to its session: both formats counted, streams passed on, limits refused so that nobody asks again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from rl360.agents.base import AgentContext, AgentFailure
from rl360.agents.harness import PARALLEL, Relay, Terms, ended, listening_here
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
    assert ended(relay, "x", 0, "").exit_status is ExitStatus.LENGTH_LIMIT


def test_a_limit_is_refused_once_and_for_all() -> None:
    seen = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        full = {"error": {"code": "length", "message": "no room"}}
        return openai("a") if len(seen) == 1 else httpx.Response(409, json=full)

    ask: tuple[str, dict[str, Any]] = ("chat/completions", {})
    relay, got = asked(answer, ask, ask, ask, ask)
    assert [reply.status_code for reply in got] == [200, 409, 400, 400] and len(seen) == 2
    assert ended(relay, "x", 1, "").exit_status is ExitStatus.LENGTH_LIMIT
    seen.clear()
    relay, got = asked(answer, ask, ask, ask, max_turns=1)
    assert [reply.status_code for reply in got] == [200, 400, 400] and len(seen) == 1
    assert got[1].json()["error"]["code"] == "turn_limit"
    assert ended(relay, "x", 1, "").exit_status is ExitStatus.TURN_LIMIT


@pytest.mark.parametrize("place", ["a/../b", "chat%2f..%2fx", "Chat", "", "a//b", "a?x=1&y"])
def test_places_outside_are_not_asked_for(place: str) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path in ("/sessions/ID/v1/b", "/sessions/ID/v1/a") and not request.url.query
        return openai("a")

    relay, _ = asked(answer, (place, {}))
    assert relay.context.metrics.turns == 0


@pytest.mark.parametrize("status", [400, 422])
def test_a_bad_request_of_what_the_model_wrote_voids_nothing(status: int) -> None:
    bad = {"error": {"code": "bad_request", "message": "messages is missing"}}
    relay, got = asked(lambda _: httpx.Response(status, json=bad), ("chat/completions", {}))
    assert got[0].status_code == status and relay.failure is None and not relay.full
    assert ended(relay, "x", 137, "").exit_status is ExitStatus.SANDBOX_LIMIT
    assert ended(relay, "x", 1, "").exit_status is ExitStatus.AGENT_ERROR
    assert relay.late("").exit_status is ExitStatus.AGENT_TIMEOUT


def test_a_signal_is_a_limit_whatever_failed_before() -> None:
    gone = {"error": {"code": "no_engine", "message": "none"}}
    relay, _ = asked(lambda _: httpx.Response(503, json=gone), ("chat/completions", {}))
    assert ended(relay, "x", 137, "").exit_status is ExitStatus.SANDBOX_LIMIT
    with pytest.raises(AgentFailure):
        ended(relay, "x", 1, "")


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
