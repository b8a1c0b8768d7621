"""torch's TCPStore listens on every interface, whatever host it is given, and asks nobody who they are.

`keep_stores_on_their_host` makes this process's stores listen on their host's address alone: 127.0.0.1 on a laptop.
Call it before anything joins a process group, in each process that may serve a store (torchrun's agent, an engine).
"""

from __future__ import annotations

import importlib
import socket
from typing import Any

import torch.distributed as dist

# where torch makes stores; by name, since `torch.distributed.rendezvous` as an attribute is a function
_MAKERS = ("torch.distributed.rendezvous", "torch.distributed.elastic.rendezvous.static_tcp_rendezvous")
_PlainStore = dist.TCPStore


class HostStore(_PlainStore):  # type: ignore[valid-type, misc]
    """A TCPStore whose server is bound to `host_name`; a client is the plain one."""

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        *rest: Any,
        **named: Any,
    ) -> None:
        if is_master and "master_listen_fd" not in named:
            try:
                listener = socket.create_server((host_name, port))
            except OSError:
                # a second store of this process on the port: torch shares its server, or says that it is taken
                listener = None
            if listener is not None:
                port = listener.getsockname()[1]
                named["master_listen_fd"] = listener.detach()
        super().__init__(host_name, port, world_size, is_master, *rest, **named)


def keep_stores_on_their_host() -> None:
    """From here on, in this process. Safe to call again."""
    dist.TCPStore = HostStore  # type: ignore[misc]
    for name in _MAKERS:
        importlib.import_module(name).TCPStore = HostStore  # type: ignore[attr-defined]
