"""Other policies beside the one under training: the reference of the KL term, and the actors of earlier versions.

Each is a value for every parameter of the policy, split as it is (`Parts`), with which the policy's own forward runs:
no second model, no optimizer, no gradient; the same micro-batches, temperature and replayed routing.

The reference is read when a run is opened, and must be the one that the run began with. An actor is kept before the
step that leaves its version: in memory, and in the store under `{run}/actors/` for a trainer that lost its memory. The
manifest is the commit; what a restart from the newest checkpoint cannot need is deleted once that checkpoint is there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import torch
from safetensors.torch import save

from rl360.config.run import RunConfig
from rl360.errors import BadInput, CorruptObject
from rl360.objective.advantages import CRITIC
from rl360.objective.kl import RowKl, kl_ahead, reward_advantages, token_kl
from rl360.store.codec import sha256_hex
from rl360.store.data import Data, read
from rl360.store.layout import actor_prefix, reference_key
from rl360.store.manifest import ObjectRef, get_object, put_object
from rl360.store.object_store import ObjectStore
from rl360.training.checkpoints import load_tensors
from rl360.training.megatron.hf_dir import read_tensors
from rl360.training.megatron.hf_map import digest_of
from rl360.training.megatron.model import read_shape
from rl360.training.megatron.parallel import gathered, refuse_other_copies, together
from rl360.training.megatron.policy import Parts, Policy
from rl360.training.packing import MicroBatch
from rl360.training.results import Batch, TrainResult, read_result
from rl360.training.saved import CheckpointManifest, latest, start_of_fork


class ActorManifest(Data):
    """A kept actor: the weights of `version`, whole."""

    run: str
    version: int
    weights_digest: str
    weights: ObjectRef


def _manifest_key(run: str, version: int) -> str:
    return actor_prefix(run, version) + "manifest.json"


def read_actor(store: ObjectStore, run: str, version: int) -> ActorManifest | None:
    return read(store, _manifest_key(run, version), ActorManifest, "is no manifest of a kept actor")


def prune(store: ObjectStore, run: str, below: int) -> None:
    """Delete the actors of versions below `below`, each one's manifest first: a half deleted actor is none."""
    for name in store.list_folders(actor_prefix(run)):
        if name.isdigit() and int(name) < below:
            manifest = _manifest_key(run, int(name))
            for key in (manifest, *store.list(actor_prefix(run, int(name)))):
                store.delete(key)


