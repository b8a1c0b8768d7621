"""Harbor task directories: `load_task(dir)` gives a frozen `Task` or one line naming the path, the value and the fix.

Shape: `task.toml`, `instruction.md`, `environment/` (what the working directory is made from: rl360.harbor.dockerfile),
`tests/test.sh`, `tests/rl360_judge.toml` for tasks that an LLM judges (docs/judges.md; test.sh may then be missing),
and `solution/solve.sh` for tasks that have an oracle.
"""

from __future__ import annotations

import os
import posixpath
import tomllib
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rl360.errors import BadInput
from rl360.harbor.dockerfile import Files, text_of, workspace_files

SCHEMA_VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
_NAMES = ("usr", "etc", "bin", "sbin", "lib", "lib64", "proc", "dev", "sys", "tests", "logs", "solution")
RESERVED = ("/", *map("/{}".format, _NAMES))
# what else a sandbox has of its own: in a verifier's it must be new, so an agent's files go to none of it
OWN = (*RESERVED[1:], "/tmp", "/run", "/home/agent", "/opt/python", "/lib32", "/libx32")
JUDGE_FILE = "tests/rl360_judge.toml"
PARTS = ("task.toml", "instruction.md", "environment", "environment/Dockerfile", "tests", JUDGE_FILE, "solution")
T = TypeVar("T", bound="_Table")


class _Table(BaseModel):
    """A table of task.toml: unknown keys are refused, so that a typo cannot silently change a task."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("env", check_fields=False)
    @classmethod
    def _settable(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not name or "=" in name or "\0" in name + text:
                raise ValueError(
                    f"cannot set {name!r}: a name is not empty and has no '=', and neither part a NUL byte"
                )
        return value


class TaskTable(_Table):
    name: str = Field("", max_length=200)
    description: str = ""
    authors: list[dict[str, str]] = Field(default_factory=list)
    keywords: list[str] = Field(default_factory=list)


class AgentTable(_Table):
    timeout_sec: float = Field(600.0, gt=0, le=86_400)
    user: str | int | None = None


class VerifierTable(_Table):
    timeout_sec: float = Field(600.0, gt=0, le=86_400)
    env: dict[str, str] = Field(default_factory=dict)
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] = "shared"


class EnvironmentTable(_Table):
    build_timeout_sec: float = Field(600.0, gt=0, le=86_400)
    docker_image: str | None = None
    cpus: float = Field(1.0, gt=0, le=1024)
    memory_mb: int = Field(512, ge=16, le=1 << 20)
    storage_mb: int = Field(1024, ge=1, le=1 << 24)
    network_mode: Literal["no-network", "public", "allowlist"] = "no-network"
    workdir: str = "/app"
    env: dict[str, str] = Field(default_factory=dict)

    @field_validator("workdir")
    @classmethod
    def _usable(cls, value: str) -> str:
        if not value.startswith("/") or posixpath.normpath(value) != value or any(c in value for c in "\0\n"):
            raise ValueError("must be an absolute, normalised path such as /app")
        if value == "/" or any(f"{value}/".startswith(f"{own}/") or own.startswith(f"{value}/") for own in OWN):
            raise ValueError(f"is, is in or holds a system folder; choose a path such as /app, beside {', '.join(OWN)}")
        return value


class SolutionTable(_Table):
    env: dict[str, str] = Field(default_factory=dict)


class TaskConfig(_Table):
    schema_version: str = SCHEMA_VERSIONS[-1]
    task: TaskTable = TaskTable()
    metadata: dict[str, Any] = Field(default_factory=dict)
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: SolutionTable = SolutionTable()

    @field_validator("schema_version")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in SCHEMA_VERSIONS:
            raise ValueError(f"is not one of {', '.join(SCHEMA_VERSIONS)}")
        return value


class JudgeTerms(_Table):
    """What an LLM judges a task by: `tests/rl360_judge.toml`. In tests/, so that `verifier_digest` covers it.

    The judge's score becomes the reward: (score - score_min) / (score_max - score_min), or with a `threshold` 1 at or
    above it and 0 below. `files`: names, folders or patterns under the working directory; None: whatever differs from
    `environment/`. `max_bytes` bounds what is shown of the agent's work.
    """

    mode: Literal["only", "after_script"] = "only"
    rubric: str = Field(min_length=1, max_length=65_536)
    score_min: float = Field(0.0, allow_inf_nan=False)
    score_max: float = Field(1.0, allow_inf_nan=False)
    threshold: float | None = None
    transcript: bool = True
    files: tuple[str, ...] | None = Field(None, max_length=64)
    max_bytes: int = Field(65_536, ge=1024, le=4 << 20)

    @model_validator(mode="after")
    def _sense(self) -> JudgeTerms:
        if not self.score_min < self.score_max or self.score_max - self.score_min == float("inf"):
            raise ValueError(f"score_min {self.score_min:g} must be below score_max {self.score_max:g}")
        if self.threshold is not None and not self.score_min < self.threshold <= self.score_max:
            raise ValueError(f"threshold {self.threshold:g} must be above score_min and at most score_max")
        outside = [
            n for n in self.files or () if posixpath.normpath(n) != n or n.startswith(("/", "../")) or n in (".", "..")
        ]
        if outside:
            raise ValueError(f"files: {outside[0]!r} is not a plain path under the working directory")
        if not self.transcript and self.files == ():
            raise ValueError("shows the judge nothing; leave out files or transcript = false")
        return self

    def reward(self, score: float) -> float:
        """The reward of a score within the range: in [0, 1]."""
        if self.threshold is not None:
            return float(score >= self.threshold)
        return (score - self.score_min) / (self.score_max - self.score_min)


class Task(BaseModel):
    """One task, checked. `verifier_digest`: sha256 over the tests tree; it goes into every verdict."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    path: Path
    instruction: str
    config: TaskConfig
    verifier_digest: str
    files: Files
    judge: JudgeTerms | None = None

    @property
    def tests_dir(self) -> Path:
        return self.path / "tests"


