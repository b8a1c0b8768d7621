"""Lets megatron.core run where there is no CUDA device.

`install()` must run before the first megatron import. With CUDA present it does nothing. Without it, modules of
`megatron.core` are compiled from a syntax tree in which `torch.cuda` is a private CPU stand-in, so that the global
`torch.cuda` stays as it is for everything else in the process. Megatron's version is pinned: the rewrite is checked by
the parity tests, not by guessing.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from rl360.errors import BadInput

_NAMESPACE = "_rl360_cuda"
_DIGEST = sha256(Path(__file__).read_bytes()).hexdigest()[:12]
_FLOAT_TENSOR_NAMES = {f"torch.cuda.{kind}Tensor": f"torch.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")}


class _IdleStream:
    """A stream or event on a device whose work is always finished."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        return None

    def __getattr__(self, _name: str) -> Any:
        return lambda *_args, **_kwargs: self


class _CpuCuda(types.ModuleType):
    """What a megatron module sees as `torch.cuda`: the CPU where a device is meant, the real thing otherwise."""

    def __init__(self) -> None:
        super().__init__(_NAMESPACE)
        stream = _IdleStream()
        nothing = lambda *_args, **_kwargs: None  # noqa: E731
        zero = lambda *_args, **_kwargs: 0  # noqa: E731
        get_rng = lambda *_args, **_kwargs: torch.get_rng_state()  # noqa: E731
        self.is_available = lambda: False
        self.device_count = zero
        self.current_device = lambda: torch.device("cpu")
        self.set_device = self.synchronize = self.empty_cache = nothing
        self.Stream = self.Event = _IdleStream
        self.current_stream = self.default_stream = lambda *_args, **_kwargs: stream
        self.stream = lambda _stream: contextlib.nullcontext()
        self.get_rng_state = get_rng
        self.set_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)
        self.manual_seed = torch.manual_seed
        self.random = types.SimpleNamespace(get_rng_state=get_rng)
        self.max_memory_allocated = self.memory_allocated = zero

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _ToCpu(ast.NodeTransformer):
    """Rewrites the four ways in which megatron names the device."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name(_NAMESPACE, node.ctx), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":  # x.cuda(...) -> x.cpu()
            return ast.copy_location(ast.Call(ast.Attribute(node.func.value, "cpu", ast.Load()), [], []), node)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        self.generic_visit(node)
        if node.arg == "device" and isinstance(node.value, ast.Constant) and node.value.value == "cuda":
            node.value = ast.copy_location(ast.Constant("cpu"), node.value)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and node.value in _FLOAT_TENSOR_NAMES:
            return ast.copy_location(ast.Constant(_FLOAT_TENSOR_NAMES[node.value]), node)
        return node


def rewrite(source: str, path: str) -> types.CodeType:
    """Compile `source` with its uses of the CUDA device turned to the CPU."""
    tree = ast.fix_missing_locations(_ToCpu().visit(ast.parse(source, path)))
    return compile(tree, path, "exec", dont_inherit=True)


class _Loader(importlib.machinery.SourceFileLoader):
    """Byte code of a rewritten module is kept beside Python's own, under a name that holds the digest of this file."""

    def __init__(self, fullname: str, path: str, namespace: types.ModuleType) -> None:
        super().__init__(fullname, path)
        self._namespace = namespace
        self._rewritten = b"cuda" in self.get_data(path)  # the others share Python's byte code, as they are the same

    def source_to_code(self, data: Any, path: Any) -> types.CodeType:  # type: ignore[override]
        if not self._rewritten:
            return super().source_to_code(data, path)
        return rewrite(importlib.util.decode_source(data), path)

    def get_data(self, path: str) -> bytes:
        return super().get_data(self._kept_at(path))

    def set_data(self, path: str, data: Any, **mode: Any) -> None:
        super().set_data(self._kept_at(path), data, **mode)

    def _kept_at(self, path: str) -> str:
        kept = path != self.path and self._rewritten  # the one other path that importlib asks for
        return path.removesuffix(".pyc") + f".rl360-{_DIGEST}.pyc" if kept else path

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__[_NAMESPACE] = self._namespace
        super().exec_module(module)
        if module.__name__ == "megatron.core.jit":
            module.disable_jit_fuser()  # its small fusions go through torch.compile: minutes on a CPU


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self._namespace = _CpuCuda()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "megatron.core" and not fullname.startswith("megatron.core."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, str(spec.loader.path), self._namespace)
        return spec


def _patch_loaded_modules() -> None:
    """Three places name the device in ways a syntax rewrite cannot reach."""
    import megatron.core.tensor_parallel.random as parallel_random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    parallel_random._get_cuda_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    parallel_random._set_cuda_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)
    if not hasattr(moe_utils, "te_general_gemm"):  # without it every MoE forward raises NameError
        moe_utils.te_general_gemm = None

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """The original converts only tensors that live on a GPU; the all-to-all then gets tensors for its splits."""
        return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = to_cpu


# what megatron says at every import without a GPU: true, known, and of no use to the person at the terminal
_EXPECTED_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
)


def install() -> bool:
    """Make megatron.core importable on a CPU. True when the CPU rewrite is in force, False when CUDA is there."""
    if torch.cuda.is_available():
        return False
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return True
    if "megatron.core" in sys.modules:
        raise BadInput("megatron.core was imported before rl360.training.megatron.cpu_hook.install(): call it first")
    for said in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=said)
    sys.meta_path.insert(0, _Finder())
    _patch_loaded_modules()
    return True
