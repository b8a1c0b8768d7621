"""The process of a sandbox server: `python -m rl360.harbor.server`, options checked before it listens (`app.py`)."""

from __future__ import annotations

import argparse
import logging
import resource
import socket
import threading
from pathlib import Path

import uvicorn

from rl360.agents.registry import agents_of
from rl360.config.services import home_dir, load_services, service_token
from rl360.errors import BadInput, Rl360Error
from rl360.harbor.app import make_app
from rl360.harbor.judge_options import judge_at
from rl360.harbor.replies import Replies
from rl360.harbor.retention import keep_pruned
from rl360.sandboxes.admission import BOUNDLESS, Gate, Reservations, Room
from rl360.sandboxes.host import promised, take_share, with_leftovers
from rl360.sandboxes.providers import KINDS, open_provider, room_of
from rl360.sandboxes.waves import Pace, Waves
from rl360.store.object_store import ObjectStore

STORE_TIMEOUT_S = 5.0


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rl360.harbor.server", description="rl360 sandbox server (/run)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=13300)
    parser.add_argument("--provider", choices=KINDS, default=KINDS[0], help="where sandboxes run (docs/providers.md)")
    add_options(parser)
    parser.add_argument("--queue-limit", type=int, default=4096, help="attempts that may wait")
    parser.add_argument("--home", type=Path, default=None, help="local state (default: $RL360_HOME, else .rl360)")
    parser.add_argument("--store", action="store_true", help="keep replies in the deployment's object store")
    parser.add_argument("--tasks", type=Path, metavar="DIR", help="of tasks that a request names by its id alone")
    parser.add_argument("--agent", action="append", default=[], metavar="NAME=MODULE:FUNCTION", help="add an agent")
    parser.add_argument("--harness", action="append", default=[], metavar="NAME=FILE", help="add a program as an agent")
    parser.add_argument("--harbor", type=Path, metavar="DIR", help="add Harbor's agents, of `rl360 harbor setup`")
    parser.add_argument("--judge-url", default="", help="of an LLM judge, e.g. https://HOST/v1 (docs/judges.md)")
    parser.add_argument("--judge-key-env", default="", metavar="NAME", help="environment variable with its API key")
    parser.add_argument("--judge-concurrency", type=int, default=16, help="judge calls under way at once")
    args = parser.parse_args(argv)
    if args.judge_key_env and not args.judge_url:
        parser.error("--judge-key-env says nothing without --judge-url")
    least = dict.fromkeys(("max_concurrent", "per_image", "wave_size", "queue_limit", "judge_concurrency"), 1.0)
    for name, low in (least | {"wave_interval_s": 0.0, "ready_goal_s": 0.01}).items():
        if getattr(args, name) is not None and not getattr(args, name) >= low:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {low:g}")
    return args


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-concurrent", type=int, default=32, help="attempts that run at once")
    parser.add_argument("--per-image", type=int, help="of them of one image, or task without (default: all)")
    parser.add_argument("--wave-size", type=int, default=32, help="sandboxes that begin to start in a wave")
    parser.add_argument("--wave-interval-s", type=float, default=0.25, help="seconds from wave to wave")
    parser.add_argument("--ready-goal-s", type=float, default=1.0, help="starts that take longer slow down the next")
    form = "SHARE%|cpus=N,memory_mb=N,pids=N,disk_mb=N"
    told = "what may be reserved, of this host (default: all of it) or elsewhere (docs/providers.md)"
    parser.add_argument("--promise", type=_promise, default="", metavar=form, help=told)


def gate_of(args: argparse.Namespace, room: Room) -> Gate:
    """As the options say; `room`: what may be reserved."""
    everything = args.max_concurrent
    pace = Pace(args.wave_size, args.wave_interval_s, everything, args.per_image or everything, args.ready_goal_s)
    return Gate(Waves(pace), Reservations(room))


def _promise(text: str) -> str:
    try:
        promised(text, BOUNDLESS)
    except BadInput as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def promise_of(args: argparse.Namespace, home: Path) -> Room:
    """What this server promises: of its host, beside the others of the home, or of what is elsewhere."""
    name, host = str(args.port), room_of(args.provider, home)
    if host is None:
        return promised(args.promise, None)
    return take_share(home, name, with_leftovers(host, home / "sandboxes" / name), args.promise)


def replies_of(args: argparse.Namespace) -> Replies:
    """In the store of the local deployment, under a name that no two processes have at once: a port of a host."""
    services = load_services(args.home)
    secrets = services.secrets()
    keys = (secrets.s3_access_key, secrets.s3_secret_key)
    store = ObjectStore(services.s3_endpoint, services.s3_bucket, *keys, timeout_s=STORE_TIMEOUT_S)
    return Replies(store, f"{socket.gethostname()}:{args.host}:{args.port}")


def raise_open_files() -> None:
    """A sandbox takes six descriptors here; the soft limit is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    raise_open_files()
    try:
        token = service_token()
        judge = judge_at(args.judge_url, args.judge_key_env, args.judge_concurrency) if args.judge_url else None
        # one root per port: several servers may share a home, and each reaps only its own
        home = args.home or home_dir()
        root = home / "sandboxes" / str(args.port)
        provider = open_provider(args.provider, root, token)
        replies = replies_of(args) if args.store else None
        agents = agents_of(args.agent, args.harness, args.harbor)
        gate = gate_of(args, promise_of(args, home))
        app = make_app(provider, agents, gate, args.queue_limit, token, judge, replies, args.tasks)
    except Rl360Error as error:
        raise SystemExit(f"sandbox server: {error}") from None
    if replies is not None:
        threading.Thread(target=keep_pruned, args=(replies.store,), name="retention", daemon=True).start()
    uvicorn.run(
        app,
        host=args.host,
        port=args.port,
        log_level="warning",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=2,
        backlog=4096,
    )


if __name__ == "__main__":
    main()
