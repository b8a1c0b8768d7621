"""`rl360 fleet`: what each engine is and why, what the fleet's log says, who joins and leaves, and a person's word."""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
import time
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

if TYPE_CHECKING:
    from rl360.config.services import Services
    from rl360.engines.fleet import Probe
    from rl360.engines.fleet_log import Entry, FleetLog, FleetState, Slot
    from rl360.engines.keeper_lease import Store
    from rl360.weights.fence import Intent
    from rl360.weights.messages import PushRecord

PROBE_DEADLINE_S = 5.0
BEFORE_A_PUSH = "engines that are joining are normal before the first push of a run: start a run"
ADD_EXAMPLES = (
    "Examples:",
    "rl360 fleet add --local 1",
    "rl360 fleet add --launcher kubernetes --count 4",
    "rl360 fleet add http://10.0.0.7:30000 --reason borrowed",
    "rl360 fleet add engine-1",
)
EngineArgument = Annotated[str, typer.Argument(help="Its name as `rl360 fleet status` shows it, or its URL.")]
ReasonOption = Annotated[str, typer.Option(help="Why; kept in the fleet's log.")]
WaitOption = Annotated[float, typer.Option(min=0, help="Seconds to wait for a push or the keeper that has it now.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable.")]


def register(app: typer.Typer) -> None:
    """Add `rl360 fleet` to the command line."""
    fleet = typer.Typer(no_args_is_help=True, help="Engines: their states, who joins and leaves, and who is gone.")
    fleet.command("status")(status)
    fleet.command("events")(events)
    fleet.command("add", epilog="\n\n".join(ADD_EXAMPLES))(add)
    fleet.command("remove")(remove)
    fleet.command("drain")(drain)
    fleet.command("confirm-gone")(confirm_gone)
    fleet.command("keep")(keep)
    app.add_typer(fleet, name="fleet")


def _open(timeout_s: float = 20.0) -> tuple[Services, Store, FleetLog]:
    from rl360.config.services import load_services
    from rl360.engines.fleet_log import FleetLog
    from rl360.store.object_store import ObjectStore

    services = load_services()
    store = ObjectStore.from_services(services, timeout_s)
    return services, store, FleetLog(store)


def _me() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"


def known_engines(services: Services, state: FleetState) -> dict[str, str]:
    """Name -> URL of every engine that is configured or in the log."""
    configured = {f"engine-{number}": url.rstrip("/") for number, url in enumerate(services.engine_urls)}
    return configured | {name: configured.get(name, slot.url) for name, slot in state.slots.items()}


def find_engine(services: Services, state: FleetState, engine: str) -> tuple[str, str]:
    """Name and URL of the engine that a name or a URL means."""
    from rl360.errors import BadInput

    known = known_engines(services, state)
    for name, url in known.items():
        if engine == name or (engine and engine.rstrip("/") == url):
            return name, url
    raise BadInput(f"engine {engine!r}: use a URL of the fleet or one of {', '.join(known)}")


def engine_state(probe: Probe, in_gateway: bool, version: str | None) -> str:
    """The engine's state as seen from outside a push, for an engine that the log doesn't know yet."""
    from rl360.engines.fleet import EngineState

    if probe.identity is None:
        return str(EngineState.SUSPECT if probe.silent else EngineState.JOINING)
    if "#loading-" in (probe.weight_version or ""):
        return str(EngineState.LOADING)
    if version is None or probe.weight_version != version:
        return str(EngineState.JOINING)
    return str(EngineState.SERVING if in_gateway else EngineState.CONFIRMED)


async def look(services: Services, urls: list[str]) -> tuple[list[Probe], dict[str, str]]:
    """Every engine's answer, and the gateway's word for each URL it knows; empty when it is down."""
    from rl360.engines.client import EngineClient, open_http
    from rl360.engines.fleet import probe_fleet
    from rl360.engines.gateway import GatewayClient
    from rl360.errors import ServiceError

    async with open_http() as http:
        probes = await probe_fleet([EngineClient(url, http, PROBE_DEADLINE_S) for url in urls], PROBE_DEADLINE_S)
        try:
            workers = await GatewayClient(services.gateway_url, http, PROBE_DEADLINE_S).workers()
        except ServiceError:
            return probes, {}
    return probes, {worker.url: "ready" if worker.usable else worker.status for worker in workers}


