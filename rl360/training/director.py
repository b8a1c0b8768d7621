"""Rank 0's decisions: which commands all ranks execute, and what is recorded in the store.

A step is done when its `train.json` exists. What is in memory beyond that is at most one applied step whose record
could not be written yet; asking for that step again only writes the record. Everything else in memory can be lost: the
last checkpoint and the records say how to rebuild it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from rl360.config.run import RunConfig, frozen_differences
from rl360.config.services import Services
from rl360.errors import BadInput, Rl360Error, StoreUnavailable
from rl360.store.data import Data
from rl360.store.folders import upload_folder
from rl360.store.layout import run_config_key, step_key
from rl360.training import checkpoints
from rl360.training.actors import rebuilt_from
from rl360.training.replica import (
    PUSH_DTYPE,
    Command,
    DeliverWeights,
    GatherWeights,
    OpenRun,
    Position,
    Replica,
    SaveCheckpoint,
    TrainStep,
    export_dir,
)
from rl360.training.results import RESULT_NAME, TrainResult, commit_result, read_result
from rl360.weights.checksum import expected_checksums, tensor_specs
from rl360.weights.messages import ChecksumReply, ChecksumRequest, PushPlan, TransferReport, parse_version
from rl360.weights.transports import Senders


class Conflict(Rl360Error):
    """The trainer is not where the request expects it: another step, version or batch."""


class UnknownRun(Rl360Error):
    """The store holds no such run."""


class StepBody(Data):
    """Body of `PUT /steps/{k}`."""

    run: str
    batch_key: str = Field(min_length=1)
    batch_digest: str = Field(pattern=r"^[0-9a-f]{64}$")


class ExportBody(Data):
    """Body of `POST /runs/{run}/export`: a new directory on the trainer's machine, or a new prefix in the store."""

    dir: str = Field(pattern=r"^(/|s3://)", description="absolute path, or s3://bucket/prefix, that does not exist yet")
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


def _same_batch(result: TrainResult, body: StepBody) -> TrainResult:
    """A step is trained on one batch; asking for it with another is a mistake, not a repetition."""
    if (result.batch_key, result.batch_digest) != (body.batch_key, body.batch_digest):
        raise Conflict(
            f"step {result.step} of {result.run} was trained on {result.batch_key} {result.batch_digest[:16]}, "
            f"asked for {body.batch_key} {body.batch_digest[:16]}"
        )
    return result


