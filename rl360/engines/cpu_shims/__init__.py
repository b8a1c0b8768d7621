"""Stand-ins that let unmodified SGLang import and serve on a machine without a GPU.

Contract: `install()` is idempotent and is called before anything of sglang is imported, in the launcher and in every
process that it spawns. It adds, only where the real package is absent, `sgl_kernel` (CUDA kernels) and `torchvision`
(reached by an import chain that text models never call). A name of theirs that is really called raises `MissingKernel`
with its full name: a stand-in never computes a wrong number.
"""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

STAND_INS = ("sgl_kernel", "torchvision")


class MissingKernel(RuntimeError):
    """Something called a function that exists only in the GPU build."""


class _AbsentType(type):
    """Lets a module read `scalar_types.uint4b8` while it builds its tables at import time."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _absent(name, f"{cls.__module__}.{cls.__qualname__}")
        setattr(cls, name, value)
        return value


class _Absent(metaclass=_AbsentType):
    """What a stand-in's attributes are: importable, usable as a base class or as an annotation, never callable."""

    # torchvision's interpolation modes, read (not called) while the import chain builds its tables
    NEAREST, BILINEAR, BICUBIC = 0, 2, 3

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        _refuse(f"{type(self).__module__}.{type(self).__qualname__}")


def _refuse(name: str) -> NoReturn:
    raise MissingKernel(f"{name} needs a GPU build; the CPU stand-in only lets it be imported")


def _absent(name: str, owner: str) -> type:
    return _AbsentType(name, (_Absent,), {"__module__": owner, "__qualname__": name})


class StandInModule(ModuleType):
    """A module whose every public name exists and refuses to be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _absent(name, self.__name__)
        setattr(self, name, value)
        return value


class StandInFinder(MetaPathFinder, Loader):
    """Serves `package` and everything below it; placed last, so that a real package always wins."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = frozenset(packages)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self.packages:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: the names are made when they are asked for."""


def install() -> tuple[str, ...]:
    """Install the stand-ins that this machine needs; returns their names (empty when already installed or all real)."""
    if any(isinstance(finder, StandInFinder) for finder in sys.meta_path):
        return ()
    missing = tuple(name for name in STAND_INS if importlib.util.find_spec(name) is None)
    if "torchvision" in missing:
        # transformers asks once whether torchvision exists and remembers: it must hear "no" before there is a stand-in
        import transformers.utils.import_utils as facts

        facts.is_torchvision_available()
    sys.meta_path.append(StandInFinder(missing))
    return missing


def use_plain_host_memory() -> None:
    """Returning routed experts takes a host cache that SGLang pins with CUDA even on a CPU: give it ordinary memory."""
    import torch
    from sglang.srt.mem_cache.pool_host import common

    def allocate(dims: Any, dtype: Any, *_args: Any, **_kwargs: Any) -> Any:
        return torch.empty(dims, dtype=dtype, device="cpu")

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def start_children_by_fork() -> None:
    """SGLang spawns its scheduler and detokenizer because CUDA does not survive a fork.

    Each spends its first 9 CPU-seconds importing what the parent has imported already. Without CUDA a fork is safe (no
    compute threads run yet), takes a start from 26 to 9 CPU-seconds, and lets the processes share those pages.
    On a CPU each flush of the KV cache collects garbage: what was imported is left out of it, or every push would walk
    (and copy) all of it while the engine is paused.
    """
    original = multiprocessing.set_start_method

    def forking(method: str | None, force: bool = False) -> None:
        original("fork" if method == "spawn" else method, force=force)

    multiprocessing.set_start_method = forking  # type: ignore[assignment]
    os.register_at_fork(before=gc.freeze)
