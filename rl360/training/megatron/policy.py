"""A policy under training: Megatron model, gradient buffers and AdamW, with one way in (`step`) and one way out.

All ranks call the same methods in the same order. A step whose loss or gradient is not finite changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from rl360.training.megatron import ON_CPU, hf_map
from rl360.training.megatron.hf_dir import read_tensors
from rl360.training.megatron.model import Layout, build_model, parallel_state, read_shape
from rl360.training.megatron.modules import token_logprobs
from rl360.training.megatron.replay import replaying
from rl360.training.megatron.witness import Witness, watching
from rl360.training.packing import MicroBatch, Rectangle, TrainSequence, build, plan

METRICS = ("loss", "weight", "tokens", "samples", "clipped", "tis", "masked", "abs_dlogp", "entropy", "kl")
MOMENTS = ("exp_avg", "exp_avg_sq")
DeviceBatch = Rectangle[torch.Tensor]
# (log-probs, entropy, micro-batch on the device) -> sums in the order of `metrics`, the first with gradient
LossSums = Callable[[torch.Tensor, torch.Tensor, DeviceBatch], list[torch.Tensor]]
Parts = list[torch.Tensor]  # a value for each parameter of this rank, in their order, on the CPU


@dataclass(frozen=True)
class Optim:
    """AdamW with gradient clipping by global norm."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0


@dataclass(frozen=True)
class Goal:
    """What micro-batches are run for: the sums of `loss_sums`, the first of them divided by `divisor`.

    temperature: log-probs and entropy are those of the policy at it, what the engine sampled from and reports.
    """

    loss_sums: LossSums
    divisor: float = 1.0
    temperature: float = 1.0
    witness: Witness | None = None


@dataclass(frozen=True)
class StepSums:
    """Sums over the whole batch. `applied` False: loss or gradient is not finite, and nothing was changed."""

    applied: bool
    grad_norm: float
    sums: dict[str, float]


def _to_device(batch: MicroBatch) -> DeviceBatch:
    device = "cpu" if ON_CPU else "cuda"
    held = {name: a for name, a in vars(batch).items() if isinstance(a, np.ndarray) and name != "token_rewards"}
    moved = {name: torch.from_numpy(np.ascontiguousarray(a)).to(device) for name, a in held.items()}
    return DeviceBatch(batch.indices, **moved)


