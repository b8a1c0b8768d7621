"""Launchers: who starts an engine's processes and can prove their end. Chosen by name, imported when used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl360.errors import BadInput

if TYPE_CHECKING:
    from rl360.config.services import Services
    from rl360.engines.launchers.base import Launcher

KINDS = ("supervised", "local", "kubernetes", "slurm", "external")


def open_launcher(kind: str, services: Services) -> Launcher:
    """The launcher that the fleet's log calls `kind`."""
    if kind == "supervised":
        from rl360.engines.launchers.local import SupervisedLauncher

        return SupervisedLauncher()
    if kind == "local":
        from rl360.engines.launchers.local import LocalLauncher

        return LocalLauncher(services)
    if kind == "kubernetes":
        from rl360.engines.launchers.kubernetes import KubernetesLauncher

        return KubernetesLauncher.in_cluster(services)
    if kind == "slurm":
        from rl360.engines.launchers.slurm import SlurmLauncher

        return SlurmLauncher(services)
    if kind == "external":
        from rl360.engines.launchers.external import ExternalLauncher

        return ExternalLauncher(services)
    raise BadInput(f"launcher {kind!r}: use one of {', '.join(KINDS)}")
