"""What every rank of the trainer does: open a run, train a step, hand out weights. Rank 0's director decides when.

All ranks execute the same command in the same order. Reading and checking comes first and is agreed on (`together`), so
that a rank which cannot read an object makes all of them refuse, before any of them changed anything.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rl360.config.run import RunConfig
from rl360.errors import BadInput, ReplayMismatch, Rl360Error
from rl360.objective.advantages import CRITIC
from rl360.objective.filters import trainable_versions
from rl360.store.object_store import ObjectStore
from rl360.training import actors, checkpoints
from rl360.training.critic import Critic
from rl360.training.megatron.hf_dir import write_dir
from rl360.training.megatron.hf_map import digest_of, place_hf
from rl360.training.megatron.model import Layout, parallel_state
from rl360.training.megatron.parallel import gathered, refuse_other_copies, together
from rl360.training.megatron.policy import Goal, Optim, Policy, StepSums
from rl360.training.megatron.witness import Witness
from rl360.training.objective import policy_sums
from rl360.training.packing import MicroBatch
from rl360.training.results import Batch, StepStatus, TrainResult, parse_batch, read_samples
from rl360.weights.transports import open_lanes

if TYPE_CHECKING:
    from rl360.weights.transports import Delivered, Errand, Lanes


@dataclass(frozen=True)
class OpenRun:
    """Restore `checkpoint` (None: the starting policy), then replay `committed`, which follow it without a gap."""

    run: str
    config_json: bytes
    model_dir: str
    checkpoint: checkpoints.CheckpointManifest | None
    committed: tuple[TrainResult, ...]


@dataclass(frozen=True)
class TrainStep:
    step: int
    batch_key: str
    batch_digest: str


@dataclass(frozen=True)
class SaveCheckpoint:
    step: int


@dataclass(frozen=True)
class GatherWeights:
    pass


@dataclass(frozen=True)
class DeliverWeights:
    """Send, each rank its part, what the plan has point to point."""

    errand: Errand


Command = OpenRun | TrainStep | SaveCheckpoint | GatherWeights | DeliverWeights
PUSH_DTYPE = torch.bfloat16  # what the engines run


@dataclass(frozen=True)
class Position:
    """Where the weights in memory stand. Digests are known on rank 0; that of the critic is None without one."""

    run: str
    config: RunConfig
    model_dir: str
    next_step: int
    version: int
    digest: str
    critic_digest: str | None


class Replica:
    """One rank's part of the trainer."""

    def __init__(self, store: ObjectStore, layout: Layout, incarnation: str, lanes: Lanes | None = None) -> None:
        self.store, self.layout, self.incarnation = store, layout, incarnation
        self.lanes = lanes or open_lanes()  # to the engines that this rank serves in a push
        self.policy: Policy | None = None
        self.critic: Critic | None = None  # of the policy's run, when its estimator needs one
        self.at: Position | None = None
        self.actors: actors.Actors | None = None  # of the policy's run, there when the policy is

    @property
    def leads(self) -> bool:
        return torch.distributed.get_rank() == 0

    def layout_name(self) -> str:
        dp, split = parallel_state.get_data_parallel_world_size(), self.layout
        return f"dp{dp}-tp{split.tp}-pp{split.pp}-ep{split.ep}-threads{torch.get_num_threads()}"

    def execute(self, command: Command) -> object:
        """Run a command; collective."""
        if isinstance(command, OpenRun):
            return self._open(command)
        if isinstance(command, TrainStep):
            return self._train(command)
        if isinstance(command, SaveCheckpoint):
            return self._save(command)
        if isinstance(command, DeliverWeights):
            return self._deliver(command.errand)
        return self._held()[0].weights()

    def _held(self) -> tuple[Policy, Position]:
        if self.policy is None or self.at is None:
            raise BadInput("no run is open in the trainer")
        return self.policy, self.at

    # -- open ---------------------------------------------------------------------------------------------------

    def _open(self, command: OpenRun) -> Position:
        # a failed open leaves nothing half restored, and no model of the run before stays beside those of this one
        self.policy = self.critic = self.actors = self.at = None
        config = RunConfig.parse(command.config_json, f"config of run {command.run}", frozen=True)
        trainer = config.trainer
        optim = Optim(trainer.lr, trainer.beta1, trainer.beta2, trainer.eps, trainer.weight_decay, trainer.grad_clip)
        if command.checkpoint is None:  # else they come from the store
            refuse_other_copies(Path(command.model_dir))
        policy = together(lambda: Policy(Path(command.model_dir), self.layout, optim))
        if trainer.routing_replay and policy.shape.routing is None:
            raise BadInput(f"trainer.routing_replay is on and {command.model_dir} has no experts; switch it off")
        self.actors = actors.Actors(self.store, config, policy, command.model_dir)
        critic = None
        if config.objective.estimator == CRITIC:
            own = replace(optim, lr=config.objective.critic_lr or optim.lr)
            critic = together(lambda: Critic(Path(command.model_dir), self.layout, own))
        self.critic = critic
        at = Position(command.run, config, command.model_dir, 0, 0, digest_of(policy.weights()), self._critic_digest())
        saved = command.checkpoint
        if saved is not None:
            sets = together(lambda: checkpoints.read_tensors(self.store, saved, critic=False))
            policy.load(sets["weights"], sets, saved.version + config.updates_before - saved.withheld_updates)
            torch.set_rng_state(sets["rng"]["torch"])
            if critic is not None:
                if saved.critic_digest is not None:  # else it begins with the body of the policy
                    sets = {}  # let go of, before as many more are read
                    sets = together(lambda: checkpoints.read_tensors(self.store, saved, critic=True))
                critic.restore(sets, saved.critic_updates)
            at = replace(at, next_step=saved.next_step, version=saved.version, digest=digest_of(policy.weights()))
            at, what = replace(at, critic_digest=self._critic_digest()), f"checkpoint {saved.step} of {saved.run}"
            self._must_equal(at.digest, saved.weights_digest, what, saved.layout)
            if critic is not None and saved.critic_digest is not None:
                self._must_equal(at.critic_digest, saved.critic_digest, f"{what}, its critic", saved.layout)
        self.policy, self.at = policy, at
        try:
            for recorded in command.committed:
                self._replay(recorded)
        except Rl360Error:
            self.policy = self.at = None
            raise
        return self.at

    def _critic_digest(self) -> str | None:
        return None if self.critic is None else digest_of(self.critic.weights())

    def _replay(self, recorded: TrainResult) -> None:
        """Take a committed step again; it must end in the weights that were recorded."""
        what = f"step {recorded.step} of {recorded.run}"
        result = self._train(TrainStep(recorded.step, recorded.batch_key, recorded.batch_digest))
        self._must_equal(result.weights_digest, recorded.weights_digest, f"replay of {what}", recorded.layout)
        if self.critic is not None:
            critic = f"replay of {what}, its critic"
            self._must_equal(result.critic_digest, str(recorded.critic_digest), critic, recorded.layout)
        if (result.status, result.version_after) != (recorded.status, recorded.version_after):
            raise ReplayMismatch(f"replay of {what} ended {result.status}, recorded {recorded.status}")

    def _must_equal(self, found: str | None, expected: str, what: str, layout: str) -> None:
        def check() -> bool:
            if self.leads and found != expected:
                raise ReplayMismatch(
                    f"{what}: weights {str(found)[:16]} differ from the recorded {expected[:16]} "
                    f"(recorded on {layout}, now {self.layout_name()}; another layout or machine rounds differently: "
                    "restart as recorded)"
                )
            return True

        together(check)

    # -- train --------------------------------------------------------------------------------------------------

    def _train(self, command: TrainStep) -> TrainResult:
        """The step's result; the position moves on. Nothing is recorded here."""
        policy, at = self._held()
        started = time.monotonic()

        def read() -> tuple[Batch, list[MicroBatch]]:
            """All rows of the batch, and of its samples those that this rank trains."""
            data = self.store.get_required(command.batch_key)
            batch = parse_batch(data, command.batch_key, command.batch_digest, at.run, command.step)
            limit, kept = at.config.trainer.max_tokens_per_micro_batch, at.config.trainer.kept_versions
            versions = trainable_versions(f"{at.run}:{at.version}", kept) if kept else ()
            share = policy.share([row.tokens for row in batch.rows], limit)
            mine = sorted({index for indices in share for index in indices})
            replay = policy.shape.routing if at.config.trainer.routing_replay else None
            rows = [batch.rows[index] for index in mine]
            samples = read_samples(self.store, rows, policy.shape.vocab, replay, versions)
            # in units of the mean's weight, so that a mean over tokens is summed plainly and divided once, by `tokens`
            weighed = [
                replace(s, weight=batch.rows[i].weight * batch.trained_tokens)
                for i, s in zip(mine, samples, strict=True)
            ]
            return batch, policy.rectangles(dict(zip(mine, weighed, strict=True)), share)

        batch, micro = together(read)
        tokens = batch.trained_tokens
        result = TrainResult(
            run=at.run,
            step=command.step,
            status=StepStatus.EMPTY,
            version_after=at.version,
            weights_digest=at.digest,
            critic_digest=at.critic_digest,
            seconds=0.0,
            batch_key=command.batch_key,
            batch_digest=command.batch_digest,
            layout=self.layout_name(),
            incarnation=self.incarnation,
        )
        if tokens:
            assert self.actors is not None
            self.actors.keep(at.version, at.digest)
            micro, used = self.actors.prepare(batch, micro, at.version)
            done = self._update(batch, micro, at.config.objective.critic_warmup_steps > command.step)
            result = result.model_copy(update=done | {"actors_used": used})
        result = result.model_copy(update={"seconds": round(time.monotonic() - started, 4)})
        at = replace(at, next_step=command.step + 1, version=result.version_after, digest=result.weights_digest)
        self.at = replace(at, critic_digest=result.critic_digest)
        return result

    def _update(self, batch: Batch, micro: list[MicroBatch], withheld: bool) -> dict[str, object]:
        """The optimizer steps, of the policy and of its critic or of neither; the result's fields about them.

        withheld: the policy's is left out. Its loss and gradient are told all the same, and must be finite.
        """
        policy, at = self._held()
        critic, objective, tokens = self.critic, at.config.objective, batch.trained_tokens
        told: dict[str, object] = {}
        witness = None
        if at.config.trainer.witness:
            witness = Witness(batch.rows, other_terms=bool(objective.entropy_coef or objective.kl_coef))
        if critic is not None:
            micro, told["explained_variance"] = critic.judged(micro, objective)
        goal = Goal(policy_sums(objective, at.version), tokens, at.config.rollout.temperature, witness)
        sums = policy.gradients(micro, goal)
        if critic is not None and sums.applied:
            learned = critic.learn(micro, objective, tokens)
            sums = replace(sums, applied=learned.applied)
            told["value_loss"] = learned.sums["value_loss"] / tokens
            told["value_clip_fraction"] = learned.sums["value_clipped"] / tokens
            told["critic_grad_norm"] = learned.grad_norm
        if sums.applied and not withheld:
            policy.optimizer.step()
        done: dict[str, object] = {"weights_digest": digest_of(policy.weights())}
        done |= {"critic_digest": self._critic_digest(), "witness": None if witness is None else witness.report}
        return _outcome(sums, tokens, at) | done | (told if sums.applied else {})

    def _deliver(self, errand: Errand) -> dict[int, Delivered]:
        """What became of every engine, on all ranks. Nothing leaves any of them before all can send their part."""
        policy, _ = self._held()
        ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        if errand.plan.sources > ranks:
            raise BadInput(f"the plan has {errand.plan.sources} sources, the trainer {ranks} ranks; plan again")
        wanted = [errand.names(source) for source in range(ranks)]
        mine = place_hf(policy.core, policy.shape, policy.layout, wanted, PUSH_DTYPE)
        together(lambda: self.lanes.check(errand, rank, mine))
        found = together(lambda: self.lanes.deliver(errand, mine, rank))
        return {engine: told for part in gathered(found) for engine, told in part.items()}

    # -- save ---------------------------------------------------------------------------------------------------

    def _save(self, command: SaveCheckpoint) -> checkpoints.CheckpointManifest | None:
        policy, at = self._held()
        sets = {"weights": policy.weights(), **policy.moments(), "rng": {"torch": torch.get_rng_state()}}
        sets |= {} if self.critic is None else self.critic.sets()
        if not self.leads:
            return None
        manifest = checkpoints.CheckpointManifest(
            run=at.run,
            step=command.step,
            next_step=at.next_step,
            version=at.version,
            weights_digest=at.digest,
            withheld_updates=at.version + at.config.updates_before - policy.updates,
            critic_digest=at.critic_digest,
            critic_updates=0 if self.critic is None else self.critic.updates,
            layout=self.layout_name(),
            objects={},
        )
        written = checkpoints.write(self.store, manifest, sets)
        if at.config.trainer.kept_versions:  # a restart from here asks for none older
            actors.prune(self.store, at.run, at.version - at.config.trainer.kept_versions)
        return written


