"""What can be refused about a start of a run before anything of it is sampled.

The command line asks before it makes a flow run, and the flow asks again, for a run may be started in the UI. It reads,
but for the claim that keeps a fork's start from being pruned. What this host cannot see, a directory of another host or
a service that does not answer, is not judged here: the step that needs it says so.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import orjson

from rl360.config.freeze import load_frozen, settle_config
from rl360.config.run import RunConfig
from rl360.config.services import Services
from rl360.errors import BadInput
from rl360.policy.compatible import refuse_other_model
from rl360.sessions.routing import RoutingShape
from rl360.store.layout import run_config_key
from rl360.store.object_store import ObjectStore
from rl360.store.progress import next_step
from rl360.tasksets.taskset import load_taskset
from rl360.training.saved import keep_for_fork, parent_at

_ASKED_TIMEOUT_S = 2.0
_ASKED_AT_ONCE = 32
_ANSWER_BYTES = 1 << 20


def check_start(store: ObjectStore, services: Services, config: RunConfig) -> RunConfig:
    """The config that the run works with when it is started now; `BadInput` with the first thing that cannot work."""
    settled = settle_config(store, config, default_model=services.model_dir)
    if (done := next_step(store, config.run)) > config.steps:
        raise BadInput(f"run {config.run} has {done} steps and {config.steps} are asked for; give --steps")
    spec, here = settled.taskset.path, Path(services.model_dir).is_dir()  # else directories lie on the flows' hosts
    if here or spec.startswith("builtin:") or Path(spec).is_dir():
        judged = next((entry.path for entry in load_taskset(spec).entries.values() if entry.judged), None)
        if judged is not None:
            _refuse_judge(settled, services, f"{judged}: is judged by an LLM")
    if here:
        _refuse_model(settled, services.model_dir)
    if settled.parent is not None and not store.exists(run_config_key(config.run)):
        _refuse_parent(store, settled)
    _refuse_services(settled, services)
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


def _refuse_judge(config: RunConfig, services: Services, what: str) -> None:
    if not config.judge.model:
        raise BadInput(f"{what}; set judge.model and deadlines.judge_s (docs/judges.md)")
    for url, told in _ask([f"{url.rstrip('/')}/health" for url in services.sandbox_urls]):
        if "judge" in told and told["judge"] is None:
            raise BadInput(f"{what} and sandbox server {url} knows none: `rl360 down` and `rl360 up --judge-url URL`")


def _refuse_parent(store: ObjectStore, config: RunConfig) -> None:
    """A new run that names a parent starts from what is really there, and that stays there."""
    assert config.parent is not None
    parent = load_frozen(store, config.parent.run)
    keep_for_fork(store, parent.run, config.parent.step)
    if parent_at(store, parent, config.parent.step) != config.parent:
        raise BadInput(
            f"parent is not what the checkpoint of step {config.parent.step} of {parent.run} says; "
            f"use `rl360 run fork {parent.run} {config.run}`, which fills it in"
        )
    refuse_other_model(config.model.path, parent.model.path, f"that of its parent {parent.run}")


def _refuse_services(config: RunConfig, services: Services) -> None:
    matcher = config.rollout.matcher
    for url, told in _ask([f"{url.rstrip('/')}/health" for url in services.session_urls]):
        allowed = told.get("matchers")
        if isinstance(allowed, list) and matcher not in allowed:
            module = matcher.partition(":")[0].partition(".")[0]
            found = "" if importlib.util.find_spec(module) else f"; there is no module {module} in this environment"
            raise BadInput(
                f"rollout.matcher {matcher!r} is not one that session server {url} allows ({', '.join(allowed)}): "
                f"`rl360 down` and `rl360 up --matcher {matcher}` allow it{found}"
            )
        if config.trainer.routing_replay and "routing" in told and told["routing"] is None:
            raise BadInput(
                f"trainer.routing_replay is on and session server {url} keeps no routed experts: `rl360 down` and "
                "`rl360 up --routed-experts`"
            )
    for url, told in _ask([f"{url.rstrip('/')}/model_info" for url in services.engine_urls]):
        refuse_other_model(config.model.path, str(told.get("model_path")), f"that of engine {url}")


def _ask(urls: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON objects that those answered which answer now. Asked as the flow asks: not through a proxy."""

    def one(url: str) -> Any:
        give_up_at, data = time.monotonic() + _ASKED_TIMEOUT_S, bytearray()
        try:
            with http.stream("GET", url) as reply:
                for part in reply.iter_bytes():
                    data += part
                    if time.monotonic() > give_up_at or len(data) > _ANSWER_BYTES:
                        return None
            return orjson.loads(data) if reply.status_code == 200 else None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError):
            return None

    with httpx.Client(timeout=_ASKED_TIMEOUT_S, trust_env=False) as http, ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        for url, told in zip(urls, pool.map(one, urls), strict=True):
            if isinstance(told, dict):
                yield url.rpartition("/")[0], told
