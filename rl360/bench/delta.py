"""What a version costs as files: all tensors beside the difference to the version before, in bytes and seconds.

Both are written, fetched and applied through the same code on the same disk; the times are of this machine alone.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rl360.errors import Rl360Error
from rl360.weights.delta import SharedFolder, VersionFiles, Weights, apply, open_tensors, write_version


@dataclass(frozen=True)
class Cost:
    bytes: int
    write_s: float
    apply_s: float


@dataclass(frozen=True)
class Costs:
    """`encodings`: tensors of the delta by encoding."""

    tensor_bytes: int
    full: Cost
    delta: Cost
    encodings: dict[str, int]


def compare(model_dir: Path, base: Weights, new: Weights, scratch: Path) -> Costs:
    """`new` as files by itself and as a difference to `base`, in the empty folder `scratch`."""
    write_version(SharedFolder(scratch / "files" / "base"), base, "bench:0")
    apply(model_dir, SharedFolder(scratch / "files" / "base"), scratch / "base")

    def one(kind: str, before: Weights | None) -> tuple[Cost, VersionFiles]:
        files = SharedFolder(scratch / "files" / kind)
        began = time.perf_counter()
        told = write_version(files, new, "bench:1", before, None if before is None else "bench:0")
        written = time.perf_counter()
        apply(model_dir if before is None else scratch / "base", files, scratch / kind)
        cost = Cost(told.size_bytes, written - began, time.perf_counter() - written)
        made = open_tensors(scratch / kind)
        if any(made[name].data.tobytes() != held.data.tobytes() for name, held in new.items()):
            raise Rl360Error(f"the files in {files.where} do not give the weights that were written")
        return cost, told

    full, _ = one("full", None)
    delta, told = one("delta", base)
    encodings = Counter(str(entry.encoding) for entry in told.entries.values())
    return Costs(sum(held.data.size for held in new.values()), full, delta, dict(encodings))
