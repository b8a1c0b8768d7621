"""Plug-ins of the flow's side at work: what a generate function may change and cannot forge, and that a rollout
function plays every attempt of its wave. Names that lead nowhere are refused when a run starts."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rl360.agents.records import RecordLog
from rl360.agents.rollout import AttemptSpec, Play, RolloutClient, Run
from rl360.config.run import RunConfig
from rl360.errors import BadInput, CorruptObject
from rl360.harbor.protocol import RunReply, RunRequest
from rl360.ledger.outcomes import Outcome
from tasks.roll_out import _run_wave
from tests.unit.memory_store import MemoryStore
from tests.unit.test_preflight import check, model, refused  # noqa: F401
from tests.unit.test_preflight import server as health
from tests.unit.test_preflight import services_at as deployment
from tests.unit.test_rollout import KEY, SPEC, run_reply, server, services_at, stored_at

ME = "tests.unit.test_rollout_plugins"


async def fewer_turns(request: RunRequest, spec: AttemptSpec, run: Run) -> RunReply:
    assert spec == SPEC
    return await run(request.model_copy(update={"max_turns": 1}))


async def generous(request: RunRequest, spec: AttemptSpec, run: Run) -> RunReply:
    reply = await run(request)
    assert reply.verdict is not None
    return reply.model_copy(update={"verdict": reply.verdict.model_copy(update={"reward": 5.0})})


async def inventive(request: RunRequest, spec: AttemptSpec, run: Run) -> RunReply:
    reply = await run(request)
    return reply.model_copy(update={"outcome": Outcome.PASSED, "verdict": None, "reward": 1.0})


async def plays_some(specs: list[AttemptSpec], play: Play) -> None:
    for spec in specs[::2]:
        await play(spec)


def attempt(tmp_path: Path, generate: str, bodies: dict[str, dict] | None = None) -> Any:
    config = RunConfig.parse({"rollout": {"agent": "bash_edit", "generate": f"{ME}:{generate}"}})
    with server((200, run_reply("passed")), stored=(200, stored_at(KEY)), bodies=bodies) as (url, _):

        async def go() -> Any:
            client = RolloutClient(services_at(tmp_path, url, url), config, 0, 3, "v0")
            async with client:
                return await client.attempt(SPEC, 0)

        return asyncio.run(go())


def test_a_generate_function_changes_what_is_asked(tmp_path: Path) -> None:
    bodies: dict[str, dict] = {}
    record = attempt(tmp_path, "fewer_turns", bodies)
    assert record.outcome is Outcome.PASSED and record.verdict is not None
    assert (bodies["/run"]["max_turns"], bodies["/run"]["agent_name"]) == (1, "bash_edit")


@pytest.mark.parametrize("generate", ["generous", "inventive"])
def test_a_generate_function_cannot_make_a_reward(tmp_path: Path, generate: str) -> None:
    with pytest.raises((BadInput, CorruptObject), match=r"is not signed by the verifier|verdict"):
        attempt(tmp_path, generate)


def test_a_rollout_function_that_leaves_attempts_out_stops_the_step(tmp_path: Path) -> None:
    config = RunConfig.parse({"rollout": {"function": f"{ME}:plays_some", "infra_retries": 0}})
    specs = [AttemptSpec(f"s000000-g000-a{slot:02}", "s000000-g000", "hello", "/t", "d") for slot in range(4)]
    store = cast(Any, MemoryStore())
    with server((200, run_reply("sandbox_lost"))) as (url, asked):
        services = services_at(tmp_path, url, url)
        job = SimpleNamespace(
            config=config, run=config.run, step=0, store=store, services=services, log=logging.getLogger(__name__)
        )
        log = RecordLog(store, config.run, 0, 0)
        with pytest.raises(BadInput, match=rf"{ME}:plays_some left 2 attempts unplayed, s000000-g000-a01 first"):
            asyncio.run(_run_wave(cast(Any, job), 0, [specs], "v0", log))
        assert asked.count("/run") == 2 and len(log.stored) == 2


def test_a_run_that_names_what_is_not_there_is_refused(model: Path) -> None:  # noqa: F811
    refused(deployment(model), "rollout plug-in 'nowhere:f' cannot be imported", rollout={"generate": "nowhere:f"})
    refused(deployment(model), "rollout plug-in 'rl360:f' cannot be imported", rollout={"function": "rl360:f"})
    refused(deployment(model), "weigh each", taskset={"weights": {"append": 1}})
    with health({"agents": ["bash", "mine"]}) as sandbox:
        services = deployment(model).model_copy(update={"sandbox_urls": [sandbox]})
        refused(
            services,
            r"rollout.agent 'other' is not one that sandbox server .* has \(bash, mine\)",
            rollout={"agent": "other"},
        )
        assert check(MemoryStore(), services, rollout={"agent": "mine"}).rollout.agent == "mine"
