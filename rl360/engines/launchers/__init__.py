"""Launchers: who starts an engine's processes and can prove their end. Chosen by name, imported when used."""

from __future__ import annotations

import asyncio
import shutil
from typing import TYPE_CHECKING

from rl360.errors import BadInput, Rl360Error

if TYPE_CHECKING:
    from rl360.config.services import Services
    from rl360.engines.fleet_log import Slot
    from rl360.engines.launchers.base import Launcher
    from rl360.engines.processes import EndProof

KINDS = ("supervised", "local", "kubernetes", "slurm", "external")
PROGRAMS = {"slurm": ("sbatch", "squeue", "scancel")}  # without which a launcher can do nothing


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


def cannot_start_here(kind: str, services: Services) -> str:
    """Why this process's machine can't start or end engines by launcher `kind`; empty when it may be able to."""
    try:
        open_launcher(kind, services)
    except Rl360Error as error:
        return str(error)
    missing = [name for name in PROGRAMS.get(kind, ()) if shutil.which(name) is None]
    return f"launcher {kind}: no program {', '.join(missing)} on PATH" if missing else ""


def end(slot: Slot, services: Services, deadline_s: float) -> EndProof:
    """End a slot's present start by its launcher, and prove it. A launcher that fails has proven nothing.

    Blocks: an event loop calls it from a thread, where a launcher may wait for files and programs as it likes.
    """
    from rl360.engines.launchers.base import handle_of
    from rl360.engines.processes import EndProof

    try:
        return asyncio.run(open_launcher(slot.launcher, services).end(handle_of(slot), deadline_s))
    except Rl360Error as error:
        return EndProof(gone=False, evidence=f"launcher {slot.launcher}: {error}")
