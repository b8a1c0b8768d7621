"""Published recipes as values of `objective`'s fields. A preset fills in fields that a config leaves out.

`rl360` is the defaults. A recipe is the part of its paper that these fields can say; docs/objective.md lists what it
leaves out. Values that a source does not give are the defaults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

# PPO's bounds, no weight against the sampler: what papers before the trainer-sampler gap was written about assume
_PLAIN: dict[str, Any] = {"clip_high": 0.2, "correction": "off"}
# the ratio against what the engine reported: the sampler's log-probs, not recomputed
_AGAINST_ROLLOUT: dict[str, Any] = {"old_policy": "rollout", "correction": "off"}

PRESETS: dict[str, dict[str, Any]] = {
    "rl360": {},
    # the KL's estimator k3 is the default; its coefficient: section 4.2 of the paper
    "grpo": {**_PLAIN, "normalize_std": True, "reduction": "sample_mean", "kl_coef": 0.04},
    "dr_grpo": {**_PLAIN, "reduction": "constant"},
    "dapo": {"normalize_std": True, "correction": "off"},
    "rloo": {**_PLAIN, "estimator": "rloo", "reduction": "constant"},
    "reinforce_pp": {**_PLAIN, "estimator": "reinforce_pp"},
    "reinforce_pp_baseline": {**_PLAIN, "estimator": "reinforce_pp_baseline"},
    "gspo": _AGAINST_ROLLOUT
    | {"loss": "gspo", "normalize_std": True, "clip_low": 3e-4, "clip_high": 4e-4, "reduction": "sample_mean"},
    "cispo": {**_AGAINST_ROLLOUT, "loss": "cispo", "normalize_std": True, "clip_low": 1.0, "clip_high": 4.0},
    "icepop": {"correction": "mask", "correction_low": 0.5, "correction_high": 5.0},
    "mis": {"correction": "mask", "correction_level": "sequence", "correction_high": 2.0},
    "mis_geometric": {"correction": "mask", "correction_level": "geometric", "veto": 1e-4}
    | {"correction_low": 0.999, "correction_high": 1.001},
    "ppo": _PLAIN
    | {"estimator": "gae", "gae_lambda": 0.95, "whiten_advantages": True, "critic_updates": 4, "value_clip": 0.2},
}
# what `objective.preset` may be: its names, once
if TYPE_CHECKING:
    Preset = str
else:
    Preset = Literal[tuple(PRESETS)]
