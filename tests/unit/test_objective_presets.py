"""Presets fill in what a config leaves out; what would do nothing, or twice the same, is refused with the reason."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from rl360.config.run import ObjectiveConfig, RunConfig, frozen_differences
from rl360.errors import BadInput
from rl360.objective.presets import PRESETS


def objective(**fields: Any) -> ObjectiveConfig:
    return RunConfig.parse({"objective": fields}).objective


def test_the_default_is_todays_objective() -> None:
    """Spelled out, so that no change of a preset or a default moves a run that names neither."""
    assert objective().model_dump() == {
        "preset": "rl360",
        "estimator": "grpo",
        "normalize_std": False,
        "gamma": 1.0,
        "gae_lambda": 1.0,
        "whiten_advantages": False,
        "critic_lambda": None,
        "critic_lr": None,
        "critic_updates": 1,
        "critic_warmup_steps": 0,
        "value_clip": None,
        "disagreement_rtol": 1e-6,
        "format_error_penalty": 0.0,
        "filter_on": "raw",
        "loss": "ppo",
        "old_policy": "recomputed",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dual_clip": None,
        "entropy_coef": 0.0,
        "kl_coef": 0.0,
        "kl_estimator": "k3",
        "kl_in": "loss",
        "reference": "",
        "correction": "truncate",
        "correction_level": "token",
        "correction_low": None,
        "correction_high": 2.0,
        "veto": None,
        "off_policy_delta": None,
        "reduction": "token_mean",
        "reduction_constant": None,
    }
    assert PRESETS["rl360"] == {}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_fields_and_the_defaults(name: str) -> None:
    found, default = objective(preset=name), objective()
    assert found.model_dump() == default.model_dump() | PRESETS[name] | {"preset": name}
    frozen = RunConfig.parse({"objective": {"preset": name}})
    assert RunConfig.parse(frozen.to_json()) == frozen
    if name != "rl360":
        assert found.model_copy(update={"preset": "rl360"}) != default, "a preset that changes nothing"
        assert frozen_differences(RunConfig(), frozen)[0].startswith("objective.")


def test_the_config_names_every_preset() -> None:
    assert set(get_args(ObjectiveConfig.model_fields["preset"].annotation)) == set(PRESETS)


def test_given_fields_win() -> None:
    found = objective(preset="gspo", clip_high=0.01, reduction="token_mean")
    assert (found.loss, found.clip_low, found.clip_high, found.reduction) == ("gspo", 3e-4, 0.01, "token_mean")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"preset": "none"}, "objective.preset: Input should be 'rl360', 'grpo'"),
        ({"old_policy": "kept"}, "objective.old_policy kept and trainer.kept_versions of 1 or more go together"),
        ({"kl_coef": -0.1}, "objective.kl_coef: Input should be greater than or equal to 0"),
        ({"kl_estimator": "k2"}, "kl_estimator says nothing with kl_coef 0"),
        ({"kl_in": "reward", "reference": "/m"}, "kl_in, reference says nothing with kl_coef 0"),
        ({"preset": "grpo", "kl_coef": 0, "kl_in": "reward"}, "kl_in says nothing with kl_coef 0"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "k1 in the loss is no penalty, its gradient has mean 0"),
        ({"kl_coef": 0.1, "kl_in": "reward"}, "kl_in reward needs kl_estimator: k1 has the KL's gradient there"),
        ({"old_policy": "rollout"}, "correction truncate with old_policy rollout corrects twice"),
        ({"loss": "gspo"}, "loss gspo needs old_policy rollout or kept: with one optimizer step a batch"),
        ({"preset": "cispo", "old_policy": "recomputed"}, "loss cispo needs old_policy rollout or kept"),
        ({"dual_clip": 3.0}, "dual_clip needs old_policy rollout or kept"),
        ({"preset": "gspo", "dual_clip": 3.0}, "dual_clip belongs to loss ppo, not gspo"),
        ({"dual_clip": 1.0}, "objective.dual_clip: Input should be greater than 1"),
        ({"preset": "grpo", "correction_high": 3.0}, ": correction_high says nothing with correction off (preset grpo"),
        ({"correction": "off", "correction_level": "sequence"}, ": correction_level says nothing with correction off"),
        ({"preset": "mis", "correction": "off"}, "(preset mis sets correction mask, correction_level sequence, corr"),
        ({"disagreement_rtol": 1.0}, "disagreement_rtol 1 is not below 1: any two rewards of one sign would agree"),
        ({"correction_low": 0.5}, "correction_low says nothing with correction truncate"),
        ({"correction": "clip"}, "correction clip needs correction_low"),
        ({"preset": "icepop", "correction_low": 5.0}, "correction_low 5.0 is not below correction_high 5.0"),
        ({"estimator": "rloo", "normalize_std": True}, "normalize_std belongs to estimator grpo; rloo has its own"),
        ({"reduction_constant": 100.0}, "reduction_constant says nothing with reduction token_mean"),
        ({"veto": 1.0}, "objective.veto: Input should be less than 1"),
    ],
)
def test_refusals_say_why_in_one_line(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInput) as error:
        objective(**fields)
    assert why in str(error.value)
    assert "\n" not in str(error.value)


def test_a_preset_under_a_full_set_of_default_fields_is_refused_not_ignored() -> None:
    """What a form that sends every field makes of a preset picked in it."""
    full = objective().model_dump() | {"preset": "grpo"}
    with pytest.raises(BadInput, match=r"preset grpo says nothing, .*: leave out clip_high, correction, kl_coef, norm"):
        objective(**full)
    assert objective(**(full | {"clip_high": 0.2})).preset == "grpo", "one field of the recipe makes it one"


def test_the_divisor_of_a_constant_is_what_the_planned_attempts_could_hold() -> None:
    planned = {"taskset": {"groups_per_step": 4, "attempts_per_group": 8}, "rollout": {"max_seq_len": 100}}
    assert RunConfig.parse(planned).loss_constant == 3200
    assert RunConfig.parse(planned | {"objective": {"preset": "dr_grpo", "reduction_constant": 7}}).loss_constant == 7


def test_a_run_frozen_before_there_was_a_kl_goes_on_without_one() -> None:
    """The recipe got its KL later: a run that trained without must not find one in its config after an update."""
    frozen = objective(preset="grpo").model_dump()
    old = {name: value for name, value in frozen.items() if not name.startswith("kl_") and name != "reference"}
    assert objective(**old).kl_coef == 0 and objective(**frozen).kl_coef == 0.04
    assert objective(preset="grpo", clip_high=0.3).kl_coef == 0.04


def test_kept_versions_and_a_kept_old_policy_go_together() -> None:
    kept = {"objective": {"old_policy": "kept"}, "trainer": {"kept_versions": 2}}
    assert RunConfig.parse(kept).trainer.kept_versions == 2
    for lacking in ({"trainer": {"kept_versions": 2}}, {"objective": {"old_policy": "kept"}}):
        with pytest.raises(BadInput, match="go together"):
            RunConfig.parse(lacking)
    ratios = {"loss": "gspo", "old_policy": "kept", "correction": "truncate"}
    assert RunConfig.parse(kept | {"objective": ratios}).objective.loss == "gspo", (
        "a kept policy leaves a ratio to clip"
    )


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_variance"])
@pytest.mark.parametrize("where", ["loss", "reward"])
def test_every_kl_is_in_the_loss_or_the_reward_but_one(kind: str, where: str) -> None:
    fields = {"objective": {"kl_coef": 0.1, "kl_in": where, "kl_estimator": kind}}
    if (kind, where) == ("k1", "loss"):
        with pytest.raises(BadInput, match="its gradient has mean 0"):
            RunConfig.parse(fields)
    else:
        assert RunConfig.parse(fields).objective.kl_estimator == kind
