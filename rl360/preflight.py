"""What can be refused about a start of a run before anything of it is sampled.

The command line asks before it makes a flow run, and the flow asks again, for a run may be started in the UI. It reads,
but for the claim that keeps a fork's start from being pruned. What this host cannot see, a directory of another host or
a service that does not answer, is not judged here: the step that needs it says so. All services are asked at once,
within `_ASKED_S` together.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import threading
from pathlib import Path
from typing import Any

import httpx
import orjson

from rl360.config.freeze import load_frozen, settle_config
from rl360.config.run import RunConfig
from rl360.config.services import Services
from rl360.errors import BadInput
from rl360.plugins import load_function
from rl360.policy.compatible import refuse_other_model
from rl360.sessions.routing import RoutingShape
from rl360.store.layout import run_config_key
from rl360.store.object_store import ObjectStore
from rl360.store.progress import next_step
from rl360.tasksets.taskset import draw, load_taskset
from rl360.training.saved import keep_for_fork, parent_at

_ASKED_S = 2.0
_ANSWER_BYTES = 1 << 20
Told = dict[str, dict[str, Any]]  # by address


def check_start(store: ObjectStore, services: Services, config: RunConfig) -> RunConfig:
    """The config that the run works with when it is started now; `BadInput` with the first thing that cannot work."""
    settled = settle_config(store, config, default_model=services.model_dir)
    if (done := next_step(store, config.run)) > config.steps:
        raise BadInput(f"run {config.run} has {done} steps and {config.steps} are asked for; give --steps")
    spec, here = settled.taskset.path, Path(services.model_dir).is_dir()  # else directories lie on the flows' hosts
    sources, judged = [spec] if isinstance(spec, str) else spec, None
    if here or all(source.startswith("builtin:") or Path(source).exists() for source in sources):
        taskset = load_taskset(spec)
        draw(taskset, 0, 0, 1, settled.taskset.weights)
        judged = next((str(entry.path) for entry in taskset.entries.values() if entry.judged), None)
        if judged is not None and not settled.judge.model:
            raise BadInput(f"{judged}: is judged by an LLM; set judge.model and deadlines.judge_s (docs/judges.md)")
    if here:
        _refuse_model(settled, services.model_dir)
    forked = settled.parent if not store.exists(run_config_key(config.run)) else None
    if forked is not None:
        _refuse_parent(store, settled)
    for path in filter(None, (settled.rollout.generate, settled.rollout.function)):
        load_function(path, "rollout plug-in")
    healths = [_health(url) for url in [*services.session_urls, *services.sandbox_urls]]
    told = _ask([*healths, *map(_model_info, services.engine_urls)])
    if judged is not None:
        _refuse_judge(judged, services, told)
    _refuse_services(settled, services, told)
    if forked is not None:  # last: a start that is refused claims nothing
        keep_for_fork(store, forked.run, forked.step)
    return settled


def _refuse_model(config: RunConfig, served: str) -> None:
    ours = Path(config.model.path)
    if not (ours / "config.json").is_file():
        raise BadInput(f"model.path {ours} is no Hugging Face model directory: there is no config.json")
    if config.trainer.routing_replay and RoutingShape.from_model_dir(ours) is None:
        raise BadInput(f"trainer.routing_replay is on and {ours} is a dense model, without experts; switch it off")
    refuse_other_model(ours, served)
    if reference := config.objective.reference:
        if not (Path(reference) / "config.json").is_file():
            raise BadInput(f"objective.reference {reference} is no Hugging Face model directory: no config.json in it")
        refuse_other_model(ours, reference, "its reference policy")


def _refuse_judge(task: str, services: Services, told: Told) -> None:
    for url in services.sandbox_urls:
        if told.get(_health(url), {}).get("judge", "") is None:
            raise BadInput(
                f"{task}: is judged by an LLM and sandbox server {url} knows none: `rl360 down` and "
                "`rl360 up --judge-url URL`"
            )


def _refuse_parent(store: ObjectStore, config: RunConfig) -> None:
    """A new run that names a parent starts from what is really there."""
    assert config.parent is not None
    parent = load_frozen(store, config.parent.run)
    if parent_at(store, parent, config.parent.step) != config.parent:
        raise BadInput(
            f"parent is not what the checkpoint of step {config.parent.step} of {parent.run} says; "
            f"use `rl360 run fork {parent.run} {config.run}`, which fills it in"
        )
    refuse_other_model(config.model.path, parent.model.path, f"that of its parent {parent.run}")


def _refuse_services(config: RunConfig, services: Services, told: Told) -> None:
    matcher = config.rollout.matcher
    for url in services.session_urls:
        said = told.get(_health(url), {})
        allowed = said.get("matchers")
        if isinstance(allowed, list) and matcher not in allowed:
            module = matcher.partition(":")[0].partition(".")[0]
            found = "" if importlib.util.find_spec(module) else f"; there is no module {module} in this environment"
            raise BadInput(
                f"rollout.matcher {matcher!r} is not one that session server {url} allows ({', '.join(allowed)}): "
                f"`rl360 down` and `rl360 up --matcher {matcher}` allow it{found}"
            )
        if config.trainer.routing_replay and said.get("routing", "") is None:
            raise BadInput(
                f"trainer.routing_replay is on and session server {url} keeps no routed experts: `rl360 down` and "
                "`rl360 up --routed-experts`"
            )
    agent = config.rollout.agent
    for url in services.sandbox_urls:
        agents = told.get(_health(url), {}).get("agents")
        if isinstance(agents, list) and agent not in agents:
            raise BadInput(f"rollout.agent {agent!r} is not one that sandbox server {url} has ({', '.join(agents)})")
    for url in services.engine_urls:
        if (engine := told.get(_model_info(url))) is not None:
            refuse_other_model(config.model.path, str(engine.get("model_path")), f"that of engine {url}")


def _health(url: str) -> str:
    return f"{url.rstrip('/')}/health"


def _model_info(url: str) -> str:
    return f"{url.rstrip('/')}/model_info"


def _ask(urls: list[str]) -> Told:
    """The JSON objects that those answered which answer in time. Asked as the flow asks: not through a proxy."""
    told: Told = {}
    # in a thread of its own: a flow may have a loop running in this one, and a name may take longer to be looked up
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    asking = asyncio.run_coroutine_threadsafe(_ask_all(urls, told), loop)
    try:
        asking.result(_ASKED_S + 1.0)  # raises a defect of ours: silence is an answer only of a service
    except TimeoutError:
        asking.cancel()
    finally:
        loop.call_soon_threadsafe(loop.stop)
    return dict(told)


async def _ask_all(urls: list[str], told: Told) -> None:
    async def one(url: str) -> None:
        data = bytearray()
        with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL, orjson.JSONDecodeError):
            async with http.stream("GET", url) as reply:
                async for part in reply.aiter_bytes():
                    data += part
                    if len(data) > _ANSWER_BYTES:
                        return
            said = orjson.loads(data) if reply.status_code == 200 else None
            if isinstance(said, dict):
                told[url] = said

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=_ASKED_S, limits=limits, trust_env=False) as http:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ASKED_S):
                await asyncio.gather(*map(one, urls))
