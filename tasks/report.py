"""Close the books of a step: build its ledger, check that it balances, write it, leave one artifact for a person.

This is a step's last task; its manifest is what makes the step count as finished.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import orjson
from prefect import task
from prefect.artifacts import create_markdown_artifact

from rl360.config.run import RunConfig
from rl360.errors import ServiceError
from rl360.ledger.metrics import step_json
from rl360.ledger.read import write_ledger
from rl360.ledger.step import build_step_ledger
from rl360.objective.filters import Decision
from rl360.report.figures import run_figures
from rl360.report.markdown import ARTIFACT_DPI, step_markdown
from rl360.store.codec import unpack
from rl360.store.manifest import Manifest, get_object, read_manifest
from tasks.collect import read_records
from tasks.durable import RULES, Job, Produced, once
from tasks.roll_out import load_plan, wave_task

_READERS = 8
_PHASES = ("sample_groups", "roll_out", "collect", "filter_groups", "train", "push_weights", "checkpoint")


@task(name="report", **RULES)
def report(config: RunConfig, step: int) -> Manifest:
    """Write `ledger.msgpack` and the step's markdown artifact."""
    return once(config, step, "report", _report)


def _report(job: Job) -> Produced:
    filtered = job.manifest("filter_groups").objects[0]
    batch = unpack(get_object(job.store, filtered), filtered.key)
    trained = job.manifest("train").objects[0]
    pushed = job.manifest("push_weights")
    ledger = build_step_ledger(
        run=job.run,
        step=job.step,
        attempts=read_records(job),
        decisions=[Decision.from_wire(wire) for wire in batch["decisions"]],
        train=orjson.loads(get_object(job.store, trained)),
        push={**pushed.info, "engines": pushed.counts["engines"]},
        phases_s=_phases(job),
    )
    ref = write_ledger(job.store, ledger)
    summary = step_json(ledger)
    markdown = step_markdown(ledger, run_figures([*_earlier(job), summary], dpi=ARTIFACT_DPI))
    try:
        create_markdown_artifact(
            key=f"{job.run}-step-{job.step:06}",
            markdown=markdown,
            description=f"Step {job.step} of {job.run}: where every attempt and token went",
        )
    except httpx.HTTPError as error:
        raise ServiceError(f"Prefect did not take the artifact of step {job.step}: {error!r}"[:300]) from None
    return Produced(objects=[ref], info=summary)


def _earlier(job: Job) -> list[dict[str, Any]]:
    """The summaries of the run's earlier steps, from the manifests of this task: small, however large the steps."""
    with ThreadPoolExecutor(_READERS, thread_name_prefix="summaries") as readers:
        manifests = readers.map(lambda step: read_manifest(job.store, job.run, step, "report"), range(job.step))
    return [manifest.info for manifest in manifests if manifest is not None]


def _phases(job: Job) -> dict[str, float]:
    """Wall seconds of each task of the step, from their manifests; the waves overlap and count once."""
    waves = [job.manifest(wave_task(wave)) for wave in range(len(load_plan(job).waves))]
    spans: dict[str, Any] = {}
    for name in _PHASES:
        parts = waves if name == "roll_out" else [job.manifest(name)]
        spans[name] = max(part.finished_at for part in parts) - min(part.started_at for part in parts)
    return spans
