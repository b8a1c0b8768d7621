"""The plan of a step: which tasks are drawn, as which groups, their attempts laid out in waves.

A group is a draw: the same task drawn twice gives two groups. All attempts of a group are in one wave where the wave
is large enough, so that they share their prompt in one engine's prefix cache and finish together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rl360.agents.rollout import AttemptSpec
from rl360.config.run import RunConfig
from rl360.errors import CorruptObject
from rl360.sessions.sample import AttemptRecord
from rl360.tasksets.mix import History, learned
from rl360.tasksets.taskset import TaskSet, draw, instead

PLAN_SCHEMA = 2
READS = (1, 2)  # 1 knew no images, its attempts are placed by their tasks, and drew quarantined tasks too


@dataclass(frozen=True)
class StepPlan:
    """groups: group id -> task id, in draw order; waves: the attempts of each wave; history: what the run knew of its
    tasks when it drew by difficulty, else empty; quarantined: tasks that it did not draw; schema: what it was planned
    under."""

    groups: dict[str, str]
    waves: list[list[AttemptSpec]]
    history: History = field(default_factory=dict)
    quarantined: list[str] = field(default_factory=list)
    schema: int = PLAN_SCHEMA

    @property
    def attempts(self) -> int:
        return sum(len(wave) for wave in self.waves)

    def to_wire(self) -> dict[str, Any]:
        return {
            "schema_version": self.schema,
            "groups": self.groups,
            "waves": [[_wire_of(spec) for spec in wave] for wave in self.waves],
            **({"history": self.history} if self.history else {}),
            **({"quarantined": self.quarantined} if self.quarantined else {}),
        }

    @classmethod
    def from_wire(cls, wire: Any, key: str) -> StepPlan:
        if not isinstance(wire, dict) or wire.get("schema_version") not in READS:
            raise CorruptObject(key, f"is not a step plan of schema {' or '.join(map(str, READS))}")
        try:
            waves = [[AttemptSpec(**spec) for spec in wave] for wave in wire["waves"]]
            known = dict(wire.get("history", {})), list(wire.get("quarantined", []))
            return cls(dict(wire["groups"]), waves, *known, wire["schema_version"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptObject(key, f"step plan lacks or misspells a field ({error})") from None


def _wire_of(spec: AttemptSpec) -> dict[str, str]:
    return {name: value for name, value in asdict(spec).items() if value or name != "image"}


Last = tuple[StepPlan, Sequence[AttemptRecord]] | None
NEW = StepPlan({}, [])


def plan_step(taskset: TaskSet, config: RunConfig, step: int, last: Last = None, like: StepPlan = NEW) -> StepPlan:
    """Draw `groups_per_step` tasks and lay out their attempts in waves of at most `wave_size`, groups kept whole.
    `last`: plan and records of the step before, where the run draws by difficulty. `like`: under its schema, around
    what it had in quarantine, with the images that its tasks had."""
    history = None if last is None else learned(last[0].history, last[1])
    images = {spec.task_id: spec.image for wave in like.waves for spec in wave}
    groups: dict[str, str] = {}
    specs: list[AttemptSpec] = []
    asked = config.taskset
    drawn = draw(taskset, config.seed, step + config.steps_before, asked.groups_per_step, asked.weights, history)
    for index, task_id in enumerate(instead(taskset, drawn, like.quarantined, asked.weights)):
        group_id = f"s{step:06}-g{index:03}"
        groups[group_id] = task_id
        task = taskset[task_id]
        image = images.get(task_id, task.image) if like.schema > 1 else ""
        specs.extend(
            AttemptSpec(f"{group_id}-a{slot:02}", group_id, task_id, str(task.path), task.domain, image)
            for slot in range(config.taskset.attempts_per_group)
        )
    size, whole = config.rollout.wave_size, config.taskset.attempts_per_group
    size -= size % whole if size >= whole else 0
    waves = [specs[start : start + size] for start in range(0, len(specs), size)]
    return StepPlan(groups, waves, history or {}, like.quarantined, like.schema)
