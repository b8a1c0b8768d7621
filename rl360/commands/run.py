"""`rl360 run`: start, resume, watch and list runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from rl360.config.freeze import load_frozen, load_target
from rl360.config.run import RunConfig
from rl360.config.services import Services, load_services
from rl360.errors import BadInput, Rl360Error

_EXPORT_DEADLINE_S = 900.0

app = typer.Typer(no_args_is_help=True, help="Start, resume, watch and list runs.")

SetOption = Annotated[
    list[str] | None, typer.Option("--set", "-s", help="One field, e.g. -s rollout.wave_size=32. Repeatable.")
]
FollowOption = Annotated[bool, typer.Option(help="Watch the run in the terminal until it ends.")]


def register(root: typer.Typer) -> None:
    """Add `rl360 run` to the command line."""
    root.add_typer(app, name="run")


def read_config(path: Path | None, fields: list[str] | None, **overrides: Any) -> RunConfig:
    """A config from a JSON or YAML file, `--set a.b=value` fields and named overrides (None: not given)."""
    return RunConfig.parse(read_fields(path, fields, **overrides), where=str(path) if path else "config")


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


@app.command()
def start(
    config: Annotated[Path | None, typer.Option(help="JSON or YAML file of a run config.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps to reach.")] = None,
    fields: SetOption = None,
    follow: FollowOption = True,
) -> None:
    """Start a run, or go on with one of the same name and config.

    Example: rl360 run start --name demo --steps 30 -s trainer.lr=0.0003
    """
    launch(load_services(), read_config(config, fields, run=name, seed=seed, steps=steps), follow=follow)


@app.command()
def resume(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    steps: Annotated[int | None, typer.Option(help="New number of steps to reach.")] = None,
    fields: SetOption = None,
    follow: FollowOption = True,
) -> None:
    """Go on with a run where its manifests end, under its own config.

    Operational fields (pace, deadlines, steps) may be changed with --set. Example: rl360 run resume demo --steps 60
    """
    from rl360.store.object_store import ObjectStore
    from rl360.store.progress import next_step

    services = load_services()
    store = ObjectStore.from_services(services)
    asked = load_frozen(store, run).model_copy(update={"steps": load_target(store, run)})
    config = changed_config(asked, read_fields(None, fields, run=run, steps=steps))
    refuse_fewer_steps(config, next_step(store, run))
    launch(services, config, follow=follow)


@app.command("list")
def list_(json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False) -> None:
    """List the runs in the store, oldest first. Example: rl360 run list --json"""
    from rl360.ledger.read import list_runs
    from rl360.store.object_store import ObjectStore

    runs = list_runs(ObjectStore.from_services(load_services()))
    if json:
        typer.echo(orjson.dumps(runs).decode())
        return
    if not runs:
        typer.echo("no runs yet; start one with `rl360 run start`")
    for row in runs:
        typer.echo(f"{row['run']:<42} {row['steps']:>6} steps  {row['state']}")


@app.command()
def watch(run: Annotated[str, typer.Argument(help="Name of the run.")]) -> None:
    """Watch a run in the terminal until it ends; leaving (Ctrl-C) does not stop it. Example: rl360 run watch demo"""
    from rl360.commands.follow import follow as follow_run
    from rl360.store.object_store import ObjectStore

    services = load_services()
    config = load_frozen(ObjectStore.from_services(services), run)
    active = [item for item in _api(services).active() if _run_of(item.parameters) == run]
    if active:
        config = RunConfig.parse(active[0].parameters["config"])  # its number of steps may be a newer one
    follow_run(services, config, active[0].id if active else None)


@app.command()
def cancel(run: Annotated[str, typer.Argument(help="Name of the run.")]) -> None:
    """Cancel a run's flow. What is committed stays; `rl360 run resume` goes on later. Example: rl360 run cancel demo"""
    api = _api(load_services())
    active = [item for item in api.active() if _run_of(item.parameters) == run]
    if not active:
        raise Rl360Error(f"run {run} has no active flow run; `rl360 run list` shows the runs")
    for item in active:
        api.cancel(item.id, "cancelled from the command line")
        typer.echo(f"cancelling {item.name} ({api.run_url(item.id)})")


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    target: Annotated[str, typer.Argument(help="New directory on the trainer's machine, or s3://bucket/prefix.")],
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Write a run's newest policy as a Hugging Face directory that SGLang and transformers load.

    Example: rl360 run export demo ./demo-policy
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

    A run that is at work already is refused, or with `join` watched.
    """
    from rl360.commands.follow import follow as follow_run

    api = _api(services)
    busy = [item for item in api.active() if _run_of(item.parameters) == config.run]
    if busy and join:
        typer.echo(f"run {config.run} is at work already: flow run {busy[0].name}  {api.run_url(busy[0].id)}")
        follow_run(services, config, busy[0].id)
        return
    if busy:
        raise Rl360Error(
            f"run {config.run} is already active as flow run {busy[0].name} ({busy[0].state_name}): watch it with "
            f"`rl360 run watch {config.run}`, or cancel it with `rl360 run cancel {config.run}`"
        )
    flow_run = api.trigger("rl_run/local", {"config": config.model_dump(mode="json")})
    typer.echo(f"run {config.run}: flow run {flow_run.name}  {api.run_url(flow_run.id)}")
    if follow:
        follow_run(services, config, flow_run.id)


def _api(services: Services) -> Any:
    from rl360.commands.prefect_api import PrefectApi

    return PrefectApi(services.prefect_api_url, services.prefect_ui_url)


def _run_of(parameters: dict[str, Any]) -> str:
    config = parameters.get("config")
    return str(config.get("run", "")) if isinstance(config, dict) else ""


def refuse_fewer_steps(config: RunConfig, done: int) -> None:
    """A run that is asked for fewer steps than it has would end at once as done."""
    if done > config.steps:
        raise BadInput(f"run {config.run} has {done} steps and {config.steps} are asked for; give --steps")


def changed_config(frozen: RunConfig, changes: dict[str, Any]) -> RunConfig:
    """The run's config with some fields changed. Checked as a whole: what must fit together may be of both."""
    return RunConfig.parse(_merge(frozen.model_dump(mode="json"), changes))


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, item in changes.items():
        out[key] = _merge(out[key], item) if isinstance(item, dict) and isinstance(out.get(key), dict) else item
    return out