def _outcome(sums: StepSums, tokens: int, at: Position) -> dict[str, object]:
    """The fields of the result that say what the optimizer did."""
    if not sums.applied:
        return {"status": StepStatus.NONFINITE}
    total = sums.sums
    return {
        "status": StepStatus.TRAINED,
        "version_after": at.version + 1,
        "loss": total["loss"] / tokens,
        "grad_norm": sums.grad_norm,
        "trained_samples": round(total["samples"]),
        "trained_tokens": round(total["tokens"]),
        "loss_weight_sum": total["weight"] / tokens,
        "clip_fraction": total["clipped"] / tokens,
        "tis_mean": total["tis"] / tokens,
        "masked_fraction": total["masked"] / tokens,
        "mean_abs_dlogp": total["abs_dlogp"] / tokens,
        "entropy": total["entropy"] / tokens,
        "kl_mean": total["kl"] / tokens if at.config.objective.kl_coef else None,
    }


def export_dir(weights: dict[str, torch.Tensor], like: str, out_dir: Path, dtype: torch.dtype) -> None:
    """Write a Hugging Face directory that did not exist before, whole or not at all."""
    if out_dir.exists():
        raise BadInput(f"{out_dir} exists already; export to a new directory")
    part = out_dir.with_name(out_dir.name + ".part")
    write_dir(weights, Path(like), part, dtype)
    part.rename(out_dir)