def load_task(directory: Path | str) -> Task:
    """Read and check a task directory. Raises `BadInput` with one line."""
    path = Path(os.path.abspath(directory))
    if not path.is_dir():
        raise BadInput(f"{path}: no such task directory; give the folder that holds task.toml")
    for name in PARTS:
        if (path / name).is_symlink():
            raise BadInput(f"{path / name}: a link, and what it points to may lie outside the task; put a copy there")
    judge = _toml(path / JUDGE_FILE, JudgeTerms) if (path / JUDGE_FILE).is_file() else None
    script = () if judge is not None and judge.mode == "only" else ("tests/test.sh",)
    for name in ("task.toml", "instruction.md", *script):
        if not (path / name).is_file():
            raise BadInput(f"{path}: no {name}; a Harbor task needs task.toml, instruction.md and tests/test.sh")
    config = _toml(path / "task.toml", TaskConfig)
    instruction = text_of(path / "instruction.md").strip()
    if not instruction:
        raise BadInput(f"{path / 'instruction.md'}: empty; write what the agent is to do")
    return Task(
        id=config.task.name or path.name,
        path=path,
        instruction=instruction,
        config=config,
        verifier_digest=tree_digest(path / "tests"),
        files=workspace_files(path / "environment", config.environment.workdir),
        judge=judge,
    )


def image_group(task: Task, default: str | None = None) -> str:
    """Which tasks share an image, and with it one cap of sandboxes, what is warm, and the servers they are placed on:
    those of one `docker_image`. A task that names none has the provider's `default`; without that, as under bubblewrap
    or where the provider is not known, it is a group of its own."""
    return task.config.environment.docker_image or default or task.id


def _toml(path: Path, kind: type[T]) -> T:
    try:
        return kind.model_validate(tomllib.loads(text_of(path)))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadInput(f"{path}: not TOML ({error}); fix that line") from None
    except ValidationError as error:
        found = error.errors()
        first = next((item for item in found if item["type"] == "extra_forbidden"), found[0])
        where, said = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        if not where:  # of the whole table, whose fields are not repeated
            raise BadInput(f"{path}: {said}") from None
        what = "unknown key; remove it or fix its name" if first["type"] == "extra_forbidden" else said
        raise BadInput(f"{path}: {where} = {first['input']!r}: {what}") from None


def tree_digest(root: Path) -> str:
    """sha256 over the sorted tree: relative name, executable bit, length, content of each file; links are refused."""
    digest = sha256()
    files = [path for path in root.rglob("*") if not path.is_dir() or path.is_symlink()]
    for path in sorted(files, key=lambda item: item.relative_to(root).as_posix()):
        if path.is_symlink() or not path.is_file():
            raise BadInput(f"{path}: not a regular file; tests must hold plain files only")
        content = path.read_bytes()
        executable = bool(path.stat().st_mode & 0o111)
        head = f"{path.relative_to(root).as_posix()}\0{int(executable)}\0{len(content)}\0"
        digest.update(head.encode())
        digest.update(content)
    return digest.hexdigest()
