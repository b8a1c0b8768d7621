"""Which sandbox server an attempt goes to: its task's, whoever asks; another one when a try or a server is lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rl360.agents import rollout
from rl360.agents.rollout import AttemptSpec, RolloutClient
from rl360.config.run import RunConfig
from rl360.ledger.outcomes import Outcome
from tests.unit.test_rollout import GONE, run_reply, server, services_at

GROUPS = [f"s000000-g{number:03}" for number in range(16)]
SPECS = [AttemptSpec(f"{group}-a{slot:02}", group, f"task-{group}", "/t", "d") for group in GROUPS for slot in range(4)]


def test_a_wave_that_runs_again_asks_the_same_servers(tmp_path: Path) -> None:
    urls = [f"http://h{number}" for number in range(4)]

    async def go() -> list[list[str]]:
        services = services_at(tmp_path, GONE, GONE)
        found = []
        for order in (urls, urls[::-1]):
            placed = services.model_copy(update={"sandbox_urls": order})
            async with RolloutClient(placed, RunConfig(), 0, 0, "demo:0", SPECS) as client:
                found.append([client._sandbox_server(spec, 0) for spec in SPECS])
                again = [client._sandbox_server(spec, 1) for spec in SPECS]
                assert all(first != second for first, second in zip(found[-1], again, strict=True))
        return found

    first, second = asyncio.run(go())
    assert first == second
    assert max(first.count(url) for url in urls) <= 20
    by_task: dict[str, set[str]] = {}
    for spec, url in zip(SPECS, first, strict=True):
        by_task.setdefault(spec.task_id, set()).add(url)
    assert max(len(servers) for servers in by_task.values()) <= 3


def test_tasks_of_an_image_share_their_servers(tmp_path: Path) -> None:
    """Each of them has its own two, of eight, where it has no image: so had plans that were stored without one."""
    urls = [f"http://h{number}" for number in range(8)]
    services = services_at(tmp_path, GONE, GONE).model_copy(update={"sandbox_urls": urls})

    async def used(image: str) -> set[str]:
        specs = [replace(spec, image=image) for spec in SPECS[:16]]
        # of a large wave, in which these are no server's full share
        others = [replace(spec, slot_id=f"{spec.slot_id}-{n}", task_id=f"{n}") for n in range(20) for spec in SPECS]
        async with RolloutClient(services, RunConfig(), 0, 0, "demo:0", [*specs, *others]) as client:
            return {client._sandbox_server(spec, 0) for spec in specs}

    assert len(asyncio.run(used("python:3.12"))) == 2
    assert len(asyncio.run(used(""))) > 2


def test_the_rest_of_a_wave_leaves_a_server_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "_PATIENCE_S", 0.0)

    async def go(url: str) -> list[Outcome]:
        services = services_at(tmp_path, url, url).model_copy(update={"sandbox_urls": [GONE, url]})
        async with RolloutClient(services, RunConfig(), 0, 0, "demo:0", SPECS[:8]) as client:
            here = [spec for spec in SPECS[:8] if client._sandbox_server(spec, 0) == GONE]
            assert len(here) >= 2
            return [(await client.play(spec, 0)).outcome for spec in here]

    with server((200, run_reply("failed"))) as (url, asked):
        outcomes = asyncio.run(go(url))
    assert outcomes[0] is Outcome.SANDBOX_LOST
    assert Outcome.SANDBOX_LOST not in outcomes[1:] and asked.count("/run") == len(outcomes) - 1


def test_an_attempt_that_waits_for_a_place_leaves_a_server_that_is_lost(tmp_path: Path) -> None:
    urls = ["http://full", "http://other"]
    full = {"running": 1, "held_unconfirmed": 0, "promised_to": 1, "queued": 0, "max_concurrent": 1, "window": 1}
    full |= {"room": {"memory_mb": 9}, "room_left": {"memory_mb": 8}}

    async def go() -> None:
        services = services_at(tmp_path, GONE, GONE).model_copy(update={"sandbox_urls": urls})
        async with RolloutClient(services, RunConfig(), 0, 0, "demo:0", SPECS[:8]) as client:
            here = [spec for spec in SPECS[:8] if client._sandbox_server(spec, 0) == urls[0]]
            away = False

            async def health(server: str) -> object:
                return full if server == urls[0] and not away else {}

            client._health = health  # type: ignore[method-assign]
            waiting = [asyncio.create_task(client._place(spec, 0)) for spec in here]
            await asyncio.sleep(0.1)
            assert not any(one.done() for one in waiting)
            away = True
            client._placement.lose(urls[0])
            async with asyncio.timeout(10):
                assert {where for where, _ in await asyncio.gather(*waiting)} == {urls[1]}

    asyncio.run(go())


def test_a_session_server_that_is_gone_takes_no_sandbox_server_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "_PATIENCE_S", 0.0)

    async def go(url: str) -> list[str]:
        services = services_at(tmp_path, url, GONE).model_copy(update={"sandbox_urls": ["http://other", url]})
        async with RolloutClient(services, RunConfig(), 0, 0, "demo:0", SPECS[:8]) as client:
            before = [client._sandbox_server(spec, 0) for spec in SPECS[:8]]
            assert (await client.play(SPECS[0], 0)).outcome is Outcome.SESSION_LOST
            assert [client._sandbox_server(spec, 0) for spec in SPECS[:8]] == before
            return before

    with server((200, run_reply("failed"))) as (url, asked):
        asyncio.run(go(url))
    assert asked == []
