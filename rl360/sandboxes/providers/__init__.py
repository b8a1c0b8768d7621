"""Sandbox providers: chosen by name in one place, imported when used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rl360.errors import BadInput
from rl360.sandboxes.admission import Room
from rl360.sandboxes.host import host_room

if TYPE_CHECKING:
    from rl360.sandboxes.provider import SandboxProvider
    from rl360.sandboxes.providers.remote import Daemon

KINDS = ("bubblewrap", "docker", "daytona", "kubernetes")


def open_provider(kind: str, root: Path, token: str, env: Mapping[str, str] = os.environ) -> SandboxProvider:
    """The provider of a sandbox server. `root`: its folder on this host; `token`: the deployment's, a digest of which
    labels whatever it makes; `env`: where the outside system is (docs/providers.md)."""
    if kind == "bubblewrap":
        from rl360.sandboxes.bubblewrap import BubblewrapProvider

        return BubblewrapProvider(root)
    from rl360.sandboxes.providers.remote import RemoteProvider, deployment_of

    return RemoteProvider(open_daemon(kind, env), root, deployment_of(token))


def room_of(kind: str, folder: Path, env: Mapping[str, str] = os.environ) -> Room | None:
    """What this host has for sandboxes; None where they run elsewhere."""
    here = kind == "bubblewrap" or (kind == "docker" and env.get("DOCKER_HOST", "unix:").startswith("unix:"))
    return host_room(folder) if here else None


def open_daemon(kind: str, env: Mapping[str, str] = os.environ) -> Daemon:
    """The outside system that carries sandboxes. Nothing is asked of it yet."""
    if kind == "docker":
        from rl360.sandboxes.providers.docker import Docker

        return Docker.of(env)
    if kind == "daytona":
        from rl360.sandboxes.providers.daytona import Daytona

        return Daytona.of(env)
    if kind == "kubernetes":
        from rl360.sandboxes.providers.kubernetes import Pods

        return Pods.of(env)
    raise BadInput(f"sandbox provider {kind!r}: use one of {', '.join(KINDS)}")
