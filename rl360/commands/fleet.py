"""`rl360 fleet`: what each engine holds, which pushes are unfinished, and a person's word that an engine is gone."""

from __future__ import annotations

import asyncio
import getpass
import socket
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

if TYPE_CHECKING:
    from rl360.config.services import Services
    from rl360.engines.fleet import Probe
    from rl360.weights.fence import Intent, Store
    from rl360.weights.messages import PushRecord

PROBE_DEADLINE_S = 5.0


def register(app: typer.Typer) -> None:
    """Add `rl360 fleet` to the command line."""
    fleet = typer.Typer(no_args_is_help=True, help="Engines: their states, and confirming that one is gone.")
    fleet.command("status")(status)
    fleet.command("confirm-gone")(confirm_gone)
    app.add_typer(fleet, name="fleet")


def engine_url(services: Services, engine: str) -> str:
    """The URL that `engine-0` or an URL means."""
    from rl360.errors import BadInput

    if engine.startswith(("http://", "https://")):
        return engine.rstrip("/")
    number = engine.removeprefix("engine-")
    if number.isdecimal() and int(number) < len(services.engine_urls):
        return services.engine_urls[int(number)].rstrip("/")
    raise BadInput(f"engine {engine!r}: use its URL or engine-0 to engine-{len(services.engine_urls) - 1}")


def engine_state(probe: Probe, in_gateway: bool, version: str | None) -> str:
    """The engine's state as seen from outside a push."""
    from rl360.engines.fleet import EngineState

    if probe.identity is None:
        return str(EngineState.SUSPECT if probe.silent else EngineState.GONE)
    if "#loading-" in (probe.weight_version or ""):
        return str(EngineState.LOADING)
    if version is None or probe.weight_version != version:
        return str(EngineState.JOINING)
    return str(EngineState.SERVING if in_gateway else EngineState.CONFIRMED)


async def look(services: Services) -> tuple[list[Probe], dict[str, str]]:
    """Every engine's answer, and the gateway's word for each URL it knows; empty when it is down."""
    from rl360.engines.client import EngineClient, open_http
    from rl360.engines.fleet import probe_fleet
    from rl360.engines.gateway import GatewayClient
    from rl360.errors import ServiceError

    async with open_http() as http:
        clients = [EngineClient(url, http, PROBE_DEADLINE_S) for url in services.engine_urls]
        probes = await probe_fleet(clients, PROBE_DEADLINE_S)
        try:
            workers = await GatewayClient(services.gateway_url, http, PROBE_DEADLINE_S).workers()
        except ServiceError:
            return probes, {}
    return probes, {worker.url: "ready" if worker.usable else worker.status for worker in workers}


def describe(
    probes: list[Probe], gateway: dict[str, str], intents: list[Intent], last: PushRecord | None, store: Store
) -> dict[str, Any]:
    """The whole picture as plain data."""
    from rl360.weights import fence
    from rl360.weights.messages import PushStatus

    version = last.version if last is not None and last.status is PushStatus.CONFIRMED else None
    engines = [
        {
            "engine": f"engine-{number}",
            "url": probe.url,
            "state": engine_state(probe, gateway.get(probe.url) == "ready", version),
            "version": probe.weight_version,
            "incarnation": probe.identity.incarnation if probe.identity else None,
            "gateway": gateway.get(probe.url, "absent"),
            "reason": probe.reason,
        }
        for number, probe in enumerate(probes)
    ]
    unfinished = [
        {
            "epoch": intent.epoch,
            "run": intent.run,
            "version": intent.version,
            "running": fence.owner_runs(intent.owner),
            "engines": [
                {"url": engine.url, "incarnation": engine.incarnation, "confirmed_gone": gone}
                for engine in intent.engines
                for gone in [fence.is_gone_confirmed(store, engine)]
            ],
            "unconfirmed": [note.model_dump(mode="json") for note in fence.read_unconfirmed(store, intent.epoch)],
        }
        for intent in intents
    ]
    return {
        "engines": engines,
        "unfinished": unfinished,
        "last_push": None if last is None else last.model_dump(mode="json", exclude={"engines"}),
    }


def print_status(picture: dict[str, Any]) -> None:
    """One line an engine, one a push that is unfinished, and what to do about it."""
    for row in picture["engines"]:
        why = f"  ({row['reason']})" if row["reason"] else ""
        typer.echo(f"{row['engine']}  {row['state']:<9}  {row['version'] or '-'}  gateway: {row['gateway']}{why}")
    last = picture["last_push"]
    if last is not None:
        typer.echo(
            f"last push: {last['version']} {last['status']}, epoch {last['epoch']}, paused {last['paused_s']:.2f} s"
        )
    for push in picture["unfinished"]:
        state = "is running" if push["running"] else "did not finish"
        typer.echo(f"push epoch {push['epoch']} of {push['version']} {state}")
        for note in push["unconfirmed"]:
            typer.echo(f"  not proven gone: {note['identity']['url']}: {note['evidence']}\n  then: {note['command']}")


def status(json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False) -> None:
    """Show every engine and every unfinished push. Exits 1 when an engine is not serving or a push is unfinished.

    Example: rl360 fleet status
    """
    from rl360.config.services import load_services
    from rl360.store.object_store import ObjectStore
    from rl360.weights import fence

    services = load_services()
    store = ObjectStore.from_services(services)
    probes, gateway = asyncio.run(look(services))
    picture = describe(probes, gateway, fence.open_intents(store), fence.last_record(store), store)
    if json:
        typer.echo(orjson.dumps(picture).decode())
    else:
        print_status(picture)
    if picture["unfinished"] or any(row["state"] != "serving" for row in picture["engines"]):
        raise typer.Exit(1)


def confirm_gone(
    engine: Annotated[str, typer.Argument(help="engine-0, engine-1, … or its URL.")],
    reason: Annotated[str, typer.Option(help="How you know that its processes are gone; kept for good.")],
) -> None:
    """Give your word that an engine of an unfinished push is gone, so that the push may be tried again.

    Example: rl360 fleet confirm-gone engine-1 --reason "node n7 was powered off"
    """
    from rl360.config.services import load_services
    from rl360.errors import BadInput
    from rl360.store.object_store import ObjectStore
    from rl360.weights import fence

    services = load_services()
    store = ObjectStore.from_services(services)
    url = engine_url(services, engine)
    probes, _ = asyncio.run(look(services))
    named = {e.incarnation for intent in fence.open_intents(store) for e in intent.engines if e.url == url}
    for probe in probes:
        if probe.url == url and probe.identity is not None and probe.identity.incarnation in named:
            raise BadInput(
                f"{engine} answers now as incarnation {probe.identity.incarnation}: it is not gone; stop it first"
            )
    words = fence.confirm_gone(store, url, reason, by=f"{getpass.getuser()}@{socket.gethostname()}")
    for word in words:
        typer.echo(
            f"recorded: {word.url} incarnation {word.incarnation} of push epoch {word.epoch} is gone ({word.reason})"
        )
    typer.echo("now resume the step")
