"""Checkpoints: weights, Adam's moments, random state and position, as Hugging Face-named tensors in the store.

Objects are named by their digest and written before the manifest, which is the commit. Because the names and shapes are
those of the whole model, a checkpoint written under one split over processes restores under any other.
"""

from __future__ import annotations

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from rl360.errors import CorruptObject
from rl360.store.codec import sha256_hex
from rl360.store.data import commit
from rl360.store.layout import checkpoint_prefix
from rl360.store.manifest import ObjectRef, get_object, put_object
from rl360.store.object_store import ObjectStore
from rl360.training.saved import CheckpointManifest, manifest_key, read_manifest

TensorSets = dict[str, dict[str, torch.Tensor]]  # "weights", "exp_avg", "exp_avg_sq", "rng" -> name -> tensor
CRITIC_PREFIX = "critic_"  # of a critic's sets


def write(store: ObjectStore, manifest: CheckpointManifest, sets: TensorSets) -> CheckpointManifest:
    """Write the tensors, then the manifest. A checkpoint of this step that is already there wins."""
    objects: dict[str, ObjectRef] = {}
    for name, tensors in sets.items():
        data = save(tensors)
        key = f"{checkpoint_prefix(manifest.run, manifest.step)}{name}-{sha256_hex(data)[:16]}.safetensors"
        objects[name] = put_object(store, key, data)
    whole = manifest.model_copy(update={"objects": objects})
    key, data = manifest_key(manifest.run, manifest.step), whole.model_dump_json(indent=1).encode()
    return commit(store, key, whole, data, lambda: read_manifest(store, manifest.run, manifest.step))


def read_tensors(store: ObjectStore, manifest: CheckpointManifest, *, critic: bool) -> TensorSets:
    """A critic's sets of a checkpoint, {} without one, or all others; an object that does not match its digest is
    refused by name. A rank reads whole sets of which it needs parts: the digest is of the whole object."""
    refs = {name: ref for name, ref in manifest.objects.items() if name.startswith(CRITIC_PREFIX) is critic}
    return {name: load_tensors(get_object(store, ref), ref.key) for name, ref in refs.items()}


def load_tensors(data: bytes, key: str) -> dict[str, torch.Tensor]:
    """Tensors by name from the bytes of a safetensors object; `CorruptObject` naming `key` for anything else."""
    try:
        return load(data)
    except SafetensorError as error:
        raise CorruptObject(key, f"does not decode as safetensors ({str(error)[:120]})") from None
