"""Where every object lives. The one place that spells a key (DESIGN, "Objects in the store")."""

from __future__ import annotations

import re
from hashlib import sha256

from rl360.errors import BadInput

RUN_PATTERN = r"^[a-z0-9][a-z0-9-]{1,40}$"


def check_run(run: str) -> str:
    """Return `run` when it can name a run, else `BadInput`."""
    if not re.fullmatch(RUN_PATTERN, run):
        raise BadInput(f"run name {run!r}: use 2 to 41 of a-z, 0-9 and '-', not starting with '-'")
    return run


def run_config_key(run: str) -> str:
    return f"{check_run(run)}/config.json"


def run_target_key(run: str) -> str:
    """How many steps the run was last asked to reach (`config.json` keeps the number it was started with)."""
    return f"{check_run(run)}/target.json"


def step_prefix(run: str, step: int) -> str:
    return f"{check_run(run)}/steps/{step:06}/"


def step_key(run: str, step: int, name: str) -> str:
    """Key of a step's object: name is e.g. `groups.msgpack`, `records.msgpack`, `filter.msgpack`, `train.json`."""
    return step_prefix(run, step) + name


def attempts_prefix(run: str, step: int, wave: int) -> str:
    return step_key(run, step, f"attempts/{wave:04}/")


def attempts_key(run: str, step: int, wave: int, number: int) -> str:
    """Records of a wave that were stored together: the `number`th such object of the wave."""
    return attempts_prefix(run, step, wave) + f"{number:06}.msgpack"


def merged_key(run: str, step: int, wave: int, attempt_id: str) -> str:
    """The samples of an attempt, written by the session server that held them."""
    return step_key(run, step, f"merged/{wave:04}/{attempt_id}.msgpack")


def wave_key(run: str, step: int, wave: int) -> str:
    """The table of a wave's records."""
    return step_key(run, step, f"waves/{wave:04}.msgpack")


def manifest_key(run: str, step: int, task: str) -> str:
    return step_key(run, step, f"manifests/{task}.json")


def actor_prefix(run: str, version: int | None = None) -> str:
    """The kept weights of a version; of all of them, without one."""
    return f"{check_run(run)}/actors/" + ("" if version is None else f"{version:06}/")


def reference_key(run: str) -> str:
    """What the run's reference policy must hash to."""
    return f"{check_run(run)}/reference.json"


def checkpoint_prefix(run: str, step: int) -> str:
    return f"{check_run(run)}/checkpoints/{step:06}/"


def reply_key(run: str, attempt_id: str) -> str:
    """What the sandbox servers answer about an attempt; its claim lies beside it. Clients of other trainers name runs
    and attempts as they like, or not at all."""
    folder = run if re.fullmatch(RUN_PATTERN, run) else f"_replies/{_plain(run)}"
    return f"{folder}/replies/{_plain(attempt_id)}.json"


def quarantine_prefix(run: str) -> str:
    """The run's tasks whose sandboxes do not start, one object each."""
    return f"{check_run(run)}/quarantine/"


def quarantine_key(run: str, task_id: str) -> str:
    return quarantine_prefix(run) + f"{_plain(task_id)}.json"


def _plain(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9_.-]{1,200}", text) else sha256(text.encode()).hexdigest()
