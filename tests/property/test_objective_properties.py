"""What else holds of a step's objective: a sequence may be cut anywhere, and a group that trains whole pushes nowhere.
The laws of the whole step are in test_whole_step_properties.py."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.config.run import ObjectiveConfig
from rl360.ledger.outcomes import HAS_VERDICT
from rl360.objective.losses import LossParts, policy_loss
from tests.property.whole_step import CONSTANT, Choices, batches, configs, decided, records_of
from tests.unit.objective_data import sample_at

VERDICTS = tuple(sorted(HAS_VERDICT))
# a token's loss depends on that token alone, so a sequence may be cut anywhere
by_token = configs.filter(
    lambda config: (
        config.loss != "gspo"
        and config.correction_level == "token"
        and not (config.veto or config.off_policy_delta or config.entropy_coef)
    )
)


@settings(deadline=None, max_examples=300)
@given(batches, by_token, st.lists(st.integers(0, 60), max_size=4))
def test_a_sequence_may_be_cut_anywhere(choose: Choices, config: ObjectiveConfig, cuts: list[int]) -> None:
    kept = decided(records_of(choose, VERDICTS), config, False, CONSTANT).kept
    samples = [(row, sample_at(row)) for row in kept]
    if not samples:
        return
    rollout, mask, advantages, weights, offset = (
        torch.from_numpy(np.concatenate(parts))
        for parts in zip(
            *(
                (
                    sample.logprobs.astype(np.float64),
                    sample.loss_mask,
                    np.full(len(sample.tokens), row.advantage),
                    np.full(len(sample.tokens), row.weight),
                    (sample.tokens % 13 - 6) / 20,
                )
                for row, sample in samples
            ),
            strict=True,
        )
    )

    def trained(*edges: int) -> tuple[LossParts, torch.Tensor]:
        new = (rollout + offset).requires_grad_()
        total = None
        for at in (slice(start, end) for start, end in zip((0, *edges), (*edges, len(new)), strict=True)):
            part = policy_loss(new[at], rollout[at], advantages[at], mask[at], config, weights=weights[at])
            part.loss_sum.backward()
            total = part if total is None else total + part
        assert total is not None and new.grad is not None
        return total, new.grad

    whole, gradient = trained()
    parts, found = trained(*sorted(min(cut, len(mask)) for cut in cuts))
    assert torch.equal(found, gradient)
    for name in LossParts.__dataclass_fields__:
        np.testing.assert_allclose(getattr(parts, name).item(), getattr(whole, name).item(), rtol=1e-12, atol=1e-14)


@settings(deadline=None, max_examples=500)
@given(batches)
def test_advantages_of_a_group_sum_to_zero_when_all_its_attempts_train(choose: Choices) -> None:
    members: dict[str, list[float | None]] = {}
    for decision in decided(records_of(choose, VERDICTS), ObjectiveConfig(), False, CONSTANT).decisions:
        members.setdefault(decision.group_id, []).append(decision.advantage)
    for values in members.values():
        trained = [value for value in values if value is not None]
        if len(trained) == len(values):
            assert abs(sum(trained)) < 1e-12
