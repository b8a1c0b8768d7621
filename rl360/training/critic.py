"""The critic of PPO: the policy's body with one number a token for a head, its own optimizer, and what a step makes of
its values.

It begins as a copy of the starting policy with a head of zeros, so at first every value is 0. (arXiv 2203.02155,
appendix C.4, begins it as the reward model; here a verifier gives rewards, and there is none.) A column's value is that
of the text up to its token, before the one that it predicts. It is split over processes as the policy is; the head is
whole on each tensor-parallel rank. It routes by itself: replayed experts are those an engine chose for the policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl360.config.run import ObjectiveConfig
from rl360.objective.advantages import STD_EPS
from rl360.objective.gae import masked_gae
from rl360.objective.losses import value_loss
from rl360.training.checkpoints import CRITIC_PREFIX, TensorSets
from rl360.training.megatron.hf_dir import read_tensors
from rl360.training.megatron.hf_map import VALUE_HEAD, load_hf
from rl360.training.megatron.model import build_model, parallel_state
from rl360.training.megatron.modules import ValueHead
from rl360.training.megatron.policy import MOMENTS, DeviceBatch, Goal, LossSums, Policy, StepSums
from rl360.training.packing import MicroBatch

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_CONSTANT = 1e-12  # returns whose variance is no larger say nothing about how well values explain them


def value_sums(clip: float | None) -> LossSums:
    """The critic's loss (rl360.objective.losses.value_loss) against what `judged` put into a batch."""

    def sums(values: torch.Tensor, _same: torch.Tensor, batch: DeviceBatch) -> list[torch.Tensor]:
        assert batch.values is not None
        assert batch.returns is not None
        loss, clipped = value_loss(values, batch.values, batch.returns, batch.mask, batch.weights, clip)
        return [loss, batch.weights[batch.mask.bool()].double().sum(), clipped]

    return sums


class Critic(Policy):
    """A `Policy` whose output is one value a token."""

    metrics = ("value_loss", "weight", "value_clipped")

    def _build(self) -> GPTModel:
        self.shape = replace(self.shape, tied=False)
        core = build_model(self.shape, self.layout)
        if core.post_process:
            like = core.output_layer.weight
            core.output_layer = ValueHead(self.shape.hidden, like, core.config.sequence_parallel)
        load_hf(core, self._starting(read_tensors(self.hf_dir)), self.shape, self.layout)
        return core

    def _starting(self, policy: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        body = {name: tensor for name, tensor in policy.items() if name != "lm_head.weight"}
        return {**body, VALUE_HEAD: torch.zeros(1, self.shape.hidden)}

    def _outputs(
        self, output: torch.Tensor, batch: DeviceBatch, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values = output[..., 0].float()
        return values, values.detach()

    def _run(self, batches: Sequence[MicroBatch], goal: Goal, *, forward_only: bool) -> list[Any]:
        return super()._run([replace(batch, routing=None) for batch in batches], goal, forward_only=forward_only)

    @torch.no_grad()
    def judged(self, batches: Sequence[MicroBatch], config: ObjectiveConfig) -> tuple[list[MicroBatch], float | None]:
        """The micro-batches with each token's advantage in place of its attempt's score, the values before the step and
        the returns to learn; and 1 - Var(returns - values) / Var(returns) over the step's trained tokens, None of
        returns that do not vary.

        Advantages and returns: rl360.objective.gae. With `whiten_advantages`, less their mean over the step's trained
        tokens and divided by their deviation. Stages but the last of a pipeline, where no loss is computed, leave
        advantages as they are. Collective.
        """
        self.model.eval()
        found = self._run(batches, Goal(lambda values, _same, _batch: [values]), forward_only=True)
        told, moments = [], np.zeros(7)
        for batch, (tensor,) in zip(batches, found, strict=False):  # nothing is found before the last stage
            values, scores = tensor.cpu().numpy(), batch.advantages[:, 0]
            gae = partial(masked_gae, values, scores, batch.mask, gamma=config.gamma, token_rewards=batch.token_rewards)
            advantages, returns = gae(lam=config.gae_lambda)
            if config.critic_lambda is not None:
                _, returns = gae(lam=config.critic_lambda)
            told.append(replace(batch, advantages=advantages, values=values, returns=returns.astype(np.float32)))
            trained = batch.mask.astype(bool)
            each = advantages[trained], returns[trained], (returns - values)[trained]
            moments += [trained.sum(), *(s for x in each for s in (x.sum(), x @ x))]
        if parallel_state.get_tensor_model_parallel_rank() > 0:
            moments[:] = 0.0
        total = torch.from_numpy(moments)
        if torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(total)
        means = (total[1:] / total[0]).view(3, 2)
        (mean, _), variances = means[0].tolist(), (means[:, 1] - means[:, 0].square()).tolist()
        shift, scale = (mean, max(variances[0], 0.0) ** 0.5 + STD_EPS) if config.whiten_advantages else (0.0, 1.0)
        told = [replace(b, advantages=((b.advantages - shift) / scale).astype(np.float32)) for b in told]
        return told or list(batches), 1 - variances[2] / variances[1] if variances[1] > _CONSTANT else None

    def learn(self, batches: Sequence[MicroBatch], config: ObjectiveConfig, divisor: float) -> StepSums:
        """`critic_updates` optimizer steps on what `judged` put into the micro-batches: the loss and gradient of the
        first, and of the tokens that the clip held the mean over all. One that is not finite takes back all of them.
        Collective."""
        held = self._local() if config.critic_updates > 1 else []
        before = [tensor.clone() for tensor in held]
        done = [self.step(batches, value_sums(config.value_clip), divisor)]
        while done[-1].applied and len(done) < config.critic_updates:
            done.append(self.step(batches, value_sums(config.value_clip), divisor))
        if not done[-1].applied:
            with torch.no_grad():
                for tensor, value in zip(held, before, strict=True):
                    tensor.copy_(value)
        clipped = sum(each.sums["value_clipped"] for each in done) / len(done)
        return replace(done[0], applied=done[-1].applied, sums=done[0].sums | {"value_clipped": clipped})

    def _local(self) -> list[torch.Tensor]:
        """This rank's weights, moments and counts of steps, to be written to."""
        return [t for param in self.core.parameters() for t in (param.data, *self._state(param).values())]

    # -- state --------------------------------------------------------------------------------------------------

    def sets(self) -> TensorSets:
        """Its part of a checkpoint. Collective."""
        return {
            CRITIC_PREFIX + name: tensors for name, tensors in ({"weights": self.weights()} | self.moments()).items()
        }

    def restore(self, sets: Mapping[str, Mapping[str, torch.Tensor]], steps: int) -> None:
        """Take up the state that `sets` gave after `steps` optimizer steps; from a checkpoint without a critic, which a
        fork may start from, begin with the body of its policy."""
        if CRITIC_PREFIX + "weights" in sets:
            self.load(sets[CRITIC_PREFIX + "weights"], {name: sets[CRITIC_PREFIX + name] for name in MOMENTS}, steps)
        else:
            load_hf(self.core, self._starting(sets["weights"]), self.shape, self.layout)