async def _out_of_gateway(services: Services, url: str) -> str:
    """Take it out now; what is known of that."""
    from rl360.engines.client import open_http
    from rl360.engines.gateway import GatewayClient
    from rl360.errors import ServiceError

    async with open_http() as http:
        try:
            await GatewayClient(services.gateway_url, http).remove(url, 20.0)
        except ServiceError as error:
            return f"the gateway did not answer ({error})"
    return "it gets no new requests"


def _row(name: str, probe: Probe, gateway: dict[str, str], slot: Slot | None, version: str | None) -> dict[str, Any]:
    """One engine: what the log says, what it answers, what the gateway does with it, and why."""
    word = gateway.get(probe.url, "absent")
    live = "answers" if probe.identity else "silent" if probe.silent else "no answer"
    row: dict[str, Any] = {
        "engine": name,
        "url": probe.url,
        "live": live,
        "gateway": word,
        "version": probe.weight_version,
    }
    row["incarnation"] = probe.identity.incarnation if probe.identity else None
    if slot is None:
        state = engine_state(probe, word == "ready", version)
        unlogged: dict[str, Any] = {"owner": None, "launcher": "supervised", "logged": False, "evidence": ""}
        unlogged |= {"since": None, "push": None, "lost_traffic": 0, "member": True, "unproven": [], "removed": None}
        unseen = f"not seen yet: {probe.reason}" if probe.identity is None and not probe.silent else probe.reason
        return row | unlogged | {"state": state, "reason": unseen}
    row |= {
        "state": str(slot.state),
        "owner": slot.owner,
        "launcher": slot.launcher,
        "logged": True,
        "since": slot.since,
        "push": slot.epoch,
        "lost_traffic": len(slot.flaps),
    }
    why = [slot.reason]
    if probe.identity is not None and slot.incarnation and probe.identity.incarnation != slot.incarnation:
        why.append("another incarnation answers now")
    elif probe.identity is None and slot.state not in ("gone", "fenced", "suspect"):
        why.append(probe.reason or "does not answer")
    if slot.state == "gone" and slot.launcher == "supervised" and slot.member is not False and live != "answers":
        why.append("being started by the supervisor")
    if slot.state == "serving" and word != "ready":
        why.append("not in the gateway; the next push or step puts it back")
    row |= {"reason": "; ".join(why), "evidence": slot.evidence, "member": slot.member is not False}
    return row | {"unproven": [item.model_dump() for item in slot.unproven], "removed": None}


def describe(
    named: dict[str, Probe],
    gateway: dict[str, str],
    state: FleetState,
    intents: list[Intent],
    last: PushRecord | None,
    store: Store,
) -> dict[str, Any]:
    """The whole picture as plain data."""
    from rl360.engines.keeper_lease import last_beat, other_keepers
    from rl360.weights import fence
    from rl360.weights.messages import PushStatus

    version = last.version if last is not None and last.status is PushStatus.CONFIRMED else None
    keepers = other_keepers(store, "")
    notes: dict[str, str] = {}
    for keeper in keepers:
        beat = last_beat(store, keeper.partition(" ")[0].partition(":")[2])[1]
        notes |= beat.notes if beat is not None else {}
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
        "engines": [
            _row(name, probe, gateway, state.slots.get(name), version) | {"start": notes.get(name)}
            for name, probe in named.items()
        ],
        "keepers": keepers,
        "log": {"entries": state.seq},
        "unfinished": unfinished,
        "last_push": None if last is None else last.model_dump(mode="json", exclude={"engines"}),
    }