class Policy:
    """The model at `hf_dir`, split over the current processes by `layout`; trainable when `optim` is given."""

    metrics: ClassVar[tuple[str, ...]] = METRICS  # names of the sums that a step's `loss_sums` gives

    def __init__(self, hf_dir: Path, layout: Layout, optim: Optim | None = None) -> None:
        self.hf_dir, self.layout = hf_dir, layout
        self.shape = read_shape(hf_dir)
        self.core = self._build()
        self.model: Any = self.core
        self.optimizer: Any = None
        if optim is not None:
            self.model = DistributedDataParallel(self.core.config, DistributedDataParallelConfig(), self.core)
            self.optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam",
                    lr=optim.lr,
                    adam_beta1=optim.beta1,
                    adam_beta2=optim.beta2,
                    adam_eps=optim.eps,
                    weight_decay=optim.weight_decay,
                    clip_grad=optim.grad_clip,
                ),
                [self.model],
            )

    def _build(self) -> GPTModel:
        core = build_model(self.shape, self.layout)
        hf_map.load_hf(core, read_tensors(self.hf_dir), self.shape, self.layout)
        return core

    def _outputs(
        self, output: torch.Tensor, batch: DeviceBatch, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `loss_sums` gets of the model's output: log-probs and entropy, at `temperature`."""
        scaled = output if temperature == 1.0 else output / temperature
        return token_logprobs(scaled, batch.targets, parallel_state.get_tensor_model_parallel_group())

    # -- batches ------------------------------------------------------------------------------------------------

    def share(self, lengths: Sequence[int], max_tokens: int) -> list[tuple[int, ...]]:
        """Indices of this rank's samples, by micro-batch; every rank has the same number of micro-batches."""
        ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        return plan(lengths, max_tokens, ranks, self._multiple)[rank]

    def rectangles(self, samples: Mapping[int, TrainSequence], share: Sequence[tuple[int, ...]]) -> list[MicroBatch]:
        """The micro-batches of a share from its samples, by index."""
        return [build(samples, indices, self._multiple) for indices in share]

    def micro_batches(self, samples: Sequence[TrainSequence], max_tokens: int) -> list[MicroBatch]:
        """This rank's micro-batches of samples that every rank holds."""
        return self.rectangles(dict(enumerate(samples)), self.share([len(s.tokens) for s in samples], max_tokens))

    @property
    def _multiple(self) -> int:
        return self.layout.tp if self.layout.sequence_parallel else 1

    def _run(self, batches: Sequence[MicroBatch], goal: Goal, *, forward_only: bool) -> list[Any]:
        """The micro-batches through Megatron's schedule; on the last pipeline stage what `loss_sums` gave for each."""

        def on_output(batch: DeviceBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            sums = goal.loss_sums(*self._outputs(output, batch, goal.temperature), batch)
            no_divisor = torch.zeros((), dtype=torch.int, device=output.device)  # ours is applied right here
            return sums[0] / goal.divisor, no_divisor, [s.detach() for s in sums]

        with replaying(self.core) as replay, watching(self.core, goal.witness) as watch:

            def forward_step(stream: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
                held = next(stream)
                batch = _to_device(held)
                replay(batch.routing)
                watch(held.indices)
                return model(batch.inputs, None, None), partial(on_output, batch)

            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(batches),
                model=self.model,
                num_microbatches=len(batches),
                seq_length=max(b.inputs.shape[1] for b in batches),
                micro_batch_size=max(b.inputs.shape[0] for b in batches),
                forward_only=forward_only,
            )

    # -- training -----------------------------------------------------------------------------------------------

    def step(self, batches: Sequence[MicroBatch], loss_sums: LossSums, divisor: float) -> StepSums:
        """One optimizer step on the gradient of (sum over all ranks' batches of the first sum) / divisor."""
        found = self.gradients(batches, Goal(loss_sums, divisor))
        if found.applied:
            self.optimizer.step()
        return found

    def gradients(self, batches: Sequence[MicroBatch], goal: Goal) -> StepSums:
        """What `step` says, with the step itself still to be taken: `applied` is whether it may be. A witness that
        disagrees raises."""
        sums, grad_norm = self.accumulate(batches, goal)
        finite = all(map(math.isfinite, (grad_norm, *sums.values())))
        if finite and goal.witness is not None:
            goal.witness.settle(sums)
        return StepSums(finite, grad_norm, sums)

    def accumulate(self, batches: Sequence[MicroBatch], goal: Goal) -> tuple[dict[str, float], float]:
        """Gradients into the buffers, reduced over all ranks; returns the sums and the global gradient norm."""
        self.model.train()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        per_batch = self._run(batches, goal, forward_only=False)
        self.optimizer.prepare_grads()
        total = torch.zeros(len(self.metrics), dtype=torch.float64)
        if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
            for sums in per_batch:
                total += torch.stack([s.double().cpu() for s in sums])
        if torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(total)
        return dict(zip(self.metrics, total.tolist(), strict=True)), float(self.optimizer.get_grad_norm())

    @torch.no_grad()
    def batch_logprobs(
        self, batches: Sequence[MicroBatch], temperature: float = 1.0, parts: Parts | None = None
    ) -> list[np.ndarray | None]:
        """Log-probs of the targets, float32 [rows, width] a micro-batch: of this policy, or of one of its shape with
        these `parts`. None on all but the last pipeline stage, where no loss is computed. Collective."""
        self.model.eval()
        with self._holding(parts):
            goal = Goal(lambda logprobs, entropy, batch: [logprobs], temperature=temperature)
            found = self._run(batches, goal, forward_only=True)
        return [values.float().cpu().numpy() for (values,) in found] or [None] * len(batches)

    @contextmanager
    def _holding(self, parts: Parts | None) -> Iterator[None]:
        """Within, the parameters are other tensors; afterwards their own again, which nothing has touched."""
        params = list(self.core.parameters())
        own = [param.data for param in params]
        try:
            for param, part in zip(params, parts or own, strict=True):
                param.data = part.to(param.device)
            yield
        finally:
            for param, data in zip(params, own, strict=True):
                param.data = data

    def parts(self, tensors: Mapping[str, torch.Tensor] | None = None) -> Parts:
        """Copies of this rank's parameters, or its parts of full `tensors` by Hugging Face name."""
        held = {id(param): param.detach().to("cpu", copy=True) for param in self.core.parameters()}
        if tensors is not None:
            hf_map.load_hf(self.core, tensors, self.shape, self.layout, lambda param: held[id(param)])
        return list(held.values())

    # -- state --------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, torch.Tensor]:
        """Full fp32 tensors by Hugging Face name on rank 0, {} elsewhere. Collective."""
        return hf_map.gather_hf(self.core, self.shape, self.layout)

    def _state(self, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """AdamW's state of a parameter; before the first step it is all zero, as AdamW itself would start."""
        for part in self.optimizer.chained_optimizers:
            if any(param is p for g in part.optimizer.param_groups for p in g["params"]):
                state = part.optimizer.state[param]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state.update({m: torch.zeros_like(param) for m in MOMENTS})
                return state
        raise KeyError("parameter without an optimizer")

    @property
    def updates(self) -> int:
        """Optimizer steps taken, by AdamW's own count."""
        return int(self._state(next(self.core.parameters()))["step"])

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """Adam's moments under the same names, by moment. Collective, like `weights`."""
        return {
            m: hf_map.gather_hf(self.core, self.shape, self.layout, lambda p, m=m: self._state(p)[m]) for m in MOMENTS
        }

    def load(
        self, weights: Mapping[str, torch.Tensor], moments: Mapping[str, Mapping[str, torch.Tensor]], steps: int
    ) -> None:
        """Take the state that `weights` and `moments` described after `steps` optimizer steps."""
        with torch.no_grad():
            hf_map.load_hf(self.core, weights, self.shape, self.layout)
            for m in MOMENTS:
                hf_map.load_hf(self.core, moments[m], self.shape, self.layout, lambda p, m=m: self._state(p)[m])
            for param in self.core.parameters():
                self._state(param)["step"].fill_(steps)
