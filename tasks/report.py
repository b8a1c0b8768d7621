"""Close the books of a step: build its ledger, check that it balances, write it, leave one artifact for a person.

This is a step's last task; its manifest is what makes the step count as finished.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.events import emit_event

from rl360 import step_work
from rl360.agents.budgets import quarantined
from rl360.config.run import RunConfig
from rl360.errors import ServiceError
from rl360.report.alerts import cache_fall
from rl360.report.figures import run_figures
from rl360.report.markdown import ARTIFACT_DPI, step_markdown
from rl360.step_work import Produced
from rl360.store.manifest import Manifest, read_manifest
from tasks.durable import RULES, Job, once

_READERS = 8


@task(name="report", **RULES)
def report(config: RunConfig, step: int) -> Manifest:
    """Write `ledger.msgpack` and the step's markdown artifact."""
    return once(config, step, "report", _report)


def _report(job: Job) -> Produced:
    produced, ledger = step_work.close_books(job.store, job.config, job.step)
    earlier = _earlier(job)
    fall = cache_fall(earlier, produced.info)
    if fall is not None:
        job.log.warning("%s", fall)
        emit_event(**fall.event(job.run, job.step))
    figures = run_figures([*earlier, produced.info], dpi=ARTIFACT_DPI)
    warnings = [] if fall is None else [str(fall)]
    markdown = step_markdown(ledger, figures, quarantined(job.store, job.run), warnings=warnings)
    try:
        create_markdown_artifact(
            key=f"{job.run}-step-{job.step:06}",
            markdown=markdown,
            description=f"Step {job.step} of {job.run}: where every attempt and token went",
        )
    except httpx.HTTPError as error:
        raise ServiceError(f"Prefect did not take the artifact of step {job.step}: {error!r}"[:300]) from None
    return produced


def _earlier(job: Job) -> list[dict[str, Any]]:
    """The summaries of the run's earlier steps, from the manifests of this task: small, however large the steps."""
    with ThreadPoolExecutor(_READERS, thread_name_prefix="summaries") as readers:
        manifests = readers.map(lambda step: read_manifest(job.store, job.run, step, "report"), range(job.step))
    return [manifest.info for manifest in manifests if manifest is not None]