def print_status(picture: dict[str, Any], recent: list[Entry]) -> None:
    """One line an engine, one a push that is unfinished, and what to do about it."""
    for row in picture["engines"]:
        if row.get("removed"):
            typer.echo(f"{row['engine']:<13} {row['state']} ({row['removed']}; {_back(row['engine'])})")
            continue
        held = f"  held by {row['owner']}" if row["owner"] else ""
        why = f"  ({row['reason']})" if row["reason"] else ""
        shown = f"{row['engine']:<13} {row['state']:<9} {_age(row['since']):>7}  {row['version'] or '-':<12}"
        push = f"push {row['push']}" if row["push"] else "no push"
        shown += f" {push:<9} {row['launcher']:<10} {row['live']:<9} gateway: {row['gateway']}"
        typer.echo(f"{shown}{held}{why}")
        if row["start"]:
            typer.echo(f"  {'its start' if row['state'] == 'joining' else 'the keeper'}: {row['start']}")
        for item in row.get("unproven", []):
            typer.echo(f"  not proven gone: incarnation {item['incarnation']}, before this one: {item['evidence']}")
            typer.echo(f"  then: rl360 fleet confirm-gone {row['engine']} --reason '...'")
        if row["state"] == "fenced":
            typer.echo(f"  {row['evidence']}")
    keepers = "; ".join(picture["keepers"])
    typer.echo(f"keeper: {keepers or 'none; between pushes nobody looks after the engines (`rl360 fleet keep`)'}")
    last = picture["last_push"]
    if last is not None:
        why = f": {last['reason']}" if last["reason"] else ""
        paused = f"paused {last['paused_s']:.2f} s"
        typer.echo(f"last push: {last['version']} {last['status']}, epoch {last['epoch']}, {paused}{why}")
    elif any(row["state"] == "joining" for row in picture["engines"]):
        typer.echo(f"no push yet: {BEFORE_A_PUSH}")
    for push in picture["unfinished"]:
        state = "is running" if push["running"] else "did not finish"
        typer.echo(f"push epoch {push['epoch']} of {push['version']} {state}")
        for note in push["unconfirmed"]:
            typer.echo(f"  not proven gone: {note['identity']['url']}: {note['evidence']}\n  then: {note['command']}")
    for line in (line for entry in recent for line in entry_lines(entry)):
        typer.echo(line)


def _back(name: str) -> str:
    return f"back with: rl360 fleet add {name}"


def _age(since: float | None) -> str:
    """How long ago, in one or two figures: `12 s`, `7 min`, `3.4 h`."""
    if since is None:
        return "-"
    age_s = max(0.0, time.time() - since)
    return f"{age_s:.0f} s" if age_s < 120 else f"{age_s / 60:.0f} min" if age_s < 7200 else f"{age_s / 3600:.1f} h"


