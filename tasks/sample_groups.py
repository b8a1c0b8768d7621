"""Draw the step's tasks and plan its attempts and waves. Pure in (seed, step, task set): a resume draws the same."""

from __future__ import annotations

from prefect import task

from rl360.config.run import RunConfig
from rl360.errors import BadInput
from rl360.store.codec import pack
from rl360.store.layout import step_key
from rl360.store.manifest import Manifest, put_object, read_manifest
from rl360.tasksets.plan import plan_step
from rl360.tasksets.taskset import load_taskset
from tasks.durable import RULES, Job, Produced, once


@task(name="sample_groups", **RULES)
def sample_groups(config: RunConfig, step: int) -> Manifest:
    """Write `groups.msgpack`: groups, and their attempts laid out in waves."""
    return once(config, step, "sample_groups", _sample)


def _sample(job: Job) -> Produced:
    taskset = load_taskset(job.config.taskset.path)
    first = read_manifest(job.store, job.run, 0, job.name)
    if first is not None and first.info["taskset_digest"] != taskset.digest:
        raise BadInput(
            f"task set {taskset.spec} is not what run {job.run} started with (digest {taskset.digest[:12]}, was "
            f"{first.info['taskset_digest'][:12]}): restore it, or start a run under another name"
        )
    plan = plan_step(taskset, job.config, job.step)
    ref = put_object(job.store, step_key(job.run, job.step, "groups.msgpack"), pack(plan.to_wire()))
    counts = {"groups": len(plan.groups), "attempts": plan.attempts, "waves": len(plan.waves)}
    counts["wave_size"] = max(len(wave) for wave in plan.waves)
    return Produced(objects=[ref], counts=counts, info={"taskset_digest": taskset.digest})