class Director:
    """`everyone` executes a command on all ranks and returns rank 0's value."""

    def __init__(
        self,
        replica: Replica,
        services: Services,
        everyone: Callable[[Command], Any],
        address: str = "127.0.0.1",
    ) -> None:
        self.replica, self.services, self.everyone = replica, services, everyone
        self.store = replica.store
        self.senders = Senders(address, self._deliver)
        self.pending: TrainResult | None = None  # applied in memory, not recorded yet
        self._cast: tuple[str, dict[str, torch.Tensor]] | None = None  # weights digest and what travels for it

    # -- runs ---------------------------------------------------------------------------------------------------

    def open_run(self, run: str) -> dict[str, Any]:
        """State of the run, restored and replayed first when memory does not hold it."""
        at = self._ensure_open(run)
        return {
            "run": run,
            "applied_steps": at.version,
            "version": at.version,
            "next_step": at.next_step,
            "uncommitted_step": self.pending.step if self.pending else None,
            "weights_digest": at.digest,
            "incarnation": self.replica.incarnation,
        }

    def _config(self, run: str) -> tuple[bytes, RunConfig]:
        try:
            data = self.store.get(run_config_key(run))
        except KeyError:
            raise UnknownRun(f"no run {run!r} in the store ({run_config_key(run)} is missing)") from None
        return data, RunConfig.parse(data, run_config_key(run), frozen=True)

    def _ensure_open(self, run: str) -> Position:
        data, config = self._config(run)
        at = self.replica.at
        if at is not None and at.run == run and self._still_true(at, config):
            return at
        self.pending = None
        self._cast = None
        saved, committed = rebuilt_from(self.store, config)
        model_dir = config.model.path or self.services.model_dir
        opened: Position = self.everyone(OpenRun(run, data, model_dir, saved, committed))
        return opened

    def _recorded(self, run: str) -> Position:
        """Where the run stands, when all of it is recorded."""
        at = self._ensure_open(run)
        if self.pending is not None:
            raise Conflict(f"step {self.pending.step} of {run} is not recorded yet; ask for it again first")
        return at

    def _still_true(self, at: Position, config: RunConfig) -> bool:
        """Does memory still continue what the store holds? Another trainer may have gone on, or the run begun anew."""
        if frozen_differences(at.config, config):
            return False
        recorded = at.next_step - (1 if self.pending else 0)
        if recorded:
            last = read_result(self.store, at.run, recorded - 1)
            if last is None or (not self.pending and last.left != (at.digest, at.critic_digest)):
                return False
        return self.pending is not None or read_result(self.store, at.run, recorded) is None

    # -- steps --------------------------------------------------------------------------------------------------

    def put_step(self, step: int, body: StepBody) -> TrainResult:
        """Train a step at most once; the recorded result when it was done before."""
        at = self._ensure_open(body.run)
        recorded = read_result(self.store, body.run, step)
        pending = self.pending if self.pending and self.pending.step == step else None
        if recorded is not None:
            if pending is not None:
                self._settle(recorded)
            return _same_batch(recorded, body)
        if pending is not None:
            _same_batch(pending, body)
            return self._commit(pending)
        if self.pending is not None:
            raise Conflict(
                f"step {self.pending.step} of {body.run} is applied, not recorded yet; ask for it again before {step}"
            )
        if step != at.next_step:
            raise Conflict(f"step {step} of {body.run} cannot be trained: the trainer's next step is {at.next_step}")
        result: TrainResult = self.everyone(TrainStep(step, body.batch_key, body.batch_digest))
        self.pending = result
        return self._commit(result)

    def _commit(self, result: TrainResult) -> TrainResult:
        try:
            found = commit_result(self.store, result)
        except StoreUnavailable as error:
            raise StoreUnavailable(
                f"step {result.step} of {result.run} is applied in memory and not recorded ({error}); ask for it again"
            ) from None
        self._settle(found)
        return found

    def _settle(self, recorded: TrainResult) -> None:
        """The pending step is recorded, by us or by another trainer; in the second case memory must agree."""
        pending, self.pending = self.pending, None
        if pending is not None and pending.left != recorded.left:
            self.replica.at = None  # the next request rebuilds from the store
            key = step_key(recorded.run, recorded.step, RESULT_NAME)
            raise Conflict(f"{key} was recorded by another trainer with other weights; memory is dropped, ask again")

    # -- checkpoints and weights --------------------------------------------------------------------------------

    def checkpoint(self, run: str, step: int) -> dict[str, Any]:
        """Save the state after `step`; nothing to do when it is saved already."""
        manifest = checkpoints.read_manifest(self.store, run, step)
        if manifest is None:
            at = self._recorded(run)
            if at.next_step != step + 1:
                raise Conflict(
                    f"checkpoint {step} of {run} would hold the state after it; the last step is {at.next_step - 1}"
                )
            manifest = self.everyone(SaveCheckpoint(step))
        size = sum(ref.size_bytes for ref in manifest.objects.values())
        return {**manifest.model_dump(exclude={"objects"}), "bytes": size}

    def _weights(self, run: str, version: str) -> dict[str, torch.Tensor]:
        """What travels as `version`: full tensors in the engines' dtype."""
        named_run, number = parse_version(version)
        if named_run != run:
            raise BadInput(f"weight version {version!r} is not one of run {run!r}")
        at = self._ensure_open(run)
        if at.version != number or self.pending is not None:
            unrecorded = " (not recorded yet)" if self.pending else ""
            raise Conflict(f"the trainer holds {run}:{at.version}{unrecorded}, not {version}")
        if self._cast is None or self._cast[0] != at.digest:
            full = self.everyone(GatherWeights())
            self._cast = (at.digest, {name: tensor.to(PUSH_DTYPE) for name, tensor in full.items()})
        return self._cast[1]

    def checksums(self, body: ChecksumRequest) -> ChecksumReply:
        tensors = self._weights(body.run, body.version)
        return ChecksumReply(
            run=body.run,
            version=body.version,
            tensors=tuple(tensor_specs(tensors)),
            checksums=expected_checksums(tensors),
            sources=torch.distributed.get_world_size(),
        )

    def prepare(self, plan: PushPlan) -> dict[str, Any]:
        """What a transport can do before the engines pause; again, nothing is left to do."""
        self.senders.prepare(plan, self._weights(plan.run, plan.version))
        return {}

    def transfer(self, plan: PushPlan) -> TransferReport:
        """Carry out a plan by its transport; rank 0's part here, that of other sources on their ranks."""
        return self.senders.transfer(plan, self._weights(plan.run, plan.version))

    def _deliver(self, errand: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
        if errand.plan.sources == 1:
            return self.replica.lanes.deliver(errand, tensors)
        return self.everyone(DeliverWeights(errand))

    def export(self, run: str, body: ExportBody) -> dict[str, Any]:
        """Write the weights in memory as a Hugging Face directory."""
        at = self._recorded(run)
        weights, dtype = self.everyone(GatherWeights()), getattr(torch, body.dtype)
        if body.dir.startswith("s3://"):
            with tempfile.TemporaryDirectory(prefix="rl360-export-") as scratch:
                export_dir(weights, at.model_dir, Path(scratch) / "policy", dtype)
                upload_folder(self.services, Path(scratch) / "policy", body.dir)
        else:
            export_dir(weights, at.model_dir, Path(body.dir), dtype)
        return {"run": run, "version": at.version, "weights_digest": at.digest, "dir": body.dir, "dtype": body.dtype}