def entry_lines(entry: Entry) -> list[str]:
    """One line an event."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.at))
    return [
        f"{at}  {entry.seq:>6}  {event.engine:<13} {event.was or 'new':>9} -> {event.to:<9}  {entry.owner}  "
        f"{event.reason}{f' [{event.evidence}]' if event.evidence else ''}"
        for event in entry.events
    ]


def status(
    json: JsonOption = False,
    last: Annotated[int, typer.Option(min=0, help="Entries of the log to show below; one may take several lines.")] = 5,
) -> None:
    """Show every engine, why it is what it is, and every unfinished push.

    Exits 1 when one of the fleet's is not serving or a push is unfinished; removed ones don't count. Engines that are
    joining are normal before the first push of a run: start a run.

    Example: rl360 fleet status
    """
    from rl360.engines import membership
    from rl360.weights import fence

    services, store, log = _open()
    state = log.refresh()
    known = known_engines(services, state)
    asked = [url for url in known.values() if url]
    probes, gateway = asyncio.run(look(services, asked))
    named = _named(known, probes)
    picture = describe(named, gateway, state, fence.open_intents(store), fence.last_record(store), store)
    for row in picture["engines"]:
        if row["state"] == "gone" and not row["member"] and not row["unproven"]:
            row["removed"] = membership.who_removed(log, row["engine"]) or "removed"
    if json:
        typer.echo(orjson.dumps(picture).decode())
    else:
        print_status(picture, log.recent(last))
    rows = [row for row in picture["engines"] if row.get("member", True)]
    wrong = any(row["state"] != "serving" or row["live"] != "answers" or row["gateway"] != "ready" for row in rows)
    if picture["unfinished"] or wrong:
        raise typer.Exit(1)


def _named(known: dict[str, str], probes: list[Probe]) -> dict[str, Probe]:
    from rl360.engines.fleet import Probe

    found = {probe.url: probe for probe in probes}
    unknown = Probe("", None, None, False, "its URL is not known yet")
    return {name: found.get(url, unknown) for name, url in known.items()}


def events(
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="Entries, newest last.")] = 20,
    engine: Annotated[str, typer.Option(help="Only those of this engine.")] = "",
    json: JsonOption = False,
) -> None:
    """Show the fleet's log: who moved which engine, when, why, and what was seen.

    Example: rl360 fleet events -n 50 --engine engine-1
    """
    _, _, log = _open()
    for entry in log.recent(number):
        kept = tuple(event for event in entry.events if engine in ("", event.engine))
        if not kept:
            continue
        shown = entry.model_copy(update={"events": kept})
        if json:
            typer.echo(shown.model_dump_json(by_alias=True))
        else:
            typer.echo("\n".join(entry_lines(shown)))


def add(
    engine: Annotated[str, typer.Argument(help="URL of a running engine, or an engine that was removed.")] = "",
    local: Annotated[int, typer.Option(min=0, max=64, help="Start so many more on this machine.")] = 0,
    launcher: Annotated[str, typer.Option(help="local, kubernetes or slurm: what starts --count more.")] = "",
    count: Annotated[int, typer.Option(min=1, max=4096, help="With --launcher: how many.")] = 1,
    reason: ReasonOption = "",
    wait: WaitOption = 120.0,
) -> None:
    """Bring engines into the fleet. Each gets its first request after a push has read its weights back."""
    from rl360.engines import membership
    from rl360.errors import BadInput

    services, store, log = _open()
    if sum(map(bool, (engine, local, launcher))) != 1:
        raise BadInput("rl360 fleet add: give one of a URL, a removed engine, --local N or --launcher NAME")
    why = reason or "added by a person"
    if not engine:
        kind = launcher or "local"
        if kind in membership.STARTED_BY_US and (cannot := membership.cannot_start(store, services, kind)):
            raise BadInput(f"rl360 fleet add --launcher {kind}: {cannot}")
        names = membership.start_more(log, services, kind, local or count, _me(), why)
        typer.echo(f"{', '.join(names)}: the keeper starts {'it' if len(names) == 1 else 'them'}")
        _tell_keeper(store)
        return
    state = log.refresh()
    known, url = known_engines(services, state), engine.rstrip("/")
    if engine.startswith(("http://", "https://")) and url not in known.values():
        probes, _ = asyncio.run(look(services, [url, *filter(None, known.values())]))
        if probes[0].identity is None:
            raise BadInput(f"{engine} does not answer as an engine ({probes[0].reason}); start it first")
        seen = {name: probe.identity for name, probe in _named(known, probes).items()}
        answering = {name: identity.incarnation for name, identity in seen.items() if identity is not None}
        name = membership.add_external(log, probes[0].identity, _me(), why, answering)
        typer.echo(f"{name} ({engine}) joins with the next push")
        return
    name, url = find_engine(services, state, engine)
    probes, _ = asyncio.run(look(services, [url])) if url else ([], {})
    membership.take_back(log, name, probes[0].identity if probes else None, _me(), why, wait, _say)
    typer.echo(f"{name} is the fleet's again; it serves when the next push has confirmed it")
    _tell_keeper(store)


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _tell_keeper(store: Store) -> None:
    from rl360.engines.keeper_lease import other_keepers

    if not other_keepers(store, ""):
        typer.echo("no keeper runs that would do it: start one with `rl360 fleet keep`")


def remove(engine: EngineArgument, reason: ReasonOption = "", wait: WaitOption = 120.0) -> None:
    """Take an engine out now: no traffic, its processes ended, what it had in flight cut off. Sessions go on elsewhere.

    Example: rl360 fleet remove engine-1 --reason "ECC errors"
    """
    from rl360.engines import membership

    services, store, log = _open()
    name, url = find_engine(services, log.refresh(), engine)
    try:
        gone = membership.remove(log, services, name, url, _me(), reason or "removed by a person", wait, _say)
    except membership.Already as error:
        typer.echo(str(error))
        return
    if gone:
        typer.echo(f"{name}: gone; it was never started")
        return
    told = asyncio.run(_out_of_gateway(services, url)) if url else "it never answered"
    typer.echo(f"{name}: removed; {told}; the keeper ends it and proves it (`rl360 fleet status`)")
    _tell_keeper(store)


def drain(engine: EngineArgument, reason: ReasonOption = "", wait: WaitOption = 120.0) -> None:
    """Take an engine out once what it has in flight is done: no new requests from now on, then its processes are ended.

    Example: rl360 fleet drain engine-1 --reason "node maintenance"
    """
    from rl360.engines import membership

    services, store, log = _open()
    name, url = find_engine(services, log.refresh(), engine)
    try:
        membership.drain(log, services, name, url, _me(), reason or "drained by a person", wait, _say)
    except membership.Already as error:
        typer.echo(str(error))
        return
    told = asyncio.run(_out_of_gateway(services, url)) if url else "it never answered"
    typer.echo(f"{name}: draining; {told}; the keeper ends it when nothing is in flight (`rl360 fleet status`)")
    _tell_keeper(store)


def confirm_gone(
    engine: Annotated[str, typer.Argument(help="An engine's name or URL, or keeper:TOKEN.")],
    reason: Annotated[str, typer.Option(help="How you know that its processes are gone; kept for good.")],
) -> None:
    """Give your word that an engine (or a keeper) is gone whose end nothing here can prove.

    Example: rl360 fleet confirm-gone engine-1 --reason "node n7 was powered off"
    """
    from rl360.engines import membership
    from rl360.weights import fence

    services, store, log = _open()
    if engine.startswith("keeper:"):
        membership.keeper_is_gone(store, engine, reason, _me())
        typer.echo(f"recorded: {engine} is gone ({reason})")
        return
    named = {e.url for intent in fence.open_intents(store) for e in intent.engines}
    # an unfinished push may name an engine that is the fleet's no more
    url = engine.rstrip("/")
    state = log.refresh()
    strange = url in named and url not in known_engines(services, state).values()
    name, url = (url, url) if strange else find_engine(services, state, engine)
    probes, _ = asyncio.run(look(services, [url])) if url else ([], {})
    now = probes[0].identity if probes else None
    for line in membership.is_gone(store, log, name, url, now, reason, _me()):
        typer.echo(f"recorded: {line}")


def keep(
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between rounds.")] = 5.0,
    suspect_after: Annotated[int, typer.Option(help="Rounds missed in a row that cost an engine its traffic.")] = 4,
    fence_after: Annotated[int, typer.Option(help="Rounds missed in a row that end it.")] = 12,
    generate_every: Annotated[float, typer.Option(help="Seconds between sampled tokens of an idle engine.")] = 60.0,
    drain_s: Annotated[float, typer.Option(help="Seconds a draining engine has for what is in flight.")] = 600.0,
    start_s: Annotated[
        float, typer.Option(help="Seconds a start has to answer, from when its launcher first calls it running.")
    ] = 600.0,
    flaps: Annotated[int, typer.Option(help="Losing its traffic so often within --flaps-within ends an engine.")] = 3,
    flaps_within: Annotated[float, typer.Option(help="Seconds.")] = 21_600.0,
    once: Annotated[bool, typer.Option("--once", help="One round, then end.")] = False,
) -> None:
    """Look after the engines between pushes until SIGTERM: suspect, fence, replace, drain. One keeper a fleet.

    Example: rl360 fleet keep --every 5 --start-s 2400
    """
    from rl360.engines.patience import KeepOptions

    options = KeepOptions(
        every_s=every,
        suspect_after=suspect_after,
        fence_after=fence_after,
        generate_every_s=generate_every,
        drain_s=drain_s,
        start_s=start_s,
        flaps=flaps,
        flaps_s=flaps_within,
    )
    asyncio.run(_keep(options, once))


async def _keep(options: Any, once: bool) -> None:
    import signal

    from rl360.engines.client import open_http
    from rl360.engines.keeper import Keeper

    services, store, _ = _open(timeout_s=5.0)  # tries together are well within a lease, and within SIGTERM's grace
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with open_http() as http:
        keeper = Keeper(store, services, options, http, lambda line: print(time.strftime("%H:%M:%S"), line, flush=True))

        def beat() -> None:
            """The supervisor's probe: a file as fresh as the last round, or look at a keeper that it waits for."""
            path = os.path.join(services.home, "fleet.json")
            with open(f"{path}.{os.getpid()}", "wb") as stream:
                told = {"incarnation": os.environ.get("RL360_INCARNATION", ""), "keeper": keeper.me}
                stream.write(orjson.dumps(told | {"pid": os.getpid(), "at": time.time()}))
            os.replace(f"{path}.{os.getpid()}", path)

        await keeper.run(stop, beat, once)
