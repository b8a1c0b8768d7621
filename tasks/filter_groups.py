"""Filter: decide about every attempt and write the batch the trainer reads."""

from __future__ import annotations

from collections import Counter

from prefect import task

from rl360.config.run import RunConfig
from rl360.objective.filters import filter_groups as decide
from rl360.store.codec import pack
from rl360.store.layout import step_key
from rl360.store.manifest import Manifest, put_object
from tasks.collect import read_records
from tasks.durable import RULES, Job, Produced, once


@task(name="filter_groups", **RULES)
def filter_groups(config: RunConfig, step: int, weight_version: str) -> Manifest:
    """Write `filter.msgpack`: references to kept samples with advantages, and every attempt's reason."""
    return once(config, step, "filter_groups", lambda job: _filter(job, weight_version))


def _filter(job: Job, weight_version: str) -> Produced:
    result = decide(
        read_records(job),
        job.config.objective,
        expected_version=weight_version,
        max_seq_len=job.config.rollout.max_seq_len,
        loss_constant=job.config.loss_constant,
        routing_replay=job.config.trainer.routing_replay,
    )
    ref = put_object(job.store, step_key(job.run, job.step, "filter.msgpack"), pack(result.to_wire(job.run, job.step)))
    reasons = Counter(str(decision.bucket) for decision in result.decisions)
    return Produced(
        objects=[ref], counts={**reasons, "kept": len(result.kept), "trained_tokens": result.trained_tokens}
    )
