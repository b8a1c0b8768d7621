"""Checkpoints: weights, Adam's moments, random state and position, as Hugging Face-named tensors in the store.

Objects are named by their digest and written before the manifest, which is the commit. Because the names and shapes are
those of the whole model, a checkpoint written under one split over processes restores under any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save

from rl360.errors import CorruptObject
from rl360.store.codec import sha256_hex
from rl360.store.layout import check_run, checkpoint_prefix
from rl360.store.manifest import ObjectRef, get_object, put_object
from rl360.store.object_store import ObjectStore

TensorSets = dict[str, dict[str, torch.Tensor]]  # "weights", "exp_avg", "exp_avg_sq", "rng" -> name -> tensor


class CheckpointManifest(BaseModel):
    """A whole checkpoint: where its tensors are and where in the run it stands."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    run: str
    step: int
    next_step: int
    version: int
    weights_digest: str
    layout: str
    objects: dict[str, ObjectRef]


def _manifest_key(run: str, step: int) -> str:
    return checkpoint_prefix(run, step) + "manifest.json"


def read_manifest(store: ObjectStore, run: str, step: int) -> CheckpointManifest | None:
    key = _manifest_key(run, step)
    try:
        return CheckpointManifest.model_validate_json(store.get(key))
    except KeyError:
        return None
    except ValidationError as error:
        raise CorruptObject(key, f"is no checkpoint manifest: {error.errors()[0]['msg']}") from None


def latest(store: ObjectStore, run: str) -> CheckpointManifest | None:
    """The newest committed checkpoint; one whose writing was cut off has no manifest and does not count."""
    names = store.list_folders(f"{check_run(run)}/checkpoints/")
    for name in sorted((n for n in names if n.isdigit()), reverse=True):
        found = read_manifest(store, run, int(name))
        if found is not None:
            return found
    return None


def write(store: ObjectStore, manifest: CheckpointManifest, sets: TensorSets) -> CheckpointManifest:
    """Write the tensors, then the manifest. A checkpoint of this step that is already there wins."""
    objects: dict[str, ObjectRef] = {}
    for name, tensors in sets.items():
        data = save(tensors)
        key = f"{checkpoint_prefix(manifest.run, manifest.step)}{name}-{sha256_hex(data)[:16]}.safetensors"
        objects[name] = put_object(store, key, data)
    whole = manifest.model_copy(update={"objects": objects})
    if store.put_once(_manifest_key(manifest.run, manifest.step), whole.model_dump_json(indent=1).encode()):
        return whole
    found = read_manifest(store, manifest.run, manifest.step)
    if found is None:
        raise CorruptObject(_manifest_key(manifest.run, manifest.step), "was refused as existing, then was not there")
    return found


def read_tensors(store: ObjectStore, manifest: CheckpointManifest) -> TensorSets:
    """All tensors of a checkpoint; an object that does not match its digest is refused by name."""
    return {name: _load(get_object(store, ref), ref.key) for name, ref in manifest.objects.items()}


def _load(data: bytes, key: str) -> dict[str, torch.Tensor]:
    try:
        return load(data)
    except SafetensorError as error:
        raise CorruptObject(key, f"does not decode as safetensors ({str(error)[:120]})") from None


def tensor_sets(weights: Mapping[str, torch.Tensor], moments: Mapping[str, Mapping[str, torch.Tensor]]) -> TensorSets:
    return {
        "weights": dict(weights),
        **{name: dict(tensors) for name, tensors in moments.items()},
        "rng": {"torch": torch.get_rng_state()},
    }
