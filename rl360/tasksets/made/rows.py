"""Tasks from a file of rows: one JSON object a line (.jsonl), or one row each (.parquet). docs/tasks.md has the fields.

Every row is checked before the first is used; what is wrong is told by file, line and field, up to `MAX_TOLD` rows.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rl360.errors import BadInput
from rl360.harbor.task import SCHEMA_VERSIONS
from rl360.tasksets.made import Source

FORMAT = "rl360 rows 1"  # part of the digest: raised when the same row becomes other files
MAX_TOLD = 10
MAX_ROW_BYTES = 4 << 20
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 1024
Numbered = tuple[str, Any]  # where a row is, the row or why it cannot be read


class Row(BaseModel):
    """One task. `files`: of the workspace; `tests`: of tests/, with test.sh; `solution`: text of solve.sh."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    id: str = Field(pattern=r"^[!-~][ -~]{0,199}$")
    instruction: str = Field(min_length=1)
    tests: dict[str, str]
    files: dict[str, str] = Field(default_factory=dict)
    solution: str = ""
    domain: str = ""
    workdir: str = "/app"
    agent_timeout_s: float = Field(600.0, gt=0, le=86_400)
    verifier_timeout_s: float = Field(600.0, gt=0, le=86_400)
    memory_mb: int = Field(512, ge=16, le=1 << 20)
    cpus: float = Field(1.0, gt=0, le=1024)

    @field_validator("tests", "files", mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        """A column of a table holds them as JSON text."""
        return _loads(value) if isinstance(value, str) else value

    @field_validator("tests", "files")
    @classmethod
    def _plain(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if posixpath.normpath(name) != name or name.startswith(("/", "..")) or name in (".", "") or "\0" in name:
                raise ValueError(f"{name!r} is not a plain relative path")
            if (longest := max(len(part.encode()) for part in name.split("/"))) > MAX_NAME_BYTES:
                raise ValueError(f"{name[:40]!r}...: a name of {longest} bytes, limit {MAX_NAME_BYTES}; shorten it")
            if len(name.encode()) > MAX_PATH_BYTES:
                raise ValueError(f"{name[:40]!r}...: {len(name.encode())} bytes, limit {MAX_PATH_BYTES}; shorten it")
        if nested := next((n for n in value if any(other.startswith(f"{n}/") for other in value)), None):
            raise ValueError(f"{nested!r} is a file and a folder")
        return value

    @model_validator(mode="after")
    def _whole(self) -> Row:
        if not self.instruction.strip():
            raise ValueError("instruction is blank")
        if not {"test.sh", "rl360_judge.toml"} & set(self.tests):
            raise ValueError("tests has no test.sh")
        if "Dockerfile" in self.files:
            raise ValueError("files has a Dockerfile, which is no file of the workspace")
        return self

    @property
    def folder(self) -> str:
        return re.sub(r"[^A-Za-z0-9_.-]", "_", self.id).lstrip(".") or "task"

    def task_files(self) -> dict[str, str]:
        """Relative path -> text of the Harbor task directory."""
        made = {"task.toml": self._toml(), "instruction.md": self.instruction}
        made |= {f"environment/{name}": text for name, text in self.files.items()}
        made |= {f"tests/{name}": text for name, text in self.tests.items()}
        return made | ({"solution/solve.sh": self.solution} if self.solution else {})

    def _toml(self) -> str:
        quoted = {name: json.dumps(getattr(self, name), ensure_ascii=False) for name in ("id", "domain", "workdir")}
        metadata = f"[metadata]\ndomain = {quoted['domain']}\n" if self.domain else ""
        return (
            f'schema_version = "{SCHEMA_VERSIONS[-1]}"\n[task]\nname = {quoted["id"]}\n{metadata}'
            f"[agent]\ntimeout_sec = {self.agent_timeout_s}\n[verifier]\ntimeout_sec = {self.verifier_timeout_s}\n"
            f"[environment]\nmemory_mb = {self.memory_mb}\ncpus = {self.cpus}\nworkdir = {quoted['workdir']}\n"
        )


def source(path: Path) -> Source:
    """The tasks of a file. Its rows are read when they are asked for."""
    digest = sha256(FORMAT.encode())
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return Source(path.stem, digest.hexdigest(), lambda: _tasks(path))


def _tasks(path: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    rows, wrong, seen = [], [], dict[str, str]()
    for where, value in READERS[path.suffix](path):
        try:
            row = _row(value)
            if row.folder in seen:
                raise ValueError(f"id: {row.id!r} makes the folder {row.folder}, as {seen[row.folder]} does")
            seen[row.folder] = where
            rows.append(row)
        except ValueError as error:
            wrong.append(f"{where}: {error}")
            if len(wrong) == MAX_TOLD:
                break
    if wrong:
        raise BadInput("; ".join([f"{path}: {wrong[0]}", *wrong[1:]]))
    if not rows:
        raise BadInput(f"{path}: holds no rows; docs/tasks.md tells what one is")
    for row in rows:
        yield row.folder, row.task_files()


def _row(value: Any) -> Row:
    """Raises ValueError in one line."""
    if isinstance(value, ValueError):
        raise value
    if not isinstance(value, dict):
        raise ValueError(f"is {type(value).__name__}, expected an object")
    try:
        return Row.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        unknown = first["type"] == "extra_forbidden"
        said = f"unknown field; it may have {', '.join(Row.model_fields)}" if unknown else first["msg"]
        said = said.removeprefix("Value error, ")
        if first["type"] not in ("extra_forbidden", "value_error") and isinstance(first["input"], str | int | float):
            said += f", not {first['input']!r:.60}"
        raise ValueError(f"{where}: {said}" if where else said) from None


def _loads(text: bytes | str) -> Any:
    """JSON, strictly: no NaN, no half of a character, no key twice in an object. Raises ValueError."""
    try:
        orjson.loads(text)
        return json.loads(text, object_pairs_hook=_unique)  # the other parser sees no double key, this one lets NaN in
    except (orjson.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for number, (name, _) in enumerate(pairs) if name in dict(pairs[:number]))
        raise ValueError(f"the key {twice!r} is there twice; remove one")
    return found


def _json_lines(path: Path) -> Iterator[Numbered]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_ROW_BYTES + 1):
            number += 1
            if len(line) > MAX_ROW_BYTES:
                yield f"line {number}", ValueError(f"over {MAX_ROW_BYTES} bytes")
                return
            if line.strip():
                try:
                    yield f"line {number}", _loads(line)
                except ValueError as error:
                    yield f"line {number}", error


def _parquet(path: Path) -> Iterator[Numbered]:
    try:
        import duckdb
    except ImportError:
        raise BadInput(f"{path}: reading .parquet needs duckdb; pip install 'rl360[parquet]', or use .jsonl") from None
    try:
        with duckdb.connect(config={"enable_external_access": True}) as reader:
            found = reader.execute("select * from read_parquet(?)", [str(path)])
            names = [column[0] for column in found.description]
            number = 0
            while batch := found.fetchmany(1000):
                for values in batch:
                    number += 1
                    given = zip(names, values, strict=True)
                    yield f"row {number}", {name: value for name, value in given if value is not None}
    except duckdb.Error as error:
        raise BadInput(f"{path}: not a parquet file that can be read ({' '.join(str(error).split())[:200]})") from None


READERS: dict[str, Callable[[Path], Iterator[Numbered]]] = {".jsonl": _json_lines, ".parquet": _parquet}
