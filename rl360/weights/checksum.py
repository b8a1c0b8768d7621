"""What an engine must answer to `/weights_checker`, computed from the trainer's own tensors.

SGLang on a CPU: for each of its parameters, 16 hex digits: the first 8 bytes of sha256 over its raw bytes.
Its parameters are fused from Hugging Face tensors along the first axis: qkv = q, k, v; gate_up = gate, up; experts
w13 = for each expert gate, up; w2 = for each expert down. Concatenating along the first axis concatenates bytes, so the
hash runs over the parts in that order and nothing is copied. With tied embeddings the engine has no `lm_head.weight`.
Unsharded engines (tp 1) on a CPU only: a CUDA engine hashes with a kernel of its own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

import torch

from rl360.errors import BadInput
from rl360.weights.messages import TensorSpec
from rl360.weights.plan import engine_name

_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float16: "float16"}
_PART = re.compile(r"\.(q|k|v|gate|up)_proj\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_ORDER = {"q": 0, "k": 1, "v": 2, "gate": 0, "up": 1}


def position(name: str) -> tuple[int, int]:
    """Where a part sits inside its engine parameter: expert, then projection."""
    expert, part = _EXPERT.search(name), _PART.search(name)
    return (int(expert[1]) if expert else 0, _ORDER[part[1]] if part else 0)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in row-major order, without a copy when it is contiguous on the CPU."""
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def expected_checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Engine parameter name -> 16 hex digits, for all of these Hugging Face tensors."""
    parts: dict[str, list[str]] = {}
    for name in tensors:
        parts.setdefault(engine_name(name), []).append(name)
    out = {}
    for fused, names in parts.items():
        digest = hashlib.sha256()
        for name in sorted(names, key=position):
            digest.update(raw_bytes(tensors[name]))
        out[fused] = digest.hexdigest()[:16]
    return out


def tensor_specs(tensors: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    """Names, shapes and dtypes as they would travel."""
    specs = []
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise BadInput(f"tensor {name} is {tensor.dtype}; cast it to the engines' dtype (bfloat16) before a push")
        specs.append(
            TensorSpec.model_validate({"name": name, "shape": tuple(tensor.shape), "dtype": _DTYPES[tensor.dtype]})
        )
    return specs
