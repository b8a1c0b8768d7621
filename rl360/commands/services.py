"""`rl360 up`, `status`, `logs`, `down`: the services of this machine, kept running by a supervisor of their own."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rl360.errors import BadInput, Rl360Error

if TYPE_CHECKING:
    from infra.local.plan import UpOptions
    from infra.local.state import SupervisorState

HomeOption = Annotated[
    Path | None, typer.Option("--home", help="Folder of all local state (default: $RL360_HOME or .rl360).")
]


def register(app: typer.Typer) -> None:
    """Add this module's commands to the program."""
    app.command("up")(up)
    app.command("status")(status)
    app.command("logs")(logs)
    app.command("down")(down)


def _home(home: Path | None) -> Path:
    from rl360.config.services import home_dir

    return home_dir() if home is None else home.absolute()


def _port_choices(items: list[str]) -> dict[str, int]:
    """`name=port` items, several to a flag when joined by commas."""
    chosen: dict[str, int] = {}
    for item in (part for text in items for part in text.split(",") if part):
        name, equals, port = item.partition("=")
        if not equals or not port.isdigit():
            raise BadInput(f"--ports {item}: write NAME=PORT, for example --ports prefect=4200")
        chosen[name] = int(port)
    return chosen


def _absolute(pair: str) -> str:
    """NAME=FILE as this directory means it: services run in another one."""
    name, equals, path = pair.partition("=")
    return f"{name}={Path(path).expanduser().absolute()}" if equals else pair


def up(
    model: Annotated[
        Path | None,
        typer.Option(
            help="Hugging Face directory of the policy (default: the last used, else the newest in HOME/models)."
        ),
    ] = None,
    engines: Annotated[int, typer.Option(min=1, max=64, help="SGLang engines.")] = 2,
    sessions: Annotated[int, typer.Option(min=1, max=64, help="Session servers.")] = 1,
    matcher: Annotated[
        list[str] | None, typer.Option(help="MODULE:FUNCTION that a run may name as rollout.matcher; repeatable.")
    ] = None,
    routed_experts: Annotated[
        bool, typer.Option("--routed-experts", help="Engines return, sessions keep, the experts a token was routed to.")
    ] = False,
    judge_url: Annotated[str, typer.Option(help="LLM judge of tasks that want one, e.g. https://HOST/v1.")] = "",
    judge_key_env: Annotated[str, typer.Option(metavar="NAME", help="Environment variable with its API key.")] = "",
    agent: Annotated[
        list[str] | None, typer.Option(metavar="NAME=MODULE:FUNCTION", help="An agent for rollout.agent; repeatable.")
    ] = None,
    harness: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE.toml", help="A program as an agent; repeatable.")
    ] = None,
    harbor: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Real Harbor's agents, of `rl360 harbor setup`.")
    ] = None,
    promise: Annotated[str, typer.Option(metavar="SHARE%", help="Of this host, for sandboxes (default: all).")] = "",
    trainer_ranks: Annotated[int, typer.Option(min=1, max=64, help="Trainer processes.")] = 1,
    home: HomeOption = None,
    port_base: Annotated[int | None, typer.Option(help="Put all ports in a block from here.")] = None,
    ports: Annotated[list[str] | None, typer.Option(help="Single ports: NAME=PORT[,NAME=PORT].")] = None,
    only: Annotated[str, typer.Option(help="Start only these services, e.g. engine-0,gateway.")] = "",
    timeout: Annotated[float, typer.Option(help="Seconds to wait until everything is ready.")] = 420.0,
    seed: Annotated[int, typer.Option(help="Seed of the engines' samplers.")] = 0,
    start_s: Annotated[float, typer.Option(min=1, help="Seconds an engine has to load its model.")] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print services.json when ready.")] = False,
) -> None:
    """Start the services and wait until they are ready. Starting twice is fine.

    Example: rl360 up --engines 1
    """
    from infra.local import control
    from infra.local.plan import UpOptions, port_table
    from rl360.agents.registry import agents_of
    from rl360.harbor.judge_options import judge_address
    from rl360.harbor.real.place import require_ready

    if judge_url:
        judge_address(judge_url)  # before it stands in a file or in the arguments of a service
    elif judge_key_env:
        raise BadInput("--judge-key-env says nothing without --judge-url")
    agents_of(agent or (), harness or ())  # refused here, not by a service that does not start
    if harbor is not None:
        require_ready(harbor)
    folder = _home(home)
    options = UpOptions(
        home=str(folder),
        model_dir=str(model.absolute()) if model is not None else control.default_model(folder),
        engines=engines,
        sessions=sessions,
        matchers=tuple(matcher or ()),
        routed_experts=routed_experts,
        judge_url=judge_url,
        judge_key_env=judge_key_env,
        agents=tuple(agent or ()),
        harnesses=tuple(_absolute(pair) for pair in harness or ()),
        harbor=str(harbor.absolute()) if harbor is not None else "",
        promise=promise,
        trainer_ranks=trainer_ranks,
        ports=port_table(port_base, _port_choices(ports or [])),
        only=tuple(part for part in only.split(",") if part),
        seed=seed,
        start_s=start_s,
    )
    state = bring_up(options, timeout)
    if as_json:
        typer.echo((folder / "services.json").read_text())
    elif "prefect" in state.services:
        _Screen().say(f"Prefect UI: {state.ui_url}")


def ensure_up(model: Path, timeout: float = 420.0) -> None:
    """The services of the default home, all up: those that run already whatever their options, else the defaults."""
    from infra.local.plan import UpOptions

    bring_up(UpOptions(home=str(_home(None)), model_dir=str(model.absolute())), timeout)


