"""`rl360`: one program. A command's module is imported when the command is used, so that help comes at once.

Errors a person can meet are one line on stderr: exit 2 for bad input, 1 for everything else that was found wrong.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass

from rl360.errors import BadInput, Rl360Error


@dataclass(frozen=True)
class Entry:
    """A command: the module whose `register(app)` makes it, and the line `rl360 --help` shows."""

    module: str
    help: str


COMMANDS = {
    "up": Entry("services", "Start the services and wait until they are ready."),
    "status": Entry("services", "Show the services; exit 1 when something is not ready."),
    "logs": Entry("services", "Print the end of a service's log."),
    "down": Entry("services", "Stop everything and prove that nothing is left."),
    "demo": Entry("demo", "Services, a run and its report in one go."),
    "run": Entry("run", "Start, resume, fork, watch, list, cancel and export runs."),
    "ledger": Entry("ledger", "What every token of a run became."),
    "replay": Entry("replay", "Compute a past step again and compare it with what is stored."),
    "report": Entry("report", "Figures and the page of a run."),
    "fleet": Entry("fleet", "Engines: their states, and confirming that one is gone."),
    "weights": Entry("weights", "Weight pushes: plan one for a model's shape."),
    "sessions": Entry("sessions", "Session servers: run one, look into those that run."),
    "sandboxes": Entry("sandboxes", "Sandboxes: list them, reap what nobody owns, simulate the policies."),
    "model": Entry("model", "The starting policy: warm start and parity."),
    "tasks": Entry("tasks", "Task sets: check tasks; a run's drawn and quarantined ones; release one."),
    "harbor": Entry("harbor", "Real Harbor's agents: make the environment they run in."),
    "bench": Entry("bench", "Figures with a goal, each beside its baseline."),
    "templates": Entry("templates", "Chat templates: the known families, and checks of a model's."),
}


ABOUT = "RL post-training of coding agents: every step a Prefect flow, every token accounted for."


def help_text() -> str:
    """What `rl360 --help` prints, without importing any command."""
    rows = "\n".join(f"  {name:<11}{entry.help}" for name, entry in COMMANDS.items())
    return (
        f"Usage: rl360 COMMAND [ARGS]...\n\n{ABOUT}\n\nCommands:\n{rows}\n\n"
        "`rl360 COMMAND --help` explains one. Options: --help, --version.\nExample: rl360 up && rl360 run list"
    )


def run_command(name: str, argv: list[str]) -> None:
    """Import the command's module and run it; leaves by SystemExit or by an error."""
    import typer

    # without rich: its tables give every flag a value, `--json <bool>`
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

    @app.callback()
    def root() -> None:
        """Keeps the command's name on the command line when the module registers only one."""

    importlib.import_module(f"rl360.commands.{COMMANDS[name].module}").register(app)
    try:
        code = app(args=[name, *argv], prog_name="rl360", standalone_mode=False)
    except typer.TyperException as error:
        said = error.format_message()
        if said.startswith("Usage:"):  # a group without a command: its help
            print(said, file=sys.stderr)
            sys.exit(error.exit_code)
        raise BadInput(_wrong_usage(said, error)) from None
    except typer.Abort:
        raise Rl360Error("the input ended too early") from None
    sys.exit(code or 0)


def _wrong_usage(said: str, error: Exception) -> str:
    """One line: which option, the value it was given, what it must be, where the help is."""
    what, _, why = said.removeprefix("Invalid value for ").partition(": ")
    checked, context = getattr(error.__cause__, "errors", None), getattr(error, "ctx", None)
    if checked is not None and why:
        why = why.replace("Input should be", "must be")
        said = f"{what.strip(chr(39))} {checked()[0]['input']!r}: {why}"
    return " ".join(said.split()).rstrip(".") + (f"; see `{context.command_path} --help`" if context else "")


def main(argv: list[str] | None = None) -> None:
    """Run one command line and exit with its code."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help"):
        print(help_text())
        sys.exit(0)
    if args[0] == "--version":
        from importlib.metadata import version

        print(f"rl360 {version('rl360')}")
        sys.exit(0)
    try:
        if args[0] not in COMMANDS:
            raise BadInput(f"no command {args[0]!r}; choose among {', '.join(COMMANDS)}")
        run_command(args[0], args[1:])
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except Rl360Error as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
