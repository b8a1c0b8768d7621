"""One session server process: options checked before it listens, then served until stopped or drained.

`rl360 sessions serve` is its command line. SIGTERM drains: no new sessions, the others go on until they are stored or
deleted. After `drain_s` at the latest the process ends with 0, whatever is still under way (a store that hangs, a
client that does not read); a second SIGTERM, or SIGINT, ends it at once.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rl360.config.services import load_services, service_token
from rl360.errors import BadInput
from rl360.plugins import load_function
from rl360.sessions.families.registry import load_template
from rl360.sessions.history import MATCHERS, Matcher, custom_matcher
from rl360.sessions.registry import Limits, Registry
from rl360.sessions.routes import Service, create_app
from rl360.sessions.routing import RoutingShape
from rl360.sessions.upstream import Upstream
from rl360.store.object_store import ObjectStore

log = logging.getLogger("rl360.sessions")

_BACKLOG = 4096
_FILES = 65_536  # two connections a request in flight
_TICKS_PER_SWEEP = 300  # of 0.1 s
_UNSENT_BYTES = 1 << 20  # of a reply that must leave between two sweeps, or all of it
_GRACE_S = 5  # of the drain's time, for replies on their way


@dataclass(frozen=True)
class ServeOptions:
    """What a session server is started with. `matchers` are custom ones that sessions may name, `module:function`."""

    upstream: str
    model_dir: Path
    host: str = "127.0.0.1"
    port: int = 13200
    family: str | None = None
    token_file: Path | None = None
    store: bool = False
    matchers: tuple[str, ...] = ()
    return_routed_experts: bool = False
    deadline_s: float = 600.0
    drain_s: float = 600.0
    limits: Limits = field(default_factory=Limits)


def load_matcher(name: str) -> Matcher:
    """A matcher of `MATCHERS`, or `module:function`. Imports the module: never call it with a name that an agent sent.
    `BadInput` when there is no such function."""
    if name in MATCHERS:
        return MATCHERS[name]
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise BadInput(f"matcher {name!r} is none of {', '.join(MATCHERS)} and not of the form module:function")
    return custom_matcher(name, load_function(name, "matcher"))


def build_service(options: ServeOptions) -> Service:
    """Load the template, read the token, make the clients: everything that can be refused before listening."""
    template = load_template(options.model_dir, options.family)
    routing = RoutingShape.from_model_dir(options.model_dir) if options.return_routed_experts else None
    if options.return_routed_experts and routing is None:
        raise BadInput(f"{options.model_dir} is a dense model: it has no routed experts to return")
    matchers = {**MATCHERS, **{name: load_matcher(name) for name in options.matchers}}
    return Service(
        template=template,
        registry=Registry(template, options.limits, matchers, routing),
        upstream=Upstream(options.upstream, template.vocab_size, template.stop_ids, options.deadline_s, routing),
        token=service_token(options.token_file),
        store_in=ObjectStore.from_services(load_services()) if options.store else None,
        drain_s=max(0.0, options.drain_s - _GRACE_S),
    )


class DrainingServer(uvicorn.Server):
    """uvicorn that drains on SIGTERM, ends when its service is drained, and hangs up on who never finishes a request's
    head and on who does not read a reply: uvicorn itself would keep such connections for good."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._unfinished_heads: set[Any] = set()
        self._unsent: dict[Any, tuple[Any, int]] = {}

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGTERM and not self._service.registry.draining:
            self._service.start_drain()
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_PER_SWEEP == 0:
            self._hang_up()
        return await super().on_tick(counter) or self._service.drained

    def _hang_up(self) -> None:
        connections = [each for each in self.server_state.connections if isinstance(each, H11Protocol)]
        waiting = {
            connection
            for connection in connections
            # neither a request under way nor an idle connection, which has a timer of its own
            if connection.timeout_keep_alive_task is None
            and (connection.cycle is None or connection.cycle.response_complete)
        }
        for connection in waiting & self._unfinished_heads:
            connection.transport.close()
        self._unfinished_heads = waiting
        unsent = {each: (each.cycle, each.transport.get_write_buffer_size()) for each in connections}
        for connection, (cycle, size) in unsent.items():
            before, held = self._unsent.get(connection, (None, 0))
            if cycle is before and size > max(0, held - _UNSENT_BYTES) and held:
                self._service.disconnects += 1
                connection.transport.abort()  # to close it would be to wait until all is sent
        self._unsent = unsent


def serve(options: ServeOptions) -> None:
    """Serve until stopped or drained."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    service = build_service(options)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, files), hard))
    config = uvicorn.Config(
        create_app(service),
        host=options.host,
        port=options.port,
        loop="uvloop",
        http="h11",
        ws="none",
        access_log=False,
        log_level="warning",
        backlog=_BACKLOG,
        timeout_keep_alive=120,  # an agent thinks nothing of a minute between two turns
        timeout_graceful_shutdown=_GRACE_S,
    )
    listeners = listen(options.host, options.port)
    store = service.store_in
    log.info(
        "listening on http://%s:%d, family %s, model %s, upstream %s, store %s; the HTTP surface is at /docs",
        *(options.host, options.port, service.template.family, options.model_dir, options.upstream),
        f"{store.endpoint_url}/{store.bucket}" if store else "none",
    )
    DrainingServer(config, service).run(listeners)
    logging.shutdown()
    os._exit(0)  # Python would wait for its threads, one of them perhaps for a store that hangs


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on every address of `host` that this machine has."""
    listeners: list[socket.socket] = []
    absent: OSError | None = None
    try:
        for family, _type, _protocol, _name, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                listeners.append(socket.create_server(address, family=family, backlog=_BACKLOG))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                absent = error
        if absent is not None and not listeners:
            raise absent
    except (OSError, UnicodeError) as error:
        for listener in listeners:
            listener.close()
        if isinstance(error, socket.gaierror) or not isinstance(error, OSError):
            why = str(getattr(error, "strerror", None) or "not a host's name")
        else:  # what create_server raises repeats the address in its text
            why = os.strerror(error.errno or 0)
        raise BadInput(f"cannot listen on {host} port {port}: {why}; choose others with --host and --port") from None
    return listeners
