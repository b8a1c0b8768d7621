"""One rank of the process that takes a past step again: `torchrun ... -m rl360.replay.trainer RUN STEP OUT PP EP`.

Reads the store and writes nothing to it; rank 0 leaves the result, or why it was refused, in the file.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, cast

import orjson
import torch

from rl360.config.freeze import load_frozen
from rl360.config.services import load_services
from rl360.errors import BadInput, Rl360Error
from rl360.replay.steps import Scratch
from rl360.store.layout import run_config_key
from rl360.store.object_store import ObjectStore
from rl360.training.actors import rebuilt_from
from rl360.training.megatron import parallel
from rl360.training.megatron.model import Layout
from rl360.training.replica import OpenRun, Replica, TrainStep
from rl360.training.results import TrainResult, read_result


def take(store: ObjectStore, replica: Replica, model_dir: str, run: str, step: int) -> TrainResult:
    """Open the run where `step` begins and take it. Nothing is recorded."""
    recorded = read_result(store, run, step)
    if recorded is None:
        raise BadInput(f"step {step} of {run} has no result to compare with")
    config = load_frozen(store, run)
    saved, taken = rebuilt_from(store, config, step)
    if [each.step for each in taken[-1:]] != [step]:
        raise BadInput(f"a step before {step} of {run} has no result; step {step} cannot follow it")
    frozen = store.get_required(run_config_key(run))
    replica.execute(OpenRun(run, frozen, config.model.path or model_dir, saved, taken[:-1]))
    return cast(TrainResult, replica.execute(TrainStep(step, recorded.batch_key, recorded.batch_digest)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="torchrun ... -m rl360.replay.trainer")
    # by position: torchrun takes what looks like the beginning of an option of its own
    parser.add_argument("run")
    parser.add_argument("step", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("pp", type=int)
    parser.add_argument("ep", type=int)
    options = parser.parse_args()
    services = load_services()
    store, layout = ObjectStore.from_services(services), Layout(pp=options.pp, ep=options.ep)
    torch.use_deterministic_algorithms(True)  # as the trainer's service does
    torch.utils.deterministic.fill_uninitialized_memory = False
    parallel.enter(layout)
    try:
        replica = Replica(cast(Any, Scratch(store, remember=False)), layout, "replay")
        result = take(store, replica, services.model_dir, options.run, options.step)
        answer: dict[str, object] = {"result": result.model_dump(mode="json")}
    except Rl360Error as error:
        answer = {"refused": str(error)}
    if torch.distributed.get_rank() == 0:
        part = options.out.with_suffix(".part")
        part.write_bytes(orjson.dumps(answer))
        part.rename(options.out)
    parallel.leave()


if __name__ == "__main__":
    main()
