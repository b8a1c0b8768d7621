"""The trainer service: `torchrun ... -m rl360.training.service --host H --port P`.

Rank 0 serves HTTP (`app.py`) from a thread; the main thread of every rank runs commands, one at a time, in the same
order. Ranks wait for commands blocked in a socket, not spinning. A process that ended is started again by whoever
started it, and rebuilds its state from the store.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import logging
import os
import signal
import sys
import threading
import time
import uuid
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI

from rl360.config.services import load_services, service_token
from rl360.errors import Rl360Error
from rl360.store.object_store import ObjectStore
from rl360.training.app import Commands, create_app
from rl360.training.director import Director
from rl360.training.megatron import parallel
from rl360.training.megatron.model import Layout
from rl360.training.replica import Command, Replica
from rl360.weights.transports import open_lanes

log = logging.getLogger("rl360.training")

_WAIT_FOR_COMMANDS = datetime.timedelta(days=365)  # an idle trainer is not a stuck one
_LISTEN_DEADLINE_S = 15.0


def _follow(replica: Replica, group: Any) -> None:
    """Ranks above 0: execute what rank 0 sends until the process ends."""
    while True:
        held: list[Any] = [None]
        torch.distributed.broadcast_object_list(held, src=0, group=group)
        try:
            replica.execute(held[0])
        except Rl360Error as error:  # rank 0 raised the same and answers the request
            log.warning("rank %d: %s", torch.distributed.get_rank(), error)


def _listen(app: FastAPI, host: str, port: int) -> threading.Thread:
    server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level="warning", access_log=False))
    thread = threading.Thread(target=server.run, name="http", daemon=True)
    thread.start()
    until = time.monotonic() + _LISTEN_DEADLINE_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > until:
            raise Rl360Error(f"cannot listen on {host}:{port}; is the port taken?")
        time.sleep(0.05)
    return thread


def _die_with_parent() -> None:
    """torchrun killed by SIGKILL would leave its ranks running, holding the port and a state of their own."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() == 1:
            raise SystemExit("rl360 trainer: torchrun is already gone")


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torchrun ... -m rl360.training.service",
        description="Train runs step by step, each step once.",
        epilog="example: torchrun --nproc-per-node 1 -m rl360.training.service --port 13400",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--address", default="127.0.0.1", help="where engines reach this host's ranks during a push")
    parser.add_argument("--p2p-wire", default="gloo", choices=("gloo", "rdma"), help="what carries pushes by p2p")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel size")
    parser.add_argument("--ep", type=int, default=1, help="expert parallel size")
    parser.add_argument("--sequence-parallel", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Serve until stopped; 2 on a bad option, token or services file."""
    options = parse_options(argv)
    _die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        services, token = load_services(), service_token()
        layout = Layout(options.tp, options.pp, options.ep, sequence_parallel=options.sequence_parallel)
        torch.use_deterministic_algorithms(True)  # replay must give the same bits
        torch.utils.deterministic.fill_uninitialized_memory = False
        parallel.enter(layout)
        incarnation = os.environ.get("RL360_INCARNATION") or uuid.uuid4().hex
        lanes = open_lanes(options.address, options.p2p_wire)
        replica = Replica(ObjectStore.from_services(services), layout, incarnation, lanes)
        if torch.distributed.get_world_size() > 1:
            waiting = torch.distributed.new_group(backend="gloo", timeout=_WAIT_FOR_COMMANDS)
            if torch.distributed.get_rank() != 0:
                _follow(replica, waiting)

        def everyone(command: Command) -> Any:
            if torch.distributed.get_world_size() > 1:
                torch.distributed.broadcast_object_list([command], src=0, group=waiting)
            return replica.execute(command)

        commands = Commands()
        director = Director(replica, services, everyone, options.address)
        health = {
            "status": "ok",
            "service": "trainer",
            "incarnation": replica.incarnation,
            "pid": os.getpid(),
            "layout": replica.layout_name(),
        }
        _listen(create_app(director, commands, token, health), options.host, options.port)
    except (Rl360Error, OSError) as error:
        print(f"rl360 trainer: {error}", file=sys.stderr)
        return 2
    log.info("trainer %s ready on %s:%d (%s)", replica.incarnation, options.host, options.port, replica.layout_name())
    while True:
        commands.run_one()


if __name__ == "__main__":
    sys.exit(main())