def bring_up(options: UpOptions, timeout: float) -> SupervisorState:
    """Start what is not up and wait, with a line on stderr for each change."""
    from infra.local import control

    folder = Path(options.home)
    started_s = time.monotonic()
    screen = _Screen()
    before = control.read_state(folder)
    already = before is not None and before.alive
    control.start(options, screen.say)
    if already:
        screen.say(f"already up ({folder}); to change options run `rl360 down` first")
    try:
        state = control.follow(folder, timeout, screen.say if not already else screen.ignore, screen.tick)
    except KeyboardInterrupt:
        raise Rl360Error("stopped watching; the services go on starting, see `rl360 status`") from None
    finally:
        screen.clear()
    if not already:
        screen.say(f"{len(state.services)} services ready in {time.monotonic() - started_s:.0f}s")
    return state


class _Screen:
    """Progress on stderr: one line per change, and on a terminal a last line that is rewritten in place."""

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()
        self.shown = ""

    def say(self, line: str) -> None:
        self.clear()
        typer.echo(line, err=True)

    def ignore(self, line: str) -> None:
        """For a second `up`, which has nothing new to tell."""

    def tick(self, line: str) -> None:
        if self.live and line != self.shown:
            self.clear()
            sys.stderr.write(f"\r{line[:110]}")
            sys.stderr.flush()
            self.shown = line

    def clear(self) -> None:
        if self.shown:
            sys.stderr.write("\r\033[K")
            self.shown = ""


def status(
    home: HomeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the services. Exit 1 when something is not ready.

    Example: rl360 status --json
    """
    from infra.local import proc
    from infra.local.state import read_state

    folder = _home(home)
    state = read_state(folder)
    if state is None:
        if as_json:
            typer.echo(json.dumps({"up": False, "supervisor": "none", "services": {}}))
        else:
            typer.echo(f"nothing is up in {folder}; start with `rl360 up`")
        raise typer.Exit(1)
    rows = {}
    for name, row in state.services.items():
        alive = row.pid is not None and proc.is_alive(row.pid, row.start_ticks or 0)
        fresh = row.model_copy(update={"rss_bytes": proc.rss_bytes(row.pid) if alive and row.pid else 0})
        shown = fresh.model_dump(mode="json", exclude={"start_ticks"}) | {"alive": alive}
        if not state.alive:  # what the file says is history
            shown["status"] = "unwatched" if alive else "gone"
        rows[name] = shown
    supervisor = "alive" if state.alive else "dead"
    if as_json:
        head = {"up": state.good, "supervisor": supervisor, "supervisor_pid": state.pid, "home": str(folder)}
        typer.echo(json.dumps(head | {"services": rows}, indent=1))
    else:
        _table(rows)
        if supervisor == "dead":
            orphans = sum(1 for row in rows.values() if row["alive"])
            typer.echo(
                f"the supervisor (pid {state.pid}) is gone, nothing is watched; {orphans} of its services still run: "
                "`rl360 up` starts afresh, `rl360 down` ends them"
            )
        elif "prefect" in rows:
            typer.echo(f"Prefect UI: {state.ui_url}")
    raise typer.Exit(0 if state.good else 1)


def _table(rows: dict[str, dict[str, object]]) -> None:
    typer.echo(f"{'SERVICE':<13}{'STATUS':<14}{'PID':>8}{'PORT':>7}{'MIB':>7}{'STARTS':>7}{'UP':>9}  NOTE")
    for name, row in rows.items():
        up_s = time.time() - float(str(row["started_at"])) if row["alive"] and row["started_at"] else 0.0
        note = row["detail"] or (f"ready after {row['ready_after_s']}s" if row["ready_after_s"] is not None else "")
        typer.echo(
            f"{name:<13}{row['status']!s:<14}{row['pid'] or '-':>8}{row['port'] or '-':>7}"
            f"{int(str(row['rss_bytes'])) >> 20:>7}{int(str(row['restarts'])) + 1:>7}{up_s:>8.0f}s  {note}"
        )


def logs(
    service: Annotated[str, typer.Argument(help="Service as `rl360 status` names it, or supervisor.")],
    home: HomeOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on printing what is added.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Last lines to print first.")] = 50,
) -> None:
    """Print the end of a service's log.

    Example: rl360 logs engine-0 -n 100 -f
    """
    folder = _home(home) / "logs"
    path = folder / f"{service}.log"
    if not path.is_file():
        known = ", ".join(sorted(item.stem for item in folder.glob("*.log"))) or "none yet"
        raise BadInput(f"no log of {service} in {folder}; there are: {known}")
    with path.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - 400 * lines - 4096))
        tail = stream.read().decode(errors="replace").splitlines()
        typer.echo("\n".join(tail[-lines:] if lines else []))
        while follow:
            chunk = stream.read()
            if chunk:
                typer.echo(chunk.decode(errors="replace"), nl=False)
            else:
                time.sleep(0.3)


def down(
    home: HomeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Stop everything and prove that nothing is left. Data, logs and models stay.

    Example: rl360 down
    """
    from dataclasses import asdict

    from infra.local import control

    folder = _home(home)
    report = control.stop(folder)
    if as_json:
        typer.echo(json.dumps(asdict(report)))
    else:
        if report.stopped:
            typer.echo(f"stopped {', '.join(report.stopped)}")
        if report.swept:
            typer.echo(f"ended {report.swept} processes that were left over")
        typer.echo(f"checked: {report.leftovers}")
    raise typer.Exit(0 if report.leftovers.clean else 1)
