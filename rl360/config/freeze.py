"""Freezing a run's config: `config.json` is written once; a later start under another one is refused."""

from __future__ import annotations

from typing import Literal

import orjson

from rl360.config.run import RunConfig, frozen_differences
from rl360.errors import BadInput
from rl360.store.layout import run_config_key, run_target_key
from rl360.store.object_store import ObjectStore


def freeze_config(store: ObjectStore, config: RunConfig, *, default_model: str) -> RunConfig:
    """Write the config of a new run, or check it against the frozen one; returns what `settle_config` does."""
    new = _with_model(config, config.model.path or default_model)
    if store.put_once(run_config_key(config.run), new.to_json()):
        return new
    return settle_config(store, config, default_model=default_model)


def settle_config(store: ObjectStore, config: RunConfig, *, default_model: str) -> RunConfig:
    """The config to work with: frozen fields as frozen, operational fields as given.

    An empty `model.path` means the frozen path, and for a new run `default_model`. `BadInput` lists every frozen field
    that is asked for otherwise.
    """
    if not store.exists(run_config_key(config.run)):
        return _with_model(config, config.model.path or default_model)
    frozen = load_frozen(store, config.run)
    wanted = _with_model(config, config.model.path or frozen.model.path)
    if differences := frozen_differences(frozen, wanted):
        raise BadInput(
            f"run {config.run} was started under another config ({'; '.join(differences)}); resume it with its own "
            f"config (`rl360 run resume {config.run}`), go on from its weights under a changed one (`rl360 run fork "
            f"{config.run} NEW -s FIELD=VALUE`), or start a run under another name"
        )
    return wanted


def note_target(store: ObjectStore, config: RunConfig) -> None:
    """Remember how many steps the run is asked to reach now."""
    store.put(run_target_key(config.run), orjson.dumps({"steps": config.steps}))


def load_frozen(store: ObjectStore, run: str, extra: Literal["ignore"] | None = None) -> RunConfig:
    """The config a run was started with, also where today's rules would refuse a start under it; `BadInput` when there
    is no such run. extra: of `RunConfig.parse`."""
    key = run_config_key(run)
    try:
        data = store.get(key)
    except KeyError:
        raise BadInput(f"no run {run!r} in bucket {store.bucket}; `rl360 run list` shows what there is") from None
    return RunConfig.parse(data, where=key, frozen=True, extra=extra)


def _with_model(config: RunConfig, path: str) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