class Actors:
    """Of one open run, on one rank. What is `collective` all ranks call together."""

    def __init__(self, store: ObjectStore, config: RunConfig, policy: Policy, model_dir: str) -> None:
        """Collective. Reads the reference when the objective has one."""
        self.store, self.config, self.policy = store, config, policy
        self.kept: dict[int, Parts] = {}
        self.reference: Parts | None = None
        if config.objective.kl_coef:
            folder = config.objective.reference or model_dir
            refuse_other_copies(Path(folder))
            self.reference = together(lambda: self._read_reference(folder))

    def _read_reference(self, folder: str) -> Parts:
        shape = replace(read_shape(Path(folder)), max_positions=self.policy.shape.max_positions)
        if shape != self.policy.shape:
            raise BadInput(
                f"reference {folder} is another model than the policy ({shape}, the policy is {self.policy.shape})"
            )
        tensors = read_tensors(Path(folder))
        if torch.distributed.get_rank() == 0:
            key, digest = reference_key(self.config.run), digest_of(tensors)
            data = orjson.dumps({"weights_digest": digest})
            if not self.store.put_once(key, data) and (began := self.store.get_required(key)) != data:
                raise BadInput(
                    f"reference {folder} holds weights {digest[:16]}, run {self.config.run} began with "
                    f"{began.decode(errors='replace')[:40]} ({key}); restore the directory, or start another run"
                )
        return self.policy.parts(tensors)

    # -- kept actors --------------------------------------------------------------------------------------------

    def keep(self, version: int, digest: str) -> None:
        """Keep the weights in memory as the actor of `version` before a step leaves it; collective.
        digest: of them, on rank 0."""
        oldest = version - self.config.trainer.kept_versions
        if not self.config.trainer.kept_versions or version in self.kept:
            return
        weights = self.policy.weights()

        def put() -> bool:
            if torch.distributed.get_rank() == 0:
                data, run = save(weights), self.config.run
                name = f"{actor_prefix(run, version)}weights-{sha256_hex(data)[:16]}.safetensors"
                ref = put_object(self.store, name, data)
                made = ActorManifest(run=run, version=version, weights_digest=digest, weights=ref)
                if not self.store.put_once(_manifest_key(run, version), made.model_dump_json(indent=1).encode()):
                    found = read_actor(self.store, run, version)
                    if found is None or found.weights_digest != digest:
                        raise CorruptObject(_manifest_key(run, version), f"does not hold weights {digest[:16]}")
            return True

        together(put)
        self.kept[version] = self.policy.parts()
        for old in [each for each in self.kept if each < oldest]:
            del self.kept[old]

    def _actor(self, version: int) -> Parts:
        def load() -> Parts:
            found = read_actor(self.store, self.config.run, version)
            if found is None:
                raise CorruptObject(
                    _manifest_key(self.config.run, version),
                    "is missing: tokens of this step were sampled by that version, and its actor is not kept",
                )
            return self.policy.parts(load_tensors(get_object(self.store, found.weights), found.weights.key))

        if version not in self.kept:
            self.kept[version] = together(load)
        return self.kept[version]

    # -- before a step ------------------------------------------------------------------------------------------

    def prepare(self, batch: Batch, micro: list[MicroBatch], version: int) -> tuple[list[MicroBatch], tuple[int, ...]]:
        """The micro-batches with what the objective needs of other policies, and the versions of the kept actors that
        were asked; collective. version: of the policy, whose own tokens need no other."""
        objective, temperature = self.config.objective, self.config.rollout.temperature
        if self.reference is not None:
            found = self.policy.batch_logprobs(micro, temperature, self.reference)
            micro = [replace(each, reference=values) for each, values in zip(micro, found, strict=True)]
            if objective.kl_in == "reward":
                micro = self._with_kl_in_reward(batch, micro)
        if objective.old_policy != "kept":
            return micro, ()
        mine = {int(each) for one in micro if one.versions is not None for each in np.unique(one.versions)}
        asked = tuple(sorted(set().union(*gathered(mine)) - {-1, version}))
        for each in asked:
            found = self.policy.batch_logprobs(micro, temperature, self._actor(each))
            micro = [_with_old(one, values, each) for one, values in zip(micro, found, strict=True)]
        return micro, asked

    def _with_kl_in_reward(self, batch: Batch, micro: list[MicroBatch]) -> list[MicroBatch]:
        """Advantages after the KL to the reference is taken off the reward (rl360.objective.kl); collective. All ranks
        see the KL of all samples, so the result depends on no split."""
        objective = self.config.objective
        found = self.policy.batch_logprobs(micro, self.config.rollout.temperature)
        kls = [_token_kl(one, values, objective.kl_estimator) for one, values in zip(micro, found, strict=True)]
        if objective.estimator == CRITIC:  # taken off by token, before the critic judges
            return [
                one if kl is None else replace(one, token_rewards=-objective.kl_coef * kl)
                for one, kl in zip(micro, kls, strict=True)
            ]
        mine: dict[int, RowKl] = {}
        ahead: dict[int, np.ndarray] = {}
        for one, kl in zip(micro, kls, strict=True):
            if kl is not None:
                for row, index in enumerate(one.indices):
                    mine[index], ahead[index] = kl_ahead(kl[row], one.mask[row])
        every = {index: row for part in gathered(mine) for index, row in part.items()}
        base, slope = reward_advantages(
            objective.estimator,
            objective.kl_coef,
            [every[index] for index in range(len(batch.rows))],
            attempt_ids=[row.attempt_id for row in batch.rows],
            group_ids=[row.group_id for row in batch.rows],
            scored=batch.scored,
            advantages=[row.advantage for row in batch.rows],
            normalize_std=objective.normalize_std,
        )

        def moved(one: MicroBatch) -> MicroBatch:
            advantages = one.advantages.copy()
            for row, index in enumerate(one.indices):
                if index in ahead:
                    advantages[row] = base[index] + slope[index] * ahead[index]
            return replace(one, advantages=advantages)

        return [moved(one) for one in micro]


def _token_kl(one: MicroBatch, values: np.ndarray | None, kind: str) -> np.ndarray | None:
    """The KL of each trained token, 0 elsewhere, `[rows, width]`."""
    if values is None or one.reference is None:
        return None
    kl = token_kl(torch.from_numpy(values), torch.from_numpy(one.reference), kind).numpy()
    return np.where(one.mask.astype(bool), kl, np.float32(0))


def _with_old(one: MicroBatch, values: np.ndarray | None, version: int) -> MicroBatch:
    if values is None or one.versions is None:
        return one
    before = np.zeros_like(values) if one.old is None else one.old
    return replace(one, old=np.where(one.versions == version, values, before))


def rebuilt_from(
    store: ObjectStore, config: RunConfig, step: int | None = None
) -> tuple[CheckpointManifest | None, tuple[TrainResult, ...]]:
    """What a trainer without memory starts from, and the recorded steps it takes again: all, or up to and with `step`.

    The newest checkpoint (before `step`), or the start of the run or fork. An older one where a step after it used an
    actor that is neither stored any more nor made on the way.
    """
    last = None if step is None else step - 1
    while True:
        saved = latest(store, config.run, last)
        first = saved.next_step if saved else 0
        taken: list[TrainResult] = []
        while step is None or first + len(taken) <= step:
            found = read_result(store, config.run, first + len(taken))
            if found is None:
                break
            taken.append(found)
        if saved is None:
            return start_of_fork(store, config), tuple(taken)
        earlier = {version for each in taken for version in each.actors_used if version < saved.version}
        if all(store.exists(_manifest_key(config.run, version)) for version in earlier):
            return saved, tuple(taken)
        last = saved.step - 1
