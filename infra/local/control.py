"""What the command line does with the supervisor: bring it up, follow its start, take it all down, prove it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infra.local import checks, cleanup, proc
from infra.local.plan import REPO_ROOT, UpOptions, addresses, base_env, build_specs, judge_key
from infra.local.state import GOOD, Status, SupervisorState, read_state, write_atomic
from infra.local.supervisor import OPTIONS_FILE
from rl360.config.services import Secrets, load_services
from rl360.errors import Rl360Error

POLL_S = 0.2
STOP_DEADLINE_S = 90.0
FOLDERS = ("logs", "models", "prefect", "s3", "sandboxes", "reports")

Say = Callable[[str], None]


@dataclass(frozen=True)
class DownReport:
    """What `down` did and found."""

    stopped: tuple[str, ...]
    swept: int
    leftovers: cleanup.Leftovers


def default_model(home: Path) -> str:
    """The model last used in `home`, else the newest in its models folder, else that folder, which a check refuses."""
    found = [path.parent for path in (home / "models").glob("*/config.json") if path.parent.name[0] != "."]
    with contextlib.suppress(Rl360Error):
        last = Path(load_services(home).model_dir)
        if (last / "config.json").is_file():
            return str(last)
    return str(max(found, key=lambda path: path.stat().st_mtime)) if found else str(home / "models")


def make_secrets(home: Path) -> Secrets:
    """The token and the store's keys, made once per home, readable by its owner only."""
    home.chmod(0o700)
    path = home / "secrets.json"
    if path.exists() and not path.stat().st_mode & 0o077:
        values = Secrets.model_validate_json(path.read_text())
    else:
        values = Secrets(
            token=secrets.token_urlsafe(32),
            s3_access_key=f"rl360{secrets.token_hex(8)}",
            s3_secret_key=secrets.token_urlsafe(32),
        )
        write_atomic(path, values.model_dump_json().encode(), mode=0o600)
    write_atomic(home / "token", values.token.encode(), mode=0o600)
    return values


def start(options: UpOptions, say: Say) -> SupervisorState:
    """Check, then start a detached supervisor. Already up is fine when it runs; what a dead one left is ended first."""
    home = Path(options.home)
    old = read_state(home)
    if old is not None and old.alive:
        if old.stopping:
            raise Rl360Error(f"the supervisor of {home} (pid {old.pid}) is stopping; try again when it is gone")
        return old
    if old is not None:
        swept = cleanup.sweep(home, old)
        if swept:
            say(f"the supervisor of the last `rl360 up` (pid {old.pid}) is gone; ended {swept} processes it left")
    try:
        for name in FOLDERS:
            (home / name).mkdir(parents=True, exist_ok=True)
        values = make_secrets(home)
    except OSError as error:
        raise Rl360Error(f"cannot write {home} ({error.strerror}); give another folder with RL360_HOME") from None
    instance = uuid.uuid4().hex
    specs = build_specs(options, values, instance)
    checks.check_all(specs, options)
    services = addresses(options)
    write_atomic(home / "services.json", services.model_dump_json(indent=1).encode())
    write_atomic(home / OPTIONS_FILE, options.model_dump_json(indent=1).encode())
    (home / "state.json").unlink(missing_ok=True)
    env = base_env(options, instance) | judge_key(options) | {proc.SERVICE_ENV: cleanup.SUPERVISOR}
    with (home / "logs" / "supervisor.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "infra.local.supervisor", str(home)],
            cwd=REPO_ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    give_up_s = time.monotonic() + 30.0
    while time.monotonic() < give_up_s:
        state = read_state(home)
        if state is not None and state.pid == process.pid:
            return state
        if process.poll() is not None:
            break
        time.sleep(POLL_S)
    raise Rl360Error(f"the supervisor did not start: see {home / 'logs' / 'supervisor.log'}")


def follow(home: Path, timeout_s: float, say: Say, tick: Say) -> SupervisorState:
    """Report each service's way to ready; raises when one fails for good or `timeout_s` is over."""
    told: dict[str, tuple[Status, int]] = {}
    give_up_s = time.monotonic() + timeout_s
    while True:
        state = read_state(home)
        if state is None or not state.alive:
            raise Rl360Error(f"the supervisor ended while starting: see {home / 'logs' / 'supervisor.log'}")
        for name, row in state.services.items():
            now = (row.status, row.restarts)
            if told.get(name) != now and row.status is not Status.WAITING:
                told[name] = now
                say(_progress(name, row.status, row.ready_after_s, row.detail))
        failed = [name for name, row in state.services.items() if row.status is Status.FAILED]
        if failed:
            name = failed[0]
            raise Rl360Error(
                f"{name} failed: {state.services[name].detail}; the others still run, `rl360 down` stops them"
            )
        if state.good:
            return state
        pending = [name for name, row in state.services.items() if row.status not in GOOD]
        if time.monotonic() > give_up_s:
            raise Rl360Error(
                f"not ready within {timeout_s:.0f} s: {', '.join(pending)}; they go on starting, see `rl360 status` "
                f"and {home / 'logs'}"
            )
        starting = [
            f"{name} {time.time() - row.started_at:.0f}s"
            for name, row in state.services.items()
            if row.status is Status.STARTING and row.started_at is not None
        ]
        tick("starting: " + ", ".join(starting) if starting else "waiting: " + ", ".join(pending))
        time.sleep(POLL_S)


def _progress(name: str, status: Status, ready_after_s: float | None, detail: str) -> str:
    if status in GOOD and ready_after_s is not None:
        return f"{name:<12} {status} {ready_after_s:.1f}s"
    return f"{name:<12} {status}{': ' + detail if detail else ''}"


def stop(home: Path) -> DownReport:
    """Stop the supervisor, which stops its services; end what is left by its marker; look again."""
    state = read_state(home)
    stopped: tuple[str, ...] = ()
    if state is not None and state.alive:
        stopped = tuple(name for name, row in state.services.items() if row.pid is not None)
        with contextlib.suppress(ProcessLookupError):
            os.kill(state.pid, signal.SIGTERM)
        give_up_s = time.monotonic() + STOP_DEADLINE_S
        while state.alive and time.monotonic() < give_up_s:
            time.sleep(POLL_S)
        if state.alive:
            proc.send({state.pid}, signal.SIGKILL)
        state = read_state(home) or state
    swept = cleanup.sweep(home, state)
    left = cleanup.check(home, state)
    if left.clean:
        (home / "state.json").unlink(missing_ok=True)
    return DownReport(stopped, swept, left)
