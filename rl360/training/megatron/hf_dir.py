"""Hugging Face model directories: read all tensors as fp32, write an ordinary directory that loads anywhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rl360.errors import BadInput

_WEIGHTS = "model.safetensors"


def read_tensors(hf_dir: Path) -> dict[str, torch.Tensor]:
    """Every tensor of `hf_dir` by name, as fp32."""
    index = hf_dir / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = [_WEIGHTS]
    tensors: dict[str, torch.Tensor] = {}
    for name in files:
        path = hf_dir / name
        if path.parent != hf_dir or not path.is_file():
            raise BadInput(f"no weights at {path}: save the model with safetensors")
        tensors.update(load_file(path))
    return {name: tensor.float() for name, tensor in tensors.items()}


def write_dir(
    tensors: Mapping[str, torch.Tensor], like: Path, out_dir: Path, dtype: torch.dtype = torch.float32
) -> None:
    """Write `tensors` with the config, tokenizer and template files of `like`."""
    out_dir.mkdir(parents=True, exist_ok=True)
    for path in sorted(like.iterdir()):
        if (
            path.is_file()
            and not path.name.startswith("model.safetensors")
            and path.resolve().parent != out_dir.resolve()
        ):
            shutil.copyfile(path, out_dir / path.name)
    config = json.loads((like / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)
    (out_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    ready = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    (out_dir / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(ready, out_dir / _WEIGHTS, metadata={"format": "pt"})
